"""Checks of a library: results must equal DDP in exact cases, and losses must fall."""

from __future__ import annotations

from collections.abc import Iterator

from tests.works_with.runs import STRATEGIES, Fit, difference

SHARE = 4  # the first and the last quarter of a fit are averaged
NOISE = 2e-3
"""Allowed difference of losses. Rounding grows to this size, because Adam and Prodigy divide by tiny gradients."""
SAME = 1e-4
"""Allowed difference of a resumed run. It is zero unless a sum depends on the alignment of memory (Prodigy)."""


def ends_of(fit: Fit) -> tuple[float, float]:
    """Return the mean losses of the first and of the last steps."""
    return sum(fit.losses[:SHARE]) / SHARE, sum(fit.losses[-SHARE:]) / SHARE


def problems_of(of_ranks: list[dict[str, Fit]]) -> list[str]:
    """Return all differences from the expected results."""
    fits = of_ranks[0]
    found = [*_unlike(fits, "mstopk_hier, all", "ddp", NOISE)]
    found += _unlike(fits, "mstopk_local, all, alike", "ddp, alike", NOISE)
    for name in STRATEGIES:
        if f"{name}, resumed" in fits:
            found += _unlike(fits, f"{name}, resumed", name, SAME)
    for name, fit in fits.items():
        found += _faults(name, fit, [other[name] for other in of_ranks])
    return found


def _unlike(fits: dict[str, Fit], name: str, reference: str, tolerance: float) -> Iterator[str]:
    one, other = fits[name], fits[reference]
    steps = [abs(a - b) for a, b in zip(one.losses[::-1], other.losses[::-1], strict=False)]
    if max(steps) > tolerance:
        yield f"{name}: losses differ from {reference} by {max(steps):.1e}"
    for a, b in zip(one.validations[::-1], other.validations[::-1], strict=False):
        apart = max(abs(a[key] - b[key]) for key in a if key.startswith("val"))
        if apart > tolerance:
            yield f"{name}: validations differ from {reference} by {apart:.1e}"


def _faults(name: str, fit: Fit, of_ranks: list[Fit]) -> Iterator[str]:
    if any(difference(fit.state, other.state) for other in of_ranks):
        yield f"{name}: ranks end with different weights"
    if fit.export_error:
        yield f"{name}: the files of the library differ from the global weights by {fit.export_error:.1e}"
    first, last = ends_of(fit)
    if "resumed" not in name and not last < first:
        yield f"{name}: the loss went from {first:.3f} to {last:.3f}"
