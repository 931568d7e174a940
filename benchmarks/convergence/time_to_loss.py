"""Time to reach a loss or an accuracy on nodes with slow links: this library compared with other training methods.

    sudo python -m benchmarks.convergence.time_to_loss OUT [--clusters 4x1] [--gbps 0.1] [--epochs 15]
    sudo python -m benchmarks.convergence.time_to_loss OUT --pictures IMAGES [--grace PATH] [--demo PATH] --epochs 4

The task is that of text.py, a character Transformer with AdamW, or that of images.py with a wider net, a ResNet of
308,650 parameters with SGD. Ranks are the nodes of an emulated cluster (`lightning_sparse.lab`), and share this
machine's CPUs. Models are small, so the links are slow: the Transformer's dense gradients of 466 KB take 56 ms at 0.1
Gbit/s on four nodes. Seconds count training only; after each epoch, all ranks wait for each other and validate. The
kernel counts the bytes on a node's link. Methods (ways.py) run one after the other. In the single-node baseline, all
nodes train at the same time, so that each has its share of the CPUs, and the first node's model counts. PATHs are
checkouts of sands-lab/grace and bloc97/DeMo (which needs einops); without them, these rows are left out. All methods
except DeMo use one learning rate, and none is tuned, so the table does not show the gain of a separate rate.

The table has the metric at the end, the metric at the bytes of the row that "at equal bytes" names, and the
seconds to each goal. Between validations, the metric is interpolated. Writes OUT/time-to-loss.json, .md and .svg.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.convergence import images, text
from benchmarks.convergence.runs import SPARSE, Arguments, Run, Settings, Task, Trainer
from benchmarks.plots import GRAY, color, figure
from benchmarks.processes import on_clusters, received_bytes
from benchmarks.record import Rows, add_clusters, parser_of, surroundings, write
from lightning_sparse.cli import format_table
from lightning_sparse.topology import Topology

ALONE = "one node alone"
EACH_ALONE: Arguments = {"way": "each alone"}
GRACE: dict[str, Arguments] = {
    "GRACE top-k 1 %": {"way": "grace", "kind": "top-k"},
    "GRACE QSGD": {"way": "grace", "kind": "qsgd"},
}
DEMO: dict[str, Arguments] = {"DeMo": {"way": "demo", "demo_lr": 1e-3}}


@dataclass(frozen=True)
class Race:
    """A task, its methods, its goals, and the row whose bytes all methods get."""

    task: Task
    rows: dict[str, Arguments]
    goals: tuple[float, ...]
    budget: str


OF_TEXT = Race(
    text.TASK,
    {
        **{name: text.CONFIGS[name] for name in ("dense", "bf16 hook", "PowerSGD r1", "average every 50")},
        "updates 1%": text.CONFIGS["updates 1%"],
        ALONE: EACH_ALONE,
    },
    (3.0, 2.7, 2.5, 2.4, 2.3),
    "updates 1%",
)
OF_PICTURES = Race(
    images.TASK,
    {
        "dense": None,
        "bf16 hook": {"way": "hooked", "hook": "bf16"},
        "PowerSGD r1": {"way": "hooked", "hook": "PowerSGD"},
        "post-local every 4": {"way": "post-local", "every": 4, "start": 30},
        **GRACE,
        **DEMO,
        "1%": {**SPARSE, "value_dtype": "bfloat16", "density": 0.01},
        "1%-momentum": {**SPARSE, "value_dtype": "bfloat16", "density": 0.01, "momentum_correction": True},
        "default": {"warmup_epochs": 1},
        ALONE: EACH_ALONE,
    },
    (30.0, 40.0, 45.0, 47.0),
    "1%",
)


class Timed(Trainer):
    """A run with the seconds and bytes of training so far in each line of the history."""

    seconds, received = 0.0, 0

    def epoch(self, epoch: int) -> dict[str, Any]:
        dist.barrier()
        before, begin, validate = received_bytes(), time.perf_counter(), self.learner.validate

        def timed() -> float:
            self.way.receive()
            dist.barrier()
            self.seconds += time.perf_counter() - begin
            self.received += received_bytes() - before
            return validate()

        self.learner.validate = timed  # type: ignore[method-assign]
        line = super().epoch(epoch)
        self.learner.validate = validate  # type: ignore[method-assign]
        return {**line, "seconds": self.seconds, "bytes_per_node": self.received}


def measure(
    topology: Topology,
    device: torch.device,
    gbps: float | None,
    pictures: Path | None,
    names: Sequence[str],
    epochs: int,
    paths: Sequence[str],
) -> Rows:
    """Return the history of each method. A collective."""
    sys.path += paths
    cluster: dict[str, int] = {"epochs": epochs, "nodes": topology.num_nodes, "devices": topology.num_devices}
    if pictures is None:
        words = text.read_library()
        race, data = OF_TEXT, text.corpus_of(words)
        settings: Settings = text.TextSettings(lr=0.008, text=text.described(words), **cluster)
    else:
        race, data = OF_PICTURES, torch.load(pictures, weights_only=False)
        settings = images.PictureSettings(lr=0.2, width=32, **cluster)
    rows = Rows()
    for name in names:
        trainer = Timed(race.task, Run(name, race.rows[name], 0, settings), data, topology)
        rows.append({"way": name, "history": [trainer.epoch(epoch) for epoch in range(epochs)]})
    return rows


def when(history: Rows, key: str, reached: float, wanted: str) -> float | None:
    """Return the value of `wanted` when `key` first reached `reached`, interpolated; None if it never did."""
    for before, line in itertools.pairwise(history):
        low, high = sorted((before[key], line[key]))
        if low <= reached <= high:
            share = (reached - before[key]) / ((line[key] - before[key]) or 1)
            return float(before[wanted] + share * (line[wanted] - before[wanted]))
    return None


def table(rows: Rows, race: Race) -> str:
    """Return a block per cluster and rate."""
    metric, blocks = race.task.metric, []
    goals = [f"s to {goal:g}" for goal in race.goals]
    for place in dict.fromkeys((row["cluster"], row["gbps"]) for row in rows):
        here = {row["way"]: row["history"] for row in rows if (row["cluster"], row["gbps"]) == place}
        budget = here[race.budget][-1]["bytes_per_node"] if race.budget in here else 0
        lines = []
        for way, history in here.items():
            last = history[-1]
            step = f"{1e3 * last['seconds'] / last['step']:.0f}", f"{last['bytes_per_node'] / last['step'] / 1e3:.1f}"
            equal = when(history, "bytes_per_node", budget, metric.key) if last["bytes_per_node"] > budget else None
            reached = [when(history, metric.key, goal, "seconds") for goal in race.goals]
            seconds = ["-" if each is None else f"{each:.0f}" for each in reached]
            results = [last[metric.key], last[metric.key] if equal is None else equal]
            lines.append((way, *step, *(f"{each:.{metric.digits}f}" for each in results), *seconds))
        head = (f"{place[0]}, {place[1]} Gbit/s", "ms per step", "KB per step", metric.label)
        blocks.append(format_table((*head, f"at the bytes of {race.budget}", *goals), lines))
    return "\n\n".join(blocks)


def plot(record: dict[str, Any], file: Path) -> None:
    """Draw the metric over seconds, with a panel per cluster and rate."""
    if "histories" in record:  # in older files
        where = {name: record[name] for name in ("cluster", "gbps")}
        record = {"rows": [{**where, "way": way, "history": each} for way, each in record["histories"].items()]}
    metric = images.ACCURACY if images.ACCURACY.key in record["rows"][0]["history"][0] else text.BITS
    places = list(dict.fromkeys((row["cluster"], row["gbps"]) for row in record["rows"]))
    with figure(file, columns=len(places)) as panels:
        for place, axes in zip(places, panels, strict=True):
            here = [row for row in record["rows"] if (row["cluster"], row["gbps"]) == place]
            for index, row in enumerate(here):
                style = {"color": GRAY, "linestyle": "--"} if row["way"] == ALONE else {"color": color(index)}
                line = [(each["seconds"], each[metric.key]) for each in row["history"]]
                axes.plot(*zip(*line, strict=True), marker=".", label=row["way"], **style)
            axes.set(xlabel=f"seconds of training, links of {place[1]:g} Gbit/s", ylabel=metric.label)
            axes.set_ylim(top=None if metric.higher_is_better else 4)
            axes.grid(visible=True)


def main() -> None:
    parser = parser_of(__doc__)
    add_clusters(parser, ["4x1"], [0.1])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--pictures", type=Path, help="train on images: folder with {train,val}/<class>/*.jpg")
    parser.add_argument("--grace", type=Path, metavar="PATH", help="a checkout of sands-lab/grace")
    parser.add_argument("--demo", type=Path, metavar="PATH", help="a checkout of bloc97/DeMo")
    parser.add_argument("--ways", nargs="+", metavar="NAME", help="methods to compare; default: all that are installed")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    race = OF_TEXT if options.pictures is None else OF_PICTURES
    names, paths = runnable(race, options)
    data = None if options.pictures is None else images.load_pictures(options.pictures, options.out).resolve()
    arguments = data, names, options.epochs, paths
    rows = on_clusters(measure, *arguments, clusters=options.clusters, gbps=options.gbps)
    if rows is not None:
        drawn = plot if all(row["gbps"] for row in rows) else None
        write(options.out / "time-to-loss.json", {**surroundings(), "rows": rows}, table(rows, race), drawn)


def runnable(race: Race, options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the requested methods that can run, and the folders of the checkouts that they import."""
    found = {name: path for path, names in ((options.grace, GRACE), (options.demo, DEMO)) if path for name in names}
    names = [name for name in race.rows if name not in {**GRACE, **DEMO} or name in found]
    return [name for name in names if name in (options.ways or names)], [str(p.resolve()) for p in {*found.values()}]


if __name__ == "__main__":
    main()
