"""Validation accuracy of hierarchical top-k communication compared with dense training, on a small CIFAR-10.

    python -m benchmarks.convergence.images IMAGES --tune     # once: learning rate, on dense training alone
    python -m benchmarks.convergence.images IMAGES            # the whole table; again after an interruption

IMAGES is a folder ``{train,val}/<class>/*.jpg``, with images of one size (32 x 32). runs.py runs each configuration:
four real processes as two nodes of two devices, or as four nodes of one device ("-4x1"). Bytes are counted, and times
mean nothing.

The regional exchange and the all-gather of messages are compared at equal bytes. On M nodes, a device receives (M-1) K
entries by the all-gather and 2 (M-1) K / M by regions. So with M = 4, K is twice as large by regions.

**Single-node baseline.** Training without communication: a node on its share of each batch (half; with "-4x1" a
quarter), for as many steps, at the same learning rate. A method that does not beat it is worse than no network.

**Paired.** Initialization, data order and augmentation depend only on the seed; a configuration changes only the
communication. So differences to dense training are computed per seed, and their interval is much narrower than that of
the accuracies. Runs are ordered by seed, so an unfinished table is paired, too.

**One learning rate.** ``--tune`` chooses it for dense training, on seeds that are not in the table. All configurations
use it, so the table does not show the gain of a separate learning rate.

**Short runs.** 1,170 steps are few for a method that sends an entry about every 1/density steps; published parity is
for tens of thousands. Read the table as a ranking of variants and a regression test.

Each finished (configuration, seed) is a file ``runs/<configuration>-seed<seed>.json`` and is not run again. The summary
is results.md, results.json and results.svg in the same folder.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks.convergence import report
from benchmarks.convergence.report import Metric
from benchmarks.convergence.runs import ALONE, SPARSE, Arguments, Learner, Run, Settings, Task, run_command

OUT = "runs/convergence"

ACCURACY = Metric(
    key="val_accuracy",
    name="accuracy",
    label="validation accuracy, %",
    digits=1,
    higher_is_better=True,
)

CONFIGS: dict[str, Arguments] = {
    "dense": None,
    "one node alone": ALONE,
    "one node alone-4x1": {**ALONE, "nodes": 4},
    "1%": {**SPARSE, "density": 0.01},
    "1%-warmup": {**SPARSE, "density": 0.01, "warmup_epochs": 2},
    "1%-bf16": {**SPARSE, "density": 0.01, "value_dtype": "bfloat16"},
    "default-warmup2": {"exchange": "sparse", "warmup_epochs": 2},
    "default": {"exchange": "sparse", "warmup_epochs": 4},  # "auto" would see loopback
    "default-5%": {"exchange": "sparse", "warmup_epochs": 4, "warmup_steps": 59},  # of 1,170 steps: Trainer's default
    "default-5%-momentum": {"exchange": "sparse", "warmup_epochs": 4, "warmup_steps": 59, "momentum_correction": True},
    "default-exclude": {"exchange": "sparse", "warmup_epochs": 4, "exclude": "vectors"},
    "default-momentum": {"exchange": "sparse", "warmup_epochs": 4, "momentum_correction": True},
    "1%-momentum": {**SPARSE, "density": 0.01, "momentum_correction": True},
    "1%-exclude": {**SPARSE, "density": 0.01, "exclude": "vectors"},
    "1%-buckets": {**SPARSE, "density": 0.01, "bucket_cap_mb": 0.02},  # otherwise the whole model is one
    "1%-regional": {**SPARSE, "density": 0.01, "exchange": "regional"},
    "1%-4x1": {**SPARSE, "density": 0.01, "nodes": 4},
    "2%-regional-4x1": {**SPARSE, "density": 0.02, "exchange": "regional", "nodes": 4},
    "0.1%-momentum-warmup": {**SPARSE, "density": 0.001, "warmup_epochs": 2, "momentum_correction": True},
    "0.1%": {**SPARSE, "density": 0.001},
    "0.1%-warmup": {**SPARSE, "density": 0.001, "warmup_epochs": 2},
    "default-5%-momentum, 2 bits": {
        "exchange": "sparse",
        "warmup_epochs": 4,
        "warmup_steps": 59,
        "momentum_correction": True,
        "value_dtype": "2bit",
    },
    "updates 1%": {"way": "updates", "density": 0.01},
    "updates 1%, bfloat16": {"way": "updates", "density": 0.01, "value_dtype": "bfloat16"},
}


@dataclass(frozen=True, kw_only=True)
class PictureSettings(Settings):
    global_batch: int = 128
    width: int = 16
    momentum: float = 0.9
    weight_decay: float = 5e-4


# --- the images, decoded once, and their order in training


SUFFIXES = {".jpg", ".jpeg", ".png"}


@dataclass(frozen=True)
class Pictures:
    train_x: Tensor  # uint8 [N, 3, H, W]
    train_y: Tensor  # int64 [N]
    val_x: Tensor
    val_y: Tensor
    classes: tuple[str, ...]
    mean_C: Tensor  # of the training images, in 0..255
    std_C: Tensor

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def normalized(self, x_BCHW: Tensor) -> Tensor:
        return (x_BCHW - self.mean_C[:, None, None]) / self.std_C[:, None, None]


def augmented(padded_NCHW: Tensor, index_B: Tensor, top_B: Tensor, left_B: Tensor, flip_B: Tensor, size: int) -> Tensor:
    """Return crops of `size` at (top, left) of the images `index`, some mirrored; float, channels last in memory."""
    rows_BH = top_B[:, None] + torch.arange(size)
    columns_BW = left_B[:, None] + torch.where(flip_B[:, None], torch.arange(size - 1, -1, -1), torch.arange(size))
    # Indices on both sides of a slice put the indexed dimensions first: [B, H, W, C].
    crops_BHWC = padded_NCHW[index_B[:, None, None], :, rows_BH[:, :, None], columns_BW[:, None, :]]
    return crops_BHWC.permute(0, 3, 1, 2).float()


class EpochOrder:
    """The images, crops and flips of a rank in one epoch: a pure function of (seed, epoch)."""

    PAD = 4

    def __init__(self, num_pictures: int, seed: int, epoch: int, global_batch: int) -> None:
        generator = torch.Generator().manual_seed(seed * 10_007 + epoch)
        self.order_N = torch.randperm(num_pictures, generator=generator)
        self.shift_N2 = torch.randint(0, 2 * self.PAD + 1, (num_pictures, 2), generator=generator)
        self.flip_N = torch.rand(num_pictures, generator=generator) < 0.5
        self.global_batch = global_batch
        self.steps = num_pictures // global_batch

    def batch(self, padded_NCHW: Tensor, step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
        first = step * self.global_batch
        picked_B = torch.arange(first + rank, first + self.global_batch, world)
        index_B, shift_B2 = self.order_N[picked_B], self.shift_N2[picked_B]
        size = padded_NCHW.shape[-1] - 2 * self.PAD
        x = augmented(padded_NCHW, index_B, shift_B2[:, 0], shift_B2[:, 1], self.flip_N[picked_B], size)
        return x, index_B


def load_pictures(source: Path, cache: Path) -> Path:
    """Return the file in `cache` with the decoded images of `source`; make it if it is missing."""
    if not (source / "train").is_dir() or not (source / "val").is_dir():
        raise ValueError(f"{source} lacks train/ or val/; give a folder with {{train,val}}/<class>/*.jpg")
    stat = source.stat()
    key = hashlib.sha256(f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    file = cache / f"pictures-{key}.pt"
    if not file.exists():
        temporary = file.with_suffix(".tmp")
        torch.save(decode(source), temporary)
        temporary.replace(file)
    return file


def decode(source: Path) -> Pictures:
    """Decode all images, sorted by path."""
    tensors: dict[str, Tensor] = {}
    classes = tuple(sorted(each.name for each in (source / "train").iterdir() if each.is_dir()))
    for split in ("train", "val"):
        files = sorted(path for path in (source / split).glob("*/*") if path.suffix.lower() in SUFFIXES)
        found = [np.asarray(Image.open(path).convert("RGB")) for path in tqdm(files, desc=split, unit="image")]
        shapes = {pixels.shape for pixels in found}
        if len(shapes) != 1:
            raise ValueError(f"{source / split} has images of {len(shapes)} sizes, {sorted(shapes)[:2]}. Use one size")
        tensors[f"{split}_x"] = torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).contiguous()
        tensors[f"{split}_y"] = torch.tensor([classes.index(path.parent.name) for path in files])
    values = tensors["train_x"].double()
    mean_C, std_C = values.mean((0, 2, 3)).float(), values.std((0, 2, 3)).float()
    return Pictures(**tensors, classes=classes, mean_C=mean_C, std_C=std_C)


# --- the model


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet8(num_classes: int, widths: Sequence[int]) -> nn.Sequential:
    """Return a ResNet of 78,042 parameters for ten classes and widths 16, 32, 64. The stem halves the image."""
    a, b, c = widths
    return nn.Sequential(
        nn.Conv2d(3, a, 3, 2, 1, bias=False),
        nn.BatchNorm2d(a),
        nn.ReLU(),
        Block(a, a, 1),
        Block(a, b, 2),
        Block(b, c, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(c, num_classes),
    )


# --- one run, on every rank


class PictureLearner(Learner):
    """The network, SGD with a cosine schedule, and the augmented batches of this rank."""

    def __init__(self, run: Run, pictures: Pictures, rank: int) -> None:
        self.settings: PictureSettings = run.settings
        self.seed, self.pictures, self.rank = run.seed, pictures, rank
        widths = [self.settings.width << stage for stage in range(3)]
        self.model = resnet8(pictures.num_classes, widths).to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            self.settings.lr,
            self.settings.momentum,
            weight_decay=self.settings.weight_decay,
            foreach=True,
        )
        self.padded_NCHW = F.pad(pictures.train_x, [EpochOrder.PAD] * 4)
        self.steps = len(self.padded_NCHW) // self.settings.global_batch
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, self.settings.epochs * self.steps)

    def losses(self, model: nn.Module, epoch: int) -> Iterator[Tensor]:
        order = EpochOrder(len(self.padded_NCHW), self.seed, epoch, self.settings.global_batch)
        for step in range(self.steps):
            x, index_B = order.batch(self.padded_NCHW, step, self.rank, self.settings.world_size)
            yield F.cross_entropy(model(self.pictures.normalized(x)), self.pictures.train_y[index_B])

    @torch.no_grad()
    def validate(self) -> float:
        """Return the accuracy in percent, with averaged batch statistics. Each rank takes its share of the images."""
        ranks, pictures = dist.get_world_size(), self.pictures
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= ranks
        self.model.eval()
        mine = slice(self.rank, None, ranks)
        x = pictures.normalized(pictures.val_x[mine].float()).contiguous(memory_format=torch.channels_last)
        correct = (self.model(x).argmax(1) == pictures.val_y[mine]).sum()
        self.model.train()
        dist.all_reduce(correct)
        return 100 * float(correct) / len(pictures.val_y)


TASK = Task(
    metric=ACCURACY,
    configs=CONFIGS,
    learner=PictureLearner,
    settings=PictureSettings,
    tune_lrs=(0.05, 0.1, 0.2, 0.4, 0.8),
)


def plot(record: dict[str, Any], file: Path) -> None:
    report.plot(record["runs"], ACCURACY, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path, help="image folder with {train,val}/<class>/*.jpg")
    run_command(TASK, parser, OUT, lambda options: load_pictures(options.pictures, options.out))


if __name__ == "__main__":
    main()
