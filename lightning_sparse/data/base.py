"""What the DataModules share, as a mixin that does not import Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_sparse.data.pipeline.loader import TrainLoader

if TYPE_CHECKING:

    class _Host:
        """The part of LightningDataModule that the mixins use."""

        trainer: Any

        def __init__(self) -> None: ...
else:
    _Host = object


class DataModuleMixin(_Host):
    """Where this process is in the run, the place in the epoch, and the Trainer's count of batches.

    Lightning restores the state of a loader only if it makes the loader after it has read the checkpoint. It makes it
    earlier where ``configure_optimizers`` asks for ``trainer.estimated_stepping_batches``, as schedules do. So the
    place in the epoch is saved with the DataModule, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stage = "fit"
        self._train_loader: TrainLoader | None = None
        self._place: dict[str, Any] | None = None  # to go on from, until there is a loader
        self._last: dict[str, Any] = {}  # state at the end of the last run

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch; after a fit, that of its end, for ``trainer.save_checkpoint``."""
        return self._last if self._train_loader is None else {"train": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there in a fit. Called after setup, on all ranks."""
        if self.trainer is None or self.trainer.state.fn != "fit":
            return
        self._place = state_dict.get("train")
        if self._train_loader is not None:
            self._resume(self._train_loader)

    def _resume(self, loader: TrainLoader) -> TrainLoader:
        """The loader, at the place that was loaded."""
        self._train_loader = loader
        if self._place is not None:
            loader.load_state_dict(self._place)
            self._place = None
        return loader

    def _forget_loader(self) -> None:
        self._last = self.state_dict()
        self._train_loader = None

    @property
    def _position(self) -> tuple[int | None, int | None]:
        """(node_rank, local_rank); None without a Trainer."""
        trainer = self.trainer
        return (None, None) if trainer is None else (trainer.node_rank, trainer.local_rank)

    @property
    def _device(self) -> torch.device:
        """Device that the batches are for."""
        device: torch.device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        return device

    @property
    def _fixed(self) -> bool:
        """Whether every epoch has the samples of epoch 0."""
        return self.trainer is not None and bool(self.trainer.overfit_batches > 0)

    def _correct_batch_count(self, done: int) -> None:
        """Set the Trainer's count of this epoch's batches to batches of this run."""
        if self.trainer is not None:
            progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
            shift = done - progress.ready
            for name in ("ready", "started", "processed", "completed"):
                setattr(progress, name, getattr(progress, name) + shift)
