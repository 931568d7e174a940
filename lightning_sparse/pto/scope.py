"""The scope of a shared step: the ranks of a node, or all ranks.

The step uses the communicator class of the reduction; the ranks that count as its node are the scope. Its process
groups are separate, so that its collectives never run on a group that a reduction uses in another thread.
"""

from datetime import timedelta
from typing import Literal, get_args

from lightning_sparse.exchange.communicator import Group, HierCommunicator
from lightning_sparse.topology import Topology, own_group

Scope = Literal["auto", "node", "world"]


def check_scope(scope: object) -> None:
    """Raise ValueError if the scope is unknown."""
    if scope not in get_args(Scope):
        raise ValueError(
            f"scope={scope!r} is unknown: use 'auto' to share the optimizer step if that is faster, 'node' to share it "
            f"inside each node, over fast links, or 'world' to share it among all ranks, which saves the most memory "
            f"and gathers over slow links."
        )


def communicator_of(topology: Topology, scope: Scope, *, timeout: timedelta | None = None) -> HierCommunicator:
    """Return a communicator whose ``gather`` spans the scope. A collective if the nodes are of unequal size.

    ``"auto"`` is the node, or the world if every node has one rank.

    Args:
        topology: from ``topology.discover()``, with process groups for this communicator only.
        timeout: timeout of new groups; default: that of the default group.

    Raises:
        ValueError: if the scope is unknown.
    """
    check_scope(scope)
    alone = all(len(node) == 1 for node in topology.nodes)
    if scope == "world" or (scope == "auto" and alone) or topology.kind in ("one node", "one rank"):
        return HierCommunicator(topology, node=Group(tuple(range(topology.world_size)), topology.rank, topology.world))
    # a group gathers in ascending order of ranks, whatever the order of a node's devices
    nodes = tuple(tuple(sorted(node)) for node in topology.nodes)
    handle = topology.intra
    if topology.kind == "unequal nodes":  # the reduction makes no groups for them
        handle = own_group(nodes, timeout, "the shared step")
    return HierCommunicator(topology, node=Group(nodes[topology.node_index], topology.rank, handle))
