"""`lightning-sparse lab`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from lightning_sparse.cli.common import Subcommands


def add(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "lab",
        help="run a command as a cluster with slow links, on this machine",
        description="Run a command in every node of a cluster made of network namespaces with shaped links.",
        usage="lightning-sparse lab [options] -- COMMAND [ARGUMENTS...]",
        epilog="Example: lightning-sparse lab --nodes 4 --devices 1 --gbps 1 -- python train.py",
    )
    parser.add_argument("--nodes", type=int, default=2, metavar="M", help="number of nodes (default %(default)s)")
    parser.add_argument("--devices", type=int, default=2, metavar="L", help="ranks in a node (default %(default)s)")
    parser.add_argument(
        "--gbps", type=float, default=1.0, metavar="R", help="rate of a node's link in Gbit/s, each way (default 1)"
    )
    parser.add_argument("--no-net", action="store_true", help="rehearse on loopback: no root needed, nothing is shaped")
    parser.add_argument(
        "--storage", type=Path, metavar="DIR", help="a folder that nodes see over the network only, at this same path"
    )
    parser.add_argument("--storage-gbps", type=float, metavar="R", help="rate of the storage node's link in Gbit/s")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write exit codes and bytes on the links as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from lightning_sparse.lab import Cluster, LabConfig, signals_as_exit

    config = LabConfig(
        nodes=arguments.nodes,
        devices=arguments.devices,
        gbps=arguments.gbps,
        network=not arguments.no_net,
        storage=arguments.storage,
        storage_gbps=arguments.storage_gbps,
    )
    with signals_as_exit(), Cluster(config) as cluster:
        result = cluster.run(arguments.command)
    print(result.summary(), file=sys.stderr)
    if arguments.report is not None:
        arguments.report.write_text(json.dumps({**asdict(config), **asdict(result)}, indent=2, default=str) + "\n")
    return result.exit_code
