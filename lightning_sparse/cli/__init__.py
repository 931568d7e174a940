"""The `lightning-sparse` command.

Each module defines one subcommand: its ``add`` declares the arguments and sets ``run``, the function that executes
them. Subcommands import the library only when they run, so the command starts fast. Words after ``--`` are passed to
the subcommand as they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_sparse.cli import bench, cache, doctor, lab, plan, tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser("lightning-sparse", description="Data-parallel training on slow networks.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of lightning-sparse and torch")
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for each in (doctor, plan, bench, lab, cache, tokens):
        each.add(subcommands)
    arguments, unknown = parser.parse_known_args(words[:split])
    if unknown:
        hint = "; put the command after --, for example: lightning-sparse lab --nodes 2 -- python train.py"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint if arguments.subcommand == 'lab' else ''}")
    arguments.words, arguments.command = words[:split], words[split + 1 :]
    try:
        return int(arguments.run(arguments))
    except (ValueError, RuntimeError, OSError, ImportError) as error:  # anything else is a bug and keeps its traceback
        print(f"lightning-sparse {arguments.subcommand}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        from lightning_sparse import __version__

        print(f"lightning-sparse {__version__} (torch {version('torch')})")
        parser.exit()
