"""The picture of a plan: step time and scaling efficiency over the number of nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_sparse.bench.extras import figure, save
from lightning_sparse.bench.plan import PATHS, Row

COLOURS = {"ddp": "#8a8a8a", "ddp16": "#c9a227", "dense": "#3a6ea5", "sparse": "#d1495b", "regional": "#2e7d32"}


def draw(rows: Sequence[Row], title: str, file: Path) -> None:
    """One density's rows. Bands reach from no overlap to perfect overlap; without compute it is synchronisation alone.

    Raises:
        ValueError: when matplotlib is not installed, or does not know the ending of the file's name.
    """
    timed = all(row.step_s is not None for row in rows)
    drawn, axes = figure(11 if timed else 6.5, 4.8, 2 if timed else 1)
    if timed:
        _band(axes[0], rows, lambda row: 1e3 * (row.step_s or 0), lambda row: 1e3 * (row.overlapped_step_s or 0))
        _band(
            axes[1], rows, lambda row: 100 * (row.efficiency or 0), lambda row: 100 * (row.overlapped_efficiency or 0)
        )
        axes[0].set(ylabel="a step, ms", yscale="log", title="step time (lower is better)")
        axes[1].set(
            ylabel="% of the devices' own throughput", ylim=(0, 103), title="scaling efficiency (higher is better)"
        )
    else:
        _band(axes[0], rows, lambda row: 1e3 * row.sync_s, lambda row: 1e3 * row.sync_s)
        axes[0].set(ylabel="synchronisation of a step, ms", yscale="log", title="without compute, lower is better")
    counts = sorted({row.nodes for row in rows})
    for each in axes:
        each.set_xscale("log", base=2)
        each.set_xticks(counts, [f"{nodes}" for nodes in counts])
        each.set_xlabel("nodes")
        each.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize="small")
    bands = "\nlines: no overlap with backward; bands reach to perfect overlap" if timed else ""
    drawn.suptitle(f"predicted, {title}{bands}", fontsize="medium")
    save(drawn, file)


def _band(axes: object, rows: Sequence[Row], line: Callable[[Row], float], other: Callable[[Row], float]) -> None:
    for path in PATHS:
        own = sorted((row for row in rows if row.path == path), key=lambda row: row.nodes)
        nodes = [row.nodes for row in own]
        colour = COLOURS[path]
        axes.plot(nodes, list(map(line, own)), marker="o", markersize=3, color=colour, label=own[0].name)  # type: ignore[attr-defined]
        axes.fill_between(nodes, list(map(line, own)), list(map(other, own)), color=colour, alpha=0.15, linewidth=0)  # type: ignore[attr-defined]
