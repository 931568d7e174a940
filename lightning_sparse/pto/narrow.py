"""A parameter narrowed to the part that this rank steps, and its state cut to that part and joined again.

For the time of a step ``parameter.data`` and ``parameter.grad`` are flat views of a range of their memory: the
optimizer makes and finds state of that size, and writes into the parameter's own memory. Afterwards both are what they
were.
"""

from collections.abc import Mapping, Sequence
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


class OwnShare:
    """Shows an optimizer what this rank steps: of other parameters the gradient is gone, of cut ones a part is left."""

    def __init__(self) -> None:
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._narrowed: list[Narrowed] = []

    def show(self, parameters: Sequence[Tensor], mine: Sequence[Part | None]) -> None:
        """From here on, until put_back()."""
        for parameter, part in zip(parameters, mine, strict=True):
            if parameter.grad is None:
                continue
            if part is None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None
            elif part.end - part.begin < parameter.numel():
                self._narrowed.append(Narrowed(parameter, part))

    def put_back(self) -> None:
        """All parameters and gradients are whole again."""
        for parameter, grad in self._hidden:
            parameter.grad = grad
        for narrowed in self._narrowed:
            narrowed.put_back()
        self._hidden.clear()
        self._narrowed.clear()


def part_of_grad(parameter: Tensor, part: Part) -> Tensor:
    """The part of the parameter's gradient, flat; a view where the gradient lies as the parameter does."""
    assert parameter.grad is not None
    return _in_order_of(parameter, parameter.grad)[part.begin : part.end]


def keep_part(parameter: Tensor, part: Part) -> None:
    """Of the parameter's gradient keep the part, in place, and write zeros elsewhere.

    The part counts elements in the order of the parameter's memory, and a gradient may lie otherwise.
    """
    grad = parameter.grad
    assert grad is not None
    kept = torch.empty_strided(parameter.shape, parameter.stride(), dtype=grad.dtype, device=grad.device).zero_()
    here = slice(part.begin, part.end)
    memory_of(kept)[here] = _in_order_of(parameter, grad)[here]
    grad.copy_(kept)


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


def placed_like(state: Any, like: Mapping[str, Any], device: torch.device) -> Any:
    """State that came over the CPU, each entry on the device where `like`, another parameter's state, has it."""

    def place(key: Any, value: Any) -> Any:
        known = like.get(key)
        where = known.device if isinstance(known, Tensor) and known.dim() == 0 else device
        return tree_map_only(Tensor, lambda tensor: tensor.to(where), value)

    return {key: place(key, value) for key, value in state.items()} if isinstance(state, dict) else state


def _order(tensor: Tensor) -> list[int]:
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


def _in_order_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """The tensor's elements, flat, in the order of the parameter's memory; a view where the layouts agree."""
    return tensor.detach().permute(_order(parameter)).reshape(-1)
