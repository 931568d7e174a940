"""Windows: those of torchvision in distribution, inside the picture, and repeatable."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse.data.pipeline.augment import Augment, centre_crops

edges = st.lists(st.integers(1, 900), min_size=1, max_size=8)


@given(edges, edges, st.integers(0, 9), st.sampled_from([(0.08, 1.0), (0.9, 1.0), (0.001, 0.002)]))
def test_crops_lie_inside_the_picture(
    heights: list[int], widths: list[int], epoch: int, scale: tuple[float, float]
) -> None:
    count = min(len(heights), len(widths))
    h, w = np.array(heights[:count]), np.array(widths[:count])
    for crops in (Augment(crop_scale=scale).crops(epoch, np.arange(count), h, w), centre_crops(h, w)):
        assert (crops.height >= 1).all()
        assert (crops.width >= 1).all()
        assert (crops.top >= 0).all()
        assert (crops.left >= 0).all()
        assert (crops.top + crops.height <= h).all()
        assert (crops.left + crops.width <= w).all()


def test_a_window_depends_on_seed_epoch_and_sample_alone() -> None:
    sizes = np.full(8, 256), np.full(8, 341)
    alone = Augment().crops(3, np.arange(8), *sizes)
    assert alone.top.tolist() != Augment().crops(4, np.arange(8), *sizes).top.tolist()
    assert alone.top.tolist() != Augment(seed=1).crops(3, np.arange(8), *sizes).top.tolist()
    turned = Augment().crops(3, np.arange(8)[::-1], *sizes)
    for one, other in zip(alone, turned, strict=True):
        assert one.tolist() == other[::-1].tolist(), "not on the place in the batch"


@pytest.mark.parametrize(("height", "width"), [(256, 341), (300, 200), (40, 400), (500, 60)])
def test_the_distribution_is_that_of_torchvision(height: int, width: int) -> None:
    crop = pytest.importorskip("torchvision.transforms").RandomResizedCrop
    torch.manual_seed(0)
    picture = torch.empty(3, height, width)
    theirs = np.array([crop.get_params(picture, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)])
    count = 4000
    ours = Augment().crops(0, np.arange(count), np.full(count, height), np.full(count, width))
    for column, mine in enumerate(ours[:4]):
        for share in (0.1, 0.25, 0.5, 0.75, 0.9):
            a, b = np.quantile(theirs[:, column], share), np.quantile(mine, share)
            assert abs(a - b) <= 0.05 * max(height, width), (column, share, a, b)
    assert 0.45 < ours.flip.mean() < 0.55


def test_the_centre_is_what_resizing_to_256_and_cutting_224_leaves() -> None:
    crops = centre_crops(np.array([256, 375]), np.array([341, 500]))
    assert [each.tolist() for each in crops] == [[16, 23], [58, 86], [224, 328], [224, 328], [False, False]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"crop_scale": (0.0, 1.0)}, "crop_scale"),
        ({"crop_scale": (0.5, 0.2)}, "crop_scale"),
        ({"flip": 1.1}, "flip=1.1 must be a probability"),
    ],
)
def test_bad_values_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Augment(**options)  # type: ignore[arg-type]
