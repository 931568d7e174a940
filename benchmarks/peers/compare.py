"""Ours beside its peers, in one run: step time, bytes over the slow link, accuracy, memory.

    sudo python -m benchmarks.peers.compare OUT PICTURES [--grace PATH] [--demo PATH] [--clusters 2x2] [--gbps 0.1 1]

PICTURES is a folder or a .tar of one, ``{train,val}/<class>/*.jpg``. Clusters are network namespaces on this machine
with links of the given rate, four ranks on its processors. Every way trains the same ResNet from the same seed on the
same pictures in the same order, in processes of its own; ways.py says what each is. PATHs are checkouts of sands-
lab/grace and bloc97/DeMo; without them those rows are left out, and said so.

All share one learning rate but DeMo (see --demo-lr), and none is tuned: what a way would gain from a rate of its own is
not in the numbers. Accuracy is compared four ways: after all steps; at the bytes that "ours 1 %" received by its end;
at the time at which the fastest way ended; and by the time to the best that "ours, default" came to. In between
validations it is interpolated. Time is that of training steps alone, peak memory that of the largest rank.

Writes OUT/peers.json, peers.md, peers-time.png and peers-bytes.png; what is in peers.json already is not run again. A
row to which someone has added "untimed", and why, has no times in the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.convergence.pictures import load_pictures
from benchmarks.peers import ranks as peers_ranks
from benchmarks.peers.ways import WAYS, Recipe, available
from benchmarks.pictures import GREY, picture
from benchmarks.pictures import colour as colour_of
from benchmarks.record import surroundings
from lightning_sparse.lab import Cluster, LabConfig, signals_as_exit

BUDGET = "ours 1 %"  # whose bytes all are given
TARGET = "ours, default"  # whose best accuracy, in whole percent, all are timed to
ALONE = "one node alone"


def run(way: str, cluster: Cluster, words: list[str]) -> dict[str, Any]:
    """One way on one cluster."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "row.json"
        command = [sys.executable, "-m", peers_ranks.__name__, way, str(answer), *words]
        ran = cluster.run(command, env={"OMP_NUM_THREADS": "1"}, output=sys.stderr)
        if ran.exit_code != 0:
            return {"way": way, "failed": f"exit code {ran.exit_code}"}
        found: dict[str, Any] = json.loads(answer.read_text())
    return {"way": way, **found}


def at(row: dict[str, Any], key: str, budget: float) -> float:
    """Accuracy when `key` had reached the budget, interpolated; the last one where it never does."""
    before = row["history"][0]
    for point in row["history"][1:]:
        if point[key] >= budget:
            share = (budget - before[key]) / max(point[key] - before[key], 1e-12)
            return float(before["accuracy"] + share * (point["accuracy"] - before["accuracy"]))
        before = point
    return float(before["accuracy"])


def seconds_to(row: dict[str, Any], accuracy: float) -> float | None:
    """When a validation first reached this accuracy, interpolated; None where none did."""
    if row["history"][0]["accuracy"] >= accuracy:
        return 0.0
    for before, point in itertools.pairwise(row["history"]):
        if point["accuracy"] >= accuracy:
            share = (accuracy - before["accuracy"]) / (point["accuracy"] - before["accuracy"])
            return float(before["seconds"] + share * (point["seconds"] - before["seconds"]))
    return None


def table(rows: list[dict[str, Any]]) -> str:
    """A block for each cluster and rate."""
    lines: list[str] = []
    for cluster, gbps in dict.fromkeys((row["cluster"], row["gbps"]) for row in rows):
        here = [row for row in rows if (row["cluster"], row["gbps"]) == (cluster, gbps)]
        done = [row for row in here if "failed" not in row]
        seconds = min(row["history"][-1]["seconds"] for row in done if "untimed" not in row)
        ours = next((row for row in done if row["way"] == TARGET), done[0])
        target = math.floor(max(point["accuracy"] for point in ours["history"]))
        nbytes = next((row["history"][-1]["bytes"] for row in done if row["way"] == BUDGET), None)
        head = ["way", "step ms", "MB a node, step", "accuracy, all steps"]
        head += ["at equal bytes" + ("" if nbytes is None else f" ({nbytes / 1e6:.1f} MB)"), f"after {seconds:.0f} s"]
        head += [f"s to {target} %"]
        lines += [
            f"## {cluster} ranks, {gbps:g} Gbit/s",
            "",
            "| " + " | ".join([*head, "peak MB"]) + " |",
            "|---" * 8 + "|",
        ]
        for row in here:
            if "failed" in row:
                lines.append(f"| {row['way']} | {row['failed']} |" + " |" * 6)
                continue
            last = row["history"][-1]
            equal = "" if nbytes is None else f"{at(row, 'bytes', nbytes):.1f}"
            cells = [
                f"{1e3 * row['step_s']:.0f}",
                f"{last['bytes'] / last['step'] / 1e6:.3f}",
                f"{last['accuracy']:.1f}",
            ]
            reached = seconds_to(row, target)
            cells += [equal, f"{at(row, 'seconds', seconds):.1f}", "-" if reached is None else f"{reached:.0f}"]
            cells += [f"{row['peak_bytes'] / 1e6:.0f}"]
            if "untimed" in row:
                cells[0] = cells[4] = "?"
                cells[5] = "-" if reached is None else "?"
            lines.append(f"| {row['way']} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def plot(record: dict[str, Any], file: Path) -> None:
    """Accuracy over bytes or seconds, which the name of the file says, for each cluster and rate."""
    key = "bytes" if file.stem.endswith("-bytes") else "seconds"
    rows = [row for row in record["rows"] if "failed" not in row]
    cases = list(dict.fromkeys((row["cluster"], row["gbps"]) for row in rows))
    label, ways = {"seconds": "seconds of training", "bytes": "bytes received by a node"}[key], list(WAYS)
    with picture(file, height=5, columns=len(cases), sharey=True) as axes:
        for (cluster, gbps), ax in zip(cases, axes, strict=True):
            for row in (each for each in rows if (each["cluster"], each["gbps"]) == (cluster, gbps)):
                if row["way"] == ALONE:  # by its last accuracy: what bytes have to beat
                    ax.axhline(row["history"][-1]["accuracy"], color=GREY, linestyle=":", label=row["way"])
                    continue
                line = [(point[key], point["accuracy"]) for point in row["history"][1:]]
                colour = GREY if row["way"] == "DDP" else colour_of(ways.index(row["way"]))
                style = "-" if row["way"].startswith("ours") else "--"
                ax.plot(*zip(*line, strict=True), style, color=colour, label=row["way"])
            ax.set(title=f"{cluster} ranks, {gbps:g} Gbit/s", xlabel=label, xscale="log")
            ax.grid()
        axes[0].set_ylabel("validation accuracy, %")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--clusters", nargs="+", default=["2x2", "4x1"], metavar="MxL")
    parser.add_argument("--gbps", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--validations", type=int, default=10)
    parser.add_argument("--width", type=int, default=32, help="of the net; parameters grow with its square")
    parser.add_argument("--lr", type=float, default=0.2, help="of all but DeMo (default %(default)s)")
    parser.add_argument("--demo-lr", type=float, default=1e-3, help="of DeMo, which steps by signs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grace", type=Path, metavar="PATH", help="a checkout of sands-lab/grace")
    parser.add_argument("--demo", type=Path, metavar="PATH", help="a checkout of bloc97/DeMo; it needs einops")
    parser.add_argument("--ways", nargs="+", metavar="NAME", help="default: all that can run")
    parser.add_argument("--quick", action="store_true", help="24 steps of a narrow net")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.validations, options.width = 24, 2, 8
    names, missing = available(options.grace, options.demo)
    if options.ways is not None:
        names = [name for name in names if name in options.ways]
    print("\n".join(missing))
    options.out.mkdir(parents=True, exist_ok=True)
    recipe = asdict(Recipe(lr=options.lr, demo_lr=options.demo_lr, steps=options.steps))
    words = ["--pictures", str(load_pictures(options.pictures, options.out)), "--recipe", json.dumps(recipe)]
    words += ["--validations", str(options.validations), "--width", str(options.width), "--seed", str(options.seed)]
    for name, path in (("--grace", options.grace), ("--demo", options.demo)):
        words += [] if path is None else [name, str(path.resolve())]
    settings = {**recipe, "width": options.width, "seed": options.seed, "validations": options.validations}
    file = options.out / "peers.json"
    record: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"settings": settings, "rows": []}
    if record["settings"] != settings:
        parser.error(f"{file} was made with {record['settings']}; asked for are {settings}. Use another OUT.")
    about = {**surroundings(), "left out": missing}
    for cluster in options.clusters:
        nodes, devices = map(int, cluster.split("x"))
        for gbps in options.gbps:
            done = {row["way"] for row in record["rows"] if (row["cluster"], row["gbps"]) == (cluster, gbps)}
            config = LabConfig(nodes=nodes, devices=devices, gbps=gbps)
            with signals_as_exit(), Cluster(config) as played:
                for way in (name for name in names if name not in done):
                    print(f"{cluster} at {gbps:g} Gbit/s: {way}", flush=True)
                    record["rows"].append({"cluster": cluster, "gbps": gbps, **run(way, played, words)})
                    file.write_text(json.dumps({**record, **about}, indent=1) + "\n")
    rows = record["rows"]
    text = ["# Beside its peers", "", *(f"- {key}: {value}" for key, value in {**about, **settings}.items()), ""]
    (options.out / "peers.md").write_text("\n".join(text) + "\n" + table(rows))
    print(table(rows))
    plot(record, options.out / "peers-time.png")
    plot(record, options.out / "peers-bytes.png")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
