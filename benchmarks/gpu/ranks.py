"""The work of a rank in the parts `parity` and `nccl`.

Only ranks import this module, because it needs Lightning, and the import takes seconds.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from benchmarks.exchange.fsdp import Block
from benchmarks.gpu.methods import COMPARED, EXACT, METHODS, Training
from benchmarks.gpu.models import FULL, SMALL, batches_of
from benchmarks.gpu.ways import finish
from benchmarks.processes import received_bytes, set_rate, slowest
from benchmarks.record import Rows
from lightning_sparse.topology import Topology

# -- parity ------------------------------------------------------------------------------------------------------------

STEPS, BATCH = 20, 8
INPUTS, WIDTH, CLASSES = 31, 193, 7


def train_all(topology: Topology, device: torch.device, gbps: float | None) -> Rows:
    """Return one row per method.

    A row has the losses, averaged over the ranks, whether all ranks end with equal weights, and whether the losses
    should equal DDP's losses.
    """
    rows = Rows()
    for name, method in COMPARED.items():
        training = Training.start(method, topology, device, _classifier, _classify, _adamw)
        for step in range(STEPS):
            training.step(_samples(step, topology).to(device))
        losses_S = torch.stack(training.losses).float()
        dist.all_reduce(losses_S)
        training.finish()
        weights = [_digest(training.model)] * topology.world_size
        dist.all_gather_object(weights, weights[0])
        losses = (losses_S / topology.world_size).tolist()
        rows.append(
            {"method": name, "losses": losses, "equal weights": len(set(weights)) == 1, "like DDP": name in EXACT}
        )
    return rows


def _classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), *(Block(WIDTH) for _ in range(3)), nn.Linear(WIDTH, CLASSES))


def _samples(step: int, topology: Topology) -> Tensor:
    """Return this rank's inputs, equal on all kinds of devices."""
    generator = torch.Generator().manual_seed(step * topology.world_size + topology.rank)
    return torch.randn(BATCH, INPUTS, generator=generator)


def _classify(model: nn.Module, x_BI: Tensor) -> Tensor:
    label_B = (x_BI[:, :CLASSES] + 0.5 * x_BI[:, CLASSES : 2 * CLASSES]).argmax(1)
    return functional.cross_entropy(model(x_BI).float(), label_B)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _digest(model: nn.Module) -> str:
    weights = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    data = b"".join(weight.detach().cpu().numpy().tobytes() for weight in weights)
    return hashlib.sha256(data).hexdigest()


# -- nccl --------------------------------------------------------------------------------------------------------------

SETTLING_GBPS = 10.0
REPEATS = 3
SETTLING = 3
"""Number of steps after which buckets are settled, and PowerSGD compresses."""
SECONDS, SMALL_SECONDS = 2.0, 0.2
"""Lengths of a turn with a full and with a small model, as far as `FEWEST_STEPS` and `MOST_STEPS` allow."""
FEWEST_STEPS, MOST_STEPS = 2, 30


def measure(topology: Topology, device: torch.device, gbps: float | None, small: bool) -> Rows:
    """Measure the methods in turns, and return one row per method. A collective."""
    task, precision = (SMALL["gpt"], "32-true") if small else (FULL["gpt"], "bf16-mixed")
    torch.manual_seed(1 + topology.rank)
    batches = batches_of(task, device)
    turns = {}
    for name, method in METHODS.items():
        method = replace(method, precision=precision)
        training = Training.start(method, topology, device, task.build, task.loss, task.optimizer)
        turns[name] = Turns(training, batches, device)
    set_rate(SETTLING_GBPS)
    for each in turns.values():
        each.run(SETTLING)
    if gbps is not None:
        set_rate(gbps)
    for each in turns.values():
        each.choose_steps(SMALL_SECONDS if small else SECONDS)
    for _ in range(REPEATS):
        for each in turns.values():
            each.take()
    return [{"method": name, **each.row()} for name, each in turns.items()]


class Turns:
    """Turns of one method: consecutive steps between two waits for the device, each with the next batch."""

    def __init__(self, training: Training, batches: Sequence[Tensor], device: torch.device) -> None:
        self.training, self._batches, self._device = training, cycle(batches), device
        self._steps, self._seconds, self._received = 1, list[float](), list[float]()

    def choose_steps(self, seconds: float) -> None:
        """Choose the number of steps per turn from its length. A collective."""
        per_step, _ = self.run(1)
        steps = round(seconds / per_step)
        period = self.training.averager.period if self.training.averager is not None else 0
        self._steps = period or min(max(steps, FEWEST_STEPS), MOST_STEPS)

    def take(self) -> None:
        seconds, received = self.run(self._steps)
        self._seconds.append(seconds / self._steps)
        self._received.append(received / self._steps)

    def run(self, steps: int) -> tuple[float, int]:
        """Return the seconds of the slowest rank, and the bytes that this node received. A collective."""
        dist.barrier()
        finish(self._device)
        before, begin = received_bytes(), time.perf_counter()
        for _ in range(steps):
            self.training.step(next(self._batches))
        finish(self._device)
        seconds = time.perf_counter() - begin
        return slowest(seconds, self._device).item(), received_bytes() - before

    def row(self) -> dict[str, Any]:
        """Return the median, lowest and highest milliseconds per step, and the received bytes per step."""
        ms = sorted(1e3 * each for each in self._seconds)
        return {
            "ms": median(ms),
            "lowest ms": ms[0],
            "highest ms": ms[-1],
            "received bytes": median(self._received),
            "steps": self._steps,
        }
