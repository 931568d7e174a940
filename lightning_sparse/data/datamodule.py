"""The LightningDataModule, as a mixin that does not import Lightning.

``lightning_sparse.flavours`` combines it with the LightningDataModule of ``pytorch_lightning`` and of
``lightning.pytorch``. A `Session` holds the open data; this module connects it to the Trainer's hooks and loggers.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning_sparse.data.base import DataModuleMixin
from lightning_sparse.data.cache.manifest import class_names
from lightning_sparse.data.cache.summary import metrics
from lightning_sparse.data.config import CacheConfig, Shuffle
from lightning_sparse.data.pipeline.augment import Augment
from lightning_sparse.data.pipeline.backend import Backend
from lightning_sparse.data.pipeline.batch import MEAN, STD, Transform
from lightning_sparse.data.pipeline.loader import EvalLoader, ImageSizes, TrainLoader
from lightning_sparse.data.session import DataOptions, Formats, Session, open_session
from lightning_sparse.messages import described


class CachedImageDataModuleMixin(DataModuleMixin):
    """DataModule for an image folder on network storage, cached on local disks and in the memory of all nodes.

    The folder contains ``train/<class>/*`` and ``val/<class>/*``. Each file is read from network storage once. Later
    runs read from local disk, and from the second epoch on, samples come from memory, with new random crops and flips.
    Batches are (images float32 [B, 3, size, size], labels int64 [B]).

    Args:
        source: image folder: a path or an fsspec URL.
        cache_dir: folder on a local disk of each node. Runs may share it.
        batch_size: samples per device and step.
        image_size: height and width of the images in a batch, or {first epoch: size} to start with small images.
        memory_gb: memory limit per node and split; default: half of the free memory.
        disk_gb: disk limit per split; default: all free space except a reserve.
        shuffle: ``"global"``, ``"partial"`` or ``"local"``; see `lightning_sparse.data.pipeline.sampler`.
        exchange_fraction: fraction of its samples that a node exchanges in each epoch, for ``"partial"``.
        backend: ``"dali"``, ``"torch"``, or ``"auto"`` for the faster one.
        sample_format: ``"decoded"`` keeps pixels in memory, ``"jpeg"`` files, ``"auto"`` pixels if they fit.
        short_side: shorter side of decoded images; default: 8/7 of the largest image_size.
        on_corrupt: ``"raise"`` stops at a corrupt file and names it, ``"skip"`` replaces it by another sample.
        val_fraction: validate on this fraction of train/, the same in every run, instead of on val/.
        crop_scale: range of the area of a random crop, as a fraction of the image's area.
        flip: probability of a horizontal flip.
        mean, std: mean and standard deviation for normalisation, for pixels in [0, 1].
        threads: threads of a rank that make batches; default: its share of the CPU cores.
        seed: seed of placement, order and augmentation.
        storage_timeout: seconds to wait for storage that does not respond before the run fails.
        peer_address: address or interface on which a node serves samples to others; default: the interface of the
            process group.
        peer_ports: first and last port to serve samples on, for a firewall; default: any free port. A node uses one
            port for train/ and one for val/.
        storage_options: arguments for fsspec to open the source, such as ``{"endpoint_url": "http://minio:9000"}``.

    Raises:
        ValueError: if an argument is out of range.
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
        peer_ports: tuple[int, int] | None = None,
        storage_options: dict[str, Any] | None = None,
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
            peer_ports=None if peer_ports is None else (peer_ports[0], peer_ports[1]),
            storage_options=storage_options,
        )
        augment = Augment(crop_scale=crop_scale, flip=flip, seed=seed)
        self._options = DataOptions(
            cache=cache,
            batch_size=batch_size,
            sizes=sizes,
            transform=Transform(augment=augment, mean=mean, std=std),
            backend=backend,
            val_fraction=val_fraction,
            threads=threads,
        )
        self.batch_size = batch_size
        self._session: Session | None = None
        self._epoch: int | None = None  # the current one
        self._num_classes: int | None = None

    def __str__(self) -> str:
        return described(type(self), repr(self._options.cache.source))

    @property
    def num_classes(self) -> int:
        """Number of folders in train/. Available before setup, to create the model. `setup` checks that it is the same
        on all ranks."""
        if self._num_classes is None:
            self._num_classes = len(class_names(self._options.cache, "train"))
        return self._num_classes

    def setup(self, stage: str) -> None:
        """Open the session. The process group exists, if the run uses one."""
        self._open(stage)
        self._num_classes = self._opened().check_classes(self._num_classes) or None

    def _open(self, stage: str, formats: Formats | None = None) -> None:
        self._close()
        self._stage = stage
        node_rank, local_rank = self._position
        self._session = open_session(
            self._options,
            device=self._device,
            training=stage == "fit",
            node_rank=node_rank,
            local_rank=local_rank,
            formats=formats,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run keeps, besides the state of its loaders."""
        return {"formats": dict(self._session.formats)} if self._session is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the format of the memory tier, unless ``sample_format`` sets it. Called after setup, on all ranks."""
        session, formats = self._session, state_dict.get("formats", {})
        if session is None or self._options.cache.format != "auto":
            return
        if any(formats.get(split, own) != own for split, own in session.formats.items()):
            self._open(self._stage, formats)

    def train_dataloader(self) -> TrainLoader:
        """Random batches of this rank."""
        return self._opened().train_loader(
            fixed=self._fixed,
            on_epoch=self._begin_epoch,
            on_resume=self._correct_batch_count,
        )

    def val_dataloader(self) -> EvalLoader:
        """Centre crops of this rank's share of the validation samples."""
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
            raise ValueError("CachedImageDataModule has no loaders before setup(): call it, or use a Trainer.")
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
        session, self._session, self._epoch = self._session, None, None
        if session is not None:
            session.close()
