"""What runs in each rank of gradients.py: one model's gradients, reduced in every way in turn, and timed.

To the ways of lightning_sparse/bench/exchange.py come torch's own: fp16, bf16 and PowerSGD hooks with their default
buckets; PowerSGD gets one bucket, since on Gloo it crashes with more.
"""

import json
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_sparse.bench import models
from lightning_sparse.bench.exchange import NONE, NOTHING, QUICK, AddWay, build, measure
from lightning_sparse.topology import discover

# What measure() and the tables go by, and what the others are compared with.
ALWAYS = (NONE, NOTHING, "DDP", "2-D dense", "ours 1 %, taken apart", "auto 1 %")


def torchs_own(add: AddWay) -> None:
    add("bf16 hook").register_comm_hook(None, default_hooks.bf16_compress_hook)
    add("fp16 hook").register_comm_hook(None, default_hooks.fp16_compress_hook)
    for rank in (1, 4):
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        add(f"PowerSGD r{rank}", bucket_cap_mb=1000).register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def ask(folder: Path, gbps: float) -> None:
    """Have the lab change the rate: rank 0 writes a file, the lab's process takes it away when it is done."""
    dist.barrier()
    if dist.get_rank() == 0:
        asked = folder / "rate"
        asked.with_suffix(".new").write_text(f"{gbps}")
        asked.with_suffix(".new").rename(asked)
        while asked.exists():
            time.sleep(0.02)
    dist.barrier()


def main(folder: Path, gbps: float, seconds: float, quick: bool, only: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shapes = QUICK if quick else models.find("resnet50").shapes
    ways = build(discover(), shapes, torch.device("cpu"), torchs_own)
    if unknown := sorted(set(only) - set(ways)):
        raise SystemExit(f"no such way: {unknown}; there are {sorted(ways)}")
    if only:  # each way has buckets and residuals of its own: eight ranks with all of them take 33 GB
        ways = {name: way for name, way in ways.items() if name in {*only, *ALWAYS}}
    rows = measure(ways, seconds, gbps=gbps, rate=partial(ask, folder))
    if dist.get_rank() == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
