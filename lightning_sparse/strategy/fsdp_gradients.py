"""The residuals of `ShardedGradients` for a checkpoint, and back, also on another cluster.

They are saved by pieces of parameters, without padding. On the same cluster a device goes on with its own; on another
one every node starts with the mean over the old nodes, so that the mean is kept.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lightning_sparse.fsdp import ShardedGradients
from lightning_sparse.sharding import in_order_of, part_of
from lightning_sparse.updates.checkpoint import layouts_of, mean_of


def side_content(gradients: ShardedGradients) -> dict[str, Any]:
    """What this device alone knows between two steps, on the CPU."""
    nodes = []
    for managed in gradients.managed:
        if managed.residual_S is None:
            continue
        views = list(managed.views(managed.residual_S))
        parameters = [parameter for _, parameter, _ in views]
        nodes.append(
            {
                "pieces": [(name, *part_of(parameter)[1:]) for name, parameter, _ in views],
                "layouts": layouts_of(parameters, {id(p): name for name, p, _ in views}),
                "residual": torch.cat([view for _, _, view in views]).cpu(),
            }
        )
    return {"steps": gradients.steps, "nodes": nodes}


def fits(gradients: ShardedGradients, content: dict[str, Any]) -> bool:
    """Whether this device held the same pieces of the parameters when it was saved."""
    saved = [tuple(piece) for node in content["nodes"] for piece in node["pieces"]]
    mine = [(name, *part_of(p)[1:]) for managed in gradients.managed for name, p in managed.parameters.items()]
    return not saved or saved == mine


@torch.no_grad()
def restore_own(gradients: ShardedGradients, content: dict[str, Any]) -> None:
    """Go on exactly where this device was saved; its state ``fits``."""
    gradients.steps = content["steps"]
    for managed, node in zip(gradients.managed, content["nodes"], strict=False):
        views = list(managed.views(managed.new_residual()))
        sizes = [view.numel() for _, _, view in views]
        for (_, _, view), piece in zip(views, torch.split(node["residual"], sizes), strict=True):
            view.copy_(piece)


@torch.no_grad()
def restore_mean(gradients: ShardedGradients, by_node: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Every node starts with the mean over the old nodes.

    Args:
        by_node: what ``side_content`` gave, of all devices of all nodes.
    """
    mean = mean_of(by_node, "residual")
    gradients.steps = by_node[0][0]["steps"]
    for managed in gradients.managed:
        for name, parameter, view in managed.views(managed.new_residual()):
            if name in mean:
                part = part_of(parameter)
                view.copy_(in_order_of(parameter, mean[name])[part.begin : part.end])
