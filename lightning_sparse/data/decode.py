"""The image decoder: bytes -> RGB uint8. The cache decodes every file before it keeps it, which also validates it.

Pillow reads all formats found in image folders and decodes JPEG to the same bits as DALI and libjpeg-turbo. simplejpeg,
if it is installed, makes these bits in less time, and torch resizes faster than Pillow, to the same bits with and
without vector instructions. The result depends on the bytes and the arguments only: gray, palette, CMYK and 16-bit
images become RGB, images with an EXIF orientation are turned upright, transparency is dropped.

The disk tier stores `decoder_id()` with each file, because what can be decoded differs between versions.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import interpolate

try:
    import simplejpeg
except (ImportError, ValueError):  # not installed, or compiled for another numpy ("dtype size changed")
    simplejpeg = None

if TYPE_CHECKING:
    from PIL import Image

# Formats found in image folders. Pillow's other parsers stay unused.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MAX_PIXELS = 178_956_970  # Pillow's own limit against decompression bombs
DRAFT = 2  # what libjpeg scales down is at least this many times the size that is wanted, which is resized then
_TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that swap height and width
_ORIENTATION = 0x0112


class UndecodableError(ValueError):
    """The bytes are not a complete image. The message gives the reason, not the file."""


def decoder_id() -> int:
    """Return a number that identifies what decides whether a file is an image, stored with cached files."""
    import PIL

    # Not simplejpeg's, whose bits are Pillow's, nor torch's: pixels are not on disk.
    return zlib.crc32(f"pillow {PIL.__version__}, draft 2x, bilinear".encode())


def decode(data: bytes, short_side: int | None = None) -> npt.NDArray[np.uint8]:
    """Decode an image to RGB. As `decode_sized`, without the size of the image."""
    return decode_sized(data, short_side)[0]


def decode_sized(data: bytes, short_side: int | None = None) -> tuple[npt.NDArray[np.uint8], int, int]:
    """Decode an image to RGB.

    Args:
        short_side: scale the shorter side down to this many pixels; smaller images keep their size.

    Returns:
        uint8 [H, W, 3], C-contiguous, upright, read-only; and the height and width of the upright image before scaling.

    Raises:
        UndecodableError: if the bytes are not a complete image.
    """
    with _opened(data) as image:
        orientation, stored = _orientation(image), image.size  # the conversion may drop the orientation
        wanted = stored if short_side is None else scaled(stored, short_side)
        if wanted != stored:
            # libjpeg scales by 1/2, 1/4, 1/8 while it decodes, which takes less time
            image.draft(None, (DRAFT * wanted[0], DRAFT * wanted[1]))
        pixels = _plain_jpeg(image, data) if orientation == 1 else None
        if pixels is None:
            pixels = np.array(_upright(_rgb(image), orientation))
    pixels = resized(pixels, *_upright_size(wanted, orientation))  # an error of torch's is not the image's
    pixels.flags.writeable = False
    return pixels, *_upright_size(stored, orientation)


def resized(pixels: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.uint8]:
    """Resize an image, uint8 [H, W, 3], bilinear and antialiased."""
    if pixels.shape[:2] == (height, width):
        return pixels
    # channels last: torch resizes uint8 with vector instructions in this layout, in the calling thread; on a processor
    # without AVX2 or NEON it takes longer than Pillow, and starts OpenMP threads
    batch = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    batch = interpolate(batch, (height, width), mode="bilinear", antialias=True)
    result: npt.NDArray[np.uint8] = batch[0].permute(1, 2, 0).contiguous().numpy()
    return result


def probe(data: bytes) -> tuple[int, int]:
    """Return (height, width) of the upright image, from its header.

    Raises:
        UndecodableError: if the bytes are not an image.
    """
    with _opened(data) as image:
        return _upright_size(image.size, _orientation(image))


def scaled(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Scale `size` so that its shorter side is at most `short_side`, rounding down.

    >>> scaled((500, 375), 256)
    (341, 256)
    >>> scaled((100, 300), 256)
    (100, 300)
    """
    shorter = min(size)
    if shorter <= short_side:
        return size
    return size[0] * short_side // shorter, size[1] * short_side // shorter


@contextlib.contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    """Open an image; raise UndecodableError for all errors of the block."""
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise UndecodableError("the file is empty")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise UndecodableError(f"{image.width} x {image.height} pixels, over the limit of {MAX_PIXELS:,}")
            yield image
    except (UndecodableError, MemoryError):  # a file is not corrupt because memory is short
        raise
    except UnidentifiedImageError:
        raise UndecodableError(f"the file is not an image ({len(data):,} bytes)") from None
    except Exception as error:  # Pillow's parsers raise struct.error, SyntaxError, KeyError, ... on corrupt files
        raise UndecodableError(f"the image is corrupt: {error}") from error


def _plain_jpeg(image: Image.Image, data: bytes) -> npt.NDArray[np.uint8] | None:
    """Decode a JPEG file to the size that Pillow would, without its streams and copies; None if only Pillow can."""
    if simplejpeg is None or image.format != "JPEG" or image.mode not in ("L", "RGB"):
        return None
    try:
        width, height = image.size  # what draft() made of it
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width)
    except ValueError:  # also of what libjpeg only warns of, which Pillow accepts
        return None
    return pixels if pixels.shape == (height, width, 3) else None


def _rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I") or image.mode == "F":  # convert() would clip instead of scaling
        has_16_bits = image.mode.startswith("I;16") or image.format in ("PNG", "PPM")
        image = Image.fromarray(_eight_bits(np.asarray(image), 16 if has_16_bits else None))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it


def _eight_bits(values: npt.NDArray[Any], bits: int | None) -> npt.NDArray[np.uint8]:
    """Scale gray values to 8 bits.

    Args:
        bits: of a value; None for TIFF files of 32 bits, which do not tell their range: the smallest that has all
            values, of 8, 16, 24 and 32 bits, or [0, 1] for floating-point numbers.
    """
    if values.dtype.kind == "f":
        values = np.nan_to_num(values)
        return (values * (255 if values.max() <= 1 else 1)).clip(0, 255).astype(np.uint8)
    if bits is None:
        bits = max(8, -(-int(values.max()).bit_length() // 8) * 8)
    return (values.astype(np.int64) >> (bits - 8)).clip(0, 255).astype(np.uint8)


def _upright_size(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """Return (height, width) of an image of (width, height)."""
    return size if orientation in _TRANSPOSED else size[::-1]


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a corrupt EXIF block does not make the image unusable
        return 1
    return value if isinstance(value, int) else 1
