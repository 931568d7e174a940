"""The engine: sums shards over nodes, whoever they belong to.

It is given a shard and a path, and knows no optimizer, no bucket and no Lightning. A front end

    path = exchange.choice.path(work, density)       the same on all ranks
    job = exchange.run(path, shard)                  a generator of three stretches, see `paths.path`
    exchange.runner.run(job, result)                 beside what the caller does next

and closes each round of exchanges with ``exchange.stats.end_round()``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_sparse.exchange.choice import PathChoice
from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.config import ExchangeConfig
from lightning_sparse.exchange.lanes import Runner, runner_of
from lightning_sparse.exchange.paths import Path, Shard, Stretches
from lightning_sparse.exchange.stats import CommStats
from lightning_sparse.kernels import kernel_report
from lightning_sparse.topology import Topology


class Exchange:
    """Exchanges shards between the nodes of a topology.

    Args:
        config: of the exchange.
        topology: of the ranks, with its groups.
        device: where the shards are.
        numel: of all tensors together, on one rank.
        log_once: logs a line once, on rank 0.

    Attributes:
        device: as given.
        communicator: the collectives.
        choice: which path each shard takes.
        runner: runs jobs, beside backward if ``config.overlap``.
        stats: what was communicated.
    """

    def __init__(
        self,
        config: ExchangeConfig,
        topology: Topology,
        device: torch.device | None,
        numel: int,
        log_once: Callable[[str], None],
    ) -> None:
        self.topology, self.device = topology, device
        self.communicator = HierCommunicator(topology)
        self.choice = PathChoice(config, topology, numel, log_once)
        self.runner = runner_of(topology, device) if config.overlap else Runner()
        self.stats = CommStats()
        said = _without_kernels(device)
        if said:
            log_once(said)

    def refuse_capture(self) -> None:
        """Before a round. A CUDA graph would repeat what the host decided in the round that was captured.

        Raises:
            ValueError: if the current stream is being captured.
        """
        on_cuda = self.device is not None and self.device.type == "cuda"
        if on_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "the exchange cannot be captured in a CUDA graph: which path a round takes and where its residuals are "
                "is decided on the host. Capture parts of the model alone (torch.cuda.make_graphed_callables, or "
                "torch.compile with mode='reduce-overhead')."
            )

    def run(self, path: Path, shard: Shard) -> Stretches:
        """Sum the shard over nodes, and count it. Returns the sum: fp32, or for a path ``in_place`` ``shard.sum_S``; or
        adds it to ``shard.target_S``, and returns that."""
        beside = 0 if shard.beside is None else shard.beside.nbytes
        self.stats.record(
            path.name,
            sent=path.sent,
            applied=path.applied,
            total=path.work.shard_numel,
            nbytes=path.bytes() + (path.work.num_nodes - 1) * beside,
            dense_nbytes=self.choice.plain(path.work).bytes(),
        )
        return shard.deliver((yield from path.run(self.communicator, shard)))


def _without_kernels(device: torch.device | None) -> str:
    """What to log where no compiled kernels serve the device; empty where they do."""
    report = kernel_report()
    if device is None or getattr(report, device.type, "compiled") == "compiled":
        return ""
    return (
        f"no compiled kernels for {device.type}: selection takes plain torch, which gives the same results several "
        f"times slower ({'; '.join(report.reasons)})"
    )
