"""Random, unusual and damaged images: the decoder and Pillow read equal pixels and refuse the same files.

``IMAGES_INPUTS`` sets the number of inputs of each test, ``IMAGES_SEED`` the first seed.
"""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from typing import Any

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
    """Return the image as Pillow reads it, upright, or None if Pillow refuses it."""
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


def test_dali_random_jpeg_files_equal_the_decoder() -> None:
    """Complete and damaged files, some of which Pillow accepts. DALI rounds differently."""
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    from nvidia.dali import fn, pipeline_def, types

    from lightning_sparse.data.pipeline.dali import readable_by_dali

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1, exec_dynamic=True)  # type: ignore[untyped-decorator]
    def decoder() -> Any:
        files = fn.external_source(name="files", no_copy=True, dtype=types.UINT8, ndim=1)
        return fn.decoders.image(files, device="cpu", output_type=types.RGB)

    pipe = decoder()
    pipe.build()
    for name, rng in inputs("dali"):
        data = odd_image(rng, ["JPEG", "JPEG", "JPEG", "MPO", "PNG"])
        data = damaged(data, rng) if rng.random() < 0.5 else data
        if (expected := ours(data)) is not None:
            (found,) = pipe.run(files=[readable_by_dali(np.frombuffer(data, np.uint8))])
            pixels = np.asarray(found[0]).astype(int)
            assert pixels.shape == expected.shape, name
            assert np.abs(pixels - expected).max() <= 3, name
