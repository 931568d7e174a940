"""When an exchange runs: at once, on threads of its own beside backward, or on a CUDA stream.

A job is a generator of three stretches: inside the node, between nodes, inside the node (see
lightning_sparse.exchange.paths.path). Gloo has no streams, so overlap on the CPU takes threads, one a lane:

    backward   bucket 0   bucket 1   bucket 2
    select                0          1          2
    exchange                         0          1          2        the slow network is never idle while there is work
    apply                                       0          1          2

Each lane is first in, first out, in the order of DDP's buckets, which is the same on all ranks; so collectives match.
(Started from callbacks of futures they would not: Gloo hangs.) No two lanes share a process group: the first uses those
of the world and of the node, the second the one between nodes, the third the node's second one, while DDP uses the
default group. Hence there is one set of lanes per topology: two modules in one backward pass share it.

An error must fail the backward pass with its own message. DDP mistakes a future with an exception for a result, so the
error is raised by a callback at the end of backward.

A job that is not part of a backward pass is begun by ``start``; ``finish`` waits for it and raises its error.

On CUDA one side stream takes the place of the threads: the host queues all three stretches at once and never waits.
"""

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.topology import Topology

Job = Iterator[None]
TensorFuture = torch.futures.Future[Tensor]
LANES = 3


class Runner:
    """Runs jobs in the order given; this one each at once."""

    def run(self, job: Job, result: Tensor) -> TensorFuture:
        """Run the job. The future completes with ``result``; on CUDA it carries the current stream, for DDP to wait."""
        for _ in job:
            pass
        devices: list[int | str | torch.device] | None = [result.device] if result.is_cuda else None
        future: TensorFuture = torch.futures.Future(devices=devices)
        future.set_result(result)
        return future

    def start(self, job: Job, result: Tensor) -> TensorFuture:
        """Run the job beside whatever the caller does until ``finish``."""
        return self.run(job, result)

    def finish(self, future: TensorFuture) -> None:
        """Wait for a job that was started; on CUDA the current stream does, not the host.

        Raises:
            Exception: the first error of a job.
        """
        future.wait()

    def wait(self) -> None:
        """Until no job is running, so that the process groups are free."""

    def drain(self) -> None:
        """Wait for jobs that a failed backward pass left running, and drop their errors."""

    def end(self) -> None:
        """Release threads; the next job starts them again."""


class SideStream(Runner):
    """Queues each job on a CUDA stream of its own, beside backward. The host never waits.

    Why no tensor is reused too early, whichever stream allocated it: each job begins by waiting for the stream that
    filled the bucket, and DDP makes that stream wait for all jobs before backward ends. So whatever the main stream
    does with a residual between two backward passes lies after the jobs that wrote it and before those that read it.
    Within backward only the bucket is shared, and ``record_stream`` informs the allocator.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, job: Job, result: Tensor) -> TensorFuture:
        """Queue the job; the future carries the side stream's event."""
        self._stream.wait_stream(torch.cuda.current_stream(result.device))
        result.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            return super().run(job, result)

    def drain(self) -> None:
        """Order the current stream after the jobs."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


_Item = tuple[Job, Tensor, TensorFuture]
_Queue = queue.SimpleQueue[_Item | None]


class FifoLanes(Runner):
    """Runs the stretches of each job on one daemon thread per lane, first in, first out. After a job has failed, no
    other runs until its error was raised. Threads start with the first job after ``end``; they stop at ``end`` if they
    are idle, and when this object is garbage collected."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []
        self._pending: TensorFuture | None = None
        self._backward = -1
        self._first: _Queue | None = None
        self._threads: list[threading.Thread] = []
        self._last_call: weakref.finalize[Any, Any] | None = None

    def _start(self) -> _Queue:
        queues: list[_Queue] = [queue.SimpleQueue() for _ in range(LANES)]
        threads = torch.get_num_threads()  # OpenMP has a number of threads for each calling thread
        for lane, jobs in enumerate(queues):
            onward = queues[lane + 1] if lane + 1 < LANES else None
            arguments = (jobs, onward, self._errors, threads)  # not self: the thread would keep alive what ends it
            self._threads.append(threading.Thread(target=_work, args=arguments, name="lightning_sparse", daemon=True))
        for thread in self._threads:
            thread.start()
        self._last_call = weakref.finalize(self, queues[0].put, None)
        return queues[0]

    def run(self, job: Job, result: Tensor) -> TensorFuture:
        """Queue the job."""
        backward = torch._C._current_graph_task_id()
        if backward == -1:
            return super().run(job, result)  # DDP flushes a static graph after backward: nothing to overlap with
        if backward != self._backward:  # by its id: a backward that raised never ran its callbacks
            torch.autograd.Variable._execution_engine.queue_callback(self._join)
            self._backward = backward
        return self.start(job, result)

    def start(self, job: Job, result: Tensor) -> TensorFuture:
        """Queue the job, of a backward pass or not."""
        future: TensorFuture = torch.futures.Future()
        self._pending = future
        if self._first is None:
            self._first = self._start()
        self._first.put((job, result, future))
        return future

    def wait(self) -> None:
        """Until the last job is done."""
        if self._pending is not None:
            self._pending.wait()

    def drain(self) -> None:
        """Wait for the last job."""
        self.wait()
        self._pending = None
        self._errors.clear()

    def end(self) -> None:
        """End the threads, unless a failed backward pass left them running: the next job has to queue behind that, and
        a thread that hangs in a collective cannot be joined."""
        idle = self._pending is None or self._pending.done()
        if self._last_call is None or not idle:
            return
        self._last_call()
        for thread in self._threads:
            thread.join()
        self._first, self._threads, self._last_call = None, [], None

    def finish(self, future: TensorFuture) -> None:
        """Wait for the job."""
        future.wait()
        self._raise()

    def _join(self) -> None:
        self.wait()
        self._pending = None
        self._raise()

    def _raise(self) -> None:
        if self._errors:
            first = self._errors[0]  # later ones, of other lanes, follow from it
            self._errors.clear()
            raise first


_lanes: "weakref.WeakValueDictionary[Topology, FifoLanes]" = weakref.WeakValueDictionary()


def lanes_of(topology: Topology) -> FifoLanes:
    """The one set of lanes that uses this topology's process groups."""
    lanes = _lanes.get(topology)
    if lanes is None:
        lanes = _lanes[topology] = FifoLanes()
    return lanes


def runner_of(topology: Topology, device: torch.device | None) -> Runner:
    """What runs jobs beside backward, for tensors on that device; None: on several."""
    if device is not None and device.type == "cpu":
        return lanes_of(topology)
    return SideStream(device) if device is not None and device.type == "cuda" else Runner()


def _work(jobs: _Queue, onward: _Queue | None, errors: list[BaseException], threads: int) -> None:
    """One lane: a stretch of each job, which then goes on to the next lane."""
    torch.set_num_threads(threads)
    while (item := jobs.get()) is not None:
        if not errors:
            try:
                with torch.no_grad():
                    next(item[0], None)
            except BaseException as error:
                errors.append(error)
        if onward is not None:
            onward.put(item)
        else:
            item[2].set_result(item[1])
        del item  # hold no reference to the model while idle
    if onward is not None:
        onward.put(None)
