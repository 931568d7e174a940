"""How long until a loss is reached, on nodes with slow links: exchanging updates beside other ways to train.

    sudo python -m benchmarks.convergence.time_to_loss OUT [--clusters 4x1] [--gbps 0.1] [--epochs 15]

The task is that of text.py, a character Transformer with AdamW, whose ranks here are the nodes of an
emulated cluster (`lightning_sparse.lab`), and share this machine's processors. The model is small, so links are
chosen that are slow for it: its dense gradients of 466 KB take 56 ms at 0.1 Gbit/s on four nodes. Seconds are those
of training; after each epoch of 40 steps all ranks wait for each other and validate. Ways run one after the other. In
"one node alone" all nodes train beside each other, so that each has its share of the processors, and the first one's
model counts.

Writes OUT/time-to-loss.json, .md and .png.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.convergence.corpus import corpus_of, described, read_library
from benchmarks.convergence.runs import Run, Trainer
from benchmarks.convergence.text import CONFIGS, TASK, TextSettings
from benchmarks.convergence.ways import WAYS, Way
from benchmarks.pictures import GREY, colour, picture
from benchmarks.processes import on_clusters
from benchmarks.record import Rows, add_clusters, parser_of, surroundings, write
from lightning_sparse.cli.report import format_table
from lightning_sparse.topology import Topology

ALONE = "one node alone"
ROWS = {
    **{name: CONFIGS[name] for name in ("dense", "bf16 hook", "PowerSGD r1", "average every 50")},
    **{name: CONFIGS[name] for name in ("updates 1%", "updates auto")},
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


def measure(topology: Topology, device: torch.device, gbps: float | None, epochs: int) -> Rows:
    """The history of each way. A collective."""
    text = read_library()
    cluster = {"nodes": topology.num_nodes, "devices": topology.num_devices}
    settings = TextSettings(lr=0.008, epochs=epochs, text=described(text), **cluster)
    data, rows = corpus_of(text), Rows()
    for name, arguments in ROWS.items():
        trainer = Timed(TASK, Run(name, arguments, 0, settings), data, topology)
        rows.append({"way": name, "history": [trainer.epoch(epoch) for epoch in range(epochs)]})
    return rows


def seconds_to(history: list[dict[str, Any]], goal: float) -> str:
    """Until the first validation that is as good."""
    return next((f"{line['seconds']:.0f}" for line in history if line["val_bits"] <= goal), "-")


def table(rows: Rows) -> str:
    lines = []
    for row in rows:
        history, last = row["history"], row["history"][-1]
        reached = [seconds_to(history, goal) for goal in GOALS]
        numbers = f"{last['val_bits']:.3f}", f"{last['bytes_per_node'] / last['step'] / 1e3:.1f}"
        place = f"{row['cluster']}, {row['gbps']} Gbit/s: {row['way']}"
        lines.append((place, f"{1e3 * last['seconds'] / last['step']:.0f}", *reached, *numbers))
    return format_table(("", "ms a step", *(f"s to {goal}" for goal in GOALS), "bits at the end", "KB a step"), lines)


def plot(record: dict[str, Any], file: Path) -> None:
    """Loss over seconds, a panel for each cluster and rate."""
    if "histories" in record:  # in files of before
        where = {name: record[name] for name in ("cluster", "gbps")}
        record = {"rows": [{**where, "way": way, "history": each} for way, each in record["histories"].items()]}
    places = list(dict.fromkeys((row["cluster"], row["gbps"]) for row in record["rows"]))
    with picture(file, columns=len(places)) as panels:
        for place, axes in zip(places, panels, strict=True):
            here = [row for row in record["rows"] if (row["cluster"], row["gbps"]) == place]
            for index, row in enumerate(here):
                style = {"color": GREY, "linestyle": "--"} if row["way"] == ALONE else {"color": colour(index)}
                line = [(each["seconds"], each["val_bits"]) for each in row["history"]]
                axes.plot(*zip(*line, strict=True), marker=".", label=row["way"], **style)
            axes.set(xlabel=f"seconds of training, links of {place[1]:g} Gbit/s", ylabel="bits per character")
            axes.set_ylim(top=4)
            axes.grid(visible=True)


def main() -> None:
    parser = parser_of(__doc__)
    add_clusters(parser, ["4x1"], [0.1])
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    rows = on_clusters(measure, options.epochs, clusters=options.clusters, gbps=options.gbps)
    if rows is not None:
        shaped = all(row["gbps"] for row in rows)
        write(
            options.out / "time-to-loss.json", {**surroundings(), "rows": rows}, table(rows), plot if shaped else None
        )


if __name__ == "__main__":
    main()
