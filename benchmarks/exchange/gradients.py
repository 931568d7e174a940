"""How long synchronisation takes on links of 0.1, 1 and 10 Gbit/s, for torch's own ways and for ours.

    sudo python -m benchmarks.exchange.gradients OUT [--clusters 2x1 4x1 2x2] [--gbps 0.1 1 10] [--quick]

Clusters are network namespaces on this machine (`lightning_sparse.lab`), so the network is real and slow on purpose,
and all ranks share the processors: host costs are larger than on machines of their own. Gradients are those of
ResNet-50, 25.6 M in fp32. Synchronisation time is a step minus the same step under no_sync(); all ways take turns in
the same processes, so what else the machine does meets all of them. What each way is says ranks.py.

Writes OUT/exchange.json and OUT/exchange.svg; what an earlier call with the same OUT measured stays in both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.exchange import ranks as exchange_ranks
from benchmarks.pictures import colour, picture
from lightning_sparse.bench.exchange import NONE, NOTHING
from lightning_sparse.bench.report import commit, surroundings
from lightning_sparse.lab import Cluster, LabConfig, signals_as_exit

HIDDEN = (NONE, NOTHING, "ours 1 %, taken apart")


def measure(nodes: int, devices: int, gbps: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the ranks in a lab of this rate, which is let loose while layouts settle."""
    words = ["-m", "benchmarks.exchange.gradients", "x", "--gbps", str(gbps), "--seconds", str(options.seconds)]
    config = LabConfig(nodes=nodes, devices=devices, gbps=gbps)
    with tempfile.TemporaryDirectory() as folder, Cluster(config) as cluster, Rates(cluster, Path(folder)):
        env = {"EXCHANGE_FOLDER": folder, "OMP_NUM_THREADS": "1"}
        words += ["--quick"] if options.quick else []
        words += ["--ways", *options.ways] if options.ways else []
        ran = cluster.run([sys.executable, *words], env=env)
        if ran.exit_code != 0:
            raise SystemExit("the ranks failed; their output is above")
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "rows.json").read_text())
    return [{"cluster": f"{nodes}x{devices}", **row} for row in rows]


class Rates:
    """Sets the rate that the ranks ask for; see exchange_ranks.ask."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._asked, self._over = cluster, folder / "rate", threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Rates:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._over.wait(0.02):
            if self._asked.exists():
                self._cluster.reshape(float(self._asked.read_text()))
                self._asked.unlink()


def table(rows: list[dict[str, Any]]) -> str:
    """Synchronisation time in ms by way and rate, a block a cluster."""
    lines = []
    for cluster in dict.fromkeys(row["cluster"] for row in rows):
        here = {(row["way"], row["gbps"]): row for row in rows if row["cluster"] == cluster}
        rates = list(dict.fromkeys(rate for _, rate in here))
        lines += [f"\n| {cluster} | " + " | ".join(f"{rate:g} Gbit/s, ms" for rate in rates) + " | MB a node |"]
        lines += ["|---" * (len(rates) + 2) + "|"]
        for way in dict.fromkeys(way for way, _ in here):
            cells = [f"{1e3 * here[way, rate]['sync s']:.0f}" for rate in rates]
            received = here[way, rates[0]]["received by this node, bytes"]
            lines.append(f"| {way} | " + " | ".join(cells) + f" | {received / 1e6:.2f} |")
        lines += ["", *pieces(here, rates)]
    return "\n".join(lines)


def pieces(here: dict[tuple[str, float], dict[str, Any]], rates: list[float]) -> list[str]:
    """What ours consists of, and the wire against bytes over rate."""
    lines = []
    for rate in rates:
        row = here["ours 1 %, taken apart", rate]
        names = ("reduce_scatter", "compress", "exchange", "accumulate", "gather")
        parts = {"DDP's copies": here[NOTHING, rate]["sync s"]}
        parts |= {name: row[f"{name} s"] for name in names if f"{name} s" in row}
        ideal = row["received by this node, bytes"] * 8e-9 / rate
        told = ", ".join(f"{name} {1e3 * each:.1f}" for name, each in parts.items())
        lines.append(f"at {rate:g} Gbit/s, ms: {told}; bytes / rate {1e3 * ideal:.1f}")
    return lines


def plot(record: dict[str, Any], file: Path) -> None:
    rows = record["rows"]
    clusters = list(dict.fromkeys(row["cluster"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows if row["way"] not in HIDDEN))
    with picture(file, height=6.5, columns=len(clusters), sharey=True) as axes:
        for cluster, ax in zip(clusters, axes, strict=True):
            here = [row for row in rows if row["cluster"] == cluster]
            for index, way in enumerate(ways):
                line = sorted((row["gbps"], 1e3 * row["sync s"]) for row in here if row["way"] == way)
                if line:
                    style = {"linestyle": "-" if way.startswith(("ours", "auto")) else "--", "color": colour(index)}
                    ax.loglog(*zip(*line, strict=True), marker="o", markersize=3, label=way, **style)
            ax.set(title=f"{cluster} ranks", xlabel="link, Gbit/s")
            ax.grid()
        axes[0].set_ylabel("synchronisation, ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--clusters", nargs="+", default=["2x1", "4x1", "2x2"], metavar="MxL")
    parser.add_argument("--gbps", type=float, nargs="+", default=[0.1, 1.0, 10.0])
    parser.add_argument("--seconds", type=float, default=40.0, help="for one rate, where it allows three repeats")
    parser.add_argument("--ways", nargs="+", default=[], help="only these, beside DDP, 2-D dense and auto")
    parser.add_argument("--quick", action="store_true", help="1 M gradients, and seconds instead of minutes")
    options = parser.parse_args()
    if options.quick:
        options.seconds = min(options.seconds, 2.0)
    if "EXCHANGE_FOLDER" in os.environ:
        folder = Path(os.environ["EXCHANGE_FOLDER"])
        return exchange_ranks.main(folder, options.gbps[0], options.seconds, options.quick, options.ways)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "exchange.json"
    record = json.loads(file.read_text()) if file.exists() else {"rows": []}
    for cluster in options.clusters:
        nodes, devices = map(int, cluster.split("x"))
        with signals_as_exit():
            rows = [row for gbps in options.gbps for row in measure(nodes, devices, gbps, options)]
        kept = [row for row in record["rows"] if row["cluster"] != cluster or row["gbps"] not in options.gbps]
        command = " ".join(["python", "-m", "benchmarks.exchange.gradients", "OUT", *sys.argv[2:]])
        commands = [*record.get("commands", []), f"{command} ({commit()})"]
        about = surroundings(command)
        del about["command"]
        record = {**about, "commands": commands, "rows": sorted(kept + rows, key=lambda row: row["gbps"])}
        file.write_text(json.dumps(record, indent=1) + "\n")
        print(table(rows), flush=True)
    plot(record, options.out / "exchange.svg")
    return None


if __name__ == "__main__":
    main()
