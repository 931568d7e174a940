"""After an exception parameters keep their shapes, the user's error appears, and ranks save together or say why not."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.lines import Lines
from tests.strategy.trainers import lightning_of, ours, plain_module, trainer
from tests.updates.test_trainer import adamw_module, local

FLAVOUR = "pytorch_lightning"
MANY: dict[str, Any] = {"nodes": 2, "devices": 2, "timeout": 100, "init": False}


class StopError(Exception):
    """The user's error."""


def saver(folder: str) -> Any:
    callbacks = importlib.import_module(f"{lightning_of(FLAVOUR).__name__}.callbacks")
    return callbacks.OnExceptionCheckpoint(folder)


def stopped_in(place: str, folder: str, strategy: Any, module: Any, *more: Any) -> dict[str, Any]:
    """Raise in the sixth batch; return what the user sees."""
    pl, lines = lightning_of(FLAVOUR), Lines()

    class Stop(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if index == 5 and place == "optimizer":
                trainer.optimizers[0].register_step_pre_hook(self.stop)
            elif index == 5 and place == "batch":
                self.stop()

        def stop(self, *_: Any) -> None:
            raise StopError("out of memory, say")

    t = trainer(FLAVOUR, strategy, callbacks=[Stop(), saver(folder), *more], enable_checkpointing=True)
    error = ""
    try:
        t.fit(module)
    except StopError as raised:
        error = str(raised)
    shapes = [tuple(p.shape) for p in module.parameters()]
    whole = [tuple(p.shape) for p in plain_module(FLAVOUR, nn.Linear(13, 5)).parameters()]
    return {"error": error, "shapes": shapes == whole, "lines": lines.lines}


def in_local(place: str, folder: str) -> dict[str, Any]:
    return stopped_in(place, folder, local(FLAVOUR), adamw_module(FLAVOUR))


def in_hier(place: str, folder: str) -> dict[str, Any]:
    strategy = ours(FLAVOUR).MSTopKHierStrategy(density=0.1, exchange="sparse", warmup_epochs=0)
    return stopped_in(place, folder, strategy, adamw_module(FLAVOUR), ours(FLAVOUR).PTOCallback(scope="world"))


@pytest.mark.parametrize("fit", [in_local, in_hier])
def test_exception_in_shared_step_keeps_shapes_and_says_why_nothing_is_saved(fit: Any, tmp_path: Path) -> None:
    for found in run_ranks(fit, "optimizer", str(tmp_path), **MANY):
        assert found["error"] == "out of memory, say"
        assert found["shapes"]
        assert any("is not saved" in line and "ended the optimizer step" in line for line in found["lines"])
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.parametrize("fit", [in_local, in_hier])
def test_exception_between_batches_on_all_ranks_is_saved(fit: Any, tmp_path: Path) -> None:
    saved = tmp_path / "on_exception.ckpt"
    for found in run_ranks(fit, "batch", str(tmp_path), **MANY):
        assert found["error"] == "out of memory, say"
        assert not any("is not saved" in line for line in found["lines"])
    weights = torch.load(saved, weights_only=False)["state_dict"]
    assert tuple(weights["net.weight"].shape) == (5, 13)


def one_rank_alone(folder: str) -> None:
    module = adamw_module(FLAVOUR)
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5 and module.global_rank == 3:
            raise StopError("out of memory, say")
        return step(batch, batch_idx)

    module.training_step = training_step
    trainer(FLAVOUR, local(FLAVOUR), callbacks=[saver(folder)], enable_checkpointing=True).fit(module)


def test_exception_on_one_rank_ends_all_and_shows_the_error(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(one_rank_alone, str(tmp_path), **MANY)
    text = str(failed.value)
    assert "StopError: out of memory, say" in text
    assert not failed.value.hung
