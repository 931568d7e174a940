"""Options of the DataModules of cached samples."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.pipeline.backend import ImageOptions
from lightning_sparse.data.pipeline.sampler import SamplerConfig
from lightning_sparse.data.pipeline.workers import SampleOptions


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of the DataModule, validated on creation.

    Args:
        samples: how they become batches.
        with_indices: end each batch with the indices of its samples.
    """

    cache: CacheConfig
    batch_size: int
    samples: ImageOptions | SampleOptions
    val_fraction: float | None = None
    with_indices: bool = False

    def __post_init__(self) -> None:
        SamplerConfig(batch_size=self.batch_size)
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction={self.val_fraction} must be between 0 and 1: it is a fraction of train/.")
        sizes = self.samples.sizes
        if sizes is not None and self.cache.short_side < sizes.largest:
            raise ValueError(
                f"short_side={self.cache.short_side} is less than the largest image_size, {sizes.largest}: cached "
                f"images would be upscaled. Omit it, or give at least {sizes.largest}."
            )
