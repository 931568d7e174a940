"""Runs in which a rank kills itself by SIGKILL, in a step or during a save, and that resume from the checkpoint."""

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_sparse.checkpoint import folder as folders
from lightning_sparse.checkpoint import side_files as saves
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.strategy.trainers import lightning_of, ranks, trainer

PACKAGE = "pytorch_lightning"
# Point -> the function that kills the rank when it is called. "before the main file" is a method of the strategy.
POINTS: dict[str, tuple[Any, str]] = {
    "before its side file": (saves, "write_side_file"),
    "after its side file": (saves, "decide"),
    "after the main file": (saves, "remove_side_files"),
    # of a checkpoint folder
    "meta.pt": (torch, "save"),
    "its name": (folders, "_replace"),
    "the old one goes": (folders.shutil, "rmtree"),
}


@dataclass(frozen=True)
class Kill:
    """Kill rank `rank` in or after step `step`, at a point: "in a step", "before the main file", or one of `POINTS`."""

    point: str
    rank: int
    step: int


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killer(kill: Kill | None) -> Any:
    class Killer(lightning_of(PACKAGE).Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if kill is None or (trainer.global_step, trainer.global_rank) != (kill.step, kill.rank):
                return
            if kill.point == "in a step":
                die()
            main_file = trainer.strategy.checkpoint_io, "save_checkpoint"
            setattr(*(main_file if kill.point == "before the main file" else POINTS[kill.point]), die)

    return Killer()


def patience(kill: Kill | None) -> timedelta:
    """Return the timeout of the process groups, which is short if a rank is killed."""
    return timedelta(seconds=4 if kill else 100)


def stopper(stop_after: int | None) -> Any:
    """Return a callback that ends a fit after a number of steps, which the strategy cannot know in advance."""

    class Stopper(lightning_of(PACKAGE).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop |= trainer.global_step == stop_after

    return Stopper()


def fit_on(
    folder: str,
    strategy: Any,
    module: Any,
    kill: Kill | None,
    every: int = 1,
    stop_after: int | None = None,
    **options: Any,
) -> Any:
    """Train from the last checkpoint of the folder, if any, and save after every `every` steps (0: never)."""
    pl = lightning_of(PACKAGE)
    saver = pl.callbacks.ModelCheckpoint(folder, "last", every_n_train_steps=every, enable_version_counter=False)
    if every:
        options |= {"callbacks": [saver, killer(kill), stopper(stop_after)], "enable_checkpointing": True}
    if options.get("precision") == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        options["plugins"] = [pl.plugins.MixedPrecision(options.pop("precision"), "cpu", scaler=scaler)]
    t = trainer(PACKAGE, strategy, max_epochs=-1, **ranks(), **options)
    path = Path(folder) / "last.ckpt"
    t.fit(module, ckpt_path=path if path.exists() else None)
    return t


def whole_and_killed(
    fit: Callable[..., Any], folder: Path, kills: Sequence[Kill], *args: Any, **many: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield two results per rank: of ``fit(folder, None, *args)``, and of a run that each of `kills` interrupts."""
    many |= {"init": False}
    (folder / "whole").mkdir()
    whole = run_ranks(fit, str(folder / "whole"), None, *args, **many)
    for kill in kills:
        with pytest.raises(RanksFailed) as failed:
            run_ranks(fit, str(folder), kill, *args, **many, grace_s=60)
        assert failed.value.killed.keys() == {kill.rank}
        assert not failed.value.stopped
    yield from zip(whole, run_ranks(fit, str(folder), None, *args, **many), strict=True)


def damaged_copies(saved: Path, folder: Path, seed: object) -> Iterator[Path]:
    """Yield 20 copies of the folder `saved`, each with one bit of one file changed. A collective."""
    chance = random.Random(seed)
    for number in range(20):
        copy = folder / str(number)
        if dist.get_rank() == 0:
            shutil.copytree(saved, copy)
            file = chance.choice(
                sorted(each for each in copy.rglob("*") if each.is_file() and each.name != ".metadata")
            )
            content = bytearray(file.read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            file.write_bytes(content)
        dist.barrier()
        yield copy
