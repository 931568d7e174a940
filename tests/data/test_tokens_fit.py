"""Token streams in a Trainer on two nodes: each window is used once per epoch."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.data.fits import PACKAGES, lightning_of, ours, saver, trainer
from tests.helpers.data import counted
from tests.helpers.distributed import run_ranks

CONTEXT, BATCH, WINDOWS = 4, 3, 30
Seen = list[tuple[int, list[int]]]  # epoch, windows


@pytest.fixture(scope="module", params=[PACKAGES[0], pytest.param(PACKAGES[1], marks=pytest.mark.slow)])
def package(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    counted(root / "train" / "0.bin", 10 * CONTEXT + 1)
    # ids continue, so that the first id of a window gives its number
    counted(root / "train" / "1.bin", 20 * CONTEXT + 1, 10 * CONTEXT + 1)
    counted(root / "val.bin", 7 * CONTEXT + 1)
    return root


def model_of(package: str) -> Any:
    class Model(lightning_of(package).LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Embedding(1000, 1)
            self.seen: Seen = []
            self.val: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs, targets = batch
            assert inputs.shape == targets.shape == (BATCH, CONTEXT)
            assert inputs.dtype == targets.dtype == torch.int64
            assert torch.equal(targets, inputs + 1)
            self.seen.append((self.current_epoch, windows(inputs)))
            return self.net(inputs).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val += windows(batch[0])

        def ask_for_length(self, *_: Any) -> None:
            # it changes neither this epoch nor the position in checkpoints
            assert len(self.trainer.datamodule.train_dataloader()) > 0

        on_train_start = on_train_batch_end = ask_for_length

        def configure_optimizers(self) -> Any:
            self.ask_for_length()
            assert self.trainer.estimated_stepping_batches > 0  # schedules read it, which creates the loader early
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Model()


def windows(inputs: torch.Tensor) -> list[int]:
    return [each // CONTEXT for each in inputs[:, 0].tolist()]


def fit(package: str, folder: Path, ckpt_path: Path | None = None, **options: Any) -> Any:
    model = model_of(package)
    given = {"val": folder / "val.bin", "context": CONTEXT, "batch_size": BATCH, **options.pop("data", {})}
    data = ours(package).TokenDataModule(folder / "train", **given)
    trainer(package, **options).fit(model, data, ckpt_path=ckpt_path)
    return model


def runs(package: str, folder: str) -> dict[str, Any]:
    os.chdir(folder)
    warnings.simplefilter("ignore")
    root = Path(folder)
    callback = saver(package, root, "{step}", every_n_train_steps=2)
    whole = fit(package, root, callbacks=[callback], enable_checkpointing=True)
    resumed = fit(package, root, root / "step=8.ckpt")
    split = fit(package, root, max_epochs=1, data={"val": None, "val_fraction": 0.2})
    return {"whole": (whole.seen, whole.val), "resumed": resumed.seen, "split": (split.seen, split.val)}


@pytest.fixture(scope="module")
def results(package: str, folder: Path) -> list[dict[str, Any]]:
    return run_ranks(runs, package, str(folder), nodes=2, devices=1, timeout=200, init=False)


def test_windows_are_used_once_per_epoch(results: list[dict[str, Any]]) -> None:
    orders = []
    for epoch in range(2):
        order = [w for each in results for at, ws in each["whole"][0] if at == epoch for w in ws]
        assert sorted(order) == list(range(WINDOWS))
        orders.append(order)
    assert orders[0] != orders[1]
    val = sorted(w for each in results for w in each["whole"][1])
    assert val == sorted([*range(7)] * 2), "each epoch validates on each window once"


def test_resumed_run_sees_the_rest_of_the_epoch(results: list[dict[str, Any]]) -> None:
    for each in results:
        assert len(each["whole"][0]) == 2 * 5
        assert each["resumed"] == each["whole"][0][8:]


def test_val_fraction_holds_out_random_windows(results: list[dict[str, Any]]) -> None:
    train = {w for each in results for _, ws in each["split"][0] for w in ws}
    val = {w for each in results for w in each["split"][1]}
    assert (len(train), len(val)) == (24, 6)
    assert train | val == set(range(30))
    assert val != set(range(24, 30))


def test_loaders_without_a_trainer_need_setup_and_val(tmp_path: Path) -> None:
    data = ours(PACKAGES[0]).TokenDataModule(counted(tmp_path / "a.bin", 41), context=4, batch_size=2)
    with pytest.raises(ValueError, match=r"no loaders before setup\(\)"):
        data.train_dataloader()
    assert data.vocab_size == 1000
    data.setup("fit")
    firsts = np.concatenate([inputs[:, 0].numpy() for inputs, _ in data.train_dataloader()])
    assert sorted(firsts.tolist()) == list(range(0, 40, 4))
    with pytest.raises(ValueError, match="no tokens to validate on"):
        data.val_dataloader()
    data.teardown("fit")
