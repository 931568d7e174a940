"""Selection against its oracle, a full stable sort, and beside the paper's loop. Pure, a few seconds."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.kernels import mstopk, plain, reference
from tests.kernels.paths import DTYPES, PATHS, Path, every_path, inputs, ks, nearly_equal, same_bits

# Around the chunk (4,096), the block (65,536), the size below which everything is sampled (65,536), and vector lengths.
SIZES = (1, 2, 7, 64, 100, 4095, 4097, 70_001)
Pair = tuple[Tensor, Tensor]


@cache
def cases(numel: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, int, Tensor, Pair]]:
    """Name, k, input and the oracle's result, computed once for all paths."""
    all_inputs = {name: x.to(dtype) for name, x in inputs(numel).items()}
    return [(name, k, x, reference.topk(x, k)) for name, x in all_inputs.items() for k in ks(numel)]


def assert_same(got: Pair, want: Pair, what: object) -> None:
    assert same_bits(got[1], want[1]), what
    assert same_bits(got[0], want[0]), what


def dealt(path: Path, numel: int) -> list[tuple[str, int, Tensor, Pair]]:
    """All cases; with several threads, where waking them costs more than the work, every third: each k, each input."""
    return cases(numel)[:: 3 if path.threads > 1 and numel > 65_536 else 1]


@every_path
@pytest.mark.parametrize("numel", SIZES)
def test_exact_is_top_k_with_ties_to_the_lowest_index(path: Path, numel: int) -> None:
    for name, k, x, want in dealt(path, numel):
        assert_same(path.mstopk(x, k), want, (name, k))


@pytest.mark.parametrize("numel", [1, 7, 100, 4097])
def test_both_ways_to_the_kth_largest_agree(numel: int) -> None:
    for name, k, x, _ in cases(numel):  # CUDA takes topk, the CPU kthvalue
        bits = reference.magnitude_bits(x)
        assert plain.kth_largest(bits, k, use_topk=True).equal(plain.kth_largest(bits, k, use_topk=False)), (name, k)


@every_path
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_16_bit_inputs(path: Path, dtype: torch.dtype) -> None:
    for name, k, x, want in cases(9001, dtype):
        assert_same(path.mstopk(x, k), want, (name, k))


@every_path
def test_every_16_bit_pattern(path: Path) -> None:
    patterns = torch.arange(65_536).to(torch.int32).to(torch.int16)
    for dtype in DTYPES[1:]:
        x = patterns.view(dtype)
        for k in (3000, 40_000):
            assert_same(path.mstopk(x, k), reference.topk(x, k), (dtype, k))


@every_path
def test_views_at_odd_offsets(path: Path) -> None:
    base = torch.randn(70_100, generator=torch.Generator().manual_seed(3))
    for dtype in DTYPES:
        for offset in (1, 3, 5):
            x = base.to(dtype)[offset : offset + 70_000]
            assert_same(path.mstopk(x, 701), reference.topk(x, 701), (dtype, offset))


@every_path
def test_a_sample_that_misleads_changes_nothing(path: Path) -> None:
    # All that is large sits in one place, far more or far less of it than any sample sees in proportion.
    numel = 200_003
    for width in (1, 3000, 100_000):
        x = torch.rand(numel, generator=torch.Generator().manual_seed(width)) * 1e-3
        x[123_456 : 123_456 + width] += 1.0
        for k in (width, width + 1, 4000):
            assert_same(path.mstopk(x, k), reference.topk(x, k), (width, k))


@every_path
@pytest.mark.parametrize("shares", [(1.0,), (0.999, 0.001), (0.3, 0.7), (0.34, 0.33, 0.33), (0.2, 0.5, 0.3)], ids=str)
def test_more_ties_than_candidates_have_room_for(path: Path, shares: tuple[float, ...]) -> None:
    x = nearly_equal(600_011, shares)
    for k in (6000, 300_000):
        assert_same(path.mstopk(x, k), reference.topk(x, k), k)


@cache
def large() -> tuple[Tensor, Pair]:
    x = inputs(1_200_007)["few values"] * 0.5 + inputs(1_200_007)["special"]
    return x, reference.topk(x, 90_000)


@every_path
def test_so_many_that_every_phase_is_shared_by_threads(path: Path) -> None:
    x, want = large()
    assert_same(path.mstopk(x, 90_000), want, path)


def test_all_paths_give_the_same_bits_a_hundred_times() -> None:
    x = inputs(140_001)["special"]
    want = PATHS[1].mstopk(x, 5000)
    for path in PATHS[1:]:
        for _ in range(100 // (len(PATHS) - 1) + 1):  # 102 runs
            assert_same(path.mstopk(x, 5000), want, path)


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


def test_index_type_and_order() -> None:
    values, indices = mstopk(torch.tensor([1.0, -5.0, 2.0, 5.0]), 2)
    assert values.tolist() == [-5.0, 5.0]
    assert indices.tolist() == [1, 3]
    assert indices.dtype == torch.int32
