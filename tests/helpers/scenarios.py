"""What ranks run of a test module in one start, because starting them costs more than most of it."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest

from tests.helpers.distributed import groups_of_its_own

Function = TypeVar("Function", bound=Callable[..., Any])


class Scenarios(dict[str, Callable[..., Any]]):
    """Functions by name; a test looks at what its scenario returned on every rank.

    It may be an argument of `run_ranks`: the functions travel by name, so they belong to their module.
    """

    def __init__(self) -> None:
        super().__init__()
        self._slow: set[str] = set()

    def add(self, fn: Function) -> Function:
        """For use as a decorator."""
        self[fn.__name__] = fn
        return fn

    def slow(self, fn: Function) -> Function:
        """A decorator, too: of a scenario whose tests are all marked as slow."""
        self._slow.add(fn.__name__)
        return self.add(fn)

    def wanted(self, request: pytest.FixtureRequest) -> dict[str, Callable[..., Any]]:
        """Those that the selected tests of the module look at: without the slow ones if no slow test is among them."""
        module = request.module
        tests = [each for each in request.session.items if getattr(each, "module", None) is module]
        with_slow = any(each.get_closest_marker("slow") for each in tests)
        return dict(self) if with_slow else self.quick

    @property
    def quick(self) -> dict[str, Callable[..., Any]]:
        """Those that are not slow."""
        return {name: fn for name, fn in self.items() if name not in self._slow}


def returned(scenarios: Mapping[str, Callable[..., Any]], *args: Any) -> dict[str, Any]:
    """What each returned; called in a rank. The first that raises ends it, by name."""
    found = {}
    for name, fn in scenarios.items():
        try:
            with groups_of_its_own():
                found[name] = fn(*args)
        except Exception as error:
            raise RuntimeError(f"scenario {name} raised; those after it did not run") from error
    return found
