"""Compiled models train like eager models with each strategy, with and without DDPOptimizer.

All entries are sent, so results do not depend on the grouping of parameters, which compilation may change.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.exchange import ExchangeConfig
from lightning_sparse.fsdp import ShardedGradients, mesh_of, shard
from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.fsdp.runs import Blocks, loss_of, whole
from tests.helpers.distributed import RunRanks, run_ranks

WAYS = ("eager", "model before", "blocks before", "wrapped")
CASES = [(way, optimizer) for way in WAYS[1:] for optimizer in (True, False)]  # torch._dynamo.config.optimize_ddp
SEND_ALL: dict[str, Any] = {"exchange": "sparse", "density": 1.0, "value_dtype": "float32"}
STEPS = 6


def gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Callable[[], None]]:
    """Wrap a model as mstopk_hier does."""
    state = HierState(model, HierConfig(**SEND_ALL, warmup_epochs=0), discover())
    ddp = DistributedDataParallel(model, bucket_cap_mb=25)
    ddp.register_comm_hook(state, hier_hook)
    return ddp, lambda: None


def updates(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Callable[[], None]]:
    """Wrap a model as mstopk_local does."""
    topology = discover()
    exchanged = LocalUpdates(model, optimizer, UpdatesConfig(**SEND_ALL), topology)
    return DistributedDataParallel(model, process_group=topology.intra), exchanged.step


def shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Callable[[], None]]:
    """Shard a model as mstopk_fsdp does for gradients."""
    topology = discover()
    optimizer.param_groups.clear()
    sharded = shard(model, mesh_of(topology))
    exchanged = ShardedGradients(sharded, ExchangeConfig(**SEND_ALL), topology)
    optimizer.add_param_group({"params": list(sharded.parameters())})
    return sharded, exchanged.step


STRATEGIES = {"mstopk_hier": gradients, "mstopk_local": updates, "mstopk_fsdp": shards}


def train(strategy: str, way: str) -> Tensor:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Blocks()
    compiled: list[nn.Module] = {"model before": [model], "blocks before": list(model.blocks)}.get(way, [])
    for each in compiled:
        each.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped, after_step = STRATEGIES[strategy](model, optimizer)
    run: Any = torch.compile(wrapped, backend="aot_eager") if way == "wrapped" else wrapped
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(run, step, dist.get_rank()).backward()
        optimizer.step()
        after_step()
    assert way == "eager" or torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"
    return whole(model).clone()


def all_ways(strategy: str, cases: list[tuple[str, bool]]) -> dict[str, Tensor]:
    found = {"eager": train(strategy, "eager")}
    for way, optimizer in cases:
        with torch._dynamo.config.patch(optimize_ddp=optimizer):
            found[f"{way}, optimize_ddp={optimizer}"] = train(strategy, way)
    return found


@pytest.mark.parametrize(
    ("strategy", "cases"),
    [
        ("mstopk_hier", [CASES[0], CASES[3], CASES[4]]),
        pytest.param("mstopk_hier", [CASES[1], CASES[2], CASES[5]], marks=pytest.mark.slow),
        pytest.param("mstopk_local", [CASES[0], CASES[3], CASES[4]], marks=pytest.mark.slow),
        pytest.param("mstopk_local", [CASES[1], CASES[2], CASES[5]], marks=pytest.mark.slow),
        pytest.param("mstopk_fsdp", CASES, marks=pytest.mark.slow),
    ],
)
def test_compiled_models_train_as_eager_models(ranks: RunRanks, strategy: str, cases: list[tuple[str, bool]]) -> None:
    run = ranks
    if strategy == "mstopk_fsdp":  # it uses no DDP, and torch would keep meshes of destroyed groups
        run, cases = run_ranks, [case for case in cases if case[1]]
    for found in run(all_ways, strategy, cases, nodes=2, devices=2):
        assert len(found) == 1 + len(cases)
        for case, weights in found.items():
            assert torch.allclose(weights, found["eager"], rtol=1e-4, atol=1e-6), case
