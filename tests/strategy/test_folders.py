"""Checkpoints of the strategies that DDP is inside of, as folders that all ranks write: resumed bit-identically, read
by piece on other clusters, killed while they are written. Folders of FSDP2: tests/fsdp; damage: test_sabotage.py."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning_fabric.utilities.load import _load_distributed_checkpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

from lightning_sparse.gradients import HierState
from tests.fsdp.test_trainer import fitted, fsdp
from tests.fsdp.test_trainer import module as sharded_module
from tests.helpers.distributed import run_ranks
from tests.helpers.lines import raised
from tests.strategy.kills import FLAVOUR, Kill, fit_on, patience, whole_and_killed
from tests.strategy.models import mlp, node_residual, sum_over_nodes
from tests.strategy.trainers import lightning_of, ours, plain_module, ranks, sparse, trainer, weights
from tests.updates.runs import mean_over_nodes
from tests.updates.test_properties import whole_pending
from tests.updates.test_resume import module
from tests.updates.test_trainer import local

WAYS: dict[str, dict[str, Any]] = {
    "gradients": {},
    "updates": {},
    "updates, whole steps": {"shard_optimizer": False, "sync_every": 3, "step_ahead": 0.5},
}
MANY: dict[str, Any] = {"nodes": 2, "devices": 2, "timeout": 100, "init": False}


def strategy_of(way: str, **options: Any) -> Any:
    make = sparse if way == "gradients" else local
    return make(FLAVOUR, **{"save_distributed_checkpoint": True, **WAYS[way], **options})


def fit(
    folder: str, kill: Kill | None, way: str, stop_after: int = 14, every: int = 1, precision: str = "32-true"
) -> Tensor:
    """Train from the last checkpoint, if there is one; return weights and buffers at the end."""
    trained = module()
    strategy = strategy_of(way, timeout=patience(kill))
    fit_on(folder, strategy, trained, kill, every, stop_after, max_steps=14, precision=precision)
    return torch.cat([each.detach().flatten().double() for each in (*trained.parameters(), *trained.buffers())])


def whole_and_resumed(folder: str, ways: list[str], precision: str) -> list[tuple[Tensor, Tensor]]:
    ends = []
    for way in ways:
        whole = fit(f"{folder}/whole {way}", None, way, 14, 7, precision)
        fit(f"{folder}/{way}", None, way, 7, 7, precision)
        ends.append((whole, fit(f"{folder}/{way}", None, way, 14, 7, precision)))
    return ends


@pytest.mark.parametrize(
    ("nodes", "devices", "precision"), [(2, 2, "32-true"), pytest.param(3, 1, "16-mixed", marks=pytest.mark.slow)]
)
def test_a_resumed_run_is_bit_identical(nodes: int, devices: int, precision: str, tmp_path: Path) -> None:
    many = {**MANY, "nodes": nodes, "devices": devices}
    for ends in run_ranks(whole_and_resumed, str(tmp_path), list(WAYS), precision, **many):
        for way, (whole, resumed) in zip(WAYS, ends, strict=True):
            assert torch.equal(whole, resumed), way
    for way in WAYS:
        path = tmp_path / way / "last.ckpt"
        stored = FileSystemReader(path).read_metadata().storage_data
        assert len(stored) == len({index.fqn for index in stored}), "everything is written once"
        files = [place.relative_path for index, place in stored.items() if index.fqn.startswith("state_dict.net")]
        assert len(set(files)) > devices, "weights by ranks of all nodes"
        assert [each.name for each in path.parent.iterdir()] == ["last.ckpt"]


Looks = dict[int, tuple[Tensor, Tensor, Tensor]]


def looks(folder: str, ways: list[tuple[str, str]], begin: int | None, end: int) -> list[Looks]:
    """Return, for each pair of a folder and a way to train, the global weights, the unsent updates, and the optimizer
    state of the first node: after the resume at step `begin`, and at `end`, which is saved."""
    return [look(f"{folder}/{saved}", way, begin, end) for saved, way in ways]


def look(folder: str, way: str, begin: int | None, end: int) -> Looks:
    found: Looks = {}

    class Look(lightning_of(FLAVOUR).Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, trained: Any, *_: Any) -> None:
            if trainer.global_step not in (begin, end):
                return
            strategy, engine = trainer.strategy, trainer.strategy.engine
            with engine.global_weights():
                shared = weights(trained).clone()
            state = strategy._optimizer_state(trainer.optimizers[0])  # on the first device of a node
            state = trainer.optimizers[0].state_dict() if state is None else state
            moments = torch.cat([each["exp_avg"].flatten() for each in state.get("state", {}).values()] or [shared])
            if not engine.active:
                waiting = torch.zeros(0)
            elif isinstance(engine, HierState):
                engine.commit_round()
                waiting = sum_over_nodes(node_residual(trained, engine), engine)
            else:
                waiting = mean_over_nodes(whole_pending(engine))
            found[trainer.global_step] = shared, waiting, moments
            if trainer.global_step == end:
                trainer.save_checkpoint(f"{folder}/{end}.ckpt")

    t = trainer(FLAVOUR, strategy_of(way), max_steps=end + 1, max_epochs=-1, callbacks=[Look()], **ranks())
    t.fit(module(), ckpt_path=None if begin is None else f"{folder}/{begin}.ckpt")
    return found


def same(before: Looks, after: Looks, step: int, *, waits: bool = True) -> None:
    assert torch.equal(before[step][0], after[step][0])
    assert torch.equal(before[step][2], after[step][2]), "optimizers go on with the state of the first node"
    if waits:
        assert before[step][1].any()
        torch.testing.assert_close(before[step][1], after[step][1], rtol=1e-5, atol=1e-7)


def test_another_cluster_reads_what_it_needs(tmp_path: Path) -> None:
    ways = [(way, way) for way in ("gradients", "updates")]
    before = run_ranks(looks, str(tmp_path), ways, None, 4, **MANY)[0]
    after = run_ranks(looks, str(tmp_path), ways, 4, 7, **{**MANY, "nodes": 4, "devices": 1})[0]
    for one, other in zip(before, after, strict=True):
        same(one, other, 4)


@pytest.mark.slow
def test_one_node_and_the_other_strategy_read_a_folder(tmp_path: Path) -> None:
    """One node has the optimizer's state of the first one, and the mean of what was pending in its weights; the other
    strategy loses what waited."""
    ways = [(way, way) for way in WAYS]
    before = run_ranks(looks, str(tmp_path), ways, None, 4, **MANY)[0]
    alone = run_ranks(looks, str(tmp_path), ways, 4, 7, **{**MANY, "nodes": 1})
    for one, *others in zip(before, *alone, strict=True):
        for other in others:
            assert torch.equal(one[4][2], other[4][2])
            pending = one[4][0].double() - other[4][0].double()
            torch.testing.assert_close(pending, one[4][1] if one is not before[0] else pending)
    of_two = run_ranks(looks, str(tmp_path), ways, 7, 10, **MANY)[0]  # of a folder that one node has written
    for one, other in zip(alone[0], of_two, strict=True):
        same(one, other, 7, waits=False)
    crossed = [("gradients", "updates"), ("updates", "gradients")]
    for one, other in zip(of_two, run_ranks(looks, str(tmp_path), crossed, 10, 12, **MANY)[0], strict=False):
        same(one, other, 10, waits=False)


POINTS = [("in a step", 3), ("meta.pt", 2), ("meta.pt", 0), ("its name", 0), ("the old one goes", 0)]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gradients", "updates"])
def test_a_killed_run_goes_on_bit_identically(way: str, tmp_path: Path) -> None:
    kills = [Kill(point, rank, 2 * number + 3) for number, (point, rank) in enumerate(POINTS)]
    for one, other in whole_and_killed(fit, tmp_path, kills, way, **MANY):
        assert torch.equal(one, other)
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["last.ckpt", "whole"]


class Counting(nn.Module):
    """Saves what is no parameter, and would upgrade a state of another version."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.net, self.extra, self.upgraded = mlp(), {"seen": torch.zeros(2), "more": [0, torch.zeros(3)]}, False

    def forward(self, x: Tensor) -> Tensor:
        self.extra = {"seen": self.extra["seen"] + 1, "more": [1, torch.ones(3)]}
        found: Tensor = self.net(x)
        return found

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        self.upgraded = metadata.get("version") != self._version
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


def of_modules(folder: str, ways: list[tuple[str, bool]]) -> list[tuple[Any, Any, bool]]:
    """What a module had besides weights, what it has when a run goes on, whether it took the state for an old one."""
    found = []
    for way, many in ways:
        saved, other = plain_module(FLAVOUR, Counting()), plain_module(FLAVOUR, Counting())
        options: dict[str, Any] = {"max_steps": 3, **ranks()}
        t = trainer(FLAVOUR, strategy_of(way, save_distributed_checkpoint=many), **options)
        t.fit(saved)
        path = f"{folder}/{way} {many}.ckpt"
        t.save_checkpoint(path)
        trainer(FLAVOUR, strategy_of(way, save_distributed_checkpoint=many), **options).fit(other, ckpt_path=path)
        found.append((saved.net.extra, other.net.extra, other.net.upgraded))
    return found


def test_what_modules_save_besides_tensors_and_their_versions_come_back(tmp_path: Path) -> None:
    ways = [(way, many) for way in ("gradients", "updates") for many in (True, False)]
    for found in run_ranks(of_modules, str(tmp_path), ways, **{**MANY, "devices": 1}):
        for (before, after, upgraded), way in zip(found, ways, strict=True):
            assert before["seen"].tolist() == after["seen"].tolist() == [3, 3], way
            assert before["more"][1].tolist() == after["more"][1].tolist() == [1, 1, 1], way
            assert not upgraded, way


def of_other_optimizers(folder: str) -> list[str]:
    """What is said of a folder of AdamW when the optimizer is another one."""
    t = fitted_updates()
    t.save_checkpoint(f"{folder}/adamw.ckpt")

    class InGroups(type(module())):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            first, *others = self.parameters()
            return torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=0.01)

    class Sgd(InGroups):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    others = [trainer(FLAVOUR, strategy_of("updates"), max_steps=5, **ranks()) for _ in range(2)]
    made = zip(others, (InGroups(), Sgd()), strict=True)
    return [raised(other.fit, each, ckpt_path=f"{folder}/adamw.ckpt") for other, each in made]


def test_a_folder_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    for groups, kind in run_ranks(of_other_optimizers, str(tmp_path), **{**MANY, "devices": 1}):
        assert "saved with 1 parameter group(s), and has 2 now" in groups
        assert "amsgrad, betas" in kind
        assert "SGD takes dampening, momentum, nesterov instead" in kind


def refused(folder: str) -> list[str]:
    """What is said of places and options that a folder cannot have."""
    os.chdir(folder)
    said = []
    for fit_one in (lambda: fitted(FLAVOUR, fsdp(FLAVOUR), max_steps=2), fitted_updates):
        t = fit_one()
        said += [raised(t.save_checkpoint, url) for url in ("s3://bucket/a.ckpt", f"file://{folder}/a.ckpt")]
    said.append(raised(t.save_checkpoint, "a.ckpt", storage_options={"key": 1}))
    t.strategy.checkpoint_io = AsyncCheckpointIO()
    return [*said, raised(t.save_checkpoint, "a.ckpt")]


def fitted_updates() -> Any:
    t = trainer(FLAVOUR, strategy_of("updates"), max_steps=2, **ranks())
    t.fit(module())
    return t


def test_a_folder_is_not_written_to_a_url(tmp_path: Path) -> None:
    for *urls, options, plugin in run_ranks(refused, str(tmp_path), **{**MANY, "devices": 1}):
        assert len(urls) == 4
        assert all("is a URL" in said for said in urls)
        assert "storage_options={'key': 1} are for a file" in options
        assert "AsyncCheckpointIO writes files" in plugin
    assert not list(tmp_path.iterdir())


def read_by_others(folder: str) -> list[Any]:
    """A folder as plain torch reads it, and as FSDP2's strategy does; a folder of that."""
    path = f"{folder}/updates.ckpt"
    t = trainer(FLAVOUR, strategy_of("updates"), max_steps=4, **ranks())
    t.fit(module())
    t.save_checkpoint(path)
    loaded = {name: torch.zeros_like(each) for name, each in t.lightning_module.state_dict().items()}
    dcp.load({"state_dict": loaded}, checkpoint_id=path)
    same = all(torch.equal(each, loaded[name]) for name, each in t.lightning_module.state_dict().items())
    file = _load_distributed_checkpoint(Path(path))  # what consolidate_checkpoint writes
    alone = module()
    alone.load_state_dict(file["state_dict"])
    same = same and torch.equal(weights(alone), weights(t.lightning_module)) and "optimizer_states" not in file
    of_shards = fitted(FLAVOUR, fsdp(FLAVOUR), max_steps=4)
    of_shards.save_checkpoint(f"{folder}/shards.ckpt")
    other = trainer(FLAVOUR, strategy_of("updates"), max_steps=5, **ranks())
    sharded = trainer(FLAVOUR, fsdp(FLAVOUR), max_steps=5, **ranks())
    crosswise = ((other, f"{folder}/shards.ckpt"), (sharded, path))
    return [same, *(raised(each.fit, sharded_module(FLAVOUR), ckpt_path=of) for each, of in crosswise)]


def test_others_read_the_weights_or_say_why_not(tmp_path: Path) -> None:
    for same, said, sharded in run_ranks(read_by_others, str(tmp_path), **{**MANY, "devices": 1}):
        assert same
        assert "written by a strategy of FSDP2" in said
        assert "'mstopk_fsdp' reads only its own folders" in sharded


def with_other_callbacks(folder: str) -> tuple[bool, str, bool]:
    """A run whose ranks share the optimizer's step, and one that is resumed; one of updates that goes on so; a search
    for a learning rate, which saves and loads."""

    def run(way: str, steps: int, path: str | None, callbacks: list[Any]) -> Any:
        t = trainer(FLAVOUR, strategy_of(way), max_steps=steps, max_epochs=-1, callbacks=callbacks, **ranks())
        t.fit(module(), ckpt_path=path)
        return t

    for way, callbacks in (("gradients", [ours(FLAVOUR).PTOCallback("node")]), ("updates", [])):
        run(way, 5, None, callbacks).save_checkpoint(f"{folder}/{way}.ckpt")
    shared = [ours(FLAVOUR).PTOCallback("node")]
    ends = [run("gradients", 9, path, shared).lightning_module for path in (None, f"{folder}/gradients.ckpt")]
    said = raised(run, "gradients", 9, f"{folder}/updates.ckpt", [ours(FLAVOUR).PTOCallback("node")])
    searched, options = module(), {"default_root_dir": folder, "max_steps": 6, **ranks()}
    searched.lr = 0.1
    before = weights(searched).clone()
    tuner = lightning_of(FLAVOUR).tuner.Tuner(trainer(FLAVOUR, strategy_of("updates"), **options))
    tuner.lr_find(searched, num_training=5, update_attr=False)
    return torch.equal(*map(weights, ends)), said, torch.equal(before, weights(searched))


@pytest.mark.slow
def test_what_else_saves_and_loads(tmp_path: Path) -> None:
    for resumed, said, went_back in run_ranks(with_other_callbacks, str(tmp_path), **MANY):
        assert resumed
        assert "Remove PTOCallback, or save one file with" in said
        assert went_back
    assert sorted(each.name for each in tmp_path.iterdir()) == ["gradients.ckpt", "updates.ckpt"]


def test_nodes_that_come_and_go_write_no_folders() -> None:
    with pytest.raises(ValueError, match="save_distributed_checkpoint=True cannot be combined"):
        ours(FLAVOUR).MSTopKElasticStrategy(save_distributed_checkpoint=True)
    assert not ours(FLAVOUR).MSTopKElasticStrategy()._save_distributed_checkpoint
