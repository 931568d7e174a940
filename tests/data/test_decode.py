"""The decoder: every kind of image becomes RGB, and other files are named."""

from __future__ import annotations

import importlib.util
import io
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps

from lightning_sparse.data import decode as decode_module
from lightning_sparse.data.decode import UndecodableError, _plain_jpeg, decode, decoder_id, probe, scaled
from tests.data.programs import run
from tests.helpers.data import encoded, jpeg, make_image, write


@pytest.mark.parametrize("shape", [(40, 60), (41, 1), (1, 61), (256, 300), (900, 3)])
@pytest.mark.parametrize("short_side", [None, 1, 24, 256])
def test_decoded_pixels_are_a_contiguous_read_only_array(shape: tuple[int, int], short_side: int | None) -> None:
    image = make_image(2, *shape)
    pixels = decode(encoded(image), short_side)
    assert pixels.flags.c_contiguous
    assert not pixels.flags.writeable
    if short_side is None or min(shape) <= short_side:
        assert np.array_equal(pixels, np.asarray(image))
    else:
        expected = image.resize(scaled(image.size, short_side), Image.Resampling.BILINEAR)
        assert np.abs(pixels.astype(int) - np.asarray(expected)).max() <= 1


@pytest.mark.parametrize("short_side", [32, 48, 96])
def test_large_jpeg_is_scaled_while_it_is_decoded(monkeypatch: pytest.MonkeyPatch, short_side: int) -> None:
    """The pixels differ little from the pixels of the fully decoded image."""
    photographs = pytest.importorskip("sklearn.datasets", reason="the photographs come from it").load_sample_images()
    for photograph in photographs.images:
        data = encoded(Image.fromarray(photograph), "JPEG", quality=90)
        scaled = decode(data, short_side)
        with monkeypatch.context() as patch:
            patch.setattr("lightning_sparse.data.decode.DRAFT", 1000)
            whole = decode(data, short_side)
        assert scaled.shape == whole.shape
        difference = np.abs(scaled.astype(int) - whole)
        assert 0 < difference.mean() < 2, "gray levels; up to 5 if decoding did not keep twice the needed size"


def test_cmyk_jpeg_keeps_its_colors() -> None:
    difference = decode(jpeg(3, mode="CMYK")).astype(int) - np.asarray(make_image(3), int)
    assert np.abs(difference).mean() < 8


def test_decoder_tiff_of_twelve_bits_keeps_the_upper_eight() -> None:
    """Pillow reads such files but cannot write them."""
    values = np.linspace(0, 4095, 40 * 60).astype(np.uint16)
    packed = np.empty((len(values) // 2, 3), np.uint8)
    packed[:, 0], packed[:, 2] = values[::2] >> 4, values[1::2] & 255
    packed[:, 1] = (values[::2] & 15) << 4 | values[1::2] >> 8
    tags = [(256, 60), (257, 40), (258, 12), (259, 1), (262, 1), (273, 122), (277, 1), (278, 40), (279, packed.size)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    data = struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + packed.tobytes()
    assert np.array_equal(decode(data)[..., 0].ravel(), values >> 4)


@pytest.mark.parametrize("kind", [np.int32, np.float32])
@pytest.mark.parametrize("largest", [1, 200, 4095, 2**31 - 256])
def test_decoder_gray_of_32_bits_follows_one_rule_for_all_images(kind: type, largest: int) -> None:
    values = np.linspace(-largest / 7, largest, 40 * 60).reshape(40, 60).astype(kind)
    found = decode(encoded(Image.fromarray(values), "TIFF"))
    assert np.array_equal(found, np.repeat(values.clip(0, 255).astype(np.uint8)[..., None], 3, axis=2))


def test_decoder_png_with_a_flipped_bit_refused_wherever_pillow_refuses() -> None:
    whole, refused = encoded(make_image(4, 13, 17)), 0
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        try:
            with Image.open(io.BytesIO(bytes(data))) as image:
                expected = np.asarray(image.convert("RGB")).tobytes()
        except Exception:
            refused += 1
            with pytest.raises(UndecodableError):
                decode(bytes(data))
        else:
            assert decoded(bytes(data), 1000) == expected
    assert refused > len(whole) / 2


def test_decoder_setting_for_truncated_images_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ValueError, match="LOAD_TRUNCATED_IMAGES is True.*on_corrupt='skip'") as raised:
        decode(jpeg(1))
    assert not isinstance(raised.value, UndecodableError)


def test_decoder_postscript_is_not_run() -> None:
    with pytest.raises(UndecodableError, match="PostScript program"):
        decode(encoded(make_image(1), "EPS"))


@pytest.mark.parametrize(("format", "tags"), [("TIFF", "exif"), ("TIFF", "xmp"), ("PNG", "exif")])
def test_image_stored_on_its_side_is_turned_upright(format: str, tags: str) -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = {"exif": exif} if tags == "exif" else {"xmp": b'<x tiff:Orientation="%d"/>' % orientation}
        data = encoded(make_image(5), format, **options)
        with Image.open(io.BytesIO(data)) as image:
            upright = np.asarray(image if format == "TIFF" else ImageOps.exif_transpose(image))
        assert np.array_equal(decode(data), upright)
        assert probe(data) == upright.shape[:2]
        assert decode(data, 20).shape[:2] == ((30, 20) if upright.shape[0] > upright.shape[1] else (20, 30))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b"no picture at all", "not an image"),
        (jpeg(8)[:400], "corrupt"),
        (jpeg(8)[:-200], "corrupt"),
        (encoded(make_image(8))[:200], "corrupt"),
        (b"P6 100000 100000 255\n", "178,956,970|pixels"),
    ],
)
def test_file_that_is_not_an_image_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(UndecodableError, match=said):
        decode(data)


def test_memory_error_does_not_mark_the_file_as_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(image: object) -> None:
        raise MemoryError

    monkeypatch.setattr("lightning_sparse.data.decode._rgb", short)
    with pytest.raises(MemoryError):
        decode(encoded(make_image(1)))


def test_decoder_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import PIL

    before = decoder_id()
    monkeypatch.setattr(torch, "__version__", "another")  # scales pixels, which the disk tier does not keep
    assert decoder_id() == before
    monkeypatch.setattr(PIL, "__version__", "another")
    assert decoder_id() != before


def test_torch_error_does_not_mark_the_image_as_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a shortage of memory would mark the file as corrupt on disk."""

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("torch.nn.functional.interpolate", full)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        decode(jpeg(1), 20)


def without_simplejpeg(monkeypatch: pytest.MonkeyPatch, data: bytes, short_side: int = 100) -> Any:
    """Return the pixels or the error of Pillow."""
    with monkeypatch.context() as patch:
        patch.setattr("lightning_sparse.data.decode.simplejpeg", None)
        return decoded(data, short_side)


def decoded(data: bytes, short_side: int = 100) -> Any:
    try:
        return decode(data, short_side).tobytes()
    except UndecodableError as error:
        return str(error)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize(("subsampling", "shape"), [(0, (1, 1)), (1, (17, 33)), (2, (251, 250)), (2, (300, 500))])
def test_simplejpeg_gives_the_pixels_of_pillow(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], subsampling: int, progressive: bool, mode: str
) -> None:
    pytest.importorskip("simplejpeg", reason="it is compared with Pillow")
    image = make_image(1, *shape, mode)
    data = encoded(image, "JPEG", quality=85, subsampling=subsampling, progressive=progressive, restart_marker_blocks=2)
    for short_side in (10, 30, 60, 100, 1000):  # scaled to 1/8, 1/4 and 1/2 while they are decoded, or not
        assert decoded(data, short_side) == without_simplejpeg(monkeypatch, data, short_side)
    assert (_plain_jpeg(Image.open(io.BytesIO(data)), data) is None) == (mode == "CMYK")


@pytest.mark.parametrize("seed", range(2))
def test_simplejpeg_refuses_and_accepts_what_pillow_does(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Damaged files: cut, changed, or with inserted bytes. Pillow reads some of them, with a gray part."""
    random = np.random.default_rng(seed)
    whole = jpeg(seed, 120, 160)
    for _ in range(50):
        data, place = bytearray(whole), int(random.integers(2, len(whole)))
        if random.random() < 0.3:
            del data[place:]
        elif random.random() < 0.5:
            data[place : place + 1] = random.bytes(3)
        else:
            data[place] ^= 1 << int(random.integers(8))
        assert decoded(bytes(data)) == without_simplejpeg(monkeypatch, bytes(data))


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_scaling_without_vector_instructions_gives_the_same_bits(tmp_path: Path, capability: str) -> None:
    """Nodes with different CPUs must keep equal pixels."""
    code = "import sys, torch, zlib; from lightning_sparse.data.decode import decode; "
    code += "print(torch.backends.cpu.get_cpu_capability(), zlib.crc32(decode(open(sys.argv[1], 'rb').read(), 100)))"
    file = write(tmp_path / "0.jpg", jpeg(9, 300, 401))
    used, found = run(code, file, ATEN_CPU_CAPABILITY=capability).stdout.split()
    assert used.lower() == capability
    assert int(found) == zlib.crc32(decode(file.read_bytes(), 100))


@pytest.mark.parametrize("error", ["ImportError('numpy.core.multiarray')", "ValueError('numpy.dtype size changed')"])
def test_simplejpeg_for_another_numpy_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    write(tmp_path / "simplejpeg.py", f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "simplejpeg", raising=False)
    spec = importlib.util.spec_from_file_location("decode_again", decode_module.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.simplejpeg is None
    assert np.array_equal(again.decode(jpeg(3)), decode(jpeg(3)))
