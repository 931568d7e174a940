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
from lightning_sparse.strategy.hosts import FabricHost
from lightning_sparse.strategy.local_core import LocalCore, detached, leave_gradients
from lightning_sparse.strategy.options import OWN_OF_UPDATES, REFUSED_BY_UPDATES, check_options
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from lightning_sparse.updates.division import parameters_of


class MSTopKLocalFabricMixin(LocalCore, FabricHost):
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

    def finish(self) -> None:
        """Send everything that is pending: all ranks hold the same weights afterwards. Every rank calls it."""
        for updates in self.local_updates:
            updates.finish()

    # -- set-up --------------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module inside its node. A collective of the world."""
        prepare_ddp(self)
        self._node_group()
        ddp = super().setup_module(module)
        leave_gradients(ddp, self._discover({}))
        self._modules = [each for each in self._modules if each is not module] + [module]
        return ddp

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Exchange its updates. Its module is set up before it. A collective of the world."""
        optimizer = super().setup_optimizer(optimizer)
        stepped = set(map(id, parameters_of(optimizer)))
        modules = [m for m in self._modules if any(id(p) in stepped for p in m.parameters())]
        if not modules:
            raise ValueError(
                f"{type(optimizer).__name__} steps parameters of no module that was set up: call fabric.setup_module() "
                f"of its module first, or fabric.setup(module, optimizer)."
            )
        self._drop(optimizer)
        module = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        self._restore(self._attach(module, [optimizer]))
        return optimizer

    def _drop(self, optimizer: Optimizer) -> None:
        """Another set-up of its parameters takes the place of the one before, which sends what is pending."""
        stepped = set(map(id, parameters_of(optimizer)))
        for updates in list(self.local_updates):
            if any(id(p) in stepped for node in updates.nodes for p in node.parameters):
                updates.finish()
                updates.detach([optimizer])
                self.local_updates.remove(updates)

    def _updates_of(self, optimizer: Any) -> LocalUpdates | None:
        return next(
            (each for each in self.local_updates for node in each.nodes if node.optimizer is optimizer),
            None,
        )

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, and exchange what that did, whether or not a loss scaler skipped it."""
        updates = self._updates_of(optimizer)
        if updates is None:
            return super().optimizer_step(optimizer, **kwargs)
        updates.before_step(optimizer)
        output = super().optimizer_step(optimizer, **kwargs)
        updates.step(optimizer)
        return output

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
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        manifests = rest.pop(side_files.KEY, []) if isinstance(rest, dict) else []
        self._load({side_files.KEY: manifests}, path)
        own = self._entries_of_node()
        for name, each in state.items() if isinstance(state, Mapping) else ():
            if isinstance(each, Optimizer) and name in own:
                each.load_state_dict(own[name])
        for updates in self.local_updates:
            updates.restart()
            self._restore(updates)
        return rest
