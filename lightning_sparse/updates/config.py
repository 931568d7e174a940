"""Options of the exchange of updates, validated on creation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_sparse import options
from lightning_sparse.exchange.config import ExchangeConfig, ValueDtype

UpdatesExchange = Literal["sparse", "regional", "dense16", "dense"]
StepAhead = float | Literal["auto"]
LEAST_AHEAD = 0.001  # sent / step_ahead is added to the model, so a smaller value would lose bits to rounding
MOST_OUTER_LR = 2  # with more, each correction of the weights causes a larger one


@dataclass(frozen=True, kw_only=True)
class UpdatesConfig(ExchangeConfig):
    """Options of ``LocalUpdates``, in addition to `ExchangeConfig`.

    Args:
        exchange: How nodes exchange entries: ``"sparse"``, ``"regional"``, ``"dense16"`` or ``"dense"``. ``"sparse"``
            sends the largest entries of each node, ``"regional"`` approximately the largest of all nodes together.
            ``"dense16"`` and ``"dense"`` send everything. ``"auto"`` is only for DDP's gradients.
        step_ahead: Fraction of its own pending updates that a node keeps in its weights, from 0.001 to 1, or
            ``"auto"``. With 1, each node trains its own model, corrected by the received updates. ``"auto"`` measures
            on a sample how similar the pending updates of the nodes are: 1 if they are equal, and 1 / M if they are
            independent on M nodes. It is always min(1, 2 / M) with ``exchange="regional"``, and always 1 if everything
            is sent, or if two nodes exchange after every step.
        delay: Number of steps between sending a message and applying it, from 0 to ``sync_every``. With 1, sending
            overlaps with the next step. With 0, each step waits. Use more if sending takes longer than a step.
        value_dtype: Format of the values in a message: ``"float32"``, ``"bfloat16"`` or ``"2bit"``. On
            text with AdamW, ``"2bit"`` gave the loss of bfloat16 with half the bytes.
        sync_every: Number of steps between two exchanges. Use 10 or more on the slowest links.
        outer_lr: Multiplier for received updates, in (0, 2]. It is the outer learning rate of DiLoCo (Douillard et al.
            2023). Updates that are sent densely at the end of fit, and updates of a node that is alone, count once. Use
            1.5 with ``sync_every`` >= 10, and 3/4 of the learning rate.
        shard_optimizer: Let each device of a node step only its slice of the parameters, if the optimizer allows it. A
            device then keeps only the optimizer state of its slice. This adds no traffic.
    """

    exchange: UpdatesExchange = "sparse"
    value_dtype: ValueDtype = "2bit"
    step_ahead: StepAhead = "auto"
    delay: int = 1
    sync_every: int = 1
    outer_lr: float = 1.0
    shard_optimizer: bool = True

    def __post_init__(self) -> None:
        # before the check of all exchanges, which would offer "auto"
        options.one_of(self, "exchange", get_args(UpdatesExchange), hint="Use 'sparse' to send the largest entries")
        super().__post_init__()
        if self.step_ahead != "auto":
            hint = "the share of its pending updates in a node's weights; 'auto' measures it"
            options.number(self, "step_ahead", low=LEAST_AHEAD, high=1, hint=hint)
        options.whole(self, "sync_every", low=1, hint="it is the number of steps between two exchanges")
        options.whole(self, "delay", low=0, high=self.sync_every, hint="it is a number of steps, up to sync_every")
        options.number(self, "outer_lr", above=0, high=MOST_OUTER_LR, hint="1 counts every received update once")
        options.flag(self, "shard_optimizer")

    def measures_ahead(self, num_nodes: int) -> bool:
        """Return whether ``step_ahead`` is measured with this number of nodes."""
        # Two nodes that exchange after every step keep 1. Only sparse messages carry samples.
        parts = num_nodes > 2 or (num_nodes == 2 and self.sync_every > 1)
        return self.step_ahead == "auto" and self.exchange == "sparse" and parts

    def changes_without_exchange(self, since: int, num_nodes: int) -> bool:
        """Return whether the weights of a device may change ``since`` steps after an exchange, equal on all ranks."""
        return since == self.delay or self.measures_ahead(num_nodes) or self.ahead(num_nodes) != 1.0

    def ahead(self, num_nodes: int) -> float:
        """Return ``step_ahead`` for this number of nodes, if it is not measured.

        >>> UpdatesConfig().ahead(2), UpdatesConfig().ahead(4), UpdatesConfig(step_ahead=0.9).ahead(4)
        (1.0, 0.5, 0.9)
        """
        if self.step_ahead == "auto":
            return min(1.0, 2.0 / num_nodes) if self.leaves_entries_out else 1.0
        return float(self.step_ahead)

    def describe(self, num_nodes: int) -> str:
        sent = (
            f"nodes exchange the largest {100 * self.density:.3g}% of the updates"
            if self.leaves_entries_out
            else f"nodes exchange all updates (exchange={self.exchange!r})"
        )
        every = "after each step" if self.sync_every == 1 else f"every {self.sync_every} steps"
        delay = f" and apply them {self.delay} step{'s' * (self.delay > 1)} later" if self.delay else ""
        ahead = "measured" if self.measures_ahead(num_nodes) else f"{self.ahead(num_nodes):.2g}"
        ahead = "" if ahead == "1" else f"; step_ahead: {ahead}"
        outer = f"; outer_lr: {self.outer_lr:g}" if self.outer_lr != 1 else ""
        return f"{sent} {every}{delay}{ahead}{outer}"
