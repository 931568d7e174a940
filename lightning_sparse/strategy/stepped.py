"""Which parameters the optimizers stepped, by what a round gave them: theirs is the residual that counts."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_sparse.strategy.zeros import WrittenZeros


class StepWatch:
    """Notes, at each optimizer step, who had a gradient that the user had not zeroed.

    Args:
        module: whose parameters are watched.
        names: of its parameters, by their ``id()``.
        open_names: answers with the parameters whose residual waits for what becomes of their gradient.
    """

    def __init__(self, module: nn.Module, names: Mapping[int, str], open_names: Callable[[], set[str]]) -> None:
        self.watching = False
        self._module = weakref.ref(module)
        self._names, self._open_names = names, open_names
        self._handles: list[Any] = []
        self._steps: list[tuple[set[str], WrittenZeros]] = []  # since the last clear()

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Note the steps of these optimizers from now on.

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
        self._handles = [optimizer.register_step_post_hook(self._note_step) for optimizer in optimizers]
        self.watching = True

    def unwatch(self) -> None:
        """Take all hooks off the optimizers; what was noted stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def clear(self) -> None:
        """Forget the steps so far: what they decided is settled."""
        self._steps.clear()

    def stepped(self) -> set[str]:
        """The parameters that an optimizer stepped by what the round gave it."""
        return set().union(*(names - zeros.names() for names, zeros in self._steps))

    def not_stepped(self) -> tuple[set[str], set[str]]:
        """Of the parameters that were not stepped: whose gradient was thrown away, and whose still waits for a step."""
        module = self._module()
        if not self.watching or module is None:
            return set(), set()
        left = self._open_names() - self.stepped()
        grads = {self._names[id(p)]: p.grad for p in module.parameters() if id(p) in self._names}
        there = {name: grad for name in left if (grad := grads.get(name)) is not None}
        waiting = there.keys() - WrittenZeros(there).names()
        return left - waiting, waiting

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # A fused optimizer is stepped even when the scaler met an inf, and skips inside.
        found_inf = getattr(optimizer, "found_inf", None)
        open_names = self._open_names()
        if (found_inf is None or not found_inf) and open_names:
            # Read at each step: groups are added while training, and who drops a gradient holds its parameter still.
            parameters = [p for param_group in optimizer.param_groups for p in param_group["params"]]
            grads = {self._names.get(id(p), ""): p.grad for p in parameters if p.grad is not None}
            grads = {name: grad for name, grad in grads.items() if name in open_names}
            self._steps.append((set(grads), WrittenZeros(grads)))
