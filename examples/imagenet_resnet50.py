"""Train a ResNet-50 on ImageNet, or on any image folder.

    python imagenet_resnet50.py fit --config imagenet/one_node.yaml \\
        --data.source /mnt/nfs/imagenet --data.cache_dir /local/cache

trains on one node. ``imagenet/README.md`` has the commands for torchrun, SLURM, and an emulated cluster. The YAML files
set the strategy and the sharded optimizer step; this file contains only the model and the schedule.

The source contains ``train/<class>/*`` and ``val/<class>/*`` on network storage. Without ``val/``, set the fraction of
``train/`` to validate on: ``--data.val_fraction=0.05``. Each file is read from the source once. Later epochs read it
from the memory of the nodes, and later runs from ``cache_dir`` on the node's disk.

The recipe follows Goyal et al. 2017: a learning rate proportional to the global batch, with a warm-up. It adds a cosine
schedule, label smoothing, and zero-initialized residual branches. For global batches of thousands of images, it can use
LARS (You et al. 2017).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from timm.optim.lars import Lars
from torch import Tensor, nn
from torchvision import models

from lightning_sparse import CachedImageDataModule

Batch = tuple[Tensor, Tensor]


def lr_factor(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return the fraction of the peak learning rate: a linear warm-up, then half a cosine to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))))


class ResNet(pl.LightningModule):
    """
    Args:
        num_classes: taken from the data.
        batch_size: images per device and step; taken from the data.
        arch: a torchvision ResNet. Use resnet18 for first tests.
        optimizer: sgd, or timm's lars for large global batches, which scales the step of each layer.
        lr: learning rate for a global batch of 256; multiplied by global batch / 256.
        warmup_epochs: epochs in which the learning rate rises; may be a fraction.
        weight_decay: weight decay of the weights. Biases and normalization have none, and LARS steps them as SGD does.
    """

    def __init__(
        self,
        num_classes: int,
        batch_size: int,
        arch: Literal["resnet18", "resnet34", "resnet50", "resnet101"] = "resnet50",
        optimizer: Literal["sgd", "lars"] = "sgd",
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-5,
        warmup_epochs: float = 5,
        label_smoothing: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = models.get_model(arch, num_classes=num_classes, zero_init_residual=True)
        self.loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss: Tensor = self.loss(self(x), y)
        # without sync_dist, which would add two collectives over the slow network to every step
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        top = self(x).topk(min(5, self.hparams["num_classes"])).indices == y[:, None]
        scores = {"val_top1": top[:, 0].float().mean(), "val_top5": top.any(1).float().mean()}
        self.log_dict(scores, prog_bar=True, sync_dist=True, batch_size=len(y))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        hp: Any = self.hparams
        trainer = self.trainer
        global_batch = hp.batch_size * trainer.world_size * trainer.accumulate_grad_batches
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.parameters() if p.ndim > 1]},
            {"params": [p for p in self.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        make = Lars if hp.optimizer == "lars" else torch.optim.SGD
        optimizer = make(
            groups, lr=hp.lr * global_batch / 256, momentum=hp.momentum, weight_decay=hp.weight_decay, nesterov=True
        )
        total_steps = int(trainer.estimated_stepping_batches)
        warmup_steps = int(hp.warmup_epochs / trainer.max_epochs * total_steps) if trainer.max_epochs else 0
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, warmup_steps, total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ImageNetCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.batch_size", "model.batch_size")
        parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")


if __name__ == "__main__":
    ImageNetCLI(ResNet, CachedImageDataModule, seed_everything_default=42, save_config_kwargs={"overwrite": True})
