"""Which gradients of a round count: those of parameters that were used, stepped, and not zeroed by the user.

A residual may neither add nor spend what a user throws away. So it is noted which parameters an optimizer steps with
the gradient of the round; residuals of the others return to what they were (lightning_sparse.gradients.residual).

======================= ===============================================================================================
thrown away by          how it is noticed
======================= ===============================================================================================
no step, or ``None``    hooks of all optimizers note which parameters had a gradient when they were stepped
a loss scaler           its optimizer is not stepped, or has ``found_inf``
``grad.zero_()``        the round left an entry other than zero, and at the step there is none
no rank using it        with ``find_unused_parameters`` ranks agree, once a round (lightning_sparse.gradients.unused)
======================= ===============================================================================================

A gradient in which the round left nothing but zeros (no entry of the parameter was among the largest) cannot be seen to
be zeroed; it counts. What the user meant to throw away then stays in the residual until an entry is selected, which
bounds it by the size that selection takes. By value such a zero is the reduction's own, and dropping it would lose
gradients of every small parameter.

Steps of *any* optimizer are noted, since the one that a user hands over may leave the step to another inside it (SAM,
Lookahead), and gradients are looked at before the step, since some optimizers write to them (SGD with Nesterov's
momentum and ``foreach``).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_sparse.exchange.host import HostCopy
from lightning_sparse.gradients.groups import flat_numel, in_bucket_order, parameter_names

MANY_STEPS = 16
"""Steps without a round between them, after which their gradients are looked at: they are not kept for ever."""


class Parameters:
    """The parameters that a module had when this was made.

    Attributes:
        names: by ``id()`` of the parameter; a shared one has its first name.
        dtypes: by name.
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

    def are_of(self, module: nn.Module) -> bool:
        """Whether this is that very module, whatever parameters it has by now."""
        return self.module is module

    def are_in(self, module: nn.Module) -> bool:
        """Whether the module has these very parameters and no others."""
        now = dict(module.named_parameters())
        return now.keys() == self._references.keys() and all(self._references[n]() is p for n, p in now.items())

    def are_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer steps any of them."""
        return any(map(self.name_of, stepped_by(optimizer)))


class StepTracker:
    """Notes which parameters optimizers step, and with a gradient that the user has not zeroed.

    Args:
        parameters: those that are watched.
        open_names: returns the parameters whose residual depends on the fate of their gradient.
    """

    def __init__(self, parameters: Parameters, open_names: Callable[[], set[str]]) -> None:
        self.watching = False
        self._parameters, self._open_names = parameters, open_names
        self._hooks: list[Callable[[], Any]] = []  # each takes one off
        self._begun: dict[int, _Gradients] = {}  # by the optimizer's id()
        self._steps: list[_Gradients] = []
        self._stepped: set[str] = set()  # by steps that were looked at since the last clear()
        self._left: dict[str, tuple[Tensor, int]] = {}  # by parameter: where the round left an entry other than zero

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Note steps from now on. Where there is no optimizer nothing can be noted, and every round counts.

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
            # torch keeps these hooks: by them it must not keep what this belongs to, residuals among it
            begin, end = _weak(self._begin), _weak(self._end)
            handles = (register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end))
            self._hooks = [weakref.finalize(self, each.remove) for each in handles]

    def unwatch(self) -> None:
        """Take the hooks off; what was noted stays."""
        for remove in self._hooks:
            remove()
        self._hooks.clear()

    def reduced(self, grads: Mapping[str, Tensor]) -> None:
        """Note what the round left in these gradients, none of them empty."""
        if not self.watching:
            return
        flags = _have_nonzero(list(grads.values()))
        self._left.update({name: (flags, place) for place, name in enumerate(grads)})

    def clear(self) -> None:
        """Forget the steps so far: what they decided is settled."""
        self._begun.clear()
        self._steps.clear()
        self._stepped.clear()

    def stepped(self) -> set[str]:
        """The parameters that an optimizer stepped by what the round gave it."""
        self._stepped.update(*(step.names - step.zeroed() for step in self._steps if not step.was_skipped()))
        self._steps.clear()
        return set(self._stepped)

    def not_stepped(self) -> tuple[set[str], set[str]]:
        """The parameters that were not stepped: those without their gradient, and those that may yet be stepped."""
        module = self._parameters.module
        if not self.watching or module is None:
            return set(), set()
        left = self._open_names() - self.stepped()
        grads = {self._parameters.name_of(p): p.grad for p in module.parameters()}
        there = {name: grad for name in left if (grad := grads.get(name)) is not None}
        waiting = there.keys() - _Gradients(there, self._left).zeroed()
        return left - waiting, waiting

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._parameters.are_stepped_by(optimizer):
            return None  # of another module
        if id(optimizer) in self._begun:
            return None  # its step calls the one it overrides; what it was given has been seen
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._look(optimizer)
            return None

        def looking(*given: Any, **options: Any) -> Any:  # the gradients are the closure's
            result = closure(*given, **options)
            self._look(optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": looking}
        return (args[0], looking, *args[2:]), kwargs

    def _look(self, optimizer: Optimizer) -> None:
        open_names = self._open_names() - self._stepped
        if not open_names:
            return
        # a dropped gradient holds its parameter still
        grads = {self._parameters.name_of(p): p.grad for p in stepped_by(optimizer) if p.grad is not None}
        grads = {name: grad for name, grad in grads.items() if name in open_names}
        self._begun[id(optimizer)] = _Gradients(grads, self._left)

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        begun = self._begun.pop(id(optimizer), None)
        if begun is not None:
            begun.note_skipped(getattr(optimizer, "found_inf", None))
            self._steps.append(begun)
        if len(self._steps) > MANY_STEPS:
            self.stepped()


class _Gradients:
    """Gradients as they are now; which of them were zeroed is looked at later, so that a GPU is not waited for.

    Args:
        grads: by parameter name.
        left: where the round had left an entry other than zero.
    """

    def __init__(self, grads: Mapping[str, Tensor], left: Mapping[str, tuple[Tensor, int]]) -> None:
        self.names = set(grads)
        self._looked = [name for name in grads if name in left]
        now = _have_nonzero([grads[name] for name in self._looked])
        flags = {id(each): each for each, _ in map(left.__getitem__, self._looked)}
        begins = dict(zip(flags, accumulate(map(len, flags.values()), initial=len(now)), strict=False))
        self._places = [begins[id(left[name][0])] + left[name][1] for name in self._looked]
        self._flags = HostCopy(torch.cat([now, *flags.values()]))
        self._found_inf: HostCopy | None = None

    def note_skipped(self, found_inf: Tensor | None) -> None:
        """A fused optimizer is stepped even when the scaler met an inf, and skips inside."""
        self._found_inf = None if found_inf is None else HostCopy(found_inf)

    def was_skipped(self) -> bool:
        """Waits for the GPU to have come this far."""
        return self._found_inf is not None and any(self._found_inf.read().flatten().tolist())

    def zeroed(self) -> set[str]:
        """The parameters zeroed by the user; waits for the GPU to have come this far."""
        flags = self._flags.read().tolist()  # of now, then of what the round left
        return {
            name
            for now, (name, place) in enumerate(zip(self._looked, self._places, strict=True))
            if flags[place] and not flags[now]
        }


def _have_nonzero(grads: Sequence[Tensor]) -> Tensor:
    """For each gradient, whether any entry is not zero (NaN is not), as bools on their device; no host sync."""
    if grads and grads[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(grads), float("inf"))) != 0
    return torch.tensor([_has_nonzero(in_bucket_order(grad)) for grad in grads], dtype=torch.bool)


def _has_nonzero(flat: Tensor) -> bool:
    """Looks at ever longer pieces: mostly the first one has an entry."""
    begin, length = 0, 1 << 10
    while begin < flat.numel():
        if flat[begin : begin + length].any():
            return True
        begin, length = begin + length, 8 * length
    return False


def stepped_by(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters that an optimizer has now: groups are added while training."""
    return (p for group in optimizer.param_groups for p in group["params"])


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the method for as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return bound(*args) if bound is not None else None

    return call
