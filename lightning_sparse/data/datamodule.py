"""The LightningDataModules of cached samples, as mixins that do not import Lightning.

A `Session` holds the open data; `CachedMixin` connects it to the Trainer's hooks and loggers.
``lightning_sparse.flavours`` combines these classes with the LightningDataModule of ``pytorch_lightning`` and of
``lightning.pytorch``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from lightning_sparse.data.base import DataModuleMixin
from lightning_sparse.data.cache.counts import metrics
from lightning_sparse.data.config import CacheConfig, options_of, with_options_of
from lightning_sparse.data.pipeline.loader import EvalLoader, TrainLoader
from lightning_sparse.data.pipeline.options import ImageOptions, SampleOptions
from lightning_sparse.data.session import DataOptions, Formats, Session, open_session
from lightning_sparse.data.sources.listing import classes_of
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
        return described(type(self), {"source": self._options.cache.source})

    @property
    def num_classes(self) -> int:
        """Number of folders in train/; with a list, of names in its first column of labels, or the largest number plus
        1. Available before setup, to create the model. `setup` checks that it is the same on all ranks."""
        if self._num_classes is None:
            self._num_classes = classes_of(self._options.cache, "train")[1]
        return self._num_classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes: label i is that of the i-th. Empty if labels are numbers. Available before setup."""
        return classes_of(self._options.cache, "train")[0]

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
        images = isinstance(options.samples, ImageOptions) and options.samples.backend == "auto"
        backend = state_dict.get("backend") if images else None
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


class CachedDataModuleMixin(CachedMixin):
    """DataModule for files of any kind on network storage, cached on local disks and in the memory of all nodes.

    The folder contains ``train/<class>/*``, ``val/<class>/*`` and ``test/<class>/*``, of which only train/ is needed;
    without folders of classes, samples have no labels. If train/ contains tar files only, they are WebDataset shards;
    if Parquet files only, samples are their rows. Or `lists` name the samples and their labels. Each file is read from
    network storage once; later, its bytes come from local disk and memory.

    `decode` makes a sample of these bytes in each epoch, and `transform` what is random. They run in worker processes,
    where the random generators of Python, numpy and torch are seeded from (seed, epoch, index): a sample does not
    depend on the number of workers, ranks or nodes, and a resumed run continues exactly.

    Batches are (samples, labels): labels int64 [B], or float32 if they are not whole, [B, L] if there are several.
    Without labels, a batch is the samples alone. With `with_indices`, the indices int64 [B] follow.

    Args:
        source, cache_dir, decode, batch_size: see below.
        **options: other options of `CacheConfig` but ``format`` and ``short_side``, of `SampleOptions` and of
            `DataOptions`: ``help(CachedDataModule.__init__)``.

    Raises:
        ValueError: if an argument is out of range.
    """

    @with_options_of(SampleOptions, DataOptions, CacheConfig, without=("format", "short_side"))
    def __init__(
        self, source: str, cache_dir: str, decode: Callable[[bytes], Any], batch_size: int = 64, **options: Any
    ) -> None:
        samples, loading, cache = options_of(SampleOptions, DataOptions, CacheConfig, given=options)
        config = CacheConfig(
            source=str(source), cache_dir=str(cache_dir), format="bytes", short_side=CacheConfig.short_side, **cache
        )
        made = SampleOptions(decode=decode, **samples)
        super().__init__(DataOptions(cache=config, samples=made, batch_size=batch_size, **loading))


class CachedImageDataModuleMixin(CachedMixin):
    """DataModule for an image folder on network storage, cached on local disks and in the memory of all nodes.

    The folder contains ``train/<class>/*`` and ``val/<class>/*``, and may contain ``test/<class>/*``. Each file is read
    from network storage once. Later runs read from local disk, and from the second epoch on, samples come from memory,
    with new random crops and flips. Batches are (images float32 [B, 3, size, size], labels int64 [B]).

    Args:
        source, cache_dir, batch_size: as `CachedDataModule`.
        image_size: as `ImageOptions`.
        sample_format: ``"decoded"`` keeps pixels in memory, ``"jpeg"`` files, ``"auto"`` pixels if they fit.
        short_side: shorter side of decoded images; default: 8/7 of the largest image_size, or eval_resize if that is
            more.
        **options: options of `ImageOptions`, of `DataOptions`, and of `CacheConfig`:
            ``help(CachedImageDataModule.__init__)``.

    Raises:
        ValueError: if an argument is out of range.
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
        images, loading, cache = options_of(ImageOptions, DataOptions, CacheConfig, given=options)
        samples = ImageOptions(image_size=image_size, **images)
        if short_side is None:
            short_side = max(-(-samples.sizes.largest * 8 // 7), samples.eval_resize or 0)
        config = CacheConfig(
            source=str(source), cache_dir=str(cache_dir), format=sample_format, short_side=short_side, **cache
        )
        super().__init__(DataOptions(cache=config, samples=samples, batch_size=batch_size, **loading))
