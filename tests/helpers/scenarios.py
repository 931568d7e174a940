"""What ranks run of a test module in one start, because starting them costs more than most of it."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class Scenarios(dict[str, Callable[..., Any]]):
    """Functions by name; a test looks at what its scenario returned on every rank.

    It may be an argument of `run_ranks`: the functions travel by name, so they belong to their module.
    """

    def add(self, fn: Function) -> Function:
        """For use as a decorator."""
        self[fn.__name__] = fn
        return fn
