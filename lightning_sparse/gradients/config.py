"""What a user chooses about the reduction of gradients, checked when it is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_sparse.exchange.config import ExchangeConfig, check_flag

Exclude = Literal["none", "vectors"] | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class HierConfig(ExchangeConfig):
    """Options of the hierarchical top-k reduction, besides those of `ExchangeConfig`.

    Args:
        warmup_epochs: epochs over which the density falls exponentially to ``density`` (DGC, Lin et al. 2018,
            section 3.3); 0 for none. None leaves it to ``warmup_steps``.
        warmup_steps: the same in rounds. With both the warm-up ends with whichever is over first. With neither, Trainer
            takes the smaller of 4 epochs and 5 % of the steps that it expects; elsewhere there is no warm-up.
        dense_rounds: this many rounds at the start send everything.
        momentum_correction: for torch.optim.SGD with momentum: keep the momentum with the residuals, and stop it where
            an entry was sent (lightning_sparse.gradients.momentum).
        exclude: parameters that are always reduced densely, for their entries are few and matter much. ``"vectors"``:
            those of at most one dimension, which are biases and norms; or patterns of names, such as
            ``("*.bias", "head.*")``, in which ``*`` stands for anything.
        error_feedback: keep what was not sent and add it to the next gradient. Only experiments turn it off.

    Raises:
        ValueError: naming the value, the rule and the way out.
    """

    warmup_epochs: int | None = None
    warmup_steps: int | None = None
    dense_rounds: int = 0
    momentum_correction: bool = False
    exclude: Exclude = "none"
    error_feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("warmup_epochs", "warmup_steps", "dense_rounds"):
            value = getattr(self, name)
            optional = value is None and name != "dense_rounds"
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{name}={value!r} must be a whole number, 0 or more; 0 turns it off.")
        _check_exclude(self.exclude)
        for name in ("momentum_correction", "error_feedback"):
            check_flag(name, getattr(self, name))
        if self.momentum_correction and not self.error_feedback:
            raise ValueError("momentum_correction=True needs error_feedback: velocities add up in the residual.")

    @property
    def may_round(self) -> bool:
        """Whether ``exchange="auto"`` may round values to 16 bits: only where a residual keeps the error."""
        return super().may_round and self.error_feedback


def _check_exclude(value: object) -> None:
    if value in ("none", "vectors"):
        return
    if not isinstance(value, tuple) or not value or not all(isinstance(each, str) and each for each in value):
        raise ValueError(
            f"exclude={value!r} must be 'none', 'vectors' (parameters of at most one dimension), or a tuple of "
            f"patterns of parameter names such as ('*.bias', 'head.*')."
        )
