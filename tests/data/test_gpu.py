"""Batches of the GPU equal batches of the CPU: DALI's mixed decoding of JPEG, and uploads of cached pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparse.data.config import ImageOptions
from lightning_sparse.data.pipeline.images import has_dali
from tests.data.fake_store import FolderStore, make_folder
from tests.data.test_pipelines import requests

needs_dali = pytest.mark.skipif(not has_dali(), reason="DALI is not installed")
GRAY = ImageOptions(seed=3, mean=(0, 0, 0), std=(1 / 255,) * 3)  # levels of gray


@pytest.mark.gpu
@needs_dali
@pytest.mark.parametrize("store_format", ["decoded", "jpeg"])
def test_gpu_gives_the_images_of_the_cpu(tmp_path: Path, store_format: Any) -> None:
    from lightning_sparse.data.pipeline.dali import DaliPipeline

    store = FolderStore(make_folder(tmp_path) / "train", store_format)
    wanted = [*requests(len(store), epoch=1), *requests(len(store), train=False, size=40)]
    made: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for device in (None, torch.cuda.current_device()):
        pipe = DaliPipeline(store, GRAY, batch_size=4, threads=2, device=device)
        made.append([(images.cpu(), labels.cpu()) for images, labels in pipe.run(wanted)])
        if device is not None:
            assert all(images.is_cuda and labels.is_cuda for images, labels in pipe.run(wanted))
        pipe.close()
    assert len(made[0]) == len(made[1]) == len(wanted)
    for (one, labels), (other, other_labels) in zip(*made, strict=True):
        assert torch.equal(labels, other_labels)
        assert (one - other).abs().mean() < 2.5, "another region or a flip would differ by tens"


@pytest.mark.gpu
@needs_dali
def test_batch_outlives_the_next_batches(tmp_path: Path) -> None:
    """DALI passes its memory on without a copy, so it must not reuse it while a batch is in use."""
    from lightning_sparse.data.pipeline.dali import DaliPipeline

    store = FolderStore(make_folder(tmp_path) / "train")
    pipe = DaliPipeline(store, GRAY, batch_size=4, threads=2, device=torch.cuda.current_device())
    wanted = requests(len(store), steps=20)
    kept = [images for images, _ in pipe.run(wanted)]
    sums = [float(images.sum()) for images in kept]
    assert sums == [float(images.sum()) for images, _ in pipe.run(wanted)]
    pipe.close()


@pytest.mark.gpu
def test_torch_backend_normalizes_on_the_gpu(tmp_path: Path) -> None:
    from lightning_sparse.data.pipeline.images import TorchPipeline

    store = FolderStore(make_folder(tmp_path) / "train")
    wanted = [*requests(len(store), epoch=1), *requests(len(store), train=False, size=40)]
    pipes = [TorchPipeline(store, GRAY, threads=2, device=each) for each in (None, torch.device("cuda", 0))]
    for (one, labels), (other, other_labels) in zip(*(pipe.run(wanted) for pipe in pipes), strict=True):
        assert other.is_cuda
        torch.testing.assert_close(one, other.cpu(), rtol=0, atol=1e-3)
        assert torch.equal(labels, other_labels.cpu())
    for pipe in pipes:
        pipe.close()
