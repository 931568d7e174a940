"""Which ranks share a node, and their process groups. Resolved once, and passed explicitly.

M nodes of L devices form a mesh. Rank (m, l) belongs to the world and to two groups:

====== ============================== ==================================================
group  ranks                          use
====== ============================== ==================================================
intra  (m, 0) ... (m, L-1)            reduce-scatter and all-gather over the fast links
inter  (0, l) ... (M-1, l)            the exchange over the slow network, L of them at once
====== ============================== ==================================================
"""

import os
import socket
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_sparse.agree import compare, gather
from lightning_sparse.internals import nccl_options
from lightning_sparse.messages import listed, log
from lightning_sparse.waits import waiting

Kind = Literal["hierarchical", "one node", "one rank", "unequal nodes"]

_NODE_RANK_VARIABLES = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")
_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID")
NODE_VARIABLE = "LIGHTNING_SPARSE_NODE"
"""Environment variable that names the node of a process, on any host."""
MAX_CTAS = 4
"""Blocks of a kernel of NCCL between nodes, each of which holds an SM while it waits for the network. One moves some
12 GB/s, so these fill a link of 400 Gbit/s."""


class Traffic:
    """Counts the collectives between nodes that a topology's groups have begun and ended.

    Attributes:
        successor: topology with new groups that replaces this one after a failure.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = self._ended = 0
        self.successor: Topology | None = None

    def begin(self) -> None:
        with self._lock:
            self._begun += 1

    def end(self) -> None:
        with self._lock:
            self._ended += 1

    def counts(self) -> tuple[int, int]:
        """Return how many collectives have begun, and how many have not ended."""
        with self._lock:
            return self._begun, self._begun - self._ended


@dataclass(frozen=True)
class Topology:
    """The place of this rank among all ranks.

    Args:
        nodes: global ranks, one tuple per node in node order, each in device order.
        rank: global rank of this process.
        intra: ranks of this node; None if the hierarchy is not used.
        intra_gather: second group of the ranks of this node, for the last all-gather of a bucket.
        inter: ranks with this device index on all nodes; None if the hierarchy is not used.
        world: all ranks; None for the default group.
        timeout: timeout of the groups; None for that of the default group.

    Raises:
        ValueError: if the nodes do not contain each rank 0 ... P-1 exactly once, or ``rank`` is not among them.
    """

    nodes: tuple[tuple[int, ...], ...]
    rank: int
    intra: ProcessGroup | None = None
    inter: ProcessGroup | None = None
    world: ProcessGroup | None = None
    intra_gather: ProcessGroup | None = None
    timeout: timedelta | None = field(default=None, compare=False, repr=False)
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        if not ranks or ranks != list(range(len(ranks))):
            raise ValueError(
                f"nodes={self.nodes} is not a valid world: each rank 0 ... P-1 must be in exactly one node. Use "
                f"lightning_sparse.topology.discover()."
            )
        if self.rank not in ranks:
            raise ValueError(f"rank={self.rank} is in none of the nodes {self.nodes}.")

    @cached_property
    def world_size(self) -> int:
        return sum(len(node) for node in self.nodes)

    @cached_property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @cached_property
    def num_devices(self) -> int:
        """L."""
        return len(self.nodes[self.node_index])

    @cached_property
    def node_index(self) -> int:
        """m."""
        return next(m for m, node in enumerate(self.nodes) if self.rank in node)

    @cached_property
    def device_index(self) -> int:
        """l."""
        return self.nodes[self.node_index].index(self.rank)

    @cached_property
    def kind(self) -> Kind:
        if self.world_size == 1:
            return "one rank"
        if self.num_nodes == 1:
            return "one node"
        if len({len(node) for node in self.nodes}) > 1:
            return "unequal nodes"
        return "hierarchical"

    def mesh_of_axes(self, node: str, device: str) -> DeviceMesh | None:
        """Return the groups as a mesh with these axis names; None if the hierarchy is not used."""
        if self.intra is None or self.inter is None:
            return None
        kind = device_type(dist.get_backend_config(self.intra))
        ranks = torch.tensor(self.nodes, dtype=torch.int)
        return DeviceMesh.from_group([self.inter, self.intra], kind, mesh=ranks, mesh_dim_names=(node, device))

    def describe(self) -> str:
        path = {
            "hierarchical": "reduces inside each node, then between nodes",
            "one node": "plain all-reduce (no link between nodes to save)",
            "one rank": "nothing to reduce",
            "unequal nodes": "plain all-reduce (nodes of unequal size have no common shards)",
        }[self.kind]
        return f"{self.shape}: {path}"

    @property
    def shape(self) -> str:
        sizes = sorted({len(node) for node in self.nodes})
        devices = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"
        return f"{self.num_nodes} node(s) x {devices} device(s)"


class RankInfo(NamedTuple):
    node_rank: int
    host: str
    local_rank: int
    node_name: str | None = None


def nodes_from_places(places: Iterable[tuple[int, str, int] | RankInfo]) -> tuple[tuple[int, ...], ...]:
    """Group the places of all ranks, in order, into nodes of global ranks. Raise ValueError if only some have a name.

    Nodes are in the order of node rank and host name, each in device order. With names, both are in the order of ranks.

    >>> nodes_from_places([(0, "a", 0), (1, "b", 0), (0, "a", 1), (1, "b", 1)])  # assigned round-robin
    ((0, 2), (1, 3))
    >>> nodes_from_places([RankInfo(0, "a", 0, "rack 2"), RankInfo(1, "b", 0, "rack 2"), RankInfo(2, "c", 0, "rack 1")])
    ((0, 1), (2,))
    """
    stated = [RankInfo(*place) for place in places]
    nameless = [rank for rank, place in enumerate(stated) if not place.node_name]
    if 0 < len(nameless) < len(stated):
        raise ValueError(
            f"rank(s) {listed(nameless)} do not name their node, but the others do. Set {NODE_VARIABLE} "
            f"(or node_name) on every rank, or on none."
        )
    # Ranks of a node need not be contiguous (SLURM's cyclic distribution, MPI's ``--map-by node``), and some launchers
    # give every process the local rank 0. So ranks with equal node rank and host name form a node. Names serve racks,
    # sites, or several nodes on one machine.
    by_node: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for rank, place in enumerate(stated):
        key = (-1, place.node_name) if place.node_name else (place.node_rank, place.host)
        by_node.setdefault(key, []).append((0 if place.node_name else place.local_rank, rank))
    nodes = [tuple(rank for _, rank in sorted(by_node[key])) for key in sorted(by_node)]
    return tuple(nodes if nameless else sorted(nodes, key=min))


def discover(
    *,
    node_rank: int | None = None,
    local_rank: int | None = None,
    node_name: str | None = None,
    config: Mapping[str, Any] | None = None,
    timeout: timedelta | None = None,
) -> Topology:
    """Find the ranks of each node, and create the groups. A collective of the world.

    Args:
        node_rank, local_rank: of this process; default: from torchrun's, Lightning's or SLURM's environment, else 0.
        node_name: name of this process's node, on every rank; default: ``LIGHTNING_SPARSE_NODE``, if it is set.
        config: options that must be equal on all ranks.
        timeout: timeout of the new groups; default: that of the default group.

    Raises:
        ValueError: if torch.distributed is not initialized, or ranks differ in ``config``.
    """
    topology = find_nodes(node_rank=node_rank, local_rank=local_rank, node_name=node_name, config=config)
    return with_groups(topology.nodes, timeout=timeout)


def find_nodes(
    *,
    node_rank: int | None = None,
    local_rank: int | None = None,
    node_name: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Topology:
    """Find the nodes as ``discover`` does, without groups. A collective."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("topology.discover() needs an initialized process group: call init_process_group() first.")
    place = RankInfo(
        _from_environment(_NODE_RANK_VARIABLES) if node_rank is None else node_rank,
        socket.gethostname(),
        _from_environment(_LOCAL_RANK_VARIABLES) if local_rank is None else local_rank,
        str(node_name or os.environ.get(NODE_VARIABLE) or "") or None,
    )
    stated = gather((place, dict(config or {})))
    compare([options for _, options in stated])
    return Topology(nodes_from_places(info for info, _ in stated), dist.get_rank())


def with_groups(nodes: tuple[tuple[int, ...], ...], *, timeout: timedelta | None = None) -> Topology:
    """Return the topology of given nodes, with new groups. A collective of the world."""
    rank = dist.get_rank()
    # A device's shard depends on its index in the group, and torch orders the members of a group.
    nodes = tuple(tuple(sorted(node)) for node in nodes)
    plain = Topology(nodes, rank)
    if plain.world_size != dist.get_world_size():
        raise ValueError(
            f"nodes={nodes} have {plain.world_size} ranks, but the world has {dist.get_world_size()}. List every rank, "
            f"or use topology.discover()."
        )
    # DDP uses the default group at the same time, so with Gloo, `world` is a second group of all ranks.
    in_threads = "cpu:" in dist.get_backend_config()  # collectives on CPU tensors run in threads
    world = new_subgroup([tuple(range(plain.world_size))], timeout, "all ranks") if in_threads else None
    if plain.kind != "hierarchical":
        return Topology(nodes, rank, world=world)
    return Topology(
        nodes,
        rank,
        intra=new_subgroup(nodes, timeout, "inside the node"),
        inter=new_subgroup(
            [tuple(sorted(peers)) for peers in zip(*nodes, strict=True)], timeout, "between nodes", max_ctas=MAX_CTAS
        ),
        world=world,
        # The all-gather of one bucket overlaps with the reduce-scatter of the next. Two threads must not share a Gloo
        # group, and NCCL runs the collectives of a communicator in turn.
        intra_gather=new_subgroup(nodes, timeout, "inside the node, at the end"),
        timeout=timeout,
    )


def undisturbed(topology: Topology) -> Topology:
    """Return the topology, with new groups if transfers of an earlier training are still in flight. A collective."""
    while topology.traffic.successor is not None:
        topology = topology.traffic.successor
    if topology.inter is None:
        return topology
    # After an exception on nodes at different steps, a collective would be paired with an earlier collective of another
    # node.
    with waiting("at the beginning of a training"):
        stated = gather(topology.traffic.counts())
    begun = sorted({count for count, _ in stated})
    if len(begun) == 1 and not any(open_ for _, open_ in stated):
        return topology
    if topology.rank == 0 and len(begun) > 1:
        log.info(
            "an earlier training ended after %d transfers between nodes on one rank and %d on another. This training "
            "uses new process groups, so that the transfers are not mixed",
            begun[0],
            begun[-1],
        )
    renewed = with_groups(topology.nodes, timeout=topology.timeout)
    _abort(topology.inter)
    topology.traffic.successor = renewed
    return renewed


def _abort(group: ProcessGroup) -> None:
    # With NCCL, pending collectives would block their stream, and NCCL's watchdog would end the process at the timeout.
    # Gloo cannot abort: its transfers end with an unread error.
    if "cuda:nccl" in dist.get_backend_config(group):
        group.abort()


def device_type(backends: str) -> str:
    """Return the device that ranks train on, from ``torch.distributed.get_backend_config()``.

    >>> device_type("cpu:gloo,cuda:nccl"), device_type("cuda:nccl"), device_type("cpu:gloo,cuda:gloo")
    ('cuda', 'cuda', 'cpu')
    """
    # ``init_process_group()`` without a backend makes one backend per device if there is a GPU.
    return "cuda" if "cuda:" in backends and "cuda:gloo" not in backends else "cpu"


def new_subgroup(
    partition: Iterable[tuple[int, ...]], timeout: timedelta | None, name: str, *, max_ctas: int | None = None
) -> ProcessGroup | None:
    """Return this rank's group among disjoint groups. A collective of the world.

    Args:
        name: description of the group for NCCL's watchdog.
        max_ctas: maximum number of blocks of an NCCL kernel. NCCL_MAX_CTAS takes precedence.
    """
    cells, default, nccl_alone = [list(ranks) for ranks in partition], dist.group.WORLD, dist.get_backend() == "nccl"
    options: dict[str, Any] = {"timeout": timeout, "group_desc": f"lightning_sparse: {name}"}
    if max_ctas and "cuda:nccl" in dist.get_backend_config() and not os.environ.get("NCCL_MAX_CTAS"):
        options["pg_options"] = nccl_options(default, max_ctas, timeout)
        if not nccl_alone:  # otherwise, each backend would get the options
            options["backend"] = "nccl"
    with waiting("at the creation of process groups"):
        if default is not None and default.bound_device_id is not None and nccl_alone:
            # one split of the communicator for all groups
            split = dist.split_group(split_ranks=cells, **options)
            return split if isinstance(split, ProcessGroup) else None
        # all ranks create all groups, in the same order
        made = [dist.new_group(cell, **options) for cell in cells]
    return next((group for group in made if isinstance(group, ProcessGroup)), None)


def _from_environment(variables: tuple[str, ...]) -> int:
    return next((int(os.environ[name]) for name in variables if os.environ.get(name)), 0)
