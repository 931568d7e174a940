"""Nothing is lost, and what was thrown away stays so: on real Gloo ranks.

Every test runs the worker below it (named after the test) in P processes and compares what the ranks return.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparse.strategy import HierConfig
from tests.helpers.distributed import RunRanks
from tests.strategy.models import (
    PLAIN,
    conserved,
    flat_grads,
    flat_parameters,
    loss_of,
    mean_gradient,
    mlp,
    node_residual,
    sum_over_nodes,
    watched,
    wrap,
)

SHAPES = [(2, 2), (3, 1), (1, 3)]


# -- 3: nothing is lost ------------------------------------------------------------------------------------------------


CONSERVED: list[tuple[dict[str, Any], tuple[int, int]]] = [
    *(({"exchange": "sparse"}, shape) for shape in SHAPES),
    *(({"exchange": "sparse", "value_dtype": "float32", "exclude": ("*.bias", "4.*")}, shape) for shape in SHAPES[:2]),
    ({"exchange": "regional"}, (3, 1)),
    ({"exchange": "sparse", "value_dtype": "2bit"}, (2, 2)),
    ({"exchange": "regional", "value_dtype": "2bit"}, (3, 1)),
    ({"exchange": "regional", "value_dtype": "float32"}, (3, 2)),
    *(({"exchange": "dense16"}, shape) for shape in ((2, 2), (3, 1), (5, 1))),
]
SLOW: list[tuple[dict[str, Any], tuple[int, int]]] = [
    *(({"exchange": "sparse", "value_dtype": "float32"}, shape) for shape in SHAPES),
    *(({"exchange": "regional", "value_dtype": each}, (5, 1)) for each in ("bfloat16", "float16")),
]


@pytest.mark.parametrize(
    ("options", "shape"), [*CONSERVED, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_mass_is_conserved_over_rebuilt_buckets_and_ranks_are_bit_identical(
    ranks: RunRanks, options: dict[str, Any], shape: tuple[int, int]
) -> None:
    everyone, exchange = ranks(conserve, options, nodes=shape[0], devices=shape[1], timeout=120), options["exchange"]
    for given, applied, waiting, paths in everyone:
        torch.testing.assert_close(given, applied + waiting, rtol=1e-5, atol=2e-6 if exchange == "dense16" else 2e-5)
        assert torch.equal(applied, everyone[0][1])
        if shape[0] == 1:
            continue
        assert paths == {"dense", exchange}, "and dense until the layout was settled"
        if exchange == "dense16":
            assert 1e-5 < waiting.abs().max() < 1e-2, "the error of one rounding"
        else:
            assert waiting.abs().max() > 1e-3, "the test would pass without error feedback"


def test_the_owner_of_a_region_keeps_its_error_whatever_the_order_of_ranks(ranks: RunRanks) -> None:
    for given, applied, waiting, _ in ranks(conserve, {"exchange": "dense16"}, placement=[[2], [0], [1]]):
        torch.testing.assert_close(given, applied + waiting, rtol=1e-6, atol=2e-6)


def conserve(options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, set[str]]:
    """50 rounds of sparse exchanges under four wrappers, 20 of others."""
    config = HierConfig(
        **{"density": 0.05 if options["exchange"] == "regional" else 0.03, "warmup_epochs": 0, **options}
    )
    rounds, rewrap = (50, 13) if options["exchange"] == "sparse" else (20, 5)
    *found, state = conserved(config, itertools.cycle([0.002, 25.0, 0.004]), rounds=rounds, rewrap=rewrap)
    return (*found, set(state.exchange.stats.paths))


@pytest.mark.parametrize(
    ("life", "nodes", "devices"),
    [("several backwards", 2, 2), ("several backwards", 3, 1), ("added groups", 2, 1), ("masked and clipped", 2, 2)],
)
def test_nothing_is_lost_in_a_loop_of_ones_own(ranks: RunRanks, life: str, nodes: int, devices: int) -> None:
    """Several backward passes before a step, each of which is a round; parameters added to the optimizer; gradients
    that the user works on, zeros included: what is left of them was used."""
    for given, applied, waiting in ranks(live, life, nodes=nodes, devices=devices):
        torch.testing.assert_close(given, applied + waiting, rtol=1e-5, atol=2e-5)


def live(life: str) -> tuple[Tensor, Tensor, Tensor]:
    ddp, state, optimizer = watched(density=0.03, parameters=2 if life == "added groups" else None)
    if life == "added groups":
        optimizer.add_param_group({"params": list(ddp.parameters())[2:]})
    given = torch.zeros_like(flat_parameters(ddp)).double()
    applied = given.clone()
    passes = 2 if life == "several backwards" else 1
    for step in range(15):
        optimizer.zero_grad()
        for each in range(passes * step, passes * (step + 1)):
            given += mean_gradient(ddp, each)
            state.before_backward()
            loss_of(ddp, each, dist.get_rank()).backward()
        applied += flat_grads(ddp)
        if life == "masked and clipped":
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
            nn.utils.clip_grad_value_(ddp.parameters(), 0.001)
            ddp.module[0].weight.grad[0] = 0.0
        optimizer.step()
    optimizer.zero_grad()
    state.settle()
    return given, applied, sum_over_nodes(node_residual(ddp.module, state), state)


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
    expected = mean_gradient(ddp, 6) + before
    model.zero_grad()
    state.config = state.exchange.choice.config = HierConfig(exchange="dense")
    loss_of(ddp, 6, dist.get_rank()).backward()
    state.settle()
    applied = flat_grads(model).double()
    return before, node_residual(model, state), applied, expected


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
