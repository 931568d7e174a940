"""Runners decide when a job runs: at once, or during backward in lanes, which are CUDA streams or threads.

A job has three stages, and each stage has a lane:

    backward   bucket 0   bucket 1   bucket 2
    select                0          1          2                   inside the node
    transfer                         0          1          2        between nodes; never idle while there is work
    apply                                       0          1          2        inside the node

Each lane runs its jobs in the order of DDP's buckets, which is equal on all ranks, so collectives match. Jobs that
callbacks of futures start would have no such order, and Gloo would hang.

No two lanes share a process group: two threads must not use one, and NCCL runs the collectives of a communicator one
after the other on any stream. The first lane uses the groups of the world and of the node, the second the group between
nodes, the third a second group of the node. So two modules in one backward pass share the lanes of their topology.
Lanes on the CPU are threads, because Gloo has no streams.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_sparse.internals import after_backward, current_backward
from lightning_sparse.topology import Topology, Traffic

TensorFuture = torch.futures.Future[Tensor]
_Stage = Callable[[], Sequence[Tensor]]
LANES = 3
LAST_JOB_SECONDS = 10.0
"""Seconds that a program waits at exit for running jobs."""


class Job(Protocol):
    """Work in three stages. Each stage returns the tensors that later stages use."""

    def select(self) -> Sequence[Tensor]:
        """Work inside the node, and choose the entries to send."""

    def transfer(self) -> Sequence[Tensor]:
        """Communicate between nodes."""

    def apply(self) -> Sequence[Tensor]:
        """Work inside the node with the received messages."""


class Runner:
    """Runs each job at once."""

    def run(self, job: Job, result: Tensor) -> TensorFuture:
        """Run a job. The future completes with ``result``."""
        job.select()
        return Runner.submit_selected(self, job, result)

    def submit_selected(self, job: Job, result: Tensor, selected: Sequence[Tensor] = ()) -> TensorFuture:
        """Run a job whose ``select`` has returned ``selected``, in the background until ``finish``."""
        job.transfer()
        job.apply()
        return self._done(result)

    def _done(self, result: Tensor) -> TensorFuture:
        # On CUDA, the future carries the current stream, on which DDP waits.
        devices: list[int | str | torch.device] | None = [result.device] if result.is_cuda else None
        future: TensorFuture = torch.futures.Future(devices=devices)
        future.set_result(result)
        return future

    def finish(self, future: TensorFuture) -> None:
        """Wait for a started job, and raise its error. On CUDA the current stream waits, not the host."""
        future.wait()

    def synchronize(self) -> None:
        """Wait until no job is running, so that the process groups are free."""

    def discard_errors(self) -> None:
        """Wait for jobs that a failed backward pass left running, and drop their errors."""

    def shutdown(self) -> None:
        """End threads. The next job starts them again."""


class StreamLanes(Runner):
    """Queues the stages of each job on one CUDA stream per lane. The host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # High priority: otherwise a dozen small kernels would queue behind the kernels of backward.
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(LANES)]  # type: ignore[no-untyped-call]

    def run(self, job: Job, result: Tensor) -> TensorFuture:
        stages = (job.select, job.transfer, job.apply)
        return self._queue(zip(self._streams, stages, strict=True), result, ())

    def submit_selected(self, job: Job, result: Tensor, selected: Sequence[Tensor] = ()) -> TensorFuture:
        # One lane suffices, because no other job shares the network with this job.
        stream = self._streams[1]
        return self._queue(((stream, job.transfer), (stream, job.apply)), result, selected)

    def _queue(
        self, stages: Iterable[tuple[torch.cuda.Stream, _Stage]], result: Tensor, handed: Sequence[Tensor]
    ) -> TensorFuture:
        # A stage waits for the stage before it, the first stage for the caller's queued work, and the caller for the
        # last stage: DDP waits before backward ends. So between two backward passes, the caller may use residuals
        # without a wait.
        before = torch.cuda.current_stream(self._device)
        for stream, stage in stages:
            if stream is not before:
                stream.wait_stream(before)
                # Python may free a tensor while this stream has yet to use it, so tell the allocator.
                _record(stream, (result, *handed))
            with torch.cuda.stream(stream):
                handed = stage()
            before = stream
        with torch.cuda.stream(before):
            return self._done(result)

    def synchronize(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def discard_errors(self) -> None:
        self.synchronize()


def _record(stream: torch.cuda.Stream, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


_Item = tuple[Sequence[_Stage], Tensor, TensorFuture]
_Queue = queue.SimpleQueue[_Item | None]


class FifoLanes(Runner):
    """Runs the stages of each job on one daemon thread per lane.

    After a job has failed, no other job runs until its error is raised.
    """

    def __init__(self, traffic: Traffic | None = None) -> None:
        self._traffic = Traffic() if traffic is None else traffic
        self._errors: list[BaseException] = []
        self._pending: TensorFuture | None = None
        self._backward = -1
        self._first: _Queue | None = None
        self._threads: list[threading.Thread] = []
        self._last_call: weakref.finalize[Any, Any] | None = None

    def _start(self) -> _Queue:
        queues: list[_Queue] = [queue.SimpleQueue() for _ in range(LANES)]
        threads = torch.get_num_threads()  # OpenMP stores this number per calling thread
        for lane, jobs in enumerate(queues):
            onward = queues[lane + 1] if lane + 1 < LANES else None
            # Without self: a thread with a reference to this object would keep it alive, and so never end.
            arguments = (lane, jobs, onward, self._errors, threads, self._traffic)
            self._threads.append(threading.Thread(target=_work, args=arguments, name="lightning_sparse", daemon=True))
        for thread in self._threads:
            thread.start()
        _join_at_exit(self._threads)
        # Idle threads stop at `shutdown`, and when this object is garbage collected.
        self._last_call = weakref.finalize(self, queues[0].put, None)  # at exit, finalizers run last in, first out
        return queues[0]

    def run(self, job: Job, result: Tensor) -> TensorFuture:
        backward = current_backward()
        if backward == -1:
            return super().run(job, result)  # DDP reduces a static graph after backward, so nothing overlaps
        # Compare ids, because a backward pass that raised did not run its callbacks. The callback raises the errors of
        # jobs: DDP would take a future with an exception for a result.
        if backward != self._backward:
            after_backward(self._join)
            self._backward = backward
        return self._queue((job.select, job.transfer, job.apply), result)

    def submit_selected(self, job: Job, result: Tensor, selected: Sequence[Tensor] = ()) -> TensorFuture:
        return self._queue((tuple, job.transfer, job.apply), result)

    def _queue(self, stages: Sequence[_Stage], result: Tensor) -> TensorFuture:
        future: TensorFuture = torch.futures.Future()
        self._pending = future
        # The job counts as traffic of the topology from now on, although its collectives start later.
        self._traffic.begin()
        if self._first is None:
            self._first = self._start()
        self._first.put((stages, result, future))
        return future

    def synchronize(self) -> None:
        if self._pending is not None:
            self._pending.wait()

    def discard_errors(self) -> None:
        self.synchronize()
        self._pending = None
        self._errors.clear()

    def shutdown(self) -> None:
        # After a failed backward pass, jobs may still run. The next job must queue behind them, and a thread that hangs
        # in a collective cannot be joined.
        idle = self._pending is None or self._pending.done()
        if self._last_call is None or not idle:
            return
        self._last_call()
        for thread in self._threads:
            thread.join()
        self._first, self._threads, self._last_call = None, [], None

    def finish(self, future: TensorFuture) -> None:
        future.wait()
        self._raise()

    def _join(self) -> None:
        self.synchronize()
        self._pending = None
        self._raise()

    def _raise(self) -> None:
        if self._errors:
            first = self._errors[0]  # later errors, of other lanes, follow from the first
            self._errors.clear()
            raise first


_lanes: "weakref.WeakValueDictionary[tuple[Topology, str], Runner]" = weakref.WeakValueDictionary()


def runner_of(topology: Topology, device: torch.device | None) -> Runner:
    # None stands for several devices. Lanes have one device, so jobs run at once.
    if device is None or device.type not in ("cpu", "cuda"):
        return Runner()
    key = (topology, str(device))
    lanes = _lanes.get(key)
    if lanes is None:
        lanes = _lanes[key] = FifoLanes(topology.traffic) if device.type == "cpu" else StreamLanes(device)
    return lanes


def _join_at_exit(threads: Sequence[threading.Thread]) -> None:
    # If a daemon thread returns from torch after the end of the program, Python unwinds it, and C++ calls abort(). The
    # wait has a time limit, because other ranks may have died.
    weak = [weakref.ref(thread) for thread in threads]

    def join() -> None:
        until = time.monotonic() + LAST_JOB_SECONDS  # one limit for all lanes: if one hangs, later lanes wait for it
        for reference in weak:
            if (alive := reference()) is not None:  # None: the thread has ended
                alive.join(max(0.0, until - time.monotonic()))

    weakref.finalize(threads[-1], join)


def _work(
    lane: int, jobs: _Queue, onward: _Queue | None, errors: list[BaseException], threads: int, traffic: Traffic
) -> None:
    torch.set_num_threads(threads)
    while (item := jobs.get()) is not None:
        if not errors:
            try:
                with torch.no_grad():
                    item[0][lane]()
            except BaseException as error:
                errors.append(error)
        result, future = item[1:]
        if onward is not None:
            onward.put(item)
        del item  # keep no reference to the model while idle
        if onward is None:
            if not errors:
                traffic.end()
            future.set_result(result)
        del result, future
    if onward is not None:
        onward.put(None)


# -- values that the host reads ----------------------------------------------------------------------------------------
#
# The host waits for a GPU only when it reads a value.


class AsyncHostTensor:
    """A copy on the host. ``read`` waits for the copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._here, self._copied = tensor, None
        if tensor.is_cuda:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._here = pinned.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._here
