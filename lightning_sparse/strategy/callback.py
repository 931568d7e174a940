"""Logs what the reduction does, as a mixin that imports no Lightning."""

from typing import Any

from torch import Tensor

from lightning_sparse.strategy.mstopk_hier import MSTopKHierMixin
from lightning_sparse.strategy.state import HierState


class CommStatsMixin:
    """Logs, through the module's logger and under ``comm/``:

    ======================= =========================================================================================
    bytes_between_nodes     bytes this device received from other nodes for the last step
    density                 share of entries that a device sent in the last step, dense groups counted as 1
    effective_density       share of entries that the last step applied, at most
    residual_norm           L2 norm of what this device has not sent yet; renewed every ``log_every_n_steps`` steps
    ======================= =========================================================================================

    Nothing here waits for the GPU: the first three are known on the host, the last stays a tensor until it is logged.

    Args:
        prog_bar: show the density in the progress bar as well.

    Raises:
        ValueError: at the start of fit, when the strategy is another one.
    """

    def __init__(self, prog_bar: bool = False) -> None:
        self.prog_bar = prog_bar
        self._norm: Tensor | None = None
        self._norm_round = -1

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that there is something to report."""
        if not isinstance(trainer.strategy, MSTopKHierMixin):
            raise ValueError(
                f"CommStatsCallback reports on MSTopKHierStrategy, but the strategy is "
                f"{type(trainer.strategy).__name__}: use strategy='mstopk_hier', or leave the callback out."
            )
        self._norm = None  # the last fit's may be of another module, on another device

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the last round."""
        state: HierState | None = trainer.strategy.hier_state
        if state is None or state.round == 0:
            return
        pl_module.log("comm/bytes_between_nodes", state.stats.round_bytes)
        pl_module.log("comm/density", state.stats.density, prog_bar=self.prog_bar)
        pl_module.log("comm/effective_density", state.stats.effective_density)
        if self._norm is None or state.round - self._norm_round >= trainer.log_every_n_steps:
            self._norm, self._norm_round = state.residual_norm(), state.round
        pl_module.log("comm/residual_norm", self._norm)
