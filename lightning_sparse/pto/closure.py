"""A step's closure, run before the step: its gradients are needed first, and it must not run twice."""

from collections.abc import Callable
from typing import Any

import torch


class Replay:
    """A closure that was run already: answers with its result once, and is the closure from then on."""

    def __init__(self, result: Any, closure: Callable[[], Any]) -> None:
        self.result, self.closure = result, closure
        self.calls = 0
        self.only_once = ""

    def __call__(self) -> Any:
        self.calls += 1
        if self.calls == 1:
            return self.result
        if self.only_once:
            raise RuntimeError(
                f"{self.only_once} evaluates its closure more than once in a step, which cannot be shared: leave "
                f"PTOCallback out."
            )
        return self.closure()

    def counted(self) -> Any:
        """The result at every call, counted."""
        self.calls += 1
        return self.result


def closure_first(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Replay | None, tuple[Any, ...], dict[str, Any]]:
    """Run the closure of a step(optimizer, closure) now, so that gradients exist; the step itself gets the result."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None, args, kwargs
    with torch.enable_grad():
        replay = Replay(closure(), closure)
    if "closure" in kwargs:
        return replay, args, {**kwargs, "closure": replay}
    return replay, (args[0], replay, *args[2:]), kwargs
