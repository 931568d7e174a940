"""What the DataModules share, as a mixin that does not import Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:

    class _Host:
        """The part of LightningDataModule that the mixins use."""

        trainer: Any

        def __init__(self) -> None: ...
else:
    _Host = object


class DataModuleMixin(_Host):
    """Where this process is in the run, and the Trainer's count of batches."""

    def __init__(self) -> None:
        super().__init__()
        self._stage = "fit"

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
