"""One rank of one way of peers.py: trains, and notes steps, seconds, bytes and accuracy at every validation."""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from benchmarks.convergence.images import resnet8, validate
from benchmarks.convergence.pictures import EpochOrder, Pictures
from benchmarks.peers.ways import PERIOD, WAYS, Recipe, available, flat, same_start
from benchmarks.processes import received_bytes
from lightning_sparse.topology import discover

BATCH = 128  # of all ranks together


def train(way: str, pictures: Pictures, recipe: Recipe, *, width: int, seed: int, validations: int) -> dict[str, Any]:
    """The row of a way, the same on every rank. A collective."""
    topology, world = discover(), dist.get_world_size()
    torch.manual_seed(seed)
    model = resnet8(pictures.num_classes, (width, 2 * width, 4 * width))
    same_start(model)
    stepper = WAYS[way](model, topology, recipe)
    inner = getattr(stepper.optimizer, "optim", stepper.optimizer)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(inner, recipe.steps)
    padded_NCHW = F.pad(pictures.train_x, [EpochOrder.PAD] * 4)
    per_epoch = len(padded_NCHW) // BATCH
    every = max(PERIOD, recipe.steps // validations // PERIOD * PERIOD)

    def accuracy() -> float:
        """The mean over all models, which is one unless nodes are alone. A collective."""
        return mean(validate(model, pictures, stepper.group))

    history = [{"step": 0, "seconds": 0.0, "bytes": 0, "accuracy": accuracy()}]
    taken: list[float] = []
    received = 0
    for step in range(recipe.steps):
        if step % per_epoch == 0:
            order = EpochOrder(len(padded_NCHW), seed, step // per_epoch, BATCH)
        x, index_B = order.batch(padded_NCHW, step % per_epoch, topology.rank, world)
        x, y = pictures.normalised(x).contiguous(), pictures.train_y[index_B]
        stepper.at(step)
        dist.barrier()
        before, begin = received_bytes(), time.perf_counter()
        loss = F.cross_entropy(stepper.loss(x), y)
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        stepper.exchange()
        stepper.optimizer.step()
        seconds = time.perf_counter() - begin
        received += received_bytes() - before
        taken.append(slowest(seconds))
        cosine.step()
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            history.append({"step": step + 1, "seconds": sum(taken), "bytes": received, "accuracy": accuracy()})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "history": history,
        "step_s": median(taken[recipe.steps // 5 :]),
        "peak_bytes": slowest(peak),
        "parameters": len(flat(model)),
        "ranks differ by": spread(flat(model)),
    }


def slowest(value: float) -> float:
    """The largest of all ranks' values. A collective."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def mean(value: float) -> float:
    """Over all ranks. A collective."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor) / dist.get_world_size()


def spread(flat_N: torch.Tensor) -> float:
    """How far ranks' parameters are apart, at most. A collective."""
    low_N, high_N = flat_N.clone(), flat_N.clone()
    dist.all_reduce(low_N, op=dist.ReduceOp.MIN)
    dist.all_reduce(high_N, op=dist.ReduceOp.MAX)
    return float((high_N - low_N).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or ""))
    parser.add_argument("way")
    parser.add_argument("answer", type=Path)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--recipe", type=json.loads)
    for name in ("--width", "--seed", "--validations"):
        parser.add_argument(name, type=int)
    for name in ("--grace", "--demo"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    available(options.grace, options.demo)
    pictures: Pictures = torch.load(options.pictures, weights_only=False)
    row = train(
        options.way,
        pictures,
        Recipe(**options.recipe),
        width=options.width,
        seed=options.seed,
        validations=options.validations,
    )
    if dist.get_rank() == 0:
        options.answer.write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
