"""`lightning-sparse lab`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from lightning_sparse.cli import check_new_file
from lightning_sparse.lab import Cluster, LabConfig, exit_on_signals


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a command on each node of an emulated cluster. Links between nodes have a\n"
        "limited rate. It needs root, except with --no-net."
    )
    parser.usage = "lightning-sparse lab [options] -- COMMAND [ARGUMENTS...]"
    parser.epilog = "Example:\n  lightning-sparse lab --nodes 4 --devices 1 --gbps 1 -- python train.py"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--nodes", type=int, default=2, metavar="M", help="nodes to emulate, 1 to 250 (default %(default)s)"
    )
    parser.add_argument("--devices", type=int, default=2, metavar="L", help="ranks per node (default %(default)s)")
    parser.add_argument(
        "--gbps",
        type=float,
        metavar="R",
        help="bandwidth of a node's link, in Gbit/s per direction, 0.001 to 100 (default 1)",
    )
    parser.add_argument(
        "--rtt-ms",
        type=float,
        default=0.0,
        metavar="T",
        help="round-trip time between nodes, 0 to 10,000 ms (default 0)",
    )
    parser.add_argument(
        "--no-net", action="store_true", help="use loopback: needs no root, but does not limit the rate"
    )
    parser.add_argument(
        "--storage", type=Path, metavar="DIR", help="folder that nodes can access only over the network"
    )
    parser.add_argument(
        "--storage-gbps",
        type=float,
        metavar="R",
        help="bandwidth of the storage node's link, in Gbit/s (default: as --gbps)",
    )
    parser.add_argument("--cpu", action="store_true", help="hide all GPUs")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write exit codes and link traffic as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    check_new_file("--report", arguments.report)
    if arguments.no_net and arguments.gbps is not None:
        raise ValueError(
            f"--gbps {arguments.gbps:g} has no effect with --no-net, which uses loopback without a rate limit: "
            f"omit --no-net or --gbps."
        )
    config = LabConfig(
        nodes=arguments.nodes,
        devices=arguments.devices,
        gbps=LabConfig.gbps if arguments.gbps is None else arguments.gbps,
        rtt_ms=arguments.rtt_ms,
        network=not arguments.no_net,
        storage=arguments.storage,
        storage_gbps=arguments.storage_gbps,
        cpu=arguments.cpu,
    )
    with exit_on_signals(), Cluster(config) as cluster:
        result = cluster.run(arguments.command)
    print(result.summary(), file=sys.stderr)
    if arguments.report is not None:
        arguments.report.write_text(json.dumps({**asdict(config), **asdict(result)}, indent=2, default=str) + "\n")
    return result.exit_code
