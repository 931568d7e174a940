"""Helpers shared by the subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Subcommands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subcommands = object


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as columns: the first left-aligned, the others right-aligned.

    >>> print(table(["", "ms"], [["sum", "1.5"], ["select", "12"]]))
             ms
    sum     1.5
    select   12
    """
    widths = [max(len(line[column]) for line in [head, *rows]) for column in range(len(head))]
    lines = []
    for line in [head, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        lines.append("  ".join([line[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
