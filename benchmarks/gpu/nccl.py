"""The part `nccl`: step times of this package and other methods on real ranks, over links of limited rate.

The two nodes are network namespaces (`lightning_sparse.lab`) with one rank each. On a GPU, ranks use NCCL. If there is
only one GPU, ranks share it, so every method computes longer than on two machines. On a CPU, the model is small.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.claims import Claims, Part, Result, verdict
from benchmarks.gpu.methods import DDP, METHODS, Training
from benchmarks.gpu.models import FULL, SMALL, batches_of
from benchmarks.gpu.ways import finish
from benchmarks.processes import on_clusters, received_bytes, set_rate, slowest
from benchmarks.record import Rows
from lightning_sparse.cli import format_table
from lightning_sparse.topology import Topology

RATES = (10.0, 1.0)
"""Rates of the links in Gbit/s, per direction."""
OURS = ("mstopk_hier 1%", "mstopk_local 1%", "mstopk_fsdp 1%")
OTHERS = tuple(name for name in METHODS if name not in OURS)


class Faster(NamedTuple):
    """A claim: with links of a rate, each of these methods is at least `factor` times as fast as each other method."""

    rate: float
    methods: Sequence[str]
    others: Sequence[str]
    factor: float
    text: str


CLAIMS = {
    "ddp_10": Faster(10.0, OURS, (DDP,), 2.0, "over 10 Gbit/s, each strategy is at least 2 times as fast as DDP"),
    "ddp_1": Faster(1.0, OURS, (DDP,), 10.0, "over 1 Gbit/s, each strategy is at least 10 times as fast as DDP"),
    "others_10": Faster(10.0, OURS[1:2], OTHERS, 1.0, "over 10 Gbit/s, mstopk_local is faster than all other methods"),
    "others_1": Faster(1.0, OURS[1:2], OTHERS, 1.0, "over 1 Gbit/s, mstopk_local is faster than all other methods"),
}
REPEATS = 3
SETTLING = 3
"""Number of steps after which buckets are settled, and PowerSGD compresses."""
SECONDS = 2.0
"""Length of a turn, as far as `FEWEST_STEPS` and `MOST_STEPS` allow."""
FEWEST_STEPS, MOST_STEPS = 2, 30


def step_times(folder: Path, device: torch.device) -> Iterator[Result]:
    """Measure all methods on two nodes of one rank each, and write the table to nccl.md."""
    rows, cpu = Rows(), device.type == "cpu"
    for rate in RATES:
        rows += on_clusters(measure, cpu, clusters=["2x1"], gbps=[rate], cpu=cpu) or []
        (folder / "nccl.md").write_text(table(rows) + "\n")
        yield check(rows), rows
    print(table(rows))


def measure(topology: Topology, device: torch.device, gbps: float | None, small: bool) -> Rows:
    """Measure the methods in turns, and return one row per method. A collective."""
    task = (SMALL if small else FULL)["gpt"]
    torch.manual_seed(1 + topology.rank)
    batches = batches_of(task, device)
    turns = {
        name: Turns(Training.start(method, topology, device, task.build, task.loss, task.optimizer), batches, device)
        for name, method in METHODS.items()
    }
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
    """Turns of one method: consecutive steps between two waits for the device, each with the next batch."""

    def __init__(self, training: Training, batches: Sequence[Tensor], device: torch.device) -> None:
        self.training, self._batches, self._device = training, cycle(batches), device

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
            self.training.step(next(self._batches))
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


def check(rows: Rows) -> Claims:
    """Return the verdicts of the claims about rates that were measured."""
    ms = {(row["gbps"], row["method"]): row["ms"] for row in rows}
    claims = Claims()
    for name, claim in CLAIMS.items():
        if (claim.rate, DDP) in ms:
            factors = {
                (own, other): ms[claim.rate, other] / ms[claim.rate, own]
                for own in claim.methods
                for other in claim.others
            }
            own, other = min(factors, key=lambda pair: factors[pair])
            number = f"{own} is {factors[own, other]:.2f} times as fast as {other}"
            claims[name] = verdict(factors[own, other] >= claim.factor, number)
    return claims


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


NCCL = Part(step_times, 290, {name: claim.text for name, claim in CLAIMS.items()}, by_default=False)
