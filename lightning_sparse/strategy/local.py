"""``mstopk_local``: each node runs its own optimizer inside DDP, and nodes exchange updates after the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.strategy.adapter import clone_state_dict
from lightning_sparse.strategy.fabric import ReplicasFabricAdapter, UpdatesFabricAdapter
from lightning_sparse.strategy.options import LOCAL, Kind, with_strategy_options
from lightning_sparse.strategy.trainer import ReplicasAdapter, refuse_static_graph_with_accumulation
from lightning_sparse.updates import LocalUpdates
from lightning_sparse.updates.optimizer_state import to_python


class MSTopKLocalMixin(ReplicasAdapter):
    """DDP inside each node. Each node has its own optimizer, and nodes exchange the largest updates.

    Args:
        node_name: Name of this process's node. If one rank has a name, all ranks need one. Default: the environment
            variable LIGHTNING_SPARSE_NODE, else the host.
        save_distributed_checkpoint: Save a checkpoint as a folder to which each rank writes its part, instead of one
            file. In both cases, each rank saves its optimizer state and pending updates.
        gradient_as_bucket_view: Let gradients be views of DDP's buckets, which saves a copy.
        **kwargs: options of `UpdatesConfig` (``density``, ``step_ahead``, ...), and DDPStrategy's and
            DistributedDataParallel's own.

    Raises:
        ValueError: for a bad value, an unknown option, or one that cannot be combined with this strategy.
    """

    _kind: ClassVar[Kind] = LOCAL
    _engine_class: ClassVar[type[LocalUpdates]] = LocalUpdates
    _inside_the_node = True

    @with_strategy_options(LOCAL)
    def __init__(
        self,
        *,
        node_name: str | None = None,
        save_distributed_checkpoint: bool = False,
        gradient_as_bucket_view: bool = True,
        **kwargs: Any,
    ) -> None:
        self._init_common(self._kind, node_name, kwargs, self._engine_class.kind)
        self._checkpoints_are_collective = self._save_distributed_checkpoint = save_distributed_checkpoint
        # LightningCLI reads this call to know which options a YAML file may give.
        super().__init__(gradient_as_bucket_view=gradient_as_bucket_view, **kwargs)

    def setup(self, trainer: Any) -> None:
        self._prepare_ddp()
        self._keep_hook_inside()
        if trainer.state.fn == "fit":
            refuse_static_graph_with_accumulation(trainer, self._ddp_kwargs)
        super().setup(trainer)
        if trainer.state.fn != "fit":
            self._side_files.loaded = []  # a checkpoint that was loaded for a test
            return
        for before in self.engines:
            before.release_optimizers(self.optimizers)
        self._disable_ddp_sync(self.model)
        self.engines[:] = [self._new_updates(self.lightning_module, self.optimizers)]
        self._restore(self.engines[0])
        self._show_to_hooks(trainer)

    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._fitting:
            # Lightning enables DDP's reduction again after the first batch of manual optimization.
            self._disable_ddp_sync(self.model)
        super().pre_backward(closure_loss)

    def _keep_hook_inside(self) -> None:
        # Without a group in their state, torch's communication hooks average over the world.
        group = self._ddp_kwargs.get("process_group")
        if self._ddp_comm_hook is None or group is None:
            return
        if self._ddp_comm_state is None:
            self._ddp_comm_state = group
        elif getattr(self._ddp_comm_state, "process_group", group) is None:
            self._ddp_comm_state.process_group = group

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        self._dumps_states = True
        inner = getattr(optimizer, "_optimizer", optimizer)  # unwrap a LightningOptimizer
        if self._save_distributed_checkpoint and self.engine is not None and self.engine.active:
            return {}  # each device saves its pieces
        state = self._optimizer_state(inner)
        return super().optimizer_state(optimizer) if state is None else state

    def _rank_state(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        # The main file has only the optimizer states of the first node.
        own = ("optimizer_states", type(self.precision_plugin).__qualname__)
        writes = self.topology.device_index == 0 and self.topology.node_index > 0
        return to_python({name: checkpoint[name] for name in own if name in checkpoint}) if writes else {}

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        # The optimizer states of this node replace node 0's states.
        checkpoint.update(self._side_files.entries(self.topology))
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        # A learning rate finder loads weights in a fit. They become the global weights.
        if self.engine is not None and self._fitting:
            self.engine.restart()
            self._restore(self.engine)
            self._show()


class MSTopKLocalFabricMixin(ReplicasFabricAdapter, UpdatesFabricAdapter):
    """``mstopk_local`` for Fabric. It takes the options of ``MSTopKLocalStrategy`` for a Trainer."""

    _kind: ClassVar[Kind] = LOCAL
    _engine_class: ClassVar[type[LocalUpdates]] = LocalUpdates
    _inside_the_node = True

    @with_strategy_options(LOCAL)
    def __init__(self, *, node_name: str | None = None, **kwargs: Any) -> None:
        self._init_common(self._kind, node_name, kwargs, self._engine_class.kind)
        super().__init__(**kwargs)
        self._modules = []

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module inside its node. A collective of the world."""
        self._prepare_ddp()
        ddp: DistributedDataParallel = super().setup_module(module)
        self._disable_ddp_sync(ddp)
        self._wrapped(ddp)
        self._register_module(module)
        return ddp

    def _steppers(self) -> list[Optimizer]:
        return [local_optimizer.optimizer for engine in self.engines for local_optimizer in engine.optimizers]

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the global weights. All ranks call it."""
        with self.global_weights():
            return clone_state_dict(super().get_module_state_dict(module))

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of this node's optimizer, on the first device of each node; all ranks call it."""
        state = self._optimizer_state(optimizer)
        return super().get_optimizer_state(optimizer) if state is None else state

    def _rank_state(self, optimizers: Mapping[str, Any]) -> dict[str, Any]:
        # Collecting the state is a collective of the node, so all devices take part.
        states = {name: self.get_optimizer_state(optimizer) for name, optimizer in optimizers.items()}
        return to_python(states) if self.topology.device_index == 0 and self.topology.node_index > 0 else {}

    def _load_own_optimizers(self, state: Any) -> None:
        own = self._side_files.entries(self.topology)
        for name, value in state.items() if isinstance(state, Mapping) else ():
            if isinstance(value, Optimizer) and name in own:
                value.load_state_dict(own[name])
