"""What runs in each rank of exchange.py: one model's gradients, reduced in every way in turn, and timed.

The model is a list of parameters of ResNet-50's sizes whose backward hands out ready-made gradients, so a step is
DDP and its hook and almost nothing else. All ways live in the same processes; their parameters share one storage, their
buckets are their own.

======================= ==============================================================================================
no synchronisation      backward under no_sync(): what is taken off all others
hook that does nothing  DDP's own copies into buckets and back
DDP, fp16, bf16,        torch's own, with its default buckets; PowerSGD gets one bucket, since on Gloo it crashes with
PowerSGD                more
2-D dense, ours         lightning_sparse with a fixed exchange and the default values of 16 bits
flat top-k              ours with each rank as a node of its own
auto                    ours with the path that it chooses itself, on the rate it meets
======================= ==============================================================================================
"""

# No "from __future__ import annotations": DDP looks at the annotations of a hook.
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.strategy import HierCommunicator, HierConfig, HierState, hier_hook, hook
from lightning_sparse.topology import Topology, discover, with_groups

FASTEST = 10.0  # Gbit/s, while layouts settle
NONE, NOTHING, SETTLING, SPARE = "no synchronisation", "hook that does nothing", 4, 1 << 20


class _HandOut(torch.autograd.Function):
    """Its backward gives each parameter its piece of ``source``, beginning at an offset."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, offset: int, *parameters: Tensor) -> Tensor:
        ctx.source, ctx.offset, ctx.shapes = source, offset, [p.shape for p in parameters]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        begin, gradients = ctx.offset, []
        for shape in ctx.shapes:
            gradients.append(ctx.source[begin : begin + shape.numel()].view(shape))
            begin += shape.numel()
        return None, None, *gradients


class Gradients(nn.Module):
    """Parameters over a shared storage; forward(offset) is a scalar whose gradients are pieces of ``source``."""

    def __init__(self, shapes: list[torch.Size], storage: Tensor, source: Tensor) -> None:
        super().__init__()
        ends = torch.tensor([shape.numel() for shape in shapes]).cumsum(0).tolist()
        views = [storage[end - shape.numel() : end].view(shape) for end, shape in zip(ends, shapes, strict=True)]
        self.all = nn.ParameterList([nn.Parameter(view) for view in views])
        self.source = source

    def forward(self, offset: int) -> Tensor:
        return _HandOut.apply(self.source, offset, *self.all)


class TakenApart(HierCommunicator):
    """Notes how long each step takes, when all of a group begin it together: waiting is no part of it."""

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


@dataclass
class Way:
    """One way to reduce, and what was measured of it."""

    ddp: DistributedDataParallel
    state: HierState | None = None
    seconds: list[float] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    pieces: list[dict[str, float]] = field(default_factory=list)

    def step(self, offset: int, synchronised: bool) -> None:
        self.ddp.zero_grad()
        if synchronised:
            self.ddp(offset).backward()
        else:
            with self.ddp.no_sync():
                self.ddp(offset).backward()


def resnet50_shapes() -> list[torch.Size]:
    from torchvision.models import resnet50

    with torch.device("meta"):
        return [p.shape for p in resnet50().parameters()]


def build(topology: Topology, quick: bool) -> dict[str, Way]:
    shapes = [torch.Size((100, 1000))] * 10 if quick else resnet50_shapes()
    numel = sum(shape.numel() for shape in shapes)
    torch.manual_seed(dist.get_rank())
    storage, source = torch.zeros(numel), torch.randn(numel + SPARE)
    for piece in source.split(1 << 16):  # layers differ in the size of their gradients
        piece.mul_(10 ** -torch.rand(()).item())
    ways: dict[str, Way] = {}

    def add(name: str, **options: Any) -> DistributedDataParallel:
        module = Gradients(shapes, storage, source)
        ddp = DistributedDataParallel(module, gradient_as_bucket_view=True, init_sync=False, **options)
        ways[name] = Way(ddp)
        return ddp

    def add_ours(name: str, place: Topology = topology, **options: Any) -> None:
        ddp = add(name)
        state = HierState(ddp.module, HierConfig(warmup_epochs=0, **options), place)
        if name.endswith("taken apart"):
            state.communicator = TakenApart(place)
        ddp.register_comm_hook(state, hier_hook)
        ways[name].state = state

    add(NONE)
    add(NOTHING).register_comm_hook(None, _nothing)
    add("DDP")
    add("bf16 hook").register_comm_hook(None, default_hooks.bf16_compress_hook)
    add("fp16 hook").register_comm_hook(None, default_hooks.fp16_compress_hook)
    for rank in (1, 4):
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        add(f"PowerSGD r{rank}", bucket_cap_mb=1000).register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    add_ours("2-D dense", exchange="dense")
    if topology.num_devices > 1:
        everyone = with_groups(tuple((rank,) for rank in range(topology.world_size)))
        add_ours("flat top-k 1 %", everyone, exchange="sparse")
    add_ours("ours 1 %", exchange="sparse")
    add_ours("ours 1 %, at once", exchange="sparse", overlap=False)
    add_ours("ours 1 %, taken apart", exchange="sparse", overlap=False)
    add_ours("ours 0.1 %", exchange="sparse", density=0.001)
    add_ours("regional 1 %", exchange="regional")
    add_ours("auto 1 %")
    return ways


def _nothing(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def measure(ways: dict[str, Way], rate: Callable[[float], None], gbps: float, seconds: float) -> list[dict[str, Any]]:
    """Rows of the result; `rate` sets the link, and is a collective."""
    offset = 0
    rate(FASTEST)
    for _ in range(SETTLING):  # buckets are rebuilt and layouts settle; PowerSGD begins to compress
        for name, way in ways.items():
            if way.state is None or way.state.config.exchange != "auto":  # it looks at the link when it begins
                way.step(offset := (offset + 4099) % SPARE, name != NONE)
    rate(gbps)
    auto, dense = ways["auto 1 %"].state, ways["2-D dense"].state
    assert auto is not None
    assert dense is not None
    auto.layout.settled = auto.layout.previous = dense.layout.settled
    begin, repeats = time.perf_counter(), 0
    while True:
        for name, way in ways.items():
            one(way, offset := (offset + 4099) % SPARE, name != NONE)
        repeats += 1
        spent = torch.tensor(time.perf_counter() - begin)
        dist.broadcast(spent, 0)
        if repeats > 2 and spent > seconds * (repeats - 1) / repeats or repeats > 24:
            break
    rows = [row_of(name, way, gbps) for name, way in ways.items()]
    for row in rows:
        row["sync s"] = row["step s"] - rows[0]["step s"]
    return rows


def one(way: Way, offset: int, synchronised: bool) -> None:
    taken = getattr(way.state, "communicator", None)
    dist.barrier()
    before, begin = received_bytes(), time.perf_counter()
    if isinstance(taken, TakenApart):
        taken.seconds.clear()
        plain = hook.compress, hook.accumulate
        hook.compress = partial(taken.timed, "compress", plain[0])
        hook.accumulate = partial(taken.timed, "accumulate", plain[1])
        way.step(offset, synchronised)
        hook.compress, hook.accumulate = plain
        way.pieces.append(dict(taken.seconds))
    else:
        way.step(offset, synchronised)
    way.seconds.append(time.perf_counter() - begin)
    way.received.append(received_bytes() - before)


def row_of(name: str, way: Way, gbps: float) -> dict[str, Any]:
    """Medians without the first step, in which auto looks at the link; a step is as long as its slowest rank."""
    taken = torch.tensor(way.seconds[1:])
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
        row["received by a device, bytes, planned"] = way.state.stats.round_bytes
        row["density"] = way.state.stats.density
        row["rates"] = None if way.state.rates is None else way.state.rates.to_list()
    for piece in sorted(way.pieces[0]) if way.pieces else ():
        row[f"{piece} s"] = median([each[piece] for each in way.pieces[1:]])
    return row


def received_bytes() -> int:
    """What came in over eth0 of this node, as the kernel counts it; 0 without a lab."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            return int(line.split(":")[1].split()[0])
    return 0


def ask(folder: Path, gbps: float) -> None:
    """Have the lab change the rate: rank 0 writes a file, the lab's process takes it away when it is done."""
    dist.barrier()
    if dist.get_rank() == 0:
        asked = folder / "rate"
        asked.with_suffix(".new").write_text(f"{gbps}")
        asked.with_suffix(".new").rename(asked)
        while asked.exists():
            time.sleep(0.02)
    dist.barrier()


def main(folder: Path, gbps: float, seconds: float, quick: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ways = build(discover(), quick)
    rows = measure(ways, partial(ask, folder), gbps, seconds)
    if dist.get_rank() == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
