"""Validation accuracy of hierarchical top-k communication against dense training, on a small CIFAR-10.

    python -m benchmarks.convergence.images PICTURES --tune     # once: learning rate, on dense training alone
    python -m benchmarks.convergence.images PICTURES            # the whole table; again after an interruption

PICTURES is a folder or a .tar of one, ``{train,val}/<class>/*.jpg``, all pictures of one size (32 x 32).

Runs are those of runs.py: four real processes, taken for two nodes of two devices or for four of one
("-4x1"). Bytes are counted and times mean nothing.

The regional exchange is held against the all-gather of messages at equal bytes: with M = 4 nodes a device receives
(M-1) K entries by the all-gather and 2 (M-1) K / M by regions, so by regions K may be twice as large.

**One node alone.** What a node comes to that talks to no other: its share of each batch (half of it; with "-4x1" a
quarter), as many steps, the same learning rate. A way that does not beat it is worse than no network.

**Paired.** Initialisation, data order and augmentation are functions of the seed alone; a configuration changes only
how gradients travel. So differences to dense are taken seed by seed, and their interval is far narrower than that of
the accuracies. Runs go seed by seed, each with all configurations: an unfinished table is paired already.

**One learning rate.** ``--tune`` chooses it for dense training on seeds that are not in the table, and all
configurations reuse it. Whatever a configuration would gain from a learning rate of its own is not in the numbers.

**Short runs.** 1,170 steps are few for a method that sends a coordinate every 1/density steps or so; published parity
is for tens of thousands. Read the table as an ordering of the variants and a regression test, not as a promise.

Every finished (configuration, seed) is one file ``runs/<configuration>-seed<seed>.json`` and is not run again.
The summary is results.md, results.json and accuracy.png in the same folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.convergence import report
from benchmarks.convergence.command import run_command
from benchmarks.convergence.pictures import EpochOrder, Pictures, load_pictures
from benchmarks.convergence.report import Metric
from benchmarks.convergence.runs import ALONE, SPARSE, Arguments, Learner, Run, Settings, Task

OUT = "runs/convergence"

ACCURACY = Metric(
    key="val_accuracy",
    name="accuracy",
    heading="val %",
    axis="validation accuracy, %",
    digits=1,
    higher_is_better=True,
)

GROUP_NORM = {"norm": "group"}  # has no statistics of a batch
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
    "updates 1%": {"way": "updates", "density": 0.01},
    "updates 0.1%": {"way": "updates", "density": 0.001},
    "dense, GroupNorm": {"way": "ddp", **GROUP_NORM},
    "one node alone, GroupNorm": {**ALONE, **GROUP_NORM},
    "updates 1%, GroupNorm": {"way": "updates", "density": 0.01, **GROUP_NORM},
    "default-momentum, GroupNorm": {
        "exchange": "sparse",
        "warmup_epochs": 4,
        "momentum_correction": True,
        **GROUP_NORM,
    },
}


@dataclass(frozen=True, kw_only=True)
class PictureSettings(Settings):
    global_batch: int = 128
    width: int = 16
    momentum: float = 0.9
    weight_decay: float = 5e-4


# --- the model


Norm = Callable[[int], nn.Module]
NORMS: dict[str, Norm] = {"batch": nn.BatchNorm2d, "group": lambda width: nn.GroupNorm(8, width)}


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, 1, bias=False),
            norm(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            norm(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet8(num_classes: int, widths: Sequence[int], norm: Norm) -> nn.Sequential:
    """78,042 parameters for ten classes and widths 16, 32, 64. The stem halves the picture: a quarter of the cost."""
    a, b, c = widths
    return nn.Sequential(
        nn.Conv2d(3, a, 3, 2, 1, bias=False),
        norm(a),
        nn.ReLU(),
        Block(a, a, 1, norm),
        Block(a, b, 2, norm),
        Block(b, c, 2, norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(c, num_classes),
    )


# --- one run, on every rank


@torch.no_grad()
def validate(model: nn.Module, pictures: Pictures) -> float:
    """Accuracy in percent of the model that all ranks share. Each takes its share of the pictures, with the mean of
    their batch statistics. Collective."""
    ranks = dist.get_world_size()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= ranks
    model.eval()
    mine = slice(dist.get_rank(), None, ranks)
    logits = model(pictures.normalised(pictures.val_x[mine].float()).contiguous(memory_format=torch.channels_last))
    model.train()
    correct = (logits.argmax(1) == pictures.val_y[mine]).sum()
    dist.all_reduce(correct)
    return 100 * float(correct) / len(pictures.val_y)


class PictureLearner(Learner):
    """The network, SGD with a cosine, and the augmented batches of this rank."""

    def __init__(self, run: Run, pictures: Pictures, rank: int) -> None:
        self.settings: PictureSettings = run.settings
        self.seed, self.pictures, self.rank = run.seed, pictures, rank
        widths, norm = [self.settings.width << stage for stage in range(3)], NORMS[run.option("norm", "batch")]
        self.model = resnet8(pictures.num_classes, widths, norm).to(memory_format=torch.channels_last)
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
            yield F.cross_entropy(model(self.pictures.normalised(x)), self.pictures.train_y[index_B])

    def validate(self) -> float:
        return validate(self.model, self.pictures)


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
    parser.add_argument("pictures", type=Path, help="folder or .tar with {train,val}/<class>/*.jpg")
    run_command(TASK, parser, OUT, lambda options: load_pictures(options.pictures, options.out))


if __name__ == "__main__":
    main()
