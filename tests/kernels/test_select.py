"""`mstopk` equals a full stable sort. test_compress.py has more inputs for the same selection."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.kernels import mstopk, plain, reference
from tests.kernels.paths import (
    DTYPES,
    PATHS,
    RARE,
    Path,
    every_path,
    inputs,
    ks,
    same_bits,
)

# Around the chunk (4,096), the block (65,536), the size below which everything is sampled (65,536), and vector lengths.
SIZES = (1, 2, 7, 64, 100, 4095, 4097, 70_001)
Pair = tuple[Tensor, Tensor]
Case = tuple[object, int, Tensor, Pair]  # name, k, x and the expected result, computed once for all paths


def with_oracle(what: object, x: Tensor, counts: Iterable[int]) -> list[Case]:
    return [(what, k, x, reference.topk(x, k)) for k in counts]


def agree(path: Path, cases: list[Case]) -> None:
    for what, k, x, want in cases:
        got = path.mstopk(x, k)
        assert same_bits(got[1], want[1]), (what, k)
        assert same_bits(got[0], want[0]), (what, k)


@lru_cache(maxsize=2)
def cases(numel: int) -> list[Case]:
    return [case for name, x in inputs(numel).items() for case in with_oracle(name, x, ks(numel))]


@every_path
@pytest.mark.parametrize("numel", SIZES)
def test_selection_is_top_k_with_ties_to_the_lowest_index(path: Path, numel: int) -> None:
    agree(path, cases(numel)[:: 3 if path.threads > 1 and numel > 65_536 else 1])  # threads start slowly


@pytest.mark.parametrize("numel", [1, 100, 4097])
def test_topk_and_kthvalue_find_the_same_element(numel: int) -> None:
    for name, k, x, _ in cases(numel):  # CUDA uses topk, the CPU kthvalue
        bits = reference.magnitude_bits(x)
        assert plain.kth_largest(bits, k, use_topk=True).equal(plain.kth_largest(bits, k, use_topk=False)), (name, k)


@lru_cache(maxsize=1)
def all_patterns() -> list[Case]:
    patterns = torch.arange(65_536).to(torch.int32).to(torch.int16)
    return [case for dtype in DTYPES[1:] for case in with_oracle(dtype, patterns.view(dtype), (3000, 40_000))]


@every_path
def test_selection_of_all_16_bit_patterns(path: Path) -> None:
    agree(path, all_patterns())


def test_loop_of_the_paper_differs_in_at_most_one_element() -> None:
    for name in ("gaussian", "heavy-tailed", "layered", "one spike"):
        x = inputs(100_000)[name]
        for k in (10, 1000, 10_000):
            exact, paper = mstopk(x, k)[1], reference.mstopk(x, k)[1]
            assert len(set(exact.tolist()) ^ set(paper.tolist())) <= 2, (name, k)


elements = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, float("inf"), float("-inf"), float("nan")]),
)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), values=st.lists(elements, min_size=1, max_size=80), repeat=st.integers(1, 40))
def test_arbitrary_input_equals_the_reference(data: st.DataObject, values: list[float], repeat: int) -> None:
    x = torch.tensor(values * repeat, dtype=torch.float32)
    k = data.draw(st.integers(1, x.numel()))
    for path in (*PATHS, *RARE):
        agree(path, with_oracle(path, x, [k]))


# -- the reference, without the errors of published transcriptions -----------------------------------------------------


def transcription(x: torch.Tensor, k: int, iterations: int = 30) -> tuple[float, float]:
    """The published loop. Returns the final (t1, t2)."""
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
def test_reference_has_k_ascending_distinct_indices(numel: int) -> None:
    for name, x in inputs(numel).items():
        for k in ks(numel):
            values, indices = reference.mstopk(x, k)
            assert indices.numel() == k, (name, k)
            assert bool((indices.diff() > 0).all())
            assert values.view(torch.int32).equal(x[indices].view(torch.int32))


def test_reference_keeps_the_certain_elements_of_the_transcription() -> None:
    x = inputs(20_000)["gaussian"]
    for k in (20, 200, 2000):
        upper, lower = transcription(x, k)
        indices = reference.mstopk(x, k)[1].long()
        kept = torch.zeros(x.numel(), dtype=torch.bool)
        kept[indices] = True
        assert bool(kept[x.abs() >= upper].all())
        assert not bool(kept[x.abs() < lower].any())


def test_reference_of_ties_at_the_maximum_has_k_elements() -> None:
    for x in (torch.full((50,), 3.0), torch.tensor([5.0] * 20 + [1.0] * 30)):
        assert transcription(x, 7)[0] == 0.0, "the transcription would return all elements"
        assert reference.mstopk(x, 7)[1].tolist() == list(range(7))


def test_reference_selects_non_finite_elements_first() -> None:
    x = torch.tensor([1.0, torch.nan, 9.0, -torch.inf, 2.0, 8.0])
    assert reference.mstopk(x, 4)[1].tolist() == [1, 2, 3, 5]
    assert reference.mstopk(x, 1)[1].tolist() == [1]


def test_reference_selects_more_elements_than_lie_above_the_mean() -> None:
    x = torch.zeros(1000)
    x[::100] = 1000.0
    x[1::100] = torch.arange(1.0, 11.0)
    assert int((x >= x.mean()).sum()) == 10
    assert transcription(x, 15)[1] == 0.0, "the transcription would fill up with arbitrary elements"
    assert set(reference.mstopk(x, 15)[1].tolist()) == set(range(0, 1000, 100)) | {501, 601, 701, 801, 901}


def test_worked_example_of_the_bracket() -> None:
    a = torch.tensor([1.0, 2.0, 3.0, 10.0])
    assert reference.bisect(a, 1, iterations=2) == reference.Bracket(lower=3.0, upper=4.0)
