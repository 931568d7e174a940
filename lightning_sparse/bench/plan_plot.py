"""Plot a plan: step time and scaling efficiency over the number of nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_sparse.bench.extras import need
from lightning_sparse.bench.plan import Row

COLOURS = {
    "ddp": "#8a8a8a",
    "ddp16": "#c9a227",
    "dense": "#3a6ea5",
    "dense16": "#7fb2dd",
    "sparse": "#d1495b",
    "regional": "#2e7d32",
}


def draw(rows: Sequence[Row], title: str, file: Path) -> None:
    """Plot the rows of one density, or synchronisation alone if compute time is unknown.

    Raises ValueError if matplotlib is not installed, or does not support the file's suffix.
    """
    timed = all(row.step_s is not None for row in rows)
    need("matplotlib", "a plot")
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11 if timed else 6.5, 4.8), layout="constrained")
    axes = drawn.subplots(1, 1 + timed, squeeze=False)[0]
    if timed:
        _lines(axes[0], rows, "-", lambda row: 1e3 * (row.step_s or 0))
        _lines(axes[0], rows, ":", lambda row: 1e3 * (row.overlapped_step_s or 0))
        _lines(axes[1], rows, "-", lambda row: 100 * (row.efficiency or 0))
        _lines(axes[1], rows, ":", lambda row: 100 * (row.overlapped_efficiency or 0))
        axes[0].set(ylabel="ms per step", ylim=(0, None), title="step time (lower is better)")
        axes[1].set(ylabel="% of devices' own throughput", ylim=(0, 103), title="scaling efficiency (higher is better)")
        for style, label in (("-", "without overlap"), (":", "perfect overlap with backward")):
            axes[0].plot([], [], style, color="black", label=label)
    else:
        _lines(axes[0], rows, "-", lambda row: 1e3 * row.sync_s)
        axes[0].set(ylabel="synchronisation, ms per step", yscale="log", title="without compute, lower is better")
    counts = sorted({row.nodes for row in rows})
    for each in axes:
        each.set_xscale("log", base=2)
        each.set_xticks(counts, [f"{nodes}" for nodes in counts])
        each.set_xlabel("nodes")
        each.grid(alpha=0.3)
    drawn.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=4)
    drawn.suptitle(f"predicted: {title}", fontsize="medium")
    drawn.savefig(file)


def _lines(axes: Any, rows: Sequence[Row], style: str, value: Callable[[Row], float]) -> None:
    for path, colour in COLOURS.items():
        own = sorted((row for row in rows if row.path == path), key=lambda row: row.nodes)
        label = own[0].name if style == "-" else None
        values = list(map(value, own))
        axes.plot([row.nodes for row in own], values, style, marker="o", markersize=3, color=colour, label=label)
