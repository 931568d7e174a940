"""A callback that shards the step of each optimizer, as a mixin that imports no Lightning."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.messages import ensure_log_handler, log
from lightning_sparse.pto.step import Scope, ShardedStep, check_scope, communicator_of
from lightning_sparse.sharding import parameter_names, sparse_parameters
from lightning_sparse.topology import discover


class PTOMixin:
    """Shards the optimizer step and the optimizer state over ranks.

    Results and checkpoints are bit-identical to a run without it. Use it if the optimizer step takes longer than
    gathering the parameters, or if the optimizer state does not fit in memory.

    Args:
        scope: Ranks that shard a step: the ranks of a ``"node"``, all ranks (``"world"``), or ``"auto"``. "auto" times
            a few full steps and a few sharded steps, inside the node or, with one rank per node, among all ranks. It
            keeps the faster method. Choose "node" or "world" if the state does not fit otherwise.
        trusted_optimizers: Names of more optimizer classes to shard, such as ``["Lion"]``. The tested optimizers are
            torch's SGD, Adam, AdamW, Adagrad, RMSprop, NAdam and Muon and timm's LARS and LAMB. Name an optimizer only
            if its step computes each parameter from that parameter's gradient and state alone.
        also: Deprecated name of ``trusted_optimizers``.

    Raises:
        ValueError: if the scope is unknown; at the start of fit, if the strategy or an optimizer is not supported.
    """

    def __init__(
        self, scope: Scope = "auto", trusted_optimizers: Sequence[str] = (), also: Sequence[str] | None = None
    ) -> None:
        check_scope(scope)
        if also is not None:
            warnings.warn("also= is trusted_optimizers= now", DeprecationWarning, stacklevel=2)  # until version 0.3
            trusted_optimizers = also
        if isinstance(trusted_optimizers, str):
            raise ValueError(
                f"trusted_optimizers={trusted_optimizers!r} must be a list of class names. Use "
                f"trusted_optimizers=[{trusted_optimizers!r}]."
            )
        self.scope: Scope = scope
        self.trusted_optimizers = tuple(trusted_optimizers)
        self.steps: list[ShardedStep] = []
        self._communicator: HierCommunicator | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        ensure_log_handler()
        if trainer.world_size == 1:
            log.info("PTOCallback: one rank, nothing to share")
            return
        strategy = trainer.strategy
        engine = getattr(strategy, "engine", None)
        if engine is not None and engine.has_local_weights:
            raise ValueError(
                f"PTOCallback needs equal gradients on all ranks, but with {type(strategy).__name__} each node has its "
                f"own. Remove the callback: the strategy shards the step inside each node itself."
            )
        if not isinstance(strategy.model, DistributedDataParallel) or getattr(strategy, "_model_averager", None):
            raise ValueError(
                f"PTOCallback needs equal gradients on all ranks, which {type(strategy).__name__} does not provide. "
                f"Use strategy='ddp' or 'mstopk_hier', or remove the callback."
            )
        # Lightning has created the optimizers by now, and not yet loaded their state.
        comm = self._shared_communicator(trainer)
        names = parameter_names(pl_module)
        uncut = sparse_parameters(pl_module)
        shared = {id(step.optimizer): step for step in self.steps}  # a second fit may reuse optimizers
        auto = self.scope == "auto"
        self.steps = [
            shared.get(id(o))
            or ShardedStep(o, comm, names, uncut, auto=auto, trusted=type(o).__name__ in self.trusted_optimizers)
            for o in trainer.optimizers
        ]
        if trainer.is_global_zero:
            for step in filter(lambda each: each.active, self.steps):
                log.info("PTOCallback(scope=%r): %s", self.scope, step.describe())

    def _shared_communicator(self, trainer: Any) -> HierCommunicator:
        # All optimizers and fits share one communicator, because process groups are expensive.
        if self._communicator is None:
            timeout = getattr(trainer.strategy, "_timeout", None)
            topology = discover(node_rank=trainer.node_rank, local_rank=trainer.local_rank, timeout=timeout)
            self._communicator = communicator_of(topology, self.scope, timeout=timeout)
        return self._communicator
