"""Gains and costs of sharding the optimizer step (PTO): step time and optimizer state.

    python -m benchmarks.exchange.pto OUT           # every model on 1, 2 and 4 ranks; VGG-19 on 4 needs 12 GB of memory
    python -m benchmarks.exchange.pto OUT --quick   # ResNet-18 on 2 and 4 ranks
    torchrun ... -m benchmarks.exchange.pto OUT     # on your own cluster, on CPUs or GPUs

Ranks are processes of this machine with one thread each, on Gloo over loopback. Parameters have the shapes of a model,
and random gradients, equal on all ranks. Rows report medians of the slowest rank's step times.

| row | operation |
|---|---|
| plain | every rank steps all parameters |
| pto node, pto world | `PTOCallback`'s step, including the gather |
| pto compute | the sharded step, packing and unpacking, with a gather that returns at once |
| pto auto | after `scope="auto"` has chosen between the plain and the sharded step |
| zero | torch's ZeroRedundancyOptimizer |

`break-even` is the link rate in Gbit/s per rank above which sharding saves time: gathered bits / (plain - pto compute);
empty if it saves none at any rate. Muon gets only the two-dimensional parameters, which are all it supports. Writes
OUT/pto.json, .md and .svg.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from benchmarks.plots import figure
from benchmarks.processes import on_clusters, slowest
from benchmarks.record import Rows, parser_of, surroundings, write
from lightning_sparse.cli import format_table
from lightning_sparse.cli.plan import parameter_shapes
from lightning_sparse.pto import ShardedStep, communicator_of
from lightning_sparse.pto.step import STEPS
from lightning_sparse.topology import Topology

Make = Callable[[type[Optimizer], dict[str, Any], list[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "foreach": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-4, "foreach": True}),
    "Muon": (torch.optim.Muon, {"lr": 1e-3}),
}
OF_TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "LARS": ("Lars", {"lr": 1e-3, "momentum": 0.9}),
    "LAMB": ("Lamb", {"lr": 1e-4, "max_grad_norm": None}),
}
SETTLING = 4  # the first steps create state and compare ranks


def shapes_of(model: str) -> Sequence[torch.Size]:
    """Return the parameter shapes of a torchvision or timm model, or of an encoder of 12 layers ("Transformer")."""
    if model != "Transformer":
        return parameter_shapes(model)
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    return [p.shape for _ in range(12) for p in layer.parameters()]


def optimizer_of(name: str) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the class and options of an optimizer."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    import timm.optim

    kind, options = OF_TIMM[name]
    return getattr(timm.optim, kind), options


def ways(topology: Topology) -> dict[str, Make]:
    """Return functions that create the optimizer, by row."""

    def sharded(scope: Any, free: bool = False) -> Make:
        def make(cls: type[Optimizer], options: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
            optimizer = cls(parameters, **options)
            step = ShardedStep(optimizer, communicator_of(topology, scope), auto=scope == "auto")
            if free:
                optimizer.register_step_post_hook(lambda *_: _make_free(step))
            return optimizer

        return make

    made: dict[str, Make] = {"plain": lambda cls, options, parameters: cls(parameters, **options)}
    if topology.world_size > 1:
        made |= {"pto world": sharded("world"), "pto compute": sharded("world", free=True), "pto auto": sharded("auto")}
        made["zero"] = lambda cls, options, parameters: ZeroRedundancyOptimizer(parameters, cls, **options)
    if topology.num_nodes > 1:
        made["pto node"] = sharded("node")
    return made


def measure(
    shapes: Sequence[torch.Size],
    optimizer: tuple[type[Optimizer], dict[str, Any]],
    makers: dict[str, Make],
    topology: Topology,
    device: torch.device,
    *,
    repeats: int = 15,
    seconds: float = 20.0,
) -> Rows:
    """Return one row per method. A collective.

    Methods run one after the other, because the largest models fill the memory.

    Args:
        seconds: time limit per row.
    """
    rows = Rows()
    for way, make in makers.items():
        gc.collect()  # breaks the cycle of optimizer and hooks; two copies of VGG-19 do not fit into memory
        parameters = _parameters(shapes, device)
        made = make(*optimizer, parameters)
        for _ in range(2 * STEPS if way == "pto auto" else SETTLING):
            made.step()
        taken: list[float] = []
        while len(taken) < repeats and sum(taken) < seconds:
            taken.append(_step_seconds(made, device))
        rows.append({"ranks": topology.world_size, "way": way, **_row(made, parameters, taken, device)})
        del made, parameters
    return rows


def _step_seconds(optimizer: Optimizer, device: torch.device) -> float:
    """Return the time of a step on the slowest rank. A collective."""
    dist.barrier()
    begin = time.perf_counter()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return slowest(time.perf_counter() - begin, device).item()


def _row(made: Optimizer, parameters: list[nn.Parameter], taken: list[float], device: torch.device) -> dict[str, Any]:
    """Return the measurements of an optimizer. A collective."""
    sharded = getattr(getattr(made, "consolidate_state_dict", None), "__self__", None)
    return {
        "parameters": sum(p.numel() for p in parameters),
        "ms": median(taken) * 1e3,
        "fastest_ms": min(taken) * 1e3,
        "repeats": len(taken),
        "shared": isinstance(sharded, ShardedStep),
        "state_MB": slowest(state_bytes(made), device).item() / 1e6,
        "gathered_MB": (sharded._gather.nbytes if isinstance(sharded, ShardedStep) else 0) / 1e6,
    }


def measure_cases(
    topology: Topology, device: torch.device, _: float | None, cases: Sequence[tuple[str, str]], quick: bool
) -> Rows:
    """Return the rows of several (model, optimizer) pairs. A collective."""
    rows, makers = Rows(), ways(topology)
    for model, name in cases:
        if topology.rank == 0:
            print(f"{model}, {name}", flush=True)
        shapes = [shape for shape in shapes_of(model) if name != "Muon" or len(shape) == 2]
        limits: dict[str, Any] = {"repeats": 5, "seconds": 2.0} if quick else {}
        found = measure(shapes, optimizer_of(name), makers, topology, device, **limits)
        rows += [{"model": model, "optimizer": name, **row} for row in found]
    return rows


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of optimizer state on this rank."""
    inner = getattr(optimizer, "optim", optimizer)
    return sum(t.numel() * t.element_size() for s in inner.state.values() for t in s.values() if isinstance(t, Tensor))


def _parameters(shapes: Sequence[torch.Size], device: torch.device) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=g).to(device)) for shape in shapes]
    for p in made:
        p.grad = torch.randn(p.shape, generator=g).to(device)
    return made


def _make_free(step: ShardedStep) -> None:
    """Replace the gather, after the first steps, by a function that returns cached memory."""
    if step.steps == SETTLING:
        kept: dict[int, Tensor] = {}
        size = step.group.size
        step.communicator.gather = lambda share: kept.setdefault(share.numel(), share.repeat(size))  # type: ignore
        step.communicator.broadcast = lambda *_: lambda: None  # type: ignore


def compare(rows: Rows) -> None:
    """Add the ratio to the plain step of the case to each row."""
    by_case = {(r["model"], r["optimizer"], r["ranks"], r["way"]): r for r in rows}
    for row in rows:
        case = (row["model"], row["optimizer"], row["ranks"])
        plain = by_case[(*case, "plain")]
        row["faster"] = plain["ms"] / row["ms"]
        row["state share"] = row["state_MB"] / plain["state_MB"]
        saved = plain["ms"] - by_case[(*case, "pto compute")]["ms"] if row["way"] == "pto world" else 0.0
        row["break-even Gbit/s"] = row["gathered_MB"] * 8 / saved if saved > 0 else None


def table(rows: Rows) -> str:
    head = ("model", "optimizer", "ranks", "way", "ms", "faster", "state_MB", "state share", "break-even Gbit/s")
    return format_table(head, [[row[name] for name in head] for row in rows])


def plot(record: dict[str, Any], file: Path) -> None:
    """Draw bars for the largest number of ranks."""
    shown = [row for row in record["rows"] if row["ranks"] == max(r["ranks"] for r in record["rows"])]
    cases = list(dict.fromkeys((row["model"], row["optimizer"]) for row in shown))
    names = list(dict.fromkeys(row["way"] for row in shown))
    with figure(file) as (axes,):
        for offset, way in enumerate(names):
            bars = {(r["model"], r["optimizer"]): r["ms"] for r in shown if r["way"] == way}
            places = [i + offset / (len(names) + 1) for i in range(len(cases))]
            axes.bar(places, [bars.get(case, 0) for case in cases], 1 / (len(names) + 1), label=way)
        axes.set_xticks([i + 0.4 for i in range(len(cases))], [f"{m}\n{o}" for m, o in cases], fontsize="x-small")
        axes.margins(x=0.01)
        axes.set(yscale="log", ylabel="ms per step (median)", title=f"Optimizer step on {shown[0]['ranks']} ranks")


def main() -> None:
    names = [*OPTIMIZERS, *OF_TIMM]
    parser = parser_of(__doc__, quick="two optimizers of ResNet-18 on 2 and 4 ranks")
    parser.add_argument("--clusters", nargs="+", default=["1x1", "1x2", "2x2"], metavar="MxL")
    parser.add_argument("--models", nargs="+", default=["resnet50", "vgg19", "Transformer"], metavar="NAME")
    parser.add_argument("--optimizers", nargs="+", default=names, choices=names)
    options = parser.parse_args()
    if options.quick:
        options.models, options.optimizers, options.clusters = ["resnet18"], ["SGD", "AdamW"], ["1x2", "2x2"]
    cases = [(m, o) for m in options.models for o in options.optimizers if o != "Muon" or m == "Transformer"]
    rows = on_clusters(measure_cases, cases, options.quick, clusters=options.clusters)
    if rows is not None:
        compare(rows)
        write(options.out / "pto.json", {**surroundings("timm"), "rows": rows}, table(rows), plot)


if __name__ == "__main__":
    main()
