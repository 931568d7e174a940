"""Narrow a parameter to the part that this rank steps, and slice and concatenate its optimizer state.

During a step, ``parameter.data`` and ``parameter.grad`` are flat views of a range of the parameter's memory. So the
optimizer allocates state for this range and updates the parameter in place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from lightning_sparse.sharding import Part, in_order_of, memory_of


class OwnShare:
    """Restricts the optimizer to this rank's share: removes gradients of other parameters and narrows divided ones."""

    def __init__(self) -> None:
        self._whole: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, its data, its gradient

    def show(self, parameters: Sequence[Tensor], mine: Sequence[Part | None]) -> None:
        """Show only the parts in `mine`, until put_back().

        Raises:
            ValueError: if the gradient of a divided parameter is sparse.
        """
        for parameter, part in zip(parameters, mine, strict=True):
            grad = parameter.grad
            if grad is None or (part is not None and part.end - part.begin == parameter.numel()):
                continue
            if part is not None and grad.is_sparse:
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse and cannot be divided: "
                    f"use sparse=False, or pass its id() to ShardedStep in `uncut`."
                )
            self._whole.append((parameter, parameter.data, grad))
            parameter.grad = None
            if part is not None:
                narrow = in_order_of(parameter, grad)[part.begin : part.end]
                parameter.data = memory_of(parameter)[part.begin : part.end]
                parameter.grad = narrow

    def put_back(self) -> None:
        """Restore all parameters and gradients."""
        for parameter, data, grad in self._whole:
            parameter.grad = None
            parameter.data = data
            parameter.grad = grad
        self._whole.clear()


def part_of_grad(parameter: Tensor, part: Part) -> Tensor:
    """Return the part of the gradient, flat; a view if the memory layouts match."""
    assert parameter.grad is not None
    return in_order_of(parameter, parameter.grad)[part.begin : part.end]


def keep_part(parameter: Tensor, part: Part) -> None:
    """Zero the gradient outside the part, in place. Its memory layout may differ from that of the parameter."""
    grad = parameter.grad
    assert grad is not None
    kept = torch.empty_strided(parameter.shape, parameter.stride(), dtype=grad.dtype, device=grad.device).zero_()
    here = slice(part.begin, part.end)
    memory_of(kept)[here] = in_order_of(parameter, grad)[here]
    grad.copy_(kept)


def cut_state(state: Any, parameter: Tensor, part: Part) -> Any:
    """Slice the state of a whole parameter; tensors of other shapes, such as step counts, stay."""

    def cut(leaf: Tensor) -> Tensor:
        if leaf.shape != parameter.shape:
            return leaf
        return in_order_of(parameter, leaf)[part.begin : part.end].clone()

    return tree_map_only(Tensor, cut, state)


def join_states(states: Sequence[Any], parameter: Tensor, parts: Sequence[Part]) -> Any:
    """Concatenate the states of all parts, in the memory layout of the parameter."""

    def join(*leaves: Any) -> Any:
        first = leaves[0]
        if not isinstance(first, Tensor) or first.shape != (parts[0].end - parts[0].begin,):
            return first
        whole = torch.empty_strided(parameter.shape, parameter.stride(), dtype=first.dtype, device=first.device)
        torch.cat(leaves, out=memory_of(whole))
        return whole

    return tree_map(join, *states)


def placed_like(state: Any, like: Mapping[str, Any], device: torch.device) -> Any:
    """Move state to `device`; scalar entries go to the device that they have in `like`, another parameter's state."""

    def place(key: Any, value: Any) -> Any:
        known = like.get(key)
        where = known.device if isinstance(known, Tensor) and known.dim() == 0 else device
        return tree_map_only(Tensor, lambda tensor: tensor.to(where), value)

    return {key: place(key, value) for key, value in state.items()} if isinstance(state, dict) else state
