"""Random images of all formats that Pillow writes with unusual modes and tags, and functions that damage them."""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from tests.helpers.data import make_image

MODES = ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "I;16", "I;16B", "F"]
TIFF_COMPRESSIONS = [None, "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "group3", "group4", "zstd", "lzma"]
# formats without images, or that Pillow cannot read back
WITHOUT_IMAGES = {"EPS", "PDF", "PALM", "BUFR", "GRIB", "HDF5", "WMF", "SPIDER"}
COMMON = ["JPEG", "PNG", "TIFF", "WEBP"]


def known_formats() -> list[str]:
    Image.init()
    return sorted(set(Image.SAVE) - WITHOUT_IMAGES)


def odd_image(rng: random.Random, formats: Sequence[str] = ()) -> bytes:
    """Return a complete image file of a random format, mode, size, orientation and compression."""
    chosen = formats or (COMMON if rng.random() < 0.5 else known_formats())
    while True:
        format = rng.choice(chosen)
        image = _in_mode(rng, rng.choice(MODES))
        buffer = io.BytesIO()
        try:
            image.save(buffer, format, **_options(rng, format))
        except Exception:  # the format does not support this mode, size or option
            continue
        return buffer.getvalue()


def _in_mode(rng: random.Random, mode: str) -> Image.Image:
    image = make_image(rng.randrange(1000), rng.randint(1, 70), rng.randint(1, 70))
    if mode not in ("I", "I;16", "I;16B", "F"):
        converted = image.convert("L").convert(mode) if mode == "PA" else image.convert(mode)
        if mode in ("P", "L", "RGB") and rng.random() < 0.3:
            converted.info["transparency"] = 3 if mode != "RGB" else (1, 2, 3)
        return converted
    gray = np.asarray(image.convert("L")).astype(np.float64) * rng.choice([1 / 255, 1, 4, 257, 70000]) - rng.choice(
        [0, 9]
    )
    if mode == "F":
        return Image.fromarray(gray.astype(np.float32))
    if mode == "I":
        return Image.fromarray(gray.clip(-(2**31), 2**31 - 1).astype(np.int32))
    return Image.fromarray(gray.clip(0, 65535).astype("<u2" if mode == "I;16" else ">u2"))


def _options(rng: random.Random, format: str) -> dict[str, object]:
    options: dict[str, object] = {}
    if rng.random() < 0.4:
        exif = Image.Exif()
        exif[0x0112] = rng.choice([*range(10), 6.0, (6, 1), "6"])
        options["exif"] = exif
    elif rng.random() < 0.1:
        options["exif"] = b"Exif\0\0" + rng.randbytes(rng.randrange(40))
    elif rng.random() < 0.2:
        options["xmp"] = b'<x tiff:Orientation="%d"/>' % rng.randrange(10)
    if format == "TIFF":
        options["compression"] = rng.choice(TIFF_COMPRESSIONS)
        options["big_tiff"] = rng.random() < 0.2
    elif format in ("JPEG", "MPO"):
        options |= {"progressive": rng.random() < 0.3, "subsampling": rng.randrange(3), "quality": rng.choice([30, 90])}
        options |= {"restart_marker_blocks": rng.randrange(3), "keep_rgb": rng.random() < 0.2}
    elif format == "WEBP":
        options |= {"lossless": rng.random() < 0.5}
    if format in ("PNG", "GIF", "WEBP", "TIFF", "MPO", "AVIF") and rng.random() < 0.2:
        options |= {"save_all": True, "append_images": [make_image(rng.randrange(99))]}
    return options


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Damage a file in one to three random places."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        if len(data) > 8:
            data = rng.choice(DAMAGES)(bytearray(data), rng)
    return data


def _flip(data: bytearray, rng: random.Random) -> bytes:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _truncate(data: bytearray, rng: random.Random) -> bytes:
    return bytes(data[: rng.randrange(len(data))])


def _lose_the_end(data: bytearray, rng: random.Random) -> bytes:
    return bytes(data[: -rng.randrange(1, 8)])


def _zero(data: bytearray, rng: random.Random) -> bytes:
    first, last = _range(data, rng)
    data[first:last] = bytes(last - first)
    return bytes(data)


def _randomize(data: bytearray, rng: random.Random) -> bytes:
    first, last = _range(data, rng)
    data[first:last] = rng.randbytes(last - first)
    return bytes(data)


def _delete(data: bytearray, rng: random.Random) -> bytes:
    first, last = _range(data, rng)
    del data[first:last]
    return bytes(data)


def _swap(data: bytearray, rng: random.Random) -> bytes:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(3))
    return bytes(data[: cuts[0]] + data[cuts[1] : cuts[2]] + data[cuts[0] : cuts[1]] + data[cuts[2] :])


def _swap_chunks(data: bytearray, rng: random.Random) -> bytes:
    """Exchange two chunks of a PNG file, or delete or repeat a chunk. In other files, delete a part."""
    if data[:4] != b"\x89PNG":
        return _delete(data, rng)
    chunks, position = [], 8
    while position + 8 <= len(data):
        end = position + 12 + int(struct.unpack_from(">I", data, position)[0])
        chunks.append(data[position:end])
        position = end
    first, second = rng.randrange(len(chunks) or 1), rng.randrange(len(chunks) or 1)
    if chunks:
        chunks[first], chunks[second] = chunks[second], chunks[first]
        chunks[first : first + 1] *= rng.choice([0, 1, 2])
    return bytes(data[:8] + b"".join(chunks))


def _range(data: bytearray, rng: random.Random) -> tuple[int, int]:
    first = rng.randrange(len(data))
    return first, min(len(data), first + rng.choice([1, 4, 40, 400]))


DAMAGES: list[Callable[[bytearray, random.Random], bytes]] = [
    _flip, _flip, _flip, _truncate, _lose_the_end, _zero, _randomize, _delete, _swap, _swap_chunks,
]  # fmt: skip
