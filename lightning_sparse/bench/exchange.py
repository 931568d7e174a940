"""How long a step waits for its gradients, by the way they are reduced. Runs in every rank of a process group.

Parameters have the sizes of a model, and backward hands out ready-made gradients. All ways live in the same processes
and take turns, so what else the machine does meets all of them; their parameters share one storage, their buckets are
their own. Synchronisation time is a step minus the same step under no_sync().

======================= ==============================================================================================
no synchronisation      backward under no_sync(): what is taken off all others
hook that does nothing  DDP's own copies into buckets and back
DDP                     as it comes
2-D dense, ours         lightning_sparse with a fixed exchange and the default values of 16 bits
..., taken apart        with a barrier before each step, to time each alone; on the CPU only
flat top-k              ours with each rank as a node of its own
auto                    ours with the path that it chooses itself, on the rate it meets
======================= ==============================================================================================
"""

# No "from __future__ import annotations": DDP looks at the annotations of a hook.
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed re-exports it unannounced
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.bench.apart import TakenApart
from lightning_sparse.bench.extras import figure, save
from lightning_sparse.bench.gradients import Gradients
from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.topology import Topology, with_groups

FASTEST = 10.0  # Gbit/s, while layouts settle
NONE, NOTHING, SETTLING, SPARE = "no synchronisation", "hook that does nothing", 4, 1 << 20
PIECES = tuple(f"{name} s" for name in ("reduce_scatter", "compress", "exchange", "accumulate", "gather"))
QUICK = [torch.Size((100, 1000))] * 10


@dataclass
class Way:
    """One way to reduce, and what was measured of it."""

    ddp: DistributedDataParallel
    state: HierState | None = None
    seconds: list[float] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    pieces: list[dict[str, float]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return next(self.ddp.parameters()).device

    def step(self, offset: int, synchronised: bool) -> None:
        self.ddp.zero_grad()
        if synchronised:
            self.ddp(offset).backward()
        else:
            with self.ddp.no_sync():
                self.ddp(offset).backward()


AddWay = Callable[..., DistributedDataParallel]


def build(
    topology: Topology,
    shapes: Sequence[torch.Size],
    device: torch.device,
    more: Callable[[AddWay], None] = lambda add: None,
) -> dict[str, Way]:
    """All ways, by name. A collective. `more` gets a function that adds one: add(name, **options of DDP)."""
    numel = sum(shape.numel() for shape in shapes)
    torch.manual_seed(dist.get_rank())
    storage, source = torch.zeros(numel, device=device), torch.randn(numel + SPARE, device=device)
    for piece in torch.split(source, 1 << 16):  # layers differ in the size of their gradients
        piece.mul_(10 ** -torch.rand(()).item())
    ways: dict[str, Way] = {}

    def add(name: str, **options: Any) -> DistributedDataParallel:
        module = Gradients(shapes, storage, source)
        ddp = DistributedDataParallel(module, gradient_as_bucket_view=True, init_sync=False, **options)
        ways[name] = Way(ddp)
        return ddp

    def add_ours(name: str, place: Topology = topology, **options: Any) -> None:
        ddp = add(name)
        state = HierState(ddp.module, HierConfig(**options), place)
        if name.endswith("taken apart"):
            state.exchange.communicator = TakenApart(place)
        ddp.register_comm_hook(state, hier_hook)
        ways[name].state = state

    add(NONE)
    add(NOTHING).register_comm_hook(None, _nothing)
    add("DDP")
    more(add)
    add_ours("2-D dense", exchange="dense")
    add_ours("2-D dense, 16-bit", exchange="dense16")
    if topology.num_devices > 1:
        everyone = with_groups(tuple((rank,) for rank in range(topology.world_size)))
        add_ours("flat top-k 1 %", everyone, exchange="sparse")
    add_ours("ours 1 %", exchange="sparse")
    add_ours("ours 1 %, at once", exchange="sparse", overlap=False)
    if device.type == "cpu":
        add_ours("ours 1 %, taken apart", exchange="sparse", overlap=False)
    add_ours("ours 0.1 %", exchange="sparse", density=0.001)
    add_ours("regional 1 %", exchange="regional")
    add_ours("auto 1 %")
    return ways


def _nothing(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def measure(
    ways: dict[str, Way],
    seconds: float,
    *,
    gbps: float | None = None,
    rate: Callable[[float], None] = lambda gbps: None,
    most: int = 25,
) -> list[dict[str, Any]]:
    """A row for each way; rank 0's are as good as any. A collective.

    Args:
        seconds: until when another turn begins, once each way had three.
        gbps: the links' rate, for the rows; None where it is not known.
        rate: sets it where that can be done: fast links while layouts settle, then `gbps`. A collective.
        most: turns.
    """
    offset = 0
    rate(FASTEST)
    for _ in range(SETTLING):  # buckets are rebuilt and layouts settle; PowerSGD begins to compress
        for name, way in ways.items():
            if way.state is None or way.state.config.exchange != "auto":  # it looks at the link when it begins
                way.step(offset := (offset + 4099) % SPARE, name != NONE)
    rate(gbps or FASTEST)
    auto, dense = ways["auto 1 %"].state, ways["2-D dense"].state
    assert auto is not None
    assert dense is not None
    auto.layout.settle(dense.layout.settled)
    auto.layout.previous = dense.layout.settled
    begin, repeats = time.perf_counter(), 0
    while True:
        for name, way in ways.items():
            one(way, offset := (offset + 4099) % SPARE, name != NONE)
        repeats += 1
        spent = torch.tensor(time.perf_counter() - begin, device=ways[NONE].device)
        dist.broadcast(spent, 0)
        if repeats > 2 and spent > seconds * (repeats - 1) / repeats or repeats >= most:
            break
    rows = [row_of(name, way, gbps) for name, way in ways.items()]
    for row in rows:
        row["sync s"] = row["step s"] - rows[0]["step s"]
    return rows


def one(way: Way, offset: int, synchronised: bool) -> None:
    taken = None if way.state is None else way.state.exchange.communicator
    dist.barrier()
    before, begin = received_bytes(), time.perf_counter()
    if isinstance(taken, TakenApart):
        with taken.kernels_too():
            way.step(offset, synchronised)
        way.pieces.append(dict(taken.seconds))
    else:
        way.step(offset, synchronised)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    way.seconds.append(time.perf_counter() - begin)
    way.received.append(received_bytes() - before)


def row_of(name: str, way: Way, gbps: float | None) -> dict[str, Any]:
    """Medians without the first step, in which auto looks at the link; a step is as long as its slowest rank."""
    taken = torch.tensor(way.seconds[1:], device=way.device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    row: dict[str, Any] = {
        "way": name,
        "gbps": gbps,
        "step s": taken.median().item(),
        "fastest step s": taken.min().item(),
        "repeats": len(taken),
        "received by this node, bytes": int(median(way.received[1:])),
    }
    if way.state is not None:
        row["received by a device, bytes, planned"] = way.state.exchange.stats.round_bytes
        row["density"] = way.state.exchange.stats.density
        rates = way.state.exchange.choice.rates
        row["rates"] = None if rates is None else rates.to_list()
    for piece in sorted(way.pieces[0]) if way.pieces else ():
        row[f"{piece} s"] = median([each[piece] for each in way.pieces[1:]])
    return row


def received_bytes() -> int:
    """What came in over eth0 of this node, as the kernel counts it; 0 without a lab."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            return int(line.split(":")[1].split()[0])
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each way."""
    lines = [f"  {'':<26}{'sync ms':>10}{'step ms':>10}{'MB a device':>13}{'repeats':>10}"]
    for row in rows:
        planned = row.get("received by a device, bytes, planned")
        megabytes = "" if planned is None else f"{planned / 1e6:.2f}"
        times = "".join(f"{1e3 * row[name]:>10.1f}" for name in ("sync s", "step s"))
        lines.append(f"  {row['way']:<26}{times}{megabytes:>13}{row['repeats']:>10}")
        pieces = {name.removesuffix(" s"): row[name] for name in PIECES if name in row}
        if pieces:
            lines.append("    " + ", ".join(f"{name} {1e3 * taken:.1f}" for name, taken in pieces.items()) + " ms")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], title: str, file: Path) -> None:
    """Bars of synchronisation time, ours in colour.

    Raises:
        ValueError: when matplotlib is not installed.
    """
    drawn, (axes,) = figure(7.5, 0.36 * len(rows) + 1.2)
    shown = [row for row in rows if row["way"] not in (NONE, NOTHING) and not row["way"].endswith("taken apart")][::-1]
    colours = ["#d1495b" if row["way"].startswith(("ours", "auto", "regional")) else "#8a8a8a" for row in shown]
    bars = axes.barh([row["way"] for row in shown], [1e3 * row["sync s"] for row in shown], color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set(xlabel="synchronisation of a step, ms (median; lower is better)", title=title)
    axes.margins(x=0.12)
    save(drawn, file)
