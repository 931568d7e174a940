"""When a bucket's reduction runs: at once, or on a thread of its own while backward goes on.

Gloo has no streams, so overlap on the CPU takes a thread. One thread and one queue: buckets are reduced in the order in
which DDP hands them out, the same on all ranks, so collectives meet their partners. (Starting a collective from a
future's callback hangs Gloo: its order is whatever order futures complete in.) The thread uses process groups that
nothing else uses, because DDP talks on the default group meanwhile. So there is one thread to a set of groups: where a
backward pass runs through two wrapped modules, two threads would start their collectives in an order of their own.

A reduction that fails must fail the backward pass, with its own message. A future with an exception reaches DDP as an
object of the wrong type, so the error waits here and is raised by a callback at the end of backward.

On CUDA reductions are queued on the current stream and need no thread.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lightning_sparse.topology import Topology

Job = Callable[[], None]
TensorFuture = torch.futures.Future[Tensor]


class Runner(Protocol):
    """Runs jobs in the order given."""

    def run(self, job: Job, result: Tensor) -> TensorFuture:
        """Run the job, some time; the future then holds ``result``."""

    def drain(self) -> None:
        """Wait for jobs that a backward pass left behind, and forget what failed in them."""


class Inline:
    """Runs each job at once."""

    def run(self, job: Job, result: Tensor) -> TensorFuture:
        """Run the job and return a completed future; on CUDA it carries the current stream, which DDP waits for."""
        job()
        devices: list[int | str | torch.device] | None = [result.device] if result.is_cuda else None
        future: TensorFuture = torch.futures.Future(devices=devices)
        future.set_result(result)
        return future

    def drain(self) -> None:
        """Nothing waits."""


_Queue = queue.SimpleQueue[tuple[Job, Tensor, TensorFuture] | None]


class FifoThread:
    """Runs jobs on one daemon thread, first in, first out. After a job that failed no other runs until the error was
    raised. The thread ends when nobody holds this object any more."""

    def __init__(self) -> None:
        self._jobs: _Queue = queue.SimpleQueue()
        self._errors: list[BaseException] = []
        self._pending: TensorFuture | None = None
        self._backward = -1
        self._inline = Inline()
        threads = torch.get_num_threads()  # OpenMP counts threads for each thread that asks
        arguments = (self._jobs, self._errors, threads)  # not self: the thread would keep alive what ends it
        threading.Thread(target=_work, args=arguments, name="lightning_sparse", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def run(self, job: Job, result: Tensor) -> TensorFuture:
        """Queue the job."""
        backward = torch._C._current_graph_task_id()
        if backward == -1:
            return self._inline.run(job, result)  # DDP flushes a static graph after backward: nothing to overlap with
        if backward != self._backward:  # told by its id: a backward that raised half-way never came to its end
            torch.autograd.Variable._execution_engine.queue_callback(self._join)
            self._backward = backward
        future: TensorFuture = torch.futures.Future()
        self._pending = future
        self._jobs.put((job, result, future))
        return future

    def drain(self) -> None:
        """Wait for the last job."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
        self._errors.clear()

    def _join(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
        if self._errors:
            raise self._errors.pop()


_threads: "weakref.WeakValueDictionary[Topology, FifoThread]" = weakref.WeakValueDictionary()


def thread_of(topology: Topology) -> FifoThread:
    """The one thread that uses this topology's process groups."""
    thread = _threads.get(topology)
    if thread is None:
        thread = _threads[topology] = FifoThread()
    return thread


def _work(jobs: _Queue, errors: list[BaseException], threads: int) -> None:
    torch.set_num_threads(threads)
    while (item := jobs.get()) is not None:
        job, result, future = item
        if not errors:
            try:
                with torch.no_grad():
                    job()
            except BaseException as error:
                errors.append(error)
        future.set_result(result)
        del item, job, result, future  # while this thread waits it holds on to no model
