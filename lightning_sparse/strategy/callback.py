"""Logs what an engine exchanges, and sums it up at the end of fit, as a mixin that imports no Lightning."""

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
    """Logs, through the module's logger and under ``comm/``:

    | name | what |
    |---|---|
    | MB_into_node | MB that all devices of this node received from other nodes for the last step |
    | bytes_between_nodes | the same of this device, in bytes |
    | density | share of entries that a device sent in the last step, dense groups counted as 1 |
    | effective_density | share of entries that the last step applied, at most |
    | step_ahead | of updates: share of its own pending ones that this device's weights keep |
    | nodes | between nodes that come and go: those that contributed to the last round |
    | rounds_lost, waited_s | the same: rounds that failed so far, seconds that this node has waited for others |
    | rounds_left_out | only ``mstopk_elastic``: rounds without this node's updates, because they were not finite |
    | healing_s | the same: seconds until it had the weights of others, when it joined and after rounds that it missed |
    | residual_norm, pending_norm | L2 norm of what this device has not sent yet: of gradients, of updates |
    | residual_to_gradient | the same over the norm of the gradient, of the same entries: steps' worth not sent yet |

    The norms are renewed every ``log_every_n_steps`` steps and at the end of an epoch.

    At the end of fit rank 0 sums up, in the log: bytes beside those of plain DDP, the paths taken, the time in
    collectives between nodes, the residual.

    There is no host sync before the end of fit: the norms stay tensors until they are logged, the others are known on
    the host, and times are read from events that have passed.

    Args:
        prog_bar: show ``comm/MB_into_node`` in the progress bar as well.

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
        if not isinstance(trainer.strategy, TrainerAdapter):
            raise ValueError(
                f"CommStatsCallback reports on the strategies of lightning_sparse, but the strategy is "
                f"{type(trainer.strategy).__name__}: use strategy='mstopk_hier', 'mstopk_local', 'mstopk_fsdp' or "
                f"'mstopk_elastic', or leave the callback out."
            )
        self._norms = {}  # the last fit's may be of another module, on another device
        engine = _reporting(trainer.strategy)
        if engine is not None:
            self._before = deepcopy(engine.exchange.stats)
            self._seconds_before = engine.exchange.communicator.stopwatch.seconds()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the last round."""
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
        if due or trainer.is_last_batch:  # before a validation, which drops gradients
            self._norms = {f"comm/{name}": norm for name, norm in engine.norms().items()}
            self._norm_round = stats.rounds
        pl_module.log_dict(self._norms)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Sum the fit up."""
        engine = _reporting(trainer.strategy)
        if engine is None:
            return
        stats = engine.exchange.stats.since(self._before)
        seconds = engine.exchange.communicator.stopwatch.seconds() - self._seconds_before
        if engine.has_local_weights and self._norms:  # the fit has ended with an exchange of everything
            self._norms = engine.norms()
        if trainer.is_global_zero and self._norms and engine.topology.num_nodes > 1:
            log.info("%s", table(stats, seconds, *map(float, self._norms.values())))


def _reporting(strategy: Any) -> Engine | None:
    """The engine of the module that is trained; None before there is anything to exchange."""
    engine: Engine | None = strategy.engine
    return engine if engine is not None and hasattr(engine, "exchange") else None


def table(stats: CommStats, seconds: float, unsent: float, ratio: float = 0.0) -> str:
    """What one device exchanged with other nodes, which speaks for the others: a heading, and a line for each thing.

    Args:
        seconds: that this device spent in collectives between nodes.
        unsent: norm of what was not sent at the end, of gradients or updates.
        ratio: the same over the norm of the gradient; 0 where that is not known.
    """
    steps, total = max(1, stats.rounds), max(1, sum(stats.paths.values()))
    here, ddp = stats.bytes_between_nodes / steps, stats.dense_equivalent_bytes / steps
    more = f", {ddp / here:,.1f} times the bytes" if here else ""
    paths = ", ".join(f"{count / total:.1%} {path}" for path, count in stats.paths.most_common())
    lines = [
        f"what one device exchanged with other nodes, in {stats.rounds:,} steps, "
        "dense exchanges at start and end included:",
        f"  received per step   {human_bytes(here)}; plain DDP {human_bytes(ddp)}{more}",
        f"  paths               {paths} (share of entries)",
        f"  density             {stats.sent / total:.2%} sent, at most {stats.applied / total:.2%} applied",
        f"  between nodes       {1e3 * seconds / steps:,.1f} ms per step, waiting for other nodes included",
    ]
    if unsent:
        compared = f", {ratio:.1f} times that of the gradient" if ratio else ""
        lines.append(f"  not sent yet        norm {unsent:.3g}{compared}")
    return "\n".join(lines)
