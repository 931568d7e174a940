"""After an exception parameters keep their shapes, the user's error appears, and ranks save or log why not."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.lines import Lines
from tests.helpers.scenarios import Scenarios
from tests.helpers.training import results_in_one_start
from tests.strategy.trainers import lightning_of, ours, plain_module, trainer
from tests.updates.exception_programs import ERRORS, WORLD, Program, play_all, program_of
from tests.updates.test_trainer import adamw_module, local

PACKAGE = "pytorch_lightning"
STARTS = int(os.environ.get("EXCEPTION_PROGRAMS", 20)) // 4  # starts of the slow test; each start runs four programs
MANY: dict[str, Any] = {"nodes": 2, "devices": 2, "timeout": 100, "init": False}
GRACE_S = 30.0  # ranks wait at most 10 s for each other before they end; more for a busy machine


SCENARIOS = Scenarios()
results = results_in_one_start(SCENARIOS, devices=2)
Results = list[dict[str, Any]]


class StopError(Exception):
    """The user's error."""


def saver(folder: str) -> Any:
    callbacks = importlib.import_module(f"{lightning_of(PACKAGE).__name__}.callbacks")
    return callbacks.OnExceptionCheckpoint(folder)


def stopped_in(place: str, folder: str, strategy: Any, module: Any, *more: Any) -> dict[str, Any]:
    """Raise in the sixth batch. Return the visible error, whether shapes are unchanged, and the log lines."""
    pl, lines = lightning_of(PACKAGE), Lines()

    class Stop(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if index == 5 and place == "optimizer":
                trainer.optimizers[0]._init_group = self.stop  # the step calls it, after all hooks
            elif index == 5 and place == "batch":
                self.stop()

        def stop(self, *_: Any) -> None:
            raise StopError("out of memory, say")

    t = trainer(PACKAGE, strategy, callbacks=[Stop(), saver(folder), *more], enable_checkpointing=True)
    error = ""
    try:
        t.fit(module)
    except StopError as raised:
        error = str(raised)
    shapes = [tuple(p.shape) for p in module.parameters()]
    whole = [tuple(p.shape) for p in plain_module(PACKAGE, nn.Linear(13, 5)).parameters()]
    return {"error": error, "shapes": shapes == whole, "lines": list(lines.lines)}


@SCENARIOS.add
def stopped(folder: str) -> dict[str, dict[str, Any]]:
    """Stop in an optimizer step or between batches, with updates, and with gradients and PTOCallback."""
    found = {}
    for place in ("optimizer", "batch"):
        found[f"{place} local"] = stopped_in(place, f"{folder}/{place} local", local(PACKAGE), adamw_module(PACKAGE))
        strategy = ours(PACKAGE).MSTopKHierStrategy(density=0.1, exchange="sparse", warmup_epochs=0)
        shares = ours(PACKAGE).PTOCallback(scope="world")
        found[f"{place} hier"] = stopped_in(place, f"{folder}/{place} hier", strategy, adamw_module(PACKAGE), shares)
    return found


@pytest.mark.parametrize("kind", ["local", "hier"])
def test_exception_in_shared_step_keeps_shapes_and_says_why_nothing_is_saved(results: Results, kind: str) -> None:
    for found in (each["stopped"][f"optimizer {kind}"] for each in results):
        assert found["error"] == "out of memory, say"
        assert found["shapes"]
        assert any("is not saved" in line and "ended the optimizer step" in line for line in found["lines"])
    assert not list(Path(results[0]["folder"]).glob(f"stopped/optimizer {kind}/*.ckpt"))


@pytest.mark.parametrize("kind", ["local", "hier"])
def test_exception_between_batches_on_all_ranks_is_saved(results: Results, kind: str) -> None:
    for found in (each["stopped"][f"batch {kind}"] for each in results):
        assert found["error"] == "out of memory, say"
        assert not any("is not saved" in line for line in found["lines"])
    saved = Path(results[0]["folder"]) / f"stopped/batch {kind}/on_exception.ckpt"
    weights = torch.load(saved, weights_only=False)["state_dict"]
    assert tuple(weights["net.weight"].shape) == (5, 13)


def one_rank_alone(folder: str) -> None:
    module = adamw_module(PACKAGE)
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5 and module.global_rank == 3:
            raise StopError("out of memory, say")
        return step(batch, batch_idx)

    module.training_step = training_step
    trainer(PACKAGE, local(PACKAGE), callbacks=[saver(folder)], enable_checkpointing=True).fit(module)


def test_exception_on_one_rank_ends_all_and_shows_the_error(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(one_rank_alone, str(tmp_path), grace_s=GRACE_S, **MANY)
    text = str(failed.value)
    assert "StopError: out of memory, say" in text
    assert not failed.value.stopped, "some ranks waited for longer than the grace period"


SHAPES = [(11, 13), (11,), (5, 11), (5,)]
LONGEST_WAIT = 12.0  # seconds without a log line that names the reason


def check(program: Program, found: dict[int, dict[str, Any]], folder: Path) -> None:
    for rank, of_rank in found.items():
        case = (program, rank, of_rank)
        error = (
            "SystemExit: 1" if program.error == "interrupt" else f"{ERRORS[program.error].__name__}: the user's error"
        )
        if of_rank["raised"]:
            assert of_rank["seen"].startswith(error), case
        elif program.together:
            assert of_rank["seen"] == "", case
        assert of_rank["shapes"] == SHAPES, case
        explained = any("waited" in line or "is not saved" in line for line in of_rank["lines"])
        assert explained or of_rank["waited"] < LONGEST_WAIT, case
    if not program.together:  # the launcher has ended some ranks
        return
    assert len(found) == WORLD, program
    if not found[0]["raised"]:
        return
    saved = folder / "on_exception.ckpt"
    assert saved.exists() != any("is not saved" in line for line in found[0]["lines"]), (program, found)
    if saved.exists():
        weights = torch.load(saved, weights_only=False)["state_dict"]
        assert [tuple(each.shape) for each in weights.values()] == SHAPES, program
    for of_rank in found.values():
        assert of_rank["again"] == "", (program, of_rank["again"])
        assert torch.equal(of_rank["weights"], found[0]["weights"]), program


@pytest.mark.parametrize("start", [0, *(pytest.param(10 + n, marks=pytest.mark.slow) for n in range(STARTS))])
def test_random_exception_is_shown_and_saves_a_checkpoint_or_logs_why_not(start: int, tmp_path: Path) -> None:
    """Run three programs in which all ranks raise together and continue, and one with ranks in different places."""
    programs = [program_of(4 * start + number, together=number < 3) for number in range(4)]
    stopped: list[int] = []
    try:
        run_ranks(play_all, programs, str(tmp_path), nodes=2, devices=2, timeout=150, init=False, grace_s=GRACE_S)
    except RanksFailed as failed:
        stopped = failed.stopped
    assert not stopped, programs
    for index, program in enumerate(programs):
        found = {rank: tmp_path / f"{index}.{rank}" for rank in range(WORLD)}
        seen = {rank: torch.load(file, weights_only=False) for rank, file in found.items() if file.exists()}
        assert any(of_rank["raised"] or not of_rank["seen"] for of_rank in seen.values()), program
        check(program, seen, tmp_path / str(index))
