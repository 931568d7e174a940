"""Run a step's closure before the step: its gradients are needed first, and it must not run twice."""

from collections.abc import Callable
from typing import Any

import torch


class Replay:
    """A closure that has already run. The first call returns its result, later calls run it again."""

    def __init__(self, result: Any, closure: Callable[[], Any]) -> None:
        self.result, self.closure = result, closure
        self.calls = 0
        self.only_once = ""  # name of the optimizer, if a second call is an error

    def __call__(self) -> Any:
        self.calls += 1
        if self.calls == 1:
            return self.result
        if self.only_once:
            raise RuntimeError(
                f"{self.only_once} evaluates its closure more than once per step, so its step cannot be shared: "
                f"remove PTOCallback."
            )
        return self.closure()

    def counted(self) -> Any:
        """Count the call and return the result."""
        self.calls += 1
        return self.result


def closure_first(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Replay | None, tuple[Any, ...], dict[str, Any]]:
    """Run the closure of step(optimizer, closure). Return its `Replay`, and the arguments of step() with it."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None, args, kwargs
    with torch.enable_grad():
        replay = Replay(closure(), closure)
    if "closure" in kwargs:
        return replay, args, {**kwargs, "closure": replay}
    return replay, (args[0], replay, *args[2:]), kwargs
