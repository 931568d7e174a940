"""What several subcommands declare."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Subcommands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subcommands = object


def add_cluster(parser: argparse.ArgumentParser, *, nodes: int, devices: int) -> None:
    """The size and link rate of an emulated cluster."""
    parser.add_argument("--nodes", type=int, default=nodes, metavar="M", help="nodes to emulate (default %(default)s)")
    parser.add_argument("--devices", type=int, default=devices, metavar="L", help="per node (default %(default)s)")
    parser.add_argument("--gbps", type=float, default=1.0, metavar="R", help="Gbit/s of a link each way (default 1)")
