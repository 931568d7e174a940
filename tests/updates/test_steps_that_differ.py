"""Nodes that make different numbers of steps: a node skips a step, or a training stops early."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_sparse.waits
from lightning_sparse.topology import Topology, discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.helpers.distributed import RunRanks, run_ranks
from tests.helpers.lines import Lines, raised

SIZE = 37


class Interrupted(Exception):
    """The exception that ends a training between two steps."""


def begin(topology: Topology, seed: int, **options: Any) -> tuple[nn.Linear, torch.optim.Optimizer, LocalUpdates]:
    torch.manual_seed(seed)
    net = nn.Linear(SIZE, SIZE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    return net, optimizer, LocalUpdates(net, optimizer, UpdatesConfig(density=0.1, **options), topology)


def train(net: nn.Linear, optimizer: torch.optim.Optimizer, updates: LocalUpdates, steps: range) -> Tensor:
    """Step with random gradients, and return by how much this node's own steps have moved the weight."""
    moved = torch.zeros(SIZE, SIZE)
    for step in steps:
        own = torch.Generator().manual_seed(2 * step + dist.get_rank())
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=own)
        before = net.weight.detach().clone()
        optimizer.step()
        moved += net.weight.detach() - before
        updates.step()
    return moved


def lost(net: nn.Linear, start: Tensor, moved: Tensor) -> tuple[float, Tensor]:
    """Return the norm of the updates that the weight lacks, and the weight."""
    dist.all_reduce(moved)
    weight = net.weight.detach()
    return float((weight - start - moved / dist.get_world_size()).norm()), weight


def train_until(topology: Topology, exchange: str, steps: int) -> None:
    """Raise an exception during training, as user code or Ctrl-C does."""
    net, optimizer, updates = begin(topology, 1, exchange=exchange)
    try:
        train(net, optimizer, updates, range(steps))
        raise Interrupted
    finally:
        updates.close()


def interrupted_and_again(exchange: str, steps: tuple[int, int]) -> list[tuple[float, Tensor]]:
    """Train twice after a training that ended at a different step on each node."""
    topology, found = discover(), []
    with suppress(Interrupted):
        train_until(topology, exchange, steps[dist.get_rank()])
    for seed in (2, 3):
        net, optimizer, updates = begin(topology, seed, exchange=exchange)
        start = net.weight.detach().clone()
        moved = train(net, optimizer, updates, range(7))
        updates.finish()
        updates.close()
        found.append(lost(net, start, moved))
    return found


@pytest.mark.parametrize(
    ("exchange", "steps"),
    [("sparse", (5, 6)), ("regional", (4, 3)), ("dense16", (5, 6)), ("dense", (5, 6)), ("dense", (5, 5))],
)
def test_training_after_an_interrupted_training_loses_no_update(exchange: str, steps: tuple[int, int]) -> None:
    results = run_ranks(interrupted_and_again, exchange, steps, nodes=2, devices=1, timeout=100)
    for (missing, weight), (_, other) in zip(*results, strict=True):
        assert missing < 1e-5
        assert torch.equal(weight, other)


def one_skips(exchange: str, sync_every: int, looks: bool) -> tuple[float, Tensor, list[str]]:
    """Skip a step on node 1, including its call of ``updates.step()``."""
    net, optimizer, updates = begin(discover(), 1, exchange=exchange, sync_every=sync_every)
    start = net.weight.detach().clone()
    lines = Lines()
    moved = train(net, optimizer, updates, range(3 + dist.get_rank(), 3 * sync_every + 3))
    if looks:
        with updates.global_weights():
            assert torch.equal(*of_both_nodes(net.weight.detach()))
        moved += train(net, optimizer, updates, range(40, 40 + sync_every))
    updates.finish()
    updates.close()
    return *lost(net, start, moved), [line for line in lines.lines if "made fewer steps" in line]


def of_both_nodes(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(found, tensor)
    return found


@pytest.mark.parametrize(
    ("exchange", "sync_every", "looks"),
    [("sparse", 1, False), ("sparse", 3, True), ("regional", 3, True), ("dense16", 1, True), ("dense", 1, False)],
)
def test_step_skipped_by_one_node_is_logged_and_loses_no_update(
    ranks: RunRanks, exchange: str, sync_every: int, looks: bool
) -> None:
    (missing, weight, lines), (_, other, quiet) = ranks(one_skips, exchange, sync_every, looks, nodes=2, devices=1)
    assert missing < 1e-5
    assert torch.equal(weight, other)
    assert len(lines) == 1
    assert not quiet


def wait_for_each_other() -> tuple[str, list[str]]:
    """Skip a step on node 1 where each step waits for the other node, until the timeout."""
    lightning_sparse.waits.SLOW_AFTER = timedelta(seconds=0.4)
    net, optimizer, updates = begin(discover(timeout=timedelta(seconds=6)), 1, delay=0)
    lines = Lines()

    def train_to_the_end() -> None:
        train(net, optimizer, updates, range(5 - dist.get_rank()))
        updates.finish()

    return raised(train_to_the_end), lines.lines


def test_nodes_that_wait_for_each_other_name_their_steps() -> None:
    for error, lines in run_ranks(wait_for_each_other, nodes=2, devices=1):
        assert "rank died" in error
        assert any("in step 5" in line and "at the end, after step 4" in line for line in lines), lines
