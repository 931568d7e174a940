"""Logs what the reduction does, and sums it up at the end of fit, as a mixin that imports no Lightning."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.exchange import CommStats
from lightning_sparse.gradients.state import HierState
from lightning_sparse.messages import log
from lightning_sparse.strategy.local_trainer import LocalTrainerMixin
from lightning_sparse.strategy.mstopk_hier import MSTopKHierMixin
from lightning_sparse.strategy.summary import shard_gradient_norm, table
from lightning_sparse.updates import LocalUpdates


class CommStatsMixin:
    """Logs, through the module's logger and under ``comm/``:

    | name | what |
    |---|---|
    | bytes_between_nodes | bytes this device received from other nodes for the last step |
    | density | share of entries that a device sent in the last step, dense groups counted as 1 |
    | effective_density | share of entries that the last step applied, at most |
    | step_ahead | of updates: share of its own pending ones that this device's weights keep |
    | residual_norm, pending_norm | L2 norm of what this device has not sent yet: of gradients, of updates |
    | residual_to_gradient | the same over the norm of the gradient, of the same entries: steps' worth not sent yet |

    The norms are renewed every ``log_every_n_steps`` steps and at the end of an epoch.

    At the end of fit rank 0 sums up, in the log: bytes beside those of plain DDP, the paths taken, the time in
    collectives between nodes, the residual.

    There is no host sync before the end of fit: the norms stay tensors until they are logged, the others are known on
    the host, and times are read from events that have passed.

    Args:
        prog_bar: show the density in the progress bar as well.

    Raises:
        ValueError: at the start of fit, when the strategy is another one.
    """

    def __init__(self, prog_bar: bool = False) -> None:
        self.prog_bar = prog_bar
        self._norms: dict[str, Tensor] = {}
        self._norm_round = 0
        self._before = CommStats()
        self._seconds_before = 0.0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that there is something to report, and count from here on."""
        if not isinstance(trainer.strategy, (MSTopKHierMixin, LocalTrainerMixin)):
            raise ValueError(
                f"CommStatsCallback reports on the strategies of lightning_sparse, but the strategy is "
                f"{type(trainer.strategy).__name__}: use strategy='mstopk_hier', 'mstopk_local' or 'mstopk_fsdp', or "
                f"leave the callback out."
            )
        self._norms = {}  # the last fit's may be of another module, on another device
        state = _reporting(trainer.strategy)
        if state is not None:
            self._before, self._seconds_before = (
                deepcopy(state.exchange.stats),
                state.exchange.communicator.stopwatch.seconds(),
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the last round."""
        state = _reporting(trainer.strategy)
        if state is None or state.exchange.stats.rounds == 0:
            return
        rounds = state.exchange.stats.rounds
        pl_module.log("comm/bytes_between_nodes", state.exchange.stats.round_bytes)
        pl_module.log("comm/density", state.exchange.stats.density, prog_bar=self.prog_bar)
        pl_module.log("comm/effective_density", state.exchange.stats.effective_density)
        if isinstance(state, LocalUpdates):
            pl_module.log("comm/step_ahead", state.step_ahead)
        due = not self._norms or rounds - self._norm_round >= trainer.log_every_n_steps
        if due or trainer.is_last_batch:  # before a validation, which drops gradients
            self._norms = _norms_of(state, pl_module)
            self._norm_round = rounds
        pl_module.log_dict(self._norms)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Sum the fit up."""
        state = _reporting(trainer.strategy)
        if state is None:
            return
        stats = state.exchange.stats.since(self._before)
        seconds = state.exchange.communicator.stopwatch.seconds() - self._seconds_before
        if trainer.is_global_zero and self._norms and state.topology.num_nodes > 1:
            log.info("%s", table(stats, seconds, *map(float, self._norms.values())))


def _reporting(strategy: Any) -> HierState | LocalUpdates | None:
    """What the strategy exchanges with; None before there is anything to exchange."""
    if isinstance(strategy, MSTopKHierMixin):
        return strategy.hier_state
    updates: LocalUpdates | None = strategy.updates
    return updates if updates is not None and updates.active else None


def _norms_of(state: HierState | LocalUpdates, module: Any) -> dict[str, Tensor]:
    """Of what has not been sent; no host sync."""
    if isinstance(state, LocalUpdates):
        return {"comm/pending_norm": state.pending_norm()}
    residual = state.residual_norm()
    gradient = shard_gradient_norm(state, module).to(residual.device)
    ratio = torch.where(gradient > 0, residual / gradient, 0.0)  # a user may have dropped the gradient by now
    return {"comm/residual_norm": residual, "comm/residual_to_gradient": ratio}
