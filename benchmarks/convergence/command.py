"""The command line of the convergence benchmarks: choose the learning rate, run what is missing of a table, report."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from benchmarks.convergence.report import write_report
from benchmarks.convergence.runs import Settings, Task, execute

TUNE_SEEDS = (1000, 1001)  # of no table


def tune(task: Task, data_file: Path, out: Path, epochs: int) -> dict[str, Any]:
    """The learning rate with the best metric of dense training, and the mean outcome of each that was tried."""
    outcome = {}
    for lr in task.tune_lrs:
        runs = [task.run("dense", seed, task.settings(lr=lr, epochs=epochs)) for seed in TUNE_SEEDS]
        ends = [record["history"][-1] for record in execute(task, runs, data_file, out / f"tune-{lr:g}")]
        outcome[f"{lr:g}"] = {key: fmean(end[key] for end in ends) for key in (task.metric.key, "train_loss")}
    best = task.metric.best({lr: ends[task.metric.key] for lr, ends in outcome.items()})
    return {"lr": float(best), "seeds": TUNE_SEEDS, "outcome": outcome}


def add_options(parser: argparse.ArgumentParser, task: Task, out: str) -> None:
    """The options of every such benchmark; `out` is where results lie if nothing else is said."""
    parser.add_argument("--out", type=Path, default=Path(out), help="results, and the data as it is read by the ranks")
    parser.add_argument(
        "--configs",
        nargs="+",
        choices=task.configs,
        default=list(task.configs),
        metavar="NAME",
        help=", ".join(task.configs).replace("%", "%%"),
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    parser.add_argument("--cluster", default="2x2", help="nodes x devices that share each batch")
    parser.add_argument("--lr", type=float, help="instead of the one that --tune found")
    parser.add_argument("--tune", action="store_true", help="find the learning rate on dense training, and stop")
    parser.add_argument("--report-only", action="store_true", help="run nothing: report on what is finished")


def run_command(
    task: Task, parser: argparse.ArgumentParser, out: str, load: Callable[[argparse.Namespace], Path]
) -> None:
    """Everything after the options that a benchmark has for itself; `load` gives the file of its data."""
    add_options(parser, task, out)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    options.out.mkdir(parents=True, exist_ok=True)
    tuned = options.out / "tune.json"
    data_file = load(options)
    if options.tune:
        choice = json.dumps(tune(task, data_file, options.out, options.epochs), indent=1)
        tuned.write_text(choice)
        tqdm.write(choice)
        return
    if options.lr is None and not tuned.exists():
        parser.error(f"no learning rate: run with --tune first (it writes {tuned}), or give --lr")
    lr = options.lr if options.lr is not None else json.loads(tuned.read_text())["lr"]
    nodes, devices = map(int, options.cluster.split("x"))
    settings = task.settings(lr=lr, epochs=options.epochs, nodes=nodes, devices=devices)
    runs = [task.run(config, seed, settings) for seed in options.seeds for config in options.configs]
    if options.report_only:
        runs = [run for run in runs if (options.out / "runs" / run.file_name).exists()]
        if not runs:
            parser.error(f"{options.out} holds no finished runs; leave --report-only out to make some")
    records = execute(task, runs, data_file, options.out / "runs")
    tqdm.write(write_report(records, options.out, task.metric))
