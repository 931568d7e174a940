"""Crops lie inside the image, repeat, and have the distribution of torchvision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse.data.config import ImageOptions
from lightning_sparse.data.pipeline.images import center_crops, random_crops

PLAIN = ImageOptions()

edges = st.lists(st.integers(1, 900), min_size=1, max_size=8)


@given(edges, edges, st.integers(0, 9), st.sampled_from([(0.08, 1.0), (0.9, 1.0), (0.001, 0.002)]))
def test_crops_lie_inside_the_image(
    heights: list[int], widths: list[int], epoch: int, scale: tuple[float, float]
) -> None:
    count = min(len(heights), len(widths))
    h, w = np.array(heights[:count]), np.array(widths[:count])
    for crops in (
        random_crops(ImageOptions(crop_scale=scale), epoch, np.arange(count), h, w),
        center_crops(h, w),
        center_crops(h, w, (1, 1)),
    ):
        for first, length, end in ((crops.top, crops.height, h), (crops.left, crops.width, w)):
            assert (first >= 0).all()
            assert (length >= 1).all()
            assert (first + length <= end).all()


def test_crop_depends_on_seed_epoch_and_sample() -> None:
    sizes = np.full(8, 256), np.full(8, 341)
    alone = random_crops(PLAIN, 3, np.arange(8), *sizes)
    assert alone.top.tolist() != random_crops(PLAIN, 4, np.arange(8), *sizes).top.tolist()
    assert alone.top.tolist() != random_crops(ImageOptions(seed=1), 3, np.arange(8), *sizes).top.tolist()
    turned = random_crops(PLAIN, 3, np.arange(8)[::-1], *sizes)
    for one, other in zip(alone, turned, strict=True):
        assert one.tolist() == other[::-1].tolist(), "crops depend on the place in the batch"


@pytest.mark.parametrize(("height", "width"), [(256, 341), (40, 400), (500, 60)])
def test_distribution_of_crops_equals_torchvision(height: int, width: int) -> None:
    crop = pytest.importorskip("torchvision.transforms").RandomResizedCrop
    torch.manual_seed(0)
    picture = torch.empty(3, height, width)
    theirs = np.array([crop.get_params(picture, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)])
    count = 4000
    ours = random_crops(PLAIN, 0, np.arange(count), np.full(count, height), np.full(count, width))
    for column, mine in enumerate(ours[:4]):
        for share in (0.1, 0.25, 0.5, 0.75, 0.9):
            a, b = np.quantile(theirs[:, column], share), np.quantile(mine, share)
            assert abs(a - b) <= 0.05 * max(height, width), (column, share, a, b)
    assert 0.45 < ours.flip.mean() < 0.55


def test_center_crop_equals_resizing_to_256_and_cropping_224() -> None:
    crops = center_crops(np.array([256, 375]), np.array([341, 500]))
    assert [each.tolist() for each in crops] == [[16, 23], [58, 86], [224, 328], [224, 328], [False, False]]


@pytest.mark.parametrize(
    ("options", "size", "edge"),
    [
        ({}, 224, 280),  # 7/8 of the shorter side
        ({}, 64, 280),
        ({}, 32, 320),  # the whole small image
        ({"eval_resize": 256}, 224, 280),
        ({"eval_resize": 224}, 224, 320),
        ({"image_size": 32, "eval_resize": 40}, 32, 256),
    ],
)
def test_evaluation_crop_follows_eval_resize(options: dict[str, int], size: int, edge: int) -> None:
    part = ImageOptions(**options).eval_crop(size)  # type: ignore[arg-type]
    crops = center_crops(np.array([320]), np.array([400]), part)
    assert [each.item() for each in crops] == [(320 - edge) // 2, (400 - edge) // 2, edge, edge, False]
