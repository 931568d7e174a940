"""Chooses a path for each shard, and measures the rates of networks and kernels for this choice.

A choice depends only on values that are equal on all ranks, so all ranks call the same collectives.
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
from lightning_sparse.exchange.config import ExchangeConfig
from lightning_sparse.exchange.paths import PATHS, Dense, Dense16, Path, Shard, TensorSpec
from lightning_sparse.exchange.rates import Link, Rates
from lightning_sparse.kernels import accumulate, compress
from lightning_sparse.topology import Topology

MARGIN = 0.9
"""A path that leaves out entries must take less than this fraction of the time, because measurements are noisy."""


class PathChoice:
    """Chooses the path of each shard.

    Attributes:
        rates: rates by which ``"auto"`` compares paths; None until the first round measures them.
        forbid_sparse: ``"auto"`` sends all entries.
        reduces_shards: ``"auto"`` uses only paths that reduce inside the node first.
    """

    def __init__(self, config: ExchangeConfig, topology: Topology, numel: int, log_once: Callable[[str], None]) -> None:
        gbps = config.inter_gbps
        self.config = config
        self.rates = None if gbps is None else Rates.of_link(gbps, topology.num_devices)
        self.forbid_sparse = self.reduces_shards = False
        self._topology, self._numel, self._log_once = topology, numel, log_once

    def work(self, numel: int, dtype: torch.dtype) -> TensorSpec:
        return TensorSpec(self._topology.num_nodes, self._topology.num_devices, numel, dtype.itemsize)

    def path(self, work: TensorSpec, density: float, *, exact: bool = False) -> Path:
        """Return the path of a shard. With ``exact``, it sends everything, without rounding errors."""
        if exact:
            return self._fastest(work, density, rounded=False, forbid_sparse=True)
        path_type = self.config.path
        if path_type is None:
            rounded = self.config.value_dtype != "float32" and work.itemsize >= 4
            return self._fastest(work, density, rounded=rounded, forbid_sparse=self.forbid_sparse)
        path = path_type.of(work, density, self.config.dtype)
        return Dense(work) if path is None else path

    def _fastest(self, work: TensorSpec, density: float, *, rounded: bool, forbid_sparse: bool) -> Path:
        rates = self.rates or Rates.of_link(1.0, work.num_devices)  # only "auto" measures them
        refused = {"rounding": not rounded, "entries": forbid_sparse}
        best, least = None, float("inf")
        for kind in PATHS:
            if not kind.in_auto or refused.get(kind.residual_kind) or (self.reduces_shards and not kind.reduces_shards):
                continue
            path = kind.of(work, density, self.config.dtype)
            if path is None:
                continue
            seconds = path.seconds(rates)
            if best is None or seconds < least * (1.0 if kind.residual_kind == "nothing" else MARGIN):
                best, least = path, seconds
        assert best is not None
        return best

    # -- rates ---------------------------------------------------------------------------------------------------------

    @property
    def needs_probe(self) -> bool:
        return self.rates is None and self.config.path is None and self._topology.kind == "hierarchical"

    def measure(self, device: torch.device, round_index: int) -> None:
        """Measure the rates. A collective of the world."""
        # No exchange may be in flight, because it would use the measured networks.
        communicator = HierCommunicator(self._topology)  # a separate object, whose times do not count
        communicator.error_context = f"in round {round_index}"
        self.rates = probe(communicator, device, self.config.dtype, self._numel // self._topology.num_devices)
        self._log_once(f"measured: {self.rates.describe(self._topology.num_devices)}")


# -- measuring the rates -----------------------------------------------------------------------------------------------
#
# A few collectives measure both networks and the kernels, in a fraction of a second.
#
# - Every rank runs the same measurements at the same time, because the devices of a node share its link. Each number is
#   the slowest rank's, so all ranks end with the same numbers and make the same choices.
# - Messages grow until one takes `ENOUGH_S`, so the measurement takes as long on a slow link as on a fast one.
# - Kernels are timed on as many elements as a shard of the run has. Fewer would fit in a CPU's cache and seem faster.
# - Gradients come from a separate generator, because a measurement must not change the random numbers of the run, such
#   as dropout. Dtypes are explicit, because a run may have set another default.
# - Each number is the fastest of a few tries, because a disturbance only adds time. The rate has the most tries: a
#   disturbed message would end the growth too early and pass for a slow link.

ENOUGH_S, SLOW_S = 0.03, 0.1
FIRST_BYTES, MOST_BYTES, GROWTH = 1 << 16, 1 << 24, 4  # bytes that a device receives
REPEATS, MOST_REPEATS = 2, 5
RATE_S = 0.15  # duration of the final measurement of a link
FEW = 64  # elements of a shard so small that only the calls take time
MOST_SELECTED = 1 << 22  # elements of the timed shard: 16 MB, more than a core's caches


def probe(comm: HierCommunicator, device: torch.device, value_dtype: torch.dtype, shard_numel: int) -> Rates:
    """Measure the rates of this cluster, equal on all ranks. Nothing else may use the groups of ``comm``.

    Args:
        shard_numel: number of elements of the largest shard, equal on all ranks.
    """
    agreed = _AgreedTimer(comm, device)
    nodes, devices = comm.topology.num_nodes, comm.topology.num_devices
    inter, nbytes = _link(agreed, comm.exchange, nodes)
    intra, _ = _link(agreed, comm.gather, devices) if devices > 1 else (Link(0.0, 0.0), 0)

    shard_S = torch.zeros(max(1, nbytes // 8), dtype=torch.float32, device=device)
    carried = shard_S.numel() * 4 * (nodes - 1) / nodes  # bytes in each half of the ring
    seconds = agreed.seconds(lambda: comm.all_reduce(shard_S))
    adding = seconds - 2 * (nodes - 1) * inter.latency - 2 * carried * inter.seconds_per_byte

    costs = kernel_costs(agreed.seconds, device, value_dtype, shard_numel)
    return replace(costs, inter=inter, intra=intra, add=max(0.0, adding) / carried)


def kernel_costs(
    seconds: Callable[[Callable[[], object]], float], device: torch.device, value_dtype: torch.dtype, shard_numel: int
) -> Rates:
    """Measure the rates of a device's kernels."""
    numel = min(MOST_SELECTED, max(2 * FEW, shard_numel))
    select_call, fill_call, _, cast_call = _kernel_times(seconds, device, value_dtype, FEW)
    select, once, often, cast = _kernel_times(seconds, device, value_dtype, numel)
    pairs = max(1, numel // 100)
    scatter = max(0.0, often - once) / (8 * pairs)
    fill = max(0.0, once - fill_call - pairs * scatter) / numel
    per_element = [max(0.0, duration) / numel for duration in (select - select_call, cast - cast_call)]
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
    """Measure selecting 1%, accumulating one message and nine messages, and rounding, in seconds."""
    pairs = max(1, numel // 100)
    own = torch.Generator(device).manual_seed(0)
    shards = (torch.randn(numel, generator=own, dtype=torch.float32, device=device) for _ in range(3))
    grad_S, residual_S, next_S = shards
    message = compress(grad_S, residual_S, next_S, pairs, value_dtype)
    few, many = (message.expand(count, -1).contiguous() for count in (1, 9))
    rounded, factor = Dense16(TensorSpec(2, 1, numel)), torch.ones((), dtype=torch.float32, device=device)
    shard = Shard(grad_S, residual_S, next_S, factor)

    def cast() -> None:  # each of the three calls handles S elements, for any number of nodes
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
    """Measure the latency and rate of an all-gather among ranks. Also return the received bytes."""
    steps = members - 1
    tiny = torch.zeros(64, dtype=torch.uint8, device=agreed.device)
    latency = agreed.seconds(lambda: all_gather(tiny)) / steps
    received = FIRST_BYTES
    while True:
        message = torch.zeros(max(64, received // steps), dtype=torch.uint8, device=agreed.device)
        send = partial(all_gather, message)
        seconds = agreed.seconds(send)
        if seconds >= ENOUGH_S or received >= MOST_BYTES:
            seconds = min(seconds, agreed.seconds(send, min(MOST_REPEATS, int(RATE_S / seconds))))
            if seconds >= ENOUGH_S / GROWTH or received >= MOST_BYTES:
                break
        received *= GROWTH
    nbytes = steps * message.numel()
    return Link(latency, max(seconds - steps * latency, 0.1 * seconds) / nbytes), nbytes


class _AgreedTimer:
    """Times a call on all ranks: the slowest rank's time, and the fastest of a few repeats."""

    def __init__(self, comm: HierCommunicator, device: torch.device) -> None:
        self.device = device
        self._comm = comm

    def seconds(self, call: Callable[[], object], repeats: int = REPEATS) -> float:
        first = self._once(call)  # connects and allocates, so it does not count
        return min(self._once(call) for _ in range(max(1, min(repeats, int(SLOW_S / first)))))

    def _once(self, call: Callable[[], object]) -> float:
        self._slowest(0.0)  # a barrier, so that all ranks begin together
        begin = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._slowest(time.perf_counter() - begin)

    def _slowest(self, number: float) -> float:
        return largest(number, self._comm.flat_all_reduce, self.device)
