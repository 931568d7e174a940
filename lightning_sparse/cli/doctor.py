"""`lightning-sparse doctor`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from lightning_sparse.cli.common import Subcommands

HOW = "not measured: run `torchrun ... --no-python lightning-sparse doctor` (or srun) on all nodes"


def add(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "doctor",
        help="check this machine, or this cluster, for problems",
        description="Check versions, kernels, GPUs and memory. Under torchrun or srun, also report the topology and "
        "measure both networks. The exit code is 1 if a check fails.",
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="also check this disk cache")
    parser.add_argument("--json", action="store_true", help="print JSON")
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
        from lightning_sparse.lab import unavailable_reason

        missing = unavailable_reason()
        findings.append(Finding("note", "network", HOW))
        message = f"{missing}; or use --no-net for loopback" if missing else "can emulate clusters with slow links"
        findings.append(Finding("note" if missing else "ok", "lab", message))
    if rank == 0:
        print(json.dumps([asdict(each) for each in findings], indent=2) if arguments.json else report(findings))
    return int(any(each.status == "bad" for each in findings))
