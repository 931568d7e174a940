"""Samples, the interface of their readers, and the image decoder: bytes -> RGB uint8.

Pillow decides which files are images, and decodes JPEG to the same bits as DALI and libjpeg-turbo. simplejpeg, if
installed, makes these bits in less time. The result depends only on the bytes and the arguments.

It equals `ImageOps.exif_transpose(image)` and then `convert("RGB")`, except that gray values of 12 and 16 bits keep
their upper 8 bits. `convert` drops transparency, and clips gray values of 32 bits and floats to 0 to 255.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import io
import os
import runpy
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Format = Literal["jpeg", "decoded", "bytes"]
EXIT_PRIORITY = 30
"""Of threads that make batches, when the program ends (`multiprocessing.util.Finalize`): what they read from ends their
waits for storage before that, and closes after it."""


DIGEST_BYTES = 16  # of a key


class FileKey(NamedTuple):
    """A file, as listed. size: -1 if unknown. mtime_ns, tag: 0 if unknown; see `Manifest`."""

    path: str
    size: int
    mtime_ns: int
    tag: int = 0

    def digest(self) -> bytes:
        return hashlib.blake2b(os.fsencode(self.path), digest_size=DIGEST_BYTES).digest()


class View(NamedTuple):
    """The contents of a sample, read-only: uint8 [H, W, 3] if decoded, else the bytes of the file.

    A file that is not an image has height 1, and its size as width.
    """

    data: npt.NDArray[np.uint8]
    height: int
    width: int


class Sample(NamedTuple):
    """A sample with its label, or a list of labels. data, height, width: as in `View`, of the upright image.

    `index` is the requested index, unless another sample replaces a corrupt one.
    """

    data: npt.NDArray[np.uint8]
    label: Any
    index: int  # type: ignore[assignment]  # hides tuple.index, which a sample does not need
    height: int
    width: int


class SampleReader(Protocol):
    """Reads samples by index. `get` is thread-safe. `short_side` limits the shorter side of decoded images."""

    @property
    def format(self) -> Format: ...
    @property
    def short_side(self) -> int: ...
    def get(self, indices: Sequence[int]) -> Sequence[Sample]: ...


class ReplacingReader(SampleReader, Protocol):
    """A reader that can replace a sample that cannot be decoded. See `SampleStore`."""

    def replacement(self, requested: int, index: int, reason: str) -> Sample: ...
    def interrupt(self) -> None: ...


try:
    import simplejpeg
except (ImportError, ValueError):  # not installed, or compiled for another numpy ("dtype size changed")
    simplejpeg = None

if TYPE_CHECKING:
    from PIL import Image

DRAFT = 2  # libjpeg scales down to at least this many times the final size
_TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that swap height and width
_ORIENTATION, _BITS_PER_SAMPLE = 0x0112, 0x0102


class UndecodableError(ValueError):
    """The bytes are not a complete image. The message gives the reason, not the file."""


def decoder_id() -> int:
    """Return a number for the version of the decoder that decides whether a file is an image."""
    import PIL

    # Not simplejpeg's, whose bits are Pillow's, nor torch's: pixels are not on disk.
    return zlib.crc32(f"pillow {PIL.__version__}, all formats, draft 2x, bilinear".encode())


@functools.cache
def resizer_id() -> str:
    """Return the version of torch, which resizes images. Its import would take seconds, so read the file."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    version: str = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"]
    return version


def decode(data: bytes, short_side: int | None = None) -> npt.NDArray[np.uint8]:
    return decode_sized(data, short_side)[0]


def decode_sized(data: bytes, short_side: int | None = None) -> tuple[npt.NDArray[np.uint8], int, int]:
    """Decode an image to RGB. Raise UndecodableError if the bytes are not a complete image.

    Args:
        short_side: scale the shorter side down to this many pixels; smaller images keep their size.

    Returns:
        uint8 [H, W, 3], C-contiguous, upright, read-only; and the height and width of the upright image before scaling.
    """
    with _opened(data) as image:
        turned, stored = _orientation(image), image.size  # the conversion may drop the orientation
        wanted = stored if short_side is None else scaled(stored, short_side)
        if wanted != stored:
            # libjpeg scales by 1/2, 1/4, 1/8 while it decodes, which takes less time
            image.draft(None, (DRAFT * wanted[0], DRAFT * wanted[1]))
        pixels = _plain_jpeg(image, data) if turned == 1 else None
        if pixels is None:
            pixels = np.array(_upright(_rgb(image), turned))
    pixels = resized(pixels, *_upright_size(wanted, turned))  # an error of torch's is not the image's
    pixels.flags.writeable = False
    return pixels, *_upright_size(stored, turned)


def resized(pixels: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.uint8]:
    """Resize an image, uint8 [H, W, 3], bilinear and antialiased."""
    if pixels.shape[:2] == (height, width):
        return pixels
    # In channels-last layout, torch resizes uint8 with vector instructions, in the calling thread. On a CPU without
    # AVX2 or NEON, it takes longer than Pillow, and starts OpenMP threads.
    import torch  # only here, so that processes that serve samples start in less time and memory
    from torch.nn.functional import interpolate

    batch = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    batch = interpolate(batch, (height, width), mode="bilinear", antialias=True)
    result: npt.NDArray[np.uint8] = batch[0].permute(1, 2, 0).contiguous().numpy()
    return result


def probe(data: bytes) -> tuple[int, int]:
    """Return (height, width) of the upright image, of a JPEG from its header alone."""
    with _opened(data) as image:
        turned = _orientation(image)  # first: it may change the size
        return _upright_size(image.size, turned)


def orientation(data: bytes) -> int:
    """Return the EXIF orientation of a JPEG, 1 to 8."""
    with _opened(data) as image:
        return _orientation(image)


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
    from PIL import Image, ImageFile, UnidentifiedImageError

    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise ValueError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is True, so Pillow makes pixels up for damaged files. The cache keeps "
            "complete images only: remove this setting, and use on_corrupt='skip' to replace damaged files."
        )
    if not data:
        raise UndecodableError("the file is empty")
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.format == "EPS":
                raise UndecodableError("the file is a PostScript program: convert it to an image of pixels")
            yield image
    except (UndecodableError, MemoryError):  # a file is not corrupt because memory is short
        raise
    except UnidentifiedImageError:
        raise UndecodableError(f"the file is not an image ({len(data):,} bytes)") from None
    except Exception as error:  # Pillow's parsers raise struct.error, SyntaxError, KeyError, ... on corrupt files
        raise UndecodableError(f"the image is corrupt: {error}") from error


def _plain_jpeg(image: Image.Image, data: bytes) -> npt.NDArray[np.uint8] | None:
    if simplejpeg is None or image.format != "JPEG" or image.mode not in ("L", "RGB"):
        return None
    try:
        # the size and the bits that Pillow gives, without its streams and copies
        width, height = image.size  # after draft()
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width)
    except ValueError:  # simplejpeg also refuses images of which libjpeg only warns
        return None
    return pixels if pixels.shape == (height, width, 3) else None


def _rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    image.load()
    if bits := _gray_bits(image):
        image = Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it


def _gray_bits(image: Image.Image) -> int:
    # 12 or 16; 0 for other images
    if image.format == "TIFF" and image.mode.startswith("I;16"):
        return int(image.tag_v2[_BITS_PER_SAMPLE][0])  # type: ignore[attr-defined]
    return 16 if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")) else 0


def _upright_size(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    # Pillow's sizes are (width, height), and ours are (height, width)
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
    # do not load a JPEG: `draft` works only before that
    if image.format not in ("JPEG", "MPO"):
        image.load()  # finds an orientation behind the pixels (PNG), or turns the image upright (TIFF)
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a corrupt EXIF block does not make the image unusable
        return 1
    return int(value) if value in range(1, 9) else 1
