"""What Trainer's strategies of updates do alike, whatever averages gradients inside the node; imports no Lightning.

====================== ===============================================================================================
method                 why
====================== ===============================================================================================
optimizer_step         the exchange, also where a loss scaler skips the step
on_train_batch_start   from the weights that the world sees to the node's own
post_training_step,    and back: at the end of each epoch, before callbacks run, and for evaluation
on_validation_start
on_train_end           what is pending is sent
====================== ===============================================================================================
"""

from typing import Any

from lightning_sparse.strategy import side_files
from lightning_sparse.strategy.hosts import TrainerHost
from lightning_sparse.strategy.local_core import LocalCore
from lightning_sparse.updates import LocalUpdates


class LocalTrainerMixin(LocalCore, TrainerHost):
    """Steps, and which weights the model holds when."""

    _shows_each_step = _flushes_each_epoch = False

    @property
    def updates(self) -> LocalUpdates | None:
        """Of the module that is trained; None before the first fit."""
        return self.local_updates[-1] if self.local_updates else None

    @property
    def _fitting(self) -> bool:
        """Whether the model is set up for training."""
        raise NotImplementedError

    def _look_at_callbacks(self, trainer: Any) -> None:
        """Which of them average weights."""
        names = {base.__name__ for callback in trainer.callbacks for base in type(callback).__mro__}
        self._shows_each_step = "WeightAveraging" in names
        self._flushes_each_epoch = "StochasticWeightAveraging" in names

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step, and exchange what that did, whether or not a loss scaler skipped it."""
        if self.updates is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self.updates.before_step(optimizer)
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.updates.step(optimizer)
        if self.lightning_module.automatic_optimization:
            self._show_after_batch()
        return output

    def post_training_step(self) -> None:
        """Manual optimization ends here."""
        super().post_training_step()
        if self.updates is not None and not self.lightning_module.automatic_optimization:
            self._show_after_batch()

    def _show_after_batch(self) -> None:
        """Callbacks that average weights, or run at the end of an epoch, are to see the shared ones."""
        assert self.updates is not None
        module, trainer = self.lightning_module, self.lightning_module.trainer
        steps = trainer.global_step + int(module.automatic_optimization)  # Trainer counts this one later
        last = trainer.is_last_batch or 0 <= trainer.max_steps <= steps
        if last and self._flushes_each_epoch:
            self.updates.finish()
        elif last or self._shows_each_step:
            self.updates.show_shared()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Train this node's own model."""
        super().on_train_batch_start(batch, batch_idx)
        if self.updates is not None:
            self.updates.show_own()

    def on_validation_start(self) -> None:
        """Validate the shared weights; in a fit they stay until the next batch."""
        super().on_validation_start()
        if self.updates is not None and self._fitting:
            self.updates.show_shared()

    def on_train_end(self) -> None:
        """Send what is pending: all ranks end with the same weights."""
        super().on_train_end()
        if self.updates is not None:
            self.updates.finish()

    def teardown(self) -> None:
        """End the threads of the exchange."""
        for updates in self.local_updates:
            updates.end()
        super().teardown()

    def remove_checkpoint(self, filepath: Any) -> None:
        """The main file and what is beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            side_files.remove_side_files(filepath)
