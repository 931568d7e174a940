"""Who shares a step: the ranks of a node, or all of them.

The communicator of the reduction is used as it is. Only its topology is another one, whose "node" is the scope, so that
its all-gather inside the node is the gather of parameters. The groups are the optimizer step's own, so that it never
meets a reduction on another thread.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Literal, get_args

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.topology import Topology, own_group

Scope = Literal["auto", "node", "world"]


def check_scope(scope: object) -> None:
    """Refuse what is not a scope.

    Raises:
        ValueError: for anything else than the known names.
    """
    if scope not in get_args(Scope):
        raise ValueError(
            f"scope={scope!r} is not known: use 'auto' to share the optimizer step where that is faster, 'node' to "
            f"share it inside each node, over fast links only, or 'world' to share it among all ranks, which saves "
            f"more memory and gathers over the slow links."
        )


def communicator_of(topology: Topology, scope: Scope, *, timeout: timedelta | None = None) -> HierCommunicator:
    """A communicator whose ``gather`` spans the scope. A collective where nodes are of unequal size.

    The scope that ``"auto"`` tries is the node, or the world where no node has ranks to share with.

    Args:
        topology: from ``topology.discover()``, made for this purpose.
        timeout: of groups made here; default: that of the default group.

    Raises:
        ValueError: for an unknown scope.
    """
    check_scope(scope)
    # A group's ranks are in ascending order whatever the order of a node's devices, and so are the pieces it gathers.
    nodes = tuple(tuple(sorted(node)) for node in topology.nodes)
    alone = all(len(node) == 1 for node in nodes)
    if scope == "world" or (scope == "auto" and alone) or topology.kind in ("one node", "one rank"):
        everyone = (tuple(range(topology.world_size)),)
        return HierCommunicator(replace(topology, nodes=everyone, intra=topology.world, inter=None))
    intra = topology.intra
    if topology.kind == "unequal nodes":  # the reduction has no use for groups of its nodes, the optimizer step does
        intra = own_group(nodes, timeout)
    return HierCommunicator(replace(topology, nodes=nodes, intra=intra, inter=None))
