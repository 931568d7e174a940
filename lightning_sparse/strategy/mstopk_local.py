"""The strategy of updates for Trainer, as a mixin that imports no Lightning.

DDP averages gradients inside each node. This overrides as little as it can, each for a reason; what Fabric needs too is
in lightning_sparse.strategy.local_core:

============================ =========================================================================================
method                       why
============================ =========================================================================================
setup                        DistributedDataParallel gets the node's group; the optimizers' updates are exchanged
optimizer_step, ...          in lightning_sparse.strategy.local_trainer
lightning_module_state_dict  of the shared weights
save/load/remove_...         what a rank alone knows is stored beside the checkpoint
load_model_state_dict        in the middle of a fit (the search for a learning rate) the node's model begins there
============================ =========================================================================================

``lightning_sparse.flavours`` binds it to DDPStrategy of ``pytorch_lightning`` and of ``lightning.pytorch``.
"""

from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.exchange.config import Density, ValueDtype
from lightning_sparse.exchange.paths import Exchange
from lightning_sparse.messages import described
from lightning_sparse.strategy import side_files
from lightning_sparse.strategy.core import prepare_ddp
from lightning_sparse.strategy.local_core import detached, leave_gradients
from lightning_sparse.strategy.local_trainer import LocalTrainerMixin
from lightning_sparse.strategy.options import OWN_OF_UPDATES, REFUSED_BY_UPDATES, check_options
from lightning_sparse.updates import UpdatesConfig
from lightning_sparse.updates.config import StepAhead


class MSTopKLocalMixin(LocalTrainerMixin):
    """DDP inside each node, with an optimizer of its own; between nodes travel the largest updates.

    Args:
        density: share of each device's updates that is sent between nodes, in (0, 1]; ``"auto"``: at least 0.01, and
            more where that hides behind the next step.
        exchange: ``"sparse"``, ``"regional"``, ``"dense16"`` or ``"dense"``.
        value_dtype: how values are written into messages; rounding errors stay pending.
        step_ahead: share of its own pending updates that a node's model keeps, from 0.001 to 1; ``"auto"``: 1 on
            two nodes, on more as much as they agree, which is measured now and then.
        delay: 1: a message arrives one step later, and the exchange hides behind the whole step; 0: the step waits.
        sync_every: steps between two exchanges.
        shard_optimizer: each device of a node steps its slice of the parameters, where the optimizer allows it.
        overlap: run the exchange beside the next step, with ``delay=1``.
        node_name: the node that this process belongs to, by name, on every rank; default: the environment variable
            LIGHTNING_SPARSE_NODE, else the host (see lightning_sparse.topology).
        **kwargs: DDPStrategy's and DistributedDataParallel's own. ``gradient_as_bucket_view`` is True unless given.

    Raises:
        ValueError: for a bad value, an unknown option, or one that cannot be combined with this strategy.
    """

    def __init__(
        self,
        density: Density = 0.01,
        exchange: Exchange = "sparse",
        value_dtype: ValueDtype = "bfloat16",
        step_ahead: StepAhead = "auto",
        delay: int = 1,
        sync_every: int = 1,
        shard_optimizer: bool = True,
        overlap: bool = True,
        node_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        config = UpdatesConfig(
            density=density,
            exchange=exchange,
            value_dtype=value_dtype,
            step_ahead=step_ahead,
            delay=delay,
            sync_every=sync_every,
            shard_optimizer=shard_optimizer,
            overlap=overlap,
        )
        check_options(type(self), kwargs, OWN_OF_UPDATES, REFUSED_BY_UPDATES)
        self._configure(config, node_name)
        super().__init__(**kwargs)  # spelt plainly: LightningCLI reads it to know which options a YAML file may give

    def __repr__(self) -> str:
        return described(type(self), f"density={self.config.density}")

    # -- life of a fit -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Let DDPStrategy set up inside the node, then begin to exchange updates."""
        prepare_ddp(self)
        self._node_group()
        self._keep_hook_inside()
        super().setup(trainer)
        if trainer.state.fn != "fit":
            self._saved = []  # a checkpoint that was loaded for testing does not concern the next fit
            return
        for before in self.local_updates:
            before.detach(self.optimizers)
        self.local_updates = []
        leave_gradients(self.model, self._discover({}))
        self._restore(self._attach(self.lightning_module, self.optimizers))
        self._look_at_callbacks(trainer)

    @property
    def _fitting(self) -> bool:
        return isinstance(self.model, DistributedDataParallel)

    def _keep_hook_inside(self) -> None:
        """Torch's communication hooks average over the world unless their state names a group."""
        group = self._ddp_kwargs.get("process_group")
        if self._ddp_comm_hook is None or group is None:
            return
        if self._ddp_comm_state is None:
            self._ddp_comm_state = group
        elif getattr(self._ddp_comm_state, "process_group", group) is None:
            self._ddp_comm_state.process_group = group

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Of the shared weights. In a fit all ranks call it."""
        if self.updates is None or not self._fitting:
            return super().lightning_module_state_dict()
        with self.updates.shared_weights():
            return detached(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Of this node's optimizer, on the first device of each node; all ranks call it."""
        inner = getattr(optimizer, "_optimizer", optimizer)  # of a LightningOptimizer
        for node in self.updates.nodes if self.updates is not None else ():
            if node.optimizer is inner:
                return node.division.optimizer_state()
        return super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """What each rank alone knows first, then the main file."""
        own = ("optimizer_states", type(self.precision_plugin).__qualname__)
        self._node_entries = {name: checkpoint[name] for name in own if name in checkpoint}
        with self._saving(filepath, whole="optimizer_states" in checkpoint) as manifests:
            if manifests is not None:
                checkpoint[side_files.KEY] = manifests
            super().save_checkpoint(checkpoint, filepath, storage_options)
        self._node_entries = {}

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The main file, with the optimizer states of this node in the place of node 0's."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._load(checkpoint, checkpoint_path)
        checkpoint.update(self._entries_of_node())
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Weights loaded in the middle of a fit are the shared ones from then on."""
        super().load_model_state_dict(checkpoint, strict)
        if self.updates is not None and self._fitting:
            self.updates.restart()
            self._restore(self.updates)
