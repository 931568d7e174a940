"""The strategies for Fabric, as mixins that import no Lightning: engines of the modules that were set up.

    fabric = Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="mstopk_local")
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    ...
    with fabric.strategy.global_weights():      # all ranks, for validation
        validate(model)
    fabric.strategy.finish()                    # at the end: sends all pending updates

Fabric has no epochs and no estimate of its steps, so ``"mstopk_hier"`` has no density warm-up by default here. Set
``warmup_steps``, or ``warmup_epochs`` and call ``set_epoch``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    "no density warm-up: sparse gradients learn slowly at first, or not at all. Give warmup_steps, such as 5% of the "
    "run, which a Trainer takes by itself; 0 to do without"
)


class FabricAdapter(Adapter, Host):
    """Fabric's methods, as calls of engines."""

    # -- training ------------------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, and tell the engine, whether or not a loss scaler skipped it."""
        engines = [engine for engine in self.engines if engine.tracks_optimizer(optimizer)]
        for engine in engines:
            engine.before_step(optimizer)
        output = super().optimizer_step(optimizer, **kwargs)
        for engine in engines:
            engine.step(optimizer)
        return output

    def finish(self) -> None:
        """Send everything that is pending: all ranks hold the same weights afterwards. Every rank calls it."""
        for engine in self.engines:
            engine.finish()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _saving(self, path: Any, state: Any) -> Iterator[Any]:
        """What each rank alone knows first, then the main file, with the state that is yielded. Weights without an
        optimizer, or the state of one, are taken for weights alone."""
        optimizers = {name: each for name, each in state.items() if isinstance(each, Optimizer)}
        engines = self._saved_engines() if has_optimizer(state) else []
        entries = self._rank_state(optimizers) if engines else {}  # a collective of the node
        with self._side_files.saving(path, engines, self._timeout, entries) as metadata_list:
            yield state if metadata_list is None else {**state, CHECKPOINT_KEY: metadata_list}

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        """What each rank alone knows first, then the main file. All ranks call it, as ``fabric.save``."""
        with self._saving(path, state) as whole:
            super().save_checkpoint(path, whole, storage_options, filter)

    def _load_main(self, path: Any, state: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the main file, and read what is beside it."""
        self._verify(path)
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        metadata_list = rest.pop(CHECKPOINT_KEY, []) if isinstance(rest, dict) else []
        self._side_files.load({CHECKPOINT_KEY: metadata_list}, self._main_path(path), self.global_rank)
        return rest


class ReplicasFabricAdapter(FabricAdapter):
    """Common part of the strategies that use DDP."""

    _late: LateGradients | None = None

    def _wrapped(self, ddp: DistributedDataParallel) -> None:
        """Note which gradients DDP averages."""
        self._late = self._new_late_gradients() if self._late is None else self._late
        self._late.add(ddp)

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Go backward, and average the gradients that DDP leaves out."""
        super().backward(tensor, module, *args, **kwargs)
        if self._late is not None:
            self._late.average(self._steppers())

    def _steppers(self) -> list[Optimizer]:
        """Return the optimizers of all modules that were set up."""
        raise NotImplementedError


def has_optimizer(entry: Any) -> bool:
    """Return whether an entry of a checkpoint contains an optimizer or the state of an optimizer."""
    if isinstance(entry, Mapping):
        return "param_groups" in entry or any(map(has_optimizer, entry.values()))
    return isinstance(entry, Optimizer) or (isinstance(entry, (list, tuple)) and any(map(has_optimizer, entry)))


class UpdatesFabricAdapter(FabricAdapter):
    """Creates an engine of updates for each optimizer, for any way to average gradients inside the node."""

    send: Send = "updates"
    _modules: list[nn.Module]  # that were set up

    def _register_module(self, module: nn.Module) -> None:
        self._modules = [each for each in self._modules if each is not module] + [module]

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Exchange its updates, if these are sent. Its module is set up before it. A collective of the world."""
        optimizer = super().setup_optimizer(optimizer)
        if self.send == "updates":
            self._exchange_updates(optimizer)
        return optimizer

    def _exchange_updates(self, optimizer: Optimizer) -> None:
        stepped = set(map(id, parameters_of(optimizer)))
        modules = [m for m in self._modules if any(id(p) in stepped for p in m.parameters())]
        if not modules:
            raise ValueError(
                f"{type(optimizer).__name__} steps parameters of no module that was set up: call fabric.setup_module() "
                f"of its module first, or fabric.setup(module, optimizer)."
            )
        self._drop(optimizer)
        module = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        engine = self._new_updates(module, [optimizer])
        self.engines.append(engine)
        if self._side_files.loaded:
            self._restore_engine(engine, self._side_files.loaded.pop(0))

    def _drop(self, optimizer: Optimizer) -> None:
        """Another set-up of its parameters takes the place of the one before, which sends what is pending."""
        stepped = set(map(id, parameters_of(optimizer)))
        for engine in list(self.engines):
            if any(id(p) in stepped for one in engine.optimizers for p in one.parameters):
                engine.finish()
                engine.detach([optimizer])
                self.engines.remove(engine)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Restore this rank's state of all modules and optimizers. Set all of them up before."""
        given = state.values() if isinstance(state, Mapping) else [state]
        filled = [p for each in given if isinstance(each, nn.Module) for p in each.parameters()]
        loaded = [engine for engine in self.engines if engine.owns_any(set(map(id, filled)))]
        for engine in loaded:
            engine.swap_in_global_weights()  # for parameters that the load does not change
        rest = self._load_main(path, state, *args, **kwargs)
        self._load_own_optimizers(state)
        for engine in self.engines:
            saved = self._side_files.loaded.pop(0) if self._side_files.loaded else None
            if not any(engine is each for each in loaded):
                continue  # it trains on
            engine.restart()
            if saved is not None:
                self._restore_engine(engine, saved)
        return rest

    def _load_own_optimizers(self, state: Any) -> None:
        """Optimizers whose state the main file has of node 0 alone."""
