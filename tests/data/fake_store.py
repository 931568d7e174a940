"""A `SampleStore` without tiers: reads an image folder directly, and remembers what was asked for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.data.decode import decode, probe


class FakeSample(NamedTuple):
    data: NDArray[np.uint8]
    label: int
    index: int
    height: int
    width: int


class FolderStore:
    def __init__(self, root: Path, format: Literal["jpeg", "decoded"] = "decoded", short_side: int = 64) -> None:
        classes = sorted(each.name for each in root.iterdir())
        suffixes = (".jpg",) if format == "jpeg" else (".jpg", ".png")
        self.paths = sorted(path for path in root.rglob("*") if path.suffix in suffixes)
        self.labels = np.array([classes.index(path.parent.name) for path in self.paths], np.int64)
        self.format: Literal["jpeg", "decoded"] = format
        self.short_side = short_side
        self.asked: list[list[int]] = []
        self.closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.paths)

    def get(self, indices: Sequence[int]) -> list[FakeSample]:
        assert not self.closed, "a closed store was asked"
        with self._lock:
            self.asked.append(list(indices))
        return [self._read(index) for index in indices]

    def _read(self, index: int) -> FakeSample:
        file = self.paths[index].read_bytes()
        if self.format == "jpeg":
            data = np.frombuffer(file, np.uint8)  # read-only, as a view of a cache would be
            return FakeSample(data, int(self.labels[index]), index, *probe(file))
        pixels = decode(file, self.short_side)
        pixels.flags.writeable = False
        return FakeSample(pixels, int(self.labels[index]), index, *pixels.shape[:2])

    def close(self) -> None:
        self.closed = True
