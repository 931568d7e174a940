"""Checks of options, and constructors whose options are the fields of dataclasses.

A check reads an option from an object or a mapping, and raises ValueError: ``name=value must be ...: hint.``
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from numbers import Integral, Real
from typing import Any, TypeVar, get_type_hints

Init = TypeVar("Init", bound=Callable[..., None])


def whole(
    config: Any, name: str, *, low: int | None = None, high: int | None = None, optional: bool = False, hint: str = ""
) -> None:
    """Check that an option is a whole number from `low` to `high`, or None if it is optional."""
    value = _value(config, name)
    if value is None and optional:
        return
    in_range = not isinstance(value, bool) and isinstance(value, Integral)
    in_range = in_range and (low is None or value >= low) and (high is None or value <= high)
    if not in_range:
        _refuse(name, value, f"a whole number{_range(low, high)}", optional, hint)


def number(
    config: Any,
    name: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    optional: bool = False,
    hint: str = "",
) -> None:
    """Check that an option is a finite number in the given range."""
    value = _value(config, name)
    if value is None and optional:
        return
    in_range = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    in_range = in_range and (low is None or value >= low) and (above is None or value > above)
    in_range = in_range and (high is None or value <= high) and (below is None or value < below)
    if not in_range:
        _refuse(name, value, f"a number{_range(low, high, above, below)}", optional, hint)


def one_of(config: Any, name: str, choices: Sequence[Any], *, optional: bool = False, hint: str = "") -> None:
    value = _value(config, name)
    if value not in choices and not (value is None and optional):
        _refuse(name, value, f"one of {', '.join(map(repr, choices))}", optional, hint)


def flag(config: Any, name: str, *, hint: str = "") -> None:
    value = _value(config, name)
    if not isinstance(value, bool):
        _refuse(name, value, "True or False", False, hint)


def function(config: Any, name: str, *, optional: bool = False, hint: str = "") -> None:
    value = _value(config, name)
    if not callable(value) and not (value is None and optional):
        _refuse(name, value, "a function", optional, hint)


def _value(config: Any, name: str) -> Any:
    return config[name] if isinstance(config, Mapping) else getattr(config, name)


def _refuse(name: str, value: Any, rule: str, optional: bool, hint: str) -> None:
    rule += ", or None" if optional else ""
    raise ValueError(f"{name}={value!r} must be {rule}{f': {hint}' if hint else ''}.")


def _range(low: float | None, high: float | None, above: float | None = None, below: float | None = None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    start, end = low if above is None else above, high if below is None else below
    if start is not None and end is not None:
        return f" in {'[' if above is None else '('}{start}, {end}{']' if below is None else ')'}"
    words = {"of at least": low, "above": above, "of at most": high, "below": below}
    return "".join(f" {word} {limit}" for word, limit in words.items() if limit is not None)


def with_options_of(*configs: type, without: Sequence[str] = (), takes_others: bool = False) -> Callable[[Init], Init]:
    """Decorate a constructor that takes the fields of `configs` among its ``**options``.

    The signature and the docstring then contain the options, for LightningCLI and help().

    Args:
        without: fields that are not options.
        takes_others: whether ``**options`` also has options of other classes.
    """

    def decorate(init: Init) -> Init:
        *named, others = inspect.signature(init, eval_str=True).parameters.values()
        parameters = {parameter.name: parameter for parameter in named}
        for config in configs:
            types = get_type_hints(config)
            for field in fields(config):
                # The constructor supplies fields without a default.
                if field.default is not MISSING and field.name not in without:
                    option = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
                    parameters.setdefault(field.name, option.replace(annotation=types[field.name]))
        rest = [others] if takes_others else []
        init.__signature__ = inspect.Signature([*parameters.values(), *rest])  # type: ignore[attr-defined]
        described = [each for config in configs for each in config.__mro__[-2::-1]]  # base classes first
        init.__doc__ = "\n\n".join(inspect.getdoc(each) or "" for each in described)
        return init

    return decorate


def split_options(given: Mapping[str, Any], *configs: type) -> list[dict[str, Any]]:
    names = [{field.name for field in fields(config)} for config in configs]
    unknown = sorted(given.keys() - set().union(*names))
    if unknown:
        raise TypeError(f"unexpected option(s) {', '.join(unknown)}: the DataModule has no such options.")
    return [{name: value for name, value in given.items() if name in own} for own in names]
