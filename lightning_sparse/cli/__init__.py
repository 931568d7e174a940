"""The `lightning-sparse` command, and functions that commands and benchmarks share.

Each subcommand is a module. Its ``declare`` adds the options to a parser and sets ``run``. Words after ``--`` are
passed to the subcommand unchanged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

COMMANDS = {
    "doctor": "check this machine, or the ranks of a cluster, for problems",
    "plan": "estimate communication and step times on a cluster, and recommend a strategy",
    "lab": "run a command on an emulated cluster with slow links",
    "cache": "fill, list, and remove local disk caches",
    "tokens": "convert text files to token ids for TokenDataModule",
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        "lightning-sparse", description="Tools of lightning_sparse: multi-node training on slow networks."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of lightning-sparse and torch")
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    chosen = next((word for word in words if word in COMMANDS), None)
    parsers = {}
    for name, summary in COMMANDS.items():
        parsers[name] = subparser = subcommands.add_parser(name, help=summary)
        # import only the requested subcommand, so that the command starts fast
        if name == chosen:
            import_module(f"{__name__}.{name}").declare(subparser)
    arguments, unknown = parser.parse_known_args(words[:split])
    if unknown:
        hint = "; put the command after --, for example: lightning-sparse lab --nodes 2 -- python train.py"
        hint = hint if arguments.subcommand == "lab" else ""
        parsers[arguments.subcommand].error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    arguments.command = words[split + 1 :]
    try:
        return int(arguments.run(arguments))
    except (ValueError, RuntimeError, OSError, ImportError) as error:  # anything else is a bug and keeps its traceback
        print(f"lightning-sparse {arguments.subcommand}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def check_new_file(option: str, path: Path | None) -> None:
    """Raise ValueError before a long run, if the file to write after it cannot be created."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        problem = "is a folder" if path.is_dir() else f"is in {path.parent}, which is not a folder"
        raise ValueError(f"{option} {path} {problem}: give a file in an existing folder.")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        from lightning_sparse import __version__

        print(f"lightning-sparse {__version__} (torch {version('torch')})")
        parser.exit()


def import_optional(package: str, use: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise ValueError(f"{use} needs {package}, which cannot be imported ({error}): pip install {package}") from None


def format_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format rows as columns: the first left-aligned, the others right-aligned. None is an empty cell.

    >>> print(format_table(["", "ms"], [["sum", 1.5], ["select", None]]))
              ms
    sum     1.50
    select
    """
    lines = [list(head)]
    for row in rows:
        lines.append(["" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip() for first, *others in lines
    )
