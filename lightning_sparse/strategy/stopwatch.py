"""Adds up how long stretches of work took, on whichever thread or stream they run, and makes no host wait for a GPU.

On the CPU a stretch takes the time between its beginning and its end. On CUDA it lies between two events on the current
stream; events are read once the device has passed them, so few are ever open. That half has not run on a GPU yet.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Seconds of all stretches so far, those of several threads added."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._open: deque[tuple[Any, Any]] = deque()  # pairs of events that the device has yet to pass

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Time what happens inside; what raises does not count."""
        if device.type == "cuda":
            events = _event(), _event()
            events[0].record()
            yield
            events[1].record()
            with self._lock:
                self._open.append(events)
                self._read()
            return
        begin = time.perf_counter()
        yield
        taken = time.perf_counter() - begin
        with self._lock:
            self._seconds += taken

    def seconds(self) -> float:
        """So far; on CUDA without the stretches that are under way."""
        with self._lock:
            self._read()
            return self._seconds

    def _read(self) -> None:
        while self._open and self._open[0][1].query():
            begin, end = self._open.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
