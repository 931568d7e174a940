"""The one decoder: the bytes of a picture -> RGB uint8. Everything cached went through it, so it also validates.

Pillow, because it reads every format that image folders hold, is kept well, and decodes JPEG bit by bit as DALI and
libjpeg-turbo do. What it gives depends on the bytes and the arguments only: gray, palette, CMYK and 16-bit pictures
become RGB, a picture that is stored on its side is turned upright, transparency is dropped.

`decoder()` names the version. It is kept beside everything that was decoded, because resizing differs between versions.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL import Image

T = TypeVar("T")
# What decoding below may read: the formats of image folders, and none of Pillow's exotic parsers.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MAX_PIXELS = 178_956_970  # Pillow's own limit against decompression bombs
_TRANSPOSED = (5, 6, 7, 8)  # values of the EXIF orientation that exchange height and width
_ORIENTATION = 0x0112


class UndecodableError(ValueError):
    """The bytes are no picture, or a broken one; the message says what is wrong with them, not where they are from."""


def decoder() -> str:
    """Name and version of the decoder, for cache keys."""
    import PIL

    return f"pillow {PIL.__version__}, draft 2x, bilinear"


def decode(data: bytes, short_side: int | None = None) -> npt.NDArray[np.uint8]:
    """A picture as RGB.

    Args:
        data: the file.
        short_side: scale down to this many pixels on the shorter side; a smaller picture stays as it is.

    Returns:
        uint8 [H, W, 3], C-contiguous, upright.

    Raises:
        UndecodableError: when the bytes are no whole picture.
    """

    from PIL.Image import Resampling

    def load(image: Image.Image) -> npt.NDArray[np.uint8]:
        size = None if short_side is None else scaled(image.size, short_side)
        if size is not None and size != image.size:
            # libjpeg scales by 1/2, 1/4, 1/8 while decoding; never below twice the size that is wanted
            image.draft(None, (2 * size[0], 2 * size[1]))
        orientation = _orientation(image)  # conversion below may drop it
        image = _rgb(image)
        if size is not None and size != image.size:
            image = image.resize(size, Resampling.BILINEAR)  # with antialiasing, as Pillow always does
        return np.array(_upright(image, orientation))

    return _opened(data, load)


def probe(data: bytes) -> tuple[int, int]:
    """(height, width) of the upright picture, from its header alone.

    Raises:
        UndecodableError: when the bytes are no picture.
    """

    def size(image: Image.Image) -> tuple[int, int]:
        width, height = image.size
        return (width, height) if _orientation(image) in _TRANSPOSED else (height, width)

    return _opened(data, size)


def scaled(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """`size` with its shorter side scaled down to `short_side`, the other in proportion, rounded down.

    >>> scaled((500, 375), 256)
    (341, 256)
    >>> scaled((100, 300), 256)
    (100, 300)
    """
    shorter = min(size)
    if shorter <= short_side:
        return size
    return size[0] * short_side // shorter, size[1] * short_side // shorter


def _opened(data: bytes, use: Callable[[Image.Image], T]) -> T:
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise UndecodableError("the file is empty")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise UndecodableError(f"{image.width} x {image.height} pixels, over the limit of {MAX_PIXELS:,}")
            return use(image)
    except UndecodableError:
        raise
    except UnidentifiedImageError:
        raise UndecodableError(f"the file is no picture ({len(data):,} bytes)") from None
    except (
        Exception
    ) as error:  # parsers of broken files raise nearly anything: struct.error, SyntaxError, KeyError, ...
        raise UndecodableError(f"the picture is damaged: {error}") from error


def _rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits of gray: convert() would clip instead of scaling
        image = Image.fromarray((np.asarray(image, np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


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
    except Exception:  # a broken EXIF block is no reason to lose the picture
        return 1
    return value if isinstance(value, int) else 1
