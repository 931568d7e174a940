"""What overlap hides: the time of a step with the exchange at once, beside backward, and without any.

    sudo python benchmarks/overlap.py OUT [--gbps 0.1] [--rounds 30]

Two nodes of one rank, one thread a rank, joined by a shaped link (`lightning_sparse.lab`, so root is needed). The model
is a stack of linear layers with 25.7 M parameters, as many as ResNet-50 has, so DDP makes a bucket of every few layers.
All variants run in the same processes, one step of each in turn, and a variant's number is its median:

    none        backward without synchronisation
    at once     the hook with overlap=False
    overlapped  the hook with overlap=True

The wire time is bytes over link rate. Where nothing but waiting were left, "overlapped" would be the larger of "none"
and the wire time, plus what cannot be hidden: the last bucket, and the processor time of selection, which comes out of
the same core as backward does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from lightning_sparse.lab import Cluster, LabConfig
from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.topology import discover

WIDTH, LAYERS, BATCH, SETTLING = 1603, 10, 32, 4


def rank(rounds: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    topology = discover()
    variants = {"none": _ddp()}
    states: dict[str, HierState] = {}
    for name, overlap in {"at once": False, "overlapped": True}.items():
        ddp = variants[name] = _ddp()
        config = HierConfig(density=0.01, exchange="sparse", warmup_epochs=0, overlap=overlap)
        states[name] = HierState(ddp.module, config, topology)
        ddp.register_comm_hook(states[name], hier_hook)
    x = torch.randn(BATCH, WIDTH)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for step in tqdm(range(SETTLING + rounds), disable=dist.get_rank() != 0, desc="rounds"):
        for name, ddp in variants.items():
            dist.barrier()
            begin = time.perf_counter()
            if name == "none":
                with ddp.no_sync():
                    ddp(x).square().mean().backward()
            else:
                ddp(x).square().mean().backward()
            if step >= SETTLING:
                seconds[name].append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        result: dict[str, Any] = {f"{name} ms": 1e3 * median(each) for name, each in seconds.items()}
        result["bytes received a step"] = states["overlapped"].stats.round_bytes
        result["parameters"] = sum(p.numel() for p in variants["none"].parameters())
        out.write_text(json.dumps(result))
    dist.destroy_process_group()


def _ddp() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True)


def measure(gbps: float, rounds: int, folder: Path) -> dict[str, Any]:
    out = folder / f"overlap-{gbps:g}gbps.json"
    with Cluster(LabConfig(nodes=2, devices=1, gbps=gbps)) as cluster:
        ran = cluster.run([sys.executable, __file__, str(out), "--rounds", str(rounds)], env={"OVERLAP_RANK": "1"})
    if ran.exit_code != 0:
        raise SystemExit("the ranks failed; their output is above")
    row: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return {"gbps": gbps, "wire ms": row["bytes received a step"] * 8e-6 / gbps, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of a step with and without overlap on shaped links.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--gbps", type=float, nargs="+", default=[0.1, 0.2, 1.0])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if "OVERLAP_RANK" in os.environ:
        return rank(options.rounds, options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [measure(gbps, options.rounds, options.out) for gbps in options.gbps]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    record = {
        "command": " ".join(["python", "benchmarks/overlap.py", *(f"{o}" for o in sys.argv[2:])]),
        "commit": commit.strip(),
        "date": date.today().isoformat(),
        "hardware": f"{_processor()}, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rows": rows,
    }
    (options.out / "overlap.json").write_text(json.dumps(record, indent=1) + "\n")
    columns = ["gbps", "wire ms", "none ms", "at once ms", "overlapped ms"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(f"{row[column]:.4g}" for column in columns) + " |")
    return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
