"""Training steps on one device for the GPU session, with and without an exchange between two nodes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import cycle
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.cluster import Alone, topology_of
from benchmarks.gpu.models import Task
from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.updates import LocalUpdates, UpdatesConfig

NONE, NO_OVERLAP, OVERLAP, UPDATES = "no exchange", "gradients, no overlap", "gradients, overlap", "updates"
SETTLING = 4  # more rounds than buckets need to settle
Times = dict[str, dict[str, float]]
"""Milliseconds per step of each method: median, fastest and slowest turn, and the time in which the host queues it."""


class Way:
    """A model with one training method.

    Args:
        name: one of the four methods.
        task: the task.
        batches: batches on the device of the training, which the steps use in turn.
        config: options of the exchange, in addition to the defaults of this session: sparse, 1%.
        devices: number of devices of each of the two nodes.
        ddp: options of DistributedDataParallel.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        batches: Sequence[Tensor],
        config: dict[str, Any] | None = None,
        devices: int = 1,
        ddp: dict[str, Any] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.name, self.device, self._task = name, batches[0].device, task
        self._batches = cycle(batches)
        with self.device:
            model = task.build()
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **(ddp or {}))
        self._optimizer = task.optimizer(model)
        self._state: HierState | None = None
        self._updates: LocalUpdates | None = None
        topology = topology_of(2, devices)
        self.communicator = Alone(topology)
        options: dict[str, Any] = {"exchange": "sparse", **(config or {})}
        if name in (NO_OVERLAP, OVERLAP):
            unused = bool((ddp or {}).get("find_unused_parameters"))
            hier = HierConfig(warmup_epochs=0, overlap=name == OVERLAP, **options)
            self._state = HierState(model, hier, topology, find_unused_parameters=unused)
            self._state.watch([self._optimizer])
            self._state.exchange.communicator = self.communicator
            self.ddp.register_comm_hook(self._state, hier_hook)
        if name == UPDATES:
            self._updates = LocalUpdates(model, self._optimizer, UpdatesConfig(**options), topology)
            self._updates.exchange.communicator = self.communicator

    def backward(self) -> None:
        """Run forward and backward."""
        self._optimizer.zero_grad()
        if self._state is not None:
            self._state.before_backward()
        with nullcontext() if self._state is not None else self.ddp.no_sync():
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = self._task.loss(self.ddp, next(self._batches))
            torch.autograd.backward(loss)

    def step(self) -> None:
        """Run a training step. An exchange of updates may continue after the return."""
        self.backward()
        self._optimizer.step()
        if self._updates is not None:
            self._updates.step()

    def finish(self) -> None:
        """Wait for the exchange of the last step."""
        holder = self._state or self._updates
        if holder is not None:
            holder.exchange.runner.synchronize()
        finish(self.device)

    @property
    def received(self) -> float:
        """Return the bytes received from other nodes in the last step."""
        holder = self._state or self._updates
        return 0.0 if holder is None else holder.exchange.stats.round_bytes

    def close(self) -> None:
        """End its threads."""
        if self._state is not None:
            self._state.release_optimizers()
        if self._updates is not None:
            self._updates.close()


def begin(device: torch.device) -> None:
    """Create a process group with only this rank, because DistributedDataParallel needs a group."""

    def start(backend: str) -> None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

    start("nccl" if device.type == "cuda" else "gloo")
    try:
        dist.all_reduce(torch.zeros(1, device=device))
    except dist.DistBackendError as error:
        print(f"NCCL does not start, so this part uses Gloo: {error}")
        dist.destroy_process_group()
        start("gloo")


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def settle(ways: Iterable[Way]) -> None:
    """Run the first steps, which differ from all later steps."""
    for way in ways:
        for _ in range(SETTLING):
            way.step()
        way.finish()


def times(ways: Sequence[Way], steps: int, turns: int) -> Times:
    """Time the steps of settled methods, which take turns of several steps.

    The host waits for the device only at the end of a turn. The next step hides an exchange of updates, so a wait in
    each step would add the whole exchange to the step. The last exchange of a turn has no next step. It adds up to
    1 / steps of an exchange to each step.
    """
    taken: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    for _ in range(turns):
        for way in ways:
            begin = time.perf_counter()
            for _ in range(steps):
                way.step()
            queued = time.perf_counter() - begin
            way.finish()
            taken[way.name].append((1e3 * (time.perf_counter() - begin) / steps, 1e3 * queued / steps))
    return {name: _summary(each) for name, each in taken.items()}


def _summary(turns: list[tuple[float, float]]) -> dict[str, float]:
    ms = [each for each, _ in turns]
    return {
        "ms": median(ms),
        "fastest ms": min(ms),
        "slowest ms": max(ms),
        "host ms": median(each for _, each in turns),
    }
