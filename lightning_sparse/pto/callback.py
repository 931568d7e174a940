"""The callback, as a mixin that imports no Lightning: it finds the optimizers and shares their steps."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.messages import log
from lightning_sparse.pto.joined import Joined, why_not
from lightning_sparse.pto.scope import Scope, check_scope, communicator_of
from lightning_sparse.pto.sharded_step import ShardedStep
from lightning_sparse.topology import discover


def sparse_parameters(module: nn.Module) -> set[int]:
    """``id()`` of the weights whose gradients are sparse tensors, which cannot be cut."""
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    return {id(each.weight) for each in module.modules() if isinstance(each, embeddings) and each.sparse}


class PTOMixin:
    """Lets every rank run its share of the optimizer step, and keep its share of the optimizer state.

    Results, and checkpoints, are those of the run without it, bit by bit. It pays where the optimizer step takes longer
    than gathering the parameters, or where the optimizer's state does not fit.

    With the hierarchical strategy and several devices a node it is joined with the reduction, where nothing looks at
    whole gradients (`lightning_sparse.pto.joined`): then it costs no traffic, and clipping by norm and fused optimizers
    differ from the run without it by rounding.

    Args:
        scope: ``"auto"`` times a few plain steps and a few shared ones, inside the node or, with one rank a node, among
            all, and keeps what is faster; ``"node"`` shares the step inside each node and gathers over its fast links;
            ``"world"`` shares it among all ranks. Choose one of these two where the state would not fit otherwise.

    Raises:
        ValueError: for another scope; at the start of fit, when strategy or optimizer cannot be joined with it.
    """

    def __init__(self, scope: Scope = "auto") -> None:
        check_scope(scope)
        self.scope: Scope = scope
        self.steps: list[ShardedStep] = []
        self._communicator: HierCommunicator | None = None
        self._joined: Joined | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Optimizers exist and their saved state is not loaded yet: now."""
        if trainer.world_size == 1:
            log.info("PTOCallback: one rank, nothing to share")
            return
        strategy = trainer.strategy
        if not isinstance(strategy.model, DistributedDataParallel) or getattr(strategy, "_model_averager", None):
            raise ValueError(
                f"PTOCallback needs a strategy that leaves the same gradients on every rank, and "
                f"{type(strategy).__name__} does not: use strategy='ddp' or 'mstopk_hier', or leave the callback out."
            )
        communicator = self._shared_communicator(trainer)
        names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        uncut = sparse_parameters(pl_module)
        shared = {id(step.optimizer): step for step in self.steps}  # a second fit may meet the same optimizers
        reason = why_not(trainer, pl_module, communicator, self)
        auto = self.scope == "auto" and bool(reason)  # joined, it costs no traffic of its own
        self.steps = [
            shared.get(id(o)) or ShardedStep(o, communicator, names, uncut, auto=auto) for o in trainer.optimizers
        ]
        self._leave()  # a fit that ended with an exception
        if not reason and (self.steps[0].choosing or not self.steps[0].sharing):  # an optimizer of an earlier fit
            reason = "another fit began to time this optimizer's steps, or found plain ones faster"
        if not reason:
            self._joined = Joined(self.steps[0], strategy.hier_state, names, trainer.precision_plugin)
        if trainer.is_global_zero:
            for step in self.steps:
                log.info("PTOCallback(scope=%r): %s", self.scope, step.describe())
            log.info(
                "PTOCallback: %s", f"not joined with the reduction: {reason}" if reason else "joined with the reduction"
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The reduction's groups may have settled."""
        if self._joined is not None:
            self._joined.before_batch()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """A round may have left gradients sharded."""
        if self._joined is not None:
            self._joined.after_backward()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """A loss scaler has looked at what this rank holds."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if self._joined is not None and scaler is not None:
            self._joined.share_found_inf(scaler)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Another fit may be without this callback."""
        self._leave()

    def _leave(self) -> None:
        if self._joined is not None:
            self._joined.end()
            self._joined = None

    def _shared_communicator(self, trainer: Any) -> HierCommunicator:
        """One for all optimizers and fits: groups are not free."""
        if self._communicator is None:
            timeout = getattr(trainer.strategy, "_timeout", None)
            topology = discover(node_rank=trainer.node_rank, local_rank=trainer.local_rank, timeout=timeout)
            self._communicator = communicator_of(topology, self.scope, timeout=timeout)
        return self._communicator
