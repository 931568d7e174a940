"""When a bucket's reduction runs: at once, or on a thread of its own while backward goes on.

Gloo has no streams, so overlap on the CPU takes a thread. One thread and one queue: buckets are reduced in the order in
which DDP hands them out, the same on all ranks, so collectives meet their partners. (Starting a collective from a
future's callback hangs Gloo: its order is whatever order futures complete in.) The thread uses process groups that
nothing else uses, because DDP talks on the default group meanwhile.

A reduction that fails must fail the backward pass, with its own message. A future with an exception reaches DDP as an
object of the wrong type, so the error waits here and is raised by a callback at the end of backward.

On CUDA reductions are queued on the current stream and need no thread.
"""

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

Job = Callable[[], None]
TensorFuture = torch.futures.Future[Tensor]


class Runner(Protocol):
    """Runs jobs in the order given."""

    def run(self, job: Job, result: Tensor) -> TensorFuture:
        """Run the job, some time; the future then holds ``result``."""

    def drain(self) -> None:
        """Wait for jobs that a backward pass left behind, and forget what failed in them."""

    def close(self) -> None:
        """No more jobs come."""


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

    def close(self) -> None:
        """Nothing to end."""


class FifoThread:
    """Runs jobs on one daemon thread, first in, first out. After a job that failed none runs until drain()."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Tensor, TensorFuture] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._last: TensorFuture | None = None
        threads = torch.get_num_threads()  # OpenMP counts threads for each thread that asks
        self._thread = threading.Thread(target=self._work, args=(threads,), name="lightning_sparse", daemon=True)
        self._thread.start()

    def run(self, job: Job, result: Tensor) -> TensorFuture:
        """Queue the job."""
        future: TensorFuture = torch.futures.Future()
        self._last = future
        self._jobs.put((job, result, future))
        if not _at_end_of_backward(partial(self._join, future)):
            self._join(future)  # DDP flushes a static graph after backward: nothing to overlap with
        return future

    def drain(self) -> None:
        """Wait for the last job."""
        if self._last is not None:
            self._last.wait()
        self._error = self._last = None

    def close(self) -> None:
        """End the thread once its jobs are done."""
        self._jobs.put(None)

    def _join(self, future: TensorFuture) -> None:
        future.wait()
        if self._error is not None:
            raise self._error

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)
        while (item := self._jobs.get()) is not None:
            job, result, future = item
            if self._error is None:
                try:
                    with torch.no_grad():
                        job()
                except BaseException as error:
                    self._error = error
            future.set_result(result)


def _at_end_of_backward(callback: Job) -> bool:
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:  # outside a backward pass
        return False
    return True
