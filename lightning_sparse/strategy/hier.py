"""``mstopk_hier``: nodes exchange gradients before the optimizer step, in DDP's communication hook."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.gradients import HierConfig, HierState, hier_hook
from lightning_sparse.gradients.config import Warmup
from lightning_sparse.messages import log
from lightning_sparse.sharding import parameters_of
from lightning_sparse.strategy.adapter import Adapter
from lightning_sparse.strategy.fabric import NO_WARMUP, ReplicasFabricAdapter, has_optimizer
from lightning_sparse.strategy.options import HIER, loss_scale_of, with_strategy_options
from lightning_sparse.strategy.trainer import ReplicasAdapter, refuse_static_graph_with_accumulation
from lightning_sparse.topology import Topology


class GradientEngines:
    """The engines of modules that DDP wraps, and the optimizers that step the modules.

    Attributes:
        states: engines, in the order of set-up.
        known_optimizers: optimizers that were set up, even before their modules.
    """

    def __init__(self, config: HierConfig) -> None:
        self.states: list[HierState] = []
        self.optimizers_by_state: dict[HierState, list[Optimizer]] = {}
        self.known_optimizers: list[weakref.ref[Optimizer]] = []
        self._config = config

    def attach(
        self,
        ddp: DistributedDataParallel,
        topology: Topology,
        precision: Any,
        *,
        find_unused: bool,
        fresh: bool = False,
    ) -> HierState:
        """Register the hook for a module. A collective of the world.

        A module that is wrapped again keeps its residuals, unless ``fresh``.
        """
        module = ddp.module
        self._drop_unused(module, fresh)
        state = next((candidate for candidate in self.states if candidate.parameters.module is module), None)
        if state is None:
            state = HierState(module, self._config, topology, find_unused_parameters=find_unused)
            state.loss_scale = lambda: loss_scale_of(precision)
            self.states.append(state)
        elif find_unused:
            state.track_unused(module)
        self.optimizers_by_state[state] = []  # new optimizers replace earlier optimizers
        ddp.register_comm_hook(state, hier_hook)
        return state

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Watch more optimizers. An optimizer replaces another optimizer of the same parameters."""
        optimizers = list(optimizers)
        for state in self.states:
            own = [optimizer for optimizer in optimizers if state.parameters.are_stepped_by(optimizer)]
            if own:
                self.optimizers_by_state[state] = _drop_superseded(self.optimizers_by_state[state], own) + own
                state.watch(self.optimizers_by_state[state])

    def add_optimizer(self, optimizer: Optimizer) -> None:
        alive = [reference for reference in self.known_optimizers if reference() is not None]
        self.known_optimizers = [*alive, weakref.ref(optimizer)]
        self.watch([optimizer])

    def attach_known_optimizers(self) -> None:
        self.watch([optimizer for reference in self.known_optimizers if (optimizer := reference()) is not None])

    def keep_only(self, state: HierState) -> None:
        self.states[:], self.optimizers_by_state = [state], {state: self.optimizers_by_state[state]}

    def _drop_unused(self, module: nn.Module, fresh: bool) -> None:
        """Drop engines of deleted modules, and of the module being wrapped if its parameters have changed."""
        gc.collect()  # so that all ranks delete the same modules
        for state in list(self.states):
            replaced = state.parameters.module is module and not state.parameters.are_in(module)
            if replaced and not fresh:
                state.log_once(
                    "parameters were replaced since the last set-up: their residuals are lost", logging.WARNING
                )
            if replaced or state.parameters.module is None or (fresh and state.parameters.module is module):
                state.close()
                self.states.remove(state)
                stale = self.optimizers_by_state.pop(state)
                self.known_optimizers = [reference for reference in self.known_optimizers if reference() not in stale]


def _drop_superseded(known: list[Optimizer], new: list[Optimizer]) -> list[Optimizer]:
    ids = {id(parameter) for optimizer in new for parameter in parameters_of(optimizer)}
    return [optimizer for optimizer in known if ids.isdisjoint(map(id, parameters_of(optimizer)))]


class HierAdapter(Adapter):
    """Common part of ``mstopk_hier`` for Trainer and Fabric."""

    @property
    def _finds_unused(self) -> bool:
        return bool(self._ddp_kwargs.get("find_unused_parameters", False))

    def _shared_options(self) -> dict[str, Any]:
        return {"find_unused_parameters": self._finds_unused}


class MSTopKHierMixin(HierAdapter, ReplicasAdapter):
    """DDP that reduces gradients inside each node first; nodes exchange only the largest entries.

    Args:
        node_name: Name of this process's node. All ranks need one. Default: the environment variable
            LIGHTNING_SPARSE_NODE, else the host.
        save_distributed_checkpoint: Save a checkpoint as a folder to which each rank writes its part, instead of one
            file. A file can be read by any strategy; each rank writes its residual to one more file next to it.
        gradient_as_bucket_view: Let gradients be views of DDP's buckets, which saves a copy.
        **kwargs: options of `HierConfig` (``density``, ``exchange``, ...), and DDPStrategy's and
            DistributedDataParallel's own. On GPUs ``bucket_cap_mb`` grows with the number of devices per node.

    Raises:
        ValueError: for a bad value, an unknown option, or one that cannot be combined with this strategy.
    """

    @with_strategy_options(HIER)
    def __init__(
        self,
        *,
        node_name: str | None = None,
        save_distributed_checkpoint: bool = False,
        gradient_as_bucket_view: bool = True,
        **kwargs: Any,
    ) -> None:
        self._init_common(HIER, node_name, kwargs, HierState.kind)
        self._checkpoints_are_collective = self._save_distributed_checkpoint = save_distributed_checkpoint
        self._gradients = GradientEngines(self.config)
        self.engines = self._gradients.states
        # LightningCLI reads this call to know which options a YAML file may give.
        super().__init__(gradient_as_bucket_view=gradient_as_bucket_view, **kwargs)
        self._resumes = False

    def setup(self, trainer: Any) -> None:
        self._prepare_ddp()
        if trainer.state.fn == "fit":
            refuse_static_graph_with_accumulation(trainer, self._ddp_kwargs)
        else:
            # A checkpoint that was loaded for a test does not belong to the next fit.
            self._side_files.loaded, self._resumes = [], False
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        with self._sized_buckets(model):
            return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        # On the CPU too, where Lightning registers no hook.
        state = self._gradients.attach(
            self.model, self.topology, self.precision_plugin, find_unused=self._finds_unused, fresh=self._resumes
        )
        self._gradients.keep_only(state)
        self._resume(state)

    def _resume(self, state: HierState) -> None:
        if not self._restore(state) and self._resumes:
            state.restart()  # the residuals belong to other weights
        self._resumes = False

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        state: HierState | None = self.engine
        if state is None or not self._fitting:
            return
        # A residual counts only when its gradient is stepped.
        self._gradients.watch(self.optimizers)
        if not self._gradients.optimizers_by_state[state]:
            state.watch([])
        for warning in (
            _unoptimized_parameters_warning(self.lightning_module, self.optimizers),
            _local_buffers_warning(self.lightning_module),
        ):
            if warning and state.active:
                state.log_once(warning, logging.WARNING)

    def on_train_start(self) -> None:
        super().on_train_start()
        state: HierState | None = self.engine
        if state is None or not state.active or not self._fitting:
            return
        # The length of the default warm-up depends on the data loaders and the saved progress, which exist only now.
        if state.warmup == Warmup():
            state.warmup = Warmup.default(self.lightning_module.trainer.estimated_stepping_batches)
        if self.config.exchange != "dense" and state.warmup.describe():
            state.log_once(state.warmup.describe())

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        state: HierState | None = self.engine
        if state is not None and self._fitting:
            state.epoch = self.lightning_module.current_epoch
            state.before_backward(_reason_to_bypass(self.lightning_module, self.optimizers))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._resumes = True
        # The residuals wait in memory until DDP exists. A learning rate finder loads in a fit, so they are restored at
        # once.
        if self.engine is not None and self._fitting:
            self._resume(self.engine)
        return checkpoint


def _reason_to_bypass(module: Any, optimizers: Iterable[torch.optim.Optimizer]) -> str:
    if module.automatic_optimization:
        return ""
    # A backward pass that reaches the parameters of several optimizers leaves gradients that the user drops. A residual
    # would bring them back later.
    reached = sum(any(p.requires_grad for p in parameters_of(optimizer)) for optimizer in optimizers)
    if reached < 2:
        return ""
    return "a backward reaches the parameters of several optimizers; wrap it in toggle_optimizer() to send it sparsely"


def _local_buffers_warning(module: Any) -> str:
    if module.automatic_optimization or not any(b.is_floating_point() and b.numel() for b in module.buffers()):
        return ""
    return (
        "in manual optimization DDP does not broadcast buffers. So batch norm statistics differ between ranks, as with "
        "strategy='ddp', and checkpoints have the statistics of rank 0. Use SyncBatchNorm, or "
        "strategy='mstopk_local', which averages them."
    )


def _unoptimized_parameters_warning(module: Any, optimizers: Iterable[torch.optim.Optimizer]) -> str:
    stepped = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
    # These gradients are never zeroed, so they grow and take places among the largest entries.
    idle = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in stepped]
    if not stepped or not idle:
        return ""
    return (
        f"{len(idle)} parameter(s) require gradients but are in no optimizer ({', '.join(idle[:3])}): their gradients "
        f"use up the exchange. Freeze them with requires_grad_(False), or add them to an optimizer."
    )


class MSTopKHierFabricMixin(HierAdapter, ReplicasFabricAdapter):
    """``mstopk_hier`` for Fabric. It takes the options of ``MSTopKHierStrategy`` for a Trainer."""

    @with_strategy_options(HIER)
    def __init__(self, *, node_name: str | None = None, **kwargs: Any) -> None:
        self._init_common(HIER, node_name, kwargs, HierState.kind)
        self._gradients = GradientEngines(self.config)
        self.engines = self._gradients.states
        super().__init__(**kwargs)
        self._epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 0, for the density warm-up."""
        self._epoch = epoch
        for state in self.engines:
            state.epoch = epoch

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module in DDP with the communication hook. A collective of the world.

        A module that is set up again keeps its residuals.
        """
        self._prepare_ddp()
        with self._sized_buckets(module):
            ddp: DistributedDataParallel = super().setup_module(module)
        self._wrapped(ddp)
        old_engines = list(self.engines)
        state = self._gradients.attach(ddp, self.topology, self.precision, find_unused=self._finds_unused)
        if state not in old_engines:
            state.epoch = self._epoch
            if state.active and self.config.wants_warmup:
                state.log_once(NO_WARMUP, logging.WARNING)
            self._restore_first(state)
            self._gradients.attach_known_optimizers()
        return ddp

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Watch the optimizer, whose module may be set up before or after it.

        In a second set-up of both, set up the module first.
        """
        optimizer = super().setup_optimizer(optimizer)
        self._gradients.add_optimizer(optimizer)
        return optimizer

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        self._discard_unmatched_checkpoints()
        for state in self.engines:
            state.before_backward()
        super().backward(tensor, module, *args, **kwargs)

    def _steppers(self) -> list[Optimizer]:
        return [optimizer for state in self.engines for optimizer in self._gradients.optimizers_by_state[state]]

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint. Each module gets the first residuals that fit it, in the order of set-up.

        Modules that are not set up get their residuals at set-up.
        """
        waiting = self._side_files.loaded
        remainder = self._load_main(path, state, *args, **kwargs)
        # With weights alone, the residuals do not change.
        if state and not has_optimizer(state):  # the load has filled state
            self._side_files.loaded = waiting
            return remainder
        for engine in self.engines:
            self._restore_first(engine)
        return remainder

    def _restore_first(self, state: HierState) -> None:
        numels = state.parameters.numels
        checkpoint = next(
            (candidate for candidate in self._side_files.loaded if candidate.metadata["parameters"] == numels), None
        )
        if checkpoint is not None:
            self._side_files.loaded.remove(checkpoint)
            self._restore_engine(state, checkpoint)

    def _discard_unmatched_checkpoints(self) -> None:
        # Modules that are not set up before the first backward pass get no residuals. A checkpoint without stores has
        # none.
        left = [saved for saved in self._side_files.loaded if any(saved.metadata["stores"])]
        if left and self.is_global_zero:
            log.warning(
                "%d residual(s) of %s belong to modules with other parameters, and are lost",
                len(left),
                left[0].path,
            )
        self._side_files.loaded = []
