"""The strategies for Trainer, as mixins that import no Lightning: each has an engine, and overrides little.

``lightning_sparse.flavours`` binds them to the strategies of ``pytorch_lightning`` and of ``lightning.pytorch``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.agree import extremes
from lightning_sparse.checkpoint.folder import META, together
from lightning_sparse.checkpoint.interrupted import why_not_saved
from lightning_sparse.checkpoint.restore import check_loaded_by_all
from lightning_sparse.checkpoint.side_files import KEY, remove_side_files
from lightning_sparse.checkpoint.state import State
from lightning_sparse.elastic.sampling import dealt_by
from lightning_sparse.elastic.updates import ElasticConfig, ElasticUpdates, Version
from lightning_sparse.engine import Engine
from lightning_sparse.exchange import HierCommunicator
from lightning_sparse.fsdp import ShardedGradients, by_hand, explained_if_mixed, mesh_of, options_for, shard
from lightning_sparse.gradients import HierConfig, HierState
from lightning_sparse.gradients.config import DEFAULT_EPOCHS, DEFAULT_SHARE, Warmup
from lightning_sparse.messages import log, said_if_long
from lightning_sparse.pto.step import has_unfinished_step
from lightning_sparse.sharding import Part, drop_gathered, parameters_of, trained_by
from lightning_sparse.strategy import distributed
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
from lightning_sparse.updates import LocalUpdates, UpdatesConfig, optimizer_state
from lightning_sparse.updates.optimizer_state import plain

if TYPE_CHECKING:

    class Host:
        """The part of Lightning's strategies that is relied upon; flavours bring the class itself."""

        model: Any
        lightning_module: Any
        optimizers: list[torch.optim.Optimizer]
        precision_plugin: Any
        _ddp_kwargs: dict[str, Any]
        _ddp_comm_hook: Any
        _ddp_comm_state: Any
        _save_distributed_checkpoint: bool
        checkpoint_io: Any
        num_nodes: int

        def __init__(self, **kwargs: Any) -> None: ...
        @property
        def distributed_sampler_kwargs(self) -> dict[str, Any]: ...
        def setup_environment(self) -> None: ...
        def process_dataloader(self, dataloader: Any) -> Any: ...
        def on_exception(self, exception: BaseException) -> None: ...
        def broadcast(self, obj: Any, src: int = 0) -> Any: ...
        def setup(self, trainer: Any) -> None: ...
        def setup_optimizers(self, trainer: Any) -> None: ...
        def on_train_start(self) -> None: ...
        def pre_backward(self, closure_loss: Tensor) -> None: ...
        def post_backward(self, closure_loss: Tensor) -> None: ...
        def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None: ...
        def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any: ...
        def remove_checkpoint(self, filepath: Any) -> None: ...
        def teardown(self) -> None: ...
        def _setup_model(self, model: nn.Module) -> DistributedDataParallel: ...
        def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any: ...
        def optimizer_state(self, optimizer: Any) -> dict[str, Any]: ...
        def training_step(self, *args: Any, **kwargs: Any) -> Any: ...
        def validation_step(self, *args: Any, **kwargs: Any) -> Any: ...
        def post_training_step(self) -> None: ...
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...
        def on_validation_start(self) -> None: ...
        def on_train_end(self) -> None: ...
        def lightning_module_state_dict(self) -> dict[str, Any]: ...
        def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None: ...
        def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None: ...

else:
    Host = object


class TrainerAdapter(Adapter, Host):
    """Trainer's hooks, as calls of an engine.

    Outside training batches, the module holds the global weights whenever a hook of a callback or of the module runs.
    Lightning calls a strategy's hooks after these hooks, so the loops call the engine first.
    """

    _shows_each_step = _flushes_each_epoch = _shows_between_batches = False
    _in_batch = _over = False
    _steps_before = _batches_before = 0  # at the start of the epoch
    _not_saved = ""  # why no checkpoint can be saved after an exception
    _wrapped_methods: Sequence[tuple[Any, str]] = ()  # of the Trainer and its loops

    @property
    def engine(self) -> Engine | None:
        """The engine of the module that is trained; None before the first fit."""
        return self.engines[-1] if self.engines else None

    @property
    def _fitting(self) -> bool:
        """Whether the model is set up for training."""
        return isinstance(self.model, DistributedDataParallel)

    def setup_environment(self) -> None:
        """Let the Trainer save after an exception only if all ranks can."""
        self._release_trainer()
        trainer = self.lightning_module.trainer
        self._not_saved, save = "", trainer.save_checkpoint

        @wraps(save)
        def save_together(filepath: Any, *args: Any, **kwargs: Any) -> None:
            if trainer.interrupted and self._gives_up_saving():
                log.warning("%s is not saved: %s. Resume from the last checkpoint.", filepath, self._not_saved)
            else:
                save(filepath, *args, **kwargs)

        trainer.save_checkpoint = save_together
        self._wrapped_methods = [(trainer, "save_checkpoint")]
        super().setup_environment()

    def _show_to_hooks(self, trainer: Any) -> None:
        """Let hooks see the global weights from now on. A collective of the world."""
        names = {base.__name__ for callback in trainer.callbacks for base in type(callback).__mro__}
        wanted: list[int] = [
            "WeightAveraging" in names,
            "StochasticWeightAveraging" in names,
            _has_hooks_between_batches(trainer),
        ]
        if self.engine is not None and self.engine.active:  # a callback may be on one rank alone
            wanted, _ = extremes(wanted, HierCommunicator(self._place).flat_all_reduce, self.root_device)
        self._shows_each_step, self._flushes_each_epoch, self._shows_between_batches = map(bool, wanted)
        self._in_batch = self._over = False
        self._steps_before = self._batches_before = 0
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._wrapped_methods = [
            *self._wrapped_methods,
            _call_around(epoch.automatic_optimization, "run", after=self._after_batch),
            _call_around(epoch.manual_optimization, "run", after=self._after_batch),
            _call_around(epoch, "_should_check_val_fx", after=self._show_if),  # hooks run before the loop
            _call_around(epoch.val_loop, "on_run_start", before=self._show),
            _call_around(epoch.val_loop, "on_run_end", before=self._drop_gathered),
            _call_around(fit, "on_advance_end", before=self._end_epoch),
            _call_around(fit, "on_run_end", before=self._finish),
        ]
        if self.engine is not None and self.engine.in_step:
            self.engine.show_shared()

    def _release_trainer(self) -> None:
        for owner, name in self._wrapped_methods:
            delattr(owner, name)
        self._wrapped_methods = ()

    def _show(self) -> None:
        if self.engine is not None:
            self.engine.show_shared()

    def _drop_gathered(self) -> None:
        """Let hooks after an evaluation see parameters, not copies of them."""

    def _show_if(self, validates: bool) -> None:
        if validates:
            self._show()

    def _end_epoch(self) -> None:
        self._show()
        engine = self.engine
        if engine is not None and engine.steps == self._steps_before and engine.batches > self._batches_before:
            engine.warn_of_no_step()
        if engine is not None:
            self._steps_before, self._batches_before = engine.steps, engine.batches

    def _finish(self) -> None:
        if self.engine is not None:
            self.engine.finish()
            self.engine.show_shared()

    # -- training ------------------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step, and tell the engine, whether or not a loss scaler skipped it."""
        engine = self.engine
        if engine is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        engine.before_step(optimizer)
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        engine.step(optimizer)
        return output

    def _after_batch(self, _: Any) -> None:
        """Exchange steps that bypassed Lightning's wrapper. Send everything once the fit is known to end, so that the
        last validation and the last checkpoint have the final weights. Otherwise show the global weights to hooks that
        run between batches."""
        self._in_batch, engine, trainer = False, self.engine, self.lightning_module.trainer
        if engine is None or not engine.has_own_weights:
            return
        engine.send_unsent()
        ends = engine.in_step and _ends_with_this_batch(trainer)
        if ends or (trainer.is_last_batch and self._flushes_each_epoch):
            self._finish()
        elif self._shows_each_step:
            engine.show_shared()
        elif self._shows_between_batches and engine.in_step:
            engine.show_shared(wait=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Train this node's own model."""
        super().on_train_batch_start(batch, batch_idx)
        self._in_batch = True
        if self.engine is not None:
            self.engine.batches += 1
            self.engine.show_own()

    def on_train_start(self) -> None:
        """Begin to train, maybe once more: `LearningRateFinder` runs the whole loop first."""
        super().on_train_start()
        self._over = False

    def on_validation_start(self) -> None:
        """Make all nodes validate equal weights, also if hooks changed the weights differently."""
        super().on_validation_start()
        if self.engine is not None and self._fitting:
            self.engine.average_changes()

    def on_train_end(self) -> None:
        """Keep the weights that the last hooks left."""
        super().on_train_end()
        if self.engine is not None:
            self.engine.adopt_changes()
        self._over = True

    def teardown(self) -> None:
        """Take hooks off the model; what is pending stays for a second fit of the same module."""
        self._release_trainer()
        for engine in self.engines:
            engine.end()
        super().teardown()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the global weights. In a fit all ranks call it. Between batches the module keeps them, for
        the hooks that add to a checkpoint."""
        engine = self.engine
        if engine is None or not self._fitting or self._over:
            return super().lightning_module_state_dict()
        with engine.shared_weights() if self._in_batch else nullcontext():
            engine.show_shared()
            engine.adopt_changes()
            weights = super().lightning_module_state_dict()
            return detached(weights) if engine.has_own_weights else weights

    def _gives_up_saving(self) -> bool:
        """Return whether ranks cannot save together after an exception. Every rank that saves calls it."""
        if not dist.is_initialized():
            return False
        broken = any(map(has_unfinished_step, self.optimizers))
        self._not_saved = self._not_saved or why_not_saved(
            self.engine.steps if self.engine is not None else 0,
            "an exception ended the optimizer step, so ranks hold different parameters" if broken else "",
        )
        return bool(self._not_saved)

    @contextmanager
    def _saving(self, checkpoint: dict[str, Any], filepath: Any) -> Iterator[None]:
        engines = self._saved_engines() if "optimizer_states" in checkpoint else []
        entries = self._own_entries(checkpoint) if engines else {}
        with self._saves.saving(filepath, engines, self._timeout, entries) as manifests:
            if manifests is not None:
                checkpoint[KEY] = manifests
            yield

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """What each rank alone knows first, then the main file. No collective."""
        with self._saving(checkpoint, filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The main file, and what this rank alone knew, for an engine that exists now or later."""
        self._verify(checkpoint_path)
        self._check_kind(checkpoint_path, *args, **kwargs)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._saves.load(checkpoint, self._main_path(checkpoint_path), self.global_rank)
        return checkpoint

    def _restore(self, engine: Engine) -> bool:
        """Go on where the checkpoint that was loaded left off; False without one. A collective of the world."""
        saved = self._saves.loaded.pop(0) if self._saves.loaded else None
        check_loaded_by_all(saved)
        if saved is not None:
            self._go_on(engine, saved)
        self._saves.loaded = []
        return saved is not None

    def remove_checkpoint(self, filepath: Any) -> None:
        """The main file and what is beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            remove_side_files(filepath)

    def _check_kind(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Raise ValueError for a checkpoint, which is not damaged, of a strategy that writes other ones."""


_BETWEEN_BATCHES = ("on_train_batch_start", "on_train_batch_end")


def _has_hooks_between_batches(trainer: Any) -> bool:
    """Return whether a user's hook runs between two batches. Lightning's own hooks do not read weights there."""
    hooks = (
        getattr(owner, name) for owner in (*trainer.callbacks, trainer.lightning_module) for name in _BETWEEN_BATCHES
    )
    packages = {str(getattr(hook, "__module__", "")).partition(".")[0] for hook in hooks}
    return not packages <= {"lightning", "pytorch_lightning", "lightning_sparse"}


def _ends_with_this_batch(trainer: Any) -> bool:
    """Return whether the fit is known to end with the batch that was just trained."""
    if 0 <= trainer.max_steps <= trainer.global_step:
        return True
    epochs = trainer.max_epochs
    return bool(trainer.is_last_batch and epochs is not None and 0 <= epochs <= trainer.current_epoch + 1)


def _call_around(
    owner: Any, name: str, before: Callable[[], None] | None = None, after: Callable[[Any], None] | None = None
) -> tuple[Any, str]:
    """Wrap a method of one object: call ``before()`` first and ``after(result)`` last. To undo this, delete the
    returned attribute with ``delattr``."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        output = method(*args, **kwargs)
        if after is not None:
            after(output)
        return output

    setattr(owner, name, call)
    return owner, name


class ReplicasAdapter(TrainerAdapter):
    """What the strategies that DDP is inside of do alike: a checkpoint may be a folder, which all ranks write."""

    _pieces: Sequence[State] = ()  # of optimizers, until these are to be loaded
    _late: LateGradients

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        """Wrap the model, and note which gradients DDP averages."""
        ddp = super()._setup_model(model)
        self._late = self._new_late_gradients()
        self._late.add(ddp)
        return ddp

    def post_backward(self, closure_loss: Tensor) -> None:
        """Average the gradients that DDP leaves out."""
        super().post_backward(closure_loss)
        if self._fitting:
            self._late.average(self.optimizers)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """One file, and what each rank alone knows beside it; or a folder of it all, by a collective of the world."""
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise ValueError(
                f"storage_options={storage_options!r} are for a file, and a distributed checkpoint is a folder: leave "
                f"them out, or save one file (save_distributed_checkpoint=False)."
            )
        if type(self.checkpoint_io).__name__ != "TorchCheckpointIO":
            raise ValueError(
                f"{type(self.checkpoint_io).__name__} writes files, and a distributed checkpoint is a folder that all "
                f"ranks write: leave the plugin out, or save one file (save_distributed_checkpoint=False)."
            )
        engines = self._saved_engines() if distributed.STATES in checkpoint else []
        alike = dict(self.lightning_module.named_parameters(remove_duplicate=False))
        with together(Path(filepath), self.root_device):  # or ranks would wait for one that has nothing to write
            entries = self._own_entries(checkpoint) if engines else {}
            pieces = distributed.split(checkpoint, engines, entries, alike)
        checkpoint[KEY] = [self._saves.manifest_of(engine, index) for index, engine in enumerate(engines)]
        with self._whole(filepath) as folder:
            dcp.save(pieces, checkpoint_id=folder)  # type: ignore[attr-defined]  # re-exported, unannounced
            if self.is_global_zero:
                torch.save(checkpoint, folder / META)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The main file, or what stands for it in a folder."""
        self._pieces, folder = (), Path(self._main_path(checkpoint_path))
        if not (folder / META).is_file():
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._verify(folder)
        checkpoint, found = distributed.joined(folder, self._place, *args, **kwargs)
        self._saves.take(found, folder, self.global_rank)
        if found and found[0].kind == LocalUpdates.kind:
            self._pieces = found[0].optimizers(self._place)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers, from pieces of a node's devices if these are what was saved."""
        if not self._pieces:
            super().load_optimizer_state_dict(checkpoint)
            return
        engine, names = self.engine, {id(p): name for name, p in self.lightning_module.named_parameters()}
        whole = [(each, [(p, Part(0, 0, p.numel())) for p in trained_by(each)]) for each in self.optimizers]
        mine = engine.stepped() if isinstance(engine, LocalUpdates) else []
        if not mine and any(hasattr(each, "consolidate_state_dict") for each in self.optimizers):
            raise ValueError(
                "this checkpoint has optimizer states in pieces of 'mstopk_local', which a step that ranks share "
                "cannot take up: remove PTOCallback, or save one file there (save_distributed_checkpoint=False)."
            )
        optimizer_state.check(self.optimizers, self._pieces)
        optimizer_state.load(names, mine or whole, self._pieces)
        self._pieces = ()


# -- gradients ---------------------------------------------------------------------------------------------------------


class MSTopKHierMixin(ReplicasAdapter):
    """DDP that reduces gradients inside each node first; nodes exchange only the largest entries.

    Args:
        node_name: Name of this process's node. All ranks need one. Default: the environment variable
            LIGHTNING_SPARSE_NODE, else the host (see lightning_sparse.topology).
        save_distributed_checkpoint: Save a checkpoint as a folder to which each rank writes its part, instead of one
            file. A file can be read by any strategy; each rank writes its residual to one more file next to it.
        gradient_as_bucket_view: Let gradients be views of DDP's buckets, which saves a copy.
        **kwargs: options of `HierConfig` (``density``, ``exchange``, ...), and DDPStrategy's and
            DistributedDataParallel's own. On GPUs ``bucket_cap_mb`` grows with the devices of a node.

    Raises:
        ValueError: for a bad value, an unknown option, or one that cannot be combined with this strategy.
    """

    @with_options_of(HierConfig, OWN)
    def __init__(
        self,
        *,
        node_name: str | None = None,
        save_distributed_checkpoint: bool = False,
        gradient_as_bucket_view: bool = True,
        **kwargs: Any,
    ) -> None:
        config = take(HierConfig, OWN, kwargs)
        check_options(type(self), kwargs)
        self._together = self._save_distributed_checkpoint = save_distributed_checkpoint
        self._begin(config, node_name, HierState.kind)
        self._gradients = GradientEngines(config)
        self.engines = self._gradients.states
        # LightningCLI reads this call to know which options a YAML file may give.
        super().__init__(gradient_as_bucket_view=gradient_as_bucket_view, **kwargs)
        self._resumes = False

    @property
    def hier_state(self) -> HierState | None:
        """The engine of the module that is trained; None before the first fit."""
        return self.engines[-1] if self.engines else None

    def _shared_options(self) -> dict[str, Any]:
        return {"find_unused_parameters": bool(self._ddp_kwargs.get("find_unused_parameters", False))}

    def setup(self, trainer: Any) -> None:
        """Refuse what cannot work, then let DDPStrategy set up."""
        self._prepare_ddp()
        if trainer.state.fn == "fit":
            _refuse_static_graph_with_accumulation(trainer, self._ddp_kwargs)
        else:
            # A checkpoint that was loaded for testing does not concern the next fit.
            self._saves.loaded, self._resumes = [], False
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        """Wrap it, with buckets of a size that suits the exchange."""
        with self._sized_buckets(model):
            return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        """Lightning registers comm hooks on CUDA only; this one also runs on the CPU."""
        unused = self._shared_options()["find_unused_parameters"]
        state = self._gradients.attach(
            self.model, self._place, self.precision_plugin, find_unused=unused, fresh=self._resumes
        )
        self._gradients.keep_only(state)
        self._take_up(state)

    def _take_up(self, state: HierState) -> None:
        """Go on where the checkpoint that was loaded left off."""
        if not self._restore(state) and self._resumes:
            state.restart()  # residuals belong to other weights
        self._resumes = False

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the optimizers and watch them: a residual counts only when its gradient was stepped."""
        super().setup_optimizers(trainer)
        state = self.hier_state
        if state is None or not self._fitting:
            return
        self._gradients.watch(self.optimizers)
        if not self._gradients.watched[state]:
            state.watch([])
        for warning in (_idle(self.lightning_module, self.optimizers), _unlike_buffers(self.lightning_module)):
            if warning and state.active:
                state.log_once(warning, logging.WARNING)

    def on_train_start(self) -> None:
        """Set the length of the warm-up: by now data loaders exist, and loops are where they were saved."""
        super().on_train_start()
        state = self.hier_state
        if state is None or not state.active or not self._fitting:
            return
        if state.warmup == Warmup():
            state.warmup = _default_warmup(self.lightning_module.trainer.estimated_stepping_batches)
        if self.config.exchange != "dense" and state.warmup.describe():
            state.log_once(state.warmup.describe())

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Before each backward: settle the last round, and set how the next one goes."""
        super().pre_backward(closure_loss)
        state = self.hier_state
        if state is not None and self._fitting:
            state.epoch = self.lightning_module.current_epoch
            state.before_backward(_untoggled(self.lightning_module, self.optimizers))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Mostly DDP does not exist yet: residuals are kept until it does. In the middle of a fit (the search for a
        learning rate returns to its start) they are restored at once."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._resumes = True
        if self.hier_state is not None and self._fitting:
            self._take_up(self.hier_state)
        return checkpoint


def _default_warmup(steps: float) -> Warmup:
    """Where the user gives none.

    Args:
        steps: that Trainer expects; infinite or not positive where it cannot tell.
    """
    known = 0 < steps < math.inf
    return Warmup(DEFAULT_EPOCHS, math.ceil(DEFAULT_SHARE * steps) if known else None)


def _refuse_static_graph_with_accumulation(trainer: Any, ddp_kwargs: dict[str, Any]) -> None:
    if not ddp_kwargs.get("static_graph"):
        return
    factor = _most_accumulated(trainer)
    if factor > 1:
        raise ValueError(
            f"static_graph=True with accumulate_grad_batches={factor}: DDP itself crashes on this pair, whatever the "
            f"hook (pytorch/pytorch#187732). Drop one of the two."
        )


def _most_accumulated(trainer: Any) -> int:
    """Batches between two steps, at most: of the option, and of a `GradientAccumulationScheduler`."""
    schedules = [getattr(callback, "scheduling", None) for callback in trainer.callbacks]
    most: int = max([trainer.accumulate_grad_batches, *(n for each in schedules if each for n in each.values())])
    return most


def _untoggled(module: Any, optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Why residuals must wait: with several optimizers a backward that reaches the parameters of more than one leaves
    gradients that the user throws away, and a residual would bring them back later."""
    if module.automatic_optimization:
        return ""
    reached = sum(any(p.requires_grad for p in parameters_of(each)) for each in optimizers)
    if reached < 2:
        return ""
    return "a backward reaches the parameters of several optimizers; wrap it in toggle_optimizer() to send it sparsely"


def _unlike_buffers(module: Any) -> str:
    """A warning about buffers that DDP does not broadcast, empty for none."""
    if module.automatic_optimization or not any(b.is_floating_point() and b.numel() for b in module.buffers()):
        return ""
    return (
        "in manual optimization DDP broadcasts no buffers, so the statistics of batch norm differ between ranks, as "
        "with strategy='ddp', and a checkpoint holds the statistics of rank 0. Use SyncBatchNorm, or "
        "strategy='mstopk_local', which averages them."
    )


def _idle(module: Any, optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """A warning about parameters in no optimizer, empty for none. Their gradients are never zeroed either: they grow,
    take places among the largest entries, and start from zero with a resume."""
    stepped = {id(p) for each in optimizers for p in parameters_of(each)}
    idle = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in stepped]
    if not stepped or not idle:
        return ""
    return (
        f"{len(idle)} parameter(s) require gradients and are in no optimizer ({', '.join(idle[:3])}): what is sent for "
        f"them is not sent for others. Freeze them with requires_grad_(False), or give them to an optimizer."
    )


# -- updates -----------------------------------------------------------------------------------------------------------


class MSTopKLocalMixin(ReplicasAdapter):
    """DDP inside each node. Each node has its own optimizer, and nodes exchange the largest updates.

    Args:
        node_name: Name of this process's node. All ranks need one. Default: the environment variable
            LIGHTNING_SPARSE_NODE, else the host (see lightning_sparse.topology).
        save_distributed_checkpoint: Save a checkpoint as a folder to which each rank writes its part, instead of one
            file. In both cases, each rank saves its optimizer state and pending updates.
        gradient_as_bucket_view: Let gradients be views of DDP's buckets, which saves a copy.
        **kwargs: options of `UpdatesConfig` (``density``, ``step_ahead``, ...), and DDPStrategy's and
            DistributedDataParallel's own.

    Raises:
        ValueError: for a bad value, an unknown option, or one that cannot be combined with this strategy.
    """

    _engine: ClassVar[type[LocalUpdates]] = LocalUpdates
    _config: ClassVar[type[UpdatesConfig]] = UpdatesConfig
    _own: ClassVar[tuple[str, ...]] = OWN_OF_UPDATES
    _refused: ClassVar[Mapping[str, str]] = REFUSED_BY_UPDATES
    _inside_the_node = True

    @with_options_of(UpdatesConfig, OWN_OF_UPDATES)
    def __init__(
        self,
        *,
        node_name: str | None = None,
        save_distributed_checkpoint: bool = False,
        gradient_as_bucket_view: bool = True,
        **kwargs: Any,
    ) -> None:
        config = take(self._config, self._own, kwargs)
        folders = {"save_distributed_checkpoint": save_distributed_checkpoint or None}
        check_options(type(self), {**kwargs, **folders}, self._own, self._refused)
        self._together = self._save_distributed_checkpoint = save_distributed_checkpoint
        self._begin(config, node_name, self._engine.kind)
        # LightningCLI reads this call to know which options a YAML file may give.
        super().__init__(gradient_as_bucket_view=gradient_as_bucket_view, **kwargs)

    @property
    def updates(self) -> LocalUpdates | None:
        """The engine of the module that is trained; None before the first fit."""
        return self.engines[-1] if self.engines else None

    def setup(self, trainer: Any) -> None:
        """Let DDPStrategy set up inside the node, then begin to exchange updates."""
        self._prepare_ddp()
        self._keep_hook_inside()
        if trainer.state.fn == "fit":
            _refuse_static_graph_with_accumulation(trainer, self._ddp_kwargs)
        super().setup(trainer)
        if trainer.state.fn != "fit":
            self._saves.loaded = []  # a checkpoint that was loaded for testing does not concern the next fit
            return
        for before in self.engines:
            before.detach(self.optimizers)
        self._leave_gradients(self.model)
        self.engines[:] = [self._new_updates(self.lightning_module, self.optimizers)]
        self._restore(self.engines[0])
        self._show_to_hooks(trainer)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Skip a needless reduction by DDP: in manual optimization Lightning enables it after the first batch."""
        if self._fitting:
            self._leave_gradients(self.model)
        super().pre_backward(closure_loss)

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

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of this node's optimizer, on the first device of each node; all ranks call it."""
        inner = getattr(optimizer, "_optimizer", optimizer)  # of a LightningOptimizer
        if self._save_distributed_checkpoint and self.updates is not None and self.updates.active:
            return {}  # each device saves its pieces
        state = self._optimizer_state(inner)
        return super().optimizer_state(optimizer) if state is None else state

    def _own_entries(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Each node has optimizer states of its own; the main file has those of the first."""
        own = ("optimizer_states", type(self.precision_plugin).__qualname__)
        writes = self._place.device_index == 0 and self._place.node_index > 0
        return plain({name: checkpoint[name] for name in own if name in checkpoint}) if writes else {}

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The main file, with the optimizer states of this node in the place of node 0's."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        checkpoint.update(self._saves.entries(self._place))
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Weights loaded in the middle of a fit (the search for a learning rate) are the global ones from then on."""
        super().load_model_state_dict(checkpoint, strict)
        if self.engine is not None and self._fitting:
            self.engine.restart()
            self._restore(self.engine)
            self._show()


# -- nodes that come and go --------------------------------------------------------------------------------------------


class MSTopKElasticMixin(ElasticAdapter, MSTopKLocalMixin):
    """Exchange of updates between nodes that join and leave. Each node has its own Trainer (``num_nodes=1``, DDP
    inside). torchft's lighthouse lists the nodes.

    A node that joins begins with the weights, the optimizer's state, the schedules and the progress of another node.

    Args:
        node_name: Name of this process's node. Default: the host.
        gradient_as_bucket_view: Let gradients be views of DDP's buckets, which saves a copy.
        **kwargs: options of `ElasticConfig` (``lighthouse``, ``min_nodes``, ``timeout``, ``density``, ...), and
            DDPStrategy's and DistributedDataParallel's own.

    Raises:
        ValueError: for a bad value, an unknown option, or one that cannot be combined with this strategy.
    """

    _engine, _config, _own, _refused = ElasticUpdates, ElasticConfig, OWN_OF_ELASTIC, REFUSED_BY_ELASTIC
    _another_writes = False  # checkpoints

    @with_options_of(ElasticConfig, OWN_OF_ELASTIC)
    def __init__(self, *, node_name: str | None = None, gradient_as_bucket_view: bool = True, **kwargs: Any) -> None:
        super().__init__(node_name=node_name, gradient_as_bucket_view=gradient_as_bucket_view, **kwargs)

    def setup(self, trainer: Any) -> None:
        """Find the other nodes."""
        super().setup(trainer)
        if trainer.state.fn == "fit":
            trainer.fit_loop._combined_loader = None  # one that configure_optimizers() asked for is dealt to nobody
            self.engines[-1].show_shared()  # to hooks before the first batch
            self.engines[-1].watch()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Deal samples to the nodes that are there, if the loader can."""
        if self.elastic is not None:
            self.elastic.deal(dataloader, _most_accumulated(self.lightning_module.trainer))
            self._tell_epoch(dataloader)  # before Lightning does, which fetches a batch before that
        return super().process_dataloader(dataloader)

    def on_train_start(self) -> None:
        """Draw from the epoch that is trained. Where a run resumes, Lightning trains on what it has begun to fetch, and
        takes up the next epoch only then if a checkpoint was saved after the last batch of one."""
        super().on_train_start()
        loop = self.lightning_module.trainer.fit_loop
        self._pass_over_empty_epochs(loop)
        if any([self._tell_epoch(each) for each in loop._combined_loader.flattened]):
            iter(loop._data_fetcher)

    def _pass_over_empty_epochs(self, loop: Any) -> None:
        """Begin with an epoch that has a batch for this node. An epoch without batches has no validation, so callbacks
        and schedules that monitor a metric would fail."""
        while self.elastic is not None and not loop.done:
            epoch = loop.epoch_progress.current.processed
            if self.elastic.has_batch(epoch):
                return
            self.elastic.log_once(f"epoch {epoch} is skipped: it has no batch left for this node")
            _pass_over_epoch(loop)

    def _tell_epoch(self, dataloader: Any) -> bool:
        """Tell a loader whose samples are dealt which epoch is trained; False for others."""
        dealt = dealt_by(dataloader)
        if dealt is not None:
            dealt.set_epoch(self.lightning_module.trainer.fit_loop.epoch_progress.current.processed)
        return dealt is not None

    def _new_updates(self, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> ElasticUpdates:
        updates = super()._new_updates(module, optimizers)
        if updates.taken is not None:
            checkpoint = {**updates.taken["extra"], "optimizer_states": [updates.taken["optimizer"]]}
            updates.taken = None
            connector = self.lightning_module.trainer._checkpoint_connector
            connector._loaded_checkpoint = checkpoint  # Lightning restores the rest of it, as of a file
            connector.restore_callbacks()
        return updates

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Train this node's own model; before that, give nodes that join what they ask for."""
        super().on_train_batch_start(batch, batch_idx)
        if self.elastic is not None:
            self.elastic.serve(self._progress)

    def on_validation_start(self) -> None:
        """Validate the global weights; the other nodes do not wait for it."""
        super().on_validation_start()
        if self.elastic is not None and self._fitting:
            self.elastic.watch()

    def _progress(self) -> dict[str, Any]:
        """All that a checkpoint has but weights, optimizer and hyperparameters, which may be of any type."""
        trainer = self.lightning_module.trainer
        checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        left_out = ("state_dict", "optimizer_states", "hyper_parameters", "datamodule_hyper_parameters", "hparams_type")
        return {name: each for name, each in checkpoint.items() if name not in left_out}

    def on_exception(self, exception: BaseException) -> None:
        """Send what is pending when the process is told to end."""
        super().on_exception(exception)
        if type(exception).__name__ == "SIGTERMException" and self.elastic is not None:
            self.elastic.finish()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """The first node writes."""
        if not self._writes:
            self._another_writes = True
            return
        if self._another_writes:
            self._another_writes = False
            log.info(
                "this node writes checkpoints from now on, because the node that wrote them has left. Callbacks do not "
                "remove the checkpoints that it left in %s",
                Path(filepath).parent,
            )
        if self.elastic is not None:
            checkpoint[ELASTIC_KEY] = list(self.elastic.version)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Weights, optimizer and progress; nodes that load the same file go on together. A fit after an evaluation of
        the file has its weights, and begins with the first sample."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._loaded = Version(*checkpoint[ELASTIC_KEY]) if ELASTIC_KEY in checkpoint else None
        if self._loaded is not None and self.lightning_module.trainer.state.fn != "fit":
            self._loaded = self._loaded._replace(place=0)
        return checkpoint

    def remove_checkpoint(self, filepath: Any) -> None:
        """The first node removes."""
        if self._writes:
            super().remove_checkpoint(filepath)


def _pass_over_epoch(loop: Any) -> None:
    progress = loop.epoch_progress
    loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
    for each in (progress.current, progress.total):
        each.ready = each.started = each.processed = each.completed = each.processed + 1
    loop.reset_restart_stage()
    loop.restarting = False


# -- shards ------------------------------------------------------------------------------------------------------------


class MSTopKFSDPMixin(ShardsAdapter, TrainerAdapter):
    """FSDP2 inside each node, for models that are too large for one device. Nodes exchange the largest updates.

    ``configure_model`` shards the model over ``self.device_mesh["shard"]``. Without that hook, each child of the
    LightningModule is sharded: first its repeated blocks, then the rest. With ``precision="bf16-mixed"`` weights are
    then gathered in bf16 and gradients are summed in fp32.

    Args:
        send: What nodes exchange: ``"updates"`` or ``"gradients"``. ``"updates"``: each node's optimizer steps its
            shards, and nodes exchange the changes. ``"gradients"``: nodes exchange gradients in FSDP2's hook, and all
            nodes have equal weights. With AdamW send updates, or send all gradients (``exchange="dense16"`` or
            ``"dense"``).
        node_name: Name of this process's node. All ranks need one. Default: the environment variable
            LIGHTNING_SPARSE_NODE, else the host (see lightning_sparse.topology).
        save_distributed_checkpoint: Save a checkpoint as a folder to which each rank writes its part, instead of one
            file. A file has the whole model and can be read by any strategy.
        process_group_backend: Backend of the process groups. Default: NCCL on GPUs, else Gloo.
        timeout: Timeout of the process groups, a timedelta.
        **kwargs: options of `ShardsConfig` (``density``, ``step_ahead``, ...).

    Raises:
        ValueError: for a bad value, or an option that this strategy sets itself.
    """

    @with_options_of(ShardsConfig, OWN_OF_FSDP)
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
        self._begin_shards(send, node_name, kwargs)
        given = {} if timeout is None else {"timeout": timeout}
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            **given,
        )

    @property
    def updates(self) -> LocalUpdates | None:
        """The engine of the module that is trained; None before the first fit, and with ``send="gradients"``."""
        return self.engines[-1] if self.engines and self.send == "updates" else None

    @property
    def gradients(self) -> ShardedGradients | None:
        """The engine of the module that is trained; None before the first fit, and with ``send="updates"``."""
        return self.engines[-1] if self.engines and self.send == "gradients" else None

    @property
    def _fitting(self) -> bool:
        return bool(self.lightning_module.trainer.state.fn == "fit")

    def setup_environment(self) -> None:
        """The mesh, which ``configure_model`` finds as ``self.device_mesh``."""
        super().setup_environment()
        module = self.lightning_module
        module._device_mesh = self._device_mesh = mesh_of(self._place)
        if type(module).configure_model.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
            options = options_for(self.precision_plugin.precision)
            module.configure_model = partial(_shard_children, module, self._device_mesh, **options)

    def setup(self, trainer: Any) -> None:
        """Let Lightning set up the sharded model and its optimizers, then begin to exchange."""
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        earlier = self.gradients
        for before in self.engines:
            before.detach(self.optimizers)
        if self.send == "gradients":
            self.engines[:] = [ShardedGradients(self.lightning_module, self.config, self._place)]
            if earlier is not None:
                self.engines[0].take_over(earlier)
            self.engines[0].watch(self.optimizers)
        else:
            self.engines[:] = [self._new_updates(self.lightning_module, self.optimizers)]
        self._show_to_hooks(trainer)

    def _drop_gathered(self) -> None:
        """Show shards to hooks: FSDP2 keeps gathered parameters after an evaluation, and would drop their changes."""
        drop_gathered(self.lightning_module)

    def on_train_start(self) -> None:
        """Set the length of the density warm-up of gradients; data loaders exist by now."""
        super().on_train_start()
        gradients = self.gradients
        if gradients is None or not gradients.active or not self.config.leaves_entries_out:
            return
        if gradients.warmup == Warmup():
            gradients.warmup = _default_warmup(self.lightning_module.trainer.estimated_stepping_batches)
        if gradients.warmup.describe():
            gradients.log_once(gradients.warmup.describe())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Set the epoch of the density warm-up."""
        super().on_train_batch_start(batch, batch_idx)
        if self.gradients is not None:
            self.gradients.epoch = self.lightning_module.current_epoch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Explain torch's error about shards that were not gathered."""
        with explained_if_mixed():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Explain torch's error about shards that were not gathered."""
        with explained_if_mixed():
            return super().validation_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Micro-batches that are accumulated stay inside the node."""
        with self.gradients.accumulating() if self.gradients is not None else nullcontext():
            yield

    def teardown(self) -> None:
        """The module is the user's again."""
        if isinstance(vars(self.lightning_module).get("configure_model"), partial):
            del self.lightning_module.configure_model
        super().teardown()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _saving(self, checkpoint: dict[str, Any], filepath: Any) -> Iterator[None]:
        """All ranks write a folder, and its optimizer states are those of the first node."""
        with super()._saving(checkpoint, filepath):
            if self._save_distributed_checkpoint and self._place.node_index > 0:
                checkpoint.pop("optimizer_states", None)
            yield
            with said_if_long("waiting for all ranks to write a checkpoint"):
                dist.barrier()  # before files of earlier saves are removed

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """A file, or a folder that takes its name when it is whole."""
        with self._whole(filepath) as path:
            super().save_checkpoint(checkpoint, path, storage_options)

    def _check_kind(self, path: Any, *args: Any, **kwargs: Any) -> None:
        distributed.check_sharded(Path(self._main_path(path)), *args, **kwargs)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model and its optimizers; in a fit this device goes on where it was saved."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self.engine is not None and self._fitting:
            self.engine.restart()
            self._restore(self.engine)
            self._show()
        self._saves.loaded = []
        return checkpoint


def _shard_children(module: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Not the module itself: ``training_step`` calls children, and gathers what it is to use by their forward."""
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    held = [{id(p) for p in child.parameters()} for child in children]
    lists = any(isinstance(child, (nn.ParameterList, nn.ParameterDict)) for child in children)
    alone = lists or any(True for _ in module.parameters(recurse=False))
    if alone or sum(map(len, held)) > len(set().union(*held)):
        why = "parameters of its own" if alone else "children that share parameters"
        raise ValueError(
            f"{type(module).__name__} has {why}, and without configure_model() each child is sharded by itself: "
            f"{by_hand(module)}"
        )
    for child in children:
        shard(child, mesh, **options)
