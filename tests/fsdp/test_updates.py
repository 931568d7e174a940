"""Updates of parameters that FSDP2 shards over a node, on real ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.fsdp import runs
from tests.helpers.distributed import run_ranks
from tests.updates.runs import adamw, mean_over_nodes

OPTIONS: list[dict[str, Any]] = [
    {"density": 0.05},
    {"density": 0.1, "delay": 0, "step_ahead": 0.5},
    {"exchange": "dense16", "sync_every": 2},
]


def shared_of(updates: LocalUpdates) -> Tensor:
    with updates.shared_weights():
        return runs.whole(updates.module).clone()


def with_all_options(steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [trained(options, steps) for options in OPTIONS]


def trained(options: dict[str, Any], steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Shared weights, and the mean of the nodes' own ones before and after all is sent."""
    model, optimizer, updates = runs.start(adamw, discover().rank, **options)
    runs.steps(model, optimizer, updates, 0, steps)
    shared = shared_of(updates)
    pending = [node.state.read_shared() - node.state.pending_S for node in updates.optimizers]
    assert all(torch.isfinite(each).all() for each in pending)
    updates.finish()
    return shared, mean_over_nodes(runs.whole(model)), runs.whole(model).clone()


@pytest.mark.parametrize("steps", [12, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("nodes", "devices"), [(2, 2), (3, 1)])
def test_nodes_share_one_model(nodes: int, devices: int, steps: int) -> None:
    everyone = run_ranks(with_all_options, steps, nodes=nodes, devices=devices)
    for results in zip(*everyone, strict=True):
        for shared, mean, finished in results:
            assert torch.equal(shared, results[0][0])
            assert torch.equal(finished, results[0][2])
            torch.testing.assert_close(mean.float(), finished)


def beside_ddp(options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Twenty steps of the same model: FSDP2 inside the node, and DDP inside the node."""
    model, optimizer, updates = runs.start(adamw, **options)
    runs.steps(model, optimizer, updates, 0, 20)
    topology, plain = discover(), runs.Blocks()
    stepped = adamw(plain)
    local = LocalUpdates(plain, stepped, UpdatesConfig(**options), topology)
    ddp = DistributedDataParallel(plain, process_group=topology.intra)
    runs.steps(ddp, stepped, local, 0, 20)
    return shared_of(updates), shared_of(local)


def test_one_device_a_node_selects_as_replicated_nodes_do() -> None:
    for ours, local in run_ranks(beside_ddp, {"density": 0.05}, nodes=2, devices=1):
        torch.testing.assert_close(ours, local, rtol=1e-5, atol=1e-6)
