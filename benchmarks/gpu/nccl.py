"""The part `nccl`: step times of this package and other methods on real ranks, over links of limited rate.

The two nodes are network namespaces (`lightning_sparse.lab`) with one rank each. On a GPU, ranks use NCCL. If there is
only one GPU, ranks share it, so every method computes longer than on two machines. On a CPU, the model is small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu.claims import DDP, Claims, Part, Result, verdict
from benchmarks.processes import on_clusters
from benchmarks.record import Rows
from lightning_sparse.cli import format_table
from lightning_sparse.lab import unavailable_reason

RATES = (10.0, 1.0)
"""Rates of the links in Gbit/s, per direction."""
LOCAL = "mstopk_local 1%"
OURS = ("mstopk_hier 1%", LOCAL, "mstopk_fsdp 1%")


class Faster(NamedTuple):
    """A claim: with links of a rate, each of these methods is at least `factor` times as fast as DDP, or as each method
    that is not of this package."""

    rate: float
    methods: Sequence[str]
    only_ddp: bool
    factor: float
    text: str


CLAIMS = {
    "ddp_10": Faster(10.0, OURS, True, 2.0, "over 10 Gbit/s, each strategy is at least 2 times as fast as DDP"),
    "ddp_1": Faster(1.0, OURS, True, 10.0, "over 1 Gbit/s, each strategy is at least 10 times as fast as DDP"),
    "others_10": Faster(
        10.0, (LOCAL,), False, 1.0, "over 10 Gbit/s, mstopk_local is at least as fast as torch's methods"
    ),
    "others_1": Faster(1.0, (LOCAL,), False, 1.0, "over 1 Gbit/s, mstopk_local is at least as fast as torch's methods"),
}


def step_times(folder: Path, device: torch.device) -> Iterator[Result]:
    """Measure all methods on two nodes of one rank each, and write the table to nccl.md."""
    from benchmarks.gpu.ranks import measure

    rows, cpu = Rows(), device.type == "cpu"
    for rate in RATES if unavailable_reason() is None else RATES[:1]:  # on loopback, all rates are equal
        rows += on_clusters(measure, cpu, clusters=["2x1"], gbps=[rate], cpu=cpu) or []
        (folder / "nccl.md").write_text(table(rows) + "\n")
        yield check(rows), rows
    print(table(rows))


def check(rows: Rows) -> Claims:
    """Return the verdicts of the claims about rates that were measured."""
    ms = {(row["gbps"], row["method"]): row["ms"] for row in rows}
    claims = Claims()
    for name, claim in CLAIMS.items():
        if (claim.rate, DDP) in ms:
            measured = [method for rate, method in ms if rate == claim.rate and method not in OURS]
            others = [DDP] if claim.only_ddp else measured
            factors = {
                (own, other): ms[claim.rate, other] / ms[claim.rate, own] for own in claim.methods for other in others
            }
            own, other = min(factors, key=lambda pair: factors[pair])
            number = f"{own} is {factors[own, other]:.2f} times as fast as {other}"
            claims[name] = verdict(factors[own, other] >= claim.factor, number)
    return claims


def table(rows: Rows) -> str:
    """Return a table with one row per method, and the times at each rate."""
    rates = list(dict.fromkeys(row["gbps"] for row in rows))
    found = {(row["gbps"], row["method"]): row for row in rows}
    names = ["loopback" if rate is None else f"{rate:g} Gbit/s" for rate in rates]
    head = ["ms per step: median (range)", *names, "MB received per step", *(f"speedup, {name}" for name in names)]
    body = []
    for method in dict.fromkeys(row["method"] for row in rows):
        here = [found[rate, method] for rate in rates]
        times = [f"{row['ms']:.1f} ({row['lowest ms']:.1f} to {row['highest ms']:.1f})" for row in here]
        speedups = [f"{found[rate, DDP]['ms'] / row['ms']:.1f}" for rate, row in zip(rates, here, strict=True)]
        body.append([method, *times, f"{here[0]['received bytes'] / 1e6:.2f}", *speedups])
    return format_table(head, body)


NCCL = Part(step_times, 290, {name: claim.text for name, claim in CLAIMS.items()}, by_default=False)
