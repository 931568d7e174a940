"""The state of `LocalUpdates` for a checkpoint, and back, also on another cluster.

On the same cluster a device goes on with its own state, bit-identically. On another one the shared weights are kept,
and every new node starts with the mean of what the old nodes had pending, so the mean over nodes is kept, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.updates.local import LocalUpdates

Piece = tuple[str, int, int]
"""A part of a parameter: its name, and the first element and the last one plus 1, in memory order."""


def side_content(updates: LocalUpdates) -> dict[str, Any]:
    """What this device alone knows between two steps, on the CPU; waits for messages under way."""
    names = updates.names
    nodes = [
        {"steps": node.steps, "pieces": node.state.slices.named(names), **node.state_dict()} for node in updates.nodes
    ]
    return {"steps": updates.steps, "nodes": nodes, "buffers": [each.cpu() for each in updates.buffers.own()]}


@torch.no_grad()
def restore_own(updates: LocalUpdates, content: dict[str, Any]) -> bool:
    """Go on exactly where this device was saved. False if it held other pieces of the parameters then."""
    names = updates.names
    saved = content["nodes"]
    fits = len(saved) == len(updates.nodes) and all(
        node.state.slices.named(names) == [tuple(piece) for piece in each["pieces"]]
        for node, each in zip(updates.nodes, saved, strict=True)
    )
    if not fits:
        return False
    updates.steps = content["steps"]
    for node, each in zip(updates.nodes, saved, strict=True):
        node.steps = each["steps"]
        node.load_state_dict(each)
    updates.buffers.load(content["buffers"])
    return True


@torch.no_grad()
def restore_mean(updates: LocalUpdates, by_node: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Start from the shared weights and the mean of what was pending.

    Args:
        by_node: what ``side_content`` gave, of all devices of all nodes.
    """
    shared = _whole(by_node[0], "shared")
    pending = [_whole(contents, "pending") for contents in by_node]
    updates.steps = by_node[0][0]["steps"]
    for node in updates.nodes:
        node.steps = by_node[0][0]["nodes"][0]["steps"]
        state = node.state
        for (name, begin, end), shared_view, pending_view in zip(
            state.slices.named(updates.names),
            state.slices.of(state.shared_S),
            state.slices.of(state.pending_S),
            strict=True,
        ):
            if name in shared:
                shared_view.copy_(shared[name][begin:end])
                pending_view.copy_(torch.stack([each[name][begin:end] for each in pending]).mean(0))
        state.set_model()
        node.gather()


def _whole(contents: Sequence[dict[str, Any]], what: str) -> dict[str, Tensor]:
    """One node's tensors by parameter, flat in memory order, from the pieces of its devices."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for content in contents:
        for node in content["nodes"]:
            sizes = [end - begin for _, begin, end in node["pieces"]]
            for (name, begin, _), piece in zip(node["pieces"], torch.split(node[what], sizes), strict=True):
                pieces.setdefault(name, []).append((begin, piece))
    return {
        name: torch.cat([piece for _, piece in sorted(parts, key=lambda part: part[0])])
        for name, parts in pieces.items()
    }
