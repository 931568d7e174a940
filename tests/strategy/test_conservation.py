"""Nothing is lost, and what was thrown away stays so: on real Gloo ranks.

Every test runs the worker below it (named after the test) in P processes and compares what the ranks return.
"""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.strategy import HierConfig, HierState
from tests.helpers.distributed import RunRanks
from tests.strategy.models import (
    conserved,
    flat_grads,
    flat_parameters,
    loss_of,
    mlp,
    node_residual,
    sum_over_nodes,
    wrap,
)

SHAPES = [(2, 2), (3, 1), (1, 3)]
PLAIN = {"bucket_cap_mb": 0.002}  # several buckets, rebuilt after the first round


# -- 3: nothing is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("nodes", "devices"), SHAPES)
def test_mass_is_conserved_over_rebuilt_buckets(ranks: RunRanks, nodes: int, devices: int, value_dtype: str) -> None:
    for given, applied, waiting in ranks(conserve, value_dtype, nodes=nodes, devices=devices, timeout=120):
        torch.testing.assert_close(given, applied + waiting, rtol=1e-5, atol=2e-5)
        if nodes > 1:
            assert waiting.abs().max() > 1e-3, "the test would pass without error feedback"


def conserve(value_dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """50 rounds under four wrappers."""
    config = HierConfig(density=0.03, exchange="sparse", value_dtype=value_dtype, warmup_epochs=0)
    return conserved(config, itertools.cycle([0.002, 25.0, 0.004]), rounds=50, rewrap=13)[:3]


@pytest.mark.parametrize(("nodes", "devices"), [(2, 2), (3, 1)])
def test_several_backwards_before_a_step_lose_nothing(ranks: RunRanks, nodes: int, devices: int) -> None:
    for given, applied, waiting in ranks(several_backwards, nodes=nodes, devices=devices):
        torch.testing.assert_close(given, applied + waiting, rtol=1e-5, atol=2e-5)


def several_backwards() -> tuple[Tensor, Tensor, Tensor]:
    """Each backward is a round. Of a small parameter often nothing is sent: its zeros are no zero_grad."""
    ddp, state, optimizer = watched(density=0.03)
    given = torch.zeros_like(flat_parameters(ddp)).double()
    applied = given.clone()
    for step in range(0, 30, 2):
        optimizer.zero_grad()
        for each in (step, step + 1):
            given += mean_gradient(ddp, each)
            state.before_backward()
            loss_of(ddp, each, dist.get_rank()).backward()
        applied += flat_grads(ddp)
        optimizer.step()
    state.settle()
    return given, applied, sum_over_nodes(node_residual(ddp.module, state), state)


def test_parameter_groups_may_be_added_while_training(ranks: RunRanks) -> None:
    for given, applied, waiting in ranks(added_groups, nodes=2, devices=1):
        torch.testing.assert_close(given, applied + waiting, rtol=1e-5, atol=2e-5)


def added_groups() -> tuple[Tensor, Tensor, Tensor]:
    ddp, state, optimizer = watched(density=0.03, parameters=2)
    optimizer.add_param_group({"params": list(ddp.parameters())[2:]})
    given = torch.zeros_like(flat_parameters(ddp)).double()
    applied = given.clone()
    for step in range(12):
        optimizer.zero_grad()
        given += mean_gradient(ddp, step)
        state.before_backward()
        loss_of(ddp, step, dist.get_rank()).backward()
        applied += flat_grads(ddp)
        optimizer.step()
    optimizer.zero_grad()
    state.settle()
    return given, applied, sum_over_nodes(node_residual(ddp.module, state), state)


def watched(
    density: float, parameters: int | None = None, exchange: Any = "sparse"
) -> tuple[DistributedDataParallel, HierState, torch.optim.SGD]:
    """A model whose state knows the optimizer, of the first few parameters or of all."""
    model = mlp()
    config = HierConfig(density=density, exchange=exchange, value_dtype="float32", warmup_epochs=0)
    ddp, state = wrap(model, config, **PLAIN)
    optimizer = torch.optim.SGD(list(model.parameters())[:parameters], lr=0.1)
    state.watch([optimizer])
    return ddp, state, optimizer


def mean_gradient(ddp: DistributedDataParallel, step: int) -> Tensor:
    """What plain DDP would compute."""
    copied = copy.deepcopy(ddp.module)
    copied.zero_grad()
    loss_of(copied, step, dist.get_rank()).backward()
    mean = flat_grads(copied).double()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def test_a_dense_round_sends_the_residual_and_leaves_none(ranks: RunRanks) -> None:
    for residual_before, residual_after, applied, expected in ranks(dense_flush, nodes=2, devices=2):
        assert residual_before.abs().max() > 0
        assert torch.count_nonzero(residual_after) == 0
        torch.testing.assert_close(applied, expected, rtol=1e-5, atol=1e-6)


def dense_flush() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    model = mlp()
    ddp, state = wrap(model, HierConfig(density=0.05, exchange="sparse"), **PLAIN)
    for step in range(6):
        model.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
    state.settle()
    before = sum_over_nodes(node_residual(model, state), state)
    model.zero_grad()
    with ddp.no_sync():
        loss_of(ddp, 6, dist.get_rank()).backward()
    mean = flat_grads(model).double()
    dist.all_reduce(mean)
    model.zero_grad()
    state.config = state.exchange.choice.config = HierConfig(exchange="dense")
    loss_of(ddp, 6, dist.get_rank()).backward()
    state.settle()
    applied = flat_grads(model).double()
    return before, node_residual(model, state), applied, mean / dist.get_world_size() + before


def test_duplicate_indices_of_several_nodes_add(ranks: RunRanks) -> None:
    """All ranks have the same gradient, so all nodes choose the same entries: the mean is that gradient, not 1/M."""
    for applied, gradient in ranks(duplicates, nodes=3, devices=1):
        sent = applied != 0
        assert 0 < sent.sum() < sent.numel()
        torch.testing.assert_close(applied[sent], gradient[sent], rtol=1e-5, atol=1e-7)


def duplicates() -> tuple[Tensor, Tensor]:
    model = mlp()
    config = HierConfig(density=0.05, exchange="sparse", value_dtype="float32", warmup_epochs=0)
    ddp, _ = wrap(model, config, bucket_cap_mb=25.0)
    for _ in range(4):
        model.zero_grad()
        loss_of(ddp, 0, rank=0).backward()  # the layout settles in dense rounds, so there is no residual yet
    return flat_grads(model), local_gradient()


def local_gradient() -> Tensor:
    model = mlp()
    loss_of(model, 0, rank=0).backward()
    return flat_grads(model)


# -- 6: what is thrown away --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("exchange", "set_to_none"), [("sparse", True), ("sparse", False), ("dense16", True)])
def test_all_rounds_of_a_gradient_that_is_thrown_away_leave_no_trace(
    ranks: RunRanks, exchange: str, set_to_none: bool
) -> None:
    for before, after in ranks(throw_away, exchange, set_to_none, nodes=2, devices=2):
        assert before.abs().max() > 0
        assert torch.equal(before, after)


def throw_away(exchange: str, set_to_none: bool) -> tuple[Tensor, Tensor]:
    ddp, state, optimizer = watched(density=0.05, exchange=exchange)
    for step in range(6):
        optimizer.zero_grad()
        state.before_backward()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
    optimizer.zero_grad()
    state.before_backward()
    before = node_residual(ddp.module, state)
    for step in (6, 7, 8):
        state.before_backward()
        loss_of(ddp, step, dist.get_rank()).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    state.before_backward()
    return before, node_residual(ddp.module, state)


@pytest.mark.parametrize(("nodes", "devices"), [(2, 1), (2, 2)])
def test_a_gradient_dropped_before_the_step_leaves_no_trace(ranks: RunRanks, nodes: int, devices: int) -> None:
    for before, after, others_moved in ranks(drop_some, nodes=nodes, devices=devices):
        assert before.abs().max() > 0
        assert torch.equal(before, after)
        assert others_moved


def drop_some() -> tuple[Tensor, Tensor, bool]:
    """As one holds a last layer still at first: its gradients are taken away, the others are stepped."""
    ddp, state, optimizer = watched(density=0.05)
    last = sum(p.numel() for p in ddp.module[4].parameters())
    for step in range(10):
        optimizer.zero_grad()
        state.before_backward()
        if step == 5:
            before = node_residual(ddp.module, state)
        loss_of(ddp, step, dist.get_rank()).backward()
        if step >= 5:
            for parameter in ddp.module[4].parameters():
                parameter.grad = None
        optimizer.step()
    state.settle()
    after = node_residual(ddp.module, state)
    return before[-last:], after[-last:], not torch.equal(before[:-last], after[:-last])


def test_a_masked_row_and_clipped_gradients_lose_nothing(ranks: RunRanks) -> None:
    """What is left of a gradient after the user worked on it was used, zeros included."""
    for given, applied, waiting in ranks(masked_and_clipped, nodes=2, devices=2):
        torch.testing.assert_close(given, applied + waiting, rtol=1e-5, atol=2e-5)


def masked_and_clipped() -> tuple[Tensor, Tensor, Tensor]:
    ddp, state, optimizer = watched(density=0.03)
    given = torch.zeros_like(flat_parameters(ddp)).double()
    applied = given.clone()
    for step in range(20):
        optimizer.zero_grad()
        given += mean_gradient(ddp, step)
        state.before_backward()
        loss_of(ddp, step, dist.get_rank()).backward()
        applied += flat_grads(ddp)
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
        nn.utils.clip_grad_value_(ddp.parameters(), 0.001)
        ddp.module[0].weight.grad[0] = 0.0
        optimizer.step()
    state.settle()
    return given, applied, sum_over_nodes(node_residual(ddp.module, state), state)
