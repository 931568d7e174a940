"""Whether an optimizer that nobody has tested treats parameters independently: it is tried.

For the first steps that move a parameter, a *twin* (a copy of the optimizer with parameters and state of its own) makes
the plain step beside the sharded one. When both end with the same bits, rank by rank, the twin is dropped and the
optimizer is trusted; when not, the user's optimizer takes over what the twin has, and the run is a plain one from the
beginning.

Several steps, not one: an optimizer that mixes parameters through a running estimate (of a global step size, say) shows
it only once the estimate has moved.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

STEPS = 3


class Trial:
    """The plain step beside the sharded one.

    Args:
        optimizer: with the state of all parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.steps_left = STEPS
        self._twin = _twin_of(optimizer)
        self._moved = False

    def plain_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> None:
        """What the optimizer would do without this package; its gradients are all there."""
        before = [p.detach().clone() for p in parameters_of(self._twin)]
        for group, twins in zip(optimizer.param_groups, self._twin.param_groups, strict=True):
            twins.update({key: deepcopy(value) for key, value in group.items() if key != "params"})  # a new lr, say
        for parameter, twin in zip(parameters_of(optimizer), parameters_of(self._twin), strict=True):
            twin.grad = None if parameter.grad is None else parameter.grad.clone()
        for name in ("found_inf", "grad_scale"):  # what a loss scaler tells a fused optimizer
            if hasattr(optimizer, name):
                setattr(self._twin, name, getattr(optimizer, name).clone())
        devices = {p.device.index for p in parameters_of(optimizer) if p.device.type == "cuda"}
        with torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)):
            self._twin.step(closure) if closure is not None else self._twin.step()
        self._moved = not all(map(torch.equal, before, parameters_of(self._twin)))

    def agrees(self, optimizer: Optimizer) -> bool:
        """Whether the sharded step did the same. To be asked once a step."""
        self.steps_left -= self._moved
        pairs = zip(parameters_of(optimizer), parameters_of(self._twin), strict=True)
        return all(_same_bits(*pair) for pair in pairs) and _same_options(optimizer, self._twin)

    @torch.no_grad()
    def adopt(self, optimizer: Optimizer) -> None:
        """Give the optimizer what the twin has: parameters, options, state, attributes of its own."""
        memo: dict[int, Any] = {}
        for group, twins in zip(optimizer.param_groups, self._twin.param_groups, strict=True):
            group.update({key: value for key, value in twins.items() if key != "params"})
        for parameter, twin in zip(parameters_of(optimizer), parameters_of(self._twin), strict=True):
            parameter.copy_(twin)
            memo[id(twin)] = parameter  # an attribute that names the twin's parameter comes to name the user's
            if twin in self._twin.state:
                optimizer.state[parameter] = self._twin.state[twin]
        for name, value in vars(self._twin).items():
            if name not in ("state", "param_groups") and not name.startswith("_optimizer_"):
                setattr(optimizer, name, deepcopy(value, memo))


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All of them, in the order of the optimizer's state_dict()."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _twin_of(optimizer: Optimizer) -> Optimizer:
    # copy.deepcopy(optimizer) keeps groups and state only, and an optimizer may have attributes of its own. What is
    # left behind are hooks and methods put on the object (by schedulers, by us), which belong to the original.
    own = {k: v for k, v in vars(optimizer).items() if not k.startswith("_optimizer_") and not callable(v)}
    twin: Optimizer = object.__new__(type(optimizer))
    memo: dict[int, Any] = {}
    vars(twin).update({name: deepcopy(value, memo) for name, value in own.items()})
    for name in vars(optimizer).keys() - own.keys():
        if name.startswith("_optimizer_"):
            setattr(twin, name, OrderedDict())
    return twin


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def _same_options(a: Optimizer, b: Optimizer) -> bool:
    return all(
        bool(torch.equal(x, y)) if isinstance(x, Tensor) and isinstance(y, Tensor) else bool(x == y)
        for x, y in zip(_options(a), _options(b), strict=True)
    )


def _options(optimizer: Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from tree_leaves({key: value for key, value in group.items() if key != "params"})
