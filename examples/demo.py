"""What `make demo` runs: the same training in a few ways, on a small cluster inside this machine.

The cluster is two nodes of two ranks each; the nodes are network namespaces, joined by links of 0.3 Gbit/s. All ways
see the same pictures and start from the same weights; digits_ddp.py and digits_sparse.py differ in one argument of the
Trainer. One node alone trains on its half of the pictures, for as many steps: what it comes to without any network is
what bytes have to beat. Bytes are counted by the kernel on the links, while steps ran. The link is slow because
the model is small: 1.2 M parameters over 0.3 Gbit/s wait about as long as 120 M parameters over 30 Gbit/s.

Without root there is no link to shape: the runs then rehearse on loopback, and only the accuracies mean something.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lightning_sparse.lab import Cluster, LabConfig, signals_as_exit, unavailable_reason

HERE = Path(__file__).parent
NODES, DEVICES = 2, 2
FIRST_STEPS = 10  # connections are made and DDP rebuilds its buckets: not what a step costs


@dataclass(frozen=True)
class Way:
    """One line of the table: a script of this folder, on so many nodes."""

    name: str
    script: str
    nodes: int = NODES
    words: tuple[str, ...] = ()


# The first is what the others are held against.
WAYS = [
    Way("dense (ddp)", "digits_ddp.py"),
    Way("sparse (mstopk_hier)", "digits_sparse.py"),
    Way("one node alone (ddp)", "digits_ddp.py", nodes=1, words=("--share", f"{1 / NODES}")),
]


@dataclass(frozen=True)
class Row:
    """What was measured of a way; bytes are None where no link counted them."""

    name: str
    val_accuracy: float
    seconds_per_step: float
    bytes_per_step: float | None
    bytes_in_all: int | None
    steps: int


def measure(way: Way, gbps: float, network: bool, folder: Path, words: list[str]) -> Row:
    config = LabConfig(nodes=way.nodes, devices=DEVICES, gbps=gbps, network=network)
    with Cluster(config) as cluster:
        command = [sys.executable, str(HERE / way.script), "--result", str(folder), *way.words, *words]
        result = cluster.run(command)
    if result.exit_code != 0:
        raise SystemExit(f"{way.name}: training failed with {result.exit_code}; its output is above")
    nodes: list[dict[str, Any]] = [json.loads((folder / f"node{node}.json").read_text()) for node in range(way.nodes)]
    seconds = nodes[0]["seconds"]
    counted = nodes[0]["bytes_sent"] is not None
    sent = [sum(step) for step in zip(*(node["bytes_sent"] for node in nodes), strict=True)] if counted else []
    return Row(
        name=way.name,
        val_accuracy=nodes[0]["val_accuracy"],
        seconds_per_step=median(seconds[FIRST_STEPS:]),
        bytes_per_step=sum(sent) / len(sent) if counted else None,
        bytes_in_all=result.bytes_between_nodes,
        steps=len(seconds),
    )


def table(rows: list[Row]) -> str:
    lines = [
        "| | validation accuracy | bytes between nodes, a step | in the whole run | time of a step, median |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        per_step = "not counted" if row.bytes_per_step is None else f"{row.bytes_per_step / 1e6:.3f} MB"
        in_all = "not counted" if row.bytes_in_all is None else f"{row.bytes_in_all / 1e6:.1f} MB"
        time = f"{row.seconds_per_step * 1e3:.0f} ms"
        lines.append(f"| {row.name} | {row.val_accuracy:.1%} | {per_step} | {in_all} | {time} |")
    return "\n".join(lines)


def verdict(rows: list[Row], gbps: float) -> str:
    """A line for each way but the first, which it is held against."""
    dense, *others = rows
    lines = [f"Against {dense.name}, over {dense.steps} steps:"]
    for row in others:
        line = f"- {row.name}: {100 * (row.val_accuracy - dense.val_accuracy):+.1f} points of accuracy"
        if dense.bytes_per_step and row.bytes_per_step and row.bytes_per_step > 1000:  # not just a few ARP frames
            fewer, faster = dense.bytes_per_step / row.bytes_per_step, dense.seconds_per_step / row.seconds_per_step
            line += f", {fewer:.1f} times fewer bytes a step, a step {faster:.1f} times as fast at {gbps:g} Gbit/s"
        lines.append(line)
    if dense.bytes_per_step is None:
        lines.append("Loopback has no rate: neither bytes nor times say anything about a network.")
    else:
        lines.append("Bytes include the density warm-up of the first epoch. All ranks share this machine's processors.")
    return "\n".join(lines)


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
    words = ["--data", str(args.out / "digits"), *more]
    links = f"links of {args.gbps:g} Gbit/s" if reason is None else "loopback"
    rows = []
    with signals_as_exit():
        for number, way in enumerate(WAYS):
            on = f"{way.nodes} nodes x {DEVICES} ranks, {links}" if way.nodes > 1 else f"1 node x {DEVICES} ranks"
            print(f"\n== {number + 1} of {len(WAYS)}, {way.name}: {on} ==", flush=True)
            rows.append(measure(way, args.gbps, reason is None, args.out / f"run{number}", words))
    print(f"\n{verdict(rows, args.gbps)}\n\n{table(rows)}\n")
    print("Next: your own script on such a cluster, `lightning-sparse lab --nodes 2 --devices 2 --gbps 1 -- train.py`.")
    (args.out / "table.md").write_text(table(rows) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
