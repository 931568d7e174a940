"""The reference itself: each fault of the transcriptions in circulation, shown to be mended. Pure, under a second."""

from __future__ import annotations

import pytest
import torch

from lightning_sparse.kernels import reference
from tests.kernels.paths import inputs, ks


def transcription(x: torch.Tensor, k: int, iterations: int = 30) -> tuple[float, float]:
    """The loop as it circulates: the final (t1, t2)."""
    a = x.abs()
    mean, largest = a.mean(), a.max()
    left, right, k1, k2, t1, t2 = 0.0, 1.0, 0, x.numel(), 0.0, 0.0
    for _ in range(iterations):
        ratio = left + (right - left) / 2
        threshold = float(mean + ratio * (largest - mean))
        count = int((a >= threshold).sum())
        if count <= k:
            right = ratio
            if count > k1:
                k1, t1 = count, threshold
        else:
            left = ratio
            if count < k2:
                k2, t2 = count, threshold
    return t1, t2


@pytest.mark.parametrize("numel", [1, 3, 100, 5000])
def test_exactly_k_ascending_and_distinct(numel: int) -> None:
    for name, x in inputs(numel).items():
        for k in ks(numel):
            values, indices = reference.mstopk(x, k)
            assert indices.numel() == k, (name, k)
            assert bool((indices.diff() > 0).all())
            assert values.view(torch.int32).equal(x[indices].view(torch.int32))


def test_keeps_what_the_transcription_is_certain_of() -> None:
    x = inputs(20_000)["gaussian"]
    for k in (20, 200, 2000):
        upper, lower = transcription(x, k)
        indices = reference.mstopk(x, k)[1].long()
        kept = torch.zeros(x.numel(), dtype=torch.bool)
        kept[indices] = True
        assert bool(kept[x.abs() >= upper].all())
        assert not bool(kept[x.abs() < lower].any())


def test_2_constant_input_and_ties_at_the_maximum() -> None:
    for x in (torch.full((50,), 3.0), torch.tensor([5.0] * 20 + [1.0] * 30)):
        assert transcription(x, 7)[0] == 0.0, "the fault that is mended: everything would be returned"
        assert reference.mstopk(x, 7)[1].tolist() == list(range(7))


def test_3_what_is_not_finite_comes_first() -> None:
    x = torch.tensor([1.0, torch.nan, 9.0, -torch.inf, 2.0, 8.0])
    assert reference.mstopk(x, 4)[1].tolist() == [1, 2, 3, 5]
    assert reference.mstopk(x, 1)[1].tolist() == [1]


def test_4_k_beyond_those_above_the_mean() -> None:
    x = torch.zeros(1000)
    x[::100] = 1000.0
    x[1::100] = torch.arange(1.0, 11.0)
    assert int((x >= x.mean()).sum()) == 10
    assert transcription(x, 15)[1] == 0.0, "the fault that is mended: the rest is an arbitrary slice"
    assert set(reference.mstopk(x, 15)[1].tolist()) == set(range(0, 1000, 100)) | {501, 601, 701, 801, 901}


def test_worked_example_of_the_bracket() -> None:
    a = torch.tensor([1.0, 2.0, 3.0, 10.0])
    assert reference.bisect(a, 1, iterations=2) == reference.Bracket(lower=3.0, upper=4.0)
