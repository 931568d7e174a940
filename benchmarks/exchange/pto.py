"""What sharing the optimizer step gains and costs: step time and optimizer state, next to what it is measured against.

    python -m benchmarks.exchange.pto OUT           # every model on 1, 2 and 4 ranks; VGG-19 on 4 needs 12 GB of memory
    python -m benchmarks.exchange.pto OUT --quick   # ResNet-50 on 2 and 4 ranks

Ranks are processes of this machine, one thread each, on Gloo over loopback; four ranks are two nodes of two. Rows are
those of lightning_sparse/bench/pto.py, with torch's ZeroRedundancyOptimizer as "zero" and timm's LARS and LAMB besides.
Writes results.json (hardware, date, versions, commit, command, every row) and pto.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import warnings
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timm.optim.lamb import Lamb
from timm.optim.lars import Lars
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from tqdm import tqdm

from benchmarks.pictures import picture
from lightning_sparse.bench.pto import OPTIMIZERS, compare, measure_cases, table, ways
from lightning_sparse.bench.report import commit, processor
from lightning_sparse.topology import discover

WORLDS = {1: (1, 1), 2: (1, 2), 4: (2, 2)}  # ranks -> nodes, devices
ALL: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    **OPTIMIZERS,
    "LARS": (Lars, {"lr": 1e-3, "momentum": 0.9}),
    "LAMB": (Lamb, {"lr": 1e-4, "max_grad_norm": None}),
}


def worker(index: int, ranks: int, options: argparse.Namespace, out: str, rendezvous: str) -> None:
    nodes, devices = WORLDS[ranks]
    os.environ.update(GROUP_RANK=str(index // devices), LOCAL_RANK=str(index % devices), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=index, world_size=ranks, timeout=timedelta(minutes=10)
    )
    topology, rows = discover(), list[dict[str, Any]]()
    cases = [(m, o) for m in options.models for o in options.optimizers if o != "Muon" or m == "Transformer"]
    makers = ways(topology)
    if ranks > 1:
        makers["zero"] = lambda cls, options, parameters: ZeroRedundancyOptimizer(parameters, cls, **options)
    limits = {"repeats": options.repeats, "seconds": options.seconds}
    for case in tqdm(cases, desc=f"{nodes} x {devices} ranks", disable=index != 0):
        rows += measure_cases([case], ALL, makers, topology, torch.device("cpu"), **limits)
    if index == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def provenance() -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "commit": commit(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def plot(record: dict[str, Any], file: Path) -> None:
    """Bars for the largest number of ranks."""
    shown = [row for row in record["rows"] if row["ranks"] == max(r["ranks"] for r in record["rows"])]
    cases = list(dict.fromkeys((row["model"], row["optimizer"]) for row in shown))
    names = list(dict.fromkeys(row["way"] for row in shown))
    with picture(file) as (axes,):
        for offset, way in enumerate(names):
            bars = {(r["model"], r["optimizer"]): r["ms"] for r in shown if r["way"] == way}
            places = [i + offset / (len(names) + 1) for i in range(len(cases))]
            axes.bar(places, [bars.get(case, 0) for case in cases], 1 / (len(names) + 1), label=way)
        axes.set_xticks([i + 0.4 for i in range(len(cases))], [f"{m}\n{o}" for m, o in cases], fontsize="x-small")
        axes.margins(x=0.01)
        axes.set(yscale="log", ylabel="ms per step (median)", title=f"Optimizer step on {shown[0]['ranks']} ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where results.json and pto.svg go")
    parser.add_argument("--quick", action="store_true", help="ResNet-50 on 2 and 4 ranks")
    parser.add_argument("--models", nargs="+", default=["resnet50", "vgg19", "Transformer"])
    parser.add_argument("--optimizers", nargs="+", default=list(ALL), choices=list(ALL))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20.0, help="spent at most on one row")
    options = parser.parse_args()
    if options.quick:
        options.models, options.ranks, options.repeats, options.seconds = ["resnet50"], [2, 4], 5, 3.0
    options.folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in options.ranks:
            out = f"{scratch}/rows{ranks}.json"
            torch.multiprocessing.spawn(worker, (ranks, options, out, f"{scratch}/meet{ranks}"), nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call]
            rows += json.loads(Path(out).read_text())
    compare(rows)
    print(table(rows))
    result = {**provenance(), "rows": rows}
    (options.folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    try:
        plot(result, options.folder / "pto.svg")
    except ValueError as error:
        print(f"no plot: {error}")
    print(f"\nwrote {options.folder / 'results.json'}")


if __name__ == "__main__":
    main()
