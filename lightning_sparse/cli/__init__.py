"""`lightning-sparse`: one subcommand a function of the library. Arguments in, exit code out; no logic here.

A module a subcommand: its ``add`` adds the arguments and names what runs it with ``set_defaults(run=...)``. What a
subcommand needs is imported when it runs, so the command starts at once. Words after ``--`` are a command for the
subcommand, untouched by argparse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_sparse.cli import bench, cache, doctor, lab, plan


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="lightning-sparse", description="Training that stays fast on ordinary networks."
    )
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for each in (doctor, plan, bench, lab, cache):
        each.add(subcommands)
    arguments, unknown = parser.parse_known_args(words[:split])
    if unknown:
        way_out = "; the command to run goes after --, as in: lightning-sparse lab --nodes 2 -- python train.py"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{way_out if arguments.subcommand == 'lab' else ''}")
    arguments.words, arguments.command = words[:split], words[split + 1 :]
    try:
        return int(arguments.run(arguments))
    except (ValueError, RuntimeError) as error:
        print(f"lightning-sparse {arguments.subcommand}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
