"""Several scenarios in one start of ranks, because starting ranks usually takes longer than the scenarios."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest

from tests.helpers.distributed import groups_of_its_own

Function = TypeVar("Function", bound=Callable[..., Any])


class Scenarios(dict[str, Callable[..., Any]]):
    """Functions by name. A test checks the results of its scenario on every rank.

    `run_ranks` accepts it as an argument, because the functions are pickled by module and name.
    """

    def __init__(self) -> None:
        super().__init__()
        self._slow: set[str] = set()

    def add(self, fn: Function) -> Function:
        """Add a scenario. Use it as a decorator."""
        self[fn.__name__] = fn
        return fn

    def slow(self, fn: Function) -> Function:
        """Add a scenario whose tests are all marked as slow. Use it as a decorator."""
        self._slow.add(fn.__name__)
        return self.add(fn)

    def wanted(self, request: pytest.FixtureRequest) -> dict[str, Callable[..., Any]]:
        """Return the scenarios that the selected tests need: all, or the quick ones if no slow test is selected."""
        module = request.module
        tests = [each for each in request.session.items if getattr(each, "module", None) is module]
        with_slow = any(each.get_closest_marker("slow") for each in tests)
        return dict(self) if with_slow else self.quick

    @property
    def quick(self) -> dict[str, Callable[..., Any]]:
        """Return the scenarios that are not slow."""
        return {name: fn for name, fn in self.items() if name not in self._slow}


def returned(scenarios: Mapping[str, Callable[..., Any]], *args: Any) -> dict[str, Any]:
    """Run all scenarios in a rank and return their results. The first error names its scenario."""
    found = {}
    for name, fn in scenarios.items():
        try:
            with groups_of_its_own():
                found[name] = fn(*args)
        except Exception as error:
            raise RuntimeError(f"scenario {name} raised; those after it did not run") from error
    return found
