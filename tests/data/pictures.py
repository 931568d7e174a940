"""Image folders for tests, cut from the photographs and digits that scikit-learn carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray


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
    """``<split>/<class>/*.jpg`` (and some .png, some gray), all different.

    Args:
        per_class: how many pictures each class has in each split; default: three classes of unequal size.
        sizes: (height, width), taken in turn.
    """
    image = pytest.importorskip("PIL.Image", reason="pictures are written with it")
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


def numbered_folder(root: Path, train: int = 120, val: int = 22, classes: int = 3, edge: int = 20) -> Path:
    """Pictures of one colour, which is their place in the manifest: however they are cut, they say who they are."""
    image = pytest.importorskip("PIL.Image", reason="pictures are written with it")
    assert max(train, val) <= 256
    for split, count in (("train", train), ("val", val)):
        for number in range(count):
            folder = root / split / f"class{number * classes // count}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = np.full((edge, edge + 7, 3), number, np.uint8)
            image.fromarray(pixels).save(folder / f"{number:03}.png")
    return root
