"""Random, odd and damaged images: the decoder refuses what Pillow refuses, and returns the pixels that Pillow reads.

``IMAGES_INPUTS`` sets the number of inputs of each test, ``IMAGES_SEED`` the first seed.
"""

from __future__ import annotations

import io
import os
import random
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from lightning_sparse.data.decode import UndecodableError, decode, decode_sized, probe
from tests.data.odd_images import damaged, odd_image

INPUTS = int(os.environ.get("IMAGES_INPUTS", "60"))
SEED = int(os.environ.get("IMAGES_SEED", "0"))
pytestmark = [
    pytest.mark.timeout(3600 if "IMAGES_INPUTS" in os.environ else 300),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged header may ask for gigabytes."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500_000)


def inputs(kind: str) -> Iterator[tuple[str, random.Random]]:
    return ((f"{kind} {SEED + n}", random.Random(f"{kind} {SEED + n}")) for n in range(INPUTS))


def reference(data: bytes) -> NDArray[np.uint8] | None:
    """Return the image as Pillow reads it, upright; None if Pillow refuses it."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            try:
                upright = ImageOps.exif_transpose(image)
            except Exception:  # Pillow shows an image with a damaged EXIF block
                upright = image
            if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
                gray = (np.asarray(upright).astype(np.int64) >> 8).astype(np.uint8)
                return np.repeat(gray[..., None], 3, axis=2)
            return np.asarray(upright.convert("RGB"))
    except Exception:
        return None


def ours(data: bytes) -> NDArray[np.uint8] | None:
    try:
        pixels, height, width = decode_sized(data)
    except UndecodableError:
        return None
    assert pixels.shape == (height, width, 3)
    return pixels


def same(found: NDArray[np.uint8] | None, expected: NDArray[np.uint8] | None) -> bool:
    return (found is None and expected is None) or (
        found is not None and expected is not None and np.array_equal(found, expected)
    )


def test_decoder_complete_images_of_every_format_equal_pillow() -> None:
    for name, rng in inputs("complete"):
        data = odd_image(rng)
        expected = reference(data)
        assert same(ours(data), expected), name
        if expected is not None:
            assert probe(data) == expected.shape[:2], name
            assert min(decode(data, 20).shape[:2]) == min(20, *expected.shape[:2]), name


def test_decoder_damaged_images_refused_or_equal_pillow() -> None:
    for name, rng in inputs("damaged"):
        data = damaged(odd_image(rng), rng)
        assert same(ours(data), reference(data)), name
