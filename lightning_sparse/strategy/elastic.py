"""``mstopk_elastic``: nodes that join and leave exchange updates. Each node is a run of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sparse.elastic.sampling import sampler_of
from lightning_sparse.elastic.snapshots import is_safe
from lightning_sparse.elastic.updates import ElasticUpdates, Version
from lightning_sparse.messages import log
from lightning_sparse.sharding import parameters_of
from lightning_sparse.strategy.adapter import Adapter, Host, clone_state_dict
from lightning_sparse.strategy.fabric import has_optimizer
from lightning_sparse.strategy.local import MSTopKLocalFabricMixin, MSTopKLocalMixin
from lightning_sparse.strategy.options import ELASTIC, check_supported, with_strategy_options
from lightning_sparse.strategy.signals import replace_sigterm
from lightning_sparse.strategy.trainer import most_accumulated
from lightning_sparse.updates.optimizer_state import to_python

ELASTIC_KEY = "lightning_sparse_elastic"
"""Key of the version of the weights, in a checkpoint of an elastic node."""


class ElasticAdapter(Adapter):
    """Common part of ``mstopk_elastic`` for Trainer and Fabric."""

    _loaded: Version | None = None  # version of the loaded weights

    def setup_environment(self) -> None:
        if self.num_nodes != 1:
            raise ValueError(
                f"num_nodes={self.num_nodes}: each elastic node is a run of its own. Start each node with num_nodes=1 "
                f"and the address of one lighthouse."
            )
        super().setup_environment()

    @property
    def elastic(self) -> ElasticUpdates | None:
        return self.engines[-1] if self.engines else None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]
        if self._topology is None:  # no training
            return kwargs
        # The node's devices share all samples. The seed gives each node another order.
        return {**kwargs, "seed": int(self._side_files.run_id, 16)}

    def _new_updates(self, module: nn.Module, optimizers: list[Optimizer]) -> ElasticUpdates:
        version, self._loaded = self._loaded, None
        return ElasticUpdates(
            module, optimizers, self.config, self.topology, name=self._node_name or "", version=version
        )

    @property
    def _averages_inside(self) -> bool:
        return self.topology.num_devices > 1

    @property
    def _is_checkpoint_writer(self) -> bool:
        return self.elastic is None or self.elastic.peers.is_first


class ElasticTrainerAdapter(ElasticAdapter, Host):
    """Common part of the Trainer's strategies for elastic nodes."""

    _another_writes = False  # another node writes checkpoints
    _must_stop = False  # this process has received SIGTERM
    _joined_groups: Sequence[list[dict[str, Any]]] = ()  # of each optimizer, as of the nodes that this node has joined
    _wrapped_methods: Sequence[tuple[Any, str]]  # of the TrainerAdapter

    def _listen_for_signals(self, trainer: Any) -> None:
        # Lightning's signal handler broadcasts, and would interrupt each device in a different collective. It also
        # broadcasts before each batch. Instead, `_end_together` exchanges a flag, so all devices stop after the same
        # batch.
        self._must_stop = False

        def note(*_: Any) -> None:
            # It may interrupt the main thread while it writes a log line, and Python refuses a write within a write.
            self._must_stop = True

        # After the fit, an evaluation ends as Lightning ends it.
        self._wrapped_methods = [*self._wrapped_methods, *replace_sigterm(trainer, note)]

    def _after_join(self, trainer: Any) -> None:
        updates = self.engines[-1]
        self._joined_groups = ()
        if updates.progress is not None:
            self._joined_groups = [optimizer.param_groups for optimizer in self.optimizers]
            self._restore_progress(trainer, updates.progress)
            updates.progress = None
            for local_optimizer in updates.optimizers:
                local_optimizer.undo_changes()  # an averaging callback has loaded weights, too
        trainer.fit_loop._combined_loader = None  # configure_optimizers() may have made a loader too early
        updates.swap_in_global_weights()  # for hooks before the first batch
        updates.watch()

    def _restore_progress(self, trainer: Any, progress: Mapping[str, Any]) -> None:
        # As from a file. The engine has loaded the weights and the optimizer, and Lightning restores the rest later.
        module = self.lightning_module
        weights = {**clone_state_dict(module.state_dict()), **progress["state_dict"]}
        parts = [part for part in (module, trainer.datamodule) if part is not None]
        hyperparameters = {part.CHECKPOINT_HYPER_PARAMS_KEY: dict(part.hparams) for part in parts if part.hparams}
        checkpoint = {**progress, **hyperparameters, "state_dict": weights, "optimizer_states": []}
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = checkpoint
        connector.restore_datamodule()
        module.on_load_checkpoint(checkpoint)
        connector.restore_callbacks()
        checkpoint.pop("state_dict", None)  # the Trainer keeps the checkpoint until the fit begins

    def process_dataloader(self, dataloader: Any) -> Any:
        """Assign samples to the present nodes, if the loader supports it."""
        if self.elastic is not None:
            self.elastic.shard_loader(dataloader, most_accumulated(self.lightning_module.trainer))
            self._tell_epoch(dataloader)  # Lightning sets it only after it has fetched a batch
        return super().process_dataloader(dataloader)

    def on_train_start(self) -> None:
        super().on_train_start()
        loop = self.lightning_module.trainer.fit_loop
        self._pass_over_empty_epochs(loop)
        # A resumed run first trains on batches that Lightning has already begun to fetch. So if the checkpoint was
        # saved after the last batch of an epoch, the loader gets its next epoch only here.
        if any([self._tell_epoch(loader) for loader in loop._combined_loader.flattened]):
            iter(loop._data_fetcher)

    def _pass_over_empty_epochs(self, loop: Any) -> None:
        # An epoch without batches has no validation, so callbacks and schedulers that monitor a metric would fail.
        while self.elastic is not None and not loop.done:
            epoch = loop.epoch_progress.current.processed
            if self.elastic.has_batch(epoch):
                return
            self.elastic.log_once(f"epoch {epoch} is skipped: it has no batch left for this node")
            _pass_over_epoch(loop)

    def _tell_epoch(self, dataloader: Any) -> bool:
        """Set the epoch of a loader that draws assigned samples; return False for other loaders."""
        source = sampler_of(dataloader)
        if source is not None:
            source.set_epoch(self.lightning_module.trainer.fit_loop.epoch_progress.current.processed)
        return source is not None

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        # ``BaseFinetuning`` has restored the groups with their learning rates as of when it added them. For a file, the
        # optimizer's state would replace these.
        groups, self._joined_groups = self._joined_groups, ()
        for optimizer, joined in zip(self.optimizers, groups, strict=False):
            if optimizer.param_groups is not joined:
                optimizer.param_groups = joined

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.elastic is not None:
            self.elastic.serve(self._progress)
            self._end_together(self.elastic)

    def _end_together(self, elastic: ElasticUpdates) -> None:
        # After missed rounds, the devices of a node may have drawn samples by different assignments. So they agree on
        # the last batch of the epoch and of the fit.
        trainer = self.lightning_module.trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress
        must_stop, progress.is_last_batch = elastic.any_device(self._must_stop, progress.is_last_batch)
        if self._must_stop:
            log.info("received SIGTERM: this node stops after this batch, sends its pending updates and leaves")
        if must_stop:
            trainer._signal_connector.received_sigterm = True  # ends the fit after this batch

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self.elastic is not None and self._fitting:
            # The other nodes do not wait for this validation.
            self.elastic.watch()

    def _progress(self) -> dict[str, Any]:
        trainer = self.lightning_module.trainer
        checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        # Joining nodes load weights and the optimizer from the engine. Hyperparameters may have unsafe types.
        left_out = ("optimizer_states", "hyper_parameters", "datamodule_hyper_parameters", "hparams_type")
        progress = {name: value for name, value in checkpoint.items() if name not in left_out}
        with self.engine.global_weights():
            own = self.lightning_module.state_dict()
            progress["state_dict"] = _replaced(checkpoint.get("state_dict", {}), own)
        return progress

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if type(exception).__name__ == "SIGTERMException" and self.elastic is not None:
            self.elastic.finish()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if not self._is_checkpoint_writer:
            self._another_writes = True
            return
        if self._another_writes:
            self._another_writes = False
            log.info(
                "this node writes checkpoints from now on, because the writer has left. Callbacks do not remove the "
                "writer's checkpoints in %s",
                Path(filepath).parent,
            )
        if self.elastic is not None:
            checkpoint[ELASTIC_KEY] = list(self.elastic.shown_version)  # of the weights in the checkpoint
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load weights, optimizer and progress. Nodes that load the same file continue together."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._loaded = Version(*checkpoint[ELASTIC_KEY]) if ELASTIC_KEY in checkpoint else None
        if self._loaded is not None and self.lightning_module.trainer.state.fn != "fit":
            # A fit after an evaluation of the file has its weights, but starts with the first sample.
            self._loaded = self._loaded._replace(place=0)
        return checkpoint

    def remove_checkpoint(self, filepath: Any) -> None:
        if self._is_checkpoint_writer:
            super().remove_checkpoint(filepath)


def _replaced(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors that a hook has put into a checkpoint in place of the weights, such as averages."""
    # For FSDP2, torch removes the names of compiled modules. Averages of sharded weights are not supported.
    own = {name.replace("_orig_mod.", ""): value for name, value in own.items()}
    sent = {}
    for name, value in saved.items():
        replaces = own.get(name.replace("_orig_mod.", ""))
        is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and not isinstance(replaces, DTensor)
        if is_whole and not _is_same(value, replaces):
            sent[name] = value
    return sent


def _is_same(value: Tensor, own: Any) -> bool:
    return isinstance(own, Tensor) and value.dtype == own.dtype and torch.equal(value, own.to(value.device))


def _pass_over_epoch(loop: Any) -> None:
    progress = loop.epoch_progress
    loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
    for tracker in (progress.current, progress.total):
        tracker.ready = tracker.started = tracker.processed = tracker.completed = tracker.processed + 1
    loop.reset_restart_stage()
    loop.restarting = False


class MSTopKElasticMixin(ElasticTrainerAdapter, MSTopKLocalMixin):
    """Exchange of updates between nodes that join and leave, with DDP inside each node.

    Each node has its own Trainer (``num_nodes=1``), and torchft's lighthouse lists the nodes. A joining node starts
    with the weights, optimizer state, schedules and progress of another node.

    Args:
        node_name: Name of this process's node. Default: the host.
        gradient_as_bucket_view: Let gradients be views of DDP's buckets, which saves a copy.
        **kwargs: options of `ElasticConfig` (``lighthouse``, ``min_nodes``, ``timeout``, ``density``, ...), and
            DDPStrategy's and DistributedDataParallel's own.

    Raises:
        ValueError: for a bad value, an unknown option, or an option that this strategy does not support.
    """

    _kind = ELASTIC
    _engine_class = ElasticUpdates

    @with_strategy_options(ELASTIC)
    def __init__(self, *, node_name: str | None = None, gradient_as_bucket_view: bool = True, **kwargs: Any) -> None:
        check_supported(ELASTIC, type(self), {name: value or None for name, value in kwargs.items()})
        super().__init__(node_name=node_name, gradient_as_bucket_view=gradient_as_bucket_view, **kwargs)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self._after_join(trainer)


class ElasticFabricAdapter(ElasticAdapter, Host):
    """Common part of Fabric's strategies for elastic nodes."""

    _progress: MutableMapping[str, Any] | None = None
    _set_up: Sequence[Optimizer] = ()  # optimizers of a node that has not joined yet

    def setup_environment(self) -> None:
        super().setup_environment()
        # Loaders that are set up before the node joins need the number of its devices.
        _ = self.topology

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Join the other nodes once each trainable parameter has an optimizer. Every device of the node calls it.

        If some parameters never get an optimizer, the node joins when the loop first uses the strategy.

        Raises:
            ValueError: after the node has joined.
        """
        if self.engines:
            raise ValueError(
                f"{type(optimizer).__name__} is set up after the node has joined the others with its other optimizers. "
                f"First call fabric.setup_module() for each module, then fabric.setup_optimizers() with all optimizers."
            )
        self._set_up = [*self._set_up, optimizer]
        optimizer = super().setup_optimizer(optimizer)
        stepped = {id(p) for stepper in self._set_up for p in parameters_of(stepper)}
        if all(id(p) in stepped for module in self._modules for p in module.parameters() if p.requires_grad):
            self._join_others()
        return optimizer

    def _exchange_updates(self, optimizer: Optimizer) -> None:
        """Wait for the other optimizers."""
        self._module_of([optimizer])

    def _join_others(self) -> None:
        """Join the other nodes with all optimizers that are set up. Every device of the node calls it."""
        if self._set_up:
            optimizers, self._set_up = list(self._set_up), ()
            self.engines.append(self._new_updates(self._module_of(optimizers), optimizers))

    def sync_state(self, state: MutableMapping[str, Any]) -> None:
        """Give the progress of this node to joining nodes. A node that has joined loads the progress of the others.

        Args:
            state: plain values and tensors, which are replaced, and objects with ``state_dict``, such as schedulers.
                Modules and optimizers in it are left out. Keep it up to date.

        Raises:
            ValueError: before the optimizer is set up, for values of unsafe types, or if the others share other names.
        """
        elastic = self._require_engine()
        if not isinstance(state, MutableMapping):
            raise ValueError(f"sync_state({state!r}): give a dict of the values that joining nodes load.")
        self._progress = state
        for name, value in to_python(self._progress_state_dict()).items():
            if not is_safe(value):
                raise ValueError(
                    f"sync_state() of {name}={value!r}: joining nodes accept tensors, plain values, lists and dicts. "
                    f"Share these, or an object whose state_dict() has only these."
                )
        if elastic.progress is None:
            return
        progress = elastic.progress
        own = {name for name, value in state.items() if not isinstance(value, (nn.Module, Optimizer))}
        if progress.keys() != own:
            raise ValueError(
                f"sync_state() of {sorted(own)}, but the other nodes have {sorted(progress)}. Use equal names on all "
                f"nodes."
            )
        elastic.progress = None
        for name, value in progress.items():
            if hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(value)
            else:
                state[name] = value

    def shard_loader(self, loader: Any, batches: int = 1) -> None:
        """Let a loader draw the samples of this device, as ``ElasticUpdates.shard_loader``. Call it on every device.

        Args:
            batches: number of batches between two steps.

        Raises:
            ValueError: before the optimizer is set up, or for a loader that cannot draw assigned samples.
        """
        elastic = self._require_engine()
        if sampler_of(loader) is None:
            raise ValueError(
                f"shard_loader() of a {type(loader).__name__} that cannot draw assigned samples. Use torch's "
                f"DataLoader with sampler=ElasticSampler(dataset), or omit shard_loader(), so that each node draws all "
                f"samples."
            )
        elastic.shard_loader(loader, batches)

    def share(self, state: MutableMapping[str, Any]) -> None:
        """Deprecated name of `sync_state`, until version 0.3."""
        self.sync_state(state)

    def deal(self, loader: Any, batches: int = 1) -> None:
        """Deprecated name of `shard_loader`, until version 0.3."""
        self.shard_loader(loader, batches)

    def process_dataloader(self, dataloader: Any) -> Any:
        # Fabric numbers the epochs of a loader from 0 in each process.
        if sampler_of(dataloader) is not None:
            raise ValueError(
                "setup_dataloaders() would number the epochs of this loader from 0 on each node. Instead, call "
                "fabric.strategy.shard_loader(loader), set_epoch() before each epoch, and fabric.to_device(batch)."
            )
        return super().process_dataloader(dataloader)

    def _require_engine(self) -> ElasticUpdates:
        self._join_others()
        if self.elastic is None:
            raise ValueError("no optimizer is set up: call fabric.setup(model, optimizer) before.")
        return self.elastic

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Serve the requests of joining nodes, and step.

        Raises:
            ValueError: if this node has joined others, and has not loaded their progress.
        """
        self._join_others()
        if self.elastic is not None:
            self._check_progress(self.elastic)
            self.elastic.serve(self._progress_state_dict)
        return super().optimizer_step(optimizer, **kwargs)

    def _check_progress(self, elastic: ElasticUpdates) -> None:
        progress, elastic.progress = elastic.progress, None
        if progress:
            raise ValueError(
                f"the other nodes share {sorted(progress)}, but this node does not. Call "
                f"fabric.strategy.sync_state(state) after the set-up of the optimizer, on all nodes."
            )

    def _progress_state_dict(self) -> dict[str, Any]:
        entries = {}
        for name, value in (self._progress or {}).items():
            if not isinstance(value, (nn.Module, Optimizer)):
                entries[name] = value.state_dict() if hasattr(value, "state_dict") else value
        return entries

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Enter a context with the global weights on every device of the node. The other nodes do not wait."""
        self._join_others()
        with super().global_weights():
            if self.elastic is not None:
                self.elastic.watch()
            yield

    def finish(self) -> None:
        """Send all pending updates, and leave the other nodes, at the end or on a request to stop.

        Every device of the node calls it.
        """
        super().finish()
        for engine in self.engines:
            engine.close()
        self.engines.clear()

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        """Save on the first node; after ``finish`` on each node. All devices of the node call it."""
        self._join_others()
        if not self._is_checkpoint_writer:
            return
        with self.global_weights():  # so that all entries have one version
            version = {} if self.elastic is None else {ELASTIC_KEY: list(self.elastic.version)}
            super().save_checkpoint(path, {**state, **version}, storage_options, filter)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint. Nodes that load the same file continue together.

        Raises:
            ValueError: after the node has joined the others.
        """
        if self.engines:
            raise ValueError(
                "this node has joined other nodes and has their weights. Call fabric.load() between "
                "fabric.setup_module(model) and fabric.setup_optimizers(optimizer)."
            )
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        version = remainder.pop(ELASTIC_KEY, None)
        if version is not None and any(isinstance(value, nn.Module) for value in (state or {}).values()):
            # With weights alone, the run starts with the first epoch.
            self._loaded = Version(*version) if has_optimizer(state) else Version(*version)._replace(place=0)
        return remainder


class MSTopKElasticFabricMixin(ElasticFabricAdapter, MSTopKLocalFabricMixin):
    """``mstopk_elastic`` for Fabric. It takes the options of ``MSTopKElasticStrategy`` for a Trainer.

    A node joins when its optimizers are set up. Then it has the weights, buffers and optimizer states of the other
    nodes, and through ``sync_state`` their progress. Load a checkpoint between ``fabric.setup_module`` and
    ``fabric.setup_optimizers``.
    """

    _kind = ELASTIC
    _engine_class = ElasticUpdates

    @with_strategy_options(ELASTIC)
    def __init__(self, *, node_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(node_name=node_name, **kwargs)
