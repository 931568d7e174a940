"""Counters of one rank. Everything but the residual's norm is known on the host without looking at a tensor."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field


@dataclass
class CommStats:
    """What was communicated so far.

    Attributes:
        rounds: reductions of the whole model so far.
        bytes_between_nodes: bytes received by this device from other nodes so far (see exchange.paths).
        round_bytes: the same, of the last whole round.
        dense_equivalent_bytes: what a dense all-reduce of everything would have received so far.
        density: share of the entries that a device sent in the last whole round, dense groups counted as 1.
        effective_density: share of the entries that the last whole round applied, at most: what several nodes select
            of different entries adds up.
        sent, applied: entries so far that a device sent, and that were applied at most.
        paths: entries so far by the path they took (see lightning_sparse.exchange.paths).
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
        """Count one group: ``sent`` of ``total`` entries of its shard, and its bytes on the slow link."""
        self.paths[path] += total
        self.sent += sent
        self.applied += applied
        self._sent += sent
        self._applied += applied
        self._total += total
        self._running_bytes += nbytes
        self.bytes_between_nodes += nbytes
        self.dense_equivalent_bytes += dense_nbytes

    def abandon_round(self) -> None:
        """Forget a round that was cut short; its bytes were sent all the same."""
        self._running_bytes, self._applied, self._sent, self._total = 0.0, 0.0, 0, 0

    def end_round(self) -> None:
        """Close the round."""
        self.rounds += 1
        self.round_bytes, self._running_bytes = self._running_bytes, 0.0
        self.density = self._sent / self._total if self._total else 0.0
        self.effective_density = self._applied / self._total if self._total else 0.0
        self._sent, self._applied, self._total = 0, 0.0, 0

    def since(self, earlier: CommStats) -> CommStats:
        """What was counted after ``earlier``, a deep copy of this; densities are the last round's still."""
        late = deepcopy(self)
        for name in ("rounds", "bytes_between_nodes", "dense_equivalent_bytes", "sent", "applied"):
            setattr(late, name, getattr(self, name) - getattr(earlier, name))
        late.paths = self.paths - earlier.paths
        return late
