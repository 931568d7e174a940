"""Fits of a module that uses another library, with both strategies and with DDP. `checks` compares the results."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.strategy.trainers import ddp, ours, ranks, trainer

PACKAGE = "pytorch_lightning"
BATCHES, EPOCHS, SAVED_AT = 8, 3, 10
# "all": all entries are sent at once, so the weights must equal the weights of DDP. With `mstopk_local`, this holds
# only if all ranks have equal batches, because each node has its own optimizer.
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: ddp(PACKAGE),
    "mstopk_hier": lambda: ours(PACKAGE).MSTopKHierStrategy(density=0.1, exchange="sparse", warmup_epochs=0),
    "mstopk_local": lambda: ours(PACKAGE).MSTopKLocalStrategy(density=0.1),
    "mstopk_hier, all": lambda: ours(PACKAGE).MSTopKHierStrategy(density=1.0, exchange="sparse", value_dtype="float32"),
    "mstopk_local, all": lambda: ours(PACKAGE).MSTopKLocalStrategy(density=1.0, value_dtype="float32", delay=0),
}


class Task(LightningModule):
    """Base of the modules. Equal steps have equal batches, and the files that the library saves are checked.

    Args:
        alike: give all ranks equal batches. Then nodes make equal updates with any optimizer.
    """

    def __init__(self, alike: bool = False) -> None:
        super().__init__()
        self.alike = alike
        self.losses: list[float] = []
        self.exported: dict[str, Tensor] = {}
        self.export_errors: list[float] = []
        torch.manual_seed(5)

    def batch(self) -> Any:
        """Draw a batch."""
        x = torch.randn(16, 16)
        return x, x[:, :4].argmax(1)

    def export(self, folder: Path) -> dict[str, Tensor]:
        """Save with the functions of the library. Return the saved tensors by the names of ``state_dict()``."""
        return {}

    def train_dataloader(self) -> Any:
        return DataLoader(torch.zeros(BATCHES, 1))  # type: ignore[arg-type]

    val_dataloader = train_dataloader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        loop = self.trainer.fit_loop.epoch_loop
        step = loop.batch_progress.total.ready if self.trainer.training else int(batch.numel())
        torch.manual_seed(1000 * step + (0 if self.alike else self.global_rank))  # also for dropout
        return self.batch()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        mean = outputs["loss"].detach().clone()
        dist.all_reduce(mean)
        self.losses.append(mean.item() / dist.get_world_size())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            self.export_errors.append(difference(self.export(self.folder), checkpoint["state_dict"]))

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            self.exported = self.export(self.folder)

    @property
    def folder(self) -> Path:
        return Path(self.trainer.default_root_dir)


class Classifier(Task):
    """A model that classifies, and logs its validation loss."""

    model: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference between tensors with equal names."""
    return max(((found[name].double() - expected[name].double()).abs().max().item() for name in found), default=0.0)


class Validations(Callback):
    """Records the logged metrics of each validation."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.found.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@dataclass
class Fit:
    """Results of a fit."""

    losses: list[float]
    validations: list[dict[str, float]]
    state: dict[str, Tensor]
    export_error: float


def fit(make: Callable[[bool], Task], strategy: str, folder: Path, *, alike: bool = False, resume: str = "") -> Fit:
    """Train on the ranks of a launcher."""
    module, validations = make(alike), Validations()
    saver = ModelCheckpoint(folder, every_n_train_steps=SAVED_AT, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {
        "callbacks": [validations, saver], "enable_checkpointing": True, "default_root_dir": str(folder),
        "max_steps": -1, "max_epochs": EPOCHS, "limit_val_batches": 2, "val_check_interval": BATCHES // 2,
        "use_distributed_sampler": False,
    }  # fmt: skip
    run = trainer(PACKAGE, STRATEGIES[strategy](), **options, **ranks())
    run.fit(module, ckpt_path=resume or None)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    errors = [*module.export_errors, difference(module.exported, state)]
    return Fit(module.losses, validations.found, state, max(errors))


def fits(make: Callable[[bool], Task], folder: str) -> dict[str, Fit]:
    """Train with each strategy: with 10% of the entries, with all entries, and from a checkpoint."""
    warnings.simplefilter("ignore")
    os.chdir(folder)
    found = {}
    for name in ("ddp", "mstopk_hier", "mstopk_local", "mstopk_hier, all"):
        found[name] = fit(make, name, Path(folder) / name)
    for name in ("ddp", "mstopk_local, all"):
        found[f"{name}, alike"] = fit(make, name, Path(folder) / f"{name}, alike", alike=True)
    for name in ("ddp", "mstopk_hier", "mstopk_local"):
        saved = Path(folder) / name / f"step={SAVED_AT}.ckpt"
        if saved.exists():  # missing if steps bypass the wrapper of Lightning, which then counts no steps
            found[f"{name}, resumed"] = fit(make, name, Path(folder) / f"{name}, resumed", resume=str(saved))
    return found
