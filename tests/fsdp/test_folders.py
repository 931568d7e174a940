"""Checkpoints that are folders: killed while they are written, and damaged."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from lightning_sparse.strategy import folders, saves
from tests.fsdp.runs import whole
from tests.fsdp.test_trainer import fitted, fsdp, module
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.strategy.test_killed import die
from tests.strategy.trainers import lightning_of

FLAVOUR = "pytorch_lightning"
POINTS = ["its side file", "meta.pt", "its name", "the old one goes"]
MANY: dict[str, Any] = {"nodes": 2, "devices": 2, "timeout": 120, "init": False}


def fit(folder: str, send: str, point: str, rank: int, step: int) -> Tensor:
    """Train with a checkpoint of the same name after every step, from the last one if there is one."""
    pl = lightning_of(FLAVOUR)

    class Killer(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step != step or trainer.global_rank != rank:
                return
            if point == "its side file":
                saves.write_side_file = die
            elif point == "meta.pt":
                torch.save = die
            elif point == "its name":
                folders._replace = die
            else:
                folders.shutil.rmtree = die

    saver = pl.callbacks.ModelCheckpoint(folder, filename="last", every_n_train_steps=1, enable_version_counter=False)
    path = f"{folder}/last.ckpt"
    options: dict[str, Any] = {"callbacks": [saver, Killer()], "enable_checkpointing": True}
    strategy = fsdp(FLAVOUR, send=send, **({"exchange": "sparse"} if send == "gradients" else {}))
    t = fitted(FLAVOUR, strategy, path=path if os.path.exists(path) else None, **options)
    return whole(t.lightning_module).clone()


@pytest.mark.slow
@pytest.mark.parametrize("send", ["updates", "gradients"])
def test_a_killed_run_goes_on_bit_identically(send: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    expected = run_ranks(fit, str(tmp_path / "whole"), send, "", 0, -1, **MANY)
    for number, point in enumerate(POINTS):
        rank = 3 if point == "its side file" else 0
        with pytest.raises(RanksFailed) as failed:
            run_ranks(fit, str(tmp_path), send, point, rank, 2 * number + 1, **MANY)
        assert failed.value.killed.keys() == {rank}
    for one, other in zip(expected, run_ranks(fit, str(tmp_path), send, "", 0, -1, **MANY), strict=True):
        assert torch.equal(one, other)
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["last.ckpt", "whole"]


def damaged_and_read(folder: str, seed: int) -> list[str]:
    """What became of each of 20 damaged bytes: an error, or the weights of the undamaged folder."""
    chance, path = random.Random(seed), Path(folder) / "saved.ckpt"
    saver = fitted(FLAVOUR, fsdp(FLAVOUR))
    saver.save_checkpoint(path)
    found = []
    for number in range(20):
        copy = Path(folder) / f"{number}.ckpt"
        if saver.global_rank == 0:
            shutil.copytree(path, copy)
            file = chance.choice(sorted(each for each in copy.rglob("*") if each.suffix in (".distcp", ".pt")))
            content = bytearray(file.read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            file.write_bytes(content)
        saver.strategy.barrier()
        resumed = fitted_from(copy, saver)
        found.append(resumed)
    return found


def fitted_from(copy: Path, saver: Any) -> str:
    before = whole(saver.lightning_module)
    again = module(FLAVOUR, 5)
    try:
        fitted(FLAVOUR, fsdp(FLAVOUR), again, str(copy))  # all its steps are done
    except CheckpointException as error:  # what Python's zipfile tolerates and torch's does not
        return f"it is damaged: {error}"
    except RuntimeError as error:
        return str(error)
    return "same" if torch.equal(whole(again), before) else "wrong weights"


@pytest.mark.slow
def test_a_damaged_byte_is_an_error_or_harmless(tmp_path: Path) -> None:
    several = run_ranks(damaged_and_read, str(tmp_path), 0, nodes=2, devices=1, timeout=200, init=False)
    for found in zip(*several, strict=True):
        assert all("is damaged" in each for each in found) or set(found) == {"same"}
    assert sum("is damaged" in each for each in several[0]) > 5


def not_written(folder: str) -> tuple[str, bool]:
    t = fitted(FLAVOUR, fsdp(FLAVOUR))
    path = Path(folder) / "last.ckpt"
    t.save_checkpoint(path)
    before = {each.name: each.stat().st_mtime_ns for each in path.iterdir()}
    if t.global_rank == 0:
        torch.save = no_space
    try:
        t.save_checkpoint(path)
    except (OSError, RuntimeError) as error:
        return str(error), before == {each.name: each.stat().st_mtime_ns for each in path.iterdir()}
    return "saved", False


def no_space(*_: Any, **__: Any) -> None:
    raise OSError("no space left")


def test_a_rank_that_cannot_write_fails_all_and_leaves_what_was_there(tmp_path: Path) -> None:
    said = run_ranks(not_written, str(tmp_path), nodes=2, devices=1, timeout=100, init=False)
    assert all(kept for _, kept in said)
    assert "no space left" in said[0][0]
    assert "rank could not write" in said[1][0]


def not_shared(folder: str) -> tuple[str, list[str]]:
    mine = Path(folder) / f"node{dist.get_rank()}"
    mine.mkdir()
    try:
        with folders.whole_or_none(mine / "last.ckpt", torch.device("cpu")) as partial:
            (partial / "file").write_text("written")
    except RuntimeError as error:
        return str(error), [each.name for each in mine.iterdir()]
    return "saved", []


def test_a_folder_that_nodes_do_not_share_is_refused(tmp_path: Path) -> None:
    zero, one = run_ranks(not_shared, str(tmp_path), nodes=2, devices=1)
    assert "rank could not write" in zero[0]
    assert "all nodes share" in one[0]
    assert "last.ckpt" not in zero[1] + one[1]


def unseen_and_read(folder: str, blind: int) -> str:
    path = Path(folder) / "last.ckpt"
    saver = fitted(FLAVOUR, fsdp(FLAVOUR))
    saver.save_checkpoint(path)
    if saver.global_rank == blind:
        Path.is_file = lambda self: False  # type: ignore[method-assign]
        folders.FileSystemReader.read_metadata = no_file
    return fitted_from(path, saver)


def no_file(*_: Any) -> None:
    raise FileNotFoundError("a folder of another node")


@pytest.mark.slow
@pytest.mark.parametrize("blind", [0, 1])
def test_a_folder_that_one_rank_does_not_see_is_an_error_on_all(blind: int, tmp_path: Path) -> None:
    said = run_ranks(unseen_and_read, str(tmp_path), blind, nodes=2, devices=1, timeout=100, init=False)
    assert "FileNotFoundError: a folder of another node" in said[blind]
    assert "another rank says where" in said[1 - blind]


@pytest.mark.parametrize("exchanged", [True, False])
def test_a_folder_takes_the_place_of_another(exchanged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchanged:  # as on file systems that cannot
        monkeypatch.setattr(folders, "_exchanged", lambda *_: False)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    if not exchanged:  # and a kill left what it had moved away
        (tmp_path / ".old.old").mkdir()
        (tmp_path / ".old.old" / "earlier").write_text("earlier")
    folders._replace(tmp_path / "old", tmp_path / "new")
    assert [each.name for each in tmp_path.rglob("*")] == ["old", "new"]
    file = tmp_path / "file.ckpt"
    file.write_text("an earlier checkpoint")
    folders._replace(file, tmp_path / "old")
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["file.ckpt", "new"]
