"""Checkpoints of all strategies in both formats, sabotaged on 2 nodes of 2 ranks: killed between any two files of a
save, damaged, and not written by one rank. No run goes on from wrong weights, and no rank waits for what will not come.
"""

import random
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from tests.fsdp.runs import whole
from tests.fsdp.test_trainer import fsdp, module
from tests.helpers.distributed import run_ranks
from tests.helpers.lines import raised
from tests.strategy.kills import FLAVOUR, Kill, damaged_copies, fit_on, patience, whole_and_killed
from tests.strategy.trainers import sparse
from tests.updates.test_trainer import local

MANY: dict[str, Any] = {"nodes": 2, "devices": 2, "timeout": 280}
WAYS: dict[str, Any] = {
    "gradients": lambda **options: sparse(FLAVOUR, exchange="sparse", warmup_steps=0, **options),
    "updates": lambda **options: local(FLAVOUR, **options),
    "gradients, a folder": lambda **options: sparse(
        FLAVOUR, exchange="sparse", warmup_steps=0, save_distributed_checkpoint=True, **options
    ),
    "updates, a folder": lambda **options: local(FLAVOUR, save_distributed_checkpoint=True, **options),
    "shards, one file": lambda **options: fsdp(FLAVOUR, save_distributed_checkpoint=False, **options),
    "shards, a folder": lambda **options: fsdp(FLAVOUR, **options),
}
POINTS = ["in a step", "before its side file", "after its side file", "before the main file", "after the main file"]
STEPS = 14

pytestmark = pytest.mark.slow


def fit(folder: str, kill: Kill | None, way: str, steps: int = STEPS, every: int = 1, seed: int = 0) -> Any:
    """Train from the last checkpoint, if there is one, and save after each step."""
    return fit_on(folder, WAYS[way](timeout=patience(kill)), module(FLAVOUR, seed), kill, every, max_steps=steps)


def ends_with(folder: str, kill: Kill | None, way: str) -> Tensor:
    return whole(fit(folder, kill, way).lightning_module).clone()


@pytest.mark.parametrize("way", ["updates", "shards, one file"])
def test_killed_between_any_two_files_of_a_save(way: str, tmp_path: Path) -> None:
    """After the first three steps, in which DDP's buckets settle. Gradients are in test_killed.py, folders in
    test_folders.py and tests/fsdp/test_folders.py."""
    chance = random.Random(way)
    kills = [
        Kill(point, 0 if "main" in point else chance.randrange(1, 4), 2 * number + 3)
        for number, point in enumerate(POINTS)
    ]
    for one, other in whole_and_killed(ends_with, tmp_path, kills, way, **MANY):
        assert torch.equal(one, other)


def damaged(folder: str, way: str) -> list[str]:
    """What becomes of each of 20 damaged bytes: an error, or the weights of the undamaged checkpoint."""
    path = Path(folder) / "saved"
    path.mkdir(exist_ok=True)
    saver = fit(str(path), None, way, 3, every=0)
    saver.save_checkpoint(path / "last.ckpt")
    expected, found = whole(saver.lightning_module), []
    for copy in damaged_copies(path, Path(folder), way):
        try:
            resumed = fit(str(copy), None, way, 3, every=0, seed=5)
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("same" if torch.equal(whole(resumed.lightning_module), expected) else "wrong weights")
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_byte_is_an_error_or_harmless(way: str, tmp_path: Path) -> None:
    several = run_ranks(damaged, str(tmp_path), way, init=False, **MANY)
    for found in zip(*several, strict=True):
        assert "wrong weights" not in found
        assert len({each == "same" for each in found}) == 1, "all ranks go on, or none"
    if "a folder" in way:  # whose files are nearly all checked
        errors = [each for found in several for each in found if each != "same"]
        assert all("is damaged" in each or "CheckpointException" in each for each in errors)
        assert len(errors) > 5 * len(several)


def cannot_write(folder: str, way: str) -> tuple[str, bool]:
    """Rank 1 may write no more than 512 bytes to a file, as on a disk that is full."""
    t = fit(folder, None, way, 3)
    path = Path(folder) / "last.ckpt"
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    before = [each.read_bytes() for each in files]
    t.strategy.barrier()
    if t.global_rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
    said = raised(t.save_checkpoint, path)
    t.strategy.barrier()
    return said, before == [each.read_bytes() for each in files]


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_whose_disk_is_full_fails_all_and_leaves_what_was_there(way: str, tmp_path: Path) -> None:
    for said, kept in run_ranks(cannot_write, str(tmp_path), way, init=False, **MANY):
        assert said
        assert kept
