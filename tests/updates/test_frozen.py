"""Layers that are frozen, or removed from the optimizer, during a run keep the global weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.helpers.distributed import RunRanks
from tests.strategy.models import loss_of, mlp
from tests.updates.runs import sgd

SLOW = pytest.mark.slow
WAYS: list[Any] = [
    {"density": 0.05},
    {"exchange": "dense16"},
    pytest.param({"density": 0.05, "sync_every": 3, "delay": 2}, marks=SLOW),
    pytest.param({"density": 0.05, "delay": 0, "step_ahead": 0.5}, marks=SLOW),
    pytest.param({"density": 0.05, "exchange": "regional"}, marks=SLOW),
]


def layer_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in list(model.parameters())[:2]])


def stopped(way: dict[str, Any], how: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer's global weights when its training stops, its final weights, and the other final weights."""
    topology, model = discover(), mlp()
    optimizer = sgd(model)
    updates = LocalUpdates(model, optimizer, UpdatesConfig(**way), topology)
    before = Tensor()
    for step in range(11):
        if step == 5:
            with updates.global_weights():
                before = layer_of(model)
            first = list(model.parameters())[:2]
            for parameter in first:
                parameter.requires_grad_(how == "removed")
            if how == "removed":
                optimizer.param_groups[0]["params"] = list(model.parameters())[2:]
        optimizer.zero_grad(set_to_none=how != "zeroed")
        loss_of(model, step, topology.node_index).backward()  # the mean over the devices of a node
        optimizer.step()
        updates.step()
    own = layer_of(model)
    updates.finish()
    with updates.global_weights():
        assert torch.equal(layer_of(model), own)
    return before, own, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("how", ["frozen", "zeroed", "removed"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_local_layer_that_is_no_longer_trained_keeps_the_global_weights(
    ranks: RunRanks, way: dict[str, Any], how: str
) -> None:
    results = ranks(stopped, way, how, nodes=2, devices=2, timeout=120)
    for before, own, ends in results:
        assert torch.equal(own, before)
        assert torch.equal(before, results[0][0])
        assert torch.equal(ends, results[0][2])
