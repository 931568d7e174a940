"""What `make demo` runs: the same training in a few ways, on a small cluster inside this machine.

The cluster is two nodes of two ranks each; the nodes are network namespaces, joined by links of 0.3 Gbit/s. All ways
see the same data and start from the same weights; digits_ddp.py, digits_sparse.py and digits_updates.py differ in one
argument of the Trainer. Then a Transformer learns the source of Python's library with AdamW. One node alone trains on
its half of the data, for as many steps: the no-communication baseline that any exchange must beat. Bytes are
counted by the kernel on the links, while steps ran. The link is slow because the model is small: 1.2 M parameters over
0.3 Gbit/s wait about as long as 120 M parameters over 30 Gbit/s.

Without root there is no link to shape: the runs then rehearse on loopback. Accuracies mean the same, bytes are computed
rather than counted, and times say nothing about a network.

Learning rates follow a rule: all rows of a task take the one at which its *dense* row ends best, among rates that
double; of equal rates the smaller. Batches have the scripts' default size. docs/first-run.md has the sweep and its
command.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lightning_sparse.lab import Cluster, LabConfig, signals_as_exit, unavailable_reason

HERE = Path(__file__).parent
NODES, DEVICES = 2, 2
FIRST_STEPS = 10  # connections are made and DDP rebuilds its buckets: not what a step costs


@dataclass(frozen=True)
class Way:
    """One line of a table: a script of this folder, on so many nodes."""

    name: str
    script: str
    nodes: int = NODES
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """One table. The first way is what the others are held against."""

    name: str
    metric: str
    heading: str
    words: tuple[str, ...]  # of every way
    ways: tuple[Way, ...]

    def shown(self, value: float) -> str:
        return f"{value:.1%}" if self.metric == "val_accuracy" else f"{value:.3f}"

    def difference(self, value: float, other: float) -> str:
        if self.metric == "val_accuracy":
            return f"{100 * (value - other):+.1f} points of accuracy"
        return f"{value - other:+.3f} bits (lower is better)"


HALF = ("--share", f"{1 / NODES}")
TASKS = (
    Task(
        "pictures, SGD",
        "val_accuracy",
        "validation accuracy",
        ("--epochs", "3", "--learning-rate", "0.0125"),
        (
            Way("dense (ddp)", "digits_ddp.py"),
            Way("sparse gradients (mstopk_hier)", "digits_sparse.py"),
            Way("sparse updates (mstopk_local)", "digits_updates.py"),
            Way("one node alone (ddp)", "digits_ddp.py", nodes=1, words=HALF),
        ),
    ),
    Task(
        "text, AdamW",
        "val_bits",
        "validation bits per character",
        ("--characters", "700000", "--learning-rate", "0.032"),
        (
            Way("dense (ddp)", "characters.py", words=("--strategy", "ddp")),
            Way("sparse updates (mstopk_local)", "characters.py", words=("--strategy", "mstopk_local")),
            Way("one node alone (ddp)", "characters.py", nodes=1, words=("--strategy", "ddp", *HALF)),
        ),
    ),
)


@dataclass(frozen=True)
class Row:
    """What was measured of a way; where no link counted bytes, those of a step are computed and those in all None."""

    name: str
    metric: float
    seconds_per_step: float
    bytes_per_step: float
    bytes_in_all: int | None
    steps: int


@dataclass(frozen=True)
class Run:
    """One training, which becomes a row."""

    task: Task
    way: Way
    folder: Path

    def plan(self, number: str, links: str, words: list[str]) -> tuple[str, list[str]]:
        """Its heading and its command, for demo_ranks.py."""
        on = f"{self.way.nodes} nodes x {DEVICES} ranks, {links}" if self.way.nodes > 1 else f"1 node x {DEVICES} ranks"
        heading = f"{number}, {self.task.name}, {self.way.name}: {on}"
        return heading, [self.way.script, "--result", str(self.folder), *self.task.words, *self.way.words, *words]

    def row(self) -> Row:
        nodes = [json.loads((self.folder / f"node{node}.json").read_text()) for node in range(self.way.nodes)]
        seconds = nodes[0]["seconds"]
        counted = nodes[0]["bytes_sent"] is not None
        return Row(
            name=self.way.name,
            metric=nodes[0][self.task.metric],
            seconds_per_step=median(seconds[FIRST_STEPS:] or seconds),
            bytes_per_step=(
                sum(sum(node["bytes_sent"]) for node in nodes) / len(seconds)
                if counted
                else sum(node["bytes_computed"] for node in nodes)
            ),
            bytes_in_all=sum(node["bytes_sent_in_all"] for node in nodes) if counted else None,
            steps=len(seconds),
        )


def train(runs: list[Run], first: int, args: argparse.Namespace, words: list[str], network: bool) -> None:
    """One after the other in the same ranks; all of them on as many nodes."""
    nodes, total = runs[0].way.nodes, sum(len(task.ways) for task in TASKS)
    links = f"links of {args.gbps:g} Gbit/s" if network else "loopback"
    plan = []
    for number, run in enumerate(runs, first):
        for_pictures = ["--data", str(args.out / "digits"), *words] if run.task.metric == "val_accuracy" else []
        plan.append(run.plan(f"{number} of {total}", links, for_pictures))
    path = args.out / f"plan{nodes}.json"
    path.write_text(json.dumps(plan))
    with Cluster(LabConfig(nodes=nodes, devices=DEVICES, gbps=args.gbps, network=network)) as cluster:
        print(f"\nstarting {nodes} node(s) of {DEVICES} ranks, which takes some seconds", flush=True)
        result = cluster.run([sys.executable, str(HERE / "demo_ranks.py"), str(path)])
    if result.exit_code != 0:
        raise SystemExit(f"training on {nodes} node(s) failed with {result.exit_code}; its output is above")


def table(task: Task, rows: list[Row]) -> str:
    lines = [
        f"| {task.name} | {task.heading} | bytes between nodes, a step | in the whole run | time of a step, median |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        per_step = f"{row.bytes_per_step / 1e6:.3f} MB"
        per_step += " (computed, not counted)" if row.bytes_in_all is None else ""
        in_all = "not counted" if row.bytes_in_all is None else f"{row.bytes_in_all / 1e6:.1f} MB"
        time = f"{row.seconds_per_step * 1e3:.0f} ms"
        lines.append(f"| {row.name} | {task.shown(row.metric)} | {per_step} | {in_all} | {time} |")
    return "\n".join(lines)


def verdict(task: Task, rows: list[Row], gbps: float) -> str:
    """A line for each way but the first, which it is held against."""
    dense, *others = rows
    lines = [f"{task.name}: against {dense.name}, over {dense.steps} steps:"]
    for row in others:
        line = f"- {row.name}: {task.difference(row.metric, dense.metric)}"
        if row.bytes_per_step > 1000:  # not just a few ARP frames
            line += f", {dense.bytes_per_step / row.bytes_per_step:.1f} times fewer bytes a step"
            if row.bytes_in_all is not None:
                faster = dense.seconds_per_step / row.seconds_per_step
                line += f", a step {faster:.1f} times as fast at {gbps:g} Gbit/s"
        lines.append(line)
    return "\n".join(lines)


def in_short(found: list[tuple[Task, list[Row]]]) -> str:
    """One sentence: what sending 1 % of the updates saved, and where it ended between dense and one node alone."""
    parts = []
    for task, rows in found:
        dense, updates, alone = rows[0], rows[-2], rows[-1]
        parts.append(
            f"1/{dense.bytes_per_step / updates.bytes_per_step:.0f} of the bytes of dense training on {task.name} and "
            f"ended at {task.shown(updates.metric)}, dense at {task.shown(dense.metric)}, one node alone at "
            f"{task.shown(alone.metric)}"
        )
    return f"In short: {found[0][1][-2].name} sent {'; '.join(parts)} (one seed of a short run)."


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a cluster inside this machine, dense and sparse.")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for results")
    parser.add_argument("--gbps", type=float, default=0.3, help="rate of the links in Gbit/s")
    parser.add_argument("--no-net", action="store_true", help="rehearse on loopback even where a network can be made")
    args, more = parser.parse_known_args()
    reason = "--no-net was given" if args.no_net else unavailable_reason()
    if reason is not None:
        print(f"A rehearsal on loopback, because {reason}\n")
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    ways = [(task, way) for task in TASKS for way in task.ways]
    runs = [Run(task, way, args.out / f"run{number}") for number, (task, way) in enumerate(ways)]
    together, alone = ([run for run in runs if run.way.nodes == nodes] for nodes in (NODES, 1))
    with signals_as_exit():
        train(together, 1, args, more, reason is None)
        train(alone, 1 + len(together), args, more, reason is None)
    found = [(task, [run.row() for run in runs if run.task is task]) for task in TASKS]
    report(found, args.gbps, reason is None)
    (args.out / "table.md").write_text("\n\n".join(table(*each) for each in found) + "\n")


def report(found: list[tuple[Task, list[Row]]], gbps: float, network: bool) -> None:
    for task, rows in found:
        print(f"\n{verdict(task, rows, gbps)}")
    if network:
        print(
            "Bytes of gradients include the density warm-up of the first epoch. All ranks share this machine's cores."
        )
    else:
        print("Loopback has no rate: times say nothing about a network, and bytes are computed.")
    for task, rows in found:
        print(f"\n{table(task, rows)}")
    command = os.path.relpath(Path(sys.executable).with_name("lightning-sparse"))
    links = "--gbps 1" if network else "--no-net"
    print(f"\n{in_short(found)}")
    print(f"Next: your own script on such a cluster, `{command} lab --nodes 2 --devices 2 {links} -- python train.py`.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
