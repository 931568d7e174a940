"""Common part of the convergence benchmarks: one run of a configuration and a seed, on real ranks, stored in a file.

A benchmark defines a `Task`: a rank's `Learner` (model, optimizer, batches, validation), and its metric. The code of
communication is here, so a row has one meaning in the tables of both tasks. Runs are real: processes with Gloo, four as
two nodes of two devices by default, `DistributedDataParallel`, and the method from ways.py. Only the network is
missing, because all nodes are this machine. So bytes are counted, and times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from benchmarks.convergence.report import Metric, write_report
from benchmarks.convergence.ways import WAYS
from benchmarks.record import commit
from lightning_sparse.topology import Topology, with_groups

# The differences between rows of a table: the method (ways.py; default "gradients") with its options, and "nodes",
# "bucket_cap_mb" and "lr_times" if they are not the defaults. None: plain DDP. "alone": the single-node baseline, plain
# DDP inside one node, on its ranks' share of each batch.
Arguments = dict[str, Any] | None
OF_RUN = ("nodes", "lr_times", "alone", "way")  # options of the run, not of the method
ALONE = {"alone": True}
SPARSE = {"exchange": "sparse", "value_dtype": "float32", "warmup_epochs": 0}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of all configurations of a table; a task adds its own."""

    lr: float
    epochs: int = 15
    nodes: int = 2
    devices: int = 2

    @property
    def world_size(self) -> int:
        """Number of ranks that share each batch."""
        return self.nodes * self.devices


@dataclass(frozen=True)
class Run:
    config: str
    arguments: Arguments
    seed: int
    settings: Any  # Settings, or a task's subclass

    @property
    def file_name(self) -> str:
        return f"{self.config}-seed{self.seed}.json".replace("/", " per ")  # a rate has a slash

    def option(self, name: str, usual: Any) -> Any:
        """Return an option of the configuration that HierConfig does not know."""
        return (self.arguments or {}).get(name, usual)

    @property
    def alone(self) -> bool:
        """Whether one node trains without the others."""
        return bool(self.option("alone", False))

    @property
    def world_size(self) -> int:
        """Number of ranks: of all nodes, or of one node."""
        ranks: int = self.settings.world_size
        return ranks // self.nodes if self.alone else ranks

    @property
    def nodes(self) -> int:
        """Number of nodes that share the batch."""
        return int(self.option("nodes", self.settings.nodes))

    @property
    def way(self) -> str:
        """A name in `WAYS`."""
        return "ddp" if self.arguments is None or self.alone else str(self.option("way", "gradients"))


class Learner(ABC):
    """A task's part of one run on one rank. Everything except the batches is equal on all ranks.

    A batch is divided among the ranks of all nodes, even if only one node runs.
    """

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler  # advanced in every step
    steps: int  # per epoch

    @abstractmethod
    def losses(self, model: nn.Module, epoch: int) -> Iterator[Tensor]:
        """Yield this rank's loss of every step of an epoch, through `model`, which is `self.model` in DDP."""

    @abstractmethod
    def validate(self) -> float:
        """Return the metric, equal on all ranks. A collective."""


@dataclass(frozen=True)
class Task:
    """The subject of a table. Other processes find its functions by name, so they belong to a module.

    Args:
        learner: makes the Learner of (run, data, rank), after torch is seeded with the run's seed.
        settings: makes the settings from ``lr`` and ``epochs``.
    """

    metric: Metric
    configs: dict[str, Arguments]
    learner: Callable[[Run, Any, int], Learner]
    settings: Callable[..., Any]
    tune_lrs: tuple[float, ...]

    def run(self, config: str, seed: int, settings: Any) -> Run:
        return Run(config, self.configs[config], seed, settings)


# --- one run, on every rank


def check_ranks_agree(model: nn.Module) -> None:
    """Raise RuntimeError if ranks have different parameters, which would make the metric meaningless. A collective."""
    flat_N = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    low_N, high_N = flat_N.clone(), flat_N.clone()
    dist.all_reduce(low_N, op=dist.ReduceOp.MIN)
    dist.all_reduce(high_N, op=dist.ReduceOp.MAX)
    if not torch.equal(low_N, high_N):
        raise RuntimeError(f"ranks hold different parameters, by up to {(high_N - low_N).max():.3g}")


class Trainer:
    """One run on one rank. All methods are collectives, with equal results on all ranks."""

    def __init__(self, task: Task, run: Run, data: Any, topology: Topology) -> None:
        torch.manual_seed(run.seed)
        self.run, self.metric = run, task.metric.key
        self.learner = task.learner(run, data, topology.rank)
        options = {name: value for name, value in (run.arguments or {}).items() if name not in OF_RUN}
        self.way = WAYS[run.way](self.learner.model, self.learner.optimizer, topology, options)

    def epoch(self, epoch: int) -> dict[str, Any]:
        """Train for one epoch and validate; return a line of the run's history."""
        learner = self.learner
        self.way.begin_epoch(epoch)
        loss_sum = torch.zeros(())
        for loss in learner.losses(self.way.ddp, epoch):
            learner.optimizer.zero_grad()
            self.way.before_backward()
            loss.backward()  # type: ignore[no-untyped-call]
            self.way.step()
            self.way.after_step()
            learner.schedule.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        if epoch == self.run.settings.epochs - 1:
            self.way.finish()
        with self.way.shown():
            validated = learner.validate()
        return {
            "epoch": epoch + 1,
            "step": (epoch + 1) * learner.steps,
            "train_loss": loss_sum.item() / learner.steps / dist.get_world_size(),
            self.metric: validated,
            "bytes_per_node": self.way.bytes_per_node(),
        }


def train(
    task: Task, run: Run, data: Any, topology: Topology, on_epoch: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run one row of one seed; return the record for its file."""
    began, trainer, history = time.perf_counter(), Trainer(task, run, data, topology), []
    for epoch in range(run.settings.epochs):
        history.append(trainer.epoch(epoch))
        on_epoch(history[-1])
    check_ranks_agree(trainer.learner.model)
    return {
        "config": run.config,
        "arguments": run.arguments,
        "seed": run.seed,
        "settings": asdict(run.settings),
        "parameters": trainer.way.numel,
        "seconds": round(time.perf_counter() - began, 1),
        "history": history,
    }


# --- many runs, in processes that live through all of them


def worker(rank: int, task: Task, runs: list[Run], data_file: Path, folder: Path, rendezvous: str) -> None:
    """Run one rank of runs of one world size. Rank 0 writes the files and shows the progress."""
    world_size = runs[0].world_size
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(minutes=30)
    )
    topologies: dict[int, Topology] = {}
    at_commit = commit()
    data = torch.load(data_file, weights_only=False)
    with tqdm(total=sum(run.settings.epochs for run in runs), unit="epoch", disable=rank != 0) as bar:
        for run in runs:

            def show(row: dict[str, Any], run: Run = run) -> None:
                bar.set_description(f"{run.config} seed {run.seed}: {task.metric.shown(row)}", refresh=False)
                bar.update()

            nodes = 1 if run.alone else run.nodes
            if nodes not in topologies:
                devices = world_size // nodes
                ranks = tuple(tuple(range(first, first + devices)) for first in range(0, world_size, devices))
                topologies[nodes] = with_groups(ranks)
            record = train(task, run, data, topologies[nodes], show)
            if rank == 0:
                temporary = folder / f".{run.file_name}"
                temporary.write_text(json.dumps({**record, "commit": at_commit}, indent=1))
                temporary.replace(folder / run.file_name)
    dist.destroy_process_group()


def execute(task: Task, runs: list[Run], data_file: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the records of `runs`, in order. Runs with a file in `folder` are read, and the others are run.

    Raises:
        ValueError: if a file was made with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [run for run in runs if not (folder / run.file_name).exists()]
    for world_size in sorted({run.world_size for run in missing}, reverse=True):
        with tempfile.TemporaryDirectory() as scratch:
            same = [run for run in missing if run.world_size == world_size]
            arguments = (task, same, data_file, folder, f"{scratch}/rendezvous")
            torch.multiprocessing.spawn(worker, arguments, nprocs=world_size)  # type: ignore[attr-defined, no-untyped-call]
    records = [json.loads((folder / run.file_name).read_text()) for run in runs]
    for run, record in zip(runs, records, strict=True):
        if (record["settings"], record["arguments"]) != (asdict(run.settings), run.arguments):
            raise ValueError(
                f"{folder / run.file_name} was made with {record['settings']}, {record['arguments']}; asked for are "
                f"{asdict(run.settings)}, {run.arguments}. A table has one setting: use another --out."
            )
    return records


# --- the command line: choose the learning rate, run the missing rows of a table, report

TUNE_SEEDS = (1000, 1001)  # not used in tables


def tune(task: Task, data_file: Path, out: Path, epochs: int) -> dict[str, Any]:
    """Return the learning rate with the best metric of dense training, and the mean result of each trial."""
    outcome = {}
    for lr in task.tune_lrs:
        runs = [task.run("dense", seed, task.settings(lr=lr, epochs=epochs)) for seed in TUNE_SEEDS]
        ends = [record["history"][-1] for record in execute(task, runs, data_file, out / f"tune-{lr:g}")]
        outcome[f"{lr:g}"] = {key: fmean(end[key] for end in ends) for key in (task.metric.key, "train_loss")}
    best = task.metric.best({lr: ends[task.metric.key] for lr, ends in outcome.items()})
    return {"lr": float(best), "seeds": TUNE_SEEDS, "outcome": outcome}


def add_options(parser: argparse.ArgumentParser, task: Task, out: str) -> None:
    """Add the options of all convergence benchmarks; `out` is the default folder of the results."""
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for the results and the prepared data")
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
    parser.add_argument("--lr", type=float, help="learning rate; default: the result of --tune")
    parser.add_argument("--tune", action="store_true", help="only find the learning rate, on dense training")
    parser.add_argument("--report-only", action="store_true", help="report on the finished runs, without new runs")


def run_command(
    task: Task, parser: argparse.ArgumentParser, out: str, load: Callable[[argparse.Namespace], Path]
) -> None:
    """Run a benchmark after its options are parsed; `load` returns the file of its data."""
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
    write_report(records, options.out, task.metric)
