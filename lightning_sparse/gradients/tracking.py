"""Which gradients of a round count: those of parameters that were used and stepped.

A residual may neither add nor spend what a user throws away. So it is noted which parameters an optimizer steps with
the gradient of the round; residuals of the others return to what they were (lightning_sparse.gradients.residual).

======================= ===============================================================================================
thrown away by          how it is noticed
======================= ===============================================================================================
no step, or ``None``    hooks of all optimizers note which parameters had a gradient when they were stepped
a loss scaler           its optimizer is not stepped, or has ``found_inf``
no rank using it        with ``find_unused_parameters`` ranks agree, once a round
======================= ===============================================================================================

A gradient that is set to zero in place and stepped counts: set it to None to throw it away. Where nothing was stepped
and all gradients are zero, ``zero_grad(set_to_none=False)`` has thrown them away. Steps of *any* optimizer
are noted, since the one that a user hands over may leave the step to another inside it (SAM, Lookahead).
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
from lightning_sparse.gradients.groups import ParamGroup, flat_numel, parameter_names
from lightning_sparse.sharding import parameters_of

MANY_STEPS = 16
"""Steps without a round between them, after which they are looked at: they are not kept for ever."""


class Parameters:
    """The parameters that a module had when this was made.

    Attributes:
        names: by ``id()`` of the parameter; a shared one has its first name.
        numels: elements of the gradient in a bucket, by name.
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
        """Empty for a parameter that is not one of them, were it to live where one of them lived."""
        name = self.names.get(id(parameter), "")
        return name if name and self._references[name]() is parameter else ""

    @property
    def module(self) -> nn.Module | None:
        """None when it is gone."""
        return self._module()

    def are_in(self, module: nn.Module) -> bool:
        """Whether the module has these very parameters and no others."""
        now = dict(module.named_parameters())
        return now.keys() == self._references.keys() and all(self._references[n]() is p for n, p in now.items())

    def are_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer steps any of them."""
        return any(map(self.name_of, parameters_of(optimizer)))


class StepTracker:
    """Notes which parameters optimizers step.

    Args:
        open_names: returns the parameters whose residual depends on the fate of their gradient.
    """

    def __init__(self, parameters: Parameters, open_names: Callable[[], set[str]]) -> None:
        self.watching = False
        self._parameters, self._open_names = parameters, open_names
        self._hooks: list[Callable[[], Any]] = []  # each takes one off
        self._begun: dict[int, set[str]] = {}  # by id() of the optimizer: names of parameters that had a gradient
        self._steps: list[tuple[set[str], AsyncHostTensor | None]] = []  # each with the scaler's found_inf
        self._stepped: set[str] = set()  # by steps that were looked at since the last clear()

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Watch steps from now on. If there is no optimizer, every round counts as used.

        Raises:
            ValueError: for an optimizer that cannot tell when it steps.
        """
        optimizers = list(optimizers)
        mute = [type(each).__name__ for each in optimizers if not hasattr(each, "register_step_post_hook")]
        if mute:
            raise ValueError(
                f"{', '.join(mute)} has no hooks for its step, and residuals follow what was stepped: derive it from "
                f"torch.optim.Optimizer."
            )
        self.unwatch()
        self.watching, module = bool(optimizers), self._parameters.module
        if self.watching and module is not None:
            # torch keeps these hooks: by them it must not keep what this belongs to, residuals among it. Those of a
            # tracker that is gone stay and do nothing: it may go while torch walks through all hooks in a step.
            begin, end = _weak(self._begin), _weak(self._end)
            handles = (register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end))
            self._hooks = [each.remove for each in handles]

    def unwatch(self) -> None:
        """Take the hooks off; what was noted stays."""
        for remove in self._hooks:
            remove()
        self._hooks.clear()

    def clear(self) -> None:
        """Forget the steps so far: what they decided is settled."""
        self._begun.clear()
        self._steps.clear()
        self._stepped.clear()

    def stepped(self) -> set[str]:
        """Return the parameters that an optimizer stepped by what the round gave it. Where a loss scaler is left to a
        fused optimizer, which is stepped even when the scaler met an inf and skips inside, this waits for the GPU."""
        for names, found_inf in self._steps:
            if found_inf is None or not any(found_inf.read().flatten().tolist()):
                self._stepped |= names
        self._steps.clear()
        return set(self._stepped)

    def not_stepped(self) -> tuple[set[str], set[str]]:
        """Return the parameters that were not stepped: those without their gradient, and those that may yet be."""
        module = self._parameters.module
        if not self.watching or module is None:
            return set(), set()
        left = self._open_names() - self.stepped()
        grads = {self._parameters.name_of(p): p.grad for p in module.parameters() if p.grad is not None}
        waiting = left & grads.keys()
        if not any(bool(grads[name].any()) for name in waiting):  # zero_grad(set_to_none=False): no step is to come
            waiting = set()
        return left - waiting, waiting

    def _with_gradient(self, parameters: Iterable[Tensor]) -> set[str]:
        return {self._parameters.name_of(p) for p in parameters if p.grad is not None}

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note gradients before the step, for it may drop them; those of a closure are there after it."""
        nested = id(optimizer) in self._begun  # its step calls the one it overrides
        if not nested and not _has_closure(args, kwargs) and self._parameters.are_stepped_by(optimizer):
            self._begun[id(optimizer)] = self._with_gradient(parameters_of(optimizer))

    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = self._begun.pop(id(optimizer), set())
        if _has_closure(args, kwargs):
            names = self._with_gradient(parameters_of(optimizer))
        names &= self._open_names() - self._stepped
        if names:
            found_inf = getattr(optimizer, "found_inf", None)
            self._steps.append((names, None if found_inf is None else AsyncHostTensor(found_inf)))
        if len(self._steps) > MANY_STEPS:
            self.stepped()


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return callable(kwargs.get("closure", args[1] if len(args) > 1 else None))


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the method for as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return bound(*args) if bound is not None else None

    return call


class UnusedParameters:
    """Which parameters took part in a backward pass, for DDP's ``find_unused_parameters``.

    DDP leaves the gradient of a parameter that no rank used as it is, whatever a hook writes there. So a rank withholds
    the residual of what it did not use, which loses nothing, and once a round all ranks agree on what none of them
    used: there the round is undone, in the bucket and in the residual.

    Args:
        module: whose parameters to watch. With gradient accumulation, uses add up as DDP's do.
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
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def take(self, group: ParamGroup) -> frozenset[str]:
        """The group's parameters that this rank did not use since the last call."""
        used = self._used.intersection(group.names)
        self._used -= used
        self._used_in_round |= used
        return frozenset(group.names) - used

    def save(self, name: str, target: Tensor, before: Tensor | None) -> None:
        """At the end of the round restore ``target`` to ``before`` (None: zeros) if no rank used the parameter."""
        self._undo.append((name, target, before))

    @property
    def saved(self) -> list[Tensor]:
        """What ``undo`` may restore."""
        return [before for _, _, before in self._undo if before is not None]

    def agree(self, communicator: HierCommunicator, device: torch.device) -> Tensor:
        """Which parameters some rank used in this round. A collective of the world."""
        used = torch.zeros(len(self._places), dtype=torch.uint8, pin_memory=device.type == "cuda")
        used[[self._places[name] for name in self._used_in_round]] = 1
        used = used.to(device, non_blocking=True)
        communicator.flat_all_reduce(used, op=MAX)
        self._used_in_round.clear()
        return used.bool()

    def undo(self, used: Tensor) -> None:
        """End the round: undo it where no rank used the parameter. No host sync."""
        for name, target, before in self._undo:
            before = torch.zeros_like(target) if before is None else before
            target.copy_(torch.where(used[self._places[name]], target, before))
        self._undo.clear()

    def abandon(self) -> None:
        """Forget a round that was cut short."""
        self._undo.clear()
        self._used_in_round.clear()

    def _mark(self, name: str, _: Tensor) -> None:
        self._used.add(name)
