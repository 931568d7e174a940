"""Options of the exchange of gradients, and the density warm-up."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal

from lightning_sparse import options
from lightning_sparse.exchange.config import ExchangeConfig
from lightning_sparse.messages import LogOnce

Exclude = Literal["none", "vectors"] | tuple[str, ...]

STAGES = 4
"""Number of stages of a warm-up counted in rounds."""
DEFAULT_EPOCHS, DEFAULT_SHARE = 4, 0.05
"""The default warm-up: the shorter of this number of epochs and this fraction of the steps."""


@dataclass(frozen=True, kw_only=True)
class GradientsConfig(ExchangeConfig):
    """Options of all exchanges of gradients, in addition to `ExchangeConfig`.

    Args:
        warmup_epochs: Number of epochs in which the density falls exponentially to ``density``; 0 disables the warm-up.
            See DGC (Lin et al. 2018, section 3.3). Default: ``warmup_steps`` decides.
        warmup_steps: Number of steps in which the density falls exponentially to ``density``. With both options, the
            shorter warm-up applies. With neither, a Trainer uses the smaller of 4 epochs and 5% of the expected steps;
            without a Trainer there is no warm-up.
    """

    warmup_epochs: int | None = None
    warmup_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("warmup_epochs", "warmup_steps"):
            options.whole(self, name, low=0, optional=True, hint="Use 0 for no warm-up")

    @property
    def wants_warmup(self) -> bool:
        given = self.warmup_epochs is not None or self.warmup_steps is not None
        return not given and (self.path is None or self.leaves_entries_out) and self.density < 1


@dataclass(frozen=True, kw_only=True)
class HierConfig(GradientsConfig):
    """Options of the hierarchical top-k reduction, in addition to `GradientsConfig`.

    Args:
        momentum_correction: Keep the momentum of torch.optim.SGD with the residual (DGC). The momentum of an entry is
            cleared when the entry is sent.
        exclude: Parameters that are always reduced densely: ``"none"``, ``"vectors"``, or name patterns such as
            ``("*.bias", "head.*")``. ``"vectors"`` are parameters of at most one dimension, such as biases and norms.
    """

    momentum_correction: bool = False
    exclude: Exclude = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_exclude(self.exclude)
        options.flag(self, "momentum_correction")


def _check_exclude(value: object) -> None:
    if value in ("none", "vectors"):
        return
    if not isinstance(value, tuple) or not value or not all(isinstance(pattern, str) and pattern for pattern in value):
        raise ValueError(
            f"exclude={value!r} must be 'none', 'vectors' (parameters of at most one dimension), or a tuple of name "
            f"patterns such as ('*.bias', 'head.*')."
        )


@dataclass(frozen=True)
class Warmup:
    """The exponential density warm-up of Deep Gradient Compression (Lin et al., ICLR 2018, section 3.3).

    In stage s of S, counted from 0, the density is ``density ** ((s + 1) / (S + 1))``; afterwards ``density``. A stage
    is an epoch, or a quarter of ``rounds``. With both limits, the shorter warm-up applies. None stands for no such
    limit; without limits, there is no warm-up.

    >>> [round(Warmup(epochs=2).density(0.001, epoch, 0), 6) for epoch in range(4)]
    [0.1, 0.01, 0.001, 0.001]
    >>> [round(Warmup(rounds=8).density(0.00001, 0, index), 6) for index in (0, 1, 2, 7, 8)]
    [0.1, 0.1, 0.01, 0.0001, 1e-05]
    """

    epochs: int | None = None
    rounds: int | None = None

    @classmethod
    def default(cls, steps: float) -> Warmup:
        """Return the warm-up of a Trainer that expects so many steps."""
        # A Trainer that does not know its number of steps reports infinity or a negative number.
        known = 0 < steps < math.inf
        return cls(DEFAULT_EPOCHS, math.ceil(DEFAULT_SHARE * steps) if known else None)

    def density(self, density: float, epoch: int, round_index: int) -> float:
        # A pure function of epoch and round, so that all ranks and a resumed run have the same density.
        exponents = [1.0] if (self.epochs, self.rounds) == (None, None) else []
        if self.epochs is not None:
            exponents.append((min(epoch, self.epochs) + 1) / (self.epochs + 1))
        if self.rounds is not None:
            stage = round_index * STAGES // self.rounds if round_index < self.rounds else STAGES
            exponents.append((stage + 1) / (STAGES + 1))
        return float(density ** max(exponents))

    def density_now(self, density: float, epoch: int | None, round_index: int, log_once: LogOnce) -> float:
        """Return the density, for an epoch that may be unknown."""
        if epoch is None and self.epochs:
            log_once(
                f"warmup_epochs={self.epochs}, but the epoch is not set, so the density does not fall. In each epoch, "
                f"set state.epoch, or call fabric.strategy.set_epoch(epoch) in Fabric. Or use warmup_steps instead.",
                logging.WARNING,
            )
        return self.density(density, epoch or 0, round_index)

    def describe(self) -> str:
        if 0 in (self.epochs, self.rounds) or (self.epochs, self.rounds) == (None, None):
            return ""
        ends = [] if self.rounds is None else [f"round {self.rounds}"]
        ends += [] if self.epochs is None else [f"epoch {self.epochs}"]
        first = ", whichever comes first" if len(ends) > 1 else ""
        return f"density warm-up ends at {' or '.join(ends)}{first}"
