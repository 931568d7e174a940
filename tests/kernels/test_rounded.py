"""Rounding to rows of bfloat16, and their sum: every path equals plain torch bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.paths import DTYPES, Path, every_path, inputs, same_bits

QUIET = 0x7FC0


def cast(exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return bfloat16 values and their rounding errors."""
    rounded = torch.where(exact.isnan(), torch.zeros(()), exact).bfloat16()
    rounded.view(torch.int16)[exact.isnan()] = QUIET
    return rounded, torch.where(rounded.isfinite(), exact - rounded.float(), 0.0)


def rows_of(count: int, numel: int, seed: int = 0) -> Tensor:
    """Return rows with all kinds of values in `inputs`."""
    known = list(inputs(numel).values())
    return torch.stack([known[(seed + m) % len(known)].roll(seed) for m in range(count)]).bfloat16()


@every_path
@pytest.mark.parametrize(("numel", "num_rows"), [(1, 1), (1, 5), (100, 3), (4097, 8), (140_001, 2)])
def test_round_rows_equals_plain_torch(path: Path, numel: int, num_rows: int) -> None:
    residual, scale = torch.randn(numel, generator=torch.Generator().manual_seed(9)) * 0.1, torch.tensor(1 / 3)
    for turn, (name, x) in enumerate(inputs(numel).items()):
        grad, before, factor = x.to(DTYPES[turn % 3]), residual if turn % 4 > 1 else None, scale if turn % 2 else None
        acc = grad.float() if factor is None else grad.float() * factor
        want, lost = cast(acc if before is None else before + acc)
        left = torch.full((numel,), 3.0)
        rows = path.round_rows(grad, before, left, num_rows, factor)
        assert rows.shape == (num_rows, -(-numel // num_rows))
        assert same_bits(rows.view(-1)[:numel], want), name
        assert same_bits(left, lost), name
        assert not rows.view(-1)[numel:].view(torch.int16).any(), "the padding"
        assert same_bits(path.round_rows(grad, before, None, num_rows, factor), rows), name


@every_path
def test_rounding_of_all_bfloat16_values_and_values_between_them(path: Path) -> None:
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    words = (torch.arange(-(2**15), 2**15)[:, None] * 65_536 + low).view(-1).to(torch.int32)
    x = words.view(torch.float32)
    left = torch.empty_like(x)
    want, lost = cast(x)
    assert same_bits(path.round_rows(x, None, left, 1).view(-1), want)
    assert same_bits(left, lost)


@every_path
@pytest.mark.parametrize(("num_rows", "numel"), [(1, 1), (4, 7), (3, 4097), (9, 140_000), (70, 100)])
def test_sum_rows_equals_plain_torch(path: Path, num_rows: int, numel: int) -> None:
    for seed in range(3):
        rows = rows_of(num_rows, numel, seed)
        total = rows[0].float()
        for row in rows[1:]:
            total = total + row.float()
        want, lost = cast(total)
        for own in {numel, max(1, numel // 2), 1}:
            before = torch.randn(own, generator=torch.Generator().manual_seed(1))
            left = before.clone()
            assert same_bits(path.sum_rows(rows, left), want)
            assert same_bits(left, before + lost[:own])
        assert same_bits(path.sum_rows(rows, None), want)


@every_path
def test_sums_in_row_order(path: Path) -> None:
    rows = torch.tensor([[1e8], [1.0], [-1e8], [1.0]]).bfloat16().expand(4, 70_000).contiguous()
    assert path.sum_rows(rows, None).eq(1.0).all(), "1e8 + 1 - 1e8 + 1 in fp32: another order gives another result"


@every_path
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_at_odd_offsets(path: Path, dtype: torch.dtype) -> None:
    numel = 9001
    base = torch.randn(numel + 8, generator=torch.Generator().manual_seed(3))
    grad, residual, left = base.to(dtype)[1 : 1 + numel], base[3 : 3 + numel], torch.empty(numel + 1)[1:]
    want, lost = cast(residual + grad.float())
    rows = path.round_rows(grad, residual, left, 1)
    assert same_bits(rows.view(-1), want)
    assert same_bits(left, lost)
    shifted = torch.cat([rows.new_zeros(1, 1), rows, rows], 1).view(-1)[1:].view(2, numel)
    assert same_bits(path.sum_rows(shifted, left), path.sum_rows(shifted.clone(), None))
