"""The strategies for Fabric, as mixins that import no Lightning: engines of the modules that were set up.

    fabric = Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="mstopk_local")
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    ...
    with fabric.strategy.shared_weights():      # all ranks, for validation
        validate(model)
    fabric.strategy.finish()                    # at the end: what is pending is sent

Fabric has no epochs and no estimate of its steps, so ``"mstopk_hier"`` has no density warm-up by default here. Set
``warmup_steps``, or ``warmup_epochs`` and call ``set_epoch``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.checkpoint.side_files import KEY
from lightning_sparse.elastic.sampling import dealt_by
from lightning_sparse.elastic.snapshots import is_safe
from lightning_sparse.elastic.updates import ElasticConfig, ElasticUpdates, Version
from lightning_sparse.fsdp import ShardedGradients, mesh_of, options_for, shard
from lightning_sparse.gradients import HierConfig, HierState
from lightning_sparse.messages import log, said_if_long
from lightning_sparse.sharding import parameters_of
from lightning_sparse.strategy.adapter import (
    ELASTIC_KEY,
    Adapter,
    ElasticAdapter,
    GradientEngines,
    ShardsAdapter,
    detached,
)
from lightning_sparse.strategy.late import LateGradients
from lightning_sparse.strategy.options import (
    OWN,
    OWN_OF_ELASTIC,
    OWN_OF_FSDP,
    OWN_OF_UPDATES,
    REFUSED_BY_ELASTIC,
    REFUSED_BY_UPDATES,
    Send,
    ShardsConfig,
    check_options,
    take,
    with_options_of,
)
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from lightning_sparse.updates.optimizer_state import plain

if TYPE_CHECKING:

    class Host:
        """The part of Fabric's strategies that is relied upon; flavours bring the class itself."""

        precision: Any
        _save_distributed_checkpoint: bool

        def __init__(self, **kwargs: Any) -> None: ...
        def setup_environment(self) -> None: ...
        def process_dataloader(self, dataloader: Any) -> Any: ...
        def broadcast(self, obj: Any, src: int = 0) -> Any: ...
        def setup_module(self, module: nn.Module) -> Any: ...
        def setup_optimizer(self, optimizer: Any) -> Any: ...
        def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None: ...
        def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None: ...
        def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]: ...
        def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any: ...
        def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]: ...
        def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]: ...

else:
    Host = object

NO_WARMUP = (
    "no density warm-up: sparse gradients learn slowly at first, or not at all. Give warmup_steps, say 5 % of the run, "
    "which a Trainer takes by itself; 0 to do without"
)
Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module]


class FabricAdapter(Adapter, Host):
    """Fabric's methods, as calls of engines."""

    # -- training ------------------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, and tell the engine, whether or not a loss scaler skipped it."""
        engines = [engine for engine in self.engines if engine.follows(optimizer)]
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
        engines = self._saved_engines() if _has_optimizer(state) else []
        entries = self._own_entries(optimizers) if engines else {}  # a collective of the node
        with self._saves.saving(path, engines, self._timeout, entries) as manifests:
            yield state if manifests is None else {**state, KEY: manifests}

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        """What each rank alone knows first, then the main file. All ranks call it, as ``fabric.save``."""
        with self._saving(path, state) as whole:
            super().save_checkpoint(path, whole, storage_options, filter)

    def _load_main(self, path: Any, state: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the main file, and read what is beside it."""
        self._verify(path)
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        manifests = rest.pop(KEY, []) if isinstance(rest, dict) else []
        self._saves.load({KEY: manifests}, self._main_path(path), self.global_rank)
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


# -- gradients ---------------------------------------------------------------------------------------------------------


class MSTopKHierFabricMixin(ReplicasFabricAdapter):
    """DDP whose gradients travel hierarchically, and between nodes only the largest of them, for Fabric.

    Args:
        node_name: the node that this process belongs to, by name, on every rank (see lightning_sparse.topology).
        **kwargs: options of `HierConfig` (``density``, ``exchange``, ...), of Fabric's DDPStrategy and of
            DistributedDataParallel. ``gradient_as_bucket_view`` is True unless given, and on GPUs
            ``bucket_cap_mb`` grows with the devices of a node.

    Raises:
        ValueError: for a bad value, an unknown option, or one that cannot be combined with this strategy.
    """

    @with_options_of(HierConfig, OWN)
    def __init__(self, *, node_name: str | None = None, **kwargs: Any) -> None:
        config = take(HierConfig, OWN, kwargs)
        check_options(type(self), kwargs)
        self._begin(config, node_name, HierState.kind)
        self._gradients = GradientEngines(config)
        self.engines = self._gradients.states
        super().__init__(**kwargs)
        self._epoch = 0

    def _shared_options(self) -> dict[str, Any]:
        return {"find_unused_parameters": bool(self._ddp_kwargs.get("find_unused_parameters", False))}

    def set_epoch(self, epoch: int) -> None:
        """Tell the density warm-up which epoch begins, counted from 0."""
        self._epoch = epoch
        for state in self.engines:
            state.epoch = epoch

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module, and reduce its gradients our way. A module that is set up again goes on with its residuals;
        those of modules that are gone are dropped. A collective of the world."""
        self._prepare_ddp()
        with self._sized_buckets(module):
            ddp: DistributedDataParallel = super().setup_module(module)
        self._wrapped(ddp)
        known, unused = list(self.engines), self._shared_options()["find_unused_parameters"]
        state = self._gradients.attach(ddp, self._place, self.precision, find_unused=unused)
        if state not in known:
            state.epoch = self._epoch
            if state.active and self.config.wants_warmup:
                state.log_once(NO_WARMUP, logging.WARNING)
            self._restore_first(state)
            self._gradients.watch_seen()
        return ddp

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Watch whose parameters it steps: their residuals count. Its module may be set up before or after it; where
        both are set up a second time, the module comes first."""
        optimizer = super().setup_optimizer(optimizer)
        self._gradients.watch_also(optimizer)
        return optimizer

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Settle the last round, then go backward."""
        self._drop_what_fits_no_module()
        for state in self.engines:
            state.before_backward()
        super().backward(tensor, module, *args, **kwargs)

    def _steppers(self) -> list[Optimizer]:
        return [each for state in self.engines for each in self._gradients.watched[state]]

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Modules that are set up get their residuals back now, others when they are, before the next backward pass:
        each the first that fits it, in the order of set-up. Weights loaded without an optimizer leave residuals
        alone."""
        waiting = self._saves.loaded
        rest = self._load_main(path, state, *args, **kwargs)
        if state and not _has_optimizer(state):  # what was loaded is in it by now
            self._saves.loaded = waiting
            return rest
        for each in self.engines:
            self._restore_first(each)
        return rest

    def _restore_first(self, state: HierState) -> None:
        """Give a state the first of the loaded residuals that fits its parameters."""
        numels = state.parameters.numels
        found = next((each for each in self._saves.loaded if each.manifest["parameters"] == numels), None)
        if found is not None:
            self._saves.loaded.remove(found)
            self._go_on(state, found)

    def _drop_what_fits_no_module(self) -> None:
        """Modules that are to be restored are set up before the first backward pass."""
        left = [each for each in self._saves.loaded if any(each.manifest["stores"])]  # in the others nothing waited
        if left and self.is_global_zero:
            log.warning(
                "%d residual(s) of %s were saved for modules with other parameters than those set up: they are lost",
                len(left),
                left[0].path,
            )
        self._saves.loaded = []


def _has_optimizer(entry: Any) -> bool:
    """Whether there is an optimizer, or the state of one, in what is saved or loaded."""
    if isinstance(entry, Mapping):
        return "param_groups" in entry or any(map(_has_optimizer, entry.values()))
    return isinstance(entry, Optimizer) or (isinstance(entry, (list, tuple)) and any(map(_has_optimizer, entry)))


# -- updates -----------------------------------------------------------------------------------------------------------


class UpdatesFabricAdapter(FabricAdapter):
    """An engine of updates for each optimizer, whatever averages gradients inside the node."""

    send: Send = "updates"
    _modules: list[nn.Module]  # that were set up

    def _remember(self, module: nn.Module) -> None:
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
        if self._saves.loaded:
            self._go_on(engine, self._saves.loaded.pop(0))

    def _drop(self, optimizer: Optimizer) -> None:
        """Another set-up of its parameters takes the place of the one before, which sends what is pending."""
        stepped = set(map(id, parameters_of(optimizer)))
        for engine in list(self.engines):
            if any(id(p) in stepped for one in engine.optimizers for p in one.parameters):
                engine.finish()
                engine.detach([optimizer])
                self.engines.remove(engine)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Modules and optimizers that are set up go on where this rank was saved; all of them are to be set up."""
        given = state.values() if isinstance(state, Mapping) else [state]
        filled = [p for each in given if isinstance(each, nn.Module) for p in each.parameters()]
        loaded = [engine for engine in self.engines if engine.holds(set(map(id, filled)))]
        for engine in loaded:
            engine.show_shared()  # for what the load leaves as it was
        rest = self._load_main(path, state, *args, **kwargs)
        self._load_own_optimizers(state)
        for engine in self.engines:
            saved = self._saves.loaded.pop(0) if self._saves.loaded else None
            if not any(engine is each for each in loaded):
                continue  # it trains on
            engine.restart()
            if saved is not None:
                self._go_on(engine, saved)
        return rest

    def _load_own_optimizers(self, state: Any) -> None:
        """Optimizers whose state the main file has of node 0 alone."""


class MSTopKLocalFabricMixin(ReplicasFabricAdapter, UpdatesFabricAdapter):
    """DDP inside each node, with an optimizer of its own; between nodes travel the largest updates. For Fabric.

    Args:
        node_name: the node that this process belongs to, by name, on every rank (see lightning_sparse.topology).
        **kwargs: options of `UpdatesConfig` (``density``, ``step_ahead``, ...), of Fabric's DDPStrategy and of
            DistributedDataParallel. ``gradient_as_bucket_view`` is True unless given.

    Raises:
        ValueError: for a bad value, an unknown option, or one that cannot be combined with this strategy.
    """

    _engine: ClassVar[type[LocalUpdates]] = LocalUpdates
    _config: ClassVar[type[UpdatesConfig]] = UpdatesConfig
    _own: ClassVar[tuple[str, ...]] = OWN_OF_UPDATES
    _refused: ClassVar[Mapping[str, str]] = REFUSED_BY_UPDATES
    _inside_the_node = True

    @with_options_of(UpdatesConfig, OWN_OF_UPDATES)
    def __init__(self, *, node_name: str | None = None, **kwargs: Any) -> None:
        config = take(self._config, self._own, kwargs)
        check_options(type(self), kwargs, self._own, self._refused)
        self._begin(config, node_name, self._engine.kind)
        super().__init__(**kwargs)
        self._modules = []

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module inside its node. A collective of the world."""
        self._prepare_ddp()
        ddp: DistributedDataParallel = super().setup_module(module)
        self._leave_gradients(ddp)
        self._wrapped(ddp)
        self._remember(module)
        return ddp

    def _steppers(self) -> list[Optimizer]:
        return [one.optimizer for engine in self.engines for one in engine.optimizers]

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the global weights. All ranks call it."""
        with self.shared_weights():
            return detached(super().get_module_state_dict(module))

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of this node's optimizer, on the first device of each node; all ranks call it."""
        state = self._optimizer_state(optimizer)
        return super().get_optimizer_state(optimizer) if state is None else state

    def _own_entries(self, optimizers: Mapping[str, Any]) -> dict[str, Any]:
        """Each node has optimizer states of its own; the main file has those of the first."""
        states = {name: self.get_optimizer_state(each) for name, each in optimizers.items()}
        return plain(states) if self._place.device_index == 0 and self._place.node_index > 0 else {}

    def _load_own_optimizers(self, state: Any) -> None:
        own = self._saves.entries(self._place)
        for name, each in state.items() if isinstance(state, Mapping) else ():
            if isinstance(each, Optimizer) and name in own:
                each.load_state_dict(own[name])


# -- nodes that come and go --------------------------------------------------------------------------------------------


class MSTopKElasticFabricMixin(ElasticAdapter, MSTopKLocalFabricMixin):
    """Updates between nodes that come and go, each a run of its own (``num_nodes=1``, DDP inside); torchft's lighthouse
    says which of them there are. For Fabric.

    A node joins when its optimizer is set up: then it has the weights, buffers and optimizer state of the others, and
    by ``share`` their progress. Load a checkpoint between ``fabric.setup_module`` and ``fabric.setup_optimizers``.

    Args:
        node_name: the name of this node in the log; default: its host.
        **kwargs: options of `ElasticConfig` (``lighthouse``, ``min_nodes``, ``timeout``, ``density``, ...), of Fabric's
            DDPStrategy and of DistributedDataParallel. ``gradient_as_bucket_view`` is True unless given.

    Raises:
        ValueError: for a bad value, an unknown option, or one that cannot be combined with this strategy.
    """

    _engine, _config, _own, _refused = ElasticUpdates, ElasticConfig, OWN_OF_ELASTIC, REFUSED_BY_ELASTIC

    @with_options_of(ElasticConfig, OWN_OF_ELASTIC)
    def __init__(self, *, node_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(node_name=node_name, **kwargs)
        self._progress: MutableMapping[str, Any] | None = None

    def setup_environment(self) -> None:
        """Find the node's devices, also for loaders that are set up before the node joins the others."""
        super().setup_environment()
        _ = self._place

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Join the other nodes; its module is set up before. Every device of the node calls it.

        Raises:
            ValueError: for a second one.
        """
        if self.engines:
            raise ValueError(
                f"{type(optimizer).__name__} is set up after another optimizer: one is exchanged between nodes that "
                f"come and go. Give it all parameters, or use strategy='mstopk_local'."
            )
        return super().setup_optimizer(optimizer)

    def share(self, state: MutableMapping[str, Any]) -> None:
        """Give nodes that join the progress of this one, and take that of the others if this one has joined them.

        Args:
            state: plain values and tensors, which are replaced in it, and objects with ``state_dict``, such as
                schedulers; modules and optimizers in it are left out. Keep it up to date.

        Raises:
            ValueError: before the optimizer is set up, for other than a dict, for values of a type that nodes do not
                accept from one another, or if the others share something else.
        """
        elastic = self._found()
        if not isinstance(state, MutableMapping):
            raise ValueError(f"share({state!r}): give a dict of what nodes that join are to have, by name.")
        self._progress = state
        for name, value in plain(self._told()).items():
            if not is_safe(value):
                raise ValueError(
                    f"share() of {name}={value!r}: nodes that join accept tensors, plain values, and lists and dicts "
                    f"of them. Share these, or an object whose state_dict() has no others."
                )
        if elastic.taken is None:
            return
        taken = elastic.taken["extra"] or {}
        own = {name for name, each in state.items() if not isinstance(each, (nn.Module, Optimizer))}
        if taken.keys() != own:
            raise ValueError(
                f"share() of {sorted(own)}, where the other nodes have {sorted(taken)}: share the same on all nodes."
            )
        elastic.taken = None
        for name, value in taken.items():
            if hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(value)
            else:
                state[name] = value

    def deal(self, loader: Any, batches: int = 1) -> None:
        """Have a loader draw what is dealt to this device, as ``ElasticUpdates.deal``. Every device of the node calls
        it.

        Args:
            batches: between two steps.

        Raises:
            ValueError: before the optimizer is set up, or for a loader that draws samples of its own.
        """
        elastic = self._found()
        if dealt_by(loader) is None:
            raise ValueError(
                f"deal() of a {type(loader).__name__} that draws samples of its own: give a DataLoader of torch with "
                f"sampler=ElasticSampler(dataset), or leave deal() out, and each node draws all samples."
            )
        elastic.deal(loader, batches)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Refuse one whose samples are dealt: Fabric numbers its epochs from 0 in each process."""
        if dealt_by(dataloader) is not None:
            raise ValueError(
                "setup_dataloaders() of a loader whose samples are dealt to the nodes that are there would number its "
                "epochs from 0 on each node: call fabric.strategy.deal(loader) instead, set_epoch() before each epoch, "
                "and fabric.to_device(batch)."
            )
        return super().process_dataloader(dataloader)

    def _found(self) -> ElasticUpdates:
        if self.elastic is None:
            raise ValueError("no optimizer is set up: call fabric.setup(model, optimizer) before.")
        return self.elastic

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Give nodes that join what they ask for, and step.

        Raises:
            ValueError: when this node has joined others, and has not taken what they share.
        """
        if self.elastic is not None:
            self._check_progress(self.elastic)
            self.elastic.serve(self._told)
        return super().optimizer_step(optimizer, **kwargs)

    def _check_progress(self, elastic: ElasticUpdates) -> None:
        taken, elastic.taken = elastic.taken, None
        if taken is not None and taken["extra"]:
            raise ValueError(
                f"the other nodes share {sorted(taken['extra'])}, and this one would go on without: call "
                f"fabric.strategy.share(state) after the optimizer is set up, on all nodes."
            )

    def _told(self) -> dict[str, Any]:
        told = {}
        for name, each in (self._progress or {}).items():
            if not isinstance(each, (nn.Module, Optimizer)):
                told[name] = each.state_dict() if hasattr(each, "state_dict") else each
        return told

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Modules hold the global weights inside, for validation; the other nodes do not wait for it. Every device of
        the node enters it."""
        with super().shared_weights():
            if self.elastic is not None:
                self.elastic.watch()
            yield

    def finish(self) -> None:
        """Send everything that is pending, and leave the other nodes: at the end, or when told to end. Every device of
        the node calls it."""
        super().finish()
        for engine in self.engines:
            engine.end()
        self.engines.clear()

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        """The first node writes; after ``finish`` each does. All devices of the node call it, as ``fabric.save``."""
        if not self._writes:
            return
        with self.shared_weights():  # all that is saved is of one version
            version = {} if self.elastic is None else {ELASTIC_KEY: list(self.elastic.version)}
            super().save_checkpoint(path, {**state, **version}, storage_options, filter)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint. Nodes that load the same file continue together. Weights that are loaded without an
        optimizer keep the name of their run, but nodes draw from the first sample.

        Raises:
            ValueError: once the node has joined the others.
        """
        if self.engines:
            raise ValueError(
                "a node that has joined others has their weights: call fabric.load() after fabric.setup_module(model), "
                "and before fabric.setup_optimizers(optimizer)."
            )
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        version = rest.pop(ELASTIC_KEY, None)
        if version is not None and any(isinstance(each, nn.Module) for each in (state or {}).values()):
            # weights alone begin with the first epoch, all of which is to be drawn
            self._loaded = Version(*version) if _has_optimizer(state) else Version(*version)._replace(place=0)
        return rest


# -- shards ------------------------------------------------------------------------------------------------------------


class MSTopKFSDPFabricMixin(ShardsAdapter, UpdatesFabricAdapter):
    """FSDP2 inside each node, for models that one device cannot hold; between nodes travel the largest updates. For
    Fabric.

    Args:
        send: ``"updates"``: what each node's own optimizers did to the shards; ``"gradients"``: the gradients, in
            FSDP2's hook, so that all nodes hold the same weights.
        parallelize_fn: shards a module, given it and the mesh of axes "replicate" and "shard"; default: the blocks that
            repeat, then the whole, in bf16 with the precision "bf16-mixed".
        node_name: the node that this process belongs to, by name, on every rank (see lightning_sparse.topology).
        **kwargs: options of `ShardsConfig` (``density``, ``step_ahead``, ...) and of Fabric's ModelParallelStrategy.

    Raises:
        ValueError: for a bad value, an unknown option, or one that this strategy sets itself.
    """

    @with_options_of(ShardsConfig, OWN_OF_FSDP)
    def __init__(
        self,
        *,
        send: Send = "updates",
        parallelize_fn: Parallelize = shard,
        node_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._begin_shards(send, node_name, kwargs)
        super().__init__(parallelize_fn=self._shard if parallelize_fn is shard else parallelize_fn, **kwargs)
        self._modules = []
        self._epoch = 0

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return shard(module, mesh, **options_for(self.precision.precision))

    def setup_environment(self) -> None:
        """The mesh, which ``parallelize_fn`` is given."""
        super().setup_environment()
        self._device_mesh = mesh_of(self._place)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module inside its node, and exchange its gradients if these are sent. A collective of the world."""
        module = super().setup_module(module)
        self._remember(module)
        if self.send == "gradients":
            engine = ShardedGradients(module, self.config, self._place)
            engine.epoch = self._epoch
            if engine.active and self.config.wants_warmup:
                engine.log_once(NO_WARMUP, logging.WARNING)
            before = next((each for each in self.engines if each.module is module), None)
            if before is not None:
                engine.take_over(before)
                self.engines.remove(before)
            self.engines.append(engine)
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Exchange the updates of this optimizer if ``send="updates"``. A collective of the world.

        Raises:
            ValueError: if the optimizer was made before its module was sharded.
        """
        held = {id(p) for each in self._modules for p in each.parameters()}
        stepped = parameters_of(optimizer)
        stale = sum(id(p) not in held for p in stepped)
        if stale:
            raise ValueError(
                f"{stale} of {len(stepped)} parameters of {type(optimizer).__name__} are in no module that was set up: "
                f"sharding replaced the parameters, so the optimizer would train nothing. Call model = "
                f"fabric.setup_module(model) first, create the optimizer from model.parameters(), and pass it to "
                f"fabric.setup_optimizers(optimizer)."
            )
        optimizer = super().setup_optimizer(optimizer)
        for engine in self.engines if self.send == "gradients" else ():
            if engine.follows(optimizer):
                engine.watch([optimizer])
        return optimizer

    def set_epoch(self, epoch: int) -> None:
        """Tell the density warm-up of gradients which epoch begins, counted from 0."""
        self._epoch = epoch
        for engine in self.engines if self.send == "gradients" else ():
            engine.epoch = epoch

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _saving(self, path: Any, state: Any) -> Iterator[Any]:
        """All ranks write a folder of the global weights, and its optimizer states are those of the first node."""
        with super()._saving(path, state) as whole, self.shared_weights():
            if self._save_distributed_checkpoint and self._place.node_index > 0:
                whole = {name: each for name, each in whole.items() if not isinstance(each, Optimizer)}
            yield whole
            with said_if_long("waiting for all ranks to write a checkpoint"):
                dist.barrier()  # before files of earlier saves are removed

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the state of objects such as schedulers. For a folder, Fabric only returns their state."""
        given = dict(state) if isinstance(state, MutableMapping) else {}
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        for name, each in given.items():
            if state[name] is not each and hasattr(each, "load_state_dict"):
                each.load_state_dict(state[name])
                state[name] = each
        return rest

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        """A file, or a folder that takes its name when it is whole. All ranks call it, as ``fabric.save``."""
        with self._whole(path) as partial:
            super().save_checkpoint(partial, state, storage_options, filter)
