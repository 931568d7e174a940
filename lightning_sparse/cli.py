"""`lightning-sparse`: one subcommand a function of the library. Arguments in, exit code out; no logic here.

A subcommand adds its arguments in ``_add_<name>`` and names the function that runs it with ``set_defaults(run=...)``.
Words after ``--`` are a command for the subcommand, untouched by argparse.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    parser = _parser()
    arguments = parser.parse_args(words[:split])
    arguments.command = words[split + 1 :]
    try:
        return int(arguments.run(arguments))
    except (ValueError, RuntimeError) as error:
        print(f"lightning-sparse {arguments.subcommand}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-sparse", description="Training that stays fast on ordinary networks."
    )
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    _add_doctor(subcommands)
    _add_lab(subcommands)
    return parser


def _add_doctor(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "doctor",
        help="say what of this machine can be used, and what is wrong",
        description="Versions, kernels, GPUs, memory, and whether they fit together. Exit code 1: something is wrong.",
    )
    parser.add_argument("--json", action="store_true", help="for a script")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from lightning_sparse.bench.doctor import Finding, examine, report
    from lightning_sparse.lab import why_not

    missing = why_not()
    lab = Finding("note" if missing else "ok", "lab", missing or "clusters with slow links can be played here")
    findings = [*examine(), lab]
    print(json.dumps([asdict(each) for each in findings], indent=2) if arguments.json else report(findings))
    return int(any(each.mark == "bad" for each in findings))


def _add_lab(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    parser.add_argument("--storage", type=Path, metavar="DIR", help="a folder that nodes see only over the network")
    parser.add_argument("--storage-gbps", type=float, metavar="R", help="rate of the storage node's link in Gbit/s")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write exit codes and bytes on the links as JSON")
    parser.set_defaults(run=_lab)


def _lab(arguments: argparse.Namespace) -> int:
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


if __name__ == "__main__":
    sys.exit(main())
