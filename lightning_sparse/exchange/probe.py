"""Measures both networks and the kernels with a few collectives, a fraction of a second. A collective of the world.

Every rank runs the same list of measurements at the same time, since the devices of a node share its link, and each
number is the slowest rank's: so all ranks end with the same numbers, and whatever is computed from them is agreed. How
much is sent follows the link: messages grow until one takes `ENOUGH_S`, which all ranks decide on the agreed time.
Kernels are timed on as many elements as a shard of the run has: in a processor's cache they would seem faster. Their
gradients are drawn from a generator of their own: a measurement, which may come at any round, must not move what a run
draws from the default one (dropout, say). Dtypes are spelt out, for a run may have set another default.

Each number is the fastest of a few, for a disturbance only ever adds. The one that counts most, the rate, has the most:
a message that was disturbed would end the growth too early and pass for a slow link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lightning_sparse.agree import largest
from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.paths import Dense16, Shard, Work
from lightning_sparse.exchange.rates import Link, Rates
from lightning_sparse.kernels import accumulate, compress

ENOUGH_S, SLOW_S = 0.03, 0.1
FIRST_BYTES, MOST_BYTES, GROWTH = 1 << 16, 1 << 24, 4  # received by a device
REPEATS, MOST_REPEATS = 2, 5
RATE_S = 0.15  # spent on the rate of a link once it is known how much to send
FEW = 64  # elements of a shard whose time is that of the calls
MOST_SELECTED = 1 << 22  # elements of the shard on which kernels are timed: 16 MB, more than a core's caches


def probe(comm: HierCommunicator, device: torch.device, value_dtype: torch.dtype, shard_numel: int) -> Rates:
    """What this cluster can do now, the same on all ranks.

    Args:
        comm: the groups to measure; nothing else may be under way on them.
        value_dtype: of messages.
        shard_numel: elements of the largest shard that the run will reduce; the same on all ranks.
    """
    agreed = _AgreedTimer(comm, device)
    nodes, devices = comm.topology.num_nodes, comm.topology.num_devices
    inter, nbytes = _link(agreed, comm.exchange, nodes)
    intra, _ = _link(agreed, comm.gather, devices) if devices > 1 else (Link(0.0, 0.0), 0)

    shard_S = torch.zeros(max(1, nbytes // 8), dtype=torch.float32, device=device)
    carried = shard_S.numel() * 4 * (nodes - 1) / nodes  # in each half of the ring
    taken = agreed.seconds(lambda: comm.all_reduce(shard_S))
    adding = taken - 2 * (nodes - 1) * inter.latency - 2 * carried * inter.seconds_per_byte

    costs = kernel_costs(agreed.seconds, device, value_dtype, shard_numel)
    return replace(costs, inter=inter, intra=intra, add=max(0.0, adding) / carried)


def kernel_costs(
    seconds: Callable[[Callable[[], object]], float], device: torch.device, value_dtype: torch.dtype, shard_numel: int
) -> Rates:
    """Measure the rates of a device's kernels, for shards of up to that size; links are free."""
    numel = min(MOST_SELECTED, max(2 * FEW, shard_numel))
    select_call, fill_call, _, cast_call = _kernel_times(seconds, device, value_dtype, FEW)
    select, once, often, cast = _kernel_times(seconds, device, value_dtype, numel)
    pairs = max(1, numel // 100)
    scatter = max(0.0, often - once) / (8 * pairs)
    fill = max(0.0, once - fill_call - pairs * scatter) / numel
    per_element = [max(0.0, each) / numel for each in (select - select_call, cast - cast_call)]
    return Rates(
        Link(0.0, 0.0),
        Link(0.0, 0.0),
        select=per_element[0],
        scatter=scatter,
        fill=fill,
        cast=per_element[1],
        select_call=select_call + fill_call,
        cast_call=cast_call,
    )


def _kernel_times(
    seconds: Callable[[Callable[[], object]], float], device: torch.device, value_dtype: torch.dtype, numel: int
) -> tuple[float, float, float, float]:
    """Measure the seconds of selecting 1 %, of accumulating one message, of nine, and of rounding."""
    pairs = max(1, numel // 100)
    own = torch.Generator(device).manual_seed(0)
    shards = (torch.randn(numel, generator=own, dtype=torch.float32, device=device) for _ in range(3))
    grad_S, residual_S, next_S = shards
    message = compress(grad_S, residual_S, next_S, pairs, value_dtype)
    few, many = (message.expand(count, -1).contiguous() for count in (1, 9))
    rounded, one = Dense16(Work(2, 1, numel)), torch.ones((), dtype=torch.float32, device=device)
    shard = Shard(grad_S, residual_S, next_S, one)

    def cast() -> None:  # S elements in each of the three, however many nodes share them
        rows = rounded.split(shard)
        rounded.merge(rows, 0, next_S)
        rounded.apply(rows, shard)

    return (
        seconds(lambda: compress(grad_S, residual_S, next_S, pairs, value_dtype)),
        seconds(lambda: accumulate(few, grad_S, pairs, value_dtype)),
        seconds(lambda: accumulate(many, grad_S, pairs, value_dtype)),
        seconds(cast),
    )


def _link(agreed: _AgreedTimer, all_gather: Callable[[Tensor], Tensor], members: int) -> tuple[Link, int]:
    """Latency and rate of an all-gather between so many, and the bytes that were received to find out."""
    steps = members - 1
    tiny = torch.zeros(64, dtype=torch.uint8, device=agreed.device)
    latency = agreed.seconds(lambda: all_gather(tiny)) / steps
    received = FIRST_BYTES
    while True:
        message = torch.zeros(max(64, received // steps), dtype=torch.uint8, device=agreed.device)
        send = partial(all_gather, message)
        taken = agreed.seconds(send)
        if taken >= ENOUGH_S or received >= MOST_BYTES:
            taken = min(taken, agreed.seconds(send, min(MOST_REPEATS, int(RATE_S / taken))))
            if taken >= ENOUGH_S / GROWTH or received >= MOST_BYTES:
                break
        received *= GROWTH
    nbytes = steps * message.numel()
    return Link(latency, max(taken - steps * latency, 0.1 * taken) / nbytes), nbytes


class _AgreedTimer:
    """Times a call on all ranks at once: the slowest rank's time, and of a few such the least disturbed."""

    def __init__(self, comm: HierCommunicator, device: torch.device) -> None:
        self.device = device
        self._comm = comm

    def seconds(self, call: Callable[[], object], repeats: int = REPEATS) -> float:
        first = self._once(call)  # it connects, and allocates
        return min(self._once(call) for _ in range(max(1, min(repeats, int(SLOW_S / first)))))

    def _once(self, call: Callable[[], object]) -> float:
        self._slowest(0.0)  # all begin together
        begin = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._slowest(time.perf_counter() - begin)

    def _slowest(self, number: float) -> float:
        return largest(number, self._comm.flat_all_reduce, self.device)
