"""The Lightning strategy, as a mixin that imports no Lightning: DDPStrategy with another reduction.

It overrides as little as it can, each for a reason:

====================== ===============================================================================================
method                 why
====================== ===============================================================================================
setup                  refuses what cannot work before anything is built
_register_ddp_hooks    Lightning registers comm hooks on CUDA only; this one also runs on the CPU
setup_optimizers       watches the optimizers: a residual counts only when its gradient was stepped
pre_backward           settles the last round, passes the epoch on, looks for optimizers that are not toggled
save/load/remove_...   residuals travel beside the checkpoint
teardown               takes its hooks off the model
====================== ===============================================================================================

``lightning_sparse.flavours`` binds it to DDPStrategy of ``pytorch_lightning`` and of ``lightning.pytorch``.
"""

import logging
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.messages import described, log, show_log_lines
from lightning_sparse.strategy import checkpoint as saving
from lightning_sparse.strategy.config import Density, Exchange, Exclude, HierConfig, ValueDtype
from lightning_sparse.strategy.hook import hier_hook
from lightning_sparse.strategy.options import check_options, loss_scale_of, with_defaults
from lightning_sparse.strategy.roll_call import RollCall
from lightning_sparse.strategy.state import HierState
from lightning_sparse.topology import Topology, discover

if TYPE_CHECKING:

    class _Host:
        """The part of Lightning's DDPStrategy that is relied upon."""

        model: Any
        lightning_module: Any
        optimizers: list[torch.optim.Optimizer]
        root_device: torch.device
        node_rank: int
        local_rank: int
        global_rank: int
        is_global_zero: bool
        world_size: int
        precision_plugin: Any
        _ddp_kwargs: dict[str, Any]
        _timeout: timedelta | None

        def __init__(self, **kwargs: Any) -> None: ...
        def setup(self, trainer: Any) -> None: ...
        def setup_optimizers(self, trainer: Any) -> None: ...
        def pre_backward(self, closure_loss: Tensor) -> None: ...
        def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None: ...
        def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any: ...
        def remove_checkpoint(self, filepath: Any) -> None: ...
        def teardown(self) -> None: ...
        def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel: ...
        def broadcast(self, obj: Any, src: int = 0) -> Any: ...
else:
    _Host = object


class MSTopKHierMixin(_Host):
    """DDP whose gradients travel hierarchically, and between nodes only the largest of them.

    Args:
        density: share of each shard's entries that is sent between nodes, in (0, 1]; ``"auto"``: at least 0.01, and
            more where it hides behind backward.
        exchange: ``"sparse"``, ``"regional"``, ``"dense"``, ``"dense16"`` (dense, in 16 bits between nodes), or
            ``"auto"``: whichever but regional is faster on the networks as measured at start.
        value_dtype: how values are written into messages; rounding errors stay in the residual.
        warmup_epochs: epochs over which the density falls to ``density``.
        dense_rounds: rounds at the start in which everything is sent.
        overlap: reduce buckets while backward goes on.
        inter_gbps: rate of a node's link in Gbit/s, for ``"auto"`` to go by instead of a measurement.
        momentum_correction: with torch.optim.SGD, keep its momentum with the residuals.
        exclude: parameters always reduced densely: ``"none"``, ``"vectors"`` (biases and norms), or a tuple of patterns
            of their names.
        **kwargs: DDPStrategy's and DistributedDataParallel's own. ``gradient_as_bucket_view`` is True unless given.

    Raises:
        ValueError: for a bad value, an unknown option, or one that cannot be joined with this strategy.
    """

    def __init__(
        self,
        density: Density = 0.01,
        exchange: Exchange = "auto",
        value_dtype: ValueDtype = "bfloat16",
        warmup_epochs: int = 4,
        dense_rounds: int = 0,
        overlap: bool = True,
        inter_gbps: float | None = None,
        momentum_correction: bool = False,
        exclude: Exclude = "none",
        **kwargs: Any,
    ) -> None:
        self.config = HierConfig(
            density=density,
            exchange=exchange,
            value_dtype=value_dtype,
            warmup_epochs=warmup_epochs,
            dense_rounds=dense_rounds,
            overlap=overlap,
            inter_gbps=inter_gbps,
            momentum_correction=momentum_correction,
            exclude=exclude,
        )
        check_options(type(self), kwargs)
        super().__init__(**kwargs)  # spelt plainly: LightningCLI reads it to know which options a YAML file may give
        self.hier_state: HierState | None = None
        self._topology: Topology | None = None
        self._run_id = ""
        self._saved: saving.Saved | None = None
        self._resumes = False

    def __repr__(self) -> str:
        return described(type(self), f"density={self.config.density}")

    # -- life of a fit -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Refuse what cannot work, then let DDPStrategy set up."""
        show_log_lines()  # here, since a spawned process did not make the strategy
        if trainer.state.fn == "fit":
            _refuse_static_graph_with_accumulation(trainer, self._ddp_kwargs)
        else:
            # A checkpoint that was loaded for testing says nothing about the next fit.
            self._saved, self._resumes = None, False
        super().setup(trainer)

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        self._ddp_kwargs = with_defaults(self._ddp_kwargs)
        return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        ddp = self.model
        assert isinstance(ddp, DistributedDataParallel)
        if self._topology is None:
            self._topology = discover(node_rank=self.node_rank, local_rank=self.local_rank, timeout=self._timeout)
            self._run_id = str(self.broadcast(saving.new_run_id()))
        find_unused = bool(self._ddp_kwargs.get("find_unused_parameters", False))
        state = self._state_to_go_on_with(ddp.module)
        if state is None:
            state = HierState(ddp.module, self.config, self._topology, find_unused_parameters=find_unused)
            state.say(self._topology.describe())
        elif find_unused:
            state.track_unused(ddp.module)
        state.loss_scale = lambda: loss_scale_of(self.precision_plugin)
        self.hier_state = state
        self._restore(state)
        ddp.register_comm_hook(state, hier_hook)

    def _state_to_go_on_with(self, module: torch.nn.Module) -> HierState | None:
        """The last fit's state, where this fit goes on from it: with the same parameters, and not from a checkpoint."""
        state = self.hier_state
        if state is None or self._resumes or not state.parameters.are_of(module):
            return None
        if not state.parameters.are_in(module):
            state.say("parameters were replaced since the last fit: what waited in residuals is lost", logging.WARNING)
            return None
        return state

    def _restore(self, state: HierState) -> None:
        if self._saved is not None:
            saving.restore(self._saved, state, self.root_device)
        elif self._resumes:
            state.forget()  # what waits is of other weights
        self._saved, self._resumes = None, False

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the optimizers and watch them."""
        super().setup_optimizers(trainer)
        if self.hier_state is not None:
            self.hier_state.watch(self.optimizers)
            idle = _idle(self.lightning_module, self.optimizers)
            if idle and self.hier_state.topology.kind == "hierarchical":
                self.hier_state.say(idle, logging.WARNING)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Before each backward: settle the last round, and say how the next one goes."""
        super().pre_backward(closure_loss)
        if self.hier_state is not None and isinstance(self.model, DistributedDataParallel):
            self.hier_state.epoch = self.lightning_module.current_epoch
            self.hier_state.before_backward(_untoggled(self.lightning_module, self.optimizers))

    def teardown(self) -> None:
        """Take hooks off the model; the residuals stay for a second fit of the same module."""
        if self.hier_state is not None:
            self.hier_state.detach()
        super().teardown()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """The residuals of all ranks first, then the main file; then those of earlier saves go. No collective."""
        if self.hier_state is None or "optimizer_states" not in checkpoint:  # weights only
            super().save_checkpoint(checkpoint, filepath, storage_options)
            if self.is_global_zero:
                saving.remove_side_files(os.fspath(filepath))  # of a full save that had this name
            return
        manifest = saving.manifest_of(self.hier_state, self._run_id)
        checkpoint[saving.KEY] = manifest
        saving.save_side_file(self.hier_state, manifest["save_id"], os.fspath(filepath))
        self._call_the_roll(manifest["save_id"], os.fspath(filepath))
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero:
            saving.remove_side_files(os.fspath(filepath), but=[manifest["save_id"]])

    def _call_the_roll(self, save_id: str, path: str) -> None:
        """On rank 0, wait for the side files of all ranks.

        Raises:
            RuntimeError: when some are not there in time and the main file would replace a checkpoint that is whole.
        """
        roll = RollCall(f"lightning_sparse/{save_id}/{path}", self.world_size)
        roll.report(self.global_rank)
        missing = roll.absent(self._timeout) if self.is_global_zero else []
        if not missing:
            return
        said = f"rank(s) {', '.join(map(str, missing))} did not write their residuals of {path} in time"
        if saving.exists(path):
            raise RuntimeError(f"{said}: the checkpoint of that name stays as it was. Look for what stopped them.")
        log.warning("%s: it is saved without them, and what waited there is lost on resume", said)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Mostly DDP does not exist yet: what was saved is kept until it does. In the middle of a fit (the search for a
        learning rate goes back to where it began) it counts at once."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._saved = saving.load(checkpoint, os.fspath(checkpoint_path), self.global_rank)
        self._resumes = True
        if self.hier_state is not None and isinstance(self.model, DistributedDataParallel):
            self._restore(self.hier_state)
        return checkpoint

    def remove_checkpoint(self, filepath: Any) -> None:
        """The main file and its residuals."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            saving.remove_side_files(os.fspath(filepath))


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
    """What is wrong with parameters that no optimizer steps: nobody zeroes their gradients either, so these grow, come
    to be among the largest entries, and begin anew with a resume. Empty for none."""
    stepped = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    idle = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in stepped]
    if not stepped or not idle:
        return ""
    return (
        f"{len(idle)} parameter(s) require gradients and are in no optimizer ({', '.join(idle[:3])}): what is sent for "
        f"them is not sent for others. Freeze them with requires_grad_(False), or give them to an optimizer."
    )
