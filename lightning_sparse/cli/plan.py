"""`lightning-sparse plan`: predict the step time of each method on a given cluster, and recommend one of them.

The prediction is pure arithmetic. The communication time comes from `exchange.paths`, for buckets of DDP's default
size. C is the time of forward and backward on one device, and R the time of communication. A step takes C + R if
communication starts after backward (no overlap), and max(C, R) if it overlaps completely (perfect overlap).

Scaling efficiency is C / step: the throughput of P devices relative to P times the throughput of one device. It
excludes the optimizer step and data loading. A ring of P ranks has 2 (P - 1) latencies. NCCL's trees have fewer, so
with hundreds of ranks DDP is faster than predicted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lightning_sparse.cli import models
from lightning_sparse.cli.report import format_table, need, processor
from lightning_sparse.exchange import paths
from lightning_sparse.exchange.cost import MARGIN, kernel_costs
from lightning_sparse.exchange.paths import PATHS, Dense, Flat, TensorSpec
from lightning_sparse.exchange.rates import Link, Rates, rate
from lightning_sparse.gradients import HierConfig
from lightning_sparse.updates import UpdatesConfig

_OURS = {kind.name: kind for kind in PATHS if kind.reduces_shards}
UPDATES = {"updates": "sparse", "updates regional": "regional"}
"""Methods that exchange updates, after the optimizer, and the path of each."""
WAYS = ("ddp", "ddp16", *_OURS, *UPDATES)
"""The simplest first."""
_NAMES = {
    "ddp": "DDP",
    "ddp16": "DDP with 16-bit hook",
    "dense": "2-D dense",
    "dense16": "2-D dense 16-bit",
    "sparse": "mstopk_hier",
    "regional": "mstopk_hier regional",
    "updates": "mstopk_local",
    "updates regional": "mstopk_local regional",
}
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes, DDP's defaults
VALUES, UPDATE_VALUES = HierConfig().dtype, UpdatesConfig().dtype  # of a message
KEY = """2-D: reduces within each node first, then between nodes
% of dense16: traffic compared with 2-D dense 16-bit
applied %: upper bound of the entries that one step changes"""
MOST_PARAMETERS = 1e15
ADDED = 1 << 22  # elements of the vectors that --measure adds

COLOURS = {
    "ddp": "#8a8a8a",
    "ddp16": "#c9a227",
    "dense": "#3a6ea5",
    "dense16": "#7fb2dd",
    "sparse": "#d1495b",
    "regional": "#2e7d32",
}


@dataclass(frozen=True)
class HostCosts:
    """Computation costs, with free links, and their source."""

    rates: Rates
    source: str


_GPU_BYTE = 1 / 600e9  # seconds
V100 = HostCosts(
    Rates(
        Link(0.0, 0.0),
        Link(0.0, 0.0),
        add=_GPU_BYTE,
        select=13 * _GPU_BYTE,  # reads gradient and residual, writes residual
        scatter=64 * _GPU_BYTE,  # reads and writes a sector
        fill=4 * _GPU_BYTE,
        cast=30 * _GPU_BYTE,  # rounding: 18 bytes; summing and decoding: 12
        select_call=100e-6,
        cast_call=50e-6,
    ),
    source="assumed: 600 GB/s of GPU memory (an H200 was 5 times faster) and 0.1 ms of launches per bucket",
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model and a cluster.

    Args:
        numel: number of gradients.
        devices: devices per node.
        inter_gbps: rate of a node's link in Gbit/s per direction, shared by its devices.
        intra_gbps: rate at which a device receives inside its node, in Gbit/s.
        itemsize: bytes of a gradient; 4 also under automatic mixed precision.
        compute_s: time of forward and backward of one device's batch; None if unknown.
        inter_latency, intra_latency: latency of one step of a collective, in seconds.
    """

    numel: int
    devices: int
    inter_gbps: float
    intra_gbps: float
    itemsize: int = 4
    compute_s: float | None = None
    inter_latency: float = 30e-6
    intra_latency: float = 10e-6
    host: HostCosts = V100

    def __post_init__(self) -> None:
        for name in ("numel", "devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be an integer of at least 1.")
        for name in ("inter_gbps", "intra_gbps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a rate in Gbit/s, above 0.")
        if self.itemsize not in (2, 4):
            raise ValueError(f"itemsize={self.itemsize}: gradients have 4 bytes (fp32) or 2 (fp16, bf16).")
        if self.compute_s is not None and not 0 < self.compute_s < math.inf:
            raise ValueError(f"compute_s={self.compute_s} must be above 0; omit it if unknown.")

    @property
    def rates(self) -> Rates:
        """The rates for `exchange.paths`."""
        inter = Link(self.inter_latency, 8e-9 * self.devices / self.inter_gbps)
        intra = Link(self.intra_latency, 8e-9 / self.intra_gbps)
        return replace(self.host.rates, inter=inter, intra=intra)

    @property
    def buckets(self) -> int:
        """Number of DDP buckets."""
        return 1 + max(0, math.ceil((self.numel * self.itemsize - FIRST_BUCKET) / BUCKET))


@dataclass(frozen=True)
class Row:
    """One path on a number of nodes. The last four fields are None if compute time is unknown."""

    nodes: int
    path: str
    """One of `WAYS`."""
    selects: bool
    """Whether it sends only the largest entries."""
    density: float
    effective_density: float
    """Upper bound of the share of entries that a step applies."""
    sync_s: float
    node_bytes: float
    """Bytes that a node receives from other nodes per step."""
    step_s: float | None = None
    overlapped_step_s: float | None = None
    efficiency: float | None = None
    overlapped_efficiency: float | None = None

    @property
    def name(self) -> str:
        return _NAMES[self.path] + (f" {100 * self.density:.3g}%" if self.selects else "")


def predict(scenario: Scenario, nodes: int, way: str, density: float = 1.0) -> Row:
    """Predict one method. On one node, every method is an all-reduce.

    Raises:
        ValueError: if there is no node, or the density is not in (0, 1].
    """
    if nodes < 1:
        raise ValueError(f"nodes={nodes} must be at least 1.")
    if not 0 < density <= 1:
        raise ValueError(f"density={density} must be in (0, 1]: the fraction of entries to send.")
    if way in UPDATES and nodes > 1:
        return _of_updates(scenario, nodes, way, density)
    work = TensorSpec(nodes, scenario.devices, -(-scenario.numel // scenario.buckets), scenario.itemsize)
    path = path_of(way, work, density)
    sync_s, node_bytes = scenario.buckets * path.seconds(scenario.rates), 0.0
    if nodes > 1:
        node_bytes = scenario.devices * scenario.buckets * path.bytes()
    row = (nodes, way, _selects(way), density, path.applied / work.shard_numel, sync_s, node_bytes)
    if scenario.compute_s is None:
        return Row(*row)
    steps = scenario.compute_s + sync_s, max(scenario.compute_s, sync_s)
    return Row(*row, *steps, *(scenario.compute_s / step for step in steps))


def _of_updates(scenario: Scenario, nodes: int, way: str, density: float) -> Row:
    """Predict the exchange of updates: all parameters in one exchange, which overlaps with the whole next step.

    Inside the node, gradients are averaged and updated slices are gathered.
    """
    rates, devices = scenario.rates, scenario.devices
    work = TensorSpec(nodes, devices, scenario.numel)
    path = _OURS[UPDATES[way]].of(work, density, UPDATE_VALUES) or Dense(work)
    between = path.seconds_between(rates)
    sliced = rates.intra.seconds(devices - 1, (devices - 1) * path.work.shard_numel * 4)
    inside = path.seconds(rates) - between + sliced
    row = (nodes, way, True, density, path.applied / path.work.shard_numel)
    compute = scenario.compute_s
    if compute is None:
        return Row(*row, inside + between, devices * path.bytes())
    after_backward = path.seconds_of_kernels(rates) + sliced
    steps = max(compute + inside, between), max(max(compute, inside - after_backward) + after_backward, between)
    return Row(*row, inside + between, devices * path.bytes(), *steps, *(compute / step for step in steps))


def path_of(way: str, work: TensorSpec, density: float) -> paths.Path:
    """The path of each bucket."""
    if work.num_nodes == 1:
        return Dense(work)  # one ring, inside the node
    if way in _OURS:
        return _OURS[way].of(work, density, VALUES) or Dense(work)
    return Flat(work._replace(itemsize=2) if way == "ddp16" else work)


def rows(scenario: Scenario, counts: Iterable[int], densities: Sequence[float]) -> list[Row]:
    """Predict every method for every node count; methods that select also for every density."""
    ways = [(way, density) for way in WAYS for density in (densities if _selects(way) else [1.0])]
    return [predict(scenario, nodes, way, density) for nodes in counts for way, density in ways]


def node_counts(nodes: int) -> list[int]:
    """Powers of two up to four times ``nodes``, and ``nodes`` itself.

    >>> node_counts(6)
    [1, 2, 4, 6, 8, 16]
    """
    return sorted({*(1 << i for i in range((4 * nodes).bit_length()) if 1 << i <= 4 * nodes), nodes})


def simplest(found: Sequence[Row], *, overlap: bool) -> Row:
    """Return the simplest method that no other method beats by more than the strategy's margin.

    In order of simplicity: DDP, its 16-bit hook, 2-D dense, 2-D dense with 16-bit values, sparse. Excludes regional,
    which applies fewer entries than sparse at the same density, so that their times are not comparable. Also excludes
    updates, which are another algorithm.
    """
    order = [row for way in WAYS for row in found if row.path == way and _is_comparable(way)]
    best = min(_seconds(row, overlap) for row in order)
    return next(row for row in order if MARGIN * _seconds(row, overlap) <= best)


def recommend(found: Sequence[Row], compute_s: float | None) -> str:
    """Recommend a method for AdamW and one for SGD, from the rows of one node count and one density."""
    if found[0].nodes == 1:
        return "Use plain DDP: a single node has no traffic between nodes."
    return (
        f"{_said('With AdamW, use', found, compute_s, _for_adam)}\n{_said('With SGD, use', found, compute_s, simplest)}"
    )


def _said(use: str, found: Sequence[Row], compute_s: float | None, choose: Callable[..., Row]) -> str:
    nodes = found[0].nodes
    plain, least = choose(found, overlap=False), choose(found, overlap=True)
    without = _compared(found, plain, overlap=False)
    if compute_s is None:
        return (
            f"{use} {_advice(plain)}. Predicted communication per step: {without}. For whole steps, add --compute-ms."
        )
    if plain.path == least.path:
        hidden = _compared(found, plain, overlap=True)
        bounds = without if without == hidden else f"{without} without overlap, {hidden} with perfect overlap"
        return f"{use} {_advice(plain)} on {nodes} nodes. Predicted step: {bounds}."
    return (
        f"{use} {_advice(least)} on {nodes} nodes if communication overlaps with backward. If not, use "
        f"{_advice(plain)}: predicted step {without}. Measure both."
    )


def _for_adam(found: Sequence[Row], *, overlap: bool) -> Row:
    """Return updates if they are faster than all dense methods, otherwise the simplest dense method.

    For Adam and other optimizers that divide by the size of recent gradients. With sparse gradients, they give a worse
    loss than the single-node baseline.
    """
    updates = next(row for row in found if row.path == "updates")
    whole = simplest([row for row in found if not row.selects], overlap=overlap)
    return whole if MARGIN * _seconds(whole, overlap) <= _seconds(updates, overlap) else updates


GAPS = (
    (30, "Runs that sent each entry as often ended 1% to 4% above dense training"),
    (10, "Runs that sent each entry as often ended about 7% above dense training"),
    (4, "Runs that sent each entry as often ended 9% to 12% above dense training, and less with a higher density"),
    (0, "This is too few, so raise the density: runs with 4 to 10 times ended 9% to 12% above dense training"),
)
"""Loss of a small Transformer on four nodes, by how often an entry was sent (docs/results.md, "Loss for bits")."""


def expect(found: Sequence[Row], steps: int) -> str:
    """Return how often each entry of the updates is sent in so many steps, and the measured effect on the loss.

    Raises:
        ValueError: for a run without steps.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1, the optimizer steps of the whole run.")
    updates = next(row for row in found if row.path == "updates")
    times = steps * updates.density
    seen = next(text for least, text in GAPS if times >= least)
    return (
        f"In {steps:,} steps, {updates.name} sends each entry {times:.3g} times on average. {seen} (a small "
        f"Transformer with AdamW on 4 nodes; one run on 16 nodes ended twice as far above)."
    )


def _selects(way: str) -> bool:
    return way in UPDATES or (way in _OURS and _OURS[way].residual_kind == "entries")


def _is_comparable(way: str) -> bool:
    return way not in UPDATES and (way not in _OURS or _OURS[way].in_auto)


def _advice(row: Row) -> str:
    return {
        "ddp": "plain DDP",
        "ddp16": "DDP with the bf16 hook",
        "dense": "strategy='mstopk_hier' with exchange='dense'",
        "dense16": "strategy='mstopk_hier' with exchange='dense16'",
        "updates": f"strategy='mstopk_local' with density={row.density:g}",
    }.get(row.path, f"strategy='mstopk_hier' with density={row.density:g}")


def _compared(found: Sequence[Row], row: Row, *, overlap: bool) -> str:
    """Return the time of a row, and the times of DDP and the fastest dense method, or of DDP's best alternative."""
    if row.path == "ddp":
        shown = [_fastest([each for each in found if each.path != "ddp" and _is_comparable(each.path)], overlap)]
    else:
        ddp = next(each for each in found if each.path == "ddp")
        dense = _fastest([each for each in found if not each.selects], overlap)
        shown = [ddp] if dense in (ddp, row) else [ddp, dense]
    return f"{_ms(row, overlap)} ({'; '.join(f'{each.name}: {_ms(each, overlap)}' for each in shown)})"


def _fastest(found: Sequence[Row], overlap: bool) -> Row:
    return min(found, key=lambda row: _seconds(row, overlap))


def _ms(row: Row, overlap: bool) -> str:
    number = 1e3 * _seconds(row, overlap)
    return f"{number:.3g} ms" if number < 1e3 else f"{number:,.0f} ms"


def _seconds(row: Row, overlap: bool) -> float:
    step = row.overlapped_step_s if overlap else row.step_s
    return row.sync_s if step is None else step


def assumptions(scenario: Scenario) -> list[str]:
    """The assumptions of a prediction, one per line."""
    host, rates = scenario.host, scenario.host.rates
    inside = f", inside {scenario.intra_gbps:g} Gbit/s per device" if scenario.devices > 1 else ""
    return [
        f"{scenario.numel:,} gradients of {scenario.itemsize} bytes in {scenario.buckets} buckets; "
        f"{scenario.devices} devices per node",
        f"between nodes {scenario.inter_gbps:g} Gbit/s per node{inside}; "
        f"latency {1e6 * scenario.inter_latency:g} and {1e6 * scenario.intra_latency:g} us (assumed)",
        f"selection {rate(rates.select, 'elements')}, scatter {rate(rates.scatter, 'pairs')}: {host.source}",
    ]


# -- measured on this machine ------------------------------------------------------------------------------------------


def device_here() -> torch.device:
    """The current GPU if there is one, otherwise the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def describe(device: torch.device) -> str:
    """Name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {torch.get_num_threads()} thread(s)"


def seconds(call: Callable[[], object], device: torch.device, repeats: int = 5, limit_s: float = 20.0) -> float:
    """Median time of `repeats` calls after a warm-up call. Stops early after `limit_s` seconds."""
    taken: list[float] = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
        if sum(taken) > limit_s:
            break
    return median(taken[1:] or taken)


def compute_seconds(model: models.Model, batch: int, device: torch.device) -> float:
    """Time forward and backward of random samples, in fp32 on a CPU and with 16-bit autocast on a GPU.

    Raises:
        ValueError: if the batch is empty.
    """
    if batch < 1:
        raise ValueError(f"batch={batch} must be at least 1, the number of samples per device.")
    with device:
        network = model.build()
        samples = torch.randn(batch, *model.input_shape)
    dtype = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float16

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=device.type == "cuda"):
            out = network(samples)
            loss = sum(part.float().mean() for part in (out if isinstance(out, tuple) else (out,)))
        network.zero_grad()
        loss.backward()

    return seconds(step, device)


def host_costs(device: torch.device) -> HostCosts:
    """Measure selection, scatter and add on this device."""
    x, y = torch.ones(ADDED, device=device), torch.ones(ADDED, device=device)
    add = seconds(lambda: x.add_(y), device) / (4 * ADDED)
    costs = kernel_costs(lambda call: seconds(call, device), device, VALUES, ADDED)
    rates = replace(costs, add=add, scatter=max(costs.scatter, 1e-12))
    return HostCosts(rates, f"measured on {describe(device)}")


# -- a plot ------------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Row], title: str, file: Path) -> None:
    """Plot the rows of one density, or the communication time alone if compute time is unknown.

    Raises ValueError if matplotlib is not installed, or does not support the file's suffix.
    """
    timed = all(row.step_s is not None for row in rows)
    need("matplotlib", "a plot")
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11 if timed else 6.5, 4.8), layout="constrained")
    axes = drawn.subplots(1, 1 + timed, squeeze=False)[0]
    if timed:
        _lines(axes[0], rows, "-", lambda row: 1e3 * (row.step_s or 0))
        _lines(axes[0], rows, ":", lambda row: 1e3 * (row.overlapped_step_s or 0))
        _lines(axes[1], rows, "-", lambda row: 100 * (row.efficiency or 0))
        _lines(axes[1], rows, ":", lambda row: 100 * (row.overlapped_efficiency or 0))
        axes[0].set(ylabel="ms per step", ylim=(0, None), title="step time (lower is better)")
        axes[1].set(ylabel="% of devices' own throughput", ylim=(0, 103), title="scaling efficiency (higher is better)")
        for style, label in (("-", "without overlap"), (":", "perfect overlap with backward")):
            axes[0].plot([], [], style, color="black", label=label)
    else:
        _lines(axes[0], rows, "-", lambda row: 1e3 * row.sync_s)
        axes[0].set(ylabel="communication, ms per step", yscale="log", title="without compute, lower is better")
    counts = sorted({row.nodes for row in rows})
    for each in axes:
        each.set_xscale("log", base=2)
        each.set_xticks(counts, [f"{nodes}" for nodes in counts])
        each.set_xlabel("nodes")
        each.grid(alpha=0.3)
    drawn.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=4)
    drawn.suptitle(f"predicted: {title}", fontsize="medium")
    drawn.savefig(file)


def _lines(axes: Any, rows: Sequence[Row], style: str, value: Callable[[Row], float]) -> None:
    for path, colour in COLOURS.items():
        own = sorted((row for row in rows if row.path == path), key=lambda row: row.nodes)
        label = own[0].name if style == "-" else None
        values = list(map(value, own))
        axes.plot([row.nodes for row in own], values, style, marker="o", markersize=3, color=colour, label=label)


# -- the command -------------------------------------------------------------------------------------------------------


def declare(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = (
        "Estimate the communication time, step time, and traffic of DDP and of the strategies of this package on a "
        "cluster. Runs nothing unless you give --measure."
    )
    parser.epilog = (
        "Example: lightning-sparse plan --model resnet50 --nodes 16 --devices 8 --inter-gbps 25 --intra-gbps 1200 "
        "--compute-ms 107"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="NAME", help=f"{', '.join(models.SIZES)}, or any model of torchvision or timm")
    what.add_argument("--parameters", type=float, metavar="N", help="number of parameters, for example 25.6e6")
    parser.add_argument("--nodes", type=int, required=True, metavar="M", help="number of nodes")
    parser.add_argument("--devices", type=int, required=True, metavar="L", help="devices per node")
    inter = "bandwidth of one node's link, in Gbit/s per direction"
    parser.add_argument("--inter-gbps", type=float, required=True, metavar="R", help=inter)
    intra = "bandwidth of one device inside its node, in Gbit/s (required if --devices > 1)"
    parser.add_argument("--intra-gbps", type=float, metavar="R", help=intra)
    compared = "densities to compare (default 0.01 0.001)"
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.001], help=compared)
    steps = "optimizer steps of the whole run: shows how often each entry is sent, and the effect on the loss"
    parser.add_argument("--steps", type=int, metavar="N", help=steps)
    size = "bytes per gradient (default 4, also with automatic mixed precision)"
    parser.add_argument("--bytes-per-gradient", type=int, default=4, choices=(2, 4), help=size)
    parser.add_argument("--compute-ms", type=float, metavar="T", help="forward and backward time of one device's batch")
    parser.add_argument(
        "--measure", action="store_true", help="measure computation and selection on this machine's device"
    )
    parser.add_argument(
        "--batch", type=int, default=32, metavar="B", help="batch size per device for --measure (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print only JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot the step time over the number of nodes (.svg, .png, or .pdf)"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    scenario, notes = _scenario(arguments)
    found = rows(scenario, node_counts(arguments.nodes), arguments.density)
    here = [row for row in found if row.nodes == arguments.nodes]
    shown = [row for row in found if not row.selects or row.density == arguments.density[0]]
    compared = [row for row in shown if row.nodes == arguments.nodes]
    advice = recommend(compared, scenario.compute_s)
    if arguments.nodes > 1:
        hint = "For the effect on the loss, add --steps."
        advice += "\n" + (hint if arguments.steps is None else expect(compared, arguments.steps))
    if arguments.plot is not None:
        what = arguments.model or f"{scenario.numel:,} gradients"
        compute = "" if scenario.compute_s is None else f", {1e3 * scenario.compute_s:.4g} ms of compute"
        title = f"{what}{compute}, {arguments.devices} devices per node, {arguments.inter_gbps:g} Gbit/s between nodes"
        draw(shown, title, arguments.plot)
        print(f"wrote {arguments.plot}", file=sys.stderr)
    if arguments.json:
        result = {"scenario": asdict(scenario), "assumptions": notes, "recommendation": advice}
        print(json.dumps({**result, "rows": [asdict(row) for row in found]}, indent=2))
        return 0
    print("\n".join(notes))
    print(f"\n{arguments.nodes} nodes, per step:\n{_by_path(here, arguments.steps)}\n{KEY}")
    timed = scenario.compute_s is not None
    what = "step in ms without and with perfect overlap" if timed else "communication in ms"
    print(f"\nBy number of nodes, {what}:\n{_by_nodes(shown)}")
    print(f"\n{advice}")
    return 0


def _scenario(arguments: argparse.Namespace) -> tuple[Scenario, list[str]]:
    """The scenario and its assumptions."""
    if arguments.intra_gbps is None and arguments.devices > 1:
        raise ValueError(
            f"--intra-gbps is missing: the {arguments.devices} devices of a node exchange gradients. Give the "
            f"bandwidth of one device inside its node, for example 1200 with NVLink or 100 with PCIe."
        )
    if arguments.parameters is not None and not 1 <= arguments.parameters <= MOST_PARAMETERS:
        raise ValueError(
            f"--parameters {arguments.parameters:g} must be the number of parameters, from 1 to {MOST_PARAMETERS:g}: "
            f"for example 25.6e6."
        )
    model = None
    if arguments.model is not None and (arguments.measure or arguments.model not in models.SIZES):
        model = models.find(arguments.model)
    host, compute_s, note = V100, None, "compute time unknown: communication only"
    if arguments.compute_ms is not None:
        compute_s, note = 1e-3 * arguments.compute_ms, f"forward and backward {arguments.compute_ms:g} ms (given)"
    if arguments.measure:
        device = device_here()
        print(f"measuring on {describe(device)} ...", file=sys.stderr)
        host = host_costs(device)
        if compute_s is None and model is not None:
            compute_s = compute_seconds(model, arguments.batch, device)
            note = f"forward and backward {1e3 * compute_s:.4g} ms, measured on {describe(device)}, "
            note += f"batch {arguments.batch}"
            if device.type == "cpu":
                note += "; for nodes with GPUs, pass --compute-ms instead"
    if compute_s is None:
        note += "; scaling efficiency needs --compute-ms" + (" or --measure" if model is not None else "")
    scenario = Scenario(
        numel=models.SIZES.get(arguments.model or "") or int(arguments.parameters if model is None else model.numel),
        devices=arguments.devices,
        inter_gbps=arguments.inter_gbps,
        intra_gbps=arguments.inter_gbps if arguments.intra_gbps is None else arguments.intra_gbps,
        itemsize=arguments.bytes_per_gradient,
        compute_s=compute_s,
        host=host,
    )
    return scenario, [*assumptions(scenario), note]


def _by_path(rows: list[Row], steps: int | None) -> str:
    head = ["", "comm ms", "MB received per node", "% of dense16", "applied %"]
    if steps is not None:
        head.append("times sent")
    dense = next(row.node_bytes for row in rows if row.path == "dense16") or 1.0
    if rows[0].step_s is not None:
        head += ["step ms", "overlapped ms", "efficiency %", "overlapped %"]
    cells = []
    for row in rows:
        seconds, shares = (row.step_s, row.overlapped_step_s), (row.efficiency, row.overlapped_efficiency)
        numbers = [1e3 * row.sync_s, 1e-6 * row.node_bytes, 100 * row.node_bytes / dense, 100 * row.effective_density]
        if steps is not None:
            numbers.append(steps * row.density)
        numbers += [1e3 * each for each in seconds if each is not None]
        numbers += [100 * each for each in shares if each is not None]
        cells.append([row.name, *(f"{number:.4g}" if number < 1e4 else f"{number:,.0f}" for number in numbers)])
    return format_table(head, cells)


def _by_nodes(rows: list[Row]) -> str:
    names = list(dict.fromkeys(row.name for row in rows))
    found = {(row.nodes, row.name): row for row in rows}
    counts = list(dict.fromkeys(row.nodes for row in rows))
    cells = [[f"{count}", *(_cell(found[count, name]) for name in names)] for count in counts]
    return format_table(["nodes", *names], cells)


def _cell(row: Row) -> str:
    if row.step_s is None or row.overlapped_step_s is None:
        return f"{1e3 * row.sync_s:.1f}"
    return f"{1e3 * row.step_s:.1f} / {1e3 * row.overlapped_step_s:.1f}"
