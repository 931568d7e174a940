"""Chooses a path for each shard, and keeps what the choice rests on: rates and density.

A choice is a function of what all ranks share, or was agreed by a collective before the round; so all ranks choose
alike, and call the same collectives. It rests on:

======== ===============================================================================================================
rates    given, or probed before the first round, or restored from a checkpoint; probed again when rounds contradict
         them (lightning_sparse.exchange.rates.timing)
density  given, or with ``"auto"`` the largest that hides behind computation
======== ===============================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from lightning_sparse.agree import largest
from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.config import ExchangeConfig
from lightning_sparse.exchange.density import free_density
from lightning_sparse.exchange.paths import PATHS, Dense, Flat, Path, Work
from lightning_sparse.exchange.rates import Rates, differ
from lightning_sparse.exchange.rates.probe import probe
from lightning_sparse.exchange.rates.timing import Recheck, Window
from lightning_sparse.topology import Topology

MARGIN = 0.9
"""What leaves something for later must be faster by more than noise."""
CONTRADICTS = 2.0
"""Networks are probed again when measured and predicted times differ by this factor ..."""
CHANGED = 1.5
"""... and the new rates are adopted when they change a round by this one."""


class PathChoice:
    """The path of each shard.

    Args:
        config: of the exchange.
        topology: of the ranks.
        numel: of all tensors together.
        log_once: logs a line once, on rank 0.

    Attributes:
        rates: what ``"auto"`` decides by; None until the first round has measured them.
        density: the number given, or what ``density="auto"`` has come to.
        keeps_all: ``"auto"`` leaves no entries out: set for optimizers that cannot bear it.
        window: of backward, or between two exchanges of updates, for ``density="auto"``.
    """

    def __init__(self, config: ExchangeConfig, topology: Topology, numel: int, log_once: Callable[[str], None]) -> None:
        given = config.inter_gbps
        self.config = config
        self.rates = None if given is None else Rates.of_link(given, topology.num_devices)
        self.density = config.least_density
        self.keeps_all = False
        self.window = Window()
        self._recheck = Recheck()
        self._topology, self._numel, self._log_once = topology, numel, log_once

    def work(self, numel: int, dtype: torch.dtype) -> Work:
        """A tensor of so many elements on this cluster."""
        return Work(self._topology.num_nodes, self._topology.num_devices, numel, dtype.itemsize)

    def plain(self, work: Work) -> Path:
        """What DDP does."""
        return Flat(work)

    def dense(self, work: Work) -> Path:
        """Everything, by shards."""
        return Dense(work)

    def path(self, work: Work, density: float, *, exact: bool = False, keeps_all: bool = False) -> Path:
        """Of a shard.

        Args:
            density: share of its entries that a path which selects sends.
            exact: nothing may be left, not even rounding errors, whatever the configuration says.
            keeps_all: no entries may be left out this time.
        """
        if exact:
            return self._fastest(work, density, rounded=False, keeps_all=True)
        given = self.config.path
        if given is None:
            rounded = self.config.may_round and work.itemsize >= 4
            return self._fastest(work, density, rounded=rounded, keeps_all=keeps_all or self.keeps_all)
        path = given.of(work, density, self.config.dtype)
        return Dense(work) if path is None or (keeps_all and path.leaves == "entries") else path

    def _fastest(self, work: Work, density: float, *, rounded: bool, keeps_all: bool) -> Path:
        rates = self.rates or Rates.of_link(1.0, work.num_devices)  # probed for "auto" alone
        refused = {"rounding": not rounded, "entries": keeps_all}
        best, least = None, float("inf")
        for kind in PATHS:
            if not kind.automatic or refused.get(kind.leaves) or (self.config.needs_node_sums and not kind.by_shard):
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

    def prepare(
        self,
        communicator: HierCommunicator,
        device: torch.device,
        round_index: int,
        wait: Callable[[], None],
        paths: Callable[[], Iterable[Path]],
        hidden: Callable[[], Sequence[Work]],
    ) -> None:
        """Before a round: measure what is due, on all ranks at the same place. A collective of the world then.

        Args:
            wait: until no exchange is under way, so that nothing else uses the networks.
            paths: returns those that a round takes now.
            hidden: returns the work that can hide.
        """
        if not self.config.measures or self._topology.kind != "hierarchical":
            return
        communicator.where = f"in round {round_index}"
        changed = False
        if self.rates is None:
            wait()  # for another module, wrapped with the same topology
            self.rates = self._probe(communicator, device)
            self._log_once(f"measured: {self.rates.describe(self._topology.num_devices)}")
        elif self.config.inter_gbps is None and self._recheck.is_due(round_index, communicator.stopwatch):
            wait()
            changed = self._compare(communicator, device, round_index, list(paths()))
        if self.config.density == "auto" and (changed or self.window.is_due(round_index)):
            wait()
            self._set_density(communicator, device, round_index, hidden())

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

    def _probe(self, communicator: HierCommunicator, device: torch.device) -> Rates:
        untimed = HierCommunicator(self._topology)
        untimed.where = communicator.where
        return probe(untimed, device, self.config.dtype, self._numel // self._topology.num_devices)

    def _compare(
        self, communicator: HierCommunicator, device: torch.device, round_index: int, paths: list[Path]
    ) -> bool:
        """Compare the last rounds with the rates, and probe again where they differ; True if that changed the rates."""

        def least(seconds: float) -> float:
            return -largest(-seconds, communicator.flat_all_reduce, device)

        assert self.rates is not None
        measured = self._recheck.measured(communicator.stopwatch, least)
        predicted = sum(path.seconds_between(self.rates) for path in paths)
        if not measured or not predicted:  # a transport of the user's own, which times nothing; an unsettled layout
            return False
        if not differ(measured, predicted, CONTRADICTS):
            return False
        now = self._probe(communicator, device)
        changed = differ(sum(path.seconds_between(now) for path in paths), predicted, CHANGED)
        if changed:
            self.rates = now
        self._log_once(
            f"round {round_index}: {1e3 * measured:.3g} ms between nodes in a round, {1e3 * predicted:.3g} ms "
            f"predicted; measured again: {now.describe(self._topology.num_devices)}; "
            f"{'paths are chosen by the new rates' if changed else 'the choice of paths stands'}"
        )
        return changed

    def _set_density(
        self, communicator: HierCommunicator, device: torch.device, round_index: int, hidden: Sequence[Work]
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
                f"of {self.config.hides_behind}"
            )
