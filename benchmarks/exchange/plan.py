"""Compare the cost model with the measurements of gradients.py.

    python -m benchmarks.exchange.plan OUT MEASURED/exchange.json

Nothing is measured here. The predictions use the rates that exchange="auto" measured at the start of the same runs.
DDP's own copies are added as measured, because no path avoids them and the model leaves them out. "nominal" uses the
configured rate of the link, without latency and cost of additions, to separate the error of the model from that of the
measurement. The last two columns are predicted over measured. `lightning-sparse plan` predicts a step on a cluster that
you do not have. Writes OUT/plan.json and .md.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.exchange.gradients import NOTHING
from benchmarks.record import Rows, parser_of, surroundings, write
from lightning_sparse.cli import format_table
from lightning_sparse.cli.plan import path_of
from lightning_sparse.exchange import TensorSpec
from lightning_sparse.exchange.rates import Link, Rates

NUMEL, BUCKETS = 25_557_032, 5
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


def seconds(way: str, work: TensorSpec, rates: Rates, density: float) -> float:
    """Return the time of a round of the whole model."""
    each = work._replace(numel=-(-work.numel // BUCKETS))
    return BUCKETS * path_of(way, each, density).seconds(rates)


def against(rows: Rows) -> Rows:
    """Return predicted and measured synchronization, and the part of the prediction for bytes over the measured
    rate."""
    compared = Rows()
    for cluster, gbps in dict.fromkeys((row["cluster"], row["gbps"]) for row in rows):
        here = {row["way"]: row for row in rows if (row["cluster"], row["gbps"]) == (cluster, gbps)}
        rates = Rates.from_list(here["auto 1 %"]["rates"])
        nodes, devices = map(int, cluster.split("x"))
        nominal = replace(rates, inter=Rates.of_link(gbps, devices).inter, add=0.0)
        only_wire = Rates(Link(0.0, rates.inter.seconds_per_byte), Link(0.0, 0.0))
        for way, (path, density, itemsize) in MEASURED.items():
            work = TensorSpec(nodes, devices, NUMEL, itemsize)
            copies, measured = here[NOTHING]["sync s"], here[way]["sync s"]
            probed, set_ = (seconds(path, work, each, density) + copies for each in (rates, nominal))
            row: dict[str, Any] = {"": f"{cluster}, {gbps:g} Gbit/s: {way}"}
            row["wire share"] = seconds(path, work, only_wire, density) / probed
            row |= {"measured ms": 1e3 * measured, "probed ms": 1e3 * probed, "nominal ms": 1e3 * set_}
            compared.append(row | {"probed": probed / measured, "nominal": set_ / measured})
    return compared


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("measured", type=Path, help="exchange.json of benchmarks.exchange.gradients")
    options = parser.parse_args()
    record = json.loads(options.measured.read_text())
    rows = against(record["rows"])
    text = f"measured: {record['date']}, {record['hardware']}\n\n"
    text += format_table(tuple(rows[0]), [tuple(row.values()) for row in rows])
    write(options.out / "plan.json", {**surroundings(), "rows": rows}, text)


if __name__ == "__main__":
    main()
