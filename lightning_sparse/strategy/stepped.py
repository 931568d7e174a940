"""Which parameters the optimizers stepped, by what a round gave them: theirs is the residual that counts.

It is noted at the step of *any* optimizer, since the one that a user hands over may leave the step to another inside it
(SAM, Lookahead). Gradients are looked at before the step: some optimizers write to them (torch's SGD with Nesterov's
momentum and ``foreach``, the default on CUDA), and a zero of the user would no longer be one.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_sparse.strategy.parameters import Parameters, stepped_by
from lightning_sparse.strategy.zeros import WrittenZeros

MANY_STEPS = 16
"""Steps without a round between them, after which their gradients are looked at: they are not kept for ever."""

_Step = tuple[set[str], WrittenZeros]
"""Who had a gradient, and whose was zeroed."""


class StepWatch:
    """Notes, at each optimizer step, who had a gradient that the user had not zeroed.

    Args:
        parameters: those that are watched.
        open_names: answers with the parameters whose residual waits for what becomes of their gradient.
    """

    def __init__(self, parameters: Parameters, open_names: Callable[[], set[str]]) -> None:
        self.watching = False
        self._parameters, self._open_names = parameters, open_names
        self._hooks: list[Callable[[], Any]] = []  # each takes one off
        self._begun: dict[int, _Step] = {}  # by the optimizer's id()
        self._steps: list[_Step] = []
        self._stepped: set[str] = set()  # by steps that were looked at since the last clear()

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Note steps from now on. Where there is no optimizer nothing can be noted, and every round counts.

        Raises:
            ValueError: for an optimizer that cannot tell when it steps.
        """
        optimizers = list(optimizers)
        mute = [type(each).__name__ for each in optimizers if not hasattr(each, "register_step_post_hook")]
        if mute:
            raise ValueError(
                f"{', '.join(mute)} cannot tell when it steps, so nobody would know whose residual counts: derive it "
                f"from torch.optim.Optimizer."
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

    def clear(self) -> None:
        """Forget the steps so far: what they decided is settled."""
        self._begun.clear()
        self._steps.clear()
        self._stepped.clear()

    def stepped(self) -> set[str]:
        """The parameters that an optimizer stepped by what the round gave it."""
        self._stepped.update(*(names - zeros.names() for names, zeros in self._steps))
        self._steps.clear()
        return set(self._stepped)

    def not_stepped(self) -> tuple[set[str], set[str]]:
        """Of the parameters that were not stepped: whose gradient was thrown away, and whose still waits for a step."""
        module = self._parameters.module
        if not self.watching or module is None:
            return set(), set()
        left = self._open_names() - self.stepped()
        grads = {self._parameters.name_of(p): p.grad for p in module.parameters()}
        there = {name: grad for name in left if (grad := grads.get(name)) is not None}
        waiting = there.keys() - WrittenZeros(there).names()
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
        # who drops a gradient holds its parameter still
        grads = {self._parameters.name_of(p): p.grad for p in stepped_by(optimizer) if p.grad is not None}
        grads = {name: grad for name, grad in grads.items() if name in open_names}
        self._begun[id(optimizer)] = set(grads), WrittenZeros(grads)

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        begun = self._begun.pop(id(optimizer), None)
        # A fused optimizer is stepped even when the scaler met an inf, and skips inside.
        found_inf = getattr(optimizer, "found_inf", None)
        if begun is not None and (found_inf is None or not found_inf):
            self._steps.append(begun)
        if len(self._steps) > MANY_STEPS:
            self.stepped()


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the method for as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return bound(*args) if bound is not None else None

    return call
