"""Checkpoints of all strategies in both formats, sabotaged on 2 nodes of 2 ranks: killed between any two files of a
save, damaged, and not written by one rank. No run goes on from wrong weights, and no rank waits for what will not come.
"""

import random
import resource
import shutil
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparse.strategy import saves
from tests.fsdp.runs import whole
from tests.fsdp.test_trainer import fsdp, module, ranks
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.strategy.test_killed import die
from tests.strategy.trainers import lightning_of, sparse, trainer
from tests.updates.test_trainer import local

FLAVOUR = "pytorch_lightning"
MANY: dict[str, Any] = {"nodes": 2, "devices": 2, "timeout": 280, "init": False}
WAYS: dict[str, Any] = {
    "gradients": lambda **options: sparse(FLAVOUR, exchange="sparse", warmup_steps=0, **options),
    "updates": lambda **options: local(FLAVOUR, **options),
    "shards, one file": lambda **options: fsdp(FLAVOUR, save_distributed_checkpoint=False, **options),
    "shards, a folder": lambda **options: fsdp(FLAVOUR, **options),
}
POINTS = ["in a step", "before its side file", "after its side file", "before the main file", "after the main file"]
STEPS = 14

pytestmark = pytest.mark.slow


def fit(folder: str, way: str, steps: int = STEPS, kill: tuple[str, int, int] = ("", 0, -1), seed: int = 0) -> Any:
    """Train from the last checkpoint, if there is one, and save after each step; a kill is a point, a rank, a step."""
    pl = lightning_of(FLAVOUR)
    point, rank, step = kill

    class Killer(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step != step or trainer.global_rank != rank:
                return
            if point == "in a step":
                die()
            elif point == "before its side file":
                saves.write_side_file = die
            elif point == "after its side file":
                saves.StoreBarrier.arrive = die  # type: ignore[method-assign]
            elif point == "before the main file":
                trainer.strategy.checkpoint_io.save_checkpoint = die
            else:
                saves.remove_side_files = die

    saver = pl.callbacks.ModelCheckpoint(folder, "last", every_n_train_steps=1, enable_version_counter=False)
    path, strategy = Path(folder) / "last.ckpt", WAYS[way](timeout=timedelta(seconds=5 if point else 60))
    callbacks: dict[str, Any] = {"callbacks": [saver, Killer()], "enable_checkpointing": True} if step >= -1 else {}
    t = trainer(FLAVOUR, strategy, max_steps=steps, max_epochs=-1, **ranks(), **callbacks)
    trained = module(FLAVOUR, seed)
    t.fit(trained, ckpt_path=path if path.exists() else None)
    return t


def ends_with(folder: str, way: str, kill: tuple[str, int, int] = ("", 0, -1)) -> Tensor:
    return whole(fit(folder, way, kill=kill).lightning_module).clone()


@pytest.mark.parametrize("way", ["gradients", "updates", "shards, one file"])
def test_killed_between_any_two_files_of_a_save(way: str, tmp_path: Path) -> None:
    """After the first three steps, in which DDP's buckets settle. Folders are in tests/fsdp/test_folders.py."""
    chance = random.Random(way)
    (tmp_path / "whole").mkdir()
    expected = run_ranks(ends_with, str(tmp_path / "whole"), way, **MANY)
    for number, point in enumerate(POINTS):
        rank = 0 if "main" in point else chance.randrange(1, 4)
        with pytest.raises(RanksFailed) as failed:
            run_ranks(ends_with, str(tmp_path), way, (point, rank, 2 * number + 3), **MANY)
        assert failed.value.killed.keys() == {rank}
        assert not failed.value.hung
    for one, other in zip(expected, run_ranks(ends_with, str(tmp_path), way, **MANY), strict=True):
        assert torch.equal(one, other)


def damaged(folder: str, way: str, seed: int) -> list[str]:
    """What becomes of each of 20 damaged bytes: an error, or the weights of the undamaged checkpoint."""
    chance, path = random.Random(seed), Path(folder) / "saved"
    path.mkdir(exist_ok=True)
    saver = fit(str(path), way, 3, ("", 0, -2))
    saver.save_checkpoint(path / "last.ckpt")
    expected, found = whole(saver.lightning_module), []
    for number in range(20):
        copy = Path(folder) / str(number)
        if saver.global_rank == 0:
            shutil.copytree(path, copy)
            file = chance.choice(
                sorted(each for each in copy.rglob("*") if each.is_file() and each.name != ".metadata")
            )
            content = bytearray(file.read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            file.write_bytes(content)
        saver.strategy.barrier()
        try:
            resumed = fit(str(copy), way, 3, ("", 0, -2), 5)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("same" if torch.equal(whole(resumed.lightning_module), expected) else "wrong weights")
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_byte_is_an_error_or_harmless(way: str, tmp_path: Path) -> None:
    several = run_ranks(damaged, str(tmp_path), way, 0, **MANY)
    for found in zip(*several, strict=True):
        assert "wrong weights" not in found
        assert len({each == "same" for each in found}) == 1, "all ranks go on, or none"


def cannot_write(folder: str, way: str) -> tuple[str, bool]:
    """Rank 1 may write no more than 512 bytes to a file, as on a disk that is full."""
    t = fit(folder, way, 3)
    path = Path(folder) / "last.ckpt"
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    before = [each.read_bytes() for each in files]
    t.strategy.barrier()
    if t.global_rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
    try:
        t.save_checkpoint(path)
    except Exception as error:
        t.strategy.barrier()
        return f"{type(error).__name__}: {error}", before == [each.read_bytes() for each in files]
    return "saved", False


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_whose_disk_is_full_fails_all_and_leaves_what_was_there(way: str, tmp_path: Path) -> None:
    for said, kept in run_ranks(cannot_write, str(tmp_path), way, **MANY):
        assert said != "saved"
        assert kept
