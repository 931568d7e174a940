"""Validation accuracy of hierarchical top-k communication against dense training, on a small CIFAR-10.

    python benchmarks/convergence.py PICTURES --tune                # once: learning rate, on dense training alone
    python benchmarks/convergence.py PICTURES                       # the whole table; again after an interruption

PICTURES is a folder or a .tar of one, ``{train,val}/<class>/*.jpg``, all pictures of one size (32 x 32).

What runs is the real thing: four processes with Gloo, taken for two nodes of two devices (or four of one, where a row
says so), `DistributedDataParallel`, and `hier_hook` registered on it; "dense" is DDP without a hook.
Only the network is missing: both nodes are this machine, so bytes are counted and times mean nothing.

**Paired.** Initialisation, data order and augmentation are functions of the seed alone; a configuration changes only
how gradients travel. So differences to dense are taken seed by seed, and their interval is far narrower than that of
the accuracies. Runs go seed by seed, each with all configurations: an unfinished table is paired already.

**One learning rate.** ``--tune`` chooses it for dense training on seeds that are not in the table, and all
configurations reuse it. Whatever a configuration would gain from a learning rate of its own is not in the numbers.

**Short runs.** 1,170 steps are few for a method that sends a coordinate every 1/density steps or so; published parity
is for tens of thousands. Read the table as an ordering of the variants and a regression test, not as a promise.

Every finished (configuration, seed) is one file ``runs/<configuration>-seed<seed>.json`` and is not run again.
The summary is results.md, results.json and accuracy.png in the same folder.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from convergence_pictures import EpochOrder, Pictures, load_pictures
from convergence_report import write_report
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from lightning_sparse.bench.provenance import commit
from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.strategy.cost import dense_bytes
from lightning_sparse.topology import Topology, discover

CLUSTER = (2, 2)  # nodes, devices
WORLD = 4

# What differs between the rows of the table: the arguments of HierConfig. None: plain DDP.
SPARSE = {"exchange": "sparse", "value_dtype": "float32", "warmup_epochs": 0}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "1%": {**SPARSE, "density": 0.01},
    "1%-no-feedback": {**SPARSE, "density": 0.01, "error_feedback": False},
    "1%-warmup": {**SPARSE, "density": 0.01, "warmup_epochs": 2},
    "1%-bf16": {**SPARSE, "density": 0.01, "value_dtype": "bfloat16"},
    "default-warmup2": {"exchange": "sparse", "warmup_epochs": 2},
    "default": {"exchange": "sparse"},  # "auto" would see loopback
    "0.1%": {**SPARSE, "density": 0.001},
    "0.1%-no-feedback": {**SPARSE, "density": 0.001, "error_feedback": False},
    "0.1%-warmup": {**SPARSE, "density": 0.001, "warmup_epochs": 2},
}

WIDE = "4x1 "  # a row of this beginning runs on 4 nodes of one device
CONFIGS |= {
    "1%-momentum": {**SPARSE, "density": 0.01, "momentum_correction": True},
    "default-momentum": {"exchange": "sparse", "momentum_correction": True},
    "0.1%-momentum-warmup": {**SPARSE, "density": 0.001, "warmup_epochs": 2, "momentum_correction": True},
    "1%-small-groups": {**SPARSE, "density": 0.01},
    "1%-regional": {**SPARSE, "density": 0.01, "exchange": "regional"},
    WIDE + "1%": {**SPARSE, "density": 0.01},
    WIDE + "regional, equal bytes": {**SPARSE, "density": 0.02, "exchange": "regional"},
    "auto": {"density": "auto", "inter_gbps": 1.0},
}
BUCKET_MB = {"1%-small-groups": 0.04, "auto": 0.1}  # else the whole model is one group

TUNE_LRS = (0.05, 0.1, 0.2, 0.4, 0.8)
TUNE_SEEDS = (1000, 1001)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all configurations of a table share."""

    lr: float
    epochs: int = 15
    global_batch: int = 128
    momentum: float = 0.9
    weight_decay: float = 5e-4


@dataclass(frozen=True)
class Run:
    config: str
    seed: int
    settings: Settings

    @property
    def file_name(self) -> str:
        return f"{self.config}-seed{self.seed}.json"


# --- the model


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet8(num_classes: int, widths: tuple[int, int, int] = (16, 32, 64)) -> nn.Sequential:
    """78,042 parameters for ten classes. The stem halves the picture: a quarter of the usual cost on a CPU."""
    a, b, c = widths
    return nn.Sequential(
        nn.Conv2d(3, a, 3, 2, 1, bias=False),
        nn.BatchNorm2d(a),
        nn.ReLU(),
        Block(a, a, 1),
        Block(a, b, 2),
        Block(b, c, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(c, num_classes),
    )


# --- one run, on every rank


def cluster_of(config: str) -> tuple[int, int]:
    """Nodes and devices of a row."""
    return (WORLD, 1) if config.startswith(WIDE) else CLUSTER


def attach(
    ddp: DistributedDataParallel, config: str, topology: Topology, optimizer: torch.optim.Optimizer
) -> HierState | None:
    """Put the configuration's hook on `ddp`; its state, or None for plain DDP."""
    arguments = CONFIGS[config]
    if arguments is None:
        return None
    state = HierState(ddp.module, HierConfig(**arguments), topology)
    state.watch([optimizer])
    ddp.register_comm_hook(state, hier_hook)
    return state


def bytes_per_node(state: HierState | None, num_parameters: int, rounds: int) -> float:
    """Bytes that a node's devices have received from the other nodes so far, all together. Collective."""
    if state is None:
        # What the dense exchange of the same hierarchy would; DDP's flat ring takes half as much again.
        nodes, devices = CLUSTER
        return rounds * devices * dense_bytes(nodes, num_parameters // devices, itemsize=4)
    received = torch.tensor(state.stats.bytes_between_nodes, dtype=torch.float64)
    dist.all_reduce(received)
    return received.item() / state.topology.num_nodes


@torch.no_grad()
def validate(model: nn.Module, pictures: Pictures, rank: int) -> float:
    """Accuracy in percent. Every rank takes its share, with the mean of all ranks' batch statistics. Collective."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()
    model.eval()
    mine = slice(rank, None, dist.get_world_size())
    logits = model(pictures.normalised(pictures.val_x[mine].float()).contiguous(memory_format=torch.channels_last))
    model.train()
    correct = (logits.argmax(1) == pictures.val_y[mine]).sum()
    dist.all_reduce(correct)
    return 100 * correct.item() / len(pictures.val_y)


def check_ranks_agree(model: nn.Module) -> None:
    """Ranks that drift apart would make the accuracy meaningless. Collective."""
    flat_N = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    low_N, high_N = flat_N.clone(), flat_N.clone()
    dist.all_reduce(low_N, op=dist.ReduceOp.MIN)
    dist.all_reduce(high_N, op=dist.ReduceOp.MAX)
    if not torch.equal(low_N, high_N):
        raise RuntimeError(f"ranks hold different parameters, by up to {(high_N - low_N).max():.3g}")


def wrap(model: nn.Module, bucket_cap_mb: float | None = None) -> DistributedDataParallel:
    """DDP whose batch statistics stay local while training, as a cluster that minds its slow link would have them."""
    # torch 2.15 renames the option and warns about the old name.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    buckets = {} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **{option: False}, **buckets)


class Trainer:
    """One run on one rank. All its methods are collective and give the same on every rank."""

    def __init__(self, run: Run, pictures: Pictures, topology: Topology) -> None:
        torch.manual_seed(run.seed)
        settings = run.settings
        self.run, self.pictures, self.rank = run, pictures, topology.rank
        self.model = resnet8(pictures.num_classes).to(memory_format=torch.channels_last)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.ddp = wrap(self.model, BUCKET_MB.get(run.config))
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), settings.lr, settings.momentum, weight_decay=settings.weight_decay, foreach=True
        )
        self.state = attach(self.ddp, run.config, topology, self.optimizer)
        self.padded_NCHW = F.pad(pictures.train_x, [EpochOrder.PAD] * 4)
        self.steps = len(self.padded_NCHW) // settings.global_batch  # an epoch
        self.cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, settings.epochs * self.steps)

    def epoch(self, epoch: int) -> dict[str, Any]:
        """Train for one epoch and validate: a line of the run's history."""
        if self.state is not None:
            self.state.epoch = epoch
        order = EpochOrder(len(self.padded_NCHW), self.run.seed, epoch, self.run.settings.global_batch)
        loss_sum = torch.zeros(())
        for step in range(self.steps):
            x, index_B = order.batch(self.padded_NCHW, step, self.rank, WORLD)
            loss = F.cross_entropy(self.ddp(self.pictures.normalised(x)), self.pictures.train_y[index_B])
            self.optimizer.zero_grad()
            if self.state is not None:
                self.state.before_backward()
            loss.backward()
            self.optimizer.step()
            self.cosine.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        steps = (epoch + 1) * self.steps
        return {
            "epoch": epoch + 1,
            "step": steps,
            "train_loss": loss_sum.item() / self.steps / WORLD,
            "val_accuracy": validate(self.model, self.pictures, self.rank),
            "bytes_per_node": bytes_per_node(self.state, self.num_parameters, steps),
        }


def train(
    run: Run, pictures: Pictures, topology: Topology, on_epoch: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """One row of one seed: the record that is written to its file."""
    began, trainer, history = time.perf_counter(), Trainer(run, pictures, topology), []
    for epoch in range(run.settings.epochs):
        history.append(trainer.epoch(epoch))
        on_epoch(history[-1])
    check_ranks_agree(trainer.model)
    return {
        "config": run.config,
        "arguments": CONFIGS[run.config],
        "seed": run.seed,
        "settings": asdict(run.settings),
        "parameters": trainer.num_parameters,
        "seconds": round(time.perf_counter() - began, 1),
        "history": history,
    }


# --- many runs, in processes that live through all of them


def worker(rank: int, runs: list[Run], pictures_file: Path, folder: Path, rendezvous: str) -> None:
    """One rank. Rank 0 writes the files and shows the progress."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(WORLD),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=120)
    )
    clusters = dict.fromkeys(cluster_of(run.config) for run in runs)
    topologies = {each: discover(node_rank=rank // each[1], local_rank=rank % each[1]) for each in clusters}
    at_commit = commit()
    pictures: Pictures = torch.load(pictures_file, weights_only=False)
    with tqdm(total=sum(run.settings.epochs for run in runs), unit="epoch", disable=rank != 0) as bar:
        for run in runs:

            def show(row: dict[str, Any], run: Run = run) -> None:
                bar.set_description(f"{run.config} seed {run.seed}: {row['val_accuracy']:.1f} %", refresh=False)
                bar.update()

            record = train(run, pictures, topologies[cluster_of(run.config)], show)
            if rank == 0:
                temporary = folder / f".{run.file_name}"
                temporary.write_text(json.dumps({**record, "commit": at_commit}, indent=1))
                temporary.replace(folder / run.file_name)
    dist.destroy_process_group()


def execute(runs: list[Run], pictures_file: Path, folder: Path) -> list[dict[str, Any]]:
    """The records of `runs`, in order; those that have a file in `folder` are read, the others are run."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [run for run in runs if not (folder / run.file_name).exists()]
    if missing:
        with tempfile.TemporaryDirectory() as scratch:
            arguments = (missing, pictures_file, folder, f"{scratch}/rendezvous")
            torch.multiprocessing.spawn(worker, arguments, nprocs=WORLD)
    records = [json.loads((folder / run.file_name).read_text()) for run in runs]
    for run, record in zip(runs, records, strict=True):
        if (record["settings"], record["arguments"]) != (asdict(run.settings), CONFIGS[run.config]):
            raise ValueError(
                f"{folder / run.file_name} was made with {record['settings']}, {record['arguments']}; asked for are "
                f"{asdict(run.settings)}, {CONFIGS[run.config]}. A table has one setting: use another --out."
            )
    return records


def tune(pictures_file: Path, out: Path, epochs: int) -> dict[str, Any]:
    """The learning rate with the best accuracy of dense training, and the mean outcome of each that was tried."""
    outcome = {}
    for lr in TUNE_LRS:
        runs = [Run("dense", seed, Settings(lr=lr, epochs=epochs)) for seed in TUNE_SEEDS]
        ends = [record["history"][-1] for record in execute(runs, pictures_file, out / f"tune-{lr:g}")]
        outcome[f"{lr:g}"] = {key: fmean(end[key] for end in ends) for key in ("val_accuracy", "train_loss")}
    best = max(outcome, key=lambda lr: outcome[lr]["val_accuracy"])
    return {"lr": float(best), "seeds": TUNE_SEEDS, "outcome": outcome}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path, help="folder or .tar with {train,val}/<class>/*.jpg")
    parser.add_argument("--out", type=Path, default=Path("runs/convergence"), help="results, and the decoded pictures")
    parser.add_argument(
        "--configs",
        nargs="+",
        choices=CONFIGS,
        default=list(CONFIGS),
        metavar="NAME",
        help=", ".join(CONFIGS).replace("%", "%%"),
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    parser.add_argument("--lr", type=float, help="instead of the one that --tune found")
    parser.add_argument("--tune", action="store_true", help="find the learning rate on dense training, and stop")
    parser.add_argument("--report-only", action="store_true", help="run nothing: report on what is finished")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    options.out.mkdir(parents=True, exist_ok=True)
    tuned = options.out / "tune.json"
    pictures_file = load_pictures(options.pictures, options.out)
    if options.tune:
        choice = json.dumps(tune(pictures_file, options.out, options.epochs), indent=1)
        tuned.write_text(choice)
        tqdm.write(choice)
        return
    if options.lr is None and not tuned.exists():
        parser.error(f"no learning rate: run with --tune first (it writes {tuned}), or give --lr")
    lr = options.lr if options.lr is not None else json.loads(tuned.read_text())["lr"]
    settings = Settings(lr=lr, epochs=options.epochs)
    runs = [Run(config, seed, settings) for seed in options.seeds for config in options.configs]
    if options.report_only:
        runs = [run for run in runs if (options.out / "runs" / run.file_name).exists()]
        if not runs:
            parser.error(f"{options.out} holds no finished runs; leave --report-only out to make some")
    records = execute(runs, pictures_file, options.out / "runs")
    # Where files lie on this machine helps nobody to repeat it.
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]
    tqdm.write(write_report(records, options.out, command=" ".join(["python", *words])))


if __name__ == "__main__":
    main()
