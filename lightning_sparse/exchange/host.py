"""What the host learns of a device without waiting for it: values, and times.

Nothing here makes the host wait for a GPU before it asks: values are copied in the background, and times lie between
events that are read once the device has passed them. (The CUDA half has not run on a GPU yet.)
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

ROUNDS = 8
"""Rounds timed for each decision."""
DECISIONS = (16, 128, 1024)
"""Rounds before which the density is set: soon, and again when caches are warm and clocks have settled."""


class HostCopy:
    """Copies a tensor to the host, which goes on meanwhile, and waits when it reads it."""

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
        """Time what happens inside; what raises does not count."""
        begin = _mark(device)
        yield
        end = _mark(device)
        with self._lock:
            self._open.append((begin, end))
            self._read()

    def seconds(self) -> float:
        """So far; on CUDA without what is under way."""
        with self._lock:
            self._read()
            return self._seconds

    def _read(self) -> None:
        while self._open and _has_passed(self._open[0][1]):
            self._seconds += _between(*self._open.popleft())


class Window:
    """Measures the time between the first and the last bucket of each of the last `ROUNDS` rounds.

    On CUDA it is the device's time: events are recorded while backward is queued, and read when a decision is due.

    Attributes:
        decided: the round of the last decision; 0 for none.
    """

    def __init__(self) -> None:
        self.decided = 0
        self._marks: deque[tuple[Any, Any]] = deque(maxlen=ROUNDS)
        self._begin: Any = None

    def first(self, device: torch.device) -> None:
        """The first bucket of a round is ready."""
        self._begin = _mark(device)

    def last(self, device: torch.device) -> None:
        """The last bucket of a round is ready. A run that begins, or goes on, has no round before it."""
        if self._begin is None:
            return
        self._marks.append((self._begin, _mark(device)))

    def is_due(self, round_index: int) -> bool:
        """Whether a decision is to be taken before this round; the same on all ranks."""
        passed = any(self.decided < each <= round_index for each in DECISIONS)
        return passed and len(self._marks) == ROUNDS

    def seconds(self) -> float:
        """The median of the last rounds; on CUDA it waits for the device."""
        return statistics.median([_between(begin, end) for begin, end in self._marks] or [0.0])


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
