"""Does a model learn as well through `CachedImageDataModule` as through ImageFolder? On a small CIFAR-10.

    python benchmarks/data_learning.py PICTURES OUT      # again after an interruption: finished runs are kept

PICTURES is a folder ``{train,val}/<class>/*.jpg`` of small pictures. Two processes stand for two nodes of one device
(Gloo over loopback, strategy "ddp"), each with a cache of its own, so that every shuffle means what it means on a
cluster: with "local" a node never sees the other's pictures. Model, initialisation, learning rate, batch and kind of
augmentation are the same for all rows; the order and the crops are each loader's own, so runs are not paired. In the
row "one node alone" the other does not exist: half of each batch, as many steps.

The spread between seeds says how far two rows may differ by chance. Writes results.json, results.md, learning.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any, Final, Literal

import pytorch_lightning as pl
import torch
from convergence import resnet8
from pictures import GREY, picture
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

from lightning_sparse.bench.report import surroundings
from lightning_sparse.data.config import SHUFFLES, Shuffle
from lightning_sparse.flavours.pytorch_lightning import CachedImageDataModule

NODES, BATCH = 2, 64  # a rank
EDGE, SCALE = 32, (0.6, 1.0)
MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
LR, MOMENTUM, WEIGHT_DECAY = 0.2, 0.9, 5e-4
REFERENCE: Final = "ImageFolder"
ALONE: Final = "ImageFolder, one node alone"
Loader = Shuffle | Literal["ImageFolder", "ImageFolder, one node alone"]
EVERY: Final = (REFERENCE, ALONE, *SHUFFLES)


class Classifier(pl.LightningModule):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = resnet8(num_classes).to(memory_format=torch.channels_last)

    def training_step(self, batch: Any, _: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, _: int) -> None:
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=len(batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loaders(pictures: Path, name: Loader, seed: int, scratch: Path) -> dict[str, Any]:
    """What `Trainer.fit` takes."""
    if name != REFERENCE and name != ALONE:
        cache = scratch / f"cache{os.environ['NODE_RANK']}"
        module = CachedImageDataModule(
            str(pictures), str(cache), batch_size=BATCH, shuffle=name, seed=seed, memory_gb=0.2, image_size=EDGE,
            short_side=EDGE, crop_scale=SCALE, mean=MEAN, std=STD,
        )  # fmt: skip
        return {"datamodule": module}
    crops = {
        "train": [v2.RandomResizedCrop(EDGE, SCALE, antialias=True), v2.RandomHorizontalFlip()],
        "val": [v2.CenterCrop(EDGE * 7 // 8), v2.Resize(EDGE)],
    }
    made = {}
    for split, crop in crops.items():
        steps = [*crop, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        folder = ImageFolder(str(pictures / split), v2.Compose(steps))
        shuffled = split == "train"
        if shuffled and name == ALONE:
            half: DistributedSampler[Any] = DistributedSampler(folder, NODES, rank=0, seed=seed)
            made[f"{split}_dataloaders"] = DataLoader(folder, BATCH, sampler=half)
        else:
            made[f"{split}_dataloaders"] = DataLoader(folder, BATCH, shuffle=shuffled)
    return made


def train(pictures: Path, name: Loader, seed: int, epochs: int, scratch: Path) -> float:
    """Validation accuracy after the last epoch, in percent."""
    pl.seed_everything(seed, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, num_nodes=nodes_of(name), strategy="ddp", max_epochs=epochs, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, num_sanity_val_steps=0,
        check_val_every_n_epoch=epochs,
    )  # fmt: skip
    trainer.fit(Classifier(len(list((pictures / "train").iterdir()))), **loaders(pictures, name, seed, scratch))
    return 100 * float(trainer.callback_metrics["accuracy"])


def nodes_of(name: Loader) -> int:
    return 1 if name == ALONE else NODES


def worker(rank: int, options: argparse.Namespace, missing: list[tuple[Loader, int]], port: int) -> None:
    """One node; all runs are of as many."""
    nodes = nodes_of(missing[0][0])
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(nodes), RANK=str(rank), NODE_RANK=str(rank),
        GROUP_RANK=str(rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, seed in tqdm(missing, unit="run", disable=rank != 0):
        accuracy = train(options.pictures, name, seed, options.epochs, options.out)
        if rank == 0:
            record = {"loader": name, "seed": seed, "epochs": options.epochs, "accuracy": accuracy}
            file_of(options.out, name, seed).write_text(json.dumps(record))


def file_of(out: Path, name: str, seed: int) -> Path:
    return out / f"{name}-seed{seed}.json"


def accuracies(records: list[dict[str, Any]]) -> dict[str, list[float]]:
    by_name: dict[str, list[float]] = {}
    for record in records:
        by_name.setdefault(record["loader"], []).append(record["accuracy"])
    return by_name


def report(out: Path, records: list[dict[str, Any]]) -> str:
    about = surroundings(" ".join(["python", *(Path(w).name if Path(w).is_absolute() else w for w in sys.argv)]))
    by_name = accuracies(records)
    lines = ["| pictures come through | seeds | val %, mean | lowest | highest |", "|---|---|---|---|---|"]
    for name, values in by_name.items():
        label = name if name in (REFERENCE, ALONE) else f'CachedImageDataModule, shuffle="{name}"'
        lines.append(
            f"| {label} | {len(values)} | {statistics.fmean(values):.1f} | {min(values):.1f} | {max(values):.1f} |"
        )
    head = ["# Learning through the cache", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    (out / "results.md").write_text("\n".join([*head, *lines, ""]))
    (out / "results.json").write_text(json.dumps({"about": about, "runs": records}, indent=1) + "\n")
    plot({"runs": records}, out / "learning.svg")
    return "\n".join(lines)


def plot(record: dict[str, Any], file: Path) -> None:
    by_name = accuracies(record["runs"])
    with picture(file, height=3) as (axes,):
        for row, values in enumerate(by_name.values()):
            axes.plot(values, [row] * len(values), "o", alpha=0.6)
            axes.plot(statistics.fmean(values), row, "|", color=GREY, markersize=16)
        axes.set_yticks(range(len(by_name)), list(by_name))
        axes.invert_yaxis()
        axes.set_xlabel("validation accuracy, % (a dot a seed, a line the mean)")
        axes.grid(axis="x")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("pictures", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--loaders", nargs="+", choices=EVERY, default=EVERY)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    if not (options.pictures / "train").is_dir():
        parser.error(f"{options.pictures} has no folder train/: give an image folder with train/ and val/")
    options.pictures, options.out = options.pictures.resolve(), options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    runs = [(name, seed) for seed in options.seeds for name in options.loaders]
    os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning gives each process all cores
    for nodes in (NODES, 1):
        missing = [run for run in runs if nodes_of(run[0]) == nodes and not file_of(options.out, *run).exists()]
        if not missing:
            continue
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(worker, (options, missing, port), nprocs=nodes)  # type: ignore[attr-defined, no-untyped-call]
    print(report(options.out, [json.loads(file_of(options.out, *run).read_text()) for run in runs]))


if __name__ == "__main__":
    main()
