"""Dense or sparse, for each group and round: a pure function of what all ranks share, measured rates included.

Nothing a rank alone knows may enter here, or ranks would call different collectives.
"""

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

Path = Literal["identity", "flat", "dense", "sparse", "regional"]


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
    *,
    round_index: int,
    epoch: int,
) -> Plan:
    """The path of a settled group on a hierarchical topology."""
    work = cost.Work(topology.num_nodes, topology.num_devices, group.numel, dtype.itemsize)
    k = num_selected(density_at(config, epoch), work.shard_numel)
    if is_dense_round(config, round_index) and config.exchange != "auto":
        return Plan("dense")
    if config.exchange == "regional":
        return Plan("regional", k) if work.shard_numel >= topology.num_nodes else Plan("dense")
    if config.exchange != "auto":
        return Plan(config.exchange, k if config.exchange == "sparse" else 0)
    fastest_dense = min(cost.flat_seconds(work, rates), cost.dense_seconds(work, rates))
    sparse = cost.sparse_seconds(work, rates, k, config.dtype)
    if sparse < cost.MARGIN * fastest_dense and not is_dense_round(config, round_index):
        return Plan("sparse", k)
    return choose_dense(topology, rates, group, dtype)


def choose_dense(topology: Topology, rates: Rates, group: ParamGroup, dtype: torch.dtype) -> Plan:
    """The cheaper of the two dense paths: of a group excluded from selection, or where sparse would not be faster."""
    work = cost.Work(topology.num_nodes, topology.num_devices, group.numel, dtype.itemsize)
    return Plan("dense" if cost.dense_seconds(work, rates) <= cost.flat_seconds(work, rates) else "flat")


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
    if plan.path == "regional":
        return cost.regional_bytes(nodes, Regions(shard, nodes, plan.k, config.dtype).row_nbytes), flat
    return cost.sparse_bytes(nodes, message_bytes(shard, plan.k, config.dtype)), flat


def is_reducible_by_shard(dtype: torch.dtype) -> bool:
    """Whether gradients of this dtype take the hierarchical path; float64 ones are all-reduced whole."""
    return dtype in (torch.float32, torch.float16, torch.bfloat16)
