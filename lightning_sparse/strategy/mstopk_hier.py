"""The strategy for Trainer, as a mixin that imports no Lightning: DDPStrategy with another reduction.

It overrides as little as it can, each for a reason; what Fabric needs too is in lightning_sparse.strategy.core:

====================== ===============================================================================================
method                 why
====================== ===============================================================================================
setup                  refuses what cannot work before anything is built
_setup_model           sets the size of buckets
_register_ddp_hooks    Lightning registers comm hooks on CUDA only; this one also runs on the CPU
setup_optimizers       watches the optimizers: a residual counts only when its gradient was stepped
on_train_start         sets the warm-up by the steps that Trainer expects
pre_backward           settles the last round, passes the epoch on, looks for optimizers that are not toggled
save/load/remove_...   residuals are stored beside the checkpoint
teardown               takes its hooks off the model
====================== ===============================================================================================

``lightning_sparse.flavours`` binds it to DDPStrategy of ``pytorch_lightning`` and of ``lightning.pytorch``.
"""

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.exchange.config import Density, ValueDtype
from lightning_sparse.exchange.paths import Exchange
from lightning_sparse.gradients import HierConfig, HierState
from lightning_sparse.gradients.config import Exclude
from lightning_sparse.gradients.schedule import DEFAULT_EPOCHS, DEFAULT_SHARE, Warmup
from lightning_sparse.messages import described
from lightning_sparse.strategy import side_files
from lightning_sparse.strategy.core import HierCore, prepare_ddp
from lightning_sparse.strategy.hosts import TrainerHost


class MSTopKHierMixin(HierCore, TrainerHost):
    """DDP whose gradients travel hierarchically, and between nodes only the largest of them.

    Args:
        density: share of each shard's entries that is sent between nodes, in (0, 1]; ``"auto"``: at least 0.01, and
            more where it hides behind backward.
        exchange: ``"sparse"``, ``"regional"``, ``"dense"``, ``"dense16"`` (dense, in 16 bits between nodes), or
            ``"auto"``: whichever but regional is faster on the networks as measured at start.
        value_dtype: how values are written into messages; rounding errors stay in the residual.
        warmup_epochs, warmup_steps: epochs or rounds over which the density falls to ``density``; with both, whichever
            is over first ends it. Default: the smaller of 4 epochs and 5 % of the steps that Trainer expects.
        dense_rounds: rounds at the start in which everything is sent.
        overlap: reduce buckets while backward goes on.
        inter_gbps: rate of a node's link in Gbit/s, for ``"auto"`` to go by instead of a measurement.
        momentum_correction: with torch.optim.SGD, keep its momentum with the residuals.
        exclude: parameters always reduced densely: ``"none"``, ``"vectors"`` (biases and norms), or a tuple of patterns
            of their names.
        node_name: the node that this process belongs to, by name, on every rank; default: the environment variable
            LIGHTNING_SPARSE_NODE, else the host (see lightning_sparse.topology).
        **kwargs: DDPStrategy's and DistributedDataParallel's own. ``gradient_as_bucket_view`` is True unless given,
            and on GPUs ``bucket_cap_mb`` grows with the devices of a node.

    Raises:
        ValueError: for a bad value, an unknown option, or one that cannot be combined with this strategy.
    """

    def __init__(
        self,
        density: Density = 0.01,
        exchange: Exchange = "auto",
        value_dtype: ValueDtype = "bfloat16",
        warmup_epochs: int | None = None,
        warmup_steps: int | None = None,
        dense_rounds: int = 0,
        overlap: bool = True,
        inter_gbps: float | None = None,
        momentum_correction: bool = False,
        exclude: Exclude = "none",
        node_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        config = HierConfig(
            density=density,
            exchange=exchange,
            value_dtype=value_dtype,
            warmup_epochs=warmup_epochs,
            warmup_steps=warmup_steps,
            dense_rounds=dense_rounds,
            overlap=overlap,
            inter_gbps=inter_gbps,
            momentum_correction=momentum_correction,
            exclude=exclude,
        )
        self._configure(config, node_name, kwargs)
        super().__init__(**kwargs)  # spelt plainly: LightningCLI reads it to know which options a YAML file may give
        self._resumes = False

    def __repr__(self) -> str:
        return described(type(self), f"density={self.config.density}")

    @property
    def hier_state(self) -> HierState | None:
        """Of the module that is trained; None before the first fit."""
        return self.hier_states[-1] if self.hier_states else None

    # -- life of a fit -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Refuse what cannot work, then let DDPStrategy set up."""
        prepare_ddp(self)
        if trainer.state.fn == "fit":
            _refuse_static_graph_with_accumulation(trainer, self._ddp_kwargs)
        else:
            # A checkpoint that was loaded for testing does not concern the next fit.
            self._saved, self._resumes = [], False
        super().setup(trainer)

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        """Wrap it, with buckets of a size that suits the exchange."""
        with self._sized_buckets(model):
            return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        state = self._attach(self.model, self.precision_plugin, fresh=self._resumes)
        self.hier_states, self._watched = [state], {state: self._watched[state]}
        self._take_up(state)

    def _take_up(self, state: HierState) -> None:
        """Go on where the checkpoint that was loaded left off."""
        if not self._restore(state, any_parameters=True) and self._resumes:
            state.forget()  # residuals belong to other weights
        self._saved, self._resumes = [], False

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the optimizers and watch them."""
        super().setup_optimizers(trainer)
        state = self.hier_state
        if state is None or not isinstance(self.model, DistributedDataParallel):
            return
        self._watch(self.optimizers)
        if not self._watched[state]:
            state.watch([])
        if not state.is_hierarchical:
            return
        idle = _idle(self.lightning_module, self.optimizers)
        if idle:
            state.log_once(idle, logging.WARNING)

    def on_train_start(self) -> None:
        """Set the length of the warm-up: by now data loaders exist, and loops are where they were saved."""
        super().on_train_start()
        state = self.hier_state
        if state is None or not state.is_hierarchical or not isinstance(self.model, DistributedDataParallel):
            return
        if state.warmup == Warmup():
            state.warmup = _default_warmup(self.lightning_module.trainer.estimated_stepping_batches)
        if self.config.exchange != "dense" and state.warmup.describe():
            state.log_once(state.warmup.describe())

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Before each backward: settle the last round, and set how the next one goes."""
        super().pre_backward(closure_loss)
        state = self.hier_state
        if state is not None and isinstance(self.model, DistributedDataParallel):
            state.epoch = self.lightning_module.current_epoch
            state.before_backward(_untoggled(self.lightning_module, self.optimizers))

    def teardown(self) -> None:
        """Take hooks off the model; the residuals stay for a second fit of the same module."""
        for state in self.hier_states:
            state.detach()
        super().teardown()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """The residuals of all ranks first, then the main file. No collective."""
        with self._saving(filepath, whole="optimizer_states" in checkpoint) as manifests:
            if manifests is not None:
                checkpoint[side_files.KEY] = manifests
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Mostly DDP does not exist yet: residuals are kept until it does. In the middle of a fit (the search for a
        learning rate returns to its start) they are restored at once."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._load(checkpoint, checkpoint_path)
        self._resumes = True
        if self.hier_state is not None and isinstance(self.model, DistributedDataParallel):
            self._take_up(self.hier_state)
        return checkpoint

    def remove_checkpoint(self, filepath: Any) -> None:
        """The main file and its residuals."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            side_files.remove_side_files(filepath)


def _default_warmup(steps: float) -> Warmup:
    """Where the user gives none.

    Args:
        steps: that Trainer expects; infinite or not positive where it cannot tell.
    """
    known = 0 < steps < math.inf
    return Warmup(DEFAULT_EPOCHS, math.ceil(DEFAULT_SHARE * steps) if known else None)


def _refuse_static_graph_with_accumulation(trainer: Any, ddp_kwargs: dict[str, Any]) -> None:
    if not ddp_kwargs.get("static_graph"):
        return
    schedules = [getattr(callback, "scheduling", None) for callback in trainer.callbacks]
    factor = max([trainer.accumulate_grad_batches, *(n for each in schedules if each for n in each.values())])
    if factor > 1:
        raise ValueError(
            f"static_graph=True with accumulate_grad_batches={factor}: DDP itself crashes on this pair, whatever the "
            f"hook (pytorch/pytorch#187732). Drop one of the two."
        )


def _untoggled(module: Any, optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Why residuals must wait: with several optimizers a backward that reaches the parameters of more than one leaves
    gradients that the user throws away, and a residual would bring them back later."""
    if module.automatic_optimization:
        return ""
    reached = sum(any(p.requires_grad for g in each.param_groups for p in g["params"]) for each in optimizers)
    if reached < 2:
        return ""
    return "a backward reaches the parameters of several optimizers; wrap it in toggle_optimizer() to send it sparsely"


def _idle(module: Any, optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """A warning about parameters in no optimizer, empty for none. Their gradients are never zeroed either: they grow,
    take places among the largest entries, and start from zero with a resume."""
    stepped = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    idle = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in stepped]
    if not stepped or not idle:
        return ""
    return (
        f"{len(idle)} parameter(s) require gradients and are in no optimizer ({', '.join(idle[:3])}): what is sent for "
        f"them is not sent for others. Freeze them with requires_grad_(False), or give them to an optimizer."
    )
