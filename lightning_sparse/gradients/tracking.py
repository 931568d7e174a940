"""Which gradients of a round count: gradients of parameters that were used and stepped.

A residual must neither add nor lose a gradient that the user drops. The residual of such a gradient returns to its last
value.

======================= ===============================================================================================
gradient dropped by     detected by
======================= ===============================================================================================
no step, or ``None``    hooks of all optimizers note which parameters had a gradient in the step
a loss scaler           its optimizer does not step, or has ``found_inf``
unused on all ranks     with ``find_unused_parameters``, all ranks agree once per round
======================= ===============================================================================================

A gradient that is set to zero in place and stepped counts; set it to None to drop it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_sparse.exchange.communicator import MAX, HierCommunicator
from lightning_sparse.exchange.lanes import AsyncHostTensor
from lightning_sparse.gradients.groups import ParamGroup, flat_numel
from lightning_sparse.sharding import parameter_names, parameters_of

MANY_STEPS = 16
"""Number of steps without a round between them after which their ``found_inf`` is read, to bound the list."""


class Parameters:
    """The parameters of a module when this object was made.

    Attributes:
        names: names by ``id()``; a shared parameter has its first name.
        numels: number of elements of each parameter's gradient in a bucket.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names = parameter_names(module)
        self.dtypes = {name: p.dtype for name, p in module.named_parameters()}
        self.numels = {name: flat_numel(p) for name, p in module.named_parameters()}
        self._module = weakref.ref(module)
        self._references = {name: weakref.ref(p) for name, p in module.named_parameters()}

    def __getitem__(self, name: str) -> Tensor:
        parameter = self._references[name]()
        assert parameter is not None, f"{name} is gone"
        return parameter

    def name_of(self, parameter: Tensor) -> str:
        """Return the parameter's name, or an empty string."""
        # A new parameter may have the ``id()`` of a deleted parameter.
        name = self.names.get(id(parameter), "")
        return name if name and self._references[name]() is parameter else ""

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    def are_in(self, module: nn.Module) -> bool:
        """Return whether the module has exactly these parameters."""
        now = dict(module.named_parameters())
        return now.keys() == self._references.keys() and all(self._references[n]() is p for n, p in now.items())

    def are_stepped_by(self, optimizer: Optimizer) -> bool:
        return any(map(self.name_of, parameters_of(optimizer)))


class StepTracker:
    """Notes which parameters optimizers step.

    Args:
        undecided_names: returns the parameters with undecided residuals.
    """

    def __init__(self, parameters: Parameters, undecided_names: Callable[[], set[str]]) -> None:
        self.watching = False
        self._parameters, self._undecided_names = parameters, undecided_names
        self._hooks: list[Callable[[], Any]] = []  # each removes one hook
        self._begun: dict[int, set[str]] = {}  # names of parameters with a gradient, by id() of the optimizer
        self._steps: list[tuple[set[str], AsyncHostTensor | None]] = []  # each with the scaler's found_inf
        self._stepped: set[str] = set()  # stepped since the last clear()

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Watch steps from now on. If there is no optimizer, every round counts as used."""
        optimizers = list(optimizers)
        without_hooks = [
            type(optimizer).__name__ for optimizer in optimizers if not hasattr(optimizer, "register_step_post_hook")
        ]
        if without_hooks:
            raise ValueError(
                f"{', '.join(without_hooks)} has no step hooks, but residuals depend on which parameters are stepped. "
                f"Derive it from torch.optim.Optimizer."
            )
        self.unwatch()
        self.watching, module = bool(optimizers), self._parameters.module
        if self.watching and module is not None:
            # Weak references, because torch's global hooks would keep the residuals alive. Hooks of a deleted tracker
            # do nothing: they cannot be removed while torch runs the hooks of a step.
            begin, end = _weak(self._begin), _weak(self._end)
            # Steps of any optimizer count, because the user's optimizer may leave the step to another inside it (SAM,
            # Lookahead).
            handles = (register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end))
            self._hooks = [handle.remove for handle in handles]

    def unwatch(self) -> None:
        # The steps that are noted so far stay.
        for remove in self._hooks:
            remove()
        self._hooks.clear()

    def clear(self) -> None:
        self._begun.clear()
        self._steps.clear()
        self._stepped.clear()

    def stepped(self) -> set[str]:
        """Return the parameters that an optimizer stepped with a gradient of the round."""
        for names, found_inf in self._steps:
            # A fused optimizer with a loss scaler steps even with an inf, and skips the update itself. Only this case
            # waits for the GPU.
            if found_inf is None or not any(found_inf.read().flatten().tolist()):
                self._stepped |= names
        self._steps.clear()
        return set(self._stepped)

    def not_stepped(self) -> tuple[set[str], set[str]]:
        """Return the parameters without a step: without a gradient, and with one that may still be stepped."""
        module = self._parameters.module
        if not self.watching or module is None:
            return set(), set()
        left = self._undecided_names() - self.stepped()
        grads = {self._parameters.name_of(p): p.grad for p in module.parameters() if p.grad is not None}
        waiting = left & grads.keys()
        if not any(bool(grads[name].any()) for name in waiting):  # zero_grad(set_to_none=False) has dropped them
            waiting = set()
        return left - waiting, waiting

    def _with_gradient(self, parameters: Iterable[Tensor]) -> set[str]:
        return {self._parameters.name_of(p) for p in parameters if p.grad is not None}

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The step may drop the gradients, so note them before. The gradients of a closure exist only after the step.
        nested = id(optimizer) in self._begun  # a subclass calls super().step()
        if not nested and not _has_closure(args, kwargs) and self._parameters.are_stepped_by(optimizer):
            self._begun[id(optimizer)] = self._with_gradient(parameters_of(optimizer))

    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = self._begun.pop(id(optimizer), set())
        if _has_closure(args, kwargs):
            names = self._with_gradient(parameters_of(optimizer))
        names &= self._undecided_names() - self._stepped
        if names:
            found_inf = getattr(optimizer, "found_inf", None)
            self._steps.append((names, None if found_inf is None else AsyncHostTensor(found_inf)))
        if len(self._steps) > MANY_STEPS:
            self.stepped()


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return callable(kwargs.get("closure", args[1] if len(args) > 1 else None))


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return bound(*args) if bound is not None else None

    return call


class UnusedParameters:
    """Finds parameters that a backward pass did not use, for DDP's ``find_unused_parameters``.

    DDP keeps the gradient of a parameter that no rank used, and ignores the values that a hook writes there. So a rank
    withholds the residual of parameters that it did not use. Once per round, all ranks agree on the parameters that no
    rank used, and undo the round there. With gradient accumulation, uses add up as in DDP.
    """

    def __init__(self, module: nn.Module) -> None:
        watched = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._places = {name: place for place, name in enumerate(watched)}
        self._used: set[str] = set()
        self._used_in_round: set[str] = set()
        self._undo: list[tuple[str, Tensor, Tensor | None]] = []
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._mark, name))  # type: ignore[no-untyped-call]
            for name, p in watched.items()
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def take(self, group: ParamGroup) -> frozenset[str]:
        """Return the group's parameters that were not used since the last call."""
        used = self._used.intersection(group.names)
        self._used -= used
        self._used_in_round |= used
        return frozenset(group.names) - used

    def save(self, name: str, target: Tensor, before: Tensor | None) -> None:
        """Restore ``target`` at the end of the round to ``before`` (None: zeros) if no rank used the parameter."""
        self._undo.append((name, target, before))

    @property
    def saved(self) -> list[Tensor]:
        return [before for _, _, before in self._undo if before is not None]

    def agree(self, communicator: HierCommunicator, device: torch.device) -> Tensor:
        """Return which parameters any rank used. A collective of the world."""
        used = torch.zeros(len(self._places), dtype=torch.uint8, pin_memory=device.type == "cuda")
        used[[self._places[name] for name in self._used_in_round]] = 1
        used = used.to(device, non_blocking=True)
        communicator.flat_all_reduce(used, op=MAX)
        self._used_in_round.clear()
        return used.bool()

    def undo(self, used: Tensor) -> None:
        """Undo the round for parameters that no rank used, without a host wait."""
        for name, target, before in self._undo:
            before = torch.zeros_like(target) if before is None else before
            target.copy_(torch.where(used[self._places[name]], target, before))
        self._undo.clear()

    def abandon(self) -> None:
        self._undo.clear()
        self._used_in_round.clear()

    def _mark(self, name: str, _: Tensor) -> None:
        self._used.add(name)
