"""Training steps on one device for the GPU session, with and without an exchange between two nodes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.cluster import Alone, topology_of
from benchmarks.gpu.models import Task
from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.updates import LocalUpdates, UpdatesConfig

NONE, ONE_STREAM, LANES, UPDATES = "no exchange", "at once", "lanes", "updates"
SETTLING = 4  # rounds until buckets are settled, and more


class Way:
    """A model with one training method.

    Args:
        name: one of the four methods.
        task: the task.
        device: device of the training.
        config: options of the exchange, besides the defaults of this session: sparse, 1%.
        devices: number of devices of each of the two nodes.
        ddp: options of DistributedDataParallel.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        device: torch.device,
        config: dict[str, Any] | None = None,
        devices: int = 1,
        ddp: dict[str, Any] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.name, self._task, self._device = name, task, device
        with device:
            model = task.build()
        self._batch = task.batch(device)
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **(ddp or {}))
        self._optimizer = task.optimizer(model)
        self._state: HierState | None = None
        self._updates: LocalUpdates | None = None
        topology = topology_of(2, devices)
        self.communicator = Alone(topology)
        options: dict[str, Any] = {"exchange": "sparse", **(config or {})}
        if name in (ONE_STREAM, LANES):
            unused = bool((ddp or {}).get("find_unused_parameters"))
            hier = HierConfig(warmup_epochs=0, overlap=name == LANES, **options)
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
            with torch.autocast("cuda", torch.bfloat16, enabled=self._device.type == "cuda"):
                loss = self._task.loss(self.ddp, self._batch)
            torch.autograd.backward(loss)

    def update(self) -> None:
        """Run the optimizer's step, and the exchange of updates."""
        self._optimizer.step()
        if self._updates is not None:
            self._updates.step()

    def step(self) -> None:
        self.backward()
        self.update()

    @property
    def received(self) -> float:
        """Bytes from other nodes in the last step."""
        holder = self._state or self._updates
        return 0.0 if holder is None else holder.exchange.stats.round_bytes

    def end(self) -> None:
        """End its threads."""
        if self._state is not None:
            self._state.detach()
        if self._updates is not None:
            self._updates.end()


def begin(device: torch.device) -> None:
    """Make a process group of this rank alone, which DistributedDataParallel needs."""

    def start(backend: str) -> None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

    start("nccl" if device.type == "cuda" else "gloo")
    try:
        dist.all_reduce(torch.zeros(1, device=device))
    except dist.DistBackendError as error:
        print(f"NCCL does not start here, so Gloo takes its place: {error}")
        dist.destroy_process_group()
        start("gloo")


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def times(ways: Iterable[Way], device: torch.device, seconds: float, most: int = 30) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of a step, and of the host's part. The methods are interleaved."""
    ways = list(ways)
    for way in ways:
        for _ in range(SETTLING):
            way.step()
    finish(device)
    taken: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    until = time.perf_counter() + seconds
    for turn in range(most):
        if turn > 2 and time.perf_counter() > until:
            break
        for way in ways:
            begin = time.perf_counter()
            way.step()
            queued = time.perf_counter() - begin
            finish(device)
            taken[way.name].append((time.perf_counter() - begin, queued))
    return {
        name: {"ms": 1e3 * median(a for a, _ in each), "host ms": 1e3 * median(b for _, b in each), "steps": len(each)}
        for name, each in taken.items()
    }
