"""Checkpoint folders: state of modules and optimizers, other readers, and refused options."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning_fabric.utilities.load import _load_distributed_checkpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

from lightning_sparse.checkpoint import folder as folders
from tests.checkpoint.test_updates import in_another_layout, module
from tests.fsdp.test_trainer import fitted, fsdp
from tests.fsdp.test_trainer import module as sharded_module
from tests.helpers.distributed import run_ranks
from tests.helpers.lines import raised
from tests.helpers.scenarios import Scenarios
from tests.helpers.training import results_in_one_start
from tests.strategy.kills import PACKAGE
from tests.strategy.models import mlp
from tests.strategy.trainers import lightning_of, ours, plain_module, ranks, sparse, trainer, weights
from tests.updates.test_trainer import local

MANY: dict[str, Any] = {"nodes": 2, "devices": 2, "timeout": 150, "init": False}


def strategy_of(way: str, **options: Any) -> Any:
    make = sparse if way == "gradients" else local
    return make(PACKAGE, **{"save_distributed_checkpoint": True, **options})


SCENARIOS = Scenarios()
results = results_in_one_start(SCENARIOS)
Results = list[dict[str, Any]]


class Counting(nn.Module):
    """Saves extra state, and upgrades a state of another version."""

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


@SCENARIOS.add
def of_modules(folder: str) -> list[tuple[Any, Any, bool]]:
    """Return a module's extra state, the extra state of a resumed run, and whether it upgraded the state."""
    found = []
    for way, many in (("gradients", True), ("updates", True), ("updates", False)):
        saved, other = plain_module(PACKAGE, Counting()), plain_module(PACKAGE, Counting())
        options: dict[str, Any] = {"max_steps": 3, **ranks()}
        t = trainer(PACKAGE, strategy_of(way, save_distributed_checkpoint=many), **options)
        t.fit(saved)
        path = f"{folder}/{way} {many}.ckpt"
        t.save_checkpoint(path)
        trainer(PACKAGE, strategy_of(way, save_distributed_checkpoint=many), **options).fit(other, ckpt_path=path)
        found.append((saved.net.extra, other.net.extra, other.net.upgraded))
    return found


def test_extra_state_and_versions_of_modules_are_resumed(results: Results) -> None:
    for before, after, upgraded in (case for each in results for case in each["of_modules"]):
        assert before["seen"].tolist() == after["seen"].tolist() == [3, 3]
        assert before["more"][1].tolist() == after["more"][1].tolist() == [1, 1, 1]
        assert not upgraded


SCENARIOS.add(in_another_layout)


def test_resume_in_another_memory_format_on_one_device_per_node_keeps_weights(results: Results) -> None:
    for saved, begins_with in (each["in_another_layout"] for each in results):
        assert torch.equal(saved, begins_with)


@SCENARIOS.add
def of_other_optimizers(folder: str) -> list[str]:
    """Return the errors of other optimizers that resume from a folder of AdamW."""
    t = fitted_updates()
    t.save_checkpoint(f"{folder}/adamw.ckpt")

    class InGroups(type(module())):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            first, *others = self.parameters()
            return torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=0.01)

    class Sgd(InGroups):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    others = [trainer(PACKAGE, strategy_of("updates"), max_steps=5, **ranks()) for _ in range(2)]
    made = zip(others, (InGroups(), Sgd()), strict=True)
    return [raised(other.fit, each, ckpt_path=f"{folder}/adamw.ckpt") for other, each in made]


def test_folder_of_another_optimizer_is_refused(results: Results) -> None:
    for groups, kind in (each["of_other_optimizers"] for each in results):
        assert "saved with 1 parameter group(s), and has 2 now" in groups
        assert "amsgrad, betas" in kind
        assert "SGD takes dampening, momentum, nesterov instead" in kind


@SCENARIOS.add
def refused(folder: str) -> list[str]:
    """Return the errors about paths and options that a folder does not support."""
    os.chdir(folder)
    said = []
    for fit_one in (lambda: fitted(PACKAGE, fsdp(PACKAGE), max_steps=2), fitted_updates):
        t = fit_one()
        said += [raised(t.save_checkpoint, url) for url in ("s3://bucket/a.ckpt", f"file://{folder}/a.ckpt")]
    said.append(raised(t.save_checkpoint, "a.ckpt", storage_options={"key": 1}))
    t.strategy.checkpoint_io = AsyncCheckpointIO()
    return [*said, raised(t.save_checkpoint, "a.ckpt")]


def fitted_updates() -> Any:
    t = trainer(PACKAGE, strategy_of("updates"), max_steps=2, **ranks())
    t.fit(module())
    return t


def test_folder_at_a_url_or_with_a_plugin_is_refused(results: Results) -> None:
    for *urls, options, plugin in (each["refused"] for each in results):
        assert len(urls) == 4
        assert all("is a URL" in said for said in urls)
        assert "storage_options={'key': 1} apply to a file" in options
        assert "AsyncCheckpointIO writes files" in plugin
    assert not list((Path(results[0]["folder"]) / "refused").iterdir())


@SCENARIOS.add
def read_by_others(folder: str) -> list[Any]:
    """Read a folder of updates with plain torch, as gradients and as FSDP2, and a folder of FSDP2 as updates."""
    path = f"{folder}/updates.ckpt"
    t = trainer(PACKAGE, strategy_of("updates"), max_steps=4, **ranks())
    t.fit(module())
    t.save_checkpoint(path)
    loaded = {name: torch.zeros_like(each) for name, each in t.lightning_module.state_dict().items()}
    dcp.load({"state_dict": loaded}, checkpoint_id=path)
    same = all(torch.equal(each, loaded[name]) for name, each in t.lightning_module.state_dict().items())
    file = _load_distributed_checkpoint(Path(path))  # as consolidate_checkpoint does
    alone = module()
    alone.load_state_dict(file["state_dict"])
    same = same and torch.equal(weights(alone), weights(t.lightning_module)) and "optimizer_states" not in file
    as_gradients = module()
    trainer(PACKAGE, strategy_of("gradients"), max_steps=4, **ranks()).fit(as_gradients, ckpt_path=path)
    same = same and torch.equal(weights(as_gradients), weights(t.lightning_module))
    gradients = trainer(PACKAGE, strategy_of("gradients"), max_steps=4, **ranks())
    gradients.fit(module())
    gradients.save_checkpoint(f"{folder}/gradients.ckpt")
    as_updates = module()
    trainer(PACKAGE, strategy_of("updates"), max_steps=4, **ranks()).fit(
        as_updates, ckpt_path=f"{folder}/gradients.ckpt"
    )
    same = same and torch.equal(weights(as_updates), weights(gradients.lightning_module))
    of_shards = fitted(PACKAGE, fsdp(PACKAGE), max_steps=4)
    of_shards.save_checkpoint(f"{folder}/shards.ckpt")
    other = trainer(PACKAGE, strategy_of("updates"), max_steps=5, **ranks())
    sharded = trainer(PACKAGE, fsdp(PACKAGE), max_steps=5, **ranks())
    crosswise = ((other, f"{folder}/shards.ckpt"), (sharded, path))
    return [same, *(raised(each.fit, sharded_module(PACKAGE), ckpt_path=of) for each, of in crosswise)]


def test_folder_is_read_by_torch_and_ddp_and_refused_by_fsdp(results: Results) -> None:
    for same, said, sharded in (each["read_by_others"] for each in results):
        assert same
        assert "written by 'mstopk_fsdp'" in said
        assert "'mstopk_fsdp' reads only its own folders" in sharded
    stored = FileSystemReader(f"{results[0]['folder']}/read_by_others/updates.ckpt").read_metadata().storage_data
    assert len(stored) == len({index.fqn for index in stored}), "each item is written once"
    files = [place.relative_path for index, place in stored.items() if index.fqn.startswith("state_dict.net")]
    assert len(set(files)) > 1, "ranks of all nodes write weights"


def with_other_callbacks(folder: str) -> tuple[bool, str, bool]:
    """Return whether a run with PTOCallback resumes, the error for updates, and whether a search resumes."""

    def run(way: str, steps: int, path: str | None, callbacks: list[Any]) -> Any:
        t = trainer(PACKAGE, strategy_of(way), max_steps=steps, max_epochs=-1, callbacks=callbacks, **ranks())
        t.fit(module(), ckpt_path=path)
        return t

    for way, callbacks in (("gradients", [ours(PACKAGE).PTOCallback("node")]), ("updates", [])):
        run(way, 5, None, callbacks).save_checkpoint(f"{folder}/{way}.ckpt")
    shared = [ours(PACKAGE).PTOCallback("node")]
    ends = [run("gradients", 9, path, shared).lightning_module for path in (None, f"{folder}/gradients.ckpt")]
    said = raised(run, "gradients", 9, f"{folder}/updates.ckpt", [ours(PACKAGE).PTOCallback("node")])
    searched, options = module(), {"default_root_dir": folder, "max_steps": 6, **ranks()}
    searched.lr = 0.1
    before = weights(searched).clone()
    tuner = lightning_of(PACKAGE).tuner.Tuner(trainer(PACKAGE, strategy_of("updates"), **options))
    tuner.lr_find(searched, num_training=5, update_attr=False)
    return torch.equal(*map(weights, ends)), said, torch.equal(before, weights(searched))


@pytest.mark.slow
def test_folder_with_shared_steps_and_learning_rate_search_resumes(tmp_path: Path) -> None:
    for resumed, said, went_back in run_ranks(with_other_callbacks, str(tmp_path), **MANY):
        assert resumed
        assert "Remove PTOCallback, or save one file with" in said
        assert went_back
    assert sorted(each.name for each in tmp_path.iterdir()) == ["gradients.ckpt", "updates.ckpt"]


def test_elastic_strategy_refuses_folders() -> None:
    with pytest.raises(ValueError, match="save_distributed_checkpoint=True cannot be combined"):
        ours(PACKAGE).MSTopKElasticStrategy(save_distributed_checkpoint=True)
    assert not ours(PACKAGE).MSTopKElasticStrategy()._save_distributed_checkpoint


# -- failed writes, unshared folders, folders that a rank does not see -------------------------------------------------


@SCENARIOS.add
def not_written(folder: str) -> tuple[str, bool]:
    t = fitted(PACKAGE, fsdp(PACKAGE))
    path = Path(folder) / "last.ckpt"
    t.save_checkpoint(path)
    before = {each.name: each.stat().st_mtime_ns for each in path.iterdir()}
    with patch.object(torch, "save", no_space if t.global_rank == 0 else torch.save):
        said = raised(t.save_checkpoint, path)
    return said, before == {each.name: each.stat().st_mtime_ns for each in path.iterdir()}


def no_space(*_: Any, **__: Any) -> None:
    raise OSError("no space left")


def test_rank_that_cannot_write_fails_all_and_keeps_the_last_save(results: Results) -> None:
    said = [each["not_written"] for each in results]
    assert all(kept for _, kept in said)
    assert "no space left" in said[0][0]
    assert "rank could not write" in said[1][0]


@SCENARIOS.add
def not_shared(folder: str) -> tuple[str, list[str]]:
    mine = Path(folder) / f"node{dist.get_rank()}"
    mine.mkdir()
    try:
        with folders.atomic_directory(mine / "last.ckpt", torch.device("cpu")) as partial:
            (partial / "file").write_text("written")
    except RuntimeError as error:
        return str(error), [each.name for each in mine.iterdir()]
    return "saved", []


def test_folder_that_nodes_do_not_share_is_refused(results: Results) -> None:
    zero, one = (each["not_shared"] for each in results)
    assert "rank could not write" in zero[0]
    assert "all nodes share" in one[0]
    assert "last.ckpt" not in zero[1] + one[1]


@SCENARIOS.slow
def unseen(folder: str) -> list[str]:
    """Return the errors if rank 0, and then rank 1, does not see the folder."""
    path, said = Path(folder) / "last.ckpt", []
    saver = fitted(PACKAGE, fsdp(PACKAGE))
    saver.save_checkpoint(path)
    for blind in range(2):
        with ExitStack() as stack:
            if saver.global_rank == blind:
                stack.enter_context(patch.object(Path, "is_file", lambda self: False))
                stack.enter_context(patch.object(folders.FileSystemReader, "read_metadata", no_file))
            # the fit has no steps left
            said.append(raised(fitted, PACKAGE, fsdp(PACKAGE), sharded_module(PACKAGE, 5), str(path)))
    return said


def no_file(*_: Any) -> None:
    raise FileNotFoundError("a folder of another node")


@pytest.mark.slow
@pytest.mark.parametrize("blind", [0, 1])
def test_folder_that_one_rank_does_not_see_is_an_error_on_all(results: Results, blind: int) -> None:
    said = [each["unseen"][blind] for each in results]
    assert "FileNotFoundError: a folder of another node" in said[blind]
    assert "another rank reports where" in said[1 - blind]


@pytest.mark.parametrize("exchanged", [True, False])
def test_folder_replaces_another_folder_or_file(
    exchanged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanged:  # as on file systems without an atomic exchange
        monkeypatch.setattr(folders, "_swap_atomically", lambda *_: False)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    if not exchanged:  # an earlier process was killed and left a moved folder
        (tmp_path / ".old.old").mkdir()
        (tmp_path / ".old.old" / "earlier").write_text("earlier")
    folders._replace(tmp_path / "old", tmp_path / "new")
    assert [each.name for each in tmp_path.rglob("*")] == ["old", "new"]
    file = tmp_path / "file.ckpt"
    file.write_text("an earlier checkpoint")
    folders._replace(file, tmp_path / "old")
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["file.ckpt", "new"]
