"""Time of gradient synchronization, for torch's own methods and this library's.

    sudo python -m benchmarks.exchange.gradients OUT [--clusters 2x1 4x1 2x2] [--gbps 0.1 1 10] [--quick]
    torchrun ... -m benchmarks.exchange.gradients OUT       # on your own cluster, on CPUs or GPUs

Emulated clusters are network namespaces on this machine (`lightning_sparse.lab`). The network is real, but slow, and
all ranks share the CPUs, so host costs are larger than on separate machines. Parameters have the shapes of a model, and
backward returns precomputed gradients. Methods are interleaved in the same processes, so that other load affects them
equally. They share the memory of parameters, but not buckets. Synchronization time is the time of a step minus the time
of the step under no_sync().

========================= ============================================================================================
no synchronisation        backward under no_sync(), the baseline
hook that does nothing    DDP's copies into and out of buckets
DDP                       with its defaults
bf16, fp16 hook, PowerSGD torch's own; PowerSGD gets one bucket, because on Gloo it crashes with more
2-D dense, ours           lightning_sparse with a fixed exchange and 16-bit values in messages
flat top-k                ours with each rank as a node
auto                      ours with ``exchange="auto"``
updates                   SGD, then ``LocalUpdates``: the time includes SGD. Measured over `BESIDE` steps, so that an
                          exchange can overlap with the next step
========================= ============================================================================================

Writes OUT/exchange.json, .md and .svg.
"""

# No "from __future__ import annotations": DDP looks at the annotations of a hook.
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed re-exports it without declaring it
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.plots import color, figure
from benchmarks.processes import on_clusters, received_bytes, set_rate, slowest
from benchmarks.record import Rows, add_clusters, parser_of, surroundings, write
from lightning_sparse.cli import format_table
from lightning_sparse.cli.plan import parameter_shapes
from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.topology import Topology, with_groups
from lightning_sparse.updates import LocalUpdates, UpdatesConfig

FASTEST = 10.0  # Gbit/s, while bucket layouts settle
MOST_REPEATS = 25
NONE, NOTHING, SETTLING, SPARE = "no synchronisation", "hook that does nothing", 4, 1 << 20
QUICK = [torch.Size((100, 1000))] * 10
FLAT = "flat top-k 1 %"
NODE, PLANNED = "this node, bytes", "a device, bytes, planned"
OURS: dict[str, dict[str, Any]] = {
    "2-D dense": {"exchange": "dense"},
    "2-D dense, 16-bit": {"exchange": "dense16"},
    FLAT: {"exchange": "sparse"},
    "ours 1 %": {"exchange": "sparse"},
    "ours 1 %, at once": {"exchange": "sparse", "overlap": False},
    "ours 0.1 %": {"exchange": "sparse", "density": 0.001},
    "regional 1 %": {"exchange": "regional"},
    "auto 1 %": {},
}
"""The options of `HierConfig` for each of our ways."""
UPDATES: dict[str, dict[str, Any]] = {
    "updates 1 %": {},
    "updates 1 %, ahead 1": {"step_ahead": 1},
    "updates 1 %, bfloat16": {"value_dtype": "bfloat16"},
    "updates 1 %, delay 0": {"delay": 0},
    "updates 3 %, every 10": {"density": 0.03, "sync_every": 10},
    "updates 3 %, every 10, delay 10": {"density": 0.03, "sync_every": 10, "delay": 10},
    "updates 3 %, every 30": {"density": 0.03, "sync_every": 30},
}
"""The options of `UpdatesConfig` for each way to exchange updates."""
BESIDE = 30  # number of steps: the first step of a turn hides nothing, and the last step waits
ALWAYS = (NONE, NOTHING, "DDP", "2-D dense", "auto 1 %")
"""What tables go by, and what the others are compared with."""


class _HandOut(torch.autograd.Function):
    """In backward, returns slices of ``source``, starting at an offset, as the gradients."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, offset: int, *parameters: Tensor) -> Tensor:
        ctx.source, ctx.offset, ctx.shapes = source, offset, [p.shape for p in parameters]
        return source.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        begin, gradients = ctx.offset, []
        for shape in ctx.shapes:
            gradients.append(ctx.source[begin : begin + shape.numel()].view(shape))
            begin += shape.numel()
        return None, None, *gradients


class Gradients(nn.Module):
    """Parameters in a shared storage; forward(offset) is a scalar whose gradients are slices of ``source``."""

    def __init__(self, shapes: Sequence[torch.Size], storage: Tensor, source: Tensor) -> None:
        super().__init__()
        ends = torch.tensor([shape.numel() for shape in shapes]).cumsum(0).tolist()
        views = [storage[end - shape.numel() : end].view(shape) for end, shape in zip(ends, shapes, strict=True)]
        self.all = nn.ParameterList([nn.Parameter(view) for view in views])
        self.source = source

    def forward(self, offset: int) -> Tensor:
        loss: Tensor = _HandOut.apply(self.source, offset, *self.all)
        return loss


@dataclass
class Way:
    """One method to reduce gradients, with its measurements."""

    ddp: DistributedDataParallel
    state: HierState | None = None
    updates: LocalUpdates | None = None
    seconds: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)

    def turn(self, offset: int, synchronized: bool) -> None:
        """Time one step or several consecutive steps. A collective."""
        dist.barrier()
        before, begin, steps = received_bytes(), time.perf_counter(), 1 if self.updates is None else BESIDE
        for _ in range(steps):
            self.step(offset, synchronized)
        for node in self.updates.optimizers if self.updates is not None else ():
            node.state.receive()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append((time.perf_counter() - begin) / steps)
        self.received.append((received_bytes() - before) / steps)

    def step(self, offset: int, synchronized: bool) -> None:
        self.ddp.zero_grad()
        with nullcontext() if synchronized else self.ddp.no_sync():
            self.ddp(offset).backward()
        if self.updates is not None:
            for node in self.updates.optimizers:
                node.optimizer.step()
            self.updates.step()


def build(
    topology: Topology, shapes: Sequence[torch.Size], device: torch.device, only: Sequence[str]
) -> dict[str, Way]:
    """Return the methods by name; `only` selects some. A collective.

    Each method has its own buckets and residuals: eight ranks with all methods take 33 GB.
    """
    storage, source = _storage_and_source(sum(shape.numel() for shape in shapes), device)
    ways: dict[str, Way] = {}
    named = [NONE, NOTHING, "DDP", "bf16 hook", "fp16 hook", "PowerSGD r1", "PowerSGD r4", *OURS, *UPDATES]
    if unknown := sorted(set(only) - set(named)):
        raise SystemExit(f"no such way: {unknown}; there are {named}")
    for name in named:
        if only and name not in (*only, *ALWAYS) or name == FLAT and topology.num_devices == 1:
            continue
        if name in UPDATES:
            if topology.kind == "hierarchical":
                own = Gradients(shapes, torch.zeros_like(storage), source)  # its parameters change
                ways[name] = _updates(own, UpdatesConfig(**UPDATES[name]), topology)
            continue
        module = Gradients(shapes, storage, source)
        buckets: dict[str, Any] = {"bucket_cap_mb": 1000} if name.startswith("PowerSGD") else {}
        way = Way(DistributedDataParallel(module, gradient_as_bucket_view=True, init_sync=False, **buckets))
        if name in OURS:
            where = with_groups(tuple((rank,) for rank in range(topology.world_size))) if name == FLAT else topology
            way.state = HierState(module, HierConfig(**OURS[name]), where)
            way.ddp.register_comm_hook(way.state, hier_hook)
        else:
            _register(name, way.ddp)
        ways[name] = way
    return ways


def _storage_and_source(numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return zeros for the parameters, and `SPARE` more random gradients, whose scale differs by layer."""
    torch.manual_seed(dist.get_rank())
    storage, source = torch.zeros(numel, device=device), torch.randn(numel + SPARE, device=device)
    for piece in torch.split(source, 1 << 16):
        piece.mul_(10 ** -torch.rand(()).item())
    return storage, source


def _updates(module: Gradients, config: UpdatesConfig, topology: Topology) -> Way:
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=True, process_group=topology.intra)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, foreach=True)
    return Way(ddp, updates=LocalUpdates(module, optimizer, config, topology))


def _register(name: str, ddp: DistributedDataParallel) -> None:
    """Register torch's hook of this name, if it exists."""
    if name == NOTHING:
        ddp.register_comm_hook(None, _nothing)
    elif name == "bf16 hook":
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif name == "fp16 hook":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name.startswith("PowerSGD r"):
        rank = int(name.removeprefix("PowerSGD r"))
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _nothing(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def measure(
    topology: Topology,
    device: torch.device,
    gbps: float | None,
    shapes: Sequence[torch.Size],
    seconds: float,
    only: Sequence[str],
) -> Rows:
    """Return one row per method, almost equal on all ranks. A collective.

    `seconds` limits all except the first three repeats.
    """
    ways, offset = build(topology, shapes, device, only), 0
    set_rate(FASTEST)
    for _ in range(SETTLING):  # DDP rebuilds buckets; PowerSGD starts to compress
        for name, way in ways.items():
            if way.state is None or way.state.config.exchange != "auto":  # measures the network in its first step
                way.step(offset := (offset + 4099) % SPARE, name != NONE)
    set_rate(gbps or FASTEST)
    auto, dense = ways["auto 1 %"].state, ways["2-D dense"].state
    assert auto is not None
    assert dense is not None
    auto.layout.fix(dense.layout.settled)
    auto.layout.previous = dense.layout.settled
    begin, repeats = time.perf_counter(), 0
    while True:
        for name, way in ways.items():
            way.turn(offset := (offset + 4099) % SPARE, name != NONE)
        repeats += 1
        spent = torch.tensor(time.perf_counter() - begin, device=device)
        dist.broadcast(spent, 0)
        if repeats > 2 and spent > seconds * (repeats - 1) / repeats or repeats >= MOST_REPEATS:
            break
    rows = [_row(name, way, device) for name, way in ways.items()]
    for row in rows:
        row["sync s"] = row["step s"] - rows[0]["step s"]
    return rows


def _row(name: str, way: Way, device: torch.device) -> dict[str, Any]:
    """Return medians of the slowest rank's times, without the first step, in which auto measures the network."""
    taken = slowest(way.seconds[1:], device)
    row: dict[str, Any] = {
        "way": name,
        "step s": taken.median().item(),
        "fastest step s": taken.min().item(),
        "repeats": len(taken),
        f"received by {NODE}": int(median(way.received[1:])),
    }
    if way.updates is not None:
        row[f"received by {PLANNED}"] = way.updates.exchange.stats.round_bytes
    if way.state is not None:
        row[f"received by {PLANNED}"] = way.state.exchange.stats.round_bytes
        row["density"] = way.state.exchange.stats.density
        rates = way.state.exchange.choice.rates
        row["rates"] = None if rates is None else rates.to_list()
    return row


def table(rows: Rows) -> str:
    """Return a table of the synchronization time in ms by method and rate, one block per cluster."""
    lines = []
    for cluster in dict.fromkeys(row["cluster"] for row in rows):
        here = {(row["way"], row["gbps"]): row for row in rows if row["cluster"] == cluster}
        rates = list(dict.fromkeys(rate for _, rate in here))
        head = [f"{cluster}, ms", *("" if rate is None else f"{rate:g} Gbit/s" for rate in rates)]
        body = []
        for way in dict.fromkeys(way for way, _ in here):
            first = here[way, rates[0]]
            received, planned = (first.get(f"received by {each}") for each in (NODE, PLANNED))
            synchronized = [1e3 * here[way, rate]["sync s"] for rate in rates]
            body.append((way, *synchronized, *(each and each / 1e6 for each in (received, planned)), first["repeats"]))
        lines.append(format_table((*head, "MB a node", "MB a device, planned", "repeats"), body))
    return "\n\n".join(lines)


def plot(record: dict[str, Any], file: Path) -> None:
    rows = [row for row in record["rows"] if row["gbps"] is not None]
    clusters = list(dict.fromkeys(row["cluster"] for row in rows))
    hidden = (NONE, NOTHING, "ours 1 %, taken apart")  # older files have the last row
    ways = list(dict.fromkeys(row["way"] for row in rows if row["way"] not in hidden))
    with figure(file, height=6.5, columns=len(clusters), sharey=True) as axes:
        for cluster, ax in zip(clusters, axes, strict=True):
            here = [row for row in rows if row["cluster"] == cluster]
            for index, way in enumerate(ways):
                line = sorted((row["gbps"], 1e3 * row["sync s"]) for row in here if row["way"] == way)
                if line:
                    style = {"linestyle": "-" if way.startswith(("ours", "auto")) else "--", "color": color(index)}
                    ax.loglog(*zip(*line, strict=True), marker="o", markersize=3, label=way, **style)
            ax.set(title=f"{cluster} ranks", xlabel="link, Gbit/s")
            ax.grid()
        axes[0].set_ylabel("synchronization, ms")


def main() -> None:
    parser = parser_of(__doc__, quick="1 M gradients, and seconds instead of minutes")
    add_clusters(parser, ["2x1", "4x1", "2x2"], [0.1, 1.0, 10.0])
    parser.add_argument(
        "--rtt-ms", type=float, default=0.0, metavar="T", help="round-trip time between nodes in ms (default 0)"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="time limit per rate, after three repeats")
    always = ", ".join(ALWAYS).replace("%", "%%")
    parser.add_argument("--ways", nargs="+", default=[], help=f"measure only these methods and {always}")
    parser.add_argument(
        "--model", default="resnet50", metavar="NAME", help="a torchvision or timm model (default resnet50)"
    )
    options = parser.parse_args()
    shapes = QUICK if options.quick else parameter_shapes(options.model)
    arguments = shapes, 3.0 if options.quick else options.seconds, options.ways
    rows = on_clusters(measure, *arguments, clusters=options.clusters, gbps=options.gbps, rtt_ms=options.rtt_ms)
    if rows is None:
        return
    record = {**surroundings(), "gradients": "1 M" if options.quick else options.model, "rows": rows}
    write(options.out / "exchange.json", record, table(rows), plot if any(row["gbps"] for row in rows) else None)


if __name__ == "__main__":
    main()
