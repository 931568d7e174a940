"""Train a small ResNet on handwritten digits with SGD.

The script runs alone, under torchrun, under SLURM, and in a lab of network namespaces::

    python examples/digits.py --strategy ddp
    torchrun --nproc-per-node 2 examples/digits.py
    srun --nodes 2 --ntasks-per-node 2 python examples/digits.py
    lightning-sparse lab --nodes 2 --devices 2 --gbps 0.1 -- python examples/digits.py

The images are scikit-learn's handwritten digits (1,797 of 8 x 8 pixels; nothing is downloaded), written once as an
image folder: ``{train,val}/<digit>/<number>.png``.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from demo_training import fit, parse_arguments, take_share
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import to_pil_image

SPLIT_SEED = 0
VALIDATION_SHARE = 0.2


def write_digits(folder: Path) -> None:
    """Write the image folder if it is missing. The last step renames it, so an existing folder is complete."""
    if folder.exists():
        return
    from sklearn.datasets import load_digits  # slow to import, and most ranks find the folder

    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    digits = load_digits()
    numbers = list(range(len(digits.target)))
    random.Random(SPLIT_SEED).shuffle(numbers)
    validation = set(numbers[: int(VALIDATION_SHARE * len(numbers))])
    for number, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = unfinished / ("val" if number in validation else "train") / str(digit)
        place.mkdir(parents=True, exist_ok=True)
        to_pil_image((torch.from_numpy(image) / 16 * 255).to(torch.uint8)).save(place / f"{number:04}.png")
    try:
        unfinished.rename(folder)
    except OSError:  # another node's rank 0 on the same disk was faster
        shutil.rmtree(unfinished)


class Digits(pl.LightningDataModule):
    def __init__(self, folder: Path, batch_size: int, share: float) -> None:
        super().__init__()
        self.folder, self.batch_size, self.share = folder, batch_size, share

    def prepare_data(self) -> None:  # one rank of each node
        write_digits(self.folder)

    def train_dataloader(self) -> DataLoader[Any]:
        train = take_share(self._images("train"), self.share)
        return DataLoader(train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._images("val"), 90)

    def _images(self, split: str) -> ImageFolder:
        to_tensor = transforms.Compose([transforms.Grayscale(), transforms.ToTensor(), transforms.Normalize(0.3, 0.38)])
        return ImageFolder(str(self.folder / split), to_tensor)


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class SmallResNet(pl.LightningModule):
    """1.2 M parameters, most of them in layers with small feature maps: cheap to compute, costly to send."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        stem = nn.Conv2d(1, 64, 3, padding=1)
        blocks = [Block(64, 64, 1), Block(64, 128, 2), Block(128, 256, 2)]
        self.layers = nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        return F.cross_entropy(self.layers(images), digits)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, digits = batch
        logits = self.layers(images)
        self.log("val_loss", F.cross_entropy(logits, digits), sync_dist=True)
        self.log("val_accuracy", (logits.argmax(1) == digits).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.learning_rate, momentum=0.9, weight_decay=1e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    args = parse_arguments(__doc__, steps=100, learning_rate=0.05)
    pl.seed_everything(1, verbose=False)
    args.data.parent.mkdir(parents=True, exist_ok=True)
    fit(SmallResNet(args.learning_rate), Digits(args.data, args.batch_size, args.share), args)


if __name__ == "__main__":
    main()
