"""Base class of all DataModules, and the DataModules of cached samples, as mixins that do not import Lightning.

``lightning_sparse.flavours`` combines them with the LightningDataModule of ``pytorch_lightning`` and of
``lightning.pytorch``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch.distributed import ReduceOp

from lightning_sparse.data.cache.counts import metrics
from lightning_sparse.data.config import CacheConfig, ImageOptions, SampleOptions
from lightning_sparse.data.pipeline.loader import EvalLoader, TrainLoader
from lightning_sparse.data.session import DataOptions, Formats, Session, open_session
from lightning_sparse.data.sources.listing import classes_of
from lightning_sparse.messages import class_repr
from lightning_sparse.options import one_of, split_options, with_options_of

_Host: Any = object  # LightningDataModule, of which the mixins use `trainer`
_MEANS = ("mean", "avg", ReduceOp.AVG)


class _ExactMeans:
    """Lightning's `Strategy.reduce`, without rounding the means of whole numbers."""

    def __init__(self, reduce: Callable[..., Any]) -> None:
        self._reduce = reduce

    def __call__(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point() and reduce_op in _MEANS:
            # the type of Lightning's sums, so that means of both are rounded alike
            tensor = tensor.to(torch.promote_types(torch.get_default_dtype(), torch.float32))
        return self._reduce(tensor, group, reduce_op)


class DataModuleMixin(_Host):
    """Saves the position in the epoch with the DataModule, and corrects the Trainer's count of batches."""

    def __init__(self) -> None:
        super().__init__()
        self._stage = "fit"
        self._train_loader: TrainLoader | None = None  # the loader in use; before an epoch, the newest
        self._train_loaders: weakref.WeakSet[TrainLoader] | None = None  # None before setup: it cannot be pickled
        self._in_use = False
        # Lightning restores a loader's state only if it creates the loader after it has read the checkpoint. It creates
        # the loader earlier if `configure_optimizers` uses ``trainer.estimated_stepping_batches``, as schedulers do.
        # So the position is also saved with the DataModule.
        self._place: dict[str, Any] | None = None  # the saved position, until a loader is in use
        self._last: dict[str, Any] = {}  # state at the end of the last run

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch; after a fit, the position at its end."""
        return self._last if self._train_loader is None else {"train": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved position in a fit. Call it on all ranks, after setup."""
        if self.trainer is None or self.trainer.state.fn != "fit":
            return
        self._place = state_dict.get("train")
        if self._place is not None:
            for loader in self._train_loaders or ():
                loader.load_state_dict(self._place)

    def _resume(self, loader: TrainLoader) -> TrainLoader:
        # Programs also create loaders that they do not train on, for example for their length.
        if not self._in_use:
            self._train_loader = loader
        self._train_loaders = self._train_loaders or weakref.WeakSet()
        self._train_loaders.add(loader)
        loader.on_use = self._use
        if self._place is not None:
            loader.load_state_dict(self._place)
        return loader

    def _use(self, loader: TrainLoader) -> None:
        self._train_loader, self._in_use, self._place = loader, True, None

    def teardown(self, stage: str) -> None:
        self._close()
        self._place = None

    def on_exception(self, exception: BaseException) -> None:
        self._close()  # no collectives here: other ranks may have ended

    def _close(self) -> None:
        raise NotImplementedError

    def _forget_loader(self) -> None:
        self._last = self.state_dict()
        self._train_loader, self._train_loaders, self._in_use = None, None, False

    @property
    def _position(self) -> tuple[int | None, int | None]:
        trainer = self.trainer
        return (None, None) if trainer is None else (trainer.node_rank, trainer.local_rank)

    @property
    def _device(self) -> torch.device:
        device: torch.device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        return device

    def _average_exactly(self) -> None:
        # For `self.log(..., sync_dist=True)`, Lightning divides a mean of sums by a mean of counts, which it rounds
        # down. With 19 and 18 samples per rank, a model that is always right would have an accuracy above 1.
        if self.trainer is not None and not isinstance(self.trainer.strategy.reduce, _ExactMeans):
            self.trainer.strategy.reduce = _ExactMeans(self.trainer.strategy.reduce)

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


class CachedMixin(DataModuleMixin):
    def __init__(self, options: DataOptions) -> None:
        super().__init__()
        self._options = options
        self._session: Session | None = None
        self._epoch: int | None = None  # the current one
        self._num_classes: int | None = None

    def __str__(self) -> str:
        return class_repr(type(self), {"source": self._options.cache.source})

    @property
    def batch_size(self) -> int:
        """Samples per rank and step. A new value applies to the next loader, as `Tuner.scale_batch_size` needs."""
        return self._options.batch_size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        if "_options" not in vars(self):  # a subclass may set it before super().__init__(), which also gets it
            return
        self._options = replace(self._options, batch_size=size)
        if self._session is not None:
            self._session.options = replace(self._session.options, batch_size=size)

    @property
    def num_classes(self) -> int:
        """Number of classes, available before setup to create the model.

        It is the number of folders in train/. With a list, it is the number of names in its first column of labels, or
        the largest label plus 1.
        """
        if self._num_classes is None:
            self._num_classes = classes_of(self._options.cache, "train")[1]
        return self._num_classes

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes by label, available before setup. Empty if labels are numbers."""
        return classes_of(self._options.cache, "train")[0]

    def setup(self, stage: str) -> None:
        self._average_exactly()
        self._open(stage)
        self._num_classes = self._opened().check_classes(self._num_classes) or None

    def _open(self, stage: str, formats: Formats | None = None, backend: str | None = None) -> None:
        self._close()
        self._stage = stage
        self._session = open_session(
            self._options, position=self._position, device=self._device, stage=stage, formats=formats, backend=backend
        )

    def state_dict(self) -> dict[str, Any]:
        session = self._session
        if session is None:
            return super().state_dict()
        formats = {**self._last.get("formats", {}), **session.formats}
        return {**super().state_dict(), "formats": formats, "backend": session.backend}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved position. Call it on all ranks."""
        super().load_state_dict(state_dict)
        session, options = self._session, self._options
        if session is None:
            return
        formats = state_dict.get("formats", {}) if options.cache.format == "auto" else {}
        images = isinstance(options.samples, ImageOptions) and options.samples.backend == "auto"
        backend = state_dict.get("backend") if images else None
        # the saved format and backend, unless options set them
        other = any(formats.get(split, own) != own for split, own in session.formats.items())
        if other or backend not in (None, session.backend):
            self._open(self._stage, formats, backend)

    def train_dataloader(self) -> TrainLoader:
        loader = self._opened().train_loader(
            fixed=self._fixed,
            on_epoch=self._begin_epoch,
            on_resume=self._correct_batch_count,
        )
        return self._resume(loader)

    def val_dataloader(self) -> EvalLoader:
        """Return the loader of this rank's validation samples, in order. In a test, it returns test samples."""
        return self._opened().eval_loader()

    test_dataloader = predict_dataloader = val_dataloader

    def teardown(self, stage: str) -> None:
        if self._session is not None and self._epoch is not None:
            self._end_epoch()
            self._session.end_reading()
            self._session.log_once(self._session.tiers.summary())
        super().teardown(stage)

    def _opened(self) -> Session:
        if self._session is None:
            raise ValueError(f"{type(self).__name__} has no loaders before setup(): call it, or use a Trainer.")
        return self._session

    def _begin_epoch(self, epoch: int) -> None:
        # a collective: all ranks start an epoch
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


class CachedDataModuleMixin(CachedMixin):
    """DataModule for files of any kind on network storage, cached on local disks and in the memory of all nodes.

    The folder contains ``train/<class>/*`` and optionally ``val/<class>/*`` and ``test/<class>/*``. Without class
    folders, samples have no labels. If train/ contains only tar files, they are WebDataset shards; if only Parquet
    files, each row is a sample. Or `lists` name the samples and their labels.

    Worker processes call `decode` and `transform` in each epoch. They seed the random generators of Python, numpy and
    torch from (seed, epoch, index). So a sample does not depend on the number of workers, ranks or nodes, and a resumed
    run continues exactly.

    Batches are (samples, labels): labels int64 [B], or float32 if they are not whole; [B, L] if there are several.
    Without labels, a batch is the samples alone. With `with_indices`, the indices int64 [B] follow.

    Args:
        **options: options of `CacheConfig` except ``format`` and ``short_side``, of `SampleOptions` and of
            `DataOptions`: ``help(CachedDataModule.__init__)``.

    Raises:
        ValueError: if an argument is out of range.
    """

    @with_options_of(SampleOptions, DataOptions, CacheConfig, without=("format", "short_side"))
    def __init__(
        self, source: str, cache_dir: str, decode: Callable[[bytes], Any], batch_size: int = 64, **options: Any
    ) -> None:
        samples, loading, cache = split_options(type(self), options, SampleOptions, DataOptions, CacheConfig)
        config = CacheConfig(
            source=str(source), cache_dir=str(cache_dir), format="bytes", short_side=CacheConfig.short_side, **cache
        )
        made = SampleOptions(decode=decode, **samples)
        super().__init__(DataOptions(cache=config, samples=made, batch_size=batch_size, **loading))


class CachedImageDataModuleMixin(CachedMixin):
    """DataModule for an image folder on network storage, cached on local disks and in the memory of all nodes.

    The folder is that of `CachedDataModule`. From the second epoch on, samples come from memory, with new random crops
    and flips. Batches are (images float32 [B, 3, size, size], labels int64 [B]).

    Args:
        sample_format: Format in memory: ``"decoded"`` pixels, ``"jpeg"`` files, or ``"auto"`` for pixels if they fit.
        short_side: Shorter side of decoded images, in pixels. Default: 8/7 of the largest image_size, or eval_resize if
            that is more.
        **options: options of `ImageOptions`, of `DataOptions`, and of `CacheConfig`:
            ``help(CachedImageDataModule.__init__)``.
    """

    @with_options_of(ImageOptions, DataOptions, CacheConfig, without=("format",))
    def __init__(
        self,
        source: str,
        cache_dir: str,
        batch_size: int = 64,
        image_size: int | dict[int, int] = ImageOptions.image_size,
        *,
        sample_format: Literal["auto", "jpeg", "decoded"] = "auto",
        short_side: int | None = None,
        **options: Any,
    ) -> None:
        hint = "For other files, use CachedDataModule"
        one_of({"sample_format": sample_format}, "sample_format", ("auto", "jpeg", "decoded"), hint=hint)
        images, loading, cache = split_options(type(self), options, ImageOptions, DataOptions, CacheConfig)
        samples = ImageOptions(image_size=image_size, **images)
        if short_side is None:
            short_side = max(-(-max(samples.sizes.values()) * 8 // 7), samples.eval_resize or 0)
        config = CacheConfig(
            source=str(source), cache_dir=str(cache_dir), format=sample_format, short_side=short_side, **cache
        )
        super().__init__(DataOptions(cache=config, samples=samples, batch_size=batch_size, **loading))
