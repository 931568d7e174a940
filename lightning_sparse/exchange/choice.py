"""Chooses a path for each shard, and keeps the rates of networks and kernels that the choice rests on.

A choice is a function of what all ranks share; so all ranks choose alike, and call the same collectives. Rates are
given, or probed before the first round and agreed, or restored from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.config import ExchangeConfig
from lightning_sparse.exchange.paths import PATHS, Dense, Path, Work
from lightning_sparse.exchange.probe import probe
from lightning_sparse.exchange.rates import Rates
from lightning_sparse.topology import Topology

MARGIN = 0.9
"""What leaves something for later must be faster by more than noise."""


class PathChoice:
    """The path of each shard.

    Args:
        numel: elements of all tensors together.

    Attributes:
        rates: what ``"auto"`` decides by; None until the first round has measured them.
        keeps_all: ``"auto"`` leaves no entries out: set for optimizers that cannot bear it.
        by_shard: ``"auto"`` forms the sums of a node, which an all-reduce over all ranks never does: set where
            something is kept with them.
    """

    def __init__(self, config: ExchangeConfig, topology: Topology, numel: int, log_once: Callable[[str], None]) -> None:
        given = config.inter_gbps
        self.config = config
        self.rates = None if given is None else Rates.of_link(given, topology.num_devices)
        self.keeps_all = self.by_shard = False
        self._topology, self._numel, self._log_once = topology, numel, log_once

    def work(self, numel: int, dtype: torch.dtype) -> Work:
        """A tensor of so many elements on this cluster."""
        return Work(self._topology.num_nodes, self._topology.num_devices, numel, dtype.itemsize)

    def path(self, work: Work, density: float, *, exact: bool = False) -> Path:
        """The path of a shard.

        Args:
            density: share of its entries that a path which selects sends.
            exact: nothing may be left, not even rounding errors, whatever the configuration says.
        """
        if exact:
            return self._fastest(work, density, rounded=False, keeps_all=True)
        given = self.config.path
        if given is None:
            rounded = self.config.value_dtype != "float32" and work.itemsize >= 4
            return self._fastest(work, density, rounded=rounded, keeps_all=self.keeps_all)
        path = given.of(work, density, self.config.dtype)
        return Dense(work) if path is None else path

    def _fastest(self, work: Work, density: float, *, rounded: bool, keeps_all: bool) -> Path:
        rates = self.rates or Rates.of_link(1.0, work.num_devices)  # probed for "auto" alone
        refused = {"rounding": not rounded, "entries": keeps_all}
        best, least = None, float("inf")
        for kind in PATHS:
            if not kind.automatic or refused.get(kind.leaves) or (self.by_shard and not kind.by_shard):
                continue
            path = kind.of(work, density, self.config.dtype)
            if path is None:
                continue
            seconds = path.seconds(rates)
            if best is None or seconds < least * (1.0 if kind.leaves == "nothing" else MARGIN):
                best, least = path, seconds
        assert best is not None
        return best

    # -- what it rests on ----------------------------------------------------------------------------------------------

    @property
    def must_measure(self) -> bool:
        """Whether rates are to be measured before the next round; the same on all ranks."""
        return self.rates is None and self.config.path is None and self._topology.kind == "hierarchical"

    def measure(self, device: torch.device, round_index: int) -> None:
        """Measure the rates, on all ranks at the same place. A collective of the world; no exchange may be under way,
        for it would use the networks."""
        communicator = HierCommunicator(self._topology)  # its times are no round's
        communicator.where = f"in round {round_index}"
        self.rates = probe(communicator, device, self.config.dtype, self._numel // self._topology.num_devices)
        self._log_once(f"measured: {self.rates.describe(self._topology.num_devices)}")
