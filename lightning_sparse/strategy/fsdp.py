"""``mstopk_fsdp``: FSDP2 inside each node; nodes exchange updates after the step, or gradients before it.

All nodes have equal global weights. With send="updates", their local weights differ between exchanges.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_sparse.checkpoint.state import State
from lightning_sparse.fsdp import ShardedGradients, by_hand, explained_if_mixed, mesh_of, options_for, shard
from lightning_sparse.gradients.config import Warmup
from lightning_sparse.messages import log_if_slow
from lightning_sparse.sharding import drop_gathered, parameter_names, parameters_of
from lightning_sparse.strategy import distributed
from lightning_sparse.strategy.adapter import Adapter
from lightning_sparse.strategy.fabric import NO_WARMUP, UpdatesFabricAdapter
from lightning_sparse.strategy.options import FSDP, Send, with_strategy_options
from lightning_sparse.strategy.trainer import TrainerAdapter
from lightning_sparse.updates import LocalUpdates, optimizer_state


class ShardsAdapter(Adapter):
    """Common part of ``mstopk_fsdp`` for Trainer and Fabric."""

    send: Send
    _device_mesh: DeviceMesh | None
    _checkpoints_are_collective = True

    def _init_fsdp(self, send: Send, node_name: str | None, given: dict[str, Any]) -> None:
        exchanged = LocalUpdates.kind if send == "updates" else ShardedGradients.kind
        self._init_common(FSDP, node_name, given, exchanged, send=send)
        self.send = send

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Each rank needs its own samples. Lightning would give the devices of a mesh the same samples.
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        super().setup_environment()
        self._device_mesh = mesh_of(self.topology)

    def _new_gradients(self, module: nn.Module, earlier: ShardedGradients | None) -> ShardedGradients:
        """Exchange the gradients of a sharded module. A collective of the world."""
        engine = ShardedGradients(module, self.config, self.topology)
        if earlier is not None:
            engine.adopt_residuals(earlier)
        return engine

    def _wait_for_writers(self) -> None:
        # After this wait, a save removes files of earlier saves. So every rank must have written its part.
        with log_if_slow("waiting for all ranks to write a checkpoint"):
            dist.barrier()

    def _rank_state(self, saved: Any) -> dict[str, Any]:
        # The main file has the optimizer states of the first node.
        if self.topology.node_index == 0:
            return {}
        engines = (engine for engine in self.engines if isinstance(engine, LocalUpdates))
        return {
            "optimizers": [optimizer_state.state_of(engine.optimizers, engine.names).to_dict() for engine in engines]
        }

    def _is_file(self, path: Any) -> bool:
        """Return whether a checkpoint is a file, not a folder."""
        return Path(self._main_path(path)).is_file()

    def _load_rank_state(self, entries: dict[str, Any]) -> None:
        engines = (engine for engine in self.engines if isinstance(engine, LocalUpdates))
        for engine, saved in zip(engines, entries.get("optimizers", []), strict=False):
            optimizer_state.load(engine.names, engine.stepped(), [State.from_dict(saved)])


class ShardsTrainerAdapter(ShardsAdapter, TrainerAdapter):
    """Common part of the Trainer's strategies with FSDP2."""

    _optimizers: list[Optimizer]  # of Lightning's strategy

    @property
    def _gradients(self) -> ShardedGradients | None:
        return self.engines[-1] if self.engines and self.send == "gradients" else None

    @property
    def _fitting(self) -> bool:
        return bool(self.lightning_module.trainer.state.fn == "fit")

    def setup_environment(self) -> None:
        super().setup_environment()
        module = self.lightning_module
        # ``configure_model`` finds the mesh as ``self.device_mesh``.
        module._device_mesh = mesh = self._device_mesh
        assert mesh is not None
        # Lightning's own configure_model means that the user did not define one.
        if type(module).configure_model.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
            options = options_for(self.precision_plugin.precision)
            module.configure_model = partial(_shard_children, module, mesh, **options)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self._start(trainer)

    def _start(self, trainer: Any) -> None:
        """Start the exchange. A collective of the world."""
        earlier = self._gradients
        for before in self.engines:
            before.release_optimizers(self.optimizers)
        if self.send == "gradients":
            self.engines[:] = [self._new_gradients(self.lightning_module, earlier)]
            self.engines[0].watch(self.optimizers)
        else:
            self.engines[:] = [self._new_updates(self.lightning_module, self.optimizers)]
        self._show_to_hooks(trainer)

    def _drop_gathered(self) -> None:
        # FSDP2 keeps gathered parameters after an evaluation. Hooks would see them instead of shards, and lose changes.
        drop_gathered(self.lightning_module)

    def on_train_start(self) -> None:
        super().on_train_start()
        gradients = self._gradients
        if gradients is None or not gradients.active or not self.config.leaves_entries_out:
            return
        # The length of the default warm-up depends on the data loaders, which exist only now.
        if gradients.warmup == Warmup():
            gradients.warmup = Warmup.default(self.lightning_module.trainer.estimated_stepping_batches)
        if gradients.warmup.describe():
            gradients.log_once(gradients.warmup.describe())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._gradients is not None:
            self._gradients.epoch = self.lightning_module.current_epoch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with explained_if_mixed():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with explained_if_mixed():
            return super().validation_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        # Accumulated micro-batches stay inside the node.
        with self._gradients.accumulating() if self._gradients is not None else nullcontext():
            yield

    def teardown(self) -> None:
        if isinstance(vars(self.lightning_module).get("configure_model"), partial):
            del self.lightning_module.configure_model
        self._drop_gathered()
        super().teardown()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _saving(self, checkpoint: dict[str, Any], filepath: Any) -> Iterator[None]:
        with super()._saving(checkpoint, filepath):
            # A folder has the optimizer states of the first node. Other nodes write their states to side files.
            if self._save_distributed_checkpoint and self.topology.node_index > 0:
                checkpoint.pop("optimizer_states", None)
            yield
            self._wait_for_writers()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        with self._checkpoint_target(filepath) as path:
            super().save_checkpoint(checkpoint, path, storage_options)

    def _check_kind(self, path: Any, *args: Any, **kwargs: Any) -> None:
        distributed.check_sharded(Path(self._main_path(path)), *args, **kwargs)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # Lightning would match the states in a file with the first parameters of the module, which is wrong with frozen
        # layers or several optimizers.
        optimizers = self._optimizers
        if self._is_file(checkpoint_path):
            self._optimizers = []
        try:
            checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
            if not self._optimizers:
                self._load_whole(optimizers, checkpoint.get("optimizer_states", []))
        finally:
            self._optimizers = optimizers
        if self.engine is not None and self._fitting:
            self.engine.restart()
            self._restore(self.engine)
            self._show()
        self._side_files.loaded = []
        return checkpoint

    def _load_whole(self, optimizers: list[Optimizer], saved: list[dict[str, Any]]) -> None:
        names = parameter_names(self.lightning_module)
        if saved and len(saved) != len(optimizers):
            raise ValueError(
                f"the checkpoint has the states of {len(saved)} optimizers, and the model has {len(optimizers)}. "
                f"Resume with the optimizers that were saved, or continue from the weights alone."
            )
        for optimizer, state in zip(optimizers, saved, strict=False):
            optimizer_state.load_whole(optimizer, names, state)


class MSTopKFSDPMixin(ShardsTrainerAdapter):
    """FSDP2 inside each node, for models that are too large for one device. Nodes exchange the largest updates.

    ``configure_model`` shards the model over ``self.device_mesh["shard"]``. Without that hook, each child of the
    LightningModule is sharded: first its repeated blocks, then the rest. ``precision="bf16-mixed"`` then gathers
    weights in bf16 and sums gradients in fp32.

    Args:
        send: Exchanged values: ``"updates"`` or ``"gradients"``. ``"updates"``: each node's optimizer steps its shards,
            and nodes exchange the changes. ``"gradients"``: nodes exchange gradients in FSDP2's hook, and all nodes
            have equal weights. With AdamW send updates, or send all gradients (``exchange="dense16"`` or ``"dense"``).
        node_name: Name of this process's node. If one rank has a name, all ranks need one. Default: the environment
            variable LIGHTNING_SPARSE_NODE, else the host.
        save_distributed_checkpoint: Save a checkpoint as a folder to which each rank writes its part, instead of one
            file. A file has the whole model and can be read by any strategy.
        process_group_backend: Backend of the process groups. Default: NCCL on GPUs, else Gloo.
        timeout: Timeout of the process groups, a timedelta.
        **kwargs: options of `ShardsConfig` (``density``, ``step_ahead``, ...).

    Raises:
        ValueError: for a bad value, or an option that this strategy sets itself.
    """

    @with_strategy_options(FSDP)
    def __init__(
        self,
        *,
        send: Send = "updates",
        node_name: str | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        self._init_fsdp(send, node_name, kwargs)
        options = {} if timeout is None else {"timeout": timeout}
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            **options,
        )


def _shard_children(module: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    # ``training_step`` calls the children, and their forward gathers weights. So the children are sharded, not the
    # module.
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    held = [{id(p) for p in child.parameters()} for child in children]
    lists = any(isinstance(child, (nn.ParameterList, nn.ParameterDict)) for child in children)
    alone = lists or any(True for _ in module.parameters(recurse=False))
    if alone or sum(map(len, held)) > len(set().union(*held)):
        why = "parameters of its own" if alone else "children that share parameters"
        raise ValueError(
            f"{type(module).__name__} has {why}, but without configure_model() each child is sharded separately: "
            f"{by_hand(module)}"
        )
    for child in children:
        shard(child, mesh, **options)


Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module]


class ShardsFabricAdapter(ShardsAdapter, UpdatesFabricAdapter):
    """Common part of Fabric's strategies with FSDP2."""

    _epoch: int | None = None  # unknown

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return shard(module, mesh, **options_for(self.precision.precision))

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module inside its node. A collective of the world."""
        module = super().setup_module(module)
        self._register_module(module)
        if self.send == "gradients":
            earlier = next((old_engine for old_engine in self.engines if old_engine.module is module), None)
            engine = self._new_gradients(module, earlier)
            engine.epoch = self._epoch
            if engine.active and self.config.wants_warmup:
                engine.log_once(NO_WARMUP, logging.WARNING)
            self.engines[:] = [*(old_engine for old_engine in self.engines if old_engine is not earlier), engine]
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Exchange the updates of this optimizer if ``send="updates"``. A collective of the world.

        Raises:
            ValueError: if the optimizer was made before its module was sharded.
        """
        held = {id(p) for module in self._modules for p in module.parameters()}
        stepped = parameters_of(optimizer)
        stale = sum(id(p) not in held for p in stepped)
        if stale:
            raise ValueError(
                f"{stale} of {len(stepped)} parameters of {type(optimizer).__name__} are in no module that was set up: "
                f"sharding has replaced the parameters. Call model = fabric.setup_module(model) first, create the "
                f"optimizer from model.parameters(), and pass it to fabric.setup_optimizers(optimizer)."
            )
        optimizer = super().setup_optimizer(optimizer)
        for engine in self.engines if self.send == "gradients" else ():
            if engine.tracks_optimizer(optimizer):
                engine.watch([optimizer])
        return optimizer

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 0, for the density warm-up of gradients."""
        self._epoch = epoch
        for engine in self.engines if self.send == "gradients" else ():
            engine.epoch = epoch

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _saving(self, path: Any, state: Any) -> Iterator[Any]:
        with super()._saving(path, state) as whole, self.global_weights():
            # As for a Trainer, a folder has the optimizer states of the first node alone.
            if self._save_distributed_checkpoint and self.topology.node_index > 0:
                whole = {name: value for name, value in whole.items() if not isinstance(value, Optimizer)}
            yield whole
            self._wait_for_writers()

    def _load_main(self, path: Any, state: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        entries = state.items() if isinstance(state, MutableMapping) and self._is_file(path) else ()
        optimizers = {name: value for name, value in entries if isinstance(value, Optimizer)}
        for name in optimizers:
            del state[name]
        try:
            remainder = super()._load_main(path, state, *args, **kwargs)
        finally:
            if optimizers:
                state.update(optimizers)
        names = {id(p): name for module in self._modules for name, p in module.named_parameters()}
        for name, optimizer in optimizers.items():
            if name in remainder:
                optimizer_state.load_whole(optimizer, names, remainder.pop(name))
        return remainder

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        objects = dict(state) if isinstance(state, MutableMapping) else {}
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        # For a folder, Fabric replaces objects such as schedulers with their states and does not load them.
        for name, value in objects.items():
            if state[name] is not value and hasattr(value, "load_state_dict"):
                value.load_state_dict(state[name])
                state[name] = value
        return remainder

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        with self._checkpoint_target(path) as unfinished:
            super().save_checkpoint(unfinished, state, storage_options, filter)


class MSTopKFSDPFabricMixin(ShardsFabricAdapter):
    """``mstopk_fsdp`` for Fabric. It takes the options of ``MSTopKFSDPStrategy`` for a Trainer.

    Args:
        parallelize_fn: Shards a module, given the module and the mesh with the axes "replicate" and "shard". Default:
            shard the repeated blocks, then the rest, in bf16 with the precision "bf16-mixed".
    """

    @with_strategy_options(FSDP)
    def __init__(
        self,
        *,
        send: Send = "updates",
        parallelize_fn: Parallelize = shard,
        node_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._init_fsdp(send, node_name, kwargs)
        super().__init__(parallelize_fn=self._shard if parallelize_fn is shard else parallelize_fn, **kwargs)
        self._modules = []
