"""Data, model, cluster settings, and timing that the digits_*.py scripts share.

Each script runs alone, under torchrun, under SLURM, and in the lab::

    python examples/digits_ddp.py
    torchrun --nproc-per-node 2 examples/digits_ddp.py
    srun --nodes 2 --ntasks-per-node 2 python examples/digits_ddp.py
    lightning-sparse lab --nodes 2 --devices 2 --gbps 0.1 -- python examples/digits_ddp.py

The data are the handwritten digits of scikit-learn (1,797 images of 8 x 8 pixels; nothing is downloaded). The scripts
write them as an image folder, like a larger data set: ``{train,val}/<digit>/<number>.png``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import to_pil_image

# Lightning's advice and its list of ranks, once a rank, would bury the progress bar.
for name in ("pytorch_lightning", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.WARNING)
# Lightning 2.6 asks torch 2.15 in an old way.
warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)")

SPLIT_SEED = 0
VALIDATION_SHARE = 0.2


def write_digits(folder: Path) -> None:
    """Write the image folder unless it is there. A folder that is there is complete: it is renamed into place."""
    if folder.exists():
        return
    from sklearn.datasets import load_digits  # most ranks find the folder, and importing this takes a while

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
    def __init__(self, folder: Path, batch_size: int) -> None:
        super().__init__()
        self.folder, self.batch_size = folder, batch_size

    def prepare_data(self) -> None:  # one rank of each node
        write_digits(self.folder)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("val", shuffle=False)

    def _loader(self, split: str, shuffle: bool) -> DataLoader[Any]:
        to_tensor = transforms.Compose([transforms.Grayscale(), transforms.ToTensor(), transforms.Normalize(0.3, 0.38)])
        pictures = ImageFolder(str(self.folder / split), to_tensor)
        return DataLoader(pictures, self.batch_size, shuffle=shuffle, drop_last=shuffle)


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
    """1.2 M parameters, most of them where pictures are small: cheap to compute, costly to send."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        stem = nn.Conv2d(1, 64, 3, padding=1)
        blocks = [Block(64, 64, 1), Block(64, 128, 2), Block(128, 256, 2)]
        self.layers = nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pictures, digits = batch
        loss = F.cross_entropy(self.layers(pictures), digits)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        pictures, digits = batch
        accuracy = (self.layers(pictures).argmax(1) == digits).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.learning_rate, momentum=0.9, weight_decay=1e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Recorder(pl.Callback):
    """Seconds and bytes sent of each step, bytes of the fit, and a metric, as ``node<n>.json``: one file a node.

    Bytes are what the kernel counted on the interface of the node from one step to the next, so they need a node that
    is alone on its interface, as in the lab; elsewhere they are left out. What a step should send stands beside them.
    """

    def __init__(self, folder: Path, metric: str = "val_accuracy") -> None:
        self.folder, self.metric = folder, metric
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        self.counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
        self.counts = "LIGHTNING_SPARSE_LAB" in os.environ and interface != "lo" and self.counter.exists()
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        self.sent = 0

    def setup(self, *_: Any, **__: Any) -> None:
        self.sent_before = self._sent()

    def on_train_batch_start(self, *_: Any) -> None:
        sent = self._sent()
        if self.bytes:
            self.bytes[-1] += sent - self.sent  # what is sent beside the next step goes on between two
        self.started, self.sent = time.perf_counter(), sent

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        sent = self._sent()
        self.bytes.append(sent - self.sent)
        self.sent = sent
        self.computed = computed(trainer, module)  # after the last step, before what is pending is sent

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.local_rank == 0:
            result = {
                self.metric: float(trainer.callback_metrics[self.metric]),
                "seconds": self.seconds,
                "bytes_sent": self.bytes if self.counts else None,
                "bytes_sent_in_all": self._sent() - self.sent_before if self.counts else None,
                "bytes_computed": self.computed,
            }
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"node{trainer.node_rank}.json").write_text(json.dumps(result) + "\n")

    def _sent(self) -> int:
        return int(self.counter.read_text()) if self.counts else 0


def computed(trainer: pl.Trainer, module: pl.LightningModule) -> float:
    """Bytes that this node sends to others for a step, on average: of our strategies what they count, of DDP those of
    a ring over all ranks, one of whose links leaves each node."""
    if trainer.num_nodes == 1:
        return 0.0
    engine = getattr(trainer.strategy, "engine", None)
    if engine is not None:
        stats = engine.exchange.stats
        return float(stats.bytes_between_nodes / max(1, stats.rounds) * trainer.world_size / trainer.num_nodes)
    nbytes = sum(each.numel() * each.element_size() for each in module.parameters())
    return 2 * (trainer.world_size - 1) / trainer.world_size * nbytes


def cluster() -> dict[str, Any]:
    """`devices` and `num_nodes` for a Trainer, from what started this process."""
    for local, world in (("LOCAL_WORLD_SIZE", "WORLD_SIZE"), ("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS")):
        if local in os.environ and world in os.environ:
            devices = int(os.environ[local])
            return {"devices": devices, "num_nodes": int(os.environ[world]) // devices}
    return {"devices": torch.cuda.device_count() or 2, "num_nodes": 1}


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs/digits"), help="image folder; made when absent")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the pictures that an epoch takes")
    parser.add_argument("--batch-size", type=int, default=16, help="pictures a rank and step")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--result", type=Path, default=Path("runs/result"), help="folder for what Recorder measured")
    return parser.parse_args()
