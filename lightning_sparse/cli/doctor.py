"""`lightning-sparse doctor`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from lightning_sparse.cli.common import Subcommands


def add(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "doctor",
        help="say what of this machine can be used, and what is wrong",
        description="Versions, kernels, GPUs, memory, and whether they fit together. Exit code 1: something is wrong.",
    )
    parser.add_argument("--json", action="store_true", help="for a script")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from lightning_sparse.bench.doctor import Finding, examine, report
    from lightning_sparse.lab import why_not

    missing = why_not()
    lab = Finding("note" if missing else "ok", "lab", missing or "clusters with slow links can be played here")
    findings = [*examine(), lab]
    print(json.dumps([asdict(each) for each in findings], indent=2) if arguments.json else report(findings))
    return int(any(each.mark == "bad" for each in findings))
