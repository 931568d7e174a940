"""The cost model on paper: against what gradients.py measured, and for clusters that are not at hand.

    python -m benchmarks.exchange.plan OUT --measured OUT/exchange.json

Nothing is measured here. The first table sets predictions beside the synchronisation times of an earlier
gradients.py; the rates are those that exchange="auto" measured at the beginning of the same runs, and DDP's
own copies, which no path avoids and the model leaves out, are added as measured. "nominal" has the link's rate as it
was set, no latency and no cost of adding in the place of what was measured, so it tells the model's error from the
measurement's; the last two columns are predicted over measured. The other tables are for machines with the numbers of
`ASSUMED`. Writes OUT/plan.md.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from dataclasses import replace
from typing import Any

import torch

from benchmarks.exchange.gradients import NOTHING
from benchmarks.record import surroundings
from lightning_sparse.cli.plan import V100, path_of
from lightning_sparse.exchange import Work
from lightning_sparse.exchange.choice import PathChoice
from lightning_sparse.exchange.rates import Link, Rates
from lightning_sparse.gradients import HierConfig
from lightning_sparse.topology import Topology

NUMEL, BUCKETS, DENSITY = 25_557_032, 5, 0.01
ASSUMED = {
    "latency between nodes": 30e-6,
    "latency inside a node": 10e-6,
    "seconds a byte inside a node": 1 / 50e9,
    "select, s an element": V100.rates.select,
    "scatter, s a pair": V100.rates.scatter,
    "fill, s an element": V100.rates.fill,
    "rounding, s an element": V100.rates.cast,
    "calls that select, s a bucket": V100.rates.select_call,
    "calls that round, s a bucket": V100.rates.cast_call,
}


def assumed(gbps: float, devices: int) -> Rates:
    """A GPU node with a link of this rate."""
    between, inside, byte, *kernels = ASSUMED.values()
    return Rates(Link(between, 8e-9 * devices / gbps), Link(inside, byte), V100.rates.add, *kernels)


def seconds(way: str, work: Work, rates: Rates, density: float) -> float:
    """Of a round of the whole model."""
    each = work._replace(numel=-(-work.numel // BUCKETS))
    return BUCKETS * path_of(way, each, density).seconds(rates)


# way of gradients.py -> path, density, bytes of an element on the wire
MEASURED: dict[str, tuple[str, float, int]] = {
    "DDP": ("ddp", 1.0, 4),
    "bf16 hook": ("ddp", 1.0, 2),
    "2-D dense": ("dense", 1.0, 4),
    "2-D dense, 16-bit": ("dense16", 1.0, 4),
    "ours 1 %, at once": ("sparse", 0.01, 4),
    "ours 0.1 %": ("sparse", 0.001, 4),
    "regional 1 %": ("regional", 0.01, 4),
}


def against(rows: list[dict[str, Any]]) -> list[str]:
    """Predicted and measured synchronisation, and how much of the prediction is bytes over the probed rate."""
    head = ["cluster", "Gbit/s", "way", "wire share", "measured ms", "predicted, probed ms", "predicted, nominal ms"]
    lines = ["| " + " | ".join([*head, "probed", "nominal"]) + " |", "|---" * (len(head) + 2) + "|"]
    for cluster, gbps in dict.fromkeys((row["cluster"], row["gbps"]) for row in rows):
        here = {row["way"]: row for row in rows if (row["cluster"], row["gbps"]) == (cluster, gbps)}
        rates = Rates.from_list(here["auto 1 %"]["rates"])
        if rates is None:
            raise SystemExit("this file was measured by another version, which knew fewer costs: measure it again")
        nominal = replace(rates, inter=Rates.of_link(gbps, int(cluster[-1])).inter, add=0.0)
        only_wire = Rates(Link(0.0, rates.inter.seconds_per_byte), Link(0.0, 0.0))
        nodes, devices = map(int, cluster.split("x"))
        for way, (path, density, itemsize) in MEASURED.items():
            work = Work(nodes, devices, NUMEL, itemsize)
            copies, measured = here[NOTHING]["sync s"], here[way]["sync s"]
            share = seconds(path, work, only_wire, density) / (seconds(path, work, rates, density) + copies)
            both = [seconds(path, work, each, density) + copies for each in (rates, nominal)]
            numbers = [f"{1e3 * each:.0f}" for each in (measured, *both)]
            errors = [f"{each / measured:.2f}" for each in both]
            lines.append(
                "| " + " | ".join([cluster, f"{gbps:g}", way, f"{100 * share:.0f} %", *numbers, *errors]) + " |"
            )
    return lines


def by_nodes(gbps: float, devices: int, counts: list[int]) -> list[str]:
    """Every path for clusters of more and more nodes. Milliseconds, with the effective density in brackets."""
    head = [
        "nodes",
        "flat",
        "2-D dense",
        "2-D dense, 16-bit",
        "sparse 1 %",
        "regional 1 %",
        "regional, bytes of sparse",
    ]
    lines = ["| " + " | ".join([*head, "auto takes"]) + " |", "|---" * (len(head) + 1) + "|"]
    rates = assumed(gbps, devices)
    for nodes in counts:
        work = Work(nodes, devices, NUMEL)
        equal = min(1.0, (nodes - 1) * DENSITY / 2)
        whole: tuple[str, ...] = ("ddp", "dense", "dense16")
        cells = [f"{1e3 * seconds(path, work, rates, 1.0):.1f}" for path in whole]
        union = min(1.0, nodes * DENSITY)
        cells.append(f"{1e3 * seconds('sparse', work, rates, DENSITY):.1f} ({100 * union:.3g} %)")
        for density in (DENSITY, equal):
            taken = seconds("regional", work, rates, density)
            cells.append(f"{1e3 * taken:.1f} ({100 * density:.3g} %)")
        lines.append(f"| {nodes} | " + " | ".join([*cells, chosen(nodes, devices, rates)]) + " |")
    return lines


def chosen(nodes: int, devices: int, rates: Rates) -> str:
    """What exchange="auto" takes for each bucket."""
    topology = Topology(tuple(tuple(range(i, i + devices)) for i in range(0, nodes * devices, devices)), 0)
    choice = PathChoice(HierConfig(density=DENSITY), topology, NUMEL, lambda _: None)
    choice.rates = rates
    return choice.path(choice.work(NUMEL // BUCKETS, torch.float32), DENSITY).name


def by_rate(nodes: int, devices: int, rates: list[float]) -> list[str]:
    """Which path wins as links get faster."""
    head = "| Gbit/s | flat | 2-D dense | 2-D dense, 16-bit | sparse 1 % | sparse 0.1 % | regional 1 % | auto takes |"
    lines = [head, "|---" * 8 + "|"]
    for gbps in rates:
        work, machine = Work(nodes, devices, NUMEL), assumed(gbps, devices)
        paths: list[tuple[str, float]] = [
            ("ddp", 1.0),
            ("dense", 1.0),
            ("dense16", 1.0),
            ("sparse", 0.01),
            ("sparse", 0.001),
            ("regional", 0.01),
        ]
        cells = [f"{1e3 * seconds(path, work, machine, density):.2f}" for path, density in paths]
        lines.append(f"| {gbps:g} | " + " | ".join([*cells, chosen(nodes, devices, machine)]) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--measured", type=pathlib.Path, help="exchange.json of benchmarks.exchange.gradients")
    options = parser.parse_args()
    about = surroundings()
    text = ["# The cost model", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    if options.measured is not None:
        record = json.loads(options.measured.read_text())
        text += [f"## Against measurement ({record['date']}, {record['hardware']})", "", *against(record["rows"]), ""]
    counts = [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    text += [
        "## On paper",
        "",
        f"{NUMEL:,} fp32 gradients in {BUCKETS} buckets, nodes of 8 devices. Assumed, not measured: "
        + ", ".join(f"{name} {value:.2g}" for name, value in ASSUMED.items())
        + ". Milliseconds a round without any overlap; in brackets the effective density, of sparse at most.",
        "",
        "Links of 25 Gbit/s a node; 16 nodes are the paper's cluster:",
        "",
        *by_nodes(25.0, 8, counts),
        "",
        "16 nodes, links of other rates:",
        "",
        *by_rate(16, 8, [1, 10, 25, 100, 400]),
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "plan.md").write_text("\n".join(text) + "\n")
    print("\n".join(text), file=sys.stdout)


if __name__ == "__main__":
    main()
