"""A `SampleStore` without tiers, which reads an image folder and counts requests, and folders of photographs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytest
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


@cache
def _photographs() -> list[NDArray[np.uint8]]:
    datasets = pytest.importorskip("sklearn.datasets", reason="the photographs come from it")
    return list(datasets.load_sample_images().images)


def make_folder(
    root: Path,
    per_class: Mapping[str, int] | None = None,
    sizes: Sequence[tuple[int, int]] = ((120, 150), (150, 120), (97, 131)),
    seed: int = 0,
    splits: Sequence[str] = ("train", "val"),
) -> Path:
    """Create different images ``<split>/<class>/*.jpg``, some of them .png or gray.

    Args:
        per_class: Number of images per class and split. Default: three classes of unequal size.
        sizes: (height, width), used in turn.
    """
    image = pytest.importorskip("PIL.Image", reason="images are written with it")
    random = np.random.default_rng(seed)
    for split in splits:
        for label, count in (per_class or {"apple": 9, "bear": 7, "cup": 8}).items():
            folder = root / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                height, width = sizes[number % len(sizes)]
                photograph = _photographs()[number % 2]
                top, left = random.integers(0, photograph.shape[0] - height), random.integers(0, 640 - width)
                picture = image.fromarray(photograph[top : top + height, left : left + width])
                if number % 5 == 3:
                    picture = picture.convert("L")
                if number % 4 == 2:
                    picture.save(folder / f"{number:03}.png")
                else:
                    picture.save(folder / f"{number:03}.jpg", quality=90)
    return root
