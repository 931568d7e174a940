"""Shared code of digits.py and characters.py: command line, strategy, progress bar and measurements."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import Dataset, Subset
from tqdm import tqdm

from lightning_sparse import MSTopKHierStrategy, MSTopKLocalStrategy

VALIDATIONS = 8


def parse_arguments(description: str | None, **defaults: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="mstopk_local", help="ddp, mstopk_hier or mstopk_local")
    parser.add_argument("--density", type=float, default=0.01, help="fraction of the entries that nodes exchange")
    parser.add_argument("--steps", type=int, help="number of training steps")
    parser.add_argument("--share", type=float, default=1.0, help="fraction of the training set to use")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and step")
    parser.add_argument("--learning-rate", type=float, help="largest learning rate of the one-cycle schedule")
    parser.add_argument("--result", type=Path, default=Path("runs/result"), help="folder for measurements")
    parser.add_argument("--label", default="training", help="name of the run, for the progress bar")
    parser.add_argument("--data", type=Path, default=Path("runs/digits"), help="image folder; created if missing")
    parser.set_defaults(**defaults)
    return parser.parse_args()


def make_strategy(name: str, density: float) -> Any:
    """Return the `strategy` argument of a Trainer. The runs are too short for a density warm-up."""
    if name == "mstopk_hier":
        return MSTopKHierStrategy(density=density, exchange="sparse", warmup_epochs=0)
    return MSTopKLocalStrategy(density=density) if name == "mstopk_local" else name


def find_cluster() -> dict[str, Any]:
    """Return `devices` and `num_nodes` for a Trainer, from the launcher's environment variables."""
    for local, world in (("LOCAL_WORLD_SIZE", "WORLD_SIZE"), ("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS")):
        if local in os.environ and world in os.environ:
            devices = int(os.environ[local])
            return {"devices": devices, "num_nodes": int(os.environ[world]) // devices}
    return {"devices": torch.cuda.device_count() or 2, "num_nodes": 1}


def take_share(data: Dataset[Any], share: float) -> Subset[Any]:
    """Return evenly spaced samples, which are equal in every epoch."""
    size = len(data)  # type: ignore[arg-type]
    return Subset(data, [int(place / share) for place in range(int(size * share))])


def fit(module: pl.LightningModule, data: pl.LightningDataModule, args: argparse.Namespace) -> None:
    """Train, validate `VALIDATIONS` times, and write the measurements of each node to ``args.result``."""
    logging.basicConfig(format="%(message)s")  # warnings only: the demo shows one line per run
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)")  # Lightning 2.6 with torch 2.15
    warnings.filterwarnings("ignore", r".*does not have many workers")
    trainer = pl.Trainer(
        **find_cluster(),
        strategy=make_strategy(args.strategy, args.density),
        max_steps=args.steps,
        max_epochs=-1,
        val_check_interval=max(1, args.steps // VALIDATIONS),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[Progress(args.label), Recorder(args.result)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, data)


class Progress(pl.Callback):
    """One progress line for the whole fit, on rank 0."""

    def __init__(self, label: str) -> None:
        self.label = label

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        style = "{desc}: step {n} of {total}, {elapsed}{postfix}"
        hidden = not trainer.is_global_zero
        self.bar = tqdm(total=trainer.max_steps, desc=self.label, disable=hidden, bar_format=style, mininterval=0.5)

    def on_train_batch_end(self, *_: Any) -> None:
        self.bar.update()

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.bar.set_postfix_str(f"val_loss {float(trainer.callback_metrics['val_loss']):.3f}")

    def on_fit_end(self, *_: Any) -> None:
        self.bar.close()


class Recorder(pl.Callback):
    """Write the seconds and received bytes of each step, and the validation losses, to ``node<n>.json``.

    The kernel counts the bytes on the node's network interface. This needs a node with an interface of its own, as in
    the lab. Elsewhere `bytes_received` is None, and `bytes_computed` has the expected bytes per step.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        self.counter = Path(f"/sys/class/net/{interface}/statistics/rx_bytes")
        self.counts = "LIGHTNING_SPARSE_LAB" in os.environ and interface != "lo" and self.counter.exists()
        self.seconds: list[float] = []
        self.losses: list[tuple[int, float]] = []  # step, validation loss

    def on_train_start(self, *_: Any) -> None:
        self.received_before = self._received()

    def on_train_batch_start(self, *_: Any) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if module.device.type == "cuda":  # wait for this step, but not for an exchange that overlaps with the next one
            torch.cuda.current_stream().synchronize()
        self.seconds.append(time.perf_counter() - self.started)
        self.received = self._received() - self.received_before
        self.computed = compute_received_bytes(trainer, module)  # after the last step, before the final exchange

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.losses.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))

    def on_fit_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.local_rank == 0:
            result = {
                "losses": self.losses,
                "seconds": self.seconds,
                "bytes_received": self.received / len(self.seconds) if self.counts else None,
                "bytes_computed": self.computed,
            }
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"node{trainer.node_rank}.json").write_text(json.dumps(result) + "\n")

    def _received(self) -> int:
        return int(self.counter.read_text()) if self.counts else 0


def compute_received_bytes(trainer: pl.Trainer, module: pl.LightningModule) -> float:
    """Return the average number of bytes that this node receives from other nodes per step.

    For DDP this is a ring all-reduce over all ranks; one link of the ring enters each node.
    """
    if trainer.num_nodes == 1:
        return 0.0
    engine = getattr(trainer.strategy, "engine", None)
    if engine is not None:
        stats = engine.exchange.stats
        return float(stats.bytes_between_nodes / max(1, stats.rounds) * trainer.world_size / trainer.num_nodes)
    nbytes = sum(each.numel() * each.element_size() for each in module.parameters())
    return 2 * (trainer.world_size - 1) / trainer.world_size * nbytes
