"""`MSTopKFSDPStrategy` in a Trainer, compared with DDP and Lightning's FSDP2.

Also: validation, saving, resuming, and updates of sharded parameters in a plain PyTorch loop.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.sharding import parameters_of
from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.fsdp import runs
from tests.fsdp.runs import Blocks, whole
from tests.helpers.distributed import run_ranks
from tests.helpers.lines import Lines
from tests.helpers.scenarios import Scenarios
from tests.strategy.trainers import Results, lightning_of, ours, plain_module, ranks, results_of, trainer
from tests.updates.runs import adamw, mean_over_nodes

SCENARIOS = Scenarios()
scenario = SCENARIOS.add
results = results_of(SCENARIOS)


def module(package: str, seed: int = 0) -> Any:
    class Module(type(plain_module(package, Blocks(seed), by_step=True))):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def fsdp(package: str, **options: Any) -> Any:
    return ours(package).MSTopKFSDPStrategy(**{"density": 0.05, **options})


def fitted(package: str, strategy: Any, trained: Any = None, path: str | None = None, **options: Any) -> Any:
    trained = module(package) if trained is None else trained
    t = trainer(package, strategy, **{"max_steps": 10, "max_epochs": -1, **ranks(), **options})
    t.fit(trained, ckpt_path=path)
    return t


@scenario
def beside_others(package: str) -> dict[str, Tensor]:
    """Return the final weights of two strategies that send everything."""
    found, options = {}, {"accumulate_grad_batches": 2}
    local = ours(package).MSTopKLocalStrategy(exchange="dense")
    for name, strategy in (("fsdp", fsdp(package, exchange="dense")), ("local", local)):
        found[name] = whole(fitted(package, strategy, **options).lightning_module).clone()
    return found


def test_fsdp_updates_with_everything_sent_equal_local_updates(results: Results) -> None:
    for found in (each["beside_others"] for each in results):
        torch.testing.assert_close(found["fsdp"], found["local"], rtol=1e-5, atol=1e-6)


@scenario
def around_evaluations(package: str) -> dict[str, Any]:
    """Return the weights of a fit alone and of a fit between evaluations, and whether each phase leaves shards."""
    alone = whole(fitted(package, fsdp(package)).lightning_module).clone()
    options = {"max_steps": 10, "max_epochs": -1, "limit_val_batches": 1, **ranks()}
    t, trained = trainer(package, fsdp(package), **options), module(package)
    sharded = []
    for phase in (t.validate, t.test, t.fit, t.test):
        phase(trained)
        sharded.append(all(isinstance(p, DTensor) for p in trained.parameters()))
    return {"alone": alone, "between": whole(trained).clone(), "sharded": sharded}


def test_fsdp_fits_after_evaluations(results: Results) -> None:
    for found in (each["around_evaluations"] for each in results):
        assert torch.equal(found["alone"], found["between"])
        assert found["sharded"] == [True] * 4


def on_one_node(package: str) -> tuple[Tensor, Tensor, list[str]]:
    pl, lines = lightning_of(package), Lines()

    class ByHand(type(module(package))):  # type: ignore[misc]
        def configure_model(self) -> None:
            if any(isinstance(p, DTensor) for p in self.parameters()):
                return
            for block in self.net.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    plain = pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    options = {"gradient_clip_val": 0.5}
    theirs = fitted(package, plain, ByHand(), **options)
    mine = fitted(package, fsdp(package), **options)
    said = [each for each in lines.lines if "no optimizer step was made" in each]
    return whole(mine.lightning_module).clone(), whole(theirs.lightning_module).clone(), said


def test_fsdp_on_one_node_equals_lightnings_fsdp() -> None:
    for mine, theirs, said in run_ranks(on_one_node, "pytorch_lightning", nodes=1, devices=2, timeout=120, init=False):
        assert torch.equal(mine, theirs)
        assert said == []


@scenario
def with_and_without_looks(package: str) -> dict[str, Any]:
    """Return the weights of runs with and without evaluation and saves between steps."""
    seen: dict[str, Any] = {}
    pl = lightning_of(package)

    class Look(pl.Callback):  # type: ignore[misc, name-defined]
        def on_validation_end(self, trainer: Any, trained: Any) -> None:
            seen.setdefault("validated", []).append(whole(trained).clone())

    looked = {"limit_val_batches": 1, "val_check_interval": 3, "check_val_every_n_epoch": None, "callbacks": [Look()]}
    for name, options in (("plain", {}), ("looked", looked)):
        trained = fitted(package, fsdp(package), **options).lightning_module
        seen[name] = whole(trained).clone()
    return seen


def test_fsdp_validation_sees_global_weights_and_changes_nothing(results: Results) -> None:
    everyone = [each["with_and_without_looks"] for each in results]
    for seen in everyone:
        assert torch.equal(seen["plain"], seen["looked"])
        assert len(seen["validated"]) == 3
        assert all(map(torch.equal, seen["validated"], everyone[0]["validated"]))


@scenario
def read_by_others(package: str) -> dict[str, Tensor]:
    """Return the weights that plain DDP, Lightning's FSDP2 and a single device load from a full checkpoint."""
    pl, path = lightning_of(package), "whole.ckpt"
    t = fitted(package, fsdp(package, save_distributed_checkpoint=False))
    t.save_checkpoint(path)
    found = {"saved": whole(t.lightning_module).clone()}

    class Begin(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, trained: Any) -> None:
            found[type(trainer.strategy).__name__] = whole(trained).clone()

    class Sharded(type(module(package))):  # type: ignore[misc]
        def configure_model(self) -> None:
            if not any(isinstance(p, DTensor) for p in self.parameters()):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    world = int(os.environ["WORLD_SIZE"])
    plain = pl.strategies.ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    for strategy, trained in (("ddp", module(package, 5)), (plain, Sharded())):
        fitted(package, strategy, trained, path, callbacks=[Begin()], max_steps=11)
    alone = Blocks(5)
    weights = torch.load(path, weights_only=True)["state_dict"]
    alone.load_state_dict({name.removeprefix("net."): value for name, value in weights.items()})
    found["alone"] = whole(alone)
    return found


def test_fsdp_full_checkpoint_is_read_by_other_strategies(results: Results) -> None:
    for found in (each["read_by_others"] for each in results):
        assert found.keys() == {"saved", "DDPStrategy", "ModelParallelStrategy", "alone"}
        assert all(torch.equal(each, found["saved"]) for each in found.values())


@scenario
def gathered_in(package: str) -> dict[str, set[tuple[torch.dtype, torch.dtype]]]:
    """Return the dtypes of a parameter in the forward pass and of its shard in the optimizer."""
    found = {}
    for precision in ("bf16-mixed", "32-true"):
        seen: set[torch.dtype] = set()
        trained = module(package)
        trained.net.last.register_forward_pre_hook(lambda layer, _, seen=seen: seen.add(layer.weight.dtype))
        t = fitted(package, fsdp(package), trained, max_steps=2, precision=precision)
        found[precision] = {(dtype, p.dtype) for dtype in seen for p in parameters_of(t.optimizers[0])}
    return found


def test_fsdp_mixed_precision_gathers_half_the_bytes(results: Results) -> None:
    half, single = torch.bfloat16, torch.float32
    for each in results:
        assert each["gathered_in"] == {"bf16-mixed": {(half, single)}, "32-true": {(single, single)}}


# -- updates in a plain PyTorch loop -----------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"density": 0.05},
    {"density": 0.1, "delay": 0, "step_ahead": 0.5},
    {"exchange": "dense16", "sync_every": 2, "outer_lr": 1.5},
]


def shared_of(updates: LocalUpdates) -> Tensor:
    with updates.global_weights():
        return runs.whole(updates.module).clone()


def with_all_options(steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [trained(options, steps) for options in OPTIONS]


def trained(options: dict[str, Any], steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the global weights, and the mean of the nodes' own weights before and after `finish`."""
    model, optimizer, updates = runs.start(adamw, discover().rank, **options)
    runs.steps(model, optimizer, updates, 0, steps)
    shared = shared_of(updates)
    pending = [node.state.read_global() - node.state.pending_S for node in updates.optimizers]
    assert all(torch.isfinite(each).all() for each in pending)
    updates.finish()
    return shared, mean_over_nodes(runs.whole(model)), runs.whole(model).clone()


@pytest.mark.parametrize(
    ("nodes", "devices", "steps"), [(3, 1, 12), (2, 2, 12), pytest.param(2, 2, 50, marks=pytest.mark.slow)]
)
def test_fsdp_updates_give_all_nodes_equal_global_weights(nodes: int, devices: int, steps: int) -> None:
    everyone = run_ranks(with_all_options, steps, nodes=nodes, devices=devices)
    for results in zip(*everyone, strict=True):
        for shared, mean, finished in results:
            assert torch.equal(shared, results[0][0])
            assert torch.equal(finished, results[0][2])
            torch.testing.assert_close(mean.float(), finished)


def beside_ddp(options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Train one model for 20 steps with FSDP2 inside the node, and with DDP inside the node."""
    model, optimizer, updates = runs.start(adamw, **options)
    runs.steps(model, optimizer, updates, 0, 20)
    topology, plain = discover(), runs.Blocks()
    stepped = adamw(plain)
    local = LocalUpdates(plain, stepped, UpdatesConfig(**options), topology)
    ddp = DistributedDataParallel(plain, process_group=topology.intra)
    runs.steps(ddp, stepped, local, 0, 20)
    return shared_of(updates), shared_of(local)


def test_fsdp_updates_on_one_device_per_node_equal_local_updates() -> None:
    for mine, local in run_ranks(beside_ddp, {"density": 0.05}, nodes=2, devices=1):
        torch.testing.assert_close(mine, local, rtol=1e-5, atol=1e-6)
