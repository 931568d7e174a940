"""Data, models and Trainers for tests of the DataModule, for either Lightning package.

Each image contains its number (`numbered_folder`), so that a training step knows its samples.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_sparse.data.cache.store import owners
from lightning_sparse.data.pipeline.sampler import EpochPlan, Indices, Sampler, SamplerConfig

PACKAGES = ["pytorch_lightning", "lightning"]
TRAIN, VAL, BATCH = 120, 22, 5
LABELS = np.arange(TRAIN) * 3 // TRAIN
Results = list[dict[str, Any]]


def lightning_of(package: str) -> Any:
    return importlib.import_module("pytorch_lightning" if package == "pytorch_lightning" else "lightning.pytorch")


def ours(package: str) -> Any:
    return importlib.import_module(f"lightning_sparse.flavours.{package}")


def data(package: str, folder: Path, **options: Any) -> Any:
    """Return a DataModule with one disk cache per node. Unnormalized pixels show the image's number."""
    cache = folder / f"cache{os.environ.get('NODE_RANK', '0')}"
    given = {"batch_size": BATCH, "image_size": 16, "mean": (0, 0, 0), "std": (1 / 255,) * 3, "memory_gb": 0.05}
    return ours(package).CachedImageDataModule(str(folder / "source"), str(cache), **{**given, **options})


def module(package: str) -> Any:
    pl = lightning_of(package)

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 3)
            self.train_seen: list[tuple[int, int, list[int]]] = []  # epoch, batch, samples
            self.val_seen: list[tuple[int, list[int]]] = []
            self.shapes: set[tuple[int, ...]] = set()
            self.raises_at = -1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == self.raises_at:
                raise KeyError("in training")
            pixels, labels = batch
            self.shapes.add(tuple(pixels.shape))
            self.train_seen.append((self.current_epoch, batch_idx, numbers(pixels)))
            assert labels.tolist() == [number * 3 // TRAIN for number in numbers(pixels)]
            return nn.functional.cross_entropy(self.net(pixels[:, :1, 0, 0] / 255), labels)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if not self.trainer.sanity_checking:
                self.val_seen.append((self.current_epoch, numbers(batch[0])))
            self.log("val", batch[0].mean(), sync_dist=True, batch_size=len(batch[0]))

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Module()


def numbers(pixels: torch.Tensor) -> list[int]:
    return [round(each) for each in pixels[:, 0, 3, 3].tolist()]


def trainer(package: str, **options: Any) -> Any:
    nodes, devices = int(os.environ.get("GROUP_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "devices": devices, "num_nodes": nodes, "max_epochs": 2, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "num_sanity_val_steps": 0, "strategy": "ddp" if nodes * devices > 1 else "auto",
    }  # fmt: skip
    return lightning_of(package).Trainer(**{**defaults, **options})


def fitted(package: str, folder: Path, data_options: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return (module, trainer) after a fit; `ckpt_path` goes to fit."""
    model, ckpt_path = module(package), options.pop("ckpt_path", None)
    t = trainer(package, **options)
    t.fit(model, data(package, folder, **(data_options or {})), ckpt_path=ckpt_path)
    return model, t


def saver(package: str, folder: Path, name: str, **options: Any) -> Any:
    callbacks = importlib.import_module(lightning_of(package).__name__ + ".callbacks")
    return callbacks.ModelCheckpoint(dirpath=folder, filename=name, save_top_k=-1, **options)


class Metrics:
    """A logger for either Lightning package."""

    def __new__(cls, package: str) -> Any:
        loggers = importlib.import_module(lightning_of(package).__name__ + ".loggers.logger")

        class Recorder(loggers.Logger):  # type: ignore[misc, name-defined]
            name, version = "recorder", 0

            def __init__(self) -> None:
                super().__init__()
                self.rows: list[dict[str, float]] = []

            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                if any(key.startswith("data/") for key in metrics):
                    self.rows.append({**metrics, "step": step or 0})

            def log_hyperparams(self, *_: Any) -> None: ...

        return Recorder()


def left_behind() -> list[str]:
    """Return the threads of the data package and the ids of child processes that do not end."""
    threads = [each.name for each in threading.enumerate()]
    return [name for name in threads if name.startswith(("lightning_sparse ", "storage reader"))] + lasting_children()


def lasting_children() -> list[str]:
    """Return the ids of child processes that are still there after 20 s, zombies included."""
    file, until = Path(f"/proc/self/task/{os.getpid()}/children"), time.monotonic() + 20
    while file.exists() and (children := file.read_text().split()):
        if time.monotonic() > until:
            return children
        time.sleep(0.02)
    return []


def segments() -> set[str]:
    """Return the memory segments that this process has open or mapped."""
    gc.collect()
    links = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    return {link for link in links if link.startswith("/memfd:lightning_sparse-")}


def expected(shuffle: str, epoch: int, nodes: int = 2, devices: int = 2, batch: int = BATCH, **more: Any) -> Any:
    """Return the expected samples by [step][node][device], from the sampler."""
    config = SamplerConfig(batch_size=batch, devices=(devices,) * nodes, shuffle=shuffle, **more)  # type: ignore[arg-type]
    plan = Sampler(np.arange(TRAIN), partial(owners, LABELS, seed=0), config).epoch(epoch)
    return [[[rank.tolist() for rank in node] for node in global_batch(plan, step)] for step in range(plan.steps)]


def share_of_own(shuffle: str, epoch: int) -> float:
    """Return the share of samples in an epoch that the node itself holds, on two nodes of two devices."""
    home = owners(LABELS, 2, seed=0)
    steps = expected(shuffle, epoch)
    own = [home[flat(node)] == index for step in steps for index, node in enumerate(step)]
    return float(np.mean(np.concatenate(own)))


def flat(nested: Any) -> list[int]:
    return [nested] if isinstance(nested, int) else [item for each in nested for item in flat(each)]


def global_batch(plan: EpochPlan, step: int) -> list[list[Indices]]:
    """Return the samples of all ranks in one step, by node and device."""
    devices = enumerate(plan.config.devices)
    return [[plan.batch(step, node, device) for device in range(count)] for node, count in devices]
