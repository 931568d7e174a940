"""What sharing the optimizer step gains and costs: step time and optimizer state, next to what it is measured against.

    python benchmarks/pto.py OUT               # every model on 1, 2 and 4 ranks; VGG-19 on 4 needs 12 GB of memory
    python benchmarks/pto.py OUT --quick       # ResNet-50 on 2 and 4 ranks

Ranks are processes of this machine, one thread each, on Gloo over loopback; four ranks are two nodes of two. Parameters
have the shapes of ResNet-50, of VGG-19, or of a Transformer encoder of 12 layers (width 768), and random gradients, the
same on every rank: the step alone is timed. One step lasts as long as that of the slowest rank; a row is the median.

| row | what it is |
|---|---|
| plain | every rank steps all parameters |
| pto node, pto world | `PTOCallback`'s step, with the gather |
| pto compute | the same with a gather that costs nothing: share of the step, packing and unpacking |
| pto auto | after `scope="auto"` has chosen between the plain and the shared step |
| zero | torch's ZeroRedundancyOptimizer |

`break-even` is the rate of the link, in Gbit/s and per rank, above which the gather costs less than sharing saves:
gathered bits / (plain - pto compute); empty where nothing is saved at any rate. Muon steps matrices only, so it gets
the two-dimensional parameters. Writes results.json (hardware, date, versions, commit, command, every row) and pto.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timm.optim import Lamb, Lars
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from tqdm import tqdm

from lightning_sparse.bench.provenance import commit, processor
from lightning_sparse.pto import ShardedStep, choice, communicator_of
from lightning_sparse.topology import Topology, discover

WORLDS = {1: (1, 1), 2: (1, 2), 4: (2, 2)}  # ranks -> nodes, devices
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "foreach": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-4, "foreach": True}),
    "LARS": (Lars, {"lr": 1e-3, "momentum": 0.9}),
    "LAMB": (Lamb, {"lr": 1e-4, "max_grad_norm": None}),
    "Muon": (torch.optim.Muon, {"lr": 1e-3}),
}
SETTLING = 4  # first steps make state and compare ranks


def shapes_of(model: str) -> list[torch.Size]:
    """Parameters' shapes; nothing is allocated."""
    with torch.device("meta"):
        if model == "Transformer":
            layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
            return [p.shape for _ in range(12) for p in layer.parameters()]
        import torchvision

        return [p.shape for p in getattr(torchvision.models, model)().parameters()]


def make_parameters(model: str, optimizer: str) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    wanted = [shape for shape in shapes_of(model) if optimizer != "Muon" or len(shape) == 2]
    made = [nn.Parameter(torch.randn(shape, generator=g)) for shape in wanted]
    for p in made:
        p.grad = torch.randn(p.shape, generator=g)
    return made


def ways(topology: Topology) -> dict[str, Callable[[type[Optimizer], dict[str, Any], list[nn.Parameter]], Optimizer]]:
    """By row: makes the optimizer."""

    def sharded(scope: Any, free: bool = False) -> Callable[..., Optimizer]:
        def make(cls: type[Optimizer], options: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
            optimizer = cls(parameters, **options)
            step = ShardedStep(optimizer, communicator_of(topology, scope), auto=scope == "auto")
            if free:
                optimizer.register_step_post_hook(lambda *_: make_free(step))
            return optimizer

        return make

    made: dict[str, Any] = {"plain": lambda cls, options, parameters: cls(parameters, **options)}
    if topology.world_size > 1:
        made |= {"pto world": sharded("world"), "pto compute": sharded("world", free=True), "pto auto": sharded("auto")}
        made["zero"] = lambda cls, options, parameters: ZeroRedundancyOptimizer(parameters, cls, **options)
    if topology.num_nodes > 1:
        made["pto node"] = sharded("node")
    return made


def make_free(step: ShardedStep) -> None:
    """Once it has settled, let the gather answer from memory that is there already."""
    if step.steps == SETTLING:
        kept: dict[int, Tensor] = {}
        size = step.topology.num_devices
        step.communicator.gather = lambda share: kept.setdefault(share.numel(), share.repeat(size))  # type: ignore
        step.communicator.broadcast = lambda *_: lambda: None  # type: ignore


def state_bytes(optimizer: Optimizer) -> int:
    inner = getattr(optimizer, "optim", optimizer)
    return sum(t.numel() * t.element_size() for s in inner.state.values() for t in s.values() if isinstance(t, Tensor))


def slowest(value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def measure(model: str, name: str, topology: Topology, repeats: int, seconds: float) -> list[dict[str, Any]]:
    """One row for each way; ways one after the other, for the largest models fill the memory."""
    rows = []
    cls, options = OPTIMIZERS[name]
    for way, make in ways(topology).items():
        parameters = make_parameters(model, name)
        optimizer = make(cls, options, parameters)
        taken: list[float] = []
        for _ in range(2 * choice.STEPS if way == "pto auto" else SETTLING):
            optimizer.step()
        while len(taken) < repeats and sum(taken) < seconds:
            dist.barrier()
            begin = time.perf_counter()
            optimizer.step()
            taken.append(slowest(time.perf_counter() - begin))
        total = sum(p.numel() for p in parameters)
        sharded = getattr(getattr(optimizer, "consolidate_state_dict", None), "__self__", None)
        gathered = sharded._gather.nbytes if isinstance(sharded, ShardedStep) else 0
        rows.append(
            {
                "model": model, "parameters": total, "optimizer": name, "ranks": topology.world_size, "way": way,
                "ms": statistics.median(taken) * 1e3, "fastest_ms": min(taken) * 1e3, "repeats": len(taken),
                "shared": isinstance(sharded, ShardedStep), "state_MB": slowest(state_bytes(optimizer)) / 1e6,
                "gathered_MB": gathered / 1e6,
            }
        )  # fmt: skip
    return rows


def worker(index: int, ranks: int, options: argparse.Namespace, out: str, rendezvous: str) -> None:
    nodes, devices = WORLDS[ranks]
    os.environ.update(GROUP_RANK=str(index // devices), LOCAL_RANK=str(index % devices), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=index, world_size=ranks, timeout=timedelta(minutes=10)
    )
    topology, rows = discover(), []
    cases = [(m, o) for m in options.models for o in options.optimizers if o != "Muon" or m == "Transformer"]
    for model, name in tqdm(cases, desc=f"{nodes} x {devices} ranks", disable=index != 0):
        rows += measure(model, name, topology, options.repeats, options.seconds)
    if index == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def compare(rows: list[dict[str, Any]]) -> None:
    """Put beside each row how it stands to the plain step of its case."""
    by_case = {(r["model"], r["optimizer"], r["ranks"], r["way"]): r for r in rows}
    for row in rows:
        case = (row["model"], row["optimizer"], row["ranks"])
        plain = by_case[(*case, "plain")]
        row["faster"] = plain["ms"] / row["ms"]
        row["state share"] = row["state_MB"] / plain["state_MB"]
        saved = plain["ms"] - by_case[(*case, "pto compute")]["ms"] if row["way"] == "pto world" else 0.0
        row["break-even Gbit/s"] = row["gathered_MB"] * 8 / saved if saved > 0 else None


def table(rows: list[dict[str, Any]]) -> str:
    head = ("model", "optimizer", "ranks", "way", "ms", "faster", "state_MB", "state share", "break-even Gbit/s")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [f"{row[k]:.2f}" if isinstance(row[k], float) else "" if row[k] is None else str(row[k]) for k in head]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def provenance() -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "commit": commit(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    shown = [row for row in rows if row["ranks"] == max(r["ranks"] for r in rows)]
    cases = list(dict.fromkeys((row["model"], row["optimizer"]) for row in shown))
    names = list(dict.fromkeys(row["way"] for row in shown))
    figure = Figure(figsize=(1.6 * len(cases) + 3, 4), layout="tight")
    axes = figure.add_subplot()
    for offset, way in enumerate(names):
        bars = {(r["model"], r["optimizer"]): r["ms"] for r in shown if r["way"] == way}
        places = [i + offset / (len(names) + 1) for i in range(len(cases))]
        axes.bar(places, [bars.get(case, 0) for case in cases], 1 / (len(names) + 1), label=way)
    axes.set_xticks([i + 0.4 for i in range(len(cases))], [f"{m}\n{o}" for m, o in cases])
    axes.set_yscale("log")
    axes.set_ylabel("ms a step (median)")
    axes.set_title(f"Optimizer step on {shown[0]['ranks']} ranks")
    axes.legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where results.json and pto.svg go")
    parser.add_argument("--quick", action="store_true", help="ResNet-50 on 2 and 4 ranks")
    parser.add_argument("--models", nargs="+", default=["resnet50", "vgg19", "Transformer"])
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20.0, help="spent at most on one row")
    options = parser.parse_args()
    if options.quick:
        options.models, options.ranks, options.repeats, options.seconds = ["resnet50"], [2, 4], 5, 3.0
    options.folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in options.ranks:
            out = f"{scratch}/rows{ranks}.json"
            torch.multiprocessing.spawn(worker, (ranks, options, out, f"{scratch}/meet{ranks}"), nprocs=ranks)
            rows += json.loads(Path(out).read_text())
    compare(rows)
    print(table(rows))
    (options.folder / "results.json").write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")
    plot(rows, options.folder / "pto.svg")
    print(f"\nwrote {options.folder / 'results.json'}")


if __name__ == "__main__":
    main()
