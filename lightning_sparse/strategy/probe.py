"""Measures both networks and the kernels with a few collectives, a fraction of a second. A collective of the world.

Every rank runs the same list of measurements at the same time, since the devices of a node share its link, and each
number is the slowest rank's: so all ranks end with the same numbers, and whatever is computed from them is agreed. How
much is sent follows the link: messages grow until one takes `ENOUGH_S`, which all ranks decide on the agreed time.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_sparse.kernels import accumulate, compress
from lightning_sparse.strategy.communicator import HierCommunicator
from lightning_sparse.strategy.cost import Link, Rates
from lightning_sparse.strategy.usage import MAX

ENOUGH_S, SLOW_S = 0.03, 0.1
FIRST_BYTES, MOST_BYTES = 1 << 16, 1 << 24  # received by a device
REPEATS = 2
SELECTED = 1 << 20  # elements of the shard on which kernels are timed
PAIRS = SELECTED // 100


def probe(comm: HierCommunicator, device: torch.device, value_dtype: torch.dtype) -> Rates:
    """What this cluster can do now, the same on all ranks."""
    agreed = _Stopwatch(comm, device)
    nodes, devices = comm.topology.num_nodes, comm.topology.num_devices
    inter, nbytes = _link(agreed, comm.exchange, nodes)
    intra, _ = _link(agreed, comm.gather, devices) if devices > 1 else (Link(0.0, 0.0), 0)

    shard_S = torch.zeros(max(1, nbytes // 8), device=device)
    carried = shard_S.numel() * 4 * (nodes - 1) / nodes  # in each half of the ring
    taken = agreed.seconds(lambda: comm.all_reduce(shard_S))
    adding = taken - 2 * (nodes - 1) * inter.latency - 2 * carried * inter.seconds_per_byte

    return Rates(inter, intra, max(0.0, adding) / carried, *kernel_costs(agreed.seconds, device, value_dtype))


def kernel_costs(
    seconds: Callable[[Callable[[], object]], float], device: torch.device, value_dtype: torch.dtype
) -> tuple[float, float, float]:
    """``select``, ``scatter`` and ``fill`` of `Rates`, by the stopwatch that is given."""
    grad_S, residual_S, next_S = (torch.randn(SELECTED, device=device) for _ in range(3))
    message = compress(grad_S, residual_S, next_S, PAIRS, value_dtype)
    few, many = (message.expand(count, -1).contiguous() for count in (1, 9))
    select = seconds(lambda: compress(grad_S, residual_S, next_S, PAIRS, value_dtype))
    once = seconds(lambda: accumulate(few, grad_S, PAIRS, value_dtype))
    often = seconds(lambda: accumulate(many, grad_S, PAIRS, value_dtype))
    scatter = max(0.0, often - once) / (8 * PAIRS)
    fill = max(0.0, once - PAIRS * scatter) / SELECTED
    return select / SELECTED, scatter, fill


def _link(agreed: "_Stopwatch", all_gather: Callable[[Tensor], Tensor], members: int) -> tuple[Link, int]:
    """Latency and rate of an all-gather between so many, and the bytes that were received to find out."""
    steps = members - 1
    tiny = torch.zeros(64, dtype=torch.uint8, device=agreed.device)
    latency = agreed.seconds(lambda: all_gather(tiny)) / steps
    received = FIRST_BYTES
    while True:
        message = torch.zeros(max(64, received // steps), dtype=torch.uint8, device=agreed.device)
        taken = agreed.seconds(lambda message=message: all_gather(message))  # type: ignore[misc]
        if taken >= ENOUGH_S or received >= MOST_BYTES:
            break
        received *= 2
    nbytes = steps * message.numel()
    return Link(latency, max(taken - steps * latency, 0.1 * taken) / nbytes), nbytes


class _Stopwatch:
    """Times a call on all ranks at once: the slowest rank's time, and of a few such the least disturbed."""

    def __init__(self, comm: HierCommunicator, device: torch.device) -> None:
        self.device = device
        self._comm = comm

    def seconds(self, call: Callable[[], object]) -> float:
        first = self._once(call)  # it connects, and allocates
        repeats = 1 if first > SLOW_S else REPEATS
        return min(self._once(call) for _ in range(repeats))

    def _once(self, call: Callable[[], object]) -> float:
        self._slowest(0.0)  # all begin together
        begin = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._slowest(time.perf_counter() - begin)

    def _slowest(self, number: float) -> float:
        numbers = torch.tensor([number], dtype=torch.float64, device=self.device)
        self._comm.flat_all_reduce(numbers, op=MAX)
        return float(numbers)
