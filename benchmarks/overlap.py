"""What overlap hides: the time of a step with the exchange at once, beside backward, and without any.

    sudo python benchmarks/overlap.py OUT [--ratio 0.5 1] [--batch 2048] [--rounds 8]

Two nodes of one rank, one thread a rank, joined by a shaped link (`lightning_sparse.lab`, so root is needed). The model
is a stack of linear layers with 25.7 M parameters, as many as ResNet-50 has, in buckets of a layer each. All variants
run in the same processes, one step of each in turn, and a variant's number is its median:

    none        forward and backward without synchronisation
    wire        the same messages, one after the other, and nothing else
    at once     the hook with overlap=False
    overlapped  the hook with overlap=True

A first run measures backward, and the link is then given the rate at which bytes over rate is `ratio` times that: at 1
both are equally long. Nothing can be sent before the first bucket is ready nor before the last one is, so a step is at
least the larger of compute + one bucket's wire time and forward + one bucket's backward + wire time: the bound. What is
left besides is the processor time of selection, out of the same core as backward.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from exchange import Rates
from exchange_ranks import ask
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from lightning_sparse.bench.exchange import FASTEST
from lightning_sparse.bench.report import commit, surroundings
from lightning_sparse.kernels import message_bytes
from lightning_sparse.lab import Cluster, LabConfig
from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.topology import discover

WIDTH, LAYERS, SETTLING, BUCKET_MB = 1134, 20, 4, 5


def rank(rounds: int, batch: int, gbps: float, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    topology = discover()
    ask(out.parent, FASTEST)  # until layouts have settled
    variants = {"none": _ddp()}
    states: dict[str, HierState] = {}
    for name, overlap in {"at once": False, "overlapped": True}.items():
        ddp = variants[name] = _ddp()
        config = HierConfig(density=0.01, exchange="sparse", warmup_epochs=0, overlap=overlap)
        states[name] = HierState(ddp.module, config, topology)
        ddp.register_comm_hook(states[name], hier_hook)
    x = torch.randn(batch, WIDTH)
    seconds: dict[str, list[float]] = {name: [] for name in ("forward", "wire", *variants)}
    for step in tqdm(range(SETTLING + rounds), disable=dist.get_rank() != 0, desc="rounds"):
        if step == SETTLING:
            ask(out.parent, gbps)
        for name, ddp in variants.items():
            dist.barrier()
            begin = time.perf_counter()
            with ddp.no_sync() if name == "none" else nullcontext():
                loss = ddp(x).square().mean()
                forward = time.perf_counter() - begin
                loss.backward()
            if step >= SETTLING:
                seconds[name].append(time.perf_counter() - begin)
                seconds["forward"] += [forward] if name == "none" else []
        if step >= SETTLING:
            seconds["wire"].append(wire(states["at once"]))
    if dist.get_rank() == 0:
        result: dict[str, Any] = {f"{name} ms": 1e3 * median(each) for name, each in seconds.items()}
        result["bytes received a step"] = states["overlapped"].exchange.stats.round_bytes
        result["buckets"] = len(states["overlapped"].layout.settled)
        result["parameters"] = sum(p.numel() for p in variants["none"].parameters())
        out.write_text(json.dumps(result))
    dist.destroy_process_group()


def wire(state: HierState) -> float:
    """Seconds of the exchanges alone, in messages of the same sizes."""
    sizes = [message_bytes(group.numel, -(-group.numel // 100), torch.bfloat16) for group in state.layout.settled]
    dist.barrier()
    begin = time.perf_counter()
    for nbytes in sizes:
        state.exchange.communicator.exchange(torch.zeros(nbytes, dtype=torch.uint8))
    return time.perf_counter() - begin


def _ddp() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB)


def measure(gbps: float, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    out = options.out / "row.json"
    words = [sys.executable, __file__, str(out), "--rounds", str(rounds), "--batch", str(options.batch)]
    words += ["--gbps", str(gbps)]
    with Cluster(LabConfig(nodes=2, devices=1, gbps=gbps)) as cluster, Rates(cluster, options.out):
        ran = cluster.run(words, env={"OVERLAP_RANK": "1"})
    if ran.exit_code != 0:
        raise SystemExit("the ranks failed; their output is above")
    row: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return {"gbps": gbps, "bytes / rate ms": row["bytes received a step"] * 8e-6 / gbps, **bounds(row), **row}


def bounds(row: dict[str, Any]) -> dict[str, float]:
    """The larger of compute and wire, and what no order of buckets can beat."""
    compute, wire, buckets = row["none ms"], row["wire ms"], row["buckets"]
    first_bucket = row["forward ms"] + (compute - row["forward ms"]) / buckets
    return {"larger ms": max(compute, wire), "bound ms": max(compute + wire / buckets, first_bucket + wire)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of a step with and without overlap on shaped links.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.5, 1.0], help="wire time over backward's")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--gbps", type=float, help="of the link, instead of what a first run suggests")
    options = parser.parse_args()
    if "OVERLAP_RANK" in os.environ:
        return rank(options.rounds, options.batch, options.gbps, options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    rates = [options.gbps]
    if options.gbps is None:
        first = measure(FASTEST, 2, options)
        backward = first["none ms"] - first["forward ms"]
        rates = [first["bytes received a step"] * 8e-6 / (ratio * backward) for ratio in options.ratio]
    rows = [measure(rate, options.rounds, options) for rate in rates]
    record = {
        **surroundings(" ".join(["python benchmarks/overlap.py OUT", *sys.argv[2:]])),
        "commit": commit(),
        "batch": options.batch,
        "rows": rows,
    }
    (options.out / "overlap.json").write_text(json.dumps(record, indent=1) + "\n")
    columns = ["gbps", "forward ms", "none ms", "wire ms", "bound ms", "at once ms", "overlapped ms"]
    print("| " + " | ".join(columns) + " | over the larger | over the bound |\n|" + "---|" * (len(columns) + 2))
    for row in rows:
        over = [f"{100 * (row['overlapped ms'] / row[than] - 1):+.0f} %" for than in ("larger ms", "bound ms")]
        print("| " + " | ".join([*(f"{row[column]:.4g}" for column in columns), *over]) + " |")
    return None


if __name__ == "__main__":
    main()
