"""Checkpoints of updates: size, callbacks, memory formats, and other strategies that read them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.distributed import RunRanks
from tests.helpers.lines import Lines, raised
from tests.helpers.scenarios import Scenarios
from tests.helpers.training import results_in_one_start
from tests.strategy.kills import PACKAGE
from tests.strategy.trainers import ddp, lightning_of, plain_module, ranks, sparse, trainer, weights
from tests.updates.runs import adamw, start
from tests.updates.test_trainer import local


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 37), nn.BatchNorm1d(37), nn.Tanh(), nn.Linear(37, 5))


def module() -> Any:
    class Module(type(plain_module(PACKAGE, net(), by_step=True))):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def saved_bytes(options: dict[str, Any]) -> tuple[float, float]:
    """Return the saved bytes per element, in pieces and in other state."""
    ddp, optimizer, updates = start(adamw, nn.Linear(200, 300), **options)
    for step in range(6):
        optimizer.zero_grad()
        torch.manual_seed(step + 7 * torch.distributed.get_rank())
        ddp(torch.randn(8, 200)).square().mean().backward()
        optimizer.step()
        updates.step()
    state, numel = updates.state(), updates.optimizers[0].state.slices.numel
    beside = [each.nbytes for each in state.own["optimizers"][0].values() if isinstance(each, Tensor)]
    return sum(piece.tensor.nbytes for of in state.pieces.values() for piece in of) / numel, sum(beside) / numel


@pytest.mark.parametrize(
    ("options", "in_pieces", "other"),
    [({}, 8, 0.6), ({"delay": 0}, 8, 0.1), ({"sync_every": 4}, 8, 13), ({"exchange": "regional"}, 12, 0.1)],
)
def test_save_takes_two_tensors_per_slice(
    ranks: RunRanks, options: dict[str, Any], in_pieces: int, other: float
) -> None:
    """Small patches are saved, too, except between two exchanges. Exchanges other than "sparse" save three tensors."""
    for found in ranks(saved_bytes, options, nodes=2, devices=2):
        assert found[0] == in_pieces
        assert found[1] < other


# -- callbacks, memory formats and other strategies --------------------------------------------------------------------

SCENARIOS = Scenarios()
results = results_in_one_start(SCENARIOS, devices=2)


@SCENARIOS.add
def changed_by_a_callback(folder: str) -> list[Tensor]:
    """Change global weights and buffers in a callback before each save; return a whole run and a resumed run."""
    pl = lightning_of(PACKAGE)

    class Change(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self, trainer: Any, trained: Any) -> None:
            with torch.no_grad():
                trained.net[0].weight[:2] = 0
                trained.net[1].running_mean.zero_()

    ends = []
    for path in (None, f"{folder}/epoch=0.ckpt"):
        saver = pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1, enable_version_counter=False)
        options = {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 4, "enable_checkpointing": True}
        trained = module()
        callbacks = [Change(), saver]
        trainer(PACKAGE, local(PACKAGE), callbacks=callbacks, **options, **ranks()).fit(trained, ckpt_path=path)
        ends.append(weights(trained))
    return ends


def test_changes_by_a_callback_before_a_save_are_resumed(results: list[dict[str, Any]]) -> None:
    assert all(torch.equal(*each["changed_by_a_callback"]) for each in results)


@SCENARIOS.add
def in_another_layout(folder: str) -> tuple[Tensor, Tensor]:
    """Return the global weights at a save, and the initial weights of a model in channels_last."""
    found = []

    class Look(lightning_of(PACKAGE).Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, trained: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                with trainer.strategy.global_weights():
                    found.append(weights(trained))
                trainer.save_checkpoint(f"{folder}/3.ckpt")

    for path in (None, f"{folder}/3.ckpt"):
        torch.manual_seed(0)
        convolutions = nn.Conv2d(1, 4, 2), nn.Conv2d(4, 5, 2)
        trained = plain_module(PACKAGE, nn.Sequential(nn.Unflatten(1, (1, 13, 1)), nn.Upsample((3, 4)), *convolutions))
        if path:
            trained.to(memory_format=torch.channels_last)
        t = trainer(PACKAGE, local(PACKAGE), max_steps=4, max_epochs=-1, callbacks=[Look()], **ranks())
        t.fit(trained, ckpt_path=path)
    return found[0], found[1]


def test_resume_in_another_memory_format_keeps_weights(results: list[dict[str, Any]]) -> None:
    for saved, begins_with in (each["in_another_layout"] for each in results):
        assert torch.equal(saved, begins_with)


@SCENARIOS.add
def numpy_schedule(folder: str) -> list[Tensor]:
    """Return a whole run and a resumed run with a NumPy number as learning rate."""

    class Save(lightning_of(PACKAGE).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(f"{folder}/3.ckpt")

    class Module(type(module())):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=np.float64(0.01))

    ends = []
    for path in (None, f"{folder}/3.ckpt"):
        trained = Module()
        t = trainer(PACKAGE, local(PACKAGE), max_steps=6, max_epochs=-1, callbacks=[Save()], **ranks())
        t.fit(trained, ckpt_path=path, **({"weights_only": False} if path else {}))
        ends.append(weights(trained))
    return ends


def test_resume_with_numpy_numbers_in_an_optimizer_is_bit_identical(results: list[dict[str, Any]]) -> None:
    assert all(torch.equal(*each["numpy_schedule"]) for each in results)


@SCENARIOS.add
def array_in_a_group(folder: str) -> str:
    class Module(type(module())):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([{"params": self.parameters(), "sizes": np.arange(3)}])

    t = trainer(PACKAGE, local(PACKAGE), max_steps=2, **ranks())
    t.fit(Module())
    return raised(t.save_checkpoint, f"{folder}/saved.ckpt")


def test_save_of_arrays_in_an_optimizer_is_refused(results: list[dict[str, Any]]) -> None:
    assert all("numpy.ndarray, which a safe load refuses" in each["array_in_a_group"] for each in results)


@SCENARIOS.add
def elsewhere(folder: str) -> tuple[Tensor, list[Tensor], list[str]]:
    """Load a checkpoint of updates with plain DDP and with the strategy for gradients."""
    path, lines, found = f"{folder}/saved.ckpt", Lines(), []
    t = trainer(PACKAGE, local(PACKAGE), max_steps=6, **ranks())
    trained = module()
    t.fit(trained)
    t.save_checkpoint(path)
    for strategy in (ddp(PACKAGE), sparse(PACKAGE)):
        other = module()
        trainer(PACKAGE, strategy, max_steps=6, **ranks()).fit(other, ckpt_path=path)
        found.append(weights(other))
    return weights(trained), found, list(lines.lines)


def test_other_strategies_load_weights_of_updates(results: list[dict[str, Any]]) -> None:
    for saved, found, _ in (each["elsewhere"] for each in results):
        assert all(torch.equal(saved, each) for each in found)
    assert any("was saved by a strategy that exchanges updates" in line for line in results[0]["elsewhere"][2])
