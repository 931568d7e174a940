"""Compare dense and sparse training on an emulated cluster; `make demo` runs this.

The cluster has two nodes of two ranks each. The nodes are network namespaces, joined by links of 0.15 Gbit/s. Ranks use
the machine's GPUs, and share them if there are fewer than four. Without GPUs, ranks use the CPU. All runs of a task
start from the same weights, and take the same number of steps. The *single-node baseline* trains one node on its half
of the data without any communication: an exchange is useful only if it ends below this loss. The kernel counts the
bytes on the links.

These rules set the options. docs/first-run.md has the measured table, benchmarks/README.md the learning rates:

- All runs of a task use the learning rate at which dense training ends with the lowest loss, among rates that double.
- The density is 10 / steps, so each entry of the model is sent ten times on average.
- The link is slow because the models are small: 1.2 M parameters over 0.15 Gbit/s wait as long as 120 M over 15 Gbit/s.

Without root, the ranks run on loopback, without a slow link. The losses stay the same, bytes are computed instead of
counted, and the times say nothing about a network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import median

from lightning_sparse.lab import Cluster, LabConfig, exit_on_signals, find_gpus, unavailable_reason

HERE = Path(__file__).parent
NODES, DEVICES = 2, 2
FIRST_STEPS = 10  # excluded from the median: connections are set up, and DDP rebuilds its buckets
ENTRIES_SENT = 10  # per entry of the model, on average over the run


@dataclass(frozen=True)
class Task:
    """A model, its data, and the methods that train it."""

    name: str
    script: str
    unit: str
    scale: str  # of the loss axis
    steps: int
    options: tuple[str, ...]
    strategies: tuple[str, ...]

    @property
    def density(self) -> float:
        return ENTRIES_SENT / self.steps


TASKS = (
    Task(
        "images, SGD",
        "digits.py",
        "nats",
        "log",
        64,
        ("--learning-rate", "0.025"),
        ("ddp", "mstopk_hier", "mstopk_local"),
    ),
    Task(
        "text, AdamW",
        "characters.py",
        "bits per character",
        "linear",
        208,
        ("--learning-rate", "0.008", "--batch-size", "4"),
        ("ddp", "mstopk_local"),
    ),
)


@dataclass(frozen=True)
class Run:
    """One training. Its results are in `folder`, one file per node."""

    task: Task
    strategy: str
    nodes: int
    folder: Path

    @property
    def name(self) -> str:
        return self.strategy if self.nodes > 1 else "single-node baseline"

    def command(self, label: str, data: Path) -> list[str]:
        """Return the script and its arguments, for demo_ranks.py."""
        task = self.task
        words = ["--strategy", self.strategy, "--density", f"{task.density:g}", "--steps", f"{task.steps}"]
        words += ["--share", f"{self.nodes / NODES}", "--label", label, "--data", str(data)]
        return [task.script, *words, *task.options, "--result", str(self.folder)]

    def read(self) -> Row:
        node = json.loads((self.folder / "node0.json").read_text())
        received, elapsed = node["bytes_received"], list(accumulate(node["seconds"]))
        return Row(
            run=self,
            losses=[loss for _, loss in node["losses"]],
            seconds=[elapsed[step - 1] for step, _ in node["losses"]],
            step_seconds=median(node["seconds"][FIRST_STEPS:]),
            step_bytes=node["bytes_computed"] if received is None else received,
        )


@dataclass(frozen=True)
class Row:
    """The measurements of a run: validation losses, the seconds of training before each, and costs per step."""

    run: Run
    losses: list[float]
    seconds: list[float]
    step_seconds: float
    step_bytes: float


def plan_runs(out: Path) -> list[Run]:
    runs = [(task, strategy, NODES) for task in TASKS for strategy in task.strategies]
    runs += [(task, "ddp", 1) for task in TASKS]
    return [Run(*run, out / f"run{number}") for number, run in enumerate(runs)]


def train(runs: list[Run], out: Path, config: LabConfig) -> None:
    """Run all trainings that need the config's number of nodes, one after another in the same processes."""
    commands = [
        run.command(f"{number}/{len(runs)} {run.task.name}, {run.name}", out / "digits")
        for number, run in enumerate(runs, 1)
        if run.nodes == config.nodes
    ]
    path = out / f"plan{config.nodes}.json"
    path.write_text(json.dumps(commands))
    with Cluster(config) as cluster:
        result = cluster.run([sys.executable, str(HERE / "demo_ranks.py"), str(path)])
    code = result.exit_code
    if code != 0:
        raise SystemExit(f"training on {config.nodes} node(s) failed with exit code {code}; its output is above")


def format_table(rows: list[Row]) -> str:
    """Return a Markdown table. The gap is between the single-node baseline and dense training."""
    lines = [
        "| task | method | final validation loss | gap closed | time per step | received per node and step |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        task = row.run.task
        of_task = [each for each in rows if each.run.task is task]
        dense, baseline = of_task[0].losses[-1], of_task[-1].losses[-1]
        closed = f"{(baseline - row.losses[-1]) / (baseline - dense):.0%}"
        lines.append(
            f"| {task.name} | {row.run.name} | {row.losses[-1]:.3f} {task.unit} | {closed} | "
            f"{row.step_seconds * 1e3:.0f} ms | {row.step_bytes / 1e6:.3f} MB |"
        )
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Draw the validation loss over the seconds of training, one panel per task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for panel, task in zip(figure.subplots(1, len(TASKS)), TASKS, strict=True):
        for row in rows:
            if row.run.task is task:
                style = "--" if row.run.nodes == 1 else "-"
                panel.plot(row.seconds, row.losses, style, marker="o", markersize=3, label=row.run.name)
        panel.set(
            title=task.name, xlabel="seconds of training", ylabel=f"validation loss ({task.unit})", xlim=(0, None)
        )
        panel.set_yscale(task.scale)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare dense and sparse training on an emulated cluster.")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for results")
    parser.add_argument("--gbps", type=float, default=0.15, help="bandwidth of each node's link in Gbit/s")
    parser.add_argument("--no-net", action="store_true", help="use loopback instead of an emulated network")
    parser.add_argument("--cpu", action="store_true", help="hide all GPUs")
    args = parser.parse_args()
    reason = "--no-net was given" if args.no_net else unavailable_reason()
    where = f"links of {args.gbps:g} Gbit/s" if reason is None else f"loopback, because {reason}"
    gpus = 0 if args.cpu else len(find_gpus(os.environ))
    processor = f"{gpus} GPU(s)" if gpus else "the CPU"
    print(f"{NODES} nodes x {DEVICES} ranks on {processor} of this machine; {where}", flush=True)
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    runs = plan_runs(args.out)
    config = LabConfig(nodes=NODES, devices=DEVICES, gbps=args.gbps, network=reason is None, cpu=args.cpu)
    with exit_on_signals():
        train(runs, args.out, config)
        train(runs, args.out, replace(config, nodes=1))
    rows = sorted((run.read() for run in runs), key=lambda row: TASKS.index(row.run.task))
    table = format_table(rows)
    (args.out / "table.md").write_text(table + "\n")
    draw(rows, args.out / "loss.png")
    print(f"\n{table}\n\nLoss over time: {args.out / 'loss.png'}")
    if reason is not None:
        print("On loopback, times say nothing about a network, and bytes are computed.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
