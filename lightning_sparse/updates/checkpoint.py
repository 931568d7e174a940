"""The state of `LocalUpdates` for a checkpoint, and back, also on another cluster.

On the same cluster a device goes on with its own state, bit-identically. On another one the shared weights are kept,
and every new node starts with the mean of what the old nodes had pending, so the mean over nodes is kept, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sparse.sharding import dims_in_memory, in_order_of, memory_of_part, part_of
from lightning_sparse.updates.local import LocalUpdates

Piece = tuple[str, int, int]
"""A part of a parameter: its name, and the first element and the last one plus 1, in memory order."""

Layout = tuple[list[int], list[int]]
"""A parameter's shape, and its dims as they are in memory, the outermost first."""


def side_content(updates: LocalUpdates) -> dict[str, Any]:
    """What this device alone knows between two steps, on the CPU; waits for messages under way."""
    names = updates.names
    nodes = [
        {
            "steps": node.steps,
            "pieces": node.state.slices.named(names),
            "layouts": layouts_of(node.parameters, names),
            **node.state_dict(),
        }
        for node in updates.nodes
    ]
    buffers = {name: each.detach().cpu() for name, each in updates.buffers.own().items()}
    content = {"steps": updates.steps, "nodes": nodes, "buffers": buffers}
    if updates.config.density == "auto":
        content["found"] = {**updates.exchange.choice.found(), "exchanges": updates.exchanges}
    return content


def fits(updates: LocalUpdates, content: dict[str, Any]) -> bool:
    """Whether this device held the same pieces of the parameters when it was saved."""
    names = updates.names
    saved = content["nodes"]
    same_pieces = len(saved) == len(updates.nodes) and all(
        node.state.slices.named(names) == [tuple(piece) for piece in each["pieces"]]
        and layouts_of(node.parameters, names) == each["layouts"]
        for node, each in zip(updates.nodes, saved, strict=True)
    )
    return same_pieces and updates.buffers.fit(content["buffers"])


@torch.no_grad()
def restore_own(updates: LocalUpdates, content: dict[str, Any]) -> None:
    """Go on exactly where this device was saved; its state ``fits``. Every rank calls it."""
    updates.steps = content["steps"]
    if "found" in content:
        updates.exchange.choice.go_on(content["found"], auto=True)
        updates.exchanges = content["found"]["exchanges"]
    for node, each in zip(updates.nodes, content["nodes"], strict=True):
        node.steps = each["steps"]
        node.load_state_dict(each)
    updates.buffers.load(content["buffers"])


@torch.no_grad()
def restore_mean(updates: LocalUpdates, by_node: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Start from the shared weights and the mean of what was pending.

    Args:
        by_node: what ``side_content`` gave, of all devices of all nodes.
    """
    shared, pending = _shared(by_node), mean_of(by_node, "unsent")
    parameters = dict(updates.module.named_parameters())
    updates.steps = by_node[0][0]["steps"]
    for node in updates.nodes:
        node.steps = by_node[0][0]["nodes"][0]["steps"]
        state = node.state
        state.receive()
        pending_S = torch.zeros_like(state.shared_S)
        views = state.slices.of(state.shared_S), state.slices.of(pending_S)
        for (name, begin, end), shared_view, pending_view in zip(
            state.slices.named(updates.names), *views, strict=True
        ):
            if name in shared:
                shared_view.copy_(in_order_of(parameters[name], shared[name])[begin:end])
                pending_view.copy_(in_order_of(parameters[name], pending[name])[begin:end])
        state.set_pending(pending_S)
        state.begin()
        node.gather()


@torch.no_grad()
def restore_alone(module: nn.Module, by_node: Sequence[Sequence[dict[str, Any]]]) -> None:
    """On one node nothing is exchanged: its weights are the shared ones, and the mean of what was pending is in them.

    Args:
        module: that goes on.
        by_node: what ``side_content`` gave, of all devices of all nodes.
    """
    shared, pending = _shared(by_node), mean_of(by_node, "unsent")
    for name, parameter in module.named_parameters():
        if name not in shared:
            continue
        if isinstance(parameter, DTensor):
            part = part_of(parameter)
            whole = in_order_of(parameter, shared[name] - pending[name])
            memory_of_part(parameter, part).copy_(whole[part.begin : part.end])
        else:
            parameter.copy_(shared[name] - pending[name])


def _shared(by_node: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Tensor]:
    return whole_of(by_node[0], "shared")


def mean_of(by_node: Sequence[Sequence[dict[str, Any]]], key: str) -> dict[str, Tensor]:
    """The mean over nodes of their tensors of that name, by parameter."""
    nodes = [whole_of(contents, key) for contents in by_node]
    return {name: torch.stack([each[name] for each in nodes]).mean(0) for name in nodes[0]}


def whole_of(contents: Sequence[dict[str, Any]], key: str) -> dict[str, Tensor]:
    """One node's tensors of that name by parameter, from the pieces of its devices."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    layouts: dict[str, Layout] = {}
    for content in contents:
        for node in content["nodes"]:
            layouts.update(node["layouts"])
            sizes = [end - begin for _, begin, end in node["pieces"]]
            for (name, begin, _), piece in zip(node["pieces"], torch.split(node[key], sizes), strict=True):
                pieces.setdefault(name, []).append((begin, piece))
    whole = {}
    for name, parts in pieces.items():
        flat = torch.cat([piece for _, piece in sorted(parts, key=lambda part: part[0])])
        shape, dims = layouts[name]
        in_memory = flat.view([shape[dim] for dim in dims])
        whole[name] = in_memory.permute([dims.index(dim) for dim in range(len(dims))])
    return whole


def layouts_of(parameters: Sequence[Tensor], names: dict[int, str]) -> dict[str, Layout]:
    """By name: pieces are in memory order, and a resumed model may have another (channels_last)."""
    return {names[id(each)]: (list(each.shape), dims_in_memory(each)) for each in parameters}
