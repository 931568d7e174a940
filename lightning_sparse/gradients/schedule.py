"""The density warm-up as a pure function of (round, epoch): the same on all ranks, and after a resume."""

from __future__ import annotations

from dataclasses import dataclass

STAGES = 4
"""Of a warm-up counted in rounds."""
DEFAULT_EPOCHS, DEFAULT_SHARE = 4, 0.05
"""Of the warm-up where none is given: whichever ends first."""


@dataclass(frozen=True)
class Warmup:
    """The exponential warm-up of Deep Gradient Compression (Lin et al., ICLR 2018, section 3.3).

    In stage s of S, counted from 0, the density is ``density ** ((s + 1) / (S + 1))``; afterwards ``density``. A stage
    is an epoch, or a quarter of ``rounds``. With both, whichever is ahead counts, so the shorter one ends it.

    Args:
        epochs: of the warm-up; None for no such limit.
        rounds: of the warm-up; None for no such limit. With neither there is none.

    >>> [round(Warmup(epochs=2).density(0.001, epoch, 0), 6) for epoch in range(4)]
    [0.1, 0.01, 0.001, 0.001]
    >>> [round(Warmup(rounds=8).density(0.00001, 0, index), 6) for index in (0, 1, 2, 7, 8)]
    [0.1, 0.1, 0.01, 0.0001, 1e-05]
    """

    epochs: int | None = None
    rounds: int | None = None

    def density(self, density: float, epoch: int, round_index: int) -> float:
        """On the way to ``density``."""
        exponents = [1.0] if (self.epochs, self.rounds) == (None, None) else []
        if self.epochs is not None:
            exponents.append((min(epoch, self.epochs) + 1) / (self.epochs + 1))
        if self.rounds is not None:
            stage = round_index * STAGES // self.rounds if round_index < self.rounds else STAGES
            exponents.append((stage + 1) / (STAGES + 1))
        return float(density ** max(exponents))

    def describe(self) -> str:
        """When it ends, for the log; empty for no warm-up."""
        if 0 in (self.epochs, self.rounds) or (self.epochs, self.rounds) == (None, None):
            return ""
        ends = [] if self.rounds is None else [f"round {self.rounds}"]
        ends += [] if self.epochs is None else [f"epoch {self.epochs}"]
        first = ", whichever comes first" if len(ends) > 1 else ""
        return f"the density falls to its value until {' or '.join(ends)}{first}"
