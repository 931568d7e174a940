"""Dense or sparse, for each group and round: a pure function of what all ranks share, measured rates included.

Nothing a rank alone knows may enter here, or ranks would call different collectives.
"""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch

from lightning_sparse.kernels import message_bytes
from lightning_sparse.strategy import cost
from lightning_sparse.strategy.config import HierConfig
from lightning_sparse.strategy.cost import Rates
from lightning_sparse.strategy.layout import ParamGroup
from lightning_sparse.strategy.regional import Regions
from lightning_sparse.strategy.schedule import density_at, is_dense_round, num_selected
from lightning_sparse.topology import Topology

Path = Literal["identity", "flat", "dense", "dense16", "sparse", "regional"]
STEPS_OF_DENSITY = 2  # a doubling: so that a small change of what is measured changes nothing


class Plan(NamedTuple):
    """How a group is reduced. "identity" is DDP's own all-reduce, "flat" the same with the residual in it; k counts for
    "sparse" and "regional"."""

    path: Path
    k: int = 0


def choose(
    config: HierConfig,
    topology: Topology,
    rates: Rates,
    group: ParamGroup,
    dtype: torch.dtype,
    density: float,
    round_index: int,
    epoch: int,
) -> Plan:
    """The path of a settled group on a hierarchical topology, if it is not excluded from selection."""
    if is_dense_round(config, round_index) and config.exchange not in ("auto", "dense16"):
        return Plan("dense")
    work = _work(topology, group, dtype)
    plan, _ = _fastest(config, work, rates, num_selected(density_at(config, epoch, density), work.shard_numel))
    if plan.path == "sparse" and is_dense_round(config, round_index):
        return _fastest_whole(config, work, rates)[0]
    return plan


def choose_dense(config: HierConfig, topology: Topology, rates: Rates, group: ParamGroup, dtype: torch.dtype) -> Plan:
    """The path of a settled group that is excluded from selection: the cheaper of the two that round nothing."""
    return _fastest_exact(config, _work(topology, group, dtype), rates)[0]


def free_density(
    config: HierConfig,
    topology: Topology,
    rates: Rates,
    groups: Iterable[tuple[ParamGroup, torch.dtype]],
    window: float,
) -> float:
    """The largest density, from ``config.least_density`` to 1, at which these groups are reduced within ``window``
    seconds; the least one if none is. At 1 ``exchange="auto"`` goes dense."""
    works = [_work(topology, group, dtype) for group, dtype in groups]

    def seconds(density: float) -> float:
        return sum(_fastest(config, work, rates, num_selected(density, work.shard_numel))[1] for work in works)

    least = config.least_density
    steps = int(math.log2(1 / least) * STEPS_OF_DENSITY)
    densities = [least * 2 ** (i / STEPS_OF_DENSITY) for i in range(steps + 1)] + [1.0]
    return max((density for density in densities if seconds(density) <= window), default=least)


def _work(topology: Topology, group: ParamGroup, dtype: torch.dtype) -> cost.Work:
    return cost.Work(topology.num_nodes, topology.num_devices, group.numel, dtype.itemsize)


def _fastest(config: HierConfig, work: cost.Work, rates: Rates, k: int) -> tuple[Plan, float]:
    """What the configuration allows, and how many seconds it takes."""
    if config.exchange == "dense" or (config.exchange == "regional" and work.shard_numel < work.num_nodes):
        return Plan("dense"), cost.dense_seconds(work, rates)
    if config.exchange == "dense16":
        return Plan("dense16"), cost.dense16_seconds(work, rates)
    if config.exchange == "regional":
        return Plan("regional", k), cost.regional_seconds(work, rates, k, config.dtype)
    sparse = cost.sparse_seconds(work, rates, k, config.dtype)
    dense_plan, dense = _fastest_whole(config, work, rates)
    if config.exchange == "sparse" or sparse < cost.MARGIN * dense:
        return Plan("sparse", k), sparse
    return dense_plan, dense


def _fastest_whole(config: HierConfig, work: cost.Work, rates: Rates) -> tuple[Plan, float]:
    """Of the paths that send everything. Values are rounded only where the user allows that in messages, and where
    their error has a residual to go to."""
    plan, exact = _fastest_exact(config, work, rates)
    if config.value_dtype == "float32" or not config.error_feedback or work.itemsize < 4:
        return plan, exact
    rounded = cost.dense16_seconds(work, rates)
    return (Plan("dense16"), rounded) if rounded < cost.MARGIN * exact else (plan, exact)


def _fastest_exact(config: HierConfig, work: cost.Work, rates: Rates) -> tuple[Plan, float]:
    flat, dense = cost.flat_seconds(work, rates), cost.dense_seconds(work, rates)
    if dense <= flat or config.momentum_correction:  # a velocity moves by its node's sum, which flat never forms
        return Plan("dense"), dense
    return Plan("flat"), flat


def bytes_of(
    plan: Plan, config: HierConfig, topology: Topology, group: ParamGroup, dtype: torch.dtype
) -> tuple[float, float]:
    """Bytes received between nodes per device: of this plan, and of DDP's all-reduce of the same group."""
    nodes, shard = topology.num_nodes, group.shard_numel(topology.num_devices)
    flat = cost.flat_bytes(nodes, topology.world_size, group.numel, dtype.itemsize)
    if plan.path in ("identity", "flat"):
        return flat, flat
    if plan.path == "dense":
        return cost.dense_bytes(nodes, shard, dtype.itemsize), flat
    if plan.path == "dense16":
        return cost.dense16_bytes(nodes, shard), flat
    if plan.path == "regional":
        return cost.regional_bytes(nodes, Regions(shard, nodes, plan.k, config.dtype).row_nbytes), flat
    return cost.sparse_bytes(nodes, message_bytes(shard, plan.k, config.dtype)), flat


def seconds_between(
    plan: Plan, config: HierConfig, topology: Topology, rates: Rates, group: ParamGroup, dtype: torch.dtype
) -> float:
    """What this plan spends in collectives between nodes, or of all ranks."""
    ranks, nodes = topology.world_size, topology.num_nodes
    steps = {"sparse": nodes - 1, "regional": 2 * (nodes - 1), "dense": 2 * (nodes - 1), "dense16": 2 * (nodes - 1)}
    nbytes, _ = bytes_of(plan, config, topology, group, dtype)
    seconds = steps.get(plan.path, 2 * (ranks - 1)) * rates.inter.latency + nbytes * rates.inter.seconds_per_byte
    if plan.path == "dense":
        return seconds + nbytes / 2 * rates.add
    if plan.path in ("flat", "identity"):
        return seconds + (ranks - 1) / ranks * group.numel * dtype.itemsize * rates.add
    return seconds


def is_reducible_by_shard(dtype: torch.dtype) -> bool:
    """Whether gradients of this dtype take the hierarchical path; float64 ones are all-reduced whole."""
    return dtype in (torch.float32, torch.float16, torch.bfloat16)
