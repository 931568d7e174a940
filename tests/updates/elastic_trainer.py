"""A node as Trainer has it, in a process that tests kill; it prints a line of JSON after each step."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse.elastic import ElasticSampler
from lightning_sparse.flavours.pytorch_lightning import CommStatsCallback, MSTopKElasticStrategy, TokenDataModule


class Norm(nn.BatchNorm1d):
    """Also of a batch of one sample, the rest of an epoch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if len(x) > 1 else torch.cat([x, -x]))[: len(x)]


def net_of() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), Norm(64), nn.Tanh(), nn.Linear(64, 4))


class Toy(pl.LightningModule):
    def __init__(self, validation: float = 0.0, begins_with: float | None = None) -> None:
        super().__init__()
        self.validation, self.begins_with = validation, begins_with
        self.net = net_of()

    def on_train_start(self) -> None:
        if self.begins_with is not None:
            for parameter in self.parameters():
                parameter.data.fill_(self.begins_with)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, self.drawn = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        if self.validation and not self.trainer.sanity_checking:
            report(self.trainer, validates=True)
            time.sleep(self.validation)
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)]


class Reader(pl.LightningModule):
    """Of windows of eight tokens that are the number of the window."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Embedding(512, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn = batch[0][:, 0]
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)  # asks for the loader before there are other nodes
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)]


class Report(pl.Callback):
    def __init__(self, pause: float) -> None:
        self.pause = pause

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        time.sleep(self.pause)
        report(trainer, step=trainer.global_step, epoch=trainer.current_epoch, drawn=pl_module.drawn.tolist())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        report(trainer, step=trainer.global_step)


def report(trainer: Any, **more: Any) -> None:
    updates = trainer.strategy.elastic
    with updates.global_weights():
        token, number, *_ = updates.version
        weights = torch.cat([p.detach().flatten() for p in trainer.lightning_module.parameters()])
    digest = hashlib.sha1(weights.numpy().tobytes()).hexdigest()[:12]
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    told = {"token": token, "number": number, "digest": digest, "lr": lr, **updates.gauges()}
    told["mean"] = float(weights.mean())
    if trainer.is_global_zero:
        print(json.dumps({**more, **told}), flush=True)


def main(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    steps, pause, folder = options.pop("steps", -1), options.pop("pause", 0.02), options.pop("folder")
    epochs, devices, every = options.pop("epochs", -1), options.pop("devices", 1), options.pop("every", 10)
    tokens = options.pop("tokens", None)
    module = Toy(options.pop("validation", 0.0), options.pop("begins_with", None)) if tokens is None else Reader()
    os.environ.update(options.pop("env", {}))
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    pl.seed_everything(0)
    x = torch.randn(2048, 16)
    data = TensorDataset(x, torch.tanh(x @ torch.randn(16, 4)), torch.arange(2048))
    order: dict[str, Any] = {"sampler": ElasticSampler(data)} if options.pop("deal", False) else {"shuffle": True}
    stoppers = [pl.callbacks.EarlyStopping("val_loss", patience=10**6)] if options.pop("stops_early", False) else []
    checkpoints = Path(folder)
    saved = checkpoints / "last.ckpt"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=MSTopKElasticStrategy(lighthouse=lighthouse, node_name=options.pop("node", name), **options),
        max_steps=steps,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Report(pause),
            CommStatsCallback(),
            *stoppers,
            pl.callbacks.ModelCheckpoint(checkpoints, save_last=True, every_n_train_steps=every, save_top_k=1),
        ],
    )
    given: dict[str, Any] = {"ckpt_path": str(saved) if saved.exists() else None}
    if tokens is None:
        given["train_dataloaders"] = DataLoader(data, batch_size=32, **order)
        given["val_dataloaders"] = DataLoader(data, batch_size=2048)
    else:
        given["datamodule"] = TokenDataModule(tokens, context=8, batch_size=8)
    trainer.fit(module, **given)
    if trainer.is_global_zero:
        print(json.dumps({"ends": trainer.global_step}), flush=True)
