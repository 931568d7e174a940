"""Which ranks share a node, and the process groups that follow from it. Resolved once, passed explicitly.

With M nodes of L devices each, the ranks form a mesh of axes *node* and *device*. In addition to the world, rank (m, l)
belongs to two groups:

====== ============================== ==================================================
group  its ranks                      use
====== ============================== ==================================================
intra  (m, 0) ... (m, L-1)            reduce-scatter and all-gather over the fast links
inter  (0, l) ... (M-1, l)            the exchange over the slow network, L of them at once
====== ============================== ==================================================

``intra_gather`` has the ranks of ``intra`` again, for the all-gather that ends one bucket while the reduce-scatter of
the next begins. Two threads must not share a Gloo group, and NCCL executes the collectives of one communicator in turn.
With Gloo, ``world`` is a second group of all ranks, because DDP uses the default group at the same time. NCCL makes all
groups of an axis by one split of its communicator.

Ranks of a node need not be contiguous: SLURM's cyclic distribution and MPI's ``--map-by node`` assign them
round-robin, and some launchers give every process the local rank 0. So nothing is computed from the rank number. Every
rank publishes its node rank, host name and local rank. Ranks with equal node rank and host name form a node. Instead,
each rank can name its node (``LIGHTNING_SPARSE_NODE``), for racks with fast links between hosts, for sites, or for
several nodes on one machine.
Devices of a node are ordered by global rank, as torch orders the members of a group.
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

from lightning_sparse.agree import compare
from lightning_sparse.internals import nccl_options
from lightning_sparse.messages import log
from lightning_sparse.waits import waiting

Kind = Literal["hierarchical", "one node", "one rank", "unequal nodes"]

_NODE_RANK_VARIABLES = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")
_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID")
NODE_VARIABLE = "LIGHTNING_SPARSE_NODE"
"""Names the node of a process, whatever host it runs on."""
MAX_CTAS = 4
"""Blocks of a kernel of NCCL between nodes, each of which holds an SM while it waits for the network. One moves some
12 GB/s, so these fill a link of 400 Gbit/s."""


class Traffic:
    """Counts the collectives between nodes that a topology's groups have begun and ended. An interrupted or failed
    collective has not ended.

    Attributes:
        successor: the topology with new groups that replaces this one, once its groups cannot be used again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = self._ended = 0
        self.successor: Topology | None = None

    def begin(self) -> None:
        """Count a collective that begins, or that is queued."""
        with self._lock:
            self._begun += 1

    def end(self) -> None:
        """Count a collective that has ended."""
        with self._lock:
            self._ended += 1

    def counts(self) -> tuple[int, int]:
        """Return how many collectives have begun, and how many of them have not ended."""
        with self._lock:
            return self._begun, self._begun - self._ended


@dataclass(frozen=True)
class Topology:
    """The place of this rank among all ranks.

    Args:
        nodes: global ranks, one tuple a node in node order, each in device order.
        rank: the global rank of this process.
        intra: the ranks of this node; None where the hierarchy is not used.
        intra_gather: the ranks of this node again, for the last all-gather of a bucket.
        inter: the ranks of equal device index on all nodes; None where the hierarchy is not used.
        world: all ranks; None stands for the default group.
        timeout: of the groups; None: the timeout of the default group.
        traffic: of the groups.

    Raises:
        ValueError: when the nodes do not hold each rank 0 ... P-1 exactly once, or ``rank`` is not among them.
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
                f"nodes={self.nodes} does not describe a world: each rank 0 ... P-1 must stand in exactly one node. "
                f"Leave the topology to lightning_sparse.topology.discover() unless you know better."
            )
        if self.rank not in ranks:
            raise ValueError(f"rank={self.rank} is in none of the nodes {self.nodes}.")

    @cached_property
    def world_size(self) -> int:
        """P, the number of ranks."""
        return sum(len(node) for node in self.nodes)

    @cached_property
    def num_nodes(self) -> int:
        """M, the number of nodes."""
        return len(self.nodes)

    @cached_property
    def num_devices(self) -> int:
        """L, the number of devices of this rank's node."""
        return len(self.nodes[self.node_index])

    @cached_property
    def node_index(self) -> int:
        """m, the node of this rank."""
        return next(m for m, node in enumerate(self.nodes) if self.rank in node)

    @cached_property
    def device_index(self) -> int:
        """l, the place of this rank inside its node."""
        return self.nodes[self.node_index].index(self.rank)

    @cached_property
    def kind(self) -> Kind:
        """Which of the defined paths this world takes; only "hierarchical" has a slow link to save."""
        if self.world_size == 1:
            return "one rank"
        if self.num_nodes == 1:
            return "one node"
        if len({len(node) for node in self.nodes}) > 1:
            return "unequal nodes"
        return "hierarchical"

    def mesh_of_axes(self, node: str, device: str) -> DeviceMesh | None:
        """Return the groups as a mesh with these names of its axes; None if the hierarchy is not used."""
        if self.intra is None or self.inter is None:
            return None
        kind = device_type(dist.get_backend_config(self.intra))
        ranks = torch.tensor(self.nodes, dtype=torch.int)
        return DeviceMesh.from_group([self.inter, self.intra], kind, mesh=ranks, mesh_dim_names=(node, device))

    def describe(self) -> str:
        """One line for the log: what was found and which path follows from it."""
        path = {
            "hierarchical": "reduces inside each node, then between nodes",
            "one node": "plain all-reduce (no link between nodes to save)",
            "one rank": "nothing to reduce",
            "unequal nodes": "plain all-reduce (nodes of unequal size have no common shards)",
        }[self.kind]
        return f"{self.shape}: {path}"

    @property
    def shape(self) -> str:
        """For logs: how many nodes of how many devices."""
        sizes = sorted({len(node) for node in self.nodes})
        devices = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"
        return f"{self.num_nodes} node(s) x {devices} device(s)"


class RankInfo(NamedTuple):
    """What a process states of itself."""

    node_rank: int
    host: str
    local_rank: int
    node_name: str | None = None


def nodes_from_places(places: Iterable[tuple[int, str, int] | RankInfo]) -> tuple[tuple[int, ...], ...]:
    """Group ranks into nodes.

    Args:
        places: of each rank in order.

    Returns:
        Global ranks by node, each node in device order; nodes by node rank and host name. With names, both are in the
        order of ranks.

    Raises:
        ValueError: when some ranks name their node and others do not.

    >>> nodes_from_places([(0, "a", 0), (1, "b", 0), (0, "a", 1), (1, "b", 1)])  # assigned round-robin
    ((0, 2), (1, 3))
    >>> nodes_from_places([RankInfo(0, "a", 0, "rack 2"), RankInfo(1, "b", 0, "rack 2"), RankInfo(2, "c", 0, "rack 1")])
    ((0, 1), (2,))
    """
    stated = [RankInfo(*place) for place in places]
    nameless = [rank for rank, place in enumerate(stated) if not place.node_name]
    if 0 < len(nameless) < len(stated):
        raise ValueError(
            f"rank(s) {', '.join(map(str, nameless))} do not name their node and the others do: set {NODE_VARIABLE} "
            f"(or node_name) on every rank, or on none."
        )
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
    """Find out which ranks share a node and create the groups. A collective: every rank of the world calls it.

    Args:
        node_rank, local_rank: of this process; default: from torchrun's, Lightning's or SLURM's environment, else 0.
        node_name: the node of this process by name, on every rank; default: ``LIGHTNING_SPARSE_NODE``, if it is set.
        config: options that must be the same on all ranks.
        timeout: of the new groups; default: that of the default group.

    Raises:
        ValueError: when torch.distributed is not initialised, or ranks differ in ``config``.
    """
    found = find_nodes(node_rank=node_rank, local_rank=local_rank, node_name=node_name, config=config)
    return with_groups(found.nodes, timeout=timeout)


def find_nodes(
    *,
    node_rank: int | None = None,
    local_rank: int | None = None,
    node_name: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Topology:
    """As discover(), without creating groups. A collective: every rank of the world calls it."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("topology.discover() needs an initialised process group: call init_process_group() first.")
    place = RankInfo(
        _from_environment(_NODE_RANK_VARIABLES) if node_rank is None else node_rank,
        socket.gethostname(),
        _from_environment(_LOCAL_RANK_VARIABLES) if local_rank is None else local_rank,
        str(node_name or os.environ.get(NODE_VARIABLE) or "") or None,
    )
    stated: list[tuple[RankInfo, dict[str, Any]]] = [(place, {})] * dist.get_world_size()
    dist.all_gather_object(stated, (place, dict(config or {})))
    compare([each for _, each in stated])
    return Topology(nodes_from_places(each for each, _ in stated), dist.get_rank())


def with_groups(nodes: tuple[tuple[int, ...], ...], *, timeout: timedelta | None = None) -> Topology:
    """The topology of given nodes, with its groups created. A collective: every rank of the world calls it.

    Raises:
        ValueError: when the nodes do not hold the ranks of the running world.
    """
    rank = dist.get_rank()
    nodes = tuple(tuple(sorted(node)) for node in nodes)  # a device's shard follows its place in the group
    plain = Topology(nodes, rank)
    if plain.world_size != dist.get_world_size():
        raise ValueError(
            f"nodes={nodes} hold {plain.world_size} ranks but the world has {dist.get_world_size()}: "
            f"describe every rank, or leave it to topology.discover()."
        )
    in_threads = "cpu:" in dist.get_backend_config()  # some collectives, on CPU tensors
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
        intra_gather=new_subgroup(nodes, timeout, "inside the node, at the end"),
        timeout=timeout,
    )


def undisturbed(topology: Topology) -> Topology:
    """Return the topology, with new groups if transfers of an earlier training are still in flight. After an exception
    on nodes at different steps, a collective would otherwise be paired with an earlier collective of another node.
    Every rank of the world calls it.
    """
    while topology.traffic.successor is not None:
        topology = topology.traffic.successor
    if topology.inter is None:
        return topology
    mine = topology.traffic.counts()
    stated = [mine] * dist.get_world_size()
    with waiting("at the beginning of a training"):
        dist.all_gather_object(stated, mine)
    begun = sorted({count for count, _ in stated})
    if len(begun) == 1 and not any(open_ for _, open_ in stated):
        return topology
    if topology.rank == 0 and len(begun) > 1:
        log.info(
            "an earlier training ended after %d transfers between nodes on one rank and %d on another: this one uses "
            "new process groups, so that no transfer meets one of the earlier training",
            begun[0],
            begun[-1],
        )
    renewed = with_groups(topology.nodes, timeout=topology.timeout)
    _abort(topology.inter)
    topology.traffic.successor = renewed
    return renewed


def _abort(group: ProcessGroup) -> None:
    """Abort the pending collectives of a group that is not used again. With NCCL they would block their stream, and
    NCCL's watchdog would end the process at the timeout. Gloo cannot abort: its transfers end with an unread error."""
    if "cuda:nccl" in dist.get_backend_config(group):
        group.abort()


def device_type(backends: str) -> str:
    """Return the device that ranks train on, from the backends of their process group: "cuda" or "cpu".

    A group may have one for each device: ``init_process_group()`` without a name makes it so where there is a GPU.

    Args:
        backends: as of ``torch.distributed.get_backend_config()``.

    >>> device_type("cpu:gloo,cuda:nccl"), device_type("cuda:nccl"), device_type("cpu:gloo,cuda:gloo")
    ('cuda', 'cuda', 'cpu')
    """
    return "cuda" if "cuda:" in backends and "cuda:gloo" not in backends else "cpu"


def new_subgroup(
    partition: Iterable[tuple[int, ...]], timeout: timedelta | None, name: str, *, max_ctas: int | None = None
) -> ProcessGroup | None:
    """This rank's group, of groups that have no rank in common. A collective: every rank of the world calls it.

    Args:
        name: which NCCL's watchdog tells when a collective of the group does not end.
        max_ctas: blocks of a kernel of NCCL, at most; default: NCCL's own. NCCL_MAX_CTAS takes precedence.
    """
    cells, default, nccl_alone = [list(ranks) for ranks in partition], dist.group.WORLD, dist.get_backend() == "nccl"
    options: dict[str, Any] = {"timeout": timeout, "group_desc": f"lightning_sparse: {name}"}
    if max_ctas and "cuda:nccl" in dist.get_backend_config() and not os.environ.get("NCCL_MAX_CTAS"):
        options["pg_options"] = nccl_options(default, max_ctas, timeout)
        if not nccl_alone:  # otherwise each backend would get the options
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
