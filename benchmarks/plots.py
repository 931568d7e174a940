"""The style of plots, and plots of result files without new measurements.

    python -m benchmarks.plots [FOLDER]      # default: benchmarks/results

All plots are `WIDTH` inches wide, with the legend below the axes. The background is transparent, and text is gray,
which is readable on white and on black; so no curve is drawn in white or black.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_sparse.cli import import_optional

WIDTH = 10.0
LEGEND = 130
"""Characters that fit into a line of a legend, of which a mark takes five."""
GRAY = "#808080"
STYLE: dict[str, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GRAY),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlecolor": GRAY,
    "axes.titlesize": "medium",
    "font.size": 10,
    "grid.color": GRAY,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": "small",
    "savefig.transparent": True,
    "savefig.dpi": 120,
    "svg.hashsalt": "lightning_sparse",
}
# matplotlib's tab20 without its grays
DARK = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf")
LIGHT = ("#aec7e8", "#ffbb78", "#98df8a", "#ff9896", "#c5b0d5", "#c49c94", "#f7b6d2", "#dbdb8d", "#9edae5")
PALETTE = (*DARK, *LIGHT)


def color(index: int) -> str:
    """Return the color of a curve, in order. Gray is reserved for text and baselines."""
    return PALETTE[index % len(PALETTE)]


@contextmanager
def figure(file: Path, *, height: float = 4.5, columns: int = 1, sharey: bool = False) -> Iterator[Sequence[Any]]:
    """Yield axes, side by side, and write the file at the end. Equal rows give an equal SVG.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    mpl = import_optional("matplotlib", "a plot")
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = drawn.subplots(1, columns, squeeze=False, sharey=sharey)[0]
        yield axes
        named = {label: line for each in axes for line, label in zip(*each.get_legend_handles_labels(), strict=True)}
        if named:
            fit = max(1, LEGEND // (max(map(len, named)) + 5))
            drawn.legend(list(named.values()), list(named), loc="outside lower center", ncols=min(6, fit, len(named)))
        drawn.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


# -- plots of existing records -----------------------------------------------------------------------------------------

# prefix of a plot's name -> the module that draws it; the longest prefix counts
BY = {
    "convergence": "convergence.images",
    "convergence-text": "convergence.text",
    "time-to-loss": "convergence.time_to_loss",
    "frontier": "frontier.report",
    "exchange": "exchange.gradients",
    "elastic": "exchange.elastic",
    "kernels": "exchange.kernels",
    "pto": "exchange.pto",
    "data": "data.tiers",
    "data-storage": "data.storage",
}
SUFFIXES = (".svg", ".png", "-time.png", "-bytes.png", "-seconds.svg", "-size.svg")
GONE = ("data-learning", "peers")
"""Their benchmarks are no longer here."""


def draw(file: Path, record: dict[str, Any]) -> None:
    """Draw the plot of a record, with the benchmark that wrote it."""
    name = max((each for each in BY if file.name.startswith(each)), key=len)
    import_module(f"benchmarks.{BY[name]}").plot(record, file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the plots of result files again.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "results")
    for record in sorted(parser.parse_args().folder.glob("*.json")):
        for file in (record.with_name(record.stem + suffix) for suffix in SUFFIXES):
            if file.exists() and not file.name.startswith(GONE):
                draw(file, json.loads(record.read_text()))
                print(f"wrote {file}")


if __name__ == "__main__":
    main()
