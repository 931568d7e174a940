"""What Fabric's strategies of updates do alike, whatever averages gradients inside the node; imports no Lightning."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_sparse.sharding import parameters_of
from lightning_sparse.strategy.hosts import FabricHost
from lightning_sparse.strategy.local_core import LocalCore
from lightning_sparse.updates import LocalUpdates


class LocalFabricCore(LocalCore, FabricHost):
    """Optimizers and their steps.

    Attributes:
        _modules: that were set up.
    """

    _modules: list[nn.Module]

    def _remember(self, module: nn.Module) -> None:
        self._modules = [each for each in self._modules if each is not module] + [module]

    def finish(self) -> None:
        """Send everything that is pending: all ranks hold the same weights afterwards. Every rank calls it."""
        for updates in self.local_updates:
            updates.finish()

    def _loaded_by(self, state: Any) -> list[LocalUpdates]:
        """Of the modules that a load is to fill: they hold the shared weights then, for what it leaves as it was."""
        given = state.values() if isinstance(state, Mapping) else [state]
        filled = {id(p) for each in given if isinstance(each, nn.Module) for p in each.parameters()}
        found = [each for each in self.local_updates if any(id(p) in filled for p in each.module.parameters())]
        for updates in found:
            updates.show_shared()
        return found

    def _go_on(self, loaded: list[LocalUpdates]) -> None:
        """After a load; the others train on."""
        for updates in self.local_updates:
            if any(updates is each for each in loaded):
                updates.restart()
                self._restore(updates)
            elif self._saved:
                self._saved.pop(0)

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
