"""The engine: sums shards over nodes. It knows no optimizer, no bucket and no Lightning. A front end calls::

    path = exchange.choice.path(work, density)       equal on all ranks
    transfer = exchange.begin(path, shard)           selects the entries to send
    transfer.transfer()                              communicates between nodes
    sum_S = transfer.sum()

A `Transfer` is a job, so it may run in the background.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.config import ExchangeConfig
from lightning_sparse.exchange.cost import PathChoice
from lightning_sparse.exchange.lanes import Runner, runner_of
from lightning_sparse.exchange.paths import Dense16, Flat, Path, Shard
from lightning_sparse.kernels import kernel_report
from lightning_sparse.messages import human_bytes
from lightning_sparse.topology import Topology


class Exchange:
    """Exchanges shards between the nodes of a topology. ``numel`` counts all tensors of one rank."""

    def __init__(
        self,
        config: ExchangeConfig,
        topology: Topology,
        device: torch.device | None,
        numel: int,
        log_once: Callable[..., None],
    ) -> None:
        self.topology, self.device, self.log_once = topology, device, log_once
        self.communicator = HierCommunicator(topology)
        self.choice = PathChoice(config, topology, numel, log_once)
        self.runner = runner_of(topology, device) if config.overlap else Runner()
        self.stats = CommStats()
        self._numel = numel
        for warning in (_without_kernels(device), _all_of(config) or _more_than_dense(self.choice, config, numel)):
            if warning:
                log_once(warning, logging.WARNING)

    def volume(self, density: float, sync_every: int = 1) -> str:
        """Describe the bytes per step that a node receives, and DDP's."""
        if not self._numel:
            return "no parameters"
        work, devices = self.choice.work(self._numel, torch.float32), self.topology.num_devices
        ours, dense = (devices * path.bytes() for path in (self.choice.path(work, density), Flat(work)))
        return f"each node receives {human_bytes(ours / sync_every)} per step (DDP: {human_bytes(dense)})"

    def refuse_capture(self) -> None:
        """Raise ValueError if the current stream is being captured."""
        on_cuda = self.device is not None and self.device.type == "cuda"
        if on_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "the exchange cannot be captured in a CUDA graph, because the host chooses the path and the residuals "
                "of each round. Capture only parts of the model (torch.cuda.make_graphed_callables, or torch.compile "
                "with mode='reduce-overhead')."
            )

    def begin(self, path: Path, shard: Shard, *, of_a_step: bool = True) -> Transfer:
        """Select the entries of a shard to send, and count them.

        Args:
            of_a_step: DDP would have sent this shard's gradients, too.
        """
        self.stats.record(
            path.name,
            sent=path.sent,
            applied=path.applied,
            total=path.work.shard_numel,
            nbytes=path.bytes(),
            dense_nbytes=Flat(path.work).bytes() if of_a_step else 0.0,
        )
        return Transfer(path, shard, self.communicator)

    def count_step_without(self, path: Path) -> None:
        # DDP would have sent the gradients of this step.
        self.stats.dense_equivalent_bytes += Flat(path.work).bytes()

    def sum(self, path: Path, shard: Shard, *, of_a_step: bool = True) -> Tensor:
        """Sum a shard over nodes at once."""
        transfer = self.begin(path, shard, of_a_step=of_a_step)
        transfer.transfer()
        return transfer.sum()


class Transfer:
    """The exchange of one shard: a `Job` whose entries are selected already."""

    def __init__(self, path: Path, shard: Shard, communicator: HierCommunicator) -> None:
        self.path, self.shard, self._communicator = path, shard, communicator
        self._where = communicator.error_context  # stages may run on threads, and each thread has its own context
        self._target_S: Tensor | None = None
        self._alpha = 1.0
        # The message of this device. `transfer` replaces it by the received messages.
        self.payload = path.select(communicator, shard)

    def add_to(self, target_S: Tensor, alpha: float) -> None:
        """Let ``apply`` add alpha times the sum over nodes to ``target_S``."""
        self._target_S, self._alpha = target_S, alpha

    def select(self) -> Sequence[Tensor]:
        return self.tensors

    def transfer(self) -> Sequence[Tensor]:
        self._communicator.error_context = self._where
        self.payload = self.path.transfer(self._communicator, self.payload, self.shard)
        return self.tensors

    def apply(self) -> Sequence[Tensor]:
        if self._target_S is not None:
            self._target_S.add_(self.sum(), alpha=self._alpha)
        return ()

    def sum(self) -> Tensor:
        """Return the sum over nodes: fp32, or ``shard.sum_S`` for a path ``in_place``."""
        self._communicator.error_context = self._where
        return self.path.apply(self.payload, self.shard)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.payload, *self.shard.used_to_the_end)


@dataclass
class CommStats:
    """Communication of one rank so far, counted without reading a tensor.

    Attributes:
        rounds: number of reductions of the whole model.
        bytes_between_nodes, round_bytes: bytes received from other nodes, so far and in the last whole round.
        dense_equivalent_bytes: bytes that a dense all-reduce in each step would have received.
        density: fraction of the entries that a device sent in the last whole round; 1 for dense groups.
        effective_density: upper limit of the fraction that the last whole round applied.
        sent, applied: number of sent entries, and upper limit of the number of applied entries.
        paths: number of entries by path.
    """

    rounds: int = 0
    bytes_between_nodes: float = 0.0
    round_bytes: float = 0.0
    dense_equivalent_bytes: float = 0.0
    density: float = 1.0
    effective_density: float = 1.0
    sent: int = 0
    applied: float = 0.0
    paths: Counter[str] = field(default_factory=Counter)
    _running_bytes: float = 0.0
    _sent: int = 0
    _applied: float = 0.0
    _total: int = 0

    def record(self, path: str, *, sent: int, applied: float, total: int, nbytes: float, dense_nbytes: float) -> None:
        self.paths[path] += total
        self.sent += sent
        self.applied += applied
        self._sent += sent
        self._applied += applied
        self._total += total
        self.count_bytes(nbytes)
        self.dense_equivalent_bytes += dense_nbytes

    def count_bytes(self, nbytes: float) -> None:
        self._running_bytes += nbytes
        self.bytes_between_nodes += nbytes

    def abandon_round(self) -> None:
        # `bytes_between_nodes` keeps the bytes of an interrupted round, because they were sent.
        self._running_bytes, self._applied, self._sent, self._total = 0.0, 0.0, 0, 0

    def end_round(self) -> None:
        self.rounds += 1
        self.round_bytes, self._running_bytes = self._running_bytes, 0.0
        self.density = self._sent / self._total if self._total else 0.0
        self.effective_density = self._applied / self._total if self._total else 0.0
        self._sent, self._applied, self._total = 0, 0.0, 0

    def since(self, earlier: CommStats) -> CommStats:
        """Return the counts after ``earlier``, a deep copy."""
        late = deepcopy(self)
        for name in ("rounds", "bytes_between_nodes", "dense_equivalent_bytes", "sent", "applied"):
            setattr(late, name, getattr(self, name) - getattr(earlier, name))
        late.paths = self.paths - earlier.paths
        return late


def _without_kernels(device: torch.device | None) -> str:
    report = kernel_report()
    if device is None or getattr(report, device.type, "compiled") == "compiled":
        return ""
    return (
        f"no compiled kernels for {device.type}: selection runs in plain torch, several times slower, with equal "
        f"results. Cause: {'; '.join(report.reasons)}. Fix: {report.fix}"
    )


def _all_of(config: ExchangeConfig) -> str:
    # A density of 1 may be meant as 1%.
    if config.density != 1 or not config.leaves_entries_out:
        return ""
    return "density=1 sends 100% of the entries. For 1%, use density=0.01. To send all entries, use exchange='dense'."


def _more_than_dense(choice: PathChoice, config: ExchangeConfig, numel: int) -> str:
    if config.exchange != "sparse" or not numel:
        return ""
    # The bytes of an all-gather of messages grow with the number of nodes. The bytes of dense16 do not.
    work = choice.work(numel, torch.float32)
    path, dense = choice.path(work, config.density), Dense16(work)
    if path.bytes() <= dense.bytes():
        return ""
    return (
        f"exchange='sparse' at density {config.density:g} receives {path.bytes() / dense.bytes():.2g} times the "
        f"bytes of exchange='dense16' on {work.num_nodes} nodes: use exchange='regional', whose bytes do not grow with "
        f"the number of nodes, or a density below {config.density * dense.bytes() / path.bytes():.2g}"
    )
