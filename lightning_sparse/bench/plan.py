"""What a step costs on a cluster that is not at hand, and which path is worth taking there. Pure arithmetic.

The synchronisation of a round is that of `exchange.paths`, by buckets as DDP makes them. With C the time of forward and
backward on one device and R that of synchronisation, a step lies between two bounds:

============  ==============  ==================================================================
overlap       step            what it assumes
============  ==============  ==================================================================
none          C + R           gradients travel when backward is over
perfect       max(C, R)       every byte travels beside compute, the first bucket's too
============  ==============  ==================================================================

Scaling efficiency is C / step: the throughput of P devices over P times that of one. The optimizer's step and the
input are no part of it. A ring over P ranks pays 2 (P - 1) latencies; NCCL's trees pay fewer, so with hundreds of ranks
DDP is better than what is said here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from lightning_sparse.exchange.choice import MARGIN
from lightning_sparse.exchange.paths import PATHS, Dense, Flat, Path, Work
from lightning_sparse.exchange.rates import Link, Rates

_OURS = {kind.name: kind for kind in PATHS if kind.by_shard}
WAYS = ("ddp", "ddp16", *_OURS)
"""The plainest first."""
_NAMES = {"ddp": "DDP", "ddp16": "DDP, 16-bit hook", "dense": "2-D dense", "dense16": "2-D dense, 16-bit"}
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes, DDP's defaults
VALUES = torch.bfloat16  # of a message, as in the default of HierConfig


@dataclass(frozen=True)
class HostCosts:
    """Seconds that devices spend besides carrying bytes, as in `exchange.rates.Rates`; ``source`` says whence."""

    add: float
    select: float
    scatter: float
    fill: float
    cast: float
    select_call: float
    cast_call: float
    source: str


_GPU_BYTE = 1 / 600e9
V100 = HostCosts(
    add=_GPU_BYTE,
    select=13 * _GPU_BYTE,  # reads gradient and residual, writes residual
    scatter=64 * _GPU_BYTE,  # a sector read and one written
    fill=4 * _GPU_BYTE,
    cast=30 * _GPU_BYTE,  # rounding reads two, writes two and one half; summing and reading again 12 bytes
    select_call=100e-6,
    cast_call=50e-6,
    source="assumed, not measured: kernels that stream 600 GB/s of GPU memory, 2/3 of what a V100 has, and 0.1 ms of "
    "launches per bucket",
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model on a kind of cluster.

    Args:
        numel: gradients.
        devices: in a node.
        inter_gbps: rate of a node's link in Gbit/s each way, shared by its devices.
        intra_gbps: rate at which a device receives inside its node, in Gbit/s.
        itemsize: bytes of a gradient; 4 also under automatic mixed precision.
        compute_s: forward and backward of one device's batch; None when it is not known.
        inter_latency, intra_latency: seconds that a step of a collective costs besides its bytes.
    """

    numel: int
    devices: int
    inter_gbps: float
    intra_gbps: float
    itemsize: int = 4
    compute_s: float | None = None
    inter_latency: float = 30e-6
    intra_latency: float = 10e-6
    host: HostCosts = field(default=V100)

    def __post_init__(self) -> None:
        for name in ("numel", "devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be a whole number of at least 1.")
        for name in ("inter_gbps", "intra_gbps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a rate in Gbit/s, above 0.")
        if self.itemsize not in (2, 4):
            raise ValueError(f"itemsize={self.itemsize}: gradients have 4 bytes (fp32) or 2 (fp16, bf16).")
        if self.compute_s is not None and not 0 < self.compute_s < math.inf:
            raise ValueError(f"compute_s={self.compute_s} must be above 0; leave it out when it is not known.")

    @property
    def rates(self) -> Rates:
        """For `exchange.paths`."""
        inter = Link(self.inter_latency, 8e-9 * self.devices / self.inter_gbps)
        host = self.host
        intra = Link(self.intra_latency, 8e-9 / self.intra_gbps)
        costs = (host.add, host.select, host.scatter, host.fill, host.cast, host.select_call, host.cast_call)
        return Rates(inter, intra, *costs)

    @property
    def buckets(self) -> int:
        """As DDP cuts so many bytes."""
        return 1 + max(0, math.ceil((self.numel * self.itemsize - FIRST_BUCKET) / BUCKET))


@dataclass(frozen=True)
class Row:
    """One path on so many nodes. The last four are None where compute is not known."""

    nodes: int
    path: str
    """One of `WAYS`."""
    selects: bool
    """Whether it sends the largest entries alone."""
    density: float
    effective_density: float
    """The share of the entries that a step applies, at most."""
    sync_s: float
    node_bytes: float
    """Received from other nodes by a node in a step."""
    step_s: float | None = None
    overlapped_step_s: float | None = None
    efficiency: float | None = None
    overlapped_efficiency: float | None = None

    @property
    def name(self) -> str:
        return _NAMES.get(self.path, self.path) + (f" {100 * self.density:.3g} %" if self.selects else "")


def predict(scenario: Scenario, nodes: int, way: str, density: float = 1.0) -> Row:
    """A row. On one node every path is an all-reduce inside it, as the strategy does there.

    Raises:
        ValueError: when there is no node, or the density is not in (0, 1].
    """
    if nodes < 1:
        raise ValueError(f"nodes={nodes} must be at least 1.")
    if not 0 < density <= 1:
        raise ValueError(f"density={density} must be in (0, 1]: it is the share of entries that is sent.")
    work = Work(nodes, scenario.devices, -(-scenario.numel // scenario.buckets), scenario.itemsize)
    path = path_of(way, work, density)
    sync_s, node_bytes = scenario.buckets * path.seconds(scenario.rates), 0.0
    if nodes > 1:
        node_bytes = scenario.devices * scenario.buckets * path.bytes()
    row = (nodes, way, _selects(way), density, path.applied / work.shard_numel, sync_s, node_bytes)
    if scenario.compute_s is None:
        return Row(*row)
    steps = scenario.compute_s + sync_s, max(scenario.compute_s, sync_s)
    return Row(*row, *steps, *(scenario.compute_s / step for step in steps))


def path_of(way: str, work: Work, density: float) -> Path:
    """The path of each bucket."""
    if work.num_nodes == 1:
        return Dense(work)  # one ring, inside the node
    if way in _OURS:
        return _OURS[way].of(work, density, VALUES) or Dense(work)
    return Flat(work._replace(itemsize=2) if way == "ddp16" else work)


def rows(scenario: Scenario, counts: Iterable[int], densities: Sequence[float]) -> list[Row]:
    """Every path on every number of nodes; the sparse ones with every density."""
    ways = [(way, density) for way in WAYS for density in (densities if _selects(way) else [1.0])]
    return [predict(scenario, nodes, way, density) for nodes in counts for way, density in ways]


def node_counts(nodes: int) -> list[int]:
    """1, 2, 4 ... to four times as many, with ``nodes`` among them.

    >>> node_counts(6)
    [1, 2, 4, 6, 8, 16]
    """
    return sorted({*(1 << i for i in range((4 * nodes).bit_length()) if 1 << i <= 4 * nodes), nodes})


def simplest(found: Sequence[Row], *, overlap: bool) -> Row:
    """Of one number of nodes: the plainest way that no other beats by more than the strategy's own margin.

    From the plainest on: DDP, its 16-bit hook, 2-D dense, the same with 16-bit values, sparse. Regional is left out: at
    the same density it applies fewer entries than sparse, so time alone does not speak for it.
    """
    order = [row for way in WAYS for row in found if row.path == way and _is_comparable(way)]
    best = min(_seconds(row, overlap) for row in order)
    return next(row for row in order if MARGIN * _seconds(row, overlap) <= best)


def recommend(found: Sequence[Row], compute_s: float | None) -> str:
    """One sentence about the rows of one number of nodes and one density."""
    nodes = found[0].nodes
    if nodes == 1:
        return "Use plain DDP: one node has no link between nodes to save."
    plain, least = simplest(found, overlap=False), simplest(found, overlap=True)
    gain = _gain(found, plain, overlap=False)
    if compute_s is None:
        return f"{_advice(plain)}: its synchronisation {gain} (whether that matters depends on the compute of a step)."
    if plain.path == least.path:
        hidden = _gain(found, plain, overlap=True)
        bounds = gain if gain == hidden else f"{gain} without overlap and {hidden} with perfect overlap"
        return f"{_advice(plain)} on {nodes} nodes: its step {bounds}."
    return (
        f"{_advice(least)} on {nodes} nodes if synchronisation hides behind backward. If it does not, "
        f"{_advice(plain, first=False)}: a step that waits for it {gain}. Measure both."
    )


def _selects(way: str) -> bool:
    return way in _OURS and _OURS[way].leaves == "entries"


def _is_comparable(way: str) -> bool:
    return way not in _OURS or _OURS[way].automatic


def _advice(row: Row, *, first: bool = True) -> str:
    word = "Use" if first else "use"
    return {
        "ddp": f"{word} plain DDP",
        "ddp16": f"{word} DDP with the bf16 hook",
        "dense": f"{word} strategy='mstopk_hier' with exchange='dense'",
        "dense16": f"{word} strategy='mstopk_hier' with exchange='dense16'",
    }.get(row.path, f"{word} strategy='mstopk_hier' with density={row.density:g}")


def _gain(found: Sequence[Row], row: Row, *, overlap: bool) -> str:
    """How the row stands to DDP, or DDP to the best of the others."""

    if row.path != "ddp":
        ddp = next(each for each in found if each.path == "ddp")
        return f"is {_seconds(ddp, overlap) / _seconds(row, overlap):.2g} times as fast as DDP's"
    others = [each for each in found if each.path != "ddp" and _is_comparable(each.path)]
    best = min(others, key=lambda each: _seconds(each, overlap))
    factor = _seconds(row, overlap) / _seconds(best, overlap)
    return (
        "is as fast as any" if factor < 1.005 else f"is within {100 * (factor - 1):.0f} % of the fastest ({best.name})"
    )


def _seconds(row: Row, overlap: bool) -> float:
    step = row.overlapped_step_s if overlap else row.step_s
    return row.sync_s if step is None else step


def assumptions(scenario: Scenario) -> list[str]:
    """What the numbers rest on, a line each."""
    host = scenario.host
    return [
        f"{scenario.numel:,} gradients of {scenario.itemsize} bytes in {scenario.buckets} buckets; "
        f"{scenario.devices} devices a node",
        f"between nodes {scenario.inter_gbps:g} Gbit/s a node, inside {scenario.intra_gbps:g} Gbit/s a device; latency "
        f"{1e6 * scenario.inter_latency:g} and {1e6 * scenario.intra_latency:g} us (assumed)",
        f"selection at {1e-9 / host.select:.3g} G elements/s, scattering at {1e-9 / host.scatter:.3g} G pairs/s: "
        f"{host.source}",
    ]
