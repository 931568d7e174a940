"""Common part of the strategies for the Trainer, as mixins that import no Lightning.

``lightning_sparse.flavours`` binds them to the strategies of ``pytorch_lightning`` and of ``lightning.pytorch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.agree import extremes
from lightning_sparse.checkpoint.folder import META, raise_on_all_ranks
from lightning_sparse.checkpoint.interrupted import why_not_saved
from lightning_sparse.checkpoint.restore import check_loaded_by_all
from lightning_sparse.checkpoint.side_files import CHECKPOINT_KEY, remove_side_files
from lightning_sparse.checkpoint.state import State
from lightning_sparse.engine import Engine
from lightning_sparse.exchange import HierCommunicator
from lightning_sparse.messages import log
from lightning_sparse.pto.step import has_unfinished_step
from lightning_sparse.sharding import Part, parameter_names, trainable_params
from lightning_sparse.strategy import distributed
from lightning_sparse.strategy.adapter import Adapter, Host, clone_state_dict
from lightning_sparse.strategy.late import LateGradients
from lightning_sparse.strategy.signals import TrainerSignals
from lightning_sparse.updates import LocalUpdates, optimizer_state


class TrainerAdapter(Adapter, Host):
    """Translates the Trainer's hooks into methods of an engine.

    Outside training batches, the module holds the global weights whenever a hook of a callback or of the module runs.
    """

    _callback_averages_every_step = _callback_averages_every_epoch = _hooks_run_between_batches = False
    _in_batch = _over = False
    _steps_before = _batches_before = 0  # at the start of the epoch
    _dumps_states = False  # whether the last checkpoint was made with optimizer states
    _not_saved = ""  # reason why no checkpoint can be saved after an exception
    _wrapped_methods: Sequence[tuple[Any, str]] = ()  # methods of the Trainer and its loops
    _signals: TrainerSignals | None = None

    @property
    def engine(self) -> Any:
        """The engine of the trained module; None before the first fit."""
        return self.engines[-1] if self.engines else None

    @property
    def _fitting(self) -> bool:
        return isinstance(self.model, DistributedDataParallel)

    def setup_environment(self) -> None:
        self._release_trainer()
        trainer = self.lightning_module.trainer
        self._not_saved, save = "", trainer.save_checkpoint

        @wraps(save)
        def save_together(filepath: Any, *args: Any, **kwargs: Any) -> None:
            if trainer.interrupted and self._gives_up_saving():
                log.warning("%s is not saved: %s. Resume from the last checkpoint.", filepath, self._not_saved)
            else:
                save(filepath, *args, **kwargs)

        # A save is collective. After an exception, the Trainer may save only if all ranks can.
        trainer.save_checkpoint = save_together
        self._wrapped_methods = [(trainer, "save_checkpoint")]
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self._listen_for_signals(trainer)

    def _listen_for_signals(self, trainer: Any) -> None:
        if self.world_size > 1:
            self._signals = TrainerSignals(trainer)
            # `ModelCheckpoint` saves at this point, too. After a later save in the last batch of an epoch, Lightning
            # would resume with one batch too many.
            progress = trainer.fit_loop.epoch_loop.batch_progress
            around = call_around(progress, "increment_completed", before=self._signals.end_batch)
            self._wrapped_methods = [*self._wrapped_methods, *self._signals.replaced, around]

    def _show_to_hooks(self, trainer: Any) -> None:
        """Let hooks see the global weights from now on. A collective of the world."""
        names = {base.__name__ for callback in trainer.callbacks for base in type(callback).__mro__}
        wanted: list[int] = [
            "WeightAveraging" in names,
            "StochasticWeightAveraging" in names,
            _has_hooks_between_batches(trainer),
        ]
        if self.engine is not None and self.engine.active:  # a callback may exist on one rank only
            wanted, _ = extremes(wanted, HierCommunicator(self.topology).flat_all_reduce, self.root_device)
        self._callback_averages_every_step, self._callback_averages_every_epoch, self._hooks_run_between_batches = map(
            bool, wanted
        )
        self._in_batch = self._over = False
        self._steps_before = self._batches_before = 0
        # Lightning calls a strategy's hooks after the hooks of callbacks and the module. So the loops call the engine
        # first.
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._wrapped_methods = [
            *self._wrapped_methods,
            call_around(epoch.automatic_optimization, "run", after=self._after_batch),
            call_around(epoch.manual_optimization, "run", after=self._after_batch),
            call_around(epoch, "_should_check_val_fx", after=self._show_if),  # hooks run before the loop
            call_around(epoch.val_loop, "on_run_start", before=self._show),
            call_around(epoch.val_loop, "on_run_end", before=self._drop_gathered),
            call_around(fit, "on_advance_end", before=self._end_epoch),
            call_around(fit, "on_run_end", before=self._finish),
        ]
        if self.engine is not None and self.engine.in_step:
            self.engine.swap_in_global_weights()

    def _release_trainer(self) -> None:
        for owner, name in self._wrapped_methods:
            delattr(owner, name)
        self._wrapped_methods = ()

    def _show(self) -> None:
        if self.engine is not None:
            self.engine.swap_in_global_weights()

    def _drop_gathered(self) -> None:
        """Let hooks after an evaluation see parameters, not copies of them."""

    def _show_if(self, validates: bool) -> None:
        if validates:
            self._show()

    def _end_epoch(self) -> None:
        self._show()
        engine = self.engine
        idle = engine is not None and engine.steps == self._steps_before and engine.batches > self._batches_before
        if idle and engine.active:
            engine.warn_of_no_step()
        if engine is not None:
            self._steps_before, self._batches_before = engine.steps, engine.batches

    def _finish(self) -> None:
        if self.engine is not None:
            self.engine.finish()
            self.engine.swap_in_global_weights()

    # -- training ------------------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        engine = self.engine
        if engine is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        engine.before_step(optimizer)
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        # A loss scaler may have skipped the step on this rank. The engine's step is a collective, so it runs anyway.
        engine.step(optimizer)
        return output

    def _after_batch(self, _: Any) -> None:
        self._in_batch, engine, trainer = False, self.engine, self.lightning_module.trainer
        if engine is None or not engine.has_local_weights:
            return
        # Manual optimization may step the torch optimizer directly, without Lightning's wrapper.
        engine.send_unsent()
        # At the known end of the fit, send everything, so that the last validation and checkpoint have the final
        # weights.
        ends = engine.in_step and _ends_with_this_batch(trainer)
        if ends or (trainer.is_last_batch and self._callback_averages_every_epoch):
            self._finish()
        elif self._callback_averages_every_step:
            engine.swap_in_global_weights()
        elif self._hooks_run_between_batches and engine.in_step:
            engine.swap_in_global_weights(wait=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._in_batch = True
        if self.engine is not None:
            self.engine.batches += 1
            self.engine.swap_in_local_weights()
            self.engine.keep_global_weights()  # hooks before the first batch have set the weights

    def on_train_start(self) -> None:
        super().on_train_start()
        # `LearningRateFinder` runs the whole loop before training, which sets `_over`.
        self._over = False

    def on_validation_start(self) -> None:
        super().on_validation_start()
        # Hooks may have changed the weights differently on each node.
        if self.engine is not None and self._fitting:
            self.engine.average_changes()

    def on_train_end(self) -> None:
        super().on_train_end()
        if self.engine is not None:
            # Keep the weights that the last hooks left.
            self.engine.adopt_changes()
        self._over = True
        if self._signals is not None:
            self._signals.end_fit()

    def teardown(self) -> None:
        """Remove hooks from the model. Pending updates stay for a second fit of the same module."""
        self._release_trainer()
        if self._signals is not None:
            self._signals.close()
        for engine in self.engines:
            engine.close()
        super().teardown()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the global weights. In a fit, all ranks call it."""
        self._dumps_states, engine = False, self.engine
        if engine is None or not self._fitting or self._over:
            return super().lightning_module_state_dict()
        with engine.global_weights() if self._in_batch else nullcontext():
            # Between batches, the module keeps the global weights, for hooks that add to a checkpoint.
            engine.swap_in_global_weights()
            engine.adopt_changes()
            weights = super().lightning_module_state_dict()
            return clone_state_dict(weights) if engine.has_local_weights else weights

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        self._dumps_states = True
        state: dict[str, Any] = super().optimizer_state(optimizer)
        return state

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
        # `on_save_checkpoint` may remove the states on one rank only, but all ranks must take part.
        has_states = "optimizer_states" in checkpoint
        engines = self._saved_engines() if has_states or self._dumps_states else []
        self._dumps_states = False
        entries = self._rank_state(checkpoint) if engines and has_states else {}
        saving = self._side_files.saving(filepath, engines, self._timeout, entries, weights_only=not has_states)
        with saving as metadata_list:
            if metadata_list is not None:
                checkpoint[CHECKPOINT_KEY] = metadata_list
            yield

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        # Not a collective: the side files are written first, then the main file.
        with self._saving(checkpoint, filepath):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._verify(checkpoint_path)
        self._check_kind(checkpoint_path, *args, **kwargs)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        # The engine of these side files may not exist yet.
        self._side_files.load(checkpoint, self._main_path(checkpoint_path), self.global_rank)
        return checkpoint

    def _restore(self, engine: Engine) -> bool:
        """Continue from the loaded checkpoint; return False without one. A collective of the world."""
        saved = self._side_files.loaded.pop(0) if self._side_files.loaded else None
        check_loaded_by_all(saved)
        if saved is not None:
            self._restore_engine(engine, saved)
        self._side_files.loaded = []
        return saved is not None

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            remove_side_files(filepath)

    def _check_kind(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Raise ValueError for a checkpoint of a strategy that writes another kind."""


_BETWEEN_BATCHES = ("on_train_batch_start", "on_train_batch_end")


def _has_hooks_between_batches(trainer: Any) -> bool:
    hooks = (
        getattr(owner, name) for owner in (*trainer.callbacks, trainer.lightning_module) for name in _BETWEEN_BATCHES
    )
    # Lightning's own hooks do not read weights between batches.
    packages = {str(getattr(hook, "__module__", "")).partition(".")[0] for hook in hooks}
    return not packages <= {"lightning", "pytorch_lightning", "lightning_sparse"}


def _ends_with_this_batch(trainer: Any) -> bool:
    if 0 <= trainer.max_steps <= trainer.global_step:
        return True
    epochs = trainer.max_epochs
    return bool(trainer.is_last_batch and epochs is not None and 0 <= epochs <= trainer.current_epoch + 1)


def call_around(
    owner: Any, name: str, before: Callable[[], None] | None = None, after: Callable[[Any], None] | None = None
) -> tuple[Any, str]:
    """Wrap a method of one object: call ``before()`` first and ``after(result)`` last.

    To undo this, delete the returned attribute with ``delattr``.
    """
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
    """Common part of the strategies that use DDP: a checkpoint may be a folder, which all ranks write."""

    _pieces: Sequence[State] = ()  # optimizer states that are not loaded yet
    _late: LateGradients

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        ddp = super()._setup_model(model)
        self._late = self._new_late_gradients()
        self._late.add(ddp)
        return ddp

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._fitting:
            self._late.average(self.optimizers)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save one file and side files, or a folder. For a folder, every rank must call it."""
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise ValueError(
                f"storage_options={storage_options!r} apply to a file, but a distributed checkpoint is a folder. Omit "
                f"them, or save one file (save_distributed_checkpoint=False)."
            )
        if type(self.checkpoint_io).__name__ != "TorchCheckpointIO":
            raise ValueError(
                f"{type(self.checkpoint_io).__name__} writes files, but a distributed checkpoint is a folder that all "
                f"ranks write. Omit the plugin, or save one file (save_distributed_checkpoint=False)."
            )
        engines = self._saved_engines() if distributed.STATES in checkpoint else []
        alike = dict(self.lightning_module.named_parameters(remove_duplicate=False))
        with raise_on_all_ranks(
            Path(filepath), self.root_device
        ):  # otherwise, ranks would wait for a rank without a part
            entries = self._rank_state(checkpoint) if engines else {}
            pieces = distributed.split_checkpoint(checkpoint, engines, entries, alike)
        checkpoint[CHECKPOINT_KEY] = [
            self._side_files.metadata_of(engine, index) for index, engine in enumerate(engines)
        ]
        with self._checkpoint_target(filepath) as folder:
            dcp.save(pieces, checkpoint_id=folder)  # type: ignore[attr-defined]  # re-exported, unannounced
            if self.is_global_zero:
                torch.save(checkpoint, folder / META)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._pieces, folder = (), Path(self._main_path(checkpoint_path))
        if not (folder / META).is_file():
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._verify(folder)
        checkpoint, engine_checkpoints = distributed.merge_checkpoint(folder, self.topology, *args, **kwargs)
        self._side_files.take(engine_checkpoints, folder, self.global_rank)
        if engine_checkpoints and engine_checkpoints[0].kind == LocalUpdates.kind:
            self._pieces = engine_checkpoints[0].optimizers(self.topology)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if not self._pieces:
            super().load_optimizer_state_dict(checkpoint)
            return
        engine, names = self.engine, parameter_names(self.lightning_module)
        whole = [
            (optimizer, [(p, Part(0, 0, p.numel())) for p in trainable_params(optimizer)])
            for optimizer in self.optimizers
        ]
        mine = engine.stepped() if isinstance(engine, LocalUpdates) else []
        if not mine and any(hasattr(optimizer, "consolidate_state_dict") for optimizer in self.optimizers):
            raise ValueError(
                "this checkpoint has optimizer states in pieces of 'mstopk_local', which a sharded step cannot load. "
                "Remove PTOCallback, or save one file with 'mstopk_local' (save_distributed_checkpoint=False)."
            )
        optimizer_state.check(self.optimizers, self._pieces)
        optimizer_state.load(names, mine or whole, self._pieces)
        self._pieces = ()


def refuse_static_graph_with_accumulation(trainer: Any, ddp_kwargs: dict[str, Any]) -> None:
    if not ddp_kwargs.get("static_graph"):
        return
    factor = most_accumulated(trainer)
    if factor > 1:
        raise ValueError(
            f"static_graph=True with accumulate_grad_batches={factor}: DDP crashes with both (pytorch/pytorch#187732). "
            f"Omit one of them."
        )


def most_accumulated(trainer: Any) -> int:
    """Return the largest number of batches between two steps, from the option or a `GradientAccumulationScheduler`."""
    schedules = [getattr(callback, "scheduling", None) for callback in trainer.callbacks]
    most: int = max(
        [trainer.accumulate_grad_batches, *(n for schedule in schedules if schedule for n in schedule.values())]
    )
    return most
