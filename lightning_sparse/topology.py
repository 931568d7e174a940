"""Which ranks share a node, and the process groups that follow from it. Resolved once, passed explicitly.

With M nodes of L devices each, rank (m, l) belongs to two groups besides the world:

====== ============================== ==================================================
group  its ranks                      what it is for
====== ============================== ==================================================
intra  (m, 0) ... (m, L-1)            reduce-scatter and all-gather over the fast links
inter  (0, l) ... (M-1, l)            the exchange over the slow network, L of them at once
====== ============================== ==================================================

``outward`` has intra's ranks once more: with Gloo the all-gather that ends one bucket runs on another thread than the
reduce-scatter that begins the next, and two threads must not share a group. (NCCL opens a group at its first use, so
one that is not used costs nothing.)

Ranks of a node need not be contiguous: SLURM's cyclic distribution and MPI's ``--map-by node`` deal them out like
cards, and some launchers give every process the local rank 0. So nothing is computed from the rank number. Every rank
states where it is (node rank, host name, local rank), all ranks see all statements, and a node is what agrees in the
first two. Once groups exist, devices of a node are ordered by global rank, as torch orders the members of a group.
"""

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup

Kind = Literal["hierarchical", "one node", "one rank", "unequal nodes"]

_NODE_RANK_VARIABLES = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")
_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID")


@dataclass(frozen=True)
class Topology:
    """The place of this rank among all ranks.

    Args:
        nodes: global ranks, one tuple a node in node order, each in device order.
        rank: the global rank of this process.
        intra: the ranks of this node; None where the hierarchy is not used.
        outward: the same ranks again.
        inter: the ranks of equal device index on all nodes; None where the hierarchy is not used.
        world: all ranks; None stands for the default group.

    Raises:
        ValueError: when the nodes do not hold each rank 0 ... P-1 exactly once, or ``rank`` is not among them.
    """

    nodes: tuple[tuple[int, ...], ...]
    rank: int
    intra: ProcessGroup | None = None
    inter: ProcessGroup | None = None
    world: ProcessGroup | None = None
    outward: ProcessGroup | None = None

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        if not ranks or ranks != list(range(len(ranks))):
            raise ValueError(
                f"nodes={self.nodes} does not describe a world: each rank 0 ... P-1 must stand in exactly one node. "
                f"Leave the topology to lightning_sparse.topology.discover() unless you know better."
            )
        if self.rank not in ranks:
            raise ValueError(f"rank={self.rank} is in none of the nodes {self.nodes}.")

    @property
    def world_size(self) -> int:
        """P, the number of ranks."""
        return sum(len(node) for node in self.nodes)

    @property
    def num_nodes(self) -> int:
        """M, the number of nodes."""
        return len(self.nodes)

    @property
    def num_devices(self) -> int:
        """L, the number of devices of this rank's node."""
        return len(self.nodes[self.node_index])

    @property
    def node_index(self) -> int:
        """m, the node of this rank."""
        return next(m for m, node in enumerate(self.nodes) if self.rank in node)

    @property
    def device_index(self) -> int:
        """l, the place of this rank inside its node."""
        return self.nodes[self.node_index].index(self.rank)

    @property
    def kind(self) -> Kind:
        """Which of the defined paths this world takes; only "hierarchical" has a slow link to save."""
        if self.world_size == 1:
            return "one rank"
        if self.num_nodes == 1:
            return "one node"
        if len({len(node) for node in self.nodes}) > 1:
            return "unequal nodes"
        return "hierarchical"

    def describe(self) -> str:
        """One line for the log: what was found and which path follows from it."""
        path = {
            "hierarchical": "hierarchical reduction",
            "one node": "plain all-reduce (no link between nodes to save)",
            "one rank": "nothing to reduce",
            "unequal nodes": "plain all-reduce (nodes of unequal size have no common shards)",
        }[self.kind]
        sizes = sorted({len(node) for node in self.nodes})
        devices = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"
        return f"{self.num_nodes} node(s) x {devices} device(s): {path}"


def nodes_from_places(places: Iterable[tuple[int, str, int]]) -> tuple[tuple[int, ...], ...]:
    """Group ranks into nodes.

    Args:
        places: for each rank in order, its (node rank, host name, local rank).

    Returns:
        Global ranks by node, ordered by node rank and host name, each node in device order.

    >>> nodes_from_places([(0, "a", 0), (1, "b", 0), (0, "a", 1), (1, "b", 1)])  # dealt out like cards
    ((0, 2), (1, 3))
    """
    by_node: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for rank, (node_rank, host, local_rank) in enumerate(places):
        by_node.setdefault((node_rank, host), []).append((local_rank, rank))
    return tuple(tuple(rank for _, rank in sorted(by_node[key])) for key in sorted(by_node))


def discover(
    *, node_rank: int | None = None, local_rank: int | None = None, timeout: timedelta | None = None
) -> Topology:
    """Find out which ranks share a node and create the groups. A collective: every rank of the world calls it.

    Args:
        node_rank: this process's node; default: the launcher's environment (torchrun, Lightning, SLURM), else 0.
        local_rank: this process's place in its node; default: the launcher's environment, else 0.
        timeout: of the new groups; default: that of the default group.

    Raises:
        ValueError: when torch.distributed is not initialised.
    """
    nodes = locate(node_rank=node_rank, local_rank=local_rank).nodes
    return with_groups(nodes, timeout=timeout)


def locate(*, node_rank: int | None = None, local_rank: int | None = None) -> Topology:
    """Find out which ranks share a node, and create no groups. A collective: every rank of the world calls it.

    Args:
        node_rank: this process's node; default: the launcher's environment (torchrun, Lightning, SLURM), else 0.
        local_rank: this process's place in its node; default: the launcher's environment, else 0.

    Raises:
        ValueError: when torch.distributed is not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("topology.discover() needs an initialised process group: call init_process_group() first.")
    node_rank = _from_environment(_NODE_RANK_VARIABLES) if node_rank is None else node_rank
    local_rank = _from_environment(_LOCAL_RANK_VARIABLES) if local_rank is None else local_rank
    places: list[tuple[int, str, int]] = [(0, "", 0)] * dist.get_world_size()
    dist.all_gather_object(places, (node_rank, socket.gethostname(), local_rank))
    return Topology(nodes_from_places(places), dist.get_rank())


def with_groups(nodes: tuple[tuple[int, ...], ...], *, timeout: timedelta | None = None) -> Topology:
    """The topology of given nodes, with its groups created. A collective: every rank of the world calls it.

    Raises:
        ValueError: when the nodes do not hold the ranks of the running world.
    """
    rank = dist.get_rank()
    # new_group() sorts its ranks, so a device's place in its group, hence its shard, follows the global rank.
    nodes = tuple(tuple(sorted(node)) for node in nodes)
    plain = Topology(nodes, rank)
    if plain.world_size != dist.get_world_size():
        raise ValueError(
            f"nodes={nodes} hold {plain.world_size} ranks but the world has {dist.get_world_size()}: "
            f"describe every rank, or leave it to topology.discover()."
        )
    # A world of our own: reductions may run while DDP talks on the default group.
    world = _new_group(tuple(range(plain.world_size)), timeout)
    if plain.kind != "hierarchical":
        return Topology(nodes, rank, world=world)
    # All ranks create all groups in one order, members or not: that is what new_group() demands.
    intra_groups = [_new_group(node, timeout) for node in nodes]
    inter_groups = [_new_group(peers, timeout) for peers in zip(*nodes, strict=True)]
    outward_groups = [_new_group(node, timeout) for node in nodes]
    return Topology(
        nodes,
        rank,
        intra=intra_groups[plain.node_index],
        inter=inter_groups[plain.device_index],
        world=world,
        outward=outward_groups[plain.node_index],
    )


def _new_group(ranks: tuple[int, ...], timeout: timedelta | None) -> ProcessGroup | None:
    group = dist.new_group(list(ranks), timeout=timeout)
    return group if isinstance(group, ProcessGroup) else None  # non-members get a number instead


def _from_environment(variables: tuple[str, ...]) -> int:
    return next((int(os.environ[name]) for name in variables if os.environ.get(name)), 0)
