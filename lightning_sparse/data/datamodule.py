"""The LightningDataModule, as a mixin that imports no Lightning.

``lightning_sparse.flavours`` binds it to LightningDataModule of ``pytorch_lightning`` and of ``lightning.pytorch``. It
passes Lightning's calls on to a `Session`, and what it does itself is about the Trainer:

=================== ==================================================================================================
when                what
=================== ==================================================================================================
setup               the process group exists: find the ranks, open the stores
set_epoch           the last epoch's bytes by tier go to the logger (all ranks take part)
load_state_dict     of the loader: a run that goes on with other ranks counts batches anew; the Trainer's count follows
teardown            the last epoch is logged, a summary written, everything closed
on_exception        everything closed, without asking other ranks, which may be gone
=================== ==================================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from lightning_sparse.data.cache.manifest import class_names
from lightning_sparse.data.cache.summary import metrics
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.pipeline.augment import Augment
from lightning_sparse.data.pipeline.backend import Backend
from lightning_sparse.data.pipeline.batch import MEAN, STD, Look
from lightning_sparse.data.pipeline.loader import EvalLoader, ImageSizes, TrainLoader
from lightning_sparse.data.pipeline.sampler import Shuffle
from lightning_sparse.data.session import Session, Wish, open_session
from lightning_sparse.messages import described

if TYPE_CHECKING:

    class _Host:
        """The part of Lightning's LightningDataModule that is relied upon."""

        trainer: Any

        def __init__(self) -> None: ...
else:
    _Host = object


class CachedImageDataModuleMixin(_Host):
    """Feeds an image folder on network storage from local disk and from the memory of all nodes.

    The folder holds ``train/<class>/*`` and ``val/<class>/*``. Each file crosses the storage link once; later runs
    start from local disk, and every epoch from the second on comes from memory, with new random crops and flips.
    Batches are (images float32 [B, 3, size, size], labels int64 [B]).

    Args:
        source: the folder: a path or an fsspec URL.
        cache_dir: a folder on a disk of each node, which runs may share.
        batch_size: samples a device and step.
        image_size: edge of the square that the network sees, or {first epoch: size} to begin with small pictures.
        memory_gb: what a node may keep in memory of each split; default: half of what is free.
        disk_gb: what the cache of each split may take of the local disk; default: what is there, less a reserve.
        shuffle: ``"global"``, ``"partial"`` or ``"local"``; see `lightning_sparse.data.pipeline.sampler`.
        exchange_fraction: of ``"partial"``: the share of its samples that a node exchanges each epoch.
        backend: ``"dali"``, ``"torch"``, or ``"auto"`` for the faster one here.
        sample_format: what memory holds: ``"decoded"`` pixels, ``"jpeg"`` files, or ``"auto"`` for pixels if they fit.
        short_side: of decoded pictures; default: 8/7 of the largest image_size.
        on_corrupt: ``"raise"`` names a damaged file and ends, ``"skip"`` takes another sample and counts.
        val_fraction: validate on this share of train/, the same in every run, instead of on val/.
        crop_scale: least and greatest share of a picture's area that a random crop takes.
        flip: probability of a flip from left to right.
        mean, std: for normalising, of pixels in [0, 1].
        threads: of a rank, for making batches; default: its share of the node's cores.
        seed: of ownership, order and augmentation.
        storage_timeout: seconds to wait for storage that does not answer before the run ends.
        peer_address: the address or the interface on which a node serves its samples to others; default: that of the
            process group.

    Raises:
        ValueError: for a bad value.
    """

    def __init__(
        self,
        source: str,
        cache_dir: str,
        batch_size: int = 64,
        image_size: int | dict[int, int] = 224,
        memory_gb: float | None = None,
        disk_gb: float | None = None,
        shuffle: Shuffle = "global",
        exchange_fraction: float = 0.1,
        backend: Backend = "auto",
        sample_format: Literal["auto", "jpeg", "decoded"] = "auto",
        short_side: int | None = None,
        on_corrupt: Literal["raise", "skip"] = "raise",
        val_fraction: float | None = None,
        crop_scale: tuple[float, float] = (0.08, 1.0),
        flip: float = 0.5,
        mean: tuple[float, float, float] = MEAN,
        std: tuple[float, float, float] = STD,
        threads: int | None = None,
        seed: int = 0,
        storage_timeout: float = 300.0,
        peer_address: str | None = None,
    ) -> None:
        super().__init__()
        sizes = ImageSizes(image_size)
        cache = CacheConfig(
            source=str(source),
            cache_dir=str(cache_dir),
            memory_gb=memory_gb,
            disk_gb=disk_gb,
            format=sample_format,
            short_side=-(-sizes.largest * 8 // 7) if short_side is None else short_side,
            shuffle=shuffle,
            exchange_fraction=exchange_fraction,
            on_corrupt=on_corrupt,
            seed=seed,
            storage_timeout=storage_timeout,
            peer_address=peer_address,
        )
        augment = Augment(crop_scale=crop_scale, flip=flip, seed=seed)
        self._wish = Wish(
            cache=cache,
            batch_size=batch_size,
            sizes=sizes,
            look=Look(augment=augment, mean=mean, std=std),
            backend=backend,
            val_fraction=val_fraction,
            threads=threads,
        )
        self.batch_size = batch_size
        self._session: Session | None = None
        self._epoch: int | None = None  # the one that is under way
        self._num_classes: int | None = None

    def __str__(self) -> str:
        return described(type(self), repr(self._wish.cache.source))

    @property
    def num_classes(self) -> int:
        """Folders in train/. Known before setup, so that a model can be made from it."""
        if self._num_classes is None:
            self._num_classes = len(class_names(self._wish.cache, "train"))
        return self._num_classes

    # -- called by Lightning -------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Find the ranks and the samples. The process group exists by now, if there is to be one."""
        self._close()
        trainer = self.trainer
        self._session = open_session(
            self._wish,
            device=None if trainer is None else trainer.strategy.root_device,
            training=stage == "fit",
            node_rank=None if trainer is None else trainer.node_rank,
            local_rank=None if trainer is None else trainer.local_rank,
        )

    def train_dataloader(self) -> TrainLoader:
        """Random batches of this rank."""
        return self._opened().train_loader(
            fixed=self.trainer is not None and self.trainer.overfit_batches > 0,
            on_epoch=self._begin_epoch,
            on_resume=self._count_batches_anew,
        )

    def val_dataloader(self) -> EvalLoader:
        """Centre crops of this rank's share of what is validated on."""
        return self._opened().eval_loader()

    def test_dataloader(self) -> EvalLoader:
        """The same as for validation."""
        return self._opened().eval_loader()

    def predict_dataloader(self) -> EvalLoader:
        """The same as for validation."""
        return self._opened().eval_loader()

    def teardown(self, stage: str) -> None:
        """Log the last epoch, write the summary, close everything."""
        if self._session is not None and self._epoch is not None:
            self._end_epoch()
            self._session.say(self._session.summary())
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        """Close everything; other ranks may be gone, so nobody is asked."""
        self._close()

    # ------------------------------------------------------------------------------------------------------------------

    def _opened(self) -> Session:
        if self._session is None:
            raise ValueError("the loaders of CachedImageDataModule exist after setup(); a Trainer calls it itself.")
        return self._session

    def _begin_epoch(self, epoch: int) -> None:
        if self._epoch is not None and epoch != self._epoch:
            self._end_epoch()
        self._epoch = epoch

    def _end_epoch(self) -> None:
        assert self._epoch is not None
        counts = self._opened().tiers.end_epoch(self._epoch)
        if self.trainer is not None and self.trainer.is_global_zero:
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics(counts), step=self.trainer.global_step)

    def _count_batches_anew(self, done: int) -> None:
        """Let the Trainer's count of this epoch's batches be in batches of this run."""
        if self.trainer is not None:
            progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
            shift = done - progress.ready
            for name in ("ready", "started", "processed", "completed"):
                setattr(progress, name, getattr(progress, name) + shift)

    def _close(self) -> None:
        session, self._session, self._epoch = self._session, None, None
        if session is not None:
            session.close()
