"""The callback, as a mixin that does not import Lightning. It makes each optimizer share its step."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.messages import log
from lightning_sparse.pto.joined import Joined, fallback_reason
from lightning_sparse.pto.scope import Scope, check_scope, communicator_of
from lightning_sparse.pto.sharded_step import ShardedStep
from lightning_sparse.sharding import sparse_parameters
from lightning_sparse.topology import discover


class PTOMixin:
    """Divides the optimizer step and the optimizer state among ranks.

    Results and checkpoints are bit-identical to a run without it. Use it if the optimizer step takes longer than
    gathering the parameters, or if the optimizer state does not fit in memory.

    With the hierarchical strategy and several devices per node, the callback steps the gradient shards of the reduction
    (`lightning_sparse.pto.joined`) unless something reads whole gradients. This adds no traffic. Clipping by norm and
    fused optimizers then differ by rounding.

    Args:
        scope: ``"node"`` shares the step inside each node, over fast links; ``"world"`` shares it among all ranks.
            ``"auto"`` times a few full steps and a few shared ones, inside the node or, with one rank per node, among
            all ranks, and keeps the faster. Choose ``"node"`` or ``"world"`` if the state does not fit otherwise.

    Raises:
        ValueError: if the scope is unknown; at the start of fit, if the strategy or an optimizer is not supported.
    """

    def __init__(self, scope: Scope = "auto") -> None:
        check_scope(scope)
        self.scope: Scope = scope
        self.steps: list[ShardedStep] = []
        self._communicator: HierCommunicator | None = None
        self._joined: Joined | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Share the optimizers' steps. Lightning has created the optimizers and not yet loaded their state."""
        if trainer.world_size == 1:
            log.info("PTOCallback: one rank, nothing to share")
            return
        strategy = trainer.strategy
        if hasattr(strategy, "updates"):
            raise ValueError(
                f"PTOCallback shares a step whose gradients are the same on every rank, and with "
                f"{type(strategy).__name__} they are a node's own. Remove the callback: the strategy shares the step "
                f"inside each node itself."
            )
        if not isinstance(strategy.model, DistributedDataParallel) or getattr(strategy, "_model_averager", None):
            raise ValueError(
                f"PTOCallback needs a strategy that leaves the same gradients on every rank, and "
                f"{type(strategy).__name__} does not: use strategy='ddp' or 'mstopk_hier', or remove the callback."
            )
        comm = self._shared_communicator(trainer)
        names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        uncut = sparse_parameters(pl_module)
        shared = {id(step.optimizer): step for step in self.steps}  # a second fit may reuse optimizers
        reason = fallback_reason(trainer, pl_module, comm, self)
        auto = self.scope == "auto" and bool(reason)  # the joined form adds no traffic
        self.steps = [shared.get(id(o)) or ShardedStep(o, comm, names, uncut, auto=auto) for o in trainer.optimizers]
        self._leave()  # after a fit that raised
        if not reason and (self.steps[0].choosing or not self.steps[0].sharing):  # an optimizer of an earlier fit
            reason = "an earlier fit started timing this optimizer's steps, or found the full step faster"
        if not reason:
            self._joined = Joined(self.steps[0], strategy.hier_state, names, trainer.precision_plugin)
        if trainer.is_global_zero:
            for step in self.steps:
                log.info("PTOCallback(scope=%r): %s", self.scope, step.describe())
            form = f"not joined with the reduction: {reason}" if reason else "joined with the reduction"
            log.info("PTOCallback: %s", form)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Follow changes of the reduction's groups."""
        if self._joined is not None:
            self._joined.before_batch()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Keep this rank's shard of gradients that were not gathered."""
        if self._joined is not None:
            self._joined.after_backward()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Share the loss scaler's inf check, which covers only this rank's shard."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if self._joined is not None and scaler is not None:
            self._joined.share_found_inf(scaler)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo the changes to the strategy: the next fit may run without this callback."""
        self._leave()

    def _leave(self) -> None:
        if self._joined is not None:
            self._joined.end()
            self._joined = None

    def _shared_communicator(self, trainer: Any) -> HierCommunicator:
        """Return the communicator of all optimizers and fits. Process groups are expensive."""
        if self._communicator is None:
            timeout = getattr(trainer.strategy, "_timeout", None)
            topology = discover(node_rank=trainer.node_rank, local_rank=trainer.local_rank, timeout=timeout)
            self._communicator = communicator_of(topology, self.scope, timeout=timeout)
        return self._communicator
