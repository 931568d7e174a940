"""Common part of the strategies for Fabric, as mixins that import no Lightning.

    fabric = Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="mstopk_local")
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    ...
    with fabric.strategy.global_weights():      # all ranks, for validation
        validate(model)
    fabric.strategy.finish()                    # at the end: sends all pending updates

Fabric has no epochs and no estimate of its steps, so ``"mstopk_hier"`` has no density warm-up by default here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.checkpoint.side_files import CHECKPOINT_KEY
from lightning_sparse.sharding import parameters_of
from lightning_sparse.strategy.adapter import Adapter, Host
from lightning_sparse.strategy.late import LateGradients
from lightning_sparse.strategy.options import Send

NO_WARMUP = (
    "no density warm-up, so training may start slowly or not at all. Set warmup_steps, for example to 5% of the steps "
    "(a Trainer does this automatically), or to 0 for no warm-up"
)


class FabricAdapter(Adapter, Host):
    """Translates Fabric's methods into methods of engines."""

    # -- training ------------------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        engines = [engine for engine in self.engines if engine.tracks_optimizer(optimizer)]
        for engine in engines:
            engine.before_step(optimizer)
        output = super().optimizer_step(optimizer, **kwargs)
        # A loss scaler may have skipped the step on this rank. The engine's step is a collective, so it runs anyway.
        for engine in engines:
            engine.step(optimizer)
        return output

    def finish(self) -> None:
        """Send all pending updates; afterwards all ranks have equal weights. Every rank calls it."""
        for engine in self.engines:
            engine.finish()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _saving(self, path: Any, state: Any) -> Iterator[Any]:
        optimizers = {name: value for name, value in state.items() if isinstance(value, Optimizer)}
        # A state without an optimizer is saved as weights alone.
        engines = self._saved_engines() if has_optimizer(state) else []
        entries = self._rank_state(optimizers) if engines else {}  # a collective of the node
        with self._side_files.saving(path, engines, self._timeout, entries) as metadata_list:
            yield state if metadata_list is None else {**state, CHECKPOINT_KEY: metadata_list}

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        with self._saving(path, state) as whole:
            super().save_checkpoint(path, whole, storage_options, filter)

    def _load_main(self, path: Any, state: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._verify(path)
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        metadata_list = remainder.pop(CHECKPOINT_KEY, []) if isinstance(remainder, dict) else []
        self._side_files.load({CHECKPOINT_KEY: metadata_list}, self._main_path(path), self.global_rank)
        return remainder


class ReplicasFabricAdapter(FabricAdapter):
    """Common part of the strategies that use DDP."""

    _late: LateGradients | None = None

    def _wrapped(self, ddp: DistributedDataParallel) -> None:
        self._late = self._new_late_gradients() if self._late is None else self._late
        self._late.add(ddp)

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor, module, *args, **kwargs)
        if self._late is not None:
            self._late.average(self._steppers())

    def _steppers(self) -> list[Optimizer]:
        raise NotImplementedError


def has_optimizer(entry: Any) -> bool:
    """Return whether an entry of a checkpoint contains an optimizer or the state of an optimizer."""
    if isinstance(entry, Mapping):
        return "param_groups" in entry or any(map(has_optimizer, entry.values()))
    return isinstance(entry, Optimizer) or (isinstance(entry, (list, tuple)) and any(map(has_optimizer, entry)))


class UpdatesFabricAdapter(FabricAdapter):
    """Creates an engine of updates per optimizer, for DDP and for FSDP2."""

    send: Send = "updates"
    _modules: list[nn.Module]  # modules that were set up

    def _register_module(self, module: nn.Module) -> None:
        self._modules = [known_module for known_module in self._modules if known_module is not module] + [module]

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Exchange the optimizer's updates, after the set-up of its module. A collective of the world."""
        optimizer = super().setup_optimizer(optimizer)
        if self.send == "updates":
            self._exchange_updates(optimizer)
        return optimizer

    def _exchange_updates(self, optimizer: Optimizer) -> None:
        module = self._module_of([optimizer])
        self._drop(optimizer)
        engine = self._new_updates(module, [optimizer])
        self.engines.append(engine)
        if self._side_files.loaded:
            self._restore_engine(engine, self._side_files.loaded.pop(0))

    def _module_of(self, optimizers: Sequence[Optimizer]) -> nn.Module:
        """Return the module, or a list of the modules, that have parameters of these optimizers."""
        stepped = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
        modules = [m for m in self._modules if any(id(p) in stepped for p in m.parameters())]
        if not modules:
            raise ValueError(
                f"{type(optimizers[0]).__name__} has no parameters of a module that was set up. Call "
                f"fabric.setup_module() with its module first, or fabric.setup(module, optimizer)."
            )
        return modules[0] if len(modules) == 1 else nn.ModuleList(modules)

    def _drop(self, optimizer: Optimizer) -> None:
        stepped = set(map(id, parameters_of(optimizer)))
        for engine in list(self.engines):
            if any(id(p) in stepped for local_optimizer in engine.optimizers for p in local_optimizer.parameters):
                # An earlier engine of the same parameters first sends its pending updates.
                engine.finish()
                engine.release_optimizers([optimizer])
                self.engines.remove(engine)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Restore this rank's state of all modules and optimizers. Set all of them up before."""
        values = state.values() if isinstance(state, Mapping) else [state]
        filled = [p for value in values if isinstance(value, nn.Module) for p in value.parameters()]
        loaded = [engine for engine in self.engines if engine.owns_any(set(map(id, filled)))]
        for engine in loaded:
            engine.swap_in_global_weights()  # for parameters that the load does not change
        remainder = self._load_main(path, state, *args, **kwargs)
        # The main file has only the optimizer states of node 0.
        self._load_own_optimizers(state)
        for engine in self.engines:
            saved = self._side_files.loaded.pop(0) if self._side_files.loaded else None
            if not any(engine is loaded_engine for loaded_engine in loaded):
                continue  # its training continues
            engine.restart()
            if saved is not None:
                self._restore_engine(engine, saved)
        return remainder

    def _load_own_optimizers(self, state: Any) -> None:
        """Load the state of this node's optimizers."""
