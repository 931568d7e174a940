"""Digits learned through the DataModule, under every shuffle, as well as through ImageFolder: 2 nodes x 1 device."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sparse.data.config import SHUFFLES
from tests.data.pictures import digits_folder
from tests.helpers.distributed import run_ranks

EDGE, BATCH, EPOCHS, SCALE = 16, 50, 12, (0.7, 1.0)
MEAN, STD = (0.3, 0.3, 0.3), (0.35, 0.35, 0.35)


def learn(folder: str, name: str) -> float:
    """Validation accuracy."""
    import pytorch_lightning as pl

    from lightning_sparse.flavours.pytorch_lightning import CachedImageDataModule

    warnings.simplefilter("ignore")
    os.chdir(folder)
    pl.seed_everything(0)

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            convolutions = [nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()]
            self.net = nn.Sequential(*convolutions, nn.Flatten(), nn.LazyLinear(10))
            self.net(torch.zeros(1, 3, EDGE, EDGE))

        def training_step(self, batch: Any, _: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, _: int) -> None:
            right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
            self.log("accuracy", right, sync_dist=True, batch_size=len(batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=3e-3)

    if name == "ImageFolder":
        data = {"train_dataloaders": _image_folder(folder, "train"), "val_dataloaders": _image_folder(folder, "val")}
    else:
        cache = f"cache{os.environ['NODE_RANK']}"
        options = {"image_size": EDGE, "crop_scale": SCALE, "flip": 0.0, "mean": MEAN, "std": STD, "memory_gb": 0.1}
        module = CachedImageDataModule(folder, cache, batch_size=BATCH, shuffle=name, short_side=EDGE, **options)
        data = {"datamodule": module}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_epochs=EPOCHS, check_val_every_n_epoch=4,
        logger=False, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Classifier(), **data)
    return float(trainer.callback_metrics["accuracy"])


def _image_folder(folder: str, split: str) -> Any:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    crop = [v2.RandomResizedCrop(EDGE, SCALE, antialias=True)] if split == "train" else [v2.CenterCrop(EDGE * 7 // 8)]
    steps = [*crop, v2.Resize(EDGE), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return DataLoader(ImageFolder(f"{folder}/{split}", v2.Compose(steps)), BATCH, shuffle=split == "train")


def learn_all(folder: str) -> dict[str, float]:
    return {name: learn(folder, name) for name in ("ImageFolder", *SHUFFLES)}


@pytest.mark.slow
def test_digits_are_learned_as_well_as_through_image_folder(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="ImageFolder comes from it")
    digits_folder(tmp_path, edge=EDGE)
    accuracy, other = run_ranks(learn_all, str(tmp_path), nodes=2, devices=1, timeout=280, init=False)
    assert accuracy == other
    assert accuracy["ImageFolder"] > 0.9
    for shuffle in SHUFFLES:
        assert accuracy[shuffle] > accuracy["ImageFolder"] - 0.025, accuracy
