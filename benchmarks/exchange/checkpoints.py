"""What do a save and a restore cost: seconds, memory of a rank beyond training, and bytes an element on disk?

    python -m benchmarks.exchange.checkpoints OUT --parameters 100e6
    python -m benchmarks.exchange.checkpoints OUT --library CLONE      of the library in another clone

Trains a linear model with AdamW for two steps on 2x2 ranks over Gloo, saves through Lightning's Trainer, and resumes on
the clusters given. Bytes are those of the checkpoint and its side files together, which hold an optimizer's state for
each node, over the elements of the model. Memory is the highest of a rank while it saves or restores, less what it
holds when it trains. Files come out of the page cache, so seconds are those of a fast disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIDE = 5000
CHECKPOINT = "saved.ckpt"


# --- on each rank


def worker(folder: Path, cluster: str, layers: int, strategy: str, restores: bool) -> None:
    """Train; save, or restore."""
    import pytorch_lightning as pl
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    import lightning_sparse  # noqa: F401  # registers the strategies

    rank, devices = int(os.environ["RANK"]), int(cluster.split("x")[1])
    os.environ["LIGHTNING_SPARSE_NODE"] = f"node {rank // devices}"
    torch.set_num_threads(1)

    class Linear(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers)))

        def training_step(self, batch: Tensor) -> Tensor:
            loss: Tensor = self.layers(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Clock(pl.Callback):
        """Times what Lightning does between these two hooks: the restore, and what a fit without one does, too."""

        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            self.began = time.monotonic()

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.seconds, self.peak = time.monotonic() - self.began, _highest()

    clock = Clock()
    data: DataLoader[Tensor] = DataLoader(list(torch.randn(64, SIDE)), batch_size=2)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_steps=4 if restores else 2,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    trainer.fit(Linear(), data, ckpt_path=folder / CHECKPOINT if restores else None, weights_only=False)
    told: dict[str, Any] = {"seconds": clock.seconds, "peak": clock.peak, "after": _resident()}
    if not restores:
        _reset_highest()
        began, before = time.monotonic(), _resident()
        trainer.save_checkpoint(folder / CHECKPOINT)
        told = {"seconds": time.monotonic() - began, "peak": _highest(), "after": before}
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


def _resident() -> int:
    return _status("VmRSS")


def _highest() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def _reset_highest() -> None:
    Path("/proc/self/clear_refs").write_text("5")


# --- the commands


def measure(folder: Path, cluster: str, layers: int, strategy: str, library: Path | None, *, restores: bool) -> Any:
    """One save or restore: the slowest rank's seconds and the largest rank's memory beyond training."""
    nodes, devices = map(int, cluster.split("x"))
    words = [cluster, str(layers), strategy, "restore" if restores else "save"]
    path = [str(library)] if library else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(Path(__file__).parents[2])])}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nodes * devices}"]
    command = [sys.executable, *launcher, __file__, "--worker", str(folder), *words]
    subprocess.run(command, check=True, env=environment, timeout=1800, stdout=subprocess.DEVNULL)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(nodes * devices)]
    return {
        "cluster": cluster,
        "what": words[-1],
        "seconds": max(rank["seconds"] for rank in ranks),
        "beyond_training_mb": max(rank["peak"] - rank["after"] for rank in ranks) / 1e6,
    }


def bytes_in(folder: Path) -> int:
    """Total bytes that a save wrote."""
    written = (file for each in folder.glob(f"{CHECKPOINT}*") for file in (each, *each.rglob("*")))
    return sum(file.stat().st_size for file in written if file.is_file())


def main() -> None:
    from benchmarks.record import parser_of, surroundings, write

    parser = parser_of(__doc__)
    parser.add_argument("--parameters", type=float, default=100e6, metavar="N")
    parser.add_argument("--strategy", default="mstopk_local")
    parser.add_argument("--clusters", nargs="+", default=["2x2", "4x1"], metavar="MxL", help="to restore on")
    parser.add_argument("--library", type=Path, metavar="CLONE", help="of the library that is measured")
    options = parser.parse_args()
    layers = max(1, round(options.parameters / SIDE**2))
    rows: list[dict[str, Any]] = []
    folder = options.out / "files"
    folder.mkdir(parents=True, exist_ok=True)
    given = (layers, options.strategy, options.library)
    rows.append(measure(folder, "2x2", *given, restores=False))
    rows[0]["bytes_per_element"] = bytes_in(folder) / (layers * SIDE**2)
    rows += [measure(folder, cluster, *given, restores=True) for cluster in options.clusters]
    record = {**surroundings(), "parameters": layers * SIDE**2, "strategy": options.strategy, "rows": rows}
    lines = ["| | seconds | MB of a rank beyond training | bytes an element |", "|---|---|---|---|"]
    for row in rows:
        size = f"{row['bytes_per_element']:.2f}" if "bytes_per_element" in row else ""
        what, beyond = f"{row['what']} on {row['cluster']}", row["beyond_training_mb"]
        lines.append(f"| {what} | {row['seconds']:.1f} | {beyond:.0f} | {size} |")
    write(options.out / "checkpoints.json", record, "\n".join(lines))


if __name__ == "__main__":
    if "--worker" in sys.argv:
        at = sys.argv.index("--worker")
        place, cluster, layers, strategy, what = sys.argv[at + 1 : at + 6]
        worker(Path(place), cluster, int(layers), strategy, what == "restore")
    else:
        main()
