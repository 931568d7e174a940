"""A parameter narrowed to the part that this rank steps, and its state cut to that part and joined again.

For the time of a step ``parameter.data`` and ``parameter.grad`` are flat views of a range of their memory: the
optimizer makes and finds state of that size, and writes into the parameter's own memory. Afterwards both are what they
were.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from lightning_sparse.pto.ownership import Part


def memory_of(tensor: Tensor) -> Tensor:
    """The tensor's memory as a flat view, whatever the order of its dims.

    Raises:
        ValueError: when its elements do not fill its memory.
    """
    in_memory = tensor.detach().permute(_order(tensor))
    if not in_memory.is_contiguous():
        raise ValueError(
            f"a parameter of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps in its memory, or "
            f"elements that share it, and cannot be gathered: make it contiguous()."
        )
    return in_memory.view(-1)


class Narrowed:
    """A parameter that shows one part of itself until it is put back.

    Raises:
        ValueError: for a sparse gradient.
    """

    def __init__(self, parameter: Tensor, part: Part) -> None:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, and ranks step parts of it: "
                f"use sparse=False, or give ShardedStep its id() in `uncut`."
            )
        self._parameter, self._data, self._grad = parameter, parameter.data, parameter.grad
        grad = _in_order_of(parameter, parameter.grad)[part.begin : part.end]
        parameter.grad = None
        parameter.data = memory_of(self._data)[part.begin : part.end]
        parameter.grad = grad

    def put_back(self) -> None:
        """Show the whole again, with the gradient that it had."""
        self._parameter.grad = None
        self._parameter.data = self._data
        self._parameter.grad = self._grad


def cut_state(state: Any, parameter: Tensor, part: Part) -> Any:
    """Of a whole parameter's state, what belongs to the part; scalars are everybody's."""

    def cut(leaf: Tensor) -> Tensor:
        if leaf.shape != parameter.shape:
            return leaf
        return _in_order_of(parameter, leaf)[part.begin : part.end].clone()

    return tree_map_only(Tensor, cut, state)


def join_states(states: Sequence[Any], parameter: Tensor, parts: Sequence[Part]) -> Any:
    """The state of a whole parameter from those of its parts, laid out in memory as the parameter is."""

    def join(*leaves: Any) -> Any:
        first = leaves[0]
        if not isinstance(first, Tensor) or first.shape != (parts[0].end - parts[0].begin,):
            return first
        whole = torch.empty_strided(parameter.shape, parameter.stride(), dtype=first.dtype, device=first.device)
        torch.cat(leaves, out=memory_of(whole))
        return whole

    return tree_map(join, *states)


def _order(tensor: Tensor) -> list[int]:
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


def _in_order_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """The tensor's elements, flat, in the order of the parameter's memory; a view where the layouts agree."""
    return tensor.detach().permute(_order(parameter)).reshape(-1)
