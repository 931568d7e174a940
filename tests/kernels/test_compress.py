"""Fused error feedback, selection and packing equal plain torch bit for bit, and conserve the sum."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.kernels import message_bytes, reference, wire
from tests.kernels.paths import (
    DTYPES,
    PATHS,
    PLAIN,
    RARE,
    VALUES,
    Path,
    decoded,
    every_path,
    inputs,
    large_input,
    nearly_equal,
    nonfinite_count,
    paths,
    same_bits,
    with_threads,
)
from tests.kernels.test_select import agree, with_oracle

COMPILED = [path for path in PATHS if path.name != "plain"]
compiled_paths = paths(*COMPILED)


@dataclass(frozen=True)
class Case:
    """An input and its results with plain torch, computed once for all paths."""

    grad: Tensor
    residual: Tensor | None
    k: int
    value_dtype: torch.dtype
    scale: Tensor | None
    message: Tensor
    left: Tensor


def by_plain(
    grad: Tensor, residual: Tensor | None, k: int, value_dtype: torch.dtype, scale: Tensor | None = None
) -> Case:
    left = torch.full((grad.numel(),), 123.0)
    message = PLAIN.compress(grad, residual, left, k, value_dtype, scale)
    return Case(grad, residual, k, value_dtype, scale, message, left)


def same_as_plain(path: Path, case: Case) -> None:
    """Check that the path's message and residual equal the results of plain torch."""
    left = torch.full((case.grad.numel(),), 123.0)
    message = path.compress(case.grad, case.residual, left, case.k, case.value_dtype, case.scale)
    assert same_bits(message, case.message)
    assert same_bits(left, case.left)


@lru_cache(maxsize=1)
def combined(numel: int) -> list[Case]:
    """Return 36 combinations of options, assigned to the inputs in turn."""
    residual = torch.randn(numel, generator=torch.Generator().manual_seed(9)) * 0.1
    scale, k = torch.tensor(1 / 3), max(1, numel // 50)
    combinations = itertools.cycle(itertools.product(DTYPES, VALUES, (None, residual), (None, scale)))
    cases = []
    for x in inputs(numel).values():
        for _ in range(5 if numel < 100_000 else 2):
            grad_dtype, value_dtype, before, factor = next(combinations)
            cases.append(by_plain(x.to(grad_dtype), before, k, value_dtype, factor))
    return cases


@compiled_paths
@pytest.mark.parametrize("numel", [1, 9, 4097, 140_001])
def test_same_bits_as_plain_torch(path: Path, numel: int) -> None:
    for case in combined(numel):
        same_as_plain(path, case)


@lru_cache(maxsize=1)
def misleading(value_dtype: torch.dtype) -> list[Case]:
    """Return inputs with too many or too few elements above the threshold of the sample."""
    cases, numel = [], 200_003
    for width in (1, 3000, 100_000):
        x = torch.rand(numel, generator=torch.Generator().manual_seed(width)) * 1e-3
        x[123_456 : 123_456 + width] += 1.0
        x[77_777] = torch.nan
        cases += [by_plain(x, x.flip(0) * 0.1, k, value_dtype) for k in (width, 6000)]
    return cases


@compiled_paths
@pytest.mark.parametrize("value_dtype", VALUES, ids=str)
def test_misleading_sample_changes_nothing(path: Path, value_dtype: torch.dtype) -> None:
    for case in misleading(value_dtype):
        same_as_plain(path, case)


@lru_cache(maxsize=1)
def ties(shares: tuple[float, ...]) -> list[Case]:
    x = nearly_equal(600_011, shares)
    x[::50_000] = torch.nan
    x[7::90_000] = 9.0
    with_zeros = by_plain(torch.where(x == 1.0, 0.0, x), torch.zeros_like(x), 100, torch.bfloat16)
    return [*(by_plain(x, None, 6000, value_dtype) for value_dtype in VALUES), with_zeros]


@compiled_paths
@pytest.mark.parametrize("shares", [(0.999, 0.001), (0.34, 0.33, 0.33)], ids=str)
def test_more_ties_than_candidates_fit_equal_plain_torch(path: Path, shares: tuple[float, ...]) -> None:
    for case in ties(shares):
        same_as_plain(path, case)


@lru_cache(maxsize=1)
def large(value_dtype: torch.dtype) -> Case:
    return by_plain(large_input(), None, 40_000, value_dtype)


@with_threads
@pytest.mark.parametrize("value_dtype", VALUES, ids=str)
def test_threads_share_every_phase_of_a_large_input(path: Path, value_dtype: torch.dtype) -> None:
    same_as_plain(path, large(value_dtype))


@lru_cache(maxsize=1)
def sums(numel: int, k: int) -> list[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """Return name, gradient, residual, their sum, and the places of the k largest sums of each input."""
    found = []
    for name, x in inputs(numel).items():
        if bool(x.isfinite().all()) and name != "huge":
            residual = x.flip(0) * 0.3
            found.append((name, x, residual, residual + x, reference.topk(residual + x, k)[1].long()))
    return found


@every_path
@pytest.mark.parametrize("value_dtype", VALUES, ids=str)
def test_message_and_residual_add_up(path: Path, value_dtype: torch.dtype) -> None:
    numel, k = 70_001, 700
    for name, x, residual, acc, kept in sums(numel, k):
        left = torch.empty(numel)
        message = path.compress(x, residual, left, k, value_dtype)
        sent = decoded(message, numel, k, value_dtype)
        if value_dtype == wire.TWO_BIT:
            assert same_bits(left[kept], acc[kept] - sent[kept]), name
        else:
            assert same_bits(sent[kept] + left[kept] + 0.0, acc[kept] + 0.0), name  # rounding errors are exact
        untouched = torch.ones(numel, dtype=torch.bool)
        untouched[kept] = False
        assert same_bits(left[untouched], acc[untouched]), name


@every_path
@pytest.mark.parametrize("value_dtype", [torch.bfloat16, wire.TWO_BIT], ids=str)
def test_many_rounds_conserve_the_sum(path: Path, value_dtype: torch.dtype) -> None:
    numel, k = 5000, 50
    g = torch.Generator().manual_seed(4)
    before, after, applied, total = torch.zeros(numel), torch.empty(numel), torch.zeros(numel), torch.zeros(numel)
    for _ in range(40):
        grad = torch.randn(numel, generator=g)
        applied += decoded(path.compress(grad, before, after, k, value_dtype), numel, k, value_dtype)
        total += grad
        before, after = after, before
    torch.testing.assert_close(applied + before, total, atol=1e-4, rtol=1e-4)


@every_path
@pytest.mark.parametrize("value_dtype", VALUES, ids=str)
def test_non_finite_elements_are_counted_and_leave_no_residual(path: Path, value_dtype: torch.dtype) -> None:
    numel = 70_001
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(5))
    bad = torch.tensor([3, 4095, 65_536, 70_000])
    grad[bad] = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.nan])
    for k in (2, 4, 300):
        left = torch.empty(numel)
        message = path.compress(grad, None, left, k, value_dtype)
        assert nonfinite_count(message) == 4
        values, indices, _ = wire.decode(message, numel, k, value_dtype)
        sent = set(indices.tolist())
        assert len(sent & set(bad.tolist())) == min(k, 4)
        assert left[bad].tolist() == [0.0] * 4
        assert bool(left.isfinite().all())
        assert int((~values.isfinite()).sum()) == (0 if value_dtype == wire.TWO_BIT else min(k, 4))


@every_path
@pytest.mark.parametrize("value_dtype", VALUES, ids=str)
def test_largest_finite_elements_stay_finite(path: Path, value_dtype: torch.dtype) -> None:
    largest = torch.finfo(torch.float32).max
    grad = torch.tensor([1.0, largest, -largest, 7e4, 3.39e38] * 20)
    grad[9], grad[14] = torch.finfo(torch.bfloat16).max, -torch.finfo(torch.bfloat16).max  # not clipped
    left = torch.empty(100)
    same_as_plain(path, by_plain(grad, None, 80, value_dtype))
    message = path.compress(grad, None, left, 80, value_dtype)
    assert bool(decoded(message, 100, 80, value_dtype).isfinite().all())
    assert bool(left.isfinite().all())
    assert nonfinite_count(message) == 0


@every_path
def test_message_does_not_depend_on_the_residual_output(path: Path) -> None:
    grad, residual = torch.randn(2, 70_001, generator=torch.Generator().manual_seed(6))
    left = torch.empty(70_001)
    with_residual = path.compress(grad, residual, left, 700, torch.bfloat16)
    assert same_bits(path.compress(grad, residual, None, 700, torch.bfloat16), with_residual)
    zeros = torch.zeros(70_001)
    assert same_bits(path.compress(grad, zeros, None, 70, DTYPES[0]), path.compress(grad, None, None, 70, DTYPES[0]))


@every_path
def test_inputs_are_unchanged(path: Path) -> None:
    """Other tests depend on this, because all paths share the inputs."""
    grad, residual = torch.randn(2, 140_001, generator=torch.Generator().manual_seed(8))
    copies = grad.clone(), residual.clone()
    message = path.compress(grad, residual, torch.empty(140_001), 90, torch.bfloat16, torch.tensor(0.5))
    assert message.numel() == message_bytes(140_001, 90, torch.bfloat16)
    path.mstopk(grad, 90)
    before = message.clone()
    path.accumulate(message[None], torch.empty(140_001), 90, torch.bfloat16)
    assert grad.equal(copies[0])
    assert residual.equal(copies[1])
    assert message.equal(before)


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    values=st.lists(st.floats(width=32), min_size=1, max_size=60),
    repeat=st.integers(1, 30),
    value_dtype=st.sampled_from(VALUES),
)
def test_arbitrary_input_equals_the_reference(
    data: st.DataObject, values: list[float], repeat: int, value_dtype: torch.dtype
) -> None:
    grad = torch.tensor(values * repeat, dtype=torch.float32)
    k = data.draw(st.integers(1, grad.numel()))
    case = by_plain(grad, grad.flip(0), k, value_dtype)
    for path in (*COMPILED, *RARE):
        same_as_plain(path, case)


@every_path
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_at_odd_offsets(path: Path, dtype: torch.dtype) -> None:
    base = torch.randn(70_100, generator=torch.Generator().manual_seed(3))
    for offset in (1, 3):
        grad = base.to(dtype)[offset : offset + 70_000]
        agree(path, with_oracle(offset, grad, [701]))
        if path.name != "plain":
            same_as_plain(path, by_plain(grad, base[5:70_005], 701, torch.bfloat16))


@pytest.mark.parametrize("value_dtype", VALUES, ids=str)
def test_repeated_runs_give_the_same_bits(value_dtype: torch.dtype) -> None:
    grad, residual = torch.randn(2, 140_001, generator=torch.Generator().manual_seed(7))
    first = None
    for run in range(100):
        left = torch.empty(140_001)
        path = PATHS[1 + run % (len(PATHS) - 1)]
        both_bits = path.compress(grad, residual, left, 1400, value_dtype), left
        first = first or both_bits
        assert same_bits(first[0], both_bits[0])
        assert same_bits(first[1], both_bits[1])
