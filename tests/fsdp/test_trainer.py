"""`MSTopKFSDPStrategy` in a Trainer: beside DDP and Lightning's FSDP2, validated, saved and resumed; and updates of
sharded parameters without it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.sharding import parameters_of
from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.fsdp import runs
from tests.fsdp.runs import Blocks, whole
from tests.helpers.distributed import run_ranks
from tests.helpers.scenarios import Scenarios
from tests.strategy.trainers import Results, lightning_of, ours, plain_module, ranks, results_of, trainer
from tests.updates.runs import adamw, mean_over_nodes

SCENARIOS = Scenarios()
scenario = SCENARIOS.add
results = results_of(SCENARIOS)


def module(flavour: str, seed: int = 0) -> Any:
    class Module(type(plain_module(flavour, Blocks(seed), by_step=True))):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def fsdp(flavour: str, **options: Any) -> Any:
    return ours(flavour).MSTopKFSDPStrategy(**{"density": 0.05, **options})


def fitted(flavour: str, strategy: Any, trained: Any = None, path: str | None = None, **options: Any) -> Any:
    trained = module(flavour) if trained is None else trained
    t = trainer(flavour, strategy, **{"max_steps": 10, "max_epochs": -1, **ranks(), **options})
    t.fit(trained, ckpt_path=path)
    return t


@scenario
def beside_others(flavour: str) -> dict[str, Tensor]:
    """The final weights of two strategies that send everything."""
    found, options = {}, {"accumulate_grad_batches": 2}
    local = ours(flavour).MSTopKLocalStrategy(exchange="dense")
    for name, strategy in (("fsdp", fsdp(flavour, exchange="dense")), ("local", local)):
        found[name] = whole(fitted(flavour, strategy, **options).lightning_module).clone()
    return found


def test_everything_sent_gives_what_replicated_nodes_give(results: Results) -> None:
    for found in (each["beside_others"] for each in results):
        torch.testing.assert_close(found["fsdp"], found["local"], rtol=1e-5, atol=1e-6)


def on_one_node(flavour: str) -> tuple[Tensor, Tensor]:
    pl = lightning_of(flavour)

    class ByHand(type(module(flavour))):  # type: ignore[misc]
        def configure_model(self) -> None:
            if any(isinstance(p, DTensor) for p in self.parameters()):
                return
            for block in self.net.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    plain = pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    options = {"gradient_clip_val": 0.5}
    theirs = fitted(flavour, plain, ByHand(), **options)
    mine = fitted(flavour, fsdp(flavour), **options)
    return whole(mine.lightning_module).clone(), whole(theirs.lightning_module).clone()


def test_one_node_is_lightnings_own_fsdp() -> None:
    for mine, theirs in run_ranks(on_one_node, "pytorch_lightning", nodes=1, devices=2, timeout=120, init=False):
        assert torch.equal(mine, theirs)


@scenario
def with_and_without_looks(flavour: str) -> dict[str, Any]:
    """Runs that evaluate and save between steps, and one that does not."""
    seen: dict[str, Any] = {}
    pl = lightning_of(flavour)

    class Look(pl.Callback):  # type: ignore[misc, name-defined]
        def on_validation_end(self, trainer: Any, trained: Any) -> None:
            seen.setdefault("validated", []).append(whole(trained).clone())

    looked = {"limit_val_batches": 1, "val_check_interval": 3, "check_val_every_n_epoch": None, "callbacks": [Look()]}
    for name, options in (("plain", {}), ("looked", looked)):
        trained = fitted(flavour, fsdp(flavour), **options).lightning_module
        seen[name] = whole(trained).clone()
    return seen


def test_validation_sees_the_shared_weights_and_changes_nothing(results: Results) -> None:
    everyone = [each["with_and_without_looks"] for each in results]
    for seen in everyone:
        assert torch.equal(seen["plain"], seen["looked"])
        assert len(seen["validated"]) == 3
        assert all(map(torch.equal, seen["validated"], everyone[0]["validated"]))


def saved_and_resumed(
    flavour: str, folder: str, options: dict[str, Any], extra: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """A run with a checkpoint after step 6, and one that resumes there."""
    pl = lightning_of(flavour)
    saver = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=6, save_top_k=-1)
    t = fitted(flavour, fsdp(flavour, **options), callbacks=[saver], enable_checkpointing=True, **extra)
    ends = whole(t.lightning_module).clone()
    resumed = fitted(flavour, fsdp(flavour, **options), module(flavour, 5), f"{folder}/step=6.ckpt", **extra)
    return ends, whole(resumed.lightning_module).clone()


@scenario
def resumed_in_a_folder(flavour: str) -> tuple[Tensor, Tensor]:
    return saved_and_resumed(flavour, "resumed", {}, {})


def test_a_resumed_run_is_bit_identical(results: Results) -> None:
    assert all(torch.equal(*each["resumed_in_a_folder"]) for each in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options", "extra"),
    [
        ((2, 2), {"save_distributed_checkpoint": False, "step_ahead": 0.5}, {}),
        ((3, 1), {"sync_every": 4, "delay": 0}, {"precision": "bf16-true"}),
        ((2, 2), {"exchange": "dense16"}, {"precision": "bf16-mixed"}),
    ],
    ids=str,
)
def test_a_resumed_run_with_other_options_is_bit_identical(
    shape: tuple[int, int], options: dict[str, Any], extra: dict[str, Any], tmp_path: Path
) -> None:
    many: dict[str, Any] = {"nodes": shape[0], "devices": shape[1], "timeout": 120, "init": False}
    for ends, resumed in run_ranks(saved_and_resumed, "pytorch_lightning", str(tmp_path), options, extra, **many):
        assert torch.equal(ends, resumed)


def look(folder: str, begin: int | None, end: int, distributed: bool) -> dict[str, Any]:
    """Shared weights and the mean of the nodes' unsent updates: as resumed at step ``begin``, and at ``end``."""
    flavour = "pytorch_lightning"
    found: dict[str, Any] = {}

    class Look(lightning_of(flavour).Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, trained: Any, *_: Any) -> None:
            if trainer.global_step not in (begin, end):
                return
            updates = trainer.strategy.engine
            with updates.global_weights():
                shared = whole(trained).clone()
            if updates.active:
                trainer.strategy.engine.swap_in_local_weights()
            found[trainer.global_step] = shared
            if updates.active:
                ends_at = mean_over_nodes(_with_everything_sent(trained, updates))
                found[f"mean {trainer.global_step}"] = ends_at
            if trainer.global_step == end:
                trainer.save_checkpoint(f"{folder}/{end}.ckpt")

    strategy = fsdp(flavour, save_distributed_checkpoint=distributed)
    path = None if begin is None else f"{folder}/{begin}.ckpt"
    fitted(flavour, strategy, module(flavour, 3), path, callbacks=[Look()], max_steps=end + 1)
    return found


def _with_everything_sent(model: nn.Module, updates: Any) -> Tensor:
    """What this node's weights would be with all of its own updates and none of the others' in flight."""
    kept = {}
    for node in updates.optimizers:
        state = node.state
        kept[node] = state.slices.read()
        state.slices.write(state.read_global() - state.pending_S)
        node.gather()
    found = whole(model).clone()
    for node, own_S in kept.items():
        node.state.slices.write(own_S)
        node.gather()
    return found


Clusters = tuple[tuple[int, int], ...]
ALL: Clusters = (4, 1), (2, 1), (2, 2), (1, 2), (1, 4)


@pytest.mark.parametrize(
    ("distributed", "clusters"),
    [pytest.param(True, ALL, marks=pytest.mark.slow), pytest.param(False, ALL, marks=pytest.mark.slow)],
    ids=str,
)
def test_on_another_cluster_shared_weights_and_the_mean_of_what_is_pending_stay(
    distributed: bool, clusters: Clusters, tmp_path: Path
) -> None:
    """Begun on 2 x 2 and taken on by each cluster of several nodes in turn; the last one's goes on alone."""
    many: dict[str, Any] = {"timeout": 120, "init": False}
    before = run_ranks(look, str(tmp_path), None, 4, distributed, nodes=2, devices=2, **many)[0]
    begin = 4
    for nodes, devices in (each for each in clusters if each[0] > 1):
        after = run_ranks(look, str(tmp_path), begin, begin + 3, distributed, nodes=nodes, devices=devices, **many)
        for found in after:
            assert torch.equal(found[begin], before[begin])
            torch.testing.assert_close(found[f"mean {begin}"], before[f"mean {begin}"], rtol=1e-6, atol=1e-7)
        before, begin = after[0], begin + 3
    for nodes, devices in (each for each in clusters if each[0] == 1):
        found = run_ranks(look, str(tmp_path), begin, begin + 1, distributed, nodes=nodes, devices=devices, **many)[0]
        torch.testing.assert_close(found[begin].double(), before[f"mean {begin}"], rtol=1e-6, atol=1e-7)


@scenario
def read_by_others(flavour: str) -> dict[str, Tensor]:
    """The weights of a full checkpoint, as plain DDP, Lightning's FSDP2 and a single device read them."""
    pl, path = lightning_of(flavour), "whole.ckpt"
    t = fitted(flavour, fsdp(flavour, save_distributed_checkpoint=False))
    t.save_checkpoint(path)
    found = {"saved": whole(t.lightning_module).clone()}

    class Begin(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, trained: Any) -> None:
            found[type(trainer.strategy).__name__] = whole(trained).clone()

    class Sharded(type(module(flavour))):  # type: ignore[misc]
        def configure_model(self) -> None:
            if not any(isinstance(p, DTensor) for p in self.parameters()):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    world = int(os.environ["WORLD_SIZE"])
    plain = pl.strategies.ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    for strategy, trained in (("ddp", module(flavour, 5)), (plain, Sharded())):
        fitted(flavour, strategy, trained, path, callbacks=[Begin()], max_steps=11)
    alone = Blocks(5)
    weights = torch.load(path, weights_only=True)["state_dict"]
    alone.load_state_dict({name.removeprefix("net."): value for name, value in weights.items()})
    found["alone"] = whole(alone)
    return found


def test_others_read_a_full_checkpoint(results: Results) -> None:
    for found in (each["read_by_others"] for each in results):
        assert found.keys() == {"saved", "DDPStrategy", "ModelParallelStrategy", "alone"}
        assert all(torch.equal(each, found["saved"]) for each in found.values())


@scenario
def gathered_in(flavour: str) -> dict[str, set[tuple[torch.dtype, torch.dtype]]]:
    """Dtypes of a parameter in the forward pass, and of its shard in the optimizer."""
    found = {}
    for precision in ("bf16-mixed", "32-true"):
        seen: set[torch.dtype] = set()
        trained = module(flavour)
        trained.net.last.register_forward_pre_hook(lambda layer, _, seen=seen: seen.add(layer.weight.dtype))
        t = fitted(flavour, fsdp(flavour), trained, max_steps=2, precision=precision)
        found[precision] = {(dtype, p.dtype) for dtype in seen for p in parameters_of(t.optimizers[0])}
    return found


def test_mixed_precision_gathers_half_the_bytes(results: Results) -> None:
    half, single = torch.bfloat16, torch.float32
    for each in results:
        assert each["gathered_in"] == {"bf16-mixed": {(half, single)}, "32-true": {(single, single)}}


# -- updates in a loop of one's own ------------------------------------------------------------------------------------

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
    """Shared weights, and the mean of the nodes' own ones before and after all is sent."""
    model, optimizer, updates = runs.start(adamw, discover().rank, **options)
    runs.steps(model, optimizer, updates, 0, steps)
    shared = shared_of(updates)
    pending = [node.state.read_global() - node.state.pending_S for node in updates.optimizers]
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
    for mine, local in run_ranks(beside_ddp, {"density": 0.05}, nodes=2, devices=1):
        torch.testing.assert_close(mine, local, rtol=1e-5, atol=1e-6)
