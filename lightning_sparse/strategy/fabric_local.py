"""The strategy of updates for Lightning Fabric, as a mixin that imports no Lightning.

fabric = Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="mstopk_local")
fabric.launch()
model, optimizer = fabric.setup(model, optimizer)
...
with fabric.strategy.shared_weights():      # all ranks, for validation
    validate(model)
fabric.strategy.finish()                    # at the end: what is pending is sent
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.strategy import side_files
from lightning_sparse.strategy.core import prepare_ddp
from lightning_sparse.strategy.fabric_core import LocalFabricCore
from lightning_sparse.strategy.local_core import detached, leave_gradients
from lightning_sparse.strategy.options import OWN_OF_UPDATES, REFUSED_BY_UPDATES, check_options
from lightning_sparse.updates import UpdatesConfig


class MSTopKLocalFabricMixin(LocalFabricCore):
    """DDP inside each node, with an optimizer of its own; between nodes travel the largest updates. For Fabric.

    Args:
        node_name: the node that this process belongs to, by name, on every rank (see lightning_sparse.topology).
        **kwargs: those of ``UpdatesConfig`` (``density``, ``step_ahead``, ...), of Fabric's DDPStrategy and of
            DistributedDataParallel. ``gradient_as_bucket_view`` is True unless given.

    Raises:
        ValueError: for a bad value, an unknown option, or one that cannot be combined with this strategy.
    """

    def __init__(self, node_name: str | None = None, **kwargs: Any) -> None:
        config = UpdatesConfig(**{name: kwargs.pop(name) for name in OWN_OF_UPDATES if name in kwargs})
        check_options(type(self), kwargs, OWN_OF_UPDATES, REFUSED_BY_UPDATES)
        self._configure(config, node_name)
        super().__init__(**kwargs)
        self._modules: list[nn.Module] = []

    # -- set-up --------------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module inside its node. A collective of the world."""
        prepare_ddp(self)
        self._node_group()
        ddp: DistributedDataParallel = super().setup_module(module)
        leave_gradients(ddp, self._discover({}))
        self._remember(module)
        return ddp

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Of the shared weights. All ranks call it."""
        with self.shared_weights():
            return detached(super().get_module_state_dict(module))

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Of this node's optimizer, on the first device of each node; all ranks call it."""
        updates = self._updates_of(optimizer)
        for node in updates.nodes if updates is not None else ():
            if node.optimizer is optimizer:
                return node.division.optimizer_state()
        return super().get_optimizer_state(optimizer)

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        """What each rank alone knows first, then the main file. All ranks call it, as ``fabric.save``. A dict without
        an optimizer is taken for weights alone."""
        optimizers = {name: each for name, each in state.items() if isinstance(each, Optimizer)}
        self._node_entries = {name: self.get_optimizer_state(each) for name, each in optimizers.items()}
        with self._saving(path, whole=bool(optimizers)) as manifests:
            if manifests is not None:
                state = {**state, side_files.KEY: manifests}
            super().save_checkpoint(path, state, storage_options, filter)
        self._node_entries = {}

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Modules and optimizers that are set up go on where this rank was saved; all of them are to be set up."""
        loaded = self._loaded_by(state)
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        manifests = rest.pop(side_files.KEY, []) if isinstance(rest, dict) else []
        self._load({side_files.KEY: manifests}, path)
        own = self._entries_of_node()
        for name, each in state.items() if isinstance(state, Mapping) else ():
            if isinstance(each, Optimizer) and name in own:
                each.load_state_dict(own[name])
        self._go_on(loaded)
        return rest
