"""Time gradient synchronisation, in several ways. Runs on every rank of a process group.

Parameters have the shapes of a model, and backward returns precomputed gradients. The ways take turns in the same
processes, so that other load affects them alike; they share parameter storage, but not buckets. Synchronisation time is
the time of a step minus that of the same step under no_sync().

======================= ==============================================================================================
no synchronisation      backward under no_sync(), the baseline
hook that does nothing  DDP's copies into and out of buckets
DDP                     with its defaults
2-D dense, ours         lightning_sparse with a fixed exchange and 16-bit values in messages
..., taken apart        with a barrier before each step of the exchange, to time it separately; CPU only
flat top-k              ours with each rank as a node
auto                    ours with ``exchange="auto"``
updates                 SGD, then ``LocalUpdates``: the time includes SGD, and the rest of the last step's exchange
======================= ==============================================================================================
"""

# No "from __future__ import annotations": DDP looks at the annotations of a hook.
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed re-exports it unannounced
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.bench.report import format_table
from lightning_sparse.exchange import HierCommunicator, paths
from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.topology import Topology, with_groups
from lightning_sparse.updates import LocalUpdates, UpdatesConfig

FASTEST = 10.0  # Gbit/s, while bucket layouts settle
MOST_REPEATS = 25
NONE, NOTHING, SETTLING, SPARE = "no synchronisation", "hook that does nothing", 4, 1 << 20
PIECES = tuple(f"{name} s" for name in ("reduce_scatter", "compress", "exchange", "accumulate", "gather"))
QUICK = [torch.Size((100, 1000))] * 10
FLAT, APART = "flat top-k 1 %", "ours 1 %, taken apart"
OURS: dict[str, dict[str, Any]] = {
    "2-D dense": {"exchange": "dense"},
    "2-D dense, 16-bit": {"exchange": "dense16"},
    FLAT: {"exchange": "sparse"},
    "ours 1 %": {"exchange": "sparse"},
    "ours 1 %, at once": {"exchange": "sparse", "overlap": False},
    APART: {"exchange": "sparse", "overlap": False},
    "ours 0.1 %": {"exchange": "sparse", "density": 0.001},
    "regional 1 %": {"exchange": "regional"},
    "auto 1 %": {},
}
"""The options of `HierConfig` for each of our ways."""
UPDATES = "updates 1 %"


class _HandOut(torch.autograd.Function):
    """Backward returns slices of ``source``, starting at an offset, as the gradients."""

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
    """Parameters over a shared storage; forward(offset) is a scalar whose gradients are slices of ``source``."""

    def __init__(self, shapes: Sequence[torch.Size], storage: Tensor, source: Tensor) -> None:
        super().__init__()
        ends = torch.tensor([shape.numel() for shape in shapes]).cumsum(0).tolist()
        views = [storage[end - shape.numel() : end].view(shape) for end, shape in zip(ends, shapes, strict=True)]
        self.all = nn.ParameterList([nn.Parameter(view) for view in views])
        self.source = source

    def forward(self, offset: int) -> Tensor:
        loss: Tensor = _HandOut.apply(self.source, offset, *self.all)
        return loss


class TakenApart(HierCommunicator):
    """Times the steps of a reduction separately. A barrier before it excludes the wait for other ranks."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        dist.barrier(group=self.topology.world)
        begin = time.perf_counter()
        result = call(*arguments, **options)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
        return result

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return partial(self.timed, name, found) if name in ("reduce_scatter", "exchange", "gather") else found

    @contextmanager
    def kernels_too(self) -> Iterator[None]:
        """Also time the sparse path's compress and accumulate."""
        self.seconds.clear()
        kernels = {name: getattr(paths, name) for name in ("compress", "accumulate")}
        for name, kernel in kernels.items():
            setattr(paths, name, partial(self.timed, name, kernel))
        try:
            yield
        finally:
            for name, kernel in kernels.items():
                setattr(paths, name, kernel)


@dataclass
class Way:
    """One way to reduce gradients, with its measurements."""

    ddp: DistributedDataParallel
    state: HierState | None = None
    updates: LocalUpdates | None = None
    seconds: list[float] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    pieces: list[dict[str, float]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return next(self.ddp.parameters()).device

    def step(self, offset: int, synchronised: bool) -> None:
        self.ddp.zero_grad()
        with nullcontext() if synchronised else self.ddp.no_sync():
            self.ddp(offset).backward()
        if self.updates is not None:
            for node in self.updates.optimizers:
                node.optimizer.step()
            self.updates.step()


AddWay = Callable[..., DistributedDataParallel]


def build(
    topology: Topology,
    shapes: Sequence[torch.Size],
    device: torch.device,
    more: Callable[[AddWay], None] = lambda add: None,
) -> dict[str, Way]:
    """All ways, by name. A collective. `more` gets a function that adds one: add(name, **options of DDP)."""
    storage, source = _storage_and_source(sum(shape.numel() for shape in shapes), device)
    ways: dict[str, Way] = {}

    def add(name: str, **options: Any) -> DistributedDataParallel:
        module = Gradients(shapes, storage, source)
        ddp = DistributedDataParallel(module, gradient_as_bucket_view=True, init_sync=False, **options)
        ways[name] = Way(ddp)
        return ddp

    add(NONE)
    add(NOTHING).register_comm_hook(None, _nothing)
    add("DDP")
    more(add)
    for name, options in OURS.items():
        if name == FLAT and topology.num_devices == 1 or name == APART and device.type != "cpu":
            continue
        ddp = add(name)
        ways[name].state = _register(ddp, name, HierConfig(**options), topology)
    if topology.kind == "hierarchical":
        own = Gradients(shapes, torch.zeros_like(storage), source)  # its parameters change
        ddp = DistributedDataParallel(own, gradient_as_bucket_view=True, process_group=topology.intra)
        optimizer = torch.optim.SGD(own.parameters(), lr=1e-3, foreach=True)
        ways[UPDATES] = Way(ddp, updates=LocalUpdates(own, optimizer, UpdatesConfig(), topology))
    return ways


def _storage_and_source(numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Zeros for the parameters, and random gradients with `SPARE` more elements; their scale differs by layer."""
    torch.manual_seed(dist.get_rank())
    storage, source = torch.zeros(numel, device=device), torch.randn(numel + SPARE, device=device)
    for piece in torch.split(source, 1 << 16):
        piece.mul_(10 ** -torch.rand(()).item())
    return storage, source


def _register(ddp: DistributedDataParallel, name: str, config: HierConfig, topology: Topology) -> HierState:
    """Register our hook. A collective."""
    if name == FLAT:
        topology = with_groups(tuple((rank,) for rank in range(topology.world_size)))
    state = HierState(ddp.module, config, topology)
    if name == APART:
        state.exchange.communicator = TakenApart(topology)
    ddp.register_comm_hook(state, hier_hook)
    return state


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
) -> list[dict[str, Any]]:
    """Return one row per way, nearly the same on every rank. A collective.

    Args:
        seconds: time limit, except for the first three repeats.
        gbps: rate of the links, for the rows; None if unknown.
        rate: sets the rate of the links, if possible: fast until layouts have settled, then `gbps`. A collective.
    """
    offset = 0
    rate(FASTEST)
    for _ in range(SETTLING):  # DDP rebuilds buckets; PowerSGD starts to compress
        for name, way in ways.items():
            if way.state is None or way.state.config.exchange != "auto":  # measures the network in its first step
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
        if repeats > 2 and spent > seconds * (repeats - 1) / repeats or repeats >= MOST_REPEATS:
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
    """Medians over the slowest rank's times, without the first step, in which auto measures the network."""
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
    if way.updates is not None:
        row["received by a device, bytes, planned"] = way.updates.exchange.stats.round_bytes
    if way.state is not None:
        row["received by a device, bytes, planned"] = way.state.exchange.stats.round_bytes
        row["density"] = way.state.exchange.stats.density
        rates = way.state.exchange.choice.rates
        row["rates"] = None if rates is None else rates.to_list()
    for piece in sorted(way.pieces[0]) if way.pieces else ():
        row[f"{piece} s"] = median([each[piece] for each in way.pieces[1:]])
    return row


def received_bytes() -> int:
    """Bytes that this node received on eth0, as counted by the kernel; 0 outside a lab."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            return int(line.split(":")[1].split()[0])
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """One line per way, then the pieces of those taken apart."""
    lines, apart = [], []
    for row in rows:
        planned = row.get("received by a device, bytes, planned")
        lines.append((row["way"], 1e3 * row["sync s"], 1e3 * row["step s"], planned and planned / 1e6, row["repeats"]))
        if pieces := [f"{name.removesuffix(' s')} {1e3 * row[name]:.1f}" for name in PIECES if name in row]:
            apart.append(f"{row['way']}, ms: {', '.join(pieces)}")
    head = ("", "sync ms", "step ms", "MB per device", "repeats")
    return "\n".join([format_table(head, lines), *apart])
