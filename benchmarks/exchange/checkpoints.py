"""Costs of a save and a restore: seconds, memory of a rank beyond training, and bytes per element on disk.

    python -m benchmarks.exchange.checkpoints OUT --parameters 100e6 [--folder]

Trains a linear model with AdamW for two steps on 2x2 ranks over Gloo, saves through Lightning's Trainer, and resumes on
the given clusters. Bytes count the checkpoint and its side files, which contain an optimizer's state per node,
divided by the elements of the model. Memory is the maximum of a rank during the save or restore, minus its memory in
training. Files come from the page cache, so seconds are as with a fast disk.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.processes import on_clusters, slowest
from benchmarks.record import Rows, parser_of, surroundings, write
from lightning_sparse.flavours.pytorch_lightning import MSTopKFSDPStrategy, MSTopKHierStrategy, MSTopKLocalStrategy
from lightning_sparse.topology import Topology

SIDE = 5000
CHECKPOINT = "saved.ckpt"
STRATEGIES = {"mstopk_hier": MSTopKHierStrategy, "mstopk_local": MSTopKLocalStrategy, "mstopk_fsdp": MSTopKFSDPStrategy}


# -- on each rank ------------------------------------------------------------------------------------------------------


class Linear(pl.LightningModule):
    """Matrices of `SIDE` x `SIDE`, trained with AdamW."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers)))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(pl.Callback):
    """Times Lightning between two hooks: the restore, and the work of a fit without a restore."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.began = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds, self.peak = time.monotonic() - self.began, _status("VmHWM")


def measure(
    topology: Topology,
    device: torch.device,
    _: float | None,
    folder: Path,
    layers: int,
    strategy: str,
    distributed: bool,
    restores: bool,
) -> Rows:
    """Run one save or restore. A collective.

    Returns the slowest rank's seconds and the largest rank's memory beyond training.
    """
    clock, checkpoint = Clock(), folder / CHECKPOINT
    data: DataLoader[Tensor] = DataLoader(list(torch.randn(64, SIDE)), batch_size=2)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=topology.num_devices,
        num_nodes=topology.num_nodes,
        strategy=STRATEGIES[strategy](save_distributed_checkpoint=distributed),
        max_steps=4 if restores else 2,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Linear(layers), data, ckpt_path=checkpoint if restores else None, weights_only=False)
    seconds, peak, held = clock.seconds, clock.peak, _status("VmRSS")
    if not restores:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current memory
        began = time.monotonic()
        trainer.save_checkpoint(checkpoint)
        seconds, peak = time.monotonic() - began, _status("VmHWM")
    most = slowest([seconds, (peak - held) / 1e6], device).tolist()
    what = "restore" if restores else "save"
    return [{"what": what, "seconds": most[0], "beyond_training_mb": most[1]}]


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


# -- the commands ------------------------------------------------------------------------------------------------------


def bytes_in(folder: Path) -> int:
    """Return the total bytes that a save wrote."""
    written = (file for each in folder.glob(f"{CHECKPOINT}*") for file in (each, *each.rglob("*")))
    return sum(file.stat().st_size for file in written if file.is_file())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parameters", type=float, default=100e6, metavar="N")
    parser.add_argument("--strategy", default="mstopk_local", choices=list(STRATEGIES))
    parser.add_argument("--folder", action="store_true", help="save a folder that all ranks write")
    parser.add_argument(
        "--clusters", nargs="+", default=["2x2", "4x1"], metavar="MxL", help="clusters that load the checkpoint"
    )
    options = parser.parse_args()
    layers = max(1, round(options.parameters / SIDE**2))
    folder = (options.out / "files").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    given = folder, layers, options.strategy, options.folder
    rows: list[dict[str, Any]] = on_clusters(measure, *given, False, clusters=["2x2"]) or []
    rows[0]["bytes_per_element"] = bytes_in(folder) / (layers * SIDE**2)
    rows += on_clusters(measure, *given, True, clusters=options.clusters) or []
    record = {
        **surroundings(),
        "parameters": layers * SIDE**2,
        "strategy": options.strategy,
        "folder": options.folder,
        "rows": rows,
    }
    lines = ["| | seconds | MB of a rank beyond training | bytes an element |", "|---|---|---|---|"]
    for row in rows:
        size = f"{row['bytes_per_element']:.2f}" if "bytes_per_element" in row else ""
        what, beyond = f"{row['what']} on {row['cluster']}", row["beyond_training_mb"]
        lines.append(f"| {what} | {row['seconds']:.1f} | {beyond:.0f} | {size} |")
    write(options.out / "checkpoints.json", record, "\n".join(lines))


if __name__ == "__main__":
    main()
