"""Values and times that the host reads from a device without waiting for it.

Nothing here makes the host wait for a GPU before it asks: values are copied in the background, and times lie between
events that are read once the device has passed them.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


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
