"""Every choice that the ranks make together, and what it is made by: rates of the networks, and the density.

All is a function of what the ranks share, or was agreed by a collective before a round; so they choose alike. Pure
arithmetic is in lightning_sparse.strategy.plan; here is what it is fed with, and when that changes:

    rates       given, or measured before the first round, or taken from a checkpoint; measured again where rounds
                contradict them (lightning_sparse.strategy.recheck)
    density     given, or with "auto" what hides behind backward (lightning_sparse.strategy.window)
"""

from collections.abc import Callable, Mapping

import torch

from lightning_sparse.strategy.communicator import MAX, HierCommunicator
from lightning_sparse.strategy.config import HierConfig
from lightning_sparse.strategy.cost import Rates
from lightning_sparse.strategy.layout import Layout, ParamGroup
from lightning_sparse.strategy.plan import (
    Plan,
    choose,
    choose_dense,
    free_density,
    is_reducible_by_shard,
    seconds_between,
)
from lightning_sparse.strategy.probe import probe
from lightning_sparse.strategy.recheck import CHANGED, CONTRADICTS, Recheck, differ
from lightning_sparse.strategy.window import Window
from lightning_sparse.topology import Topology


class Choices:
    """The path of each group.

    Args:
        config: the user's choices, which these refine.
        topology: where this rank stands.
        layout: of the groups.
        dtypes: of parameters, by name.
        numel: of all parameters together.
        say: logs a line once.

    Attributes:
        rates: what "auto" decides by; None until the first round has measured them.
        density: the number given, or what density="auto" has come to.
        window: of backward, for density="auto" to go by.
    """

    def __init__(
        self,
        config: HierConfig,
        topology: Topology,
        layout: Layout,
        dtypes: Mapping[str, torch.dtype],
        numel: int,
        say: Callable[[str], None],
    ) -> None:
        self.config = config
        given = config.inter_gbps
        self.rates = None if given is None else Rates.of_link(given, topology.num_devices)
        self.density = config.least_density
        self.window = Window()
        self._recheck = Recheck()
        self._topology, self._layout, self._dtypes, self._numel, self._say = topology, layout, dtypes, numel, say

    def path(self, group: ParamGroup, dtype: torch.dtype, round_index: int, epoch: int) -> Plan:
        """Of a group whose bucket has gradients of this dtype, in a round that is not bypassed."""
        if not self.is_sharded(group):
            return Plan("identity")
        if not self._layout.is_settled(group):
            return Plan("dense")
        rates = self.rates or Rates.of_link(1.0, self._topology.num_devices)  # measured for "auto" alone
        if self._layout.is_excluded(group):
            return choose_dense(self.config, self._topology, rates, group, dtype)
        hidden = group != self._layout.selected[-1]  # with density="auto": behind the rest of backward
        density = self.density if hidden else self.config.least_density
        return choose(self.config, self._topology, rates, group, dtype, density, round_index, epoch)

    def is_sharded(self, group: ParamGroup) -> bool:
        """Whether devices reduce the group by shards, in settled rounds."""
        if self._topology.kind != "hierarchical" or not group.numel:
            return False
        return is_reducible_by_shard(self._dtypes[group.names[0]])

    def prepare(
        self,
        communicator: HierCommunicator,
        device: torch.device,
        round_index: int,
        epoch: int,
        wait: Callable[[], None],
    ) -> None:
        """Before a round: measure what has to be, on all ranks at the same place.

        Args:
            wait: until no bucket is under way, so that nothing else is on the networks.
        """
        if not self.config.measures or self._topology.kind != "hierarchical":
            return
        communicator.where = f"in round {round_index}"
        changed = False
        if self.rates is None:
            wait()  # for another module, wrapped with the same topology
            self.rates = self._probe(communicator, device)
            self._say(f"measured: {self.rates.describe(self._topology.num_devices)}")
        elif self.config.inter_gbps is None and self._recheck.is_due(round_index, communicator.stopwatch):
            wait()
            changed = self._look_again(communicator, device, round_index, epoch, self.rates)
        if self.config.density == "auto" and (changed or self.window.is_due(round_index)):
            wait()
            self._set_density(communicator, device, round_index, self.rates)

    def _probe(self, communicator: HierCommunicator, device: torch.device) -> Rates:
        untimed = HierCommunicator(self._topology)
        untimed.where = communicator.where
        return probe(untimed, device, self.config.dtype, self._numel // self._topology.num_devices)

    def _look_again(
        self, communicator: HierCommunicator, device: torch.device, round_index: int, epoch: int, before: Rates
    ) -> bool:
        """Hold the rates against the last rounds, and measure again where they differ; True if that changed them."""

        def least(seconds: float) -> float:
            return -_largest(communicator, device, -seconds)

        measured = self._recheck.measured(communicator.stopwatch, least)
        predicted = self._between(before, round_index, epoch)
        if not measured or not predicted:  # a transport of the user's own, which times nothing; an unsettled layout
            return False
        if not differ(measured, predicted, CONTRADICTS):
            return False
        now = self._probe(communicator, device)
        changed = differ(self._between(now, round_index, epoch), predicted, CHANGED)
        if changed:
            self.rates = now
        self._say(
            f"round {round_index}: {1e3 * measured:.3g} ms a round between nodes where {1e3 * predicted:.3g} were "
            f"predicted; measured again: {now.describe(self._topology.num_devices)}; "
            f"{'by that it is decided from now on' if changed else 'no reason to decide otherwise'}"
        )
        return changed

    def _between(self, rates: Rates, round_index: int, epoch: int) -> float:
        """Seconds that a round as it is made now spends between nodes, by these rates."""
        seconds = 0.0
        for group in self._layout.settled:
            dtype = self._dtypes[group.names[0]]
            plan = self.path(group, dtype, round_index, epoch)
            seconds += seconds_between(plan, self.config, self._topology, rates, group, dtype)
        return seconds

    def _set_density(
        self, communicator: HierCommunicator, device: torch.device, round_index: int, rates: Rates
    ) -> None:
        window = _largest(communicator, device, self.window.seconds())
        hidden = [(g, self._dtypes[g.names[0]]) for g in self._layout.selected[:-1] if self.is_sharded(g)]
        before, first = self.density, not self.window.decided
        self.window.decided = round_index
        self.density = free_density(self.config, self._topology, rates, hidden, window) if hidden else before
        if self.density != before or first:
            self._say(
                f"round {round_index}: density {self.density:.2g}, the most that hides behind {1e3 * window:.3g} ms of "
                f"backward; the last of {len(self._layout.selected)} group(s) keeps {self.config.least_density:g}"
            )


def _largest(communicator: HierCommunicator, device: torch.device, number: float) -> float:
    """Of all ranks. A collective of the world."""
    numbers = torch.tensor([number], dtype=torch.float64, device=device)
    communicator.flat_all_reduce(numbers, op=MAX)
    return float(numbers)
