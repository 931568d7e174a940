"""`lightning-sparse doctor`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from lightning_sparse.cli.common import Subcommands

HOW = "not looked at: for that, torchrun ... --no-python lightning-sparse doctor (or srun) on all nodes"


def add(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "doctor",
        help="say what of this machine can be used, and what is wrong",
        description="Versions, kernels, GPUs, memory, and whether they fit together. Started by torchrun or srun, the "
        "topology and the measured rates of both networks too. Exit code 1: something is wrong.",
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="look at this disk cache, too")
    parser.add_argument("--json", action="store_true", help="for a script")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from lightning_sparse.bench.doctor import Finding, examine, report
    from lightning_sparse.bench.ranks import join, launched, leave

    findings, rank = examine(), 0
    if arguments.cache_dir is not None:
        from lightning_sparse.bench.doctor_cache import examine_cache

        findings += examine_cache(arguments.cache_dir)
    if launched():
        from lightning_sparse.bench.network import examine_network

        topology, device = join()
        findings += examine_network(topology, device, findings)
        rank = topology.rank
        leave()
    else:
        from lightning_sparse.lab import why_not

        missing = why_not()
        findings.append(Finding("note", "network", HOW))
        said = f"{missing}; else --no-net: over loopback" if missing else "clusters with slow links can be played here"
        findings.append(Finding("note" if missing else "ok", "lab", said))
    if rank == 0:
        print(json.dumps([asdict(each) for each in findings], indent=2) if arguments.json else report(findings))
    return int(any(each.mark == "bad" for each in findings))
