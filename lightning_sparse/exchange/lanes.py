"""When an exchange runs: at once, or beside backward in lanes, which are CUDA streams or threads.

A job has three methods: `select` works inside the node, `transfer` between nodes, `apply` inside the node. Each has a
lane of its own:

    backward   bucket 0   bucket 1   bucket 2
    select                0          1          2
    transfer                         0          1          2        the slow network is never idle while there is work
    apply                                       0          1          2

Each lane is first in, first out, in the order of DDP's buckets, which is the same on all ranks; so collectives match.
(Started from callbacks of futures they would not: Gloo hangs.) No two lanes share a group, for two threads must not,
and NCCL executes the collectives of a communicator one after the other, on whatever streams they are: the first lane
uses those of the world and of the node, the second the one between nodes, the third the node's second one. Hence there
is one set of lanes per topology: two modules in one backward pass share it.

Gloo has no streams, so its lanes are threads. An error must fail the backward pass with its own message. DDP mistakes a
future with an exception for a result, so the error is raised by a callback at the end of backward.

On CUDA lanes are streams: the host queues all methods of a job at once and never waits. A method returns the tensors
that later ones use, for torch's allocator to know which streams use them.

A job that is not part of a backward pass has been selected by its caller, and goes on with ``start``; ``finish`` waits
for it and raises its error.
"""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_sparse.internals import after_backward, current_backward
from lightning_sparse.topology import Topology, Traffic

TensorFuture = torch.futures.Future[Tensor]
_Stage = Callable[[], Sequence[Tensor]]
LANES = 3
LAST_JOB_SECONDS = 10.0
"""How long a program that ends waits for jobs under way."""


class Job(Protocol):
    """Work in three stages. Each returns the tensors made so far that later ones use."""

    def select(self) -> Sequence[Tensor]:
        """Work inside the node, and choose what is sent."""

    def transfer(self) -> Sequence[Tensor]:
        """Communicate between nodes."""

    def apply(self) -> Sequence[Tensor]:
        """Work inside the node with the received messages."""


class Runner:
    """Runs jobs in the order given; this one each at once."""

    def run(self, job: Job, result: Tensor) -> TensorFuture:
        """Run the job. The future completes with ``result``; on CUDA it carries the current stream, for DDP to wait."""
        job.select()
        return Runner.start(self, job, result)

    def start(self, job: Job, result: Tensor, selected: Sequence[Tensor] = ()) -> TensorFuture:
        """Run a job whose ``select`` the caller has called, beside whatever the caller does until ``finish``.

        Args:
            selected: what ``select`` returned.
        """
        job.transfer()
        job.apply()
        return self._done(result)

    def _done(self, result: Tensor) -> TensorFuture:
        devices: list[int | str | torch.device] | None = [result.device] if result.is_cuda else None
        future: TensorFuture = torch.futures.Future(devices=devices)
        future.set_result(result)
        return future

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


class StreamLanes(Runner):
    """Queues the stages of each job on one CUDA stream per lane, beside backward. The host never waits.

    A stage waits for the one before it, the first for what the caller has queued, and the caller for the last one:
    DDP makes it do so before backward ends. So whatever the caller does with a residual between two backward passes
    lies after the jobs that wrote it and before those that read it. Within backward a tensor may be freed on the host
    while another lane has yet to use it; ``record_stream`` tells the allocator of those that were handed over.

    Of high priority: a dozen small kernels would otherwise queue behind those of backward.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(LANES)]  # type: ignore[no-untyped-call]

    def run(self, job: Job, result: Tensor) -> TensorFuture:
        """Queue the job; the future carries the last lane's event."""
        stages = (job.select, job.transfer, job.apply)
        return self._queue(zip(self._streams, stages, strict=True), result, ())

    def start(self, job: Job, result: Tensor, selected: Sequence[Tensor] = ()) -> TensorFuture:
        """Queue the job on one lane, since there is none to share it with."""
        stream = self._streams[1]
        return self._queue(((stream, job.transfer), (stream, job.apply)), result, selected)

    def _queue(
        self, stages: Iterable[tuple[torch.cuda.Stream, _Stage]], result: Tensor, handed: Sequence[Tensor]
    ) -> TensorFuture:
        before = torch.cuda.current_stream(self._device)
        for stream, stage in stages:
            if stream is not before:
                stream.wait_stream(before)
                _record(stream, (result, *handed))
            with torch.cuda.stream(stream):
                handed = stage()
            before = stream
        with torch.cuda.stream(before):
            return self._done(result)

    def wait(self) -> None:
        """Order the current stream after the jobs."""
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def drain(self) -> None:
        """Order the current stream after the jobs."""
        self.wait()


def _record(stream: torch.cuda.Stream, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


_Item = tuple[Sequence[_Stage], Tensor, TensorFuture]
_Queue = queue.SimpleQueue[_Item | None]


class FifoLanes(Runner):
    """Runs the stages of each job on one daemon thread per lane, first in, first out. After a job has failed, no
    other runs until its error was raised. Threads start with the first job after ``end``; they stop at ``end`` if they
    are idle, and when this object is garbage collected. A program that ends waits for jobs under way.

    Args:
        traffic: counts the collectives of the topology, each job from the time when it is queued.
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
        threads = torch.get_num_threads()  # OpenMP has a number of threads for each calling thread
        for lane, jobs in enumerate(queues):
            onward = queues[lane + 1] if lane + 1 < LANES else None
            arguments = (
                lane,
                jobs,
                onward,
                self._errors,
                threads,
                self._traffic,
            )  # not self: the thread would keep alive what ends it
            self._threads.append(threading.Thread(target=_work, args=arguments, name="lightning_sparse", daemon=True))
        for thread in self._threads:
            thread.start()
        _join_at_exit(self._threads)
        self._last_call = weakref.finalize(self, queues[0].put, None)  # at exit the latest runs first: before the joins
        return queues[0]

    def run(self, job: Job, result: Tensor) -> TensorFuture:
        """Queue the job."""
        backward = current_backward()
        if backward == -1:
            return super().run(job, result)  # DDP flushes a static graph after backward: nothing to overlap with
        if backward != self._backward:  # by its id: a backward that raised never ran its callbacks
            after_backward(self._join)
            self._backward = backward
        return self._queue((job.select, job.transfer, job.apply), result)

    def start(self, job: Job, result: Tensor, selected: Sequence[Tensor] = ()) -> TensorFuture:
        """Queue the job."""
        return self._queue((tuple, job.transfer, job.apply), result)

    def _queue(self, stages: Sequence[_Stage], result: Tensor) -> TensorFuture:
        future: TensorFuture = torch.futures.Future()
        self._pending = future
        self._traffic.begin()
        if self._first is None:
            self._first = self._start()
        self._first.put((stages, result, future))
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


_lanes: "weakref.WeakValueDictionary[tuple[Topology, str], Runner]" = weakref.WeakValueDictionary()


def runner_of(topology: Topology, device: torch.device | None) -> Runner:
    """The one set of lanes that uses this topology's process groups for tensors on that device; None: on several, whose
    jobs run at once."""
    if device is None or device.type not in ("cpu", "cuda"):
        return Runner()
    key = (topology, str(device))
    lanes = _lanes.get(key)
    if lanes is None:
        lanes = _lanes[key] = FifoLanes(topology.traffic) if device.type == "cpu" else StreamLanes(device)
    return lanes


def _join_at_exit(threads: Sequence[threading.Thread]) -> None:
    """Python unwinds a daemon thread that comes back from torch after the end of the program, and C++ answers that with
    abort(). Not for ever, since the other ranks may be gone."""
    weak = [weakref.ref(thread) for thread in threads]

    def join() -> None:
        until = time.monotonic() + LAST_JOB_SECONDS  # for all lanes: where one hangs, the later ones wait for it
        for each in weak:
            if (alive := each()) is not None:  # else the thread has ended, and this is its garbage collection
                alive.join(max(0.0, until - time.monotonic()))

    weakref.finalize(threads[-1], join)


def _work(
    lane: int, jobs: _Queue, onward: _Queue | None, errors: list[BaseException], threads: int, traffic: Traffic
) -> None:
    """One lane: a stage of each job, which then goes on to the next lane."""
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
        del item  # hold no reference to the model while idle, nor once the future is done
        if onward is None:
            if not errors:
                traffic.end()
            future.set_result(result)
        del result, future
    if onward is not None:
        onward.put(None)


# -- values and times that the host reads ------------------------------------------------------------------------------
#
# Values and times that the host reads from a device without waiting for it.
#
# Nothing here makes the host wait for a GPU before it asks: values are copied in the background, and times lie between
# events that are read once the device has passed them.


class AsyncHostTensor:
    """A copy of a tensor on the host. The copy runs in the background, and ``read`` waits for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._here, self._copied = tensor, None
        if tensor.is_cuda:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._here = pinned.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> Tensor:
        """Return the tensor, on the CPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._here


class Stopwatch:
    """Adds up seconds over all threads and streams."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._open: deque[tuple[Any, Any]] = deque()  # pairs of marks that the device has yet to pass

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Time the block, unless it raises."""
        begin = _mark(device)
        yield
        end = _mark(device)
        with self._lock:
            self._open.append((begin, end))
            self._read()

    def seconds(self) -> float:
        """Return the seconds so far; on CUDA without running work."""
        with self._lock:
            self._read()
            return self._seconds

    def _read(self) -> None:
        while self._open and _has_passed(self._open[0][1]):
            self._seconds += _between(*self._open.popleft())


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _has_passed(mark: Any) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def _between(begin: Any, end: Any) -> float:
    if isinstance(end, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3
