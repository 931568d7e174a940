"""Checks of options, and constructors whose options are the fields of dataclasses.

A check reads an option from an object or a mapping, and raises ValueError: ``name=value must be .... Hint.``
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
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


def one_of(config: Any, name: str, choices: Sequence[Any], *, hint: str = "") -> None:
    value = _value(config, name)
    if value not in choices:
        _refuse(name, value, f"one of {', '.join(map(repr, choices))}", False, hint)


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
    raise ValueError(f"{name}={value!r} must be {rule}{f'. {hint[0].upper()}{hint[1:]}' if hint else ''}.")


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
        tail = [others] if takes_others else []
        init.__signature__ = inspect.Signature([*parameters.values(), *tail])  # type: ignore[attr-defined]
        texts: dict[str, str] = {}
        for described in (base for config in reversed(configs) for base in reversed(config.__mro__)):
            texts.update(descriptions(described))  # a subclass describes an option better
        lines = [f"    {name}: {texts[name]}" for name in parameters if name in texts]
        init.__doc__ = "\n".join(["Set the options. The class describes the other arguments.", "", "Args:", *lines])
        # Python's errors about arguments then name the public class.
        init.__qualname__ = re.sub("(Fabric)?Mixin", "Strategy" if takes_others else "", init.__qualname__)
        return init

    return decorate


def class_with_options(cls: type) -> type:
    """Return the class or the ancestor whose constructor has the options: a subclass may have its own constructor."""
    return next(base for base in cls.__mro__ if hasattr(vars(base).get("__init__"), "__signature__"))


def descriptions(cls: type) -> dict[str, str]:
    """Return the description of each argument in a docstring, by name."""
    text = re.split(r"\n    \*\*\w+: ", inspect.getdoc(cls) or "")[0]
    match = re.search(r"^Args:\n((?:    .*\n|\n)*)", text + "\n", re.MULTILINE)
    entries = re.findall(r"^    ([\w, ]+): ((?:.|\n(?!    \w[\w, ]*: |\n))*)", match[1] if match else "", re.MULTILINE)
    return {name.strip(): text.strip() for names, text in entries for name in names.split(",")}


class UnknownOptionError(TypeError, ValueError):
    """An option that a class does not have."""


_OTHER_NAMES = {"num_workers": ("threads", "workers")}  # torch's name of an option -> ours


def refuse_unknown(cls: type, given: Mapping[str, Any], known: Collection[str], otherwise: str = "") -> None:
    """Refuse options that are not `known`. `otherwise`: the fix if no name is similar."""
    unknown = sorted(given.keys() - set(known))
    if not unknown:
        return
    ours = [name for option in unknown for name in _OTHER_NAMES.get(option, ()) if name in known]
    close = [near for name in unknown for near in get_close_matches(name, sorted(known), 1)]
    fix = f" Use {' and '.join(ours)}." if ours else f" Did you mean {' or '.join(close)}?" if close else otherwise
    values = ", ".join(f"{name}={given[name]!r}" for name in unknown)
    raise UnknownOptionError(f"{cls.__name__} has no option{'s' * (len(unknown) > 1)} {values}.{fix}")


def split_options(cls: type, given: Mapping[str, Any], *configs: type) -> list[dict[str, Any]]:
    refuse_unknown(cls, given, inspect.signature(class_with_options(cls).__init__).parameters)  # type: ignore[misc]
    names = [{field.name for field in fields(config)} for config in configs]
    return [{name: value for name, value in given.items() if name in own} for own in names]
