"""DALI and torch give equal samples, labels and crops, and leave no threads."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sparse.data.config import ImageOptions
from lightning_sparse.data.pipeline.images import TorchPipeline, prepare, random_crops
from lightning_sparse.data.pipeline.loader import BatchRequest
from tests.data.fake_store import FolderStore, make_folder

FORMATS = ["decoded", "jpeg"]
needs_dali = pytest.mark.skipif(importlib.util.find_spec("nvidia") is None, reason="DALI is not installed")
BACKENDS = ["torch", pytest.param("dali", marks=needs_dali)]
OPTIONS = ImageOptions(seed=3)
GRAY_LEVELS = ImageOptions(seed=3, mean=(0, 0, 0), std=(1 / 255,) * 3)
Made = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("pictures")) / "train"


@pytest.fixture(params=FORMATS)
def store(request: pytest.FixtureRequest, folder: Path) -> FolderStore:
    return FolderStore(folder, request.param)


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert set(threading.enumerate()) <= before, "threads were left behind"


@contextlib.contextmanager
def pipeline(backend: str, store: FolderStore, options: ImageOptions = OPTIONS) -> Iterator[Any]:
    if backend == "torch":
        pipe: Any = TorchPipeline(store, options, threads=2)
    else:
        from lightning_sparse.data.pipeline.dali import DaliPipeline

        pipe = DaliPipeline(store, options, batch_size=4, threads=1)
    with contextlib.closing(pipe):
        yield pipe


def requests(count: int, *, epoch: int = 0, size: int = 32, train: bool = True, steps: int = 3) -> list[BatchRequest]:
    indices = [np.arange(4) * 3 % count + step for step in range(steps)]
    return [BatchRequest(each % count, epoch, size, train) for each in indices]


def made(backend: str, store: FolderStore, wanted: list[BatchRequest], options: ImageOptions = OPTIONS) -> Made:
    with pipeline(backend, store, options) as pipe:
        return [(images.clone(), labels.clone()) for images, labels in pipe.run(wanted)]


def pairs_of(one: Made, other: Made) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of images. The labels must be equal."""
    for (images, labels), (other_images, other_labels) in zip(one, other, strict=True):
        assert torch.equal(labels, other_labels)
        yield images, other_images


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_have_the_requested_samples_in_order(backend: str, store: FolderStore) -> None:
    wanted = [*requests(len(store)), BatchRequest(np.array([5, 1]), 0, 40, True)]
    batches = made(backend, store, wanted)
    assert [tuple(images.shape) for images, _ in batches] == [(4, 3, 32, 32)] * 3 + [(2, 3, 40, 40)]
    assert all(images.dtype == torch.float32 and images.is_contiguous() for images, _ in batches)
    assert [labels.tolist() for _, labels in batches] == [store.labels[each.indices].tolist() for each in wanted]
    assert sorted(store.asked) == sorted(each.indices.tolist() for each in wanted)


@needs_dali
@pytest.mark.parametrize("store_format", FORMATS)
def test_pixels_without_resizing_are_equal_in_both_backends(folder: Path, store_format: Any) -> None:
    """Validation crops a square of 56 from a short side of 64, so the crop has the size of the result."""
    root = folder
    if store_format == "jpeg":  # files with a short side of 64
        sizes = [(64, 80), (90, 64)]
        root = make_folder(folder.parent.parent / "squares", {"a": 9}, sizes, splits=["train"]) / "train"
    store = FolderStore(root, store_format, 64)
    wanted, options = requests(len(store), size=56, train=False), ImageOptions(image_size=56, eval_resize=64)
    ours, theirs = made("torch", store, wanted, options), made("dali", store, wanted, options)
    for (one, other), request in zip(pairs_of(ours, theirs), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)
        expected = prepare(store, request, OPTIONS).images[0]
        if store_format == "decoded":
            top, left = (expected.shape[0] - 56) // 2, (expected.shape[1] - 56) // 2
            pixels = torch.from_numpy(expected[top : top + 56, left : left + 56].copy()).permute(2, 0, 1) / 255
            mean, std = torch.tensor(OPTIONS.mean).view(3, 1, 1), torch.tensor(OPTIONS.std).view(3, 1, 1)
            torch.testing.assert_close(one[0], (pixels - mean) / std, rtol=0, atol=1e-5)


def test_small_images_are_validated_without_cropping(tmp_path: Path) -> None:
    """CIFAR images have 32 pixels. A crop of 7/8 would leave 28, enlarged again."""
    store = FolderStore(make_folder(tmp_path, sizes=((32, 32),)) / "train", short_side=37)
    wanted = requests(len(store), size=32, train=False)
    for request, (images, _) in zip(wanted, made("torch", store, wanted, GRAY_LEVELS), strict=True):
        for sample, image in zip(store.get(request.indices.tolist()), images, strict=True):
            torch.testing.assert_close(image.permute(1, 2, 0), torch.from_numpy(sample.data.copy()).float())


@needs_dali
def test_crops_with_resizing_are_nearly_equal_in_both_backends(store: FolderStore) -> None:
    wanted = requests(len(store), epoch=2)
    ours, theirs = made("torch", store, wanted, GRAY_LEVELS), made("dali", store, wanted, GRAY_LEVELS)
    for one, other in pairs_of(ours, theirs):
        assert (one - other).abs().mean() < 2.5, "another region or a flip would differ by tens"
        assert (one - other.flip(-1)).abs().mean() > 5, "this check would not detect a flip"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("train", [True, False])
def test_formats_in_memory_give_equal_pixels(backend: str, folder: Path, train: bool) -> None:
    """Photographs are larger than the short side. The format in memory may depend on the free memory."""
    files, pixels = FolderStore(folder, "jpeg"), FolderStore(folder, "decoded")
    pixels.paths, pixels.labels = files.paths, files.labels  # the folder also has other files
    wanted = requests(len(files), epoch=2, train=train)
    for one, other in pairs_of(made(backend, files, wanted, GRAY_LEVELS), made(backend, pixels, wanted, GRAY_LEVELS)):
        assert (one - other).abs().mean() < (1e-6 if backend == "torch" else 0.5), "JPEG at quality 90 loses about 2"


@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_around_the_crop_are_not_used(backend: str, folder: Path) -> None:
    """Resizing a region of the whole image would blend the edges with pixels around them."""

    class Blackened(FolderStore):
        def get(self, indices: Any) -> Any:
            samples = super().get(indices)
            sizes = np.array([each.data.shape[:2] for each in samples])
            crops = random_crops(OPTIONS, 2, np.asarray(indices), *sizes.T)
            kept = []
            for sample, top, left, height, width in zip(samples, *crops[:4], strict=True):
                data = np.zeros_like(sample.data)
                inside = np.s_[top : top + height, left : left + width]
                data[inside] = sample.data[inside]
                assert not np.array_equal(data, sample.data)
                kept.append(sample._replace(data=data))
            return kept

    store = FolderStore(folder)
    wanted = requests(len(store), epoch=2)
    for one, other in pairs_of(made(backend, store, wanted), made(backend, Blackened(folder), wanted)):
        assert torch.equal(one, other)


def test_pixels_normalized_on_a_device_give_the_same_batches(store: FolderStore) -> None:
    """The CPU takes the place of the GPU to which bytes are uploaded."""
    wanted = [*requests(len(store), epoch=1), *requests(len(store), train=False, size=40)]
    with contextlib.closing(TorchPipeline(store, OPTIONS, threads=2, device=torch.device("cpu"))) as pipe:
        batches = list(pipe.run(wanted))
    for one, other in pairs_of(batches, made("torch", store, wanted)):
        assert one.is_contiguous()
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_are_made_outside_the_training_thread(backend: str, folder: Path) -> None:
    """The sampler makes a request for each step. This work grows with the number of ranks."""
    store, made_in = FolderStore(folder), set()

    def asked() -> Iterator[BatchRequest]:
        for request in requests(len(store), steps=5):
            made_in.add(threading.current_thread())
            yield request

    with pipeline(backend, store) as pipe:
        assert len(list(pipe.run(asked()))) == 5
    assert made_in
    assert threading.current_thread() not in made_in


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_outlives_the_next_batches(backend: str, folder: Path) -> None:
    """Memory is passed on without a copy and reused, but not while a batch is in use."""
    store = FolderStore(folder)
    wanted = requests(len(store), steps=20)
    with pipeline(backend, store) as pipe:
        kept = [images for images, _ in pipe.run(wanted)]
        sums = [float(images.sum()) for images in kept]
        assert sums == [float(images.sum()) for images, _ in pipe.run(wanted)]
        assert len(set(sums)) > 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_image_stored_on_its_side_is_upright(backend: str, tmp_path: Path) -> None:
    """With EXIF rotation, the crop is taken from the upright image, in both backends and formats."""
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    upright = np.zeros((64, 96, 3), np.uint8)
    upright[:32], upright[:, :48, 1] = 200, 100  # top and bottom, and left and right, differ
    exif = image.Exif()
    exif[0x0112] = 6  # show it rotated by 90 degrees clockwise
    turned = image.fromarray(np.ascontiguousarray(np.rot90(upright)))
    turned.save(tmp_path / "a" / "0.jpg", quality=95, exif=exif)
    wanted = [BatchRequest(np.array([0]), 0, 56, False)]
    for store_format in FORMATS:
        ((images, _),) = made(backend, FolderStore(tmp_path, store_format), wanted, GRAY_LEVELS)
        pixels = images[0].permute(1, 2, 0)
        corners = [pixels[5, 5], pixels[5, -5], pixels[-5, 5], pixels[-5, -5]]
        expected = [(200, 100, 200), (200, 200, 200), (0, 100, 0), (0, 0, 0)]
        for corner, color in zip(corners, expected, strict=True):
            assert (corner - torch.tensor(color)).abs().max() < 12, (store_format, corners)


@needs_dali
def test_unusual_image_files_look_equal_in_both_backends(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    picture = image.open(next((make_folder(tmp_path / "made") / "train" / "apple").glob("*.jpg"))).convert("RGB")
    picture.convert("CMYK").save(tmp_path / "a" / "cmyk.jpg", quality=95)
    picture.convert("L").save(tmp_path / "a" / "gray.jpg", quality=95)
    picture.save(tmp_path / "a" / "progressive.jpg", quality=95, progressive=True)
    for kind in ("GIF", "PNG", "WEBP", "TIFF", "BMP"):
        with (tmp_path / "a" / f"{kind}.jpg").open("wb") as file:
            picture.convert("P" if kind in ("GIF", "PNG") else "RGB").save(file, kind)
    shutil.rmtree(tmp_path / "made")
    store = FolderStore(tmp_path, "jpeg")
    wanted = [BatchRequest(np.array([index]), 0, 84, False) for index in range(len(store))]
    ours, theirs = made("torch", store, wanted, GRAY_LEVELS), made("dali", store, wanted, GRAY_LEVELS)
    for path, (one, other) in zip(store.paths, pairs_of(ours, theirs), strict=True):
        assert (one - other).abs().mean() < 2, path.name


@needs_dali
def test_file_that_dali_cannot_read_is_named(folder: Path) -> None:
    class Broken(FolderStore):
        def get(self, indices: Any) -> Any:
            return [each._replace(data=each.data[: len(each.data) // 2]) for each in super().get(indices)]

    store = Broken(folder, "jpeg")
    with pytest.raises(RuntimeError, match=r"one of the samples \[0, 3, 6, 9\].*backend='torch'"):
        made("dali", store, [BatchRequest(np.array([0, 3, 6, 9]), 0, 500, True)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_pipeline_starts_only_when_its_iterator_is_used(backend: str, folder: Path) -> None:
    store = FolderStore(folder)
    wanted = requests(len(store), steps=9)
    with pipeline(backend, store) as pipe:
        pipe.run(wanted)
        assert store.asked == []
        half = pipe.run(wanted)
        first = [next(half)[0].clone() for _ in range(2)]
        half.close()
        begun = len(store.asked)
        assert begun < 9, "a closed iterator must stop"
        for _ in range(2):
            whole = [images.clone() for images, _ in pipe.run(wanted)]
            assert len(whole) == 9
            assert torch.equal(whole[0], first[0])
            assert torch.equal(whole[1], first[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_store_error_is_raised_at_its_batch(backend: str, folder: Path) -> None:
    store = FolderStore(folder)
    wanted = [*requests(len(store), steps=2), BatchRequest(np.array([10**6]), 0, 32, True)]
    with pipeline(backend, store) as pipe:
        batches = pipe.run(wanted)
        next(batches)
        next(batches)
        with pytest.raises(IndexError):
            next(batches)
