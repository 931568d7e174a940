"""Option checks accept values within the limits, and their errors name the option, the value and the limits."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from lightning_sparse.options import flag, function, number, one_of, whole

Check = Callable[..., None]


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (partial(whole, low=1), 1),
        (partial(whole, low=1), np.int64(3)),
        (partial(whole, low=1, optional=True), None),
        (partial(number, above=0, high=1), 1),
        (partial(number, above=0, high=1), np.float32(0.5)),
        (partial(one_of, choices=("a", "b")), "b"),
        (flag, False),
        (function, print),
    ],
)
def test_option_within_limits_is_accepted(check: Check, value: Any) -> None:
    check({"option": value}, "option")


@pytest.mark.parametrize(
    ("check", "value", "rule"),
    [
        (partial(whole, low=1), 0, "a whole number of at least 1"),
        (partial(whole, low=1), True, "a whole number of at least 1"),
        (partial(whole, low=1), None, "a whole number of at least 1"),
        (partial(whole, low=1, high=9), 2.0, "a whole number from 1 to 9"),
        (partial(whole, optional=True), "2", "a whole number, or None"),
        (partial(number, above=0, high=1), 0, "a number in (0, 1]"),
        (partial(number, above=0, high=1), float("nan"), "a number in (0, 1]"),
        (partial(number, above=0), float("inf"), "a number above 0"),
        (partial(number, low=0, below=1), 1, "a number in [0, 1)"),
        (partial(number, low=0), "1", "a number of at least 0"),
        (partial(one_of, choices=("a", "b")), "c", "one of 'a', 'b'"),
        (flag, 1, "True or False"),
        (function, None, "a function"),
    ],
)
def test_option_outside_limits_is_refused_with_its_rule(check: Check, value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'option={value!r} must be {rule}. Try another.')}$"):
        check({"option": value}, "option", hint="try another")
