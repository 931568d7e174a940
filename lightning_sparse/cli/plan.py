"""`lightning-sparse plan`: predict the step time of each method on a given cluster, and recommend a method.

With compute time C and communication time R, a step takes C + R if communication starts after backward, and max(C, R)
if it overlaps completely. Scaling efficiency is C / step, without the optimizer step and data loading. Rings of P ranks
have 2 (P - 1) latencies; NCCL's trees have fewer, so with hundreds of ranks DDP is faster than predicted.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_sparse.cli import check_new_file, format_table, import_optional
from lightning_sparse.exchange import paths
from lightning_sparse.exchange.cost import MARGIN
from lightning_sparse.exchange.paths import PATHS, Dense, Flat, TensorSpec
from lightning_sparse.exchange.rates import Link, Rates, rate
from lightning_sparse.gradients import HierConfig
from lightning_sparse.updates import UpdatesConfig

METHODS = {
    "ddp": "DDP",
    "ddp16": "DDP with 16-bit hook",
    "dense": "2-D dense",
    "dense16": "2-D dense 16-bit",
    "sparse": "mstopk_hier",
    "regional": "mstopk_hier regional",
    "updates": "mstopk_local",
    "updates regional": "mstopk_local regional",
}
"""Names of the methods in tables, the simplest method first."""
_REDUCERS = {kind.name: kind for kind in PATHS if kind.reduces_shards}
_UPDATE_PATHS = {"updates": "sparse", "updates regional": "regional"}
"""Paths of the methods that exchange updates, after the optimizer step."""
_ADVICE = {
    "ddp": "plain DDP",
    "ddp16": "DDP with the bf16 hook",
    "dense": "strategy='mstopk_hier' with exchange='dense'",
    "dense16": "strategy='mstopk_hier' with exchange='dense16'",
    "sparse": "strategy='mstopk_hier' with density={density:g}",
    "updates": "strategy='mstopk_local' with density={density:g}",
}
KEY = """2-D: reduces within each node first, then between nodes
% of dense16: traffic compared with 2-D dense 16-bit
efficiency %: compute time / step time, without overlap; overlapped %: the same with perfect overlap
times sent: how often the run sends each entry (steps x density)
applied %: upper bound of the entries that one step changes"""
COLORS = {
    "ddp": "#8a8a8a",
    "ddp16": "#c9a227",
    "dense": "#3a6ea5",
    "dense16": "#7fb2dd",
    "sparse": "#d1495b",
    "regional": "#2e7d32",
}
SIZES = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "vgg19": 143_667_240,
    "vit_b_16": 86_567_656,
    "convnext_tiny": 28_589_128,
    "efficientnet_b0": 5_288_548,
    "bert-base": 109_482_240,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
}
"""Parameters of models that need no other package."""
MAX_PARAMETERS = 1e15
PLOT_FORMATS = (".svg", ".png", ".pdf")
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20  # DDP's defaults

_GPU_BYTE = 1 / 600e9  # seconds
GPU_COSTS = Rates(
    Link(0.0, 0.0),
    Link(0.0, 0.0),
    add=_GPU_BYTE,
    select=13 * _GPU_BYTE,  # reads gradient and residual, writes residual
    scatter=64 * _GPU_BYTE,  # reads and writes a sector
    fill=4 * _GPU_BYTE,
    cast=30 * _GPU_BYTE,  # rounding: 18 bytes; summing and decoding: 12
    select_call=100e-6,
    cast_call=50e-6,
)
"""Costs of the kernels on a V100, with free links."""
GPU_SOURCE = "assumed: 600 GB/s of GPU memory (an H200 was 5 times faster) and 0.1 ms of launches per bucket"


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

    def __post_init__(self) -> None:
        for name, is_valid, rule in (
            ("numel", self.numel >= 1, "an integer of at least 1"),
            ("devices", self.devices >= 1, "an integer of at least 1"),
            ("inter_gbps", 0 < self.inter_gbps < math.inf, "a rate in Gbit/s, above 0"),
            ("intra_gbps", 0 < self.intra_gbps < math.inf, "a rate in Gbit/s, above 0"),
            ("itemsize", self.itemsize in (2, 4), "the bytes of a gradient: 4 (fp32) or 2 (fp16, bf16)"),
            ("compute_s", self.compute_s is None or 0 < self.compute_s < math.inf, "above 0; omit it if unknown"),
        ):
            if not is_valid:
                raise ValueError(f"{name}={getattr(self, name)} must be {rule}.")

    @property
    def rates(self) -> Rates:
        inter = Link(self.inter_latency, 8e-9 * self.devices / self.inter_gbps)
        intra = Link(self.intra_latency, 8e-9 / self.intra_gbps)
        return replace(GPU_COSTS, inter=inter, intra=intra)

    @property
    def buckets(self) -> int:
        return 1 + max(0, math.ceil((self.numel * self.itemsize - FIRST_BUCKET_BYTES) / BUCKET_BYTES))

    def assumptions(self) -> list[str]:
        inside = f", inside {self.intra_gbps:g} Gbit/s per device" if self.devices > 1 else ""
        if self.compute_s is None:
            compute = "compute time unknown: communication only; scaling efficiency needs --compute-ms"
        else:
            compute = f"forward and backward {1e3 * self.compute_s:g} ms (given)"
        return [
            f"{self.numel:,} gradients of {self.itemsize} bytes in {self.buckets} buckets; "
            f"{self.devices} device(s) per node",
            f"between nodes {self.inter_gbps:g} Gbit/s per node{inside}; "
            f"latency {1e6 * self.inter_latency:g} and {1e6 * self.intra_latency:g} us (assumed)",
            f"selection {rate(GPU_COSTS.select, 'elements')}, scatter {rate(GPU_COSTS.scatter, 'pairs')}: {GPU_SOURCE}",
            compute,
        ]


@dataclass(frozen=True)
class Row:
    """One method on a number of nodes. The last four fields are None if compute time is unknown."""

    nodes: int
    path: str
    """One of `METHODS`."""
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
        return METHODS[self.path] + (f" {100 * self.density:.3g}%" if self.selects else "")

    def seconds(self, overlap: bool) -> float:
        """Return the time of a step, or of its communication if compute time is unknown."""
        step = self.overlapped_step_s if overlap else self.step_s
        return self.sync_s if step is None else step


def predict(scenario: Scenario, nodes: int, method: str, density: float = 1.0) -> Row:
    if nodes < 1:
        raise ValueError(f"nodes={nodes} must be at least 1.")
    if not 0 < density <= 1:
        raise ValueError(f"density={density} must be in (0, 1]: the fraction of entries to send.")
    rates, devices, compute = scenario.rates, scenario.devices, scenario.compute_s
    if method in _UPDATE_PATHS and nodes > 1:
        # All parameters in one exchange, which overlaps with the whole next step. Inside the node, gradients are
        # averaged before the optimizer step, and updated slices gathered after it.
        work = TensorSpec(nodes, devices, scenario.numel)
        path = _REDUCERS[_UPDATE_PATHS[method]].of(work, density, UpdatesConfig().dtype) or Dense(work)
        work = path.work
        between = path.seconds_between(rates)
        gather = rates.intra.seconds(devices - 1, (devices - 1) * work.shard_numel * 4)
        inside = path.seconds(rates) - between + gather
        sync_s, node_bytes = inside + between, devices * path.bytes()
        after_backward = path.seconds_of_kernels(rates) + gather
        if compute is not None:
            step_s = max(compute + inside, between)
            overlapped_s = max(max(compute, inside - after_backward) + after_backward, between)
    else:
        work = TensorSpec(nodes, devices, -(-scenario.numel // scenario.buckets), scenario.itemsize)
        path = path_of(method, work, density)
        sync_s = scenario.buckets * path.seconds(rates)
        node_bytes = devices * scenario.buckets * path.bytes() if nodes > 1 else 0.0
        if compute is not None:
            step_s, overlapped_s = compute + sync_s, max(compute, sync_s)
    row = Row(nodes, method, _selects(method), density, path.applied / work.shard_numel, sync_s, node_bytes)
    if compute is None:
        return row
    efficiency, overlapped = compute / step_s, compute / overlapped_s
    return replace(
        row, step_s=step_s, overlapped_step_s=overlapped_s, efficiency=efficiency, overlapped_efficiency=overlapped
    )


def path_of(method: str, work: TensorSpec, density: float) -> paths.Path:
    if work.num_nodes == 1:
        # on one node, every method is an all-reduce
        return Dense(work)  # one ring, inside the node
    if method in _REDUCERS:
        return _REDUCERS[method].of(work, density, HierConfig().dtype) or Dense(work)
    return Flat(work._replace(itemsize=2) if method == "ddp16" else work)


def predict_all(scenario: Scenario, counts: Iterable[int], densities: Sequence[float]) -> list[Row]:
    methods = [(method, density) for method in METHODS for density in (densities if _selects(method) else [1.0])]
    return [predict(scenario, nodes, method, density) for nodes in counts for method, density in methods]


def node_counts(nodes: int) -> list[int]:
    """Return powers of two up to four times ``nodes``, and ``nodes`` itself.

    >>> node_counts(6)
    [1, 2, 4, 6, 8, 16]
    """
    return sorted({*(1 << i for i in range((4 * nodes).bit_length()) if 1 << i <= 4 * nodes), nodes})


def _selects(method: str) -> bool:
    return method in _UPDATE_PATHS or (method in _REDUCERS and _REDUCERS[method].residual_kind == "entries")


# -- the recommendation ------------------------------------------------------------------------------------------------


def simplest(rows: Sequence[Row], *, overlap: bool) -> Row:
    """Return the simplest method that no other method beats by more than the strategy's margin."""
    # Exclude updates, which are another algorithm. Exclude regional, which applies fewer entries than sparse at the
    # same density, so that their times are not comparable.
    methods = [name for name in METHODS if name not in _UPDATE_PATHS]
    methods = [name for name in methods if name not in _REDUCERS or _REDUCERS[name].in_auto]
    in_order = [row for method in methods for row in rows if row.path == method]
    best = min(row.seconds(overlap) for row in in_order)
    return next(row for row in in_order if MARGIN * row.seconds(overlap) <= best)


def _for_adam(rows: Sequence[Row], *, overlap: bool) -> Row:
    updates = next(row for row in rows if row.path == "updates")
    # With sparse gradients, optimizers that divide by the size of recent gradients give a worse loss than the
    # single-node baseline.
    dense = simplest([row for row in rows if not row.selects], overlap=overlap)
    return dense if MARGIN * dense.seconds(overlap) <= updates.seconds(overlap) else updates


def recommend(rows: Sequence[Row], compute_s: float | None) -> str:
    """Recommend a method for AdamW and one for SGD, from the rows of one node count and one density."""
    if rows[0].nodes == 1:
        return "Use plain DDP: a single node has no traffic between nodes."
    ddp = next(row for row in rows if row.path == "ddp")

    def predicted(row: Row, overlap: bool) -> str:
        ms, factor = 1e3 * row.seconds(overlap), ddp.seconds(overlap) / row.seconds(overlap)
        compared = "" if row is ddp else f" ({factor:.2g} times as fast as DDP)"
        return (f"{ms:.3g} ms" if ms < 1e3 else f"{ms:,.0f} ms") + compared

    sentences = []
    for optimizer, choose in (("AdamW", _for_adam), ("SGD", simplest)):
        row, overlapped = choose(rows, overlap=False), choose(rows, overlap=True)
        advice = _ADVICE[row.path].format(density=row.density)
        if compute_s is None:
            times = f"Predicted communication per step: {predicted(row, False)}. For whole steps, add --compute-ms."
        else:
            times = (
                f"Predicted step: {predicted(row, False)} without overlap, {predicted(overlapped, True)} with "
                f"perfect overlap."
            )
        if row.path != overlapped.path:
            with_overlap = _ADVICE[overlapped.path].format(density=overlapped.density)
            advice = f"{with_overlap} if communication overlaps with backward, otherwise {advice}; measure both"
        sentences.append(f"With {optimizer}, use {advice}. {times}")
    return "\n".join(sentences)


QUALITY_LOSS = (
    (30, "Runs that sent each entry as often ended 1% to 4% above dense training"),
    (10, "Runs that sent each entry as often ended about 7% above dense training"),
    (4, "Runs that sent each entry as often ended 9% to 12% above dense training, and less with a higher density"),
    (0, "This is too few, so raise the density: runs with 4 to 10 times ended 9% to 12% above dense training"),
)
"""Loss of a small Transformer on four nodes, by how often an entry was sent (docs/results.md, "Loss for bits")."""


def expected_loss(rows: Sequence[Row], steps: int) -> str:
    """Return how often a run sends each entry of the updates, and the measured effect on loss."""
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1, the optimizer steps of the whole run.")
    updates = next(row for row in rows if row.path == "updates")
    times = steps * updates.density
    effect = next(text for lowest, text in QUALITY_LOSS if times >= lowest)
    return (
        f"In {steps:,} steps, {updates.name} sends each entry {times:.3g} times on average. {effect} (a small "
        f"Transformer with AdamW on 4 nodes; one run on 16 nodes ended twice as far above)."
    )


# -- models by name ----------------------------------------------------------------------------------------------------


def parameter_shapes(name: str) -> list[torch.Size]:
    """Return the shapes of a model's trainable parameters, from torchvision or timm, without downloads."""
    names: list[str] = []
    create: Callable[[str], torch.nn.Module] | None = None
    with suppress(ImportError):
        from torchvision import models

        names = models.list_models(module=models)
        create = models.get_model if name in names else None
    if create is None:
        with suppress(ImportError):
            import timm

            names = names + timm.list_models()
            create = timm.create_model if name in names else None
    if create is not None:
        with torch.device("meta"):  # no memory, no weights
            return [p.shape for p in create(name).parameters() if p.requires_grad]
    if not names:
        raise ValueError(
            f"model={name!r} needs torchvision or timm, and neither is installed: "
            f"pip install torchvision, give --parameters instead, or name one of {', '.join(SIZES)}."
        )
    close = difflib.get_close_matches(name, dict.fromkeys(names), n=4)
    hint = f"Did you mean {' or '.join(close)}?" if close else "See torchvision.models.list_models()."
    raise ValueError(f"model={name!r} is not a classifier of torchvision or timm. {hint} Or give --parameters instead.")


# -- a plot ------------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Row], title: str, file: Path) -> None:
    timed = all(row.step_s is not None for row in rows)
    import_optional("matplotlib", "a plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11 if timed else 6.5, 4.8), layout="constrained")
    axes = figure.subplots(1, 1 + timed, squeeze=False)[0]

    def plot(axis: Any, style: str, value: Callable[[Row], float]) -> None:
        for method, color in COLORS.items():
            line = sorted((row for row in rows if row.path == method), key=lambda row: row.nodes)
            label = line[0].name if style == "-" else None
            nodes, values = [row.nodes for row in line], list(map(value, line))
            axis.plot(nodes, values, style, marker="o", markersize=3, color=color, label=label)

    if timed:
        plot(axes[0], "-", lambda row: 1e3 * (row.step_s or 0))
        plot(axes[0], ":", lambda row: 1e3 * (row.overlapped_step_s or 0))
        plot(axes[1], "-", lambda row: 100 * (row.efficiency or 0))
        plot(axes[1], ":", lambda row: 100 * (row.overlapped_efficiency or 0))
        axes[0].set(ylabel="ms per step", ylim=(0, None), title="step time (lower is better)")
        axes[1].set(ylabel="% of devices' own throughput", ylim=(0, 103), title="scaling efficiency (higher is better)")
        for style, label in (("-", "without overlap"), (":", "perfect overlap with backward")):
            axes[0].plot([], [], style, color="black", label=label)
    else:
        plot(axes[0], "-", lambda row: 1e3 * row.sync_s)
        axes[0].set(ylabel="communication, ms per step", yscale="log", title="without compute, lower is better")
    counts = sorted({row.nodes for row in rows})
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [f"{nodes}" for nodes in counts])
        axis.set_xlabel("nodes")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=4)
    figure.suptitle(f"predicted: {title}", fontsize="medium")
    figure.savefig(file)


# -- the command -------------------------------------------------------------------------------------------------------


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Estimate the communication time, step time, and traffic of DDP and of the strategies\n"
        "of this package on a cluster. It runs no training."
    )
    parser.epilog = (
        "Example:\n  lightning-sparse plan --model resnet50 --nodes 16 --devices 8 \\\n"
        "      --inter-gbps 25 --intra-gbps 1200 --compute-ms 107"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # does not break lines inside --intra-gbps
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="NAME", help=f"{', '.join(SIZES)}, or any model of torchvision or timm")
    model.add_argument("--parameters", type=float, metavar="N", help="number of parameters, for example 25.6e6")
    parser.add_argument("--nodes", type=int, required=True, metavar="M", help="number of nodes")
    parser.add_argument("--devices", type=int, required=True, metavar="L", help="devices per node")
    inter = "bandwidth of one node's link, in Gbit/s per direction"
    parser.add_argument("--inter-gbps", type=float, required=True, metavar="R", help=inter)
    intra = "bandwidth of one device inside its node, in Gbit/s (required if --devices > 1)"
    parser.add_argument("--intra-gbps", type=float, metavar="R", help=intra)
    compared = "densities in (0, 1]; the first one is recommended (default 0.01 0.001)"
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.001], help=compared)
    steps = "optimizer steps of the whole run: shows how often each entry is sent, and the effect on the loss"
    parser.add_argument("--steps", type=int, metavar="N", help=steps)
    size = "bytes per gradient (default 4, also with automatic mixed precision)"
    parser.add_argument("--bytes-per-gradient", type=int, default=4, choices=(2, 4), help=size)
    parser.add_argument(
        "--compute-ms", type=float, metavar="T", help="forward and backward time of one device's batch, in ms"
    )
    parser.add_argument("--json", action="store_true", help="print only JSON")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"plot the step time over the number of nodes ({', '.join(PLOT_FORMATS)})",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    check_new_file("--plot", arguments.plot)
    if arguments.plot is not None and arguments.plot.suffix.lower() not in PLOT_FORMATS:
        raise ValueError(f"--plot {arguments.plot} must end with one of {', '.join(PLOT_FORMATS)}.")
    scenario = _scenario(arguments)
    if 1 in arguments.density:
        print("--density 1 sends 100% of the entries. For 1%, use --density 0.01.", file=sys.stderr)
    rows = predict_all(scenario, node_counts(arguments.nodes), arguments.density)
    # one density in the recommendation, the plot and the table by nodes; all densities in the table of methods
    first_density = [row for row in rows if not row.selects or row.density == arguments.density[0]]
    compared = [row for row in first_density if row.nodes == arguments.nodes]
    advice = recommend(compared, scenario.compute_s)
    if arguments.nodes > 1:
        hint = "For the effect on the loss, add --steps."
        advice += "\n" + (hint if arguments.steps is None else expected_loss(compared, arguments.steps))
    if arguments.plot is not None:
        model = arguments.model or f"{scenario.numel:,} gradients"
        compute = "" if scenario.compute_s is None else f", {1e3 * scenario.compute_s:.4g} ms of compute"
        title = f"{model}{compute}, {arguments.devices} devices per node, {arguments.inter_gbps:g} Gbit/s between nodes"
        draw(first_density, title, arguments.plot)
        print(f"wrote {arguments.plot}", file=sys.stderr)
    if arguments.json:
        result = {
            "scenario": asdict(scenario),
            "assumptions": scenario.assumptions(),
            "recommendation": advice,
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(result, indent=2))
        return 0
    print("\n".join(scenario.assumptions()))
    table = _table_of_methods([row for row in rows if row.nodes == arguments.nodes], arguments.steps)
    print(f"\n{arguments.nodes} nodes, per step:\n{table}\n{KEY}")
    times = "communication" if scenario.compute_s is None else "step without and with perfect overlap"
    print(f"\nBy number of nodes, {times} in ms:\n{_table_of_nodes(first_density)}")
    print(f"\n{advice}")
    return 0


def _scenario(arguments: argparse.Namespace) -> Scenario:
    if arguments.intra_gbps is None and arguments.devices > 1:
        raise ValueError(
            f"--intra-gbps is missing: the {arguments.devices} devices of a node exchange gradients. Give the "
            f"bandwidth of one device inside its node, for example 1200 with NVLink or 100 with PCIe."
        )
    if arguments.parameters is not None and not 1 <= arguments.parameters <= MAX_PARAMETERS:
        raise ValueError(
            f"--parameters {arguments.parameters:g} must be the number of parameters, from 1 to {MAX_PARAMETERS:g}: "
            f"for example 25.6e6."
        )
    if arguments.model is None:
        numel = int(arguments.parameters)
    else:
        numel = SIZES.get(arguments.model) or sum(shape.numel() for shape in parameter_shapes(arguments.model))
    return Scenario(
        numel=numel,
        devices=arguments.devices,
        inter_gbps=arguments.inter_gbps,
        intra_gbps=arguments.inter_gbps if arguments.intra_gbps is None else arguments.intra_gbps,
        itemsize=arguments.bytes_per_gradient,
        compute_s=None if arguments.compute_ms is None else 1e-3 * arguments.compute_ms,
    )


def _table_of_methods(rows: list[Row], steps: int | None) -> str:
    head = ["", "comm ms", "MB received per node", "% of dense16", "applied %"]
    if steps is not None:
        head.append("times sent")
    if rows[0].step_s is not None:
        head += ["step ms", "overlapped ms", "efficiency %", "overlapped %"]
    dense16_bytes = next(row.node_bytes for row in rows if row.path == "dense16") or 1.0
    cells = []
    for row in rows:
        numbers = [1e3 * row.sync_s, 1e-6 * row.node_bytes, 100 * row.node_bytes / dense16_bytes]
        numbers.append(100 * row.effective_density)
        if steps is not None:
            numbers.append(steps * row.density)
        numbers += [1e3 * seconds for seconds in (row.step_s, row.overlapped_step_s) if seconds is not None]
        numbers += [100 * share for share in (row.efficiency, row.overlapped_efficiency) if share is not None]
        cells.append([row.name, *(f"{number:.4g}" if number < 1e4 else f"{number:,.0f}" for number in numbers)])
    return format_table(head, cells)


def _table_of_nodes(rows: list[Row]) -> str:
    cells: dict[int, list[str]] = {}
    for row in rows:
        times = [row.sync_s] if row.step_s is None else [row.seconds(overlap) for overlap in (False, True)]
        cells.setdefault(row.nodes, [str(row.nodes)]).append(" / ".join(f"{1e3 * seconds:.1f}" for seconds in times))
    names = dict.fromkeys(row.name for row in rows)
    return format_table(["nodes", *names], list(cells.values()))
