"""What `make demo` runs: the same training twice on a small cluster inside this machine, dense and sparse.

The cluster is two nodes of two ranks each; the nodes are network namespaces, joined by links of 0.1 Gbit/s. Both runs
see the same pictures in the same order from the same start; digits_ddp.py and digits_sparse.py differ in one argument
of the Trainer. Bytes are counted by the kernel on the links, while training steps ran. The link is slow because the
model is small: 1.2 M parameters over 0.1 Gbit/s wait about as long as 120 M parameters over 10 Gbit/s.

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
SCRIPTS = {"dense (ddp)": "digits_ddp.py", "sparse (mstopk_hier)": "digits_sparse.py"}
FIRST_STEPS = 10  # connections are made and DDP rebuilds its buckets: not what a step costs


@dataclass(frozen=True)
class Row:
    """One line of the table; bytes are None where no link counted them."""

    name: str
    val_accuracy: float
    seconds_per_step: float
    bytes_per_step: float | None
    bytes_in_all: int | None
    steps: int


def measure(cluster: Cluster, name: str, folder: Path, data: Path, more: list[str]) -> Row:
    script = str(HERE / SCRIPTS[name])
    result = cluster.run([sys.executable, script, "--data", str(data), "--result", str(folder), *more])
    if result.exit_code != 0:
        raise SystemExit(f"{name}: training failed with {result.exit_code}; its output is above")
    nodes: list[dict[str, Any]] = [
        json.loads((folder / f"node{node}.json").read_text()) for node in range(cluster.config.nodes)
    ]
    seconds = nodes[0]["seconds"]
    counted = nodes[0]["bytes_sent"] is not None
    sent = [sum(step) for step in zip(*(node["bytes_sent"] for node in nodes), strict=True)] if counted else []
    return Row(
        name=name,
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


def verdict(rows: list[Row], config: LabConfig) -> str:
    dense, sparse = rows
    accuracy = 100 * (sparse.val_accuracy - dense.val_accuracy)
    text = f"Sparse against dense, over {dense.steps} steps: {accuracy:+.1f} points of accuracy"
    if dense.bytes_per_step and sparse.bytes_per_step:
        fewer = dense.bytes_per_step / sparse.bytes_per_step
        faster = dense.seconds_per_step / sparse.seconds_per_step
        return (
            f"{text}, {fewer:.1f} times fewer bytes a step, and a step {faster:.1f} times as fast on links of "
            f"{config.gbps} Gbit/s.\nBytes include the density warm-up of the first epochs, which sends more. "
            "Compute is this machine's processors shared by all ranks."
        )
    return f"{text}. Loopback has no rate: neither bytes nor times say anything about a network."


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a cluster inside this machine, dense and sparse.")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for results")
    parser.add_argument("--gbps", type=float, default=0.1, help="rate of the links in Gbit/s")
    parser.add_argument("--no-net", action="store_true", help="rehearse on loopback even where a network can be made")
    args, more = parser.parse_known_args()
    reason = "--no-net was given" if args.no_net else unavailable_reason()
    config = LabConfig(nodes=2, devices=2, gbps=args.gbps, network=reason is None)
    if reason is not None:
        print(f"A rehearsal on loopback, because {reason}\n")
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    rows = []
    with signals_as_exit(), Cluster(config) as cluster:
        for number, name in enumerate(SCRIPTS):
            links = f"links of {config.gbps} Gbit/s" if config.network else "loopback"
            print(f"\n== {name}: {config.nodes} nodes x {config.devices} ranks, {links} ==", flush=True)
            rows.append(measure(cluster, name, args.out / f"run{number}", args.out / "digits", more))
    print(f"\n{table(rows)}\n\n{verdict(rows, config)}")
    (args.out / "table.md").write_text(table(rows) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
