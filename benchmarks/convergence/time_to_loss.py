"""How long until a loss is reached, on nodes with slow links: exchanging updates beside other ways to train.

    sudo python -m benchmarks.convergence.time_to_loss OUT [--cluster 4x1] [--gbps 0.1] [--epochs 15]

The task is that of text.py, a character Transformer with AdamW, whose ranks here are the nodes of an
emulated cluster (`lightning_sparse.lab`), and share this machine's processors. The model is small, so links are
chosen that are slow for it: its dense gradients of 466 KB take 56 ms at 0.1 Gbit/s on four nodes. Seconds are those
of training; after each epoch of 40 steps all ranks wait for each other and validate. Ways run one after the other. In
"one node alone" all nodes train beside each other, so that each has its share of the processors, and the first one's
model counts.

Writes OUT/time-to-loss.json, .md and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.convergence.corpus import described, read_library, save_corpus
from benchmarks.convergence.runs import Run, Trainer
from benchmarks.convergence.text import CONFIGS, TASK, TextSettings
from benchmarks.convergence.ways import WAYS, Way
from benchmarks.pictures import GREY, colour, picture
from lightning_sparse.bench.report import commit, format_table, surroundings
from lightning_sparse.lab import Cluster, LabConfig, signals_as_exit
from lightning_sparse.topology import discover

ALONE = "one node alone"
ROWS = {
    **{name: CONFIGS[name] for name in ("dense", "bf16 hook", "PowerSGD r1", "average every 50", "updates 1%")},
    ALONE: {"way": "each alone"},
}
GOALS = (3.0, 2.7, 2.5, 2.4, 2.3)
"""Bits per character."""


class EachAlone(Way):
    """Every node trains by itself; the first one's model is validated."""

    group = "node"

    @contextmanager
    @torch.no_grad()
    def shown(self) -> Iterator[None]:
        parameters: list[Tensor] = list(self.model.parameters())
        own = [p.detach().clone() for p in parameters]
        self.finish()
        yield
        torch._foreach_copy_(parameters, own)

    @torch.no_grad()
    def finish(self) -> None:
        for parameter in self.model.parameters():
            dist.broadcast(parameter, 0)

    def bytes_per_node(self) -> float:
        return 0.0


WAYS["each alone"] = EachAlone


class Timed(Trainer):
    """With the seconds of training so far in each line of the history."""

    seconds = 0.0

    def epoch(self, epoch: int) -> dict[str, Any]:
        dist.barrier()
        begin, validate = time.perf_counter(), self.learner.validate

        def timed() -> float:
            self.way.receive()
            dist.barrier()
            self.seconds += time.perf_counter() - begin
            return validate()

        self.learner.validate = timed  # type: ignore[method-assign]
        line = super().epoch(epoch)
        self.learner.validate = validate  # type: ignore[method-assign]
        return {**line, "seconds": self.seconds}


def on_ranks(folder: Path, settings: TextSettings) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    topology = discover()
    data = torch.load(next(folder.glob("*.pt")), weights_only=False)
    histories = {}
    for name, arguments in ROWS.items():
        trainer = Timed(TASK, Run(name, arguments, 0, settings), data, topology)
        histories[name] = [trainer.epoch(epoch) for epoch in range(settings.epochs)]
    if dist.get_rank() == 0:
        (folder / "histories.json").write_text(json.dumps(histories))
    dist.barrier()
    dist.destroy_process_group()


def seconds_to(history: list[dict[str, Any]], goal: float) -> str:
    """Until the first validation that is as good."""
    return next((f"{line['seconds']:.0f}" for line in history if line["val_bits"] <= goal), "-")


def table(histories: dict[str, list[dict[str, Any]]]) -> str:
    rows = [
        (
            name,
            f"{1e3 * history[-1]['seconds'] / history[-1]['step']:.0f}",
            *(seconds_to(history, goal) for goal in GOALS),
            f"{history[-1]['val_bits']:.3f}",
            f"{history[-1]['bytes_per_node'] / history[-1]['step'] / 1e3:.1f}",
        )
        for name, history in histories.items()
    ]
    return format_table(("", "ms a step", *(f"s to {goal}" for goal in GOALS), "bits at the end", "KB a step"), rows)


def plot(record: dict[str, Any], file: Path) -> None:
    """Loss over seconds."""
    with picture(file) as (axes,):
        for index, (name, history) in enumerate(record["histories"].items()):
            style = {"color": GREY, "linestyle": "--"} if name == ALONE else {"color": colour(index)}
            axes.plot(
                [e["seconds"] for e in history], [e["val_bits"] for e in history], marker=".", label=name, **style
            )
        axes.set(xlabel=f"seconds of training, links of {record['gbps']:g} Gbit/s", ylabel="bits per character")
        axes.set_ylim(top=4)
        axes.grid(visible=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cluster", default="4x1", metavar="MxL")
    parser.add_argument("--gbps", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    nodes, devices = map(int, options.cluster.split("x"))
    text = read_library()
    made = partial(TextSettings, lr=0.008, epochs=options.epochs, nodes=nodes, devices=devices)
    settings = made(text=described(text))
    if "TIME_FOLDER" in os.environ:
        return on_ranks(Path(os.environ["TIME_FOLDER"]), settings)
    options.out.mkdir(parents=True, exist_ok=True)
    config = LabConfig(nodes=nodes, devices=devices, gbps=options.gbps)
    with signals_as_exit(), tempfile.TemporaryDirectory() as folder, Cluster(config) as cluster:
        save_corpus(text, Path(folder))
        env = {"TIME_FOLDER": folder, "OMP_NUM_THREADS": "1"}
        if (
            cluster.run([sys.executable, "-m", "benchmarks.convergence.time_to_loss", *sys.argv[1:]], env=env).exit_code
            != 0
        ):
            raise SystemExit("the ranks failed; their output is above")
        histories = json.loads((Path(folder) / "histories.json").read_text())
    command = " ".join(["python", "-m", "benchmarks.convergence.time_to_loss", "OUT", *sys.argv[2:]])
    common = {**surroundings(command), "commit": commit(), "cluster": options.cluster, "gbps": options.gbps}
    record = {**common, "histories": histories}
    (options.out / "time-to-loss.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "time-to-loss.md").write_text(f"`{command}`, {commit()}\n\n{table(histories)}\n")
    plot(record, options.out / "time-to-loss.png")
    print(table(histories), flush=True)
    return None


if __name__ == "__main__":
    main()
