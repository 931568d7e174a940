"""What the subcommands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Subcommands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subcommands = object


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and numbers to the right.

    >>> print(table(["", "ms"], [["sum", "1.5"], ["select", "12"]]))
             ms
    sum     1.5
    select   12
    """
    widths = [max(len(line[column]) for line in [head, *rows]) for column in range(len(head))]
    lines = []
    for line in [head, *rows]:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
