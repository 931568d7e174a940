"""exchange="dense16": all is sent at half the bytes, sums are made in fp32, and no rounding error is lost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.exchange import Shard, Work
from lightning_sparse.exchange.paths import Dense16

ONE = torch.ones(())


def exchange(grads_MS: Tensor, residuals_MS: Tensor) -> tuple[Tensor, Tensor, int]:
    """A round of all nodes in one process: what is applied, what each keeps, and the bytes that one receives."""
    nodes, numel = grads_MS.shape
    rounded, left_MS = Dense16(Work(nodes, 1, numel)), torch.full_like(grads_MS, torch.nan)
    shards = [Shard(grads_MS[m].clone(), residuals_MS[m], left_MS[m], ONE) for m in range(nodes)]
    sent = [rounded.split(shard) for shard in shards]
    arrived = [torch.stack([rows[m] for rows in sent]) for m in range(nodes)]
    rows = torch.stack([rounded.merge(arrived[m], m, left_MS[m]) for m in range(nodes)])
    received = (nodes - 1) * (sent[0][0].nbytes + rows[0].nbytes)
    return rounded.apply(rows, shards[0]), left_MS, received


@given(st.integers(1, 7), st.integers(1, 40), st.integers(0, 10**6))
def test_what_is_applied_and_what_is_left_make_the_sum(nodes: int, numel: int, seed: int) -> None:
    """Also where the shard has fewer elements than there are nodes, so that some own nothing."""
    generator = torch.Generator().manual_seed(seed)
    grads, residuals = (torch.randn(nodes, numel, generator=generator) for _ in range(2))
    applied, left, received = exchange(grads, residuals)
    total = (grads.double() + residuals.double()).sum(0)
    torch.testing.assert_close(applied.double() + left.double().sum(0), total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(applied.double(), total, rtol=1e-2, atol=1e-2 * nodes)
    assert received == Dense16(Work(nodes, 1, numel)).bytes()


def test_sums_are_made_in_fp32() -> None:
    """256 + 1 + ... is 256 for ever in bfloat16, whose steps there are 2."""
    grads = torch.tensor([[256.0], [1.0], [1.0], [1.0], [1.0]])
    applied, left, _ = exchange(grads, torch.zeros_like(grads))
    assert applied.item() == 260.0
    assert not left.any()


def test_what_rounding_takes_off_is_sent_later() -> None:
    """0.1 % of a value is below the step of bfloat16: without the residual it would never arrive."""
    grads = torch.full((3, 10), 1.001)
    residuals, applied = torch.zeros_like(grads), torch.zeros(10)
    for _ in range(200):
        now, residuals, _ = exchange(grads, residuals)
        applied += now
    torch.testing.assert_close(applied, torch.full((10,), 600.6), rtol=0, atol=0.05)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_what_is_not_finite_reaches_all_and_no_residual(bad: float) -> None:
    grads = torch.randn(3, 10)
    grads[1, 9] = bad
    applied, left, _ = exchange(grads, torch.zeros_like(grads))
    assert not applied[9].isfinite()
    assert applied[:9].isfinite().all()
    assert left.isfinite().all()
