"""A callback that logs the exchange, as a mixin that imports no Lightning."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor

from lightning_sparse.engine import Engine
from lightning_sparse.exchange import CommStats
from lightning_sparse.messages import human_bytes, log
from lightning_sparse.strategy.trainer import TrainerAdapter

_MB = 1e6


class CommStatsMixin:
    """Logs the exchange through the module's logger, under ``comm/``:

    | name | value |
    |---|---|
    | MB_into_node | MB that all devices of this node received from other nodes for the last step |
    | bytes_between_nodes | bytes that this device received from other nodes for the last step |
    | density | fraction of entries that a device sent in the last step; dense groups count as 1 |
    | effective_density | upper limit of the fraction of entries that the last step applied |
    | step_ahead | updates only: fraction of its own pending updates that this device's weights keep |
    | nodes | ``mstopk_elastic`` only: number of nodes in the last round |
    | rounds_lost | ``mstopk_elastic`` only: number of failed rounds |
    | waited_s | ``mstopk_elastic`` only: seconds that this node has waited for other nodes |
    | rounds_left_out | ``mstopk_elastic`` only: rounds without this node's updates, because they were not finite |
    | healing_s | ``mstopk_elastic`` only: seconds to load the weights of other nodes, after joining and missed rounds |
    | residual_norm, pending_norm | L2 norm of this device's residuals or pending updates |
    | residual_to_gradient | ratio of the residual norm to the norm of the gradient of the same entries |

    The norms are updated every ``log_every_n_steps`` steps and at the end of an epoch. At the end of fit, rank 0 logs a
    summary.

    Args:
        prog_bar: Also show ``comm/MB_into_node`` in the progress bar.

    Raises:
        ValueError: At the start of fit, if another strategy is used.
    """

    def __init__(self, prog_bar: bool = False) -> None:
        self.prog_bar = prog_bar
        self._norms: dict[str, Tensor] = {}
        self._norm_round = 0
        self._before = CommStats()
        self._seconds_before = 0.0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not isinstance(trainer.strategy, TrainerAdapter):
            raise ValueError(
                f"CommStatsCallback needs a strategy of lightning_sparse, but the strategy is "
                f"{type(trainer.strategy).__name__}. Use strategy='mstopk_hier', 'mstopk_local', 'mstopk_fsdp' or "
                f"'mstopk_elastic', or omit the callback."
            )
        self._norms = {}  # norms of an earlier fit may be on another device
        engine = _reporting(trainer.strategy)
        if engine is not None:
            self._before = deepcopy(engine.exchange.stats)
            self._seconds_before = engine.exchange.communicator.stopwatch.seconds()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        engine = _reporting(trainer.strategy)
        if engine is None or engine.exchange.stats.rounds == 0:
            return
        stats = engine.exchange.stats
        into_node = stats.round_bytes * engine.topology.num_devices / _MB
        pl_module.log("comm/MB_into_node", into_node, prog_bar=self.prog_bar)
        pl_module.log("comm/bytes_between_nodes", stats.round_bytes)
        pl_module.log("comm/density", stats.density)
        pl_module.log("comm/effective_density", stats.effective_density)
        for name, value in engine.gauges().items():
            pl_module.log(f"comm/{name}", value)
        due = not self._norms or stats.rounds - self._norm_round >= trainer.log_every_n_steps
        if due or trainer.is_last_batch:  # the last batch, because a validation drops gradients
            self._norms = {f"comm/{name}": norm for name, norm in engine.norms().items()}
            self._norm_round = stats.rounds
        # The norms stay tensors: converting them to floats here would wait for the device in every step.
        pl_module.log_dict(self._norms)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        engine = _reporting(trainer.strategy)
        if engine is None:
            return
        stats = engine.exchange.stats.since(self._before)
        seconds = engine.exchange.communicator.stopwatch.seconds() - self._seconds_before
        if engine.has_local_weights and self._norms:  # the fit has sent everything
            self._norms = engine.norms()
        if trainer.is_global_zero and self._norms and engine.topology.num_nodes > 1:
            log.info("%s", table(stats, seconds, *map(float, self._norms.values())))


def _reporting(strategy: Any) -> Engine | None:
    engine: Engine | None = strategy.engine
    # An inactive engine, as on one node, may have no exchange.
    return engine if engine is not None and hasattr(engine, "exchange") else None


def table(stats: CommStats, seconds: float, unsent: float, ratio: float = 0.0) -> str:
    """Return the summary of one device as lines.

    Args:
        seconds: seconds that this device spent in collectives between nodes.
        unsent: norm of the unsent gradients or updates at the end.
        ratio: ratio of ``unsent`` to the norm of the gradient; 0 if unknown.
    """
    steps, total = max(1, stats.rounds), max(1, sum(stats.paths.values()))
    traffic, ddp = stats.bytes_between_nodes / steps, stats.dense_equivalent_bytes / steps
    factor = f", {ddp / traffic:,.1f} times the bytes" if traffic else ""
    paths = ", ".join(f"{count / total:.1%} {path}" for path, count in stats.paths.most_common())
    lines = [
        f"traffic of one device with other nodes, in {stats.rounds:,} steps, "
        "dense exchanges at start and end included:",
        f"  received per step   {human_bytes(traffic)}; plain DDP {human_bytes(ddp)}{factor}",
        f"  paths               {paths} (share of entries)",
        f"  density             {stats.sent / total:.2%} sent, at most {stats.applied / total:.2%} applied",
        f"  between nodes       {1e3 * seconds / steps:,.1f} ms per step, waiting for other nodes included",
    ]
    if unsent:
        compared = f", {ratio:.1f} times that of the gradient" if ratio else ""
        lines.append(f"  not sent yet        norm {unsent:.3g}{compared}")
    return "\n".join(lines)
