"""Test at runtime whether an unknown optimizer treats parameters independently.

During the first steps that change a parameter, a *twin* (a copy of the optimizer, its parameters and its state) runs
the full step. If the sharded step is bit-identical on all ranks, the twin is dropped. Otherwise the optimizer adopts
the state of the twin, and the run continues without sharing. One step is not enough: an optimizer may mix parameters
through a running estimate, such as a global step size, which takes effect later.
"""

from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_sparse.sharding import parameters_of

STEPS = 3


class Trial:
    """Runs the full step on a twin. optimizer: holds the state of all parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.steps_left = STEPS
        self._twin = _twin_of(optimizer)
        self._moved = False

    def plain_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> None:
        """Run the twin's step with the optimizer's options and gradients, which are whole."""
        before = [p.detach().clone() for p in parameters_of(self._twin)]
        for group, twins in zip(optimizer.param_groups, self._twin.param_groups, strict=True):
            twins.update({key: deepcopy(value) for key, value in group.items() if key != "params"})  # such as a new lr
        for parameter, twin in zip(parameters_of(optimizer), parameters_of(self._twin), strict=True):
            twin.grad = None if parameter.grad is None else parameter.grad.clone()
        for name in ("found_inf", "grad_scale"):  # set by a loss scaler on a fused optimizer
            if hasattr(optimizer, name):
                setattr(self._twin, name, getattr(optimizer, name).clone())
        devices = {p.device.index for p in parameters_of(optimizer) if p.device.type == "cuda"}
        with torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)):
            self._twin.step(closure) if closure is not None else self._twin.step()
        self._moved = not all(map(torch.equal, before, parameters_of(self._twin)))

    def agrees(self, optimizer: Optimizer) -> bool:
        """Whether the sharded step gave the same parameters and options. Called once per step."""
        self.steps_left -= self._moved
        pairs = zip(parameters_of(optimizer), parameters_of(self._twin), strict=True)
        return all(torch.equal(_bits(a), _bits(b)) for a, b in pairs) and _same_options(optimizer, self._twin)

    @torch.no_grad()
    def adopt(self, optimizer: Optimizer) -> None:
        """Copy the twin's parameters, options, state and attributes to the optimizer."""
        memo: dict[int, Any] = {}
        for group, twins in zip(optimizer.param_groups, self._twin.param_groups, strict=True):
            group.update({key: value for key, value in twins.items() if key != "params"})
        for parameter, twin in zip(parameters_of(optimizer), parameters_of(self._twin), strict=True):
            parameter.copy_(twin)
            memo[id(twin)] = parameter  # attributes that refer to the twin's parameter
            if twin in self._twin.state:
                optimizer.state[parameter] = self._twin.state[twin]
        for name, value in vars(self._twin).items():
            if name not in ("state", "param_groups") and not name.startswith("_optimizer_"):
                setattr(optimizer, name, deepcopy(value, memo))


def _twin_of(optimizer: Optimizer) -> Optimizer:
    # copy.deepcopy(optimizer) would keep only groups and state. Hooks, and methods set on the object (by schedulers, by
    # ShardedStep), belong to the original.
    own = {k: v for k, v in vars(optimizer).items() if not k.startswith("_optimizer_") and not callable(v)}
    twin: Optimizer = object.__new__(type(optimizer))
    memo: dict[int, Any] = {}
    vars(twin).update({name: deepcopy(value, memo) for name, value in own.items()})
    for name in vars(optimizer).keys() - own.keys():
        if name.startswith("_optimizer_"):
            setattr(twin, name, OrderedDict())
    return twin


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _same_options(a: Optimizer, b: Optimizer) -> bool:
    return all(
        bool(torch.equal(x, y)) if isinstance(x, Tensor) and isinstance(y, Tensor) else bool(x == y)
        for x, y in zip(_options(a), _options(b), strict=True)
    )


def _options(optimizer: Optimizer) -> list[Any]:
    return tree_leaves([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
