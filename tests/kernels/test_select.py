"""Selection against its oracle, a full stable sort, and beside the paper's loop. Pure, a few seconds."""

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
    Path,
    every_path,
    inputs,
    ks,
    large_input,
    nearly_equal,
    same_bits,
    with_threads,
)

# Around the chunk (4,096), the block (65,536), the size below which everything is sampled (65,536), and vector lengths.
SIZES = (1, 2, 7, 64, 100, 4095, 4097, 70_001)
Pair = tuple[Tensor, Tensor]
Case = tuple[object, int, Tensor, Pair]  # what it is, k, x, and the oracle's result, computed once for all paths


def with_oracle(what: object, x: Tensor, counts: Iterable[int]) -> list[Case]:
    return [(what, k, x, reference.topk(x, k)) for k in counts]


def agree(path: Path, cases: list[Case]) -> None:
    for what, k, x, want in cases:
        assert_same(path.mstopk(x, k), want, (what, k))


def assert_same(got: Pair, want: Pair, what: object) -> None:
    assert same_bits(got[1], want[1]), what
    assert same_bits(got[0], want[0]), what


@lru_cache(maxsize=2)
def cases(numel: int, dtype: torch.dtype = torch.float32) -> list[Case]:
    return [case for name, x in inputs(numel).items() for case in with_oracle(name, x.to(dtype), ks(numel))]


def dealt(path: Path, numel: int) -> list[Case]:
    """All cases; with several threads, where waking them costs more than the work, every third: each k, each input."""
    return cases(numel)[:: 3 if path.threads > 1 and numel > 65_536 else 1]


@every_path
@pytest.mark.parametrize("numel", SIZES)
def test_exact_is_top_k_with_ties_to_the_lowest_index(path: Path, numel: int) -> None:
    agree(path, dealt(path, numel))


@pytest.mark.parametrize("numel", [1, 7, 100, 4097])
def test_both_ways_to_the_kth_largest_agree(numel: int) -> None:
    for name, k, x, _ in cases(numel):  # CUDA takes topk, the CPU kthvalue
        bits = reference.magnitude_bits(x)
        assert plain.kth_largest(bits, k, use_topk=True).equal(plain.kth_largest(bits, k, use_topk=False)), (name, k)


@every_path
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_16_bit_inputs(path: Path, dtype: torch.dtype) -> None:
    agree(path, cases(9001, dtype))


@lru_cache(maxsize=1)
def all_patterns() -> list[Case]:
    patterns = torch.arange(65_536).to(torch.int32).to(torch.int16)
    return [case for dtype in DTYPES[1:] for case in with_oracle(dtype, patterns.view(dtype), (3000, 40_000))]


@every_path
def test_every_16_bit_pattern(path: Path) -> None:
    agree(path, all_patterns())


@lru_cache(maxsize=1)
def views() -> list[Case]:
    base = torch.randn(70_100, generator=torch.Generator().manual_seed(3))
    bases = [base.to(dtype) for dtype in DTYPES]
    views = [(offset, each[offset : offset + 70_000]) for each in bases for offset in (1, 3, 5)]
    return [case for offset, x in views for case in with_oracle((x.dtype, offset), x, [701])]


@every_path
def test_views_at_odd_offsets(path: Path) -> None:
    agree(path, views())


@lru_cache(maxsize=1)
def misleading() -> list[Case]:
    """All that is large sits in one place, far more or far less of it than any sample sees in proportion."""
    made, numel = [], 200_003
    for width in (1, 3000, 100_000):
        x = torch.rand(numel, generator=torch.Generator().manual_seed(width)) * 1e-3
        x[123_456 : 123_456 + width] += 1.0
        made += with_oracle(width, x, (width, width + 1, 4000))
    return made


@every_path
def test_a_sample_that_misleads_changes_nothing(path: Path) -> None:
    agree(path, misleading())


@lru_cache(maxsize=1)
def ties(shares: tuple[float, ...]) -> list[Case]:
    return with_oracle(shares, nearly_equal(600_011, shares), (6000, 300_000))


@every_path
@pytest.mark.parametrize("shares", [(1.0,), (0.999, 0.001), (0.3, 0.7), (0.34, 0.33, 0.33), (0.2, 0.5, 0.3)], ids=str)
def test_more_ties_than_candidates_have_room_for(path: Path, shares: tuple[float, ...]) -> None:
    agree(path, ties(shares))


@lru_cache(maxsize=1)
def large() -> list[Case]:
    return with_oracle("large", large_input(), [90_000])


@with_threads
def test_so_many_that_every_phase_is_shared_by_threads(path: Path) -> None:
    agree(path, large())


def test_the_papers_loop_differs_in_at_most_one_element() -> None:
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
def test_anything(data: st.DataObject, values: list[float], repeat: int) -> None:
    x = torch.tensor(values * repeat, dtype=torch.float32)
    k = data.draw(st.integers(1, x.numel()))
    for path in PATHS:
        assert_same(path.mstopk(x, k), reference.topk(x, k), path)


# -- the reference itself: each fault of the transcriptions in circulation, shown to be mended -------------------------


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
