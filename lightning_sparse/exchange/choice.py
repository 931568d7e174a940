"""Chooses a path for each shard, and keeps what the choice rests on: rates and density.

A choice is a function of what all ranks share, or was agreed by a collective before the round; so all ranks choose
alike, and call the same collectives. It rests on:

======== ===============================================================================================================
rates    given, or probed before the first round, or restored from a checkpoint
density  given, or with ``"auto"`` the largest that hides behind computation
======== ===============================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_sparse.agree import largest
from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.config import ExchangeConfig
from lightning_sparse.exchange.host import Window
from lightning_sparse.exchange.paths import PATHS, Dense, Path, Work
from lightning_sparse.exchange.probe import probe
from lightning_sparse.exchange.rates import Rates
from lightning_sparse.topology import Topology

MARGIN = 0.9
"""What leaves something for later must be faster by more than noise."""
STEPS_PER_DOUBLING = 2
"""Candidates of `free_density`: coarse, so that a small change of a measurement changes nothing."""


class PathChoice:
    """The path of each shard.

    Args:
        config: options of the exchange.
        topology: of the ranks.
        numel: elements of all tensors together.
        log_once: logs a line once, on rank 0.

    Attributes:
        rates: what ``"auto"`` decides by; None until the first round has measured them.
        density: the number given, or what ``density="auto"`` has come to.
        keeps_all: ``"auto"`` leaves no entries out: set for optimizers that cannot bear it.
        by_shard: ``"auto"`` forms the sums of a node, which an all-reduce over all ranks never does: set where
            something is kept with them.
        window: of backward, or between two exchanges of updates, for ``density="auto"``.
    """

    def __init__(self, config: ExchangeConfig, topology: Topology, numel: int, log_once: Callable[[str], None]) -> None:
        given = config.inter_gbps
        self.config = config
        self.rates = None if given is None else Rates.of_link(given, topology.num_devices)
        self.density = config.least_density
        self.keeps_all = self.by_shard = False
        self.window = Window()
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
            rounded = self.config.may_round and work.itemsize >= 4
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

    def is_due(self, round_index: int) -> bool:
        """Whether ``prepare`` has something to measure before this round; the same on all ranks."""
        if not self.config.measures or self._topology.kind != "hierarchical":
            return False
        return self.rates is None or (self.config.density == "auto" and self.window.is_due(round_index))

    def prepare(
        self,
        communicator: HierCommunicator,
        device: torch.device,
        round_index: int,
        hidden: Sequence[Work],
        behind: str,
    ) -> None:
        """Before a round for which it ``is_due``, measure, on all ranks at the same place. A collective of the world;
        no exchange may be under way, for it would use the networks.

        Args:
            hidden: the work that can hide.
            behind: what it hides behind, for the log.
        """
        communicator.where = f"in round {round_index}"
        if self.rates is None:
            untimed = HierCommunicator(self._topology)
            untimed.where = communicator.where
            self.rates = probe(untimed, device, self.config.dtype, self._numel // self._topology.num_devices)
            self._log_once(f"measured: {self.rates.describe(self._topology.num_devices)}")
        if self.config.density == "auto" and self.window.is_due(round_index):
            self._set_density(communicator, device, round_index, hidden, behind)

    def found(self) -> dict[str, Any]:
        """What was measured and decided, in plain types, for a run that goes on."""
        rates = None if self.rates is None else self.rates.to_list()
        return {"rates": rates, "density": self.density, "decided": self.window.decided}

    def go_on(self, found: Mapping[str, Any], *, auto: bool) -> None:
        """With what an earlier run found; it may have been saved without some of it.

        Args:
            auto: that run had ``density="auto"``, too.
        """
        if self.rates is None and found.get("rates") is not None:
            self.rates = Rates.from_list(found["rates"])  # measured again, they might decide otherwise
        if self.config.density == "auto" and auto:
            self.density, self.window.decided = found["density"], found.get("decided", 0)

    def _set_density(
        self,
        communicator: HierCommunicator,
        device: torch.device,
        round_index: int,
        hidden: Sequence[Work],
        behind: str,
    ) -> None:
        window = largest(self.window.seconds(), communicator.flat_all_reduce, device)
        before, first = self.density, not self.window.decided
        self.window.decided = round_index
        rates = self.rates
        assert rates is not None

        def seconds(density: float) -> float:
            return sum(self.path(work, density).seconds(rates) for work in hidden)

        if hidden:
            self.density = free_density(self.config.least_density, window, seconds)
        if self.density != before or first:
            self._log_once(
                f"round {round_index}: density {self.density:.2g}, the largest that hides behind {1e3 * window:.3g} ms "
                f"of {behind}"
            )


def free_density(least: float, window: float, seconds: Callable[[float], float]) -> float:
    """The largest density from ``least`` to 1 whose exchange takes at most ``window`` seconds; ``least`` if none does.

    Args:
        seconds: time of the exchange at a density.
    """
    steps = int(math.log2(1 / least) * STEPS_PER_DOUBLING)
    densities = [least * 2 ** (i / STEPS_PER_DOUBLING) for i in range(steps + 1)] + [1.0]
    return max((density for density in densities if seconds(density) <= window), default=least)
