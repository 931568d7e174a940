"""Times of a training step over links of a limited rate, for this library and its rivals, on real ranks.

The two nodes are network namespaces (`lightning_sparse.lab`) with one rank each. On a GPU, ranks use NCCL. With one GPU
they share it, so compute takes longer than on two machines, with every method. On a CPU, the model is small.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.methods import DDP, METHODS, Training
from benchmarks.gpu.models import FULL, SMALL
from benchmarks.gpu.ways import finish
from benchmarks.processes import on_clusters, received_bytes, set_rate, slowest
from benchmarks.record import Rows
from lightning_sparse.cli import format_table
from lightning_sparse.topology import Topology

RATES = (10.0, 1.0)
"""Gbit/s of the links, each way."""
OURS = ("mstopk_hier 1%", "mstopk_local 1%", "mstopk_fsdp 1%")
RIVALS = tuple(name for name in METHODS if name not in OURS)
CLAIMS = {
    "ddp_10": (10.0, OURS, (DDP,), 2.0),
    "ddp_1": (1.0, OURS, (DDP,), 10.0),
    "rivals_10": (10.0, OURS[1:2], RIVALS, 1.0),
    "rivals_1": (1.0, OURS[1:2], RIVALS, 1.0),
}
"""Name -> rate, methods, other methods, and how many times as fast as these they should be."""
REPEATS = 3
SETTLING = 3
"""Steps until buckets are settled, and PowerSGD compresses."""
SECONDS = 2.0
"""Length of a turn, as far as `FEWEST_STEPS` and `MOST_STEPS` allow."""
FEWEST_STEPS, MOST_STEPS = 2, 30


def step_times(device: torch.device) -> Iterator[Rows]:
    """Measure all methods on two nodes of one rank each.

    Yields:
        The rows so far, one per method and rate, after each rate.
    """
    rows, cpu = Rows(), device.type == "cpu"
    for rate in RATES:
        rows += on_clusters(measure, cpu, clusters=["2x1"], gbps=[rate], cpu=cpu) or []
        yield rows


def measure(topology: Topology, device: torch.device, gbps: float | None, small: bool) -> Rows:
    """Return one row per method. A collective. Methods are interleaved."""
    task = (SMALL if small else FULL)["gpt"]
    turns = {
        name: Turns(Training.start(method, topology, device, task.build, task.loss, task.optimizer), task.batch, device)
        for name, method in METHODS.items()
    }
    torch.manual_seed(topology.rank)
    set_rate(RATES[0])
    for each in turns.values():
        each.run(SETTLING)
    if gbps is not None:
        set_rate(gbps)
    for each in turns.values():
        each.choose_steps()
    for _ in range(REPEATS):
        for each in turns.values():
            each.take()
    return [{"method": name, **each.row()} for name, each in turns.items()]


class Turns:
    """Turns of one method: consecutive steps between two waits for the device, each step with a new batch."""

    def __init__(self, training: Training, batch: Callable[[torch.device], Tensor], device: torch.device) -> None:
        self.training, self._batch, self._device = training, batch, device

    def choose_steps(self) -> None:
        """Choose the number of steps per turn. A collective."""
        seconds, _ = self.run(1)
        steps = round(SECONDS / seconds)
        period = self.training.averager.period if self.training.averager is not None else 0
        self._steps = period or min(max(steps, FEWEST_STEPS), MOST_STEPS)
        self._seconds: list[float] = []
        self._received: list[float] = []

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
            self.training.step(self._batch(self._device))
        finish(self._device)
        seconds = time.perf_counter() - begin
        return slowest(seconds, self._device).item(), received_bytes() - before

    def row(self) -> dict[str, Any]:
        """Return the median, lowest and highest milliseconds of a step, and the received bytes per step."""
        ms = sorted(1e3 * each for each in self._seconds)
        return {
            "ms": median(ms),
            "lowest ms": ms[0],
            "highest ms": ms[-1],
            "received bytes": median(self._received),
            "steps": self._steps,
        }


def check(rows: Rows) -> dict[str, tuple[bool, str]]:
    """Return for each claim about a measured rate whether it holds, and the number behind it."""
    ms = {(row["gbps"], row["method"]): row["ms"] for row in rows}
    result = {}
    for name, (rate, ours, others, factor) in CLAIMS.items():
        if (rate, DDP) not in ms:
            continue
        factors = {
            f"{own} against {other}": ms[rate, other] / ms[rate, own]
            for own in ours
            for other in others
            if own != other
        }
        least = min(factors, key=lambda pair: factors[pair])
        result[name] = (factors[least] >= factor, f"at least {factors[least]:.2f} times as fast: {least}")
    return result


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
