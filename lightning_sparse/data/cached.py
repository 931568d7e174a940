"""What the DataModules of cached samples share, as a mixin that does not import Lightning.

A `Session` holds the open data; this module connects it to the Trainer's hooks and loggers.
"""

from __future__ import annotations

from typing import Any

from lightning_sparse.data.base import DataModuleMixin
from lightning_sparse.data.cache.manifest import class_names, num_classes
from lightning_sparse.data.cache.summary import metrics
from lightning_sparse.data.options import DataOptions
from lightning_sparse.data.pipeline.backend import ImageOptions
from lightning_sparse.data.pipeline.loader import EvalLoader, TrainLoader
from lightning_sparse.data.session import Formats, Session, open_session
from lightning_sparse.messages import described


class CachedMixin(DataModuleMixin):
    """The hooks of a DataModule of cached samples."""

    def __init__(self, options: DataOptions) -> None:
        super().__init__()
        self._options = options
        self.batch_size = options.batch_size
        self._session: Session | None = None
        self._epoch: int | None = None  # the current one
        self._num_classes: int | None = None

    def __str__(self) -> str:
        return described(type(self), repr(self._options.cache.source))

    @property
    def num_classes(self) -> int:
        """Number of folders in train/; with a list, of names in its first column of labels, or the largest number plus
        1. Available before setup, to create the model. `setup` checks that it is the same on all ranks."""
        if self._num_classes is None:
            self._num_classes = num_classes(self._options.cache, "train")
        return self._num_classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes: label i is that of the i-th. Empty if labels are numbers. Available before setup."""
        return class_names(self._options.cache, "train")

    def setup(self, stage: str) -> None:
        """Open the session. The process group exists, if the run uses one."""
        self._open(stage)
        self._num_classes = self._opened().check_classes(self._num_classes) or None

    def _open(self, stage: str, formats: Formats | None = None, backend: str | None = None) -> None:
        self._close()
        self._stage = stage
        node_rank, local_rank = self._position
        self._session = open_session(
            self._options,
            device=self._device,
            stage=stage,
            node_rank=node_rank,
            local_rank=local_rank,
            formats=formats,
            backend=backend,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run keeps, besides the state of its loaders; after a run, what that one had."""
        session = self._session
        if session is None:
            return super().state_dict()
        formats = {**self._last.get("formats", {}), **session.formats}
        return {**super().state_dict(), "formats": formats, "backend": session.backend}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the place in the epoch, and keep the format of the memory tier and the backend, unless options set
        them. Called after setup, on all ranks."""
        super().load_state_dict(state_dict)
        session, options = self._session, self._options
        if session is None:
            return
        formats = state_dict.get("formats", {}) if options.cache.format == "auto" else {}
        images = options.samples if isinstance(options.samples, ImageOptions) else None
        backend = state_dict.get("backend") if images is not None and images.backend == "auto" else None
        other = any(formats.get(split, own) != own for split, own in session.formats.items())
        if other or backend not in (None, session.backend):
            self._open(self._stage, formats, backend)

    def train_dataloader(self) -> TrainLoader:
        """Random batches of this rank."""
        loader = self._opened().train_loader(
            fixed=self._fixed,
            on_epoch=self._begin_epoch,
            on_resume=self._correct_batch_count,
        )
        return self._resume(loader)

    def val_dataloader(self) -> EvalLoader:
        """This rank's share of the samples to validate on, in order; in a test, of those to test on."""
        return self._opened().eval_loader()

    test_dataloader = predict_dataloader = val_dataloader

    def teardown(self, stage: str) -> None:
        """Log the last epoch and the summary, then close everything."""
        if self._session is not None and self._epoch is not None:
            self._end_epoch()
            self._session.log_once(self._session.summary())
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        """Close everything, without collectives: other ranks may be gone."""
        self._close()

    def _opened(self) -> Session:
        if self._session is None:
            raise ValueError(f"{type(self).__name__} has no loaders before setup(): call it, or use a Trainer.")
        return self._session

    def _begin_epoch(self, epoch: int) -> None:
        """Log the last epoch. A collective: all ranks start an epoch."""
        if self._epoch is not None and epoch != self._epoch:
            self._end_epoch()
        self._epoch = epoch

    def _end_epoch(self) -> None:
        assert self._epoch is not None
        counts = self._opened().tiers.end_epoch(self._epoch)
        if self.trainer is not None and self.trainer.is_global_zero:
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics(counts), step=self.trainer.global_step)

    def _close(self) -> None:
        self._forget_loader()
        session, self._session, self._epoch = self._session, None, None
        if session is not None:
            session.close()
