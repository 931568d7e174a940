"""Options of how samples become batches, validated on creation: of images, and of samples of any kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, for pixels in [0, 1]
Backend = Literal["auto", "dali", "torch"]
BACKENDS = get_args(Backend)
WHOLE_BELOW = 64  # sizes of batches of small pictures, whose edges belong to what they show


class ImageSizes:
    """Height and width of the images in a batch, by epoch.

    Args:
        sizes: one size for all epochs, or {first epoch: size} to start training with small images.

    Raises:
        ValueError: if a size is not positive, or epoch 0 has no size.

    >>> [ImageSizes({0: 128, 6: 224}).at(epoch) for epoch in (0, 5, 6, 90)]
    [128, 128, 224, 224]
    """

    def __init__(self, sizes: int | Mapping[int, int]) -> None:
        by_epoch = {0: sizes} if not isinstance(sizes, Mapping) else sizes
        whole = all(isinstance(each, int) for pair in by_epoch.items() for each in pair)
        self._sizes = dict(sorted(by_epoch.items())) if whole else {}
        if 0 not in self._sizes or min(self._sizes) < 0 or min(self._sizes.values()) < 1:
            raise ValueError(
                f"image_size={sizes!r} must be a size in pixels, or a dict of sizes by first epoch, starting with "
                f"epoch 0, such as {{0: 128, 6: 224}}."
            )

    def at(self, epoch: int) -> int:
        """Return the size in an epoch."""
        return next(size for first, size in reversed(self._sizes.items()) if first <= epoch)

    @property
    def largest(self) -> int:
        """Largest size of all epochs."""
        return max(self._sizes.values())


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """How images become batches.

    Args:
        image_size: height and width of the images in a batch, or {first epoch: size} to start with small images.
        backend: ``"dali"``, ``"torch"``, or ``"auto"`` for the faster one, which is kept by a resumed run.
        crop_scale: range of the area of a random crop, as a fraction of the image's area.
        flip: probability of a horizontal flip.
        eval_resize: shorter side of an image in validation and test before its centre is cropped to image_size;
            default: 8/7 of image_size, such as 256 for 224, and below 64 image_size itself, so that small pictures are
            seen whole.
        mean, std: mean and standard deviation for normalisation, for pixels in [0, 1].
        threads: threads of a rank that make batches; default: its share of the CPU cores.
        seed: seed of placement, order and augmentation.

    Raises:
        ValueError: if an option is out of range.
    """

    image_size: int | dict[int, int] = 224
    backend: Backend = "auto"
    crop_scale: tuple[float, float] = (0.08, 1.0)
    flip: float = 0.5
    eval_resize: int | None = None
    mean: tuple[float, float, float] = MEAN
    std: tuple[float, float, float] = STD
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        largest, (low, high) = self.sizes.largest, self.crop_scale
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r} is unknown: choose one of {', '.join(BACKENDS)}.")
        if not 0 < low <= high <= 1:
            raise ValueError(
                f"crop_scale={self.crop_scale} must be two fractions of the area, 0 < least <= greatest <= 1."
            )
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip={self.flip} must be a probability in [0, 1].")
        if self.eval_resize is not None and not (isinstance(self.eval_resize, int) and self.eval_resize >= largest):
            raise ValueError(
                f"eval_resize={self.eval_resize!r} must be a number of pixels, and the largest image_size, {largest}, "
                f"is cropped from it. Omit it, or give at least {largest}, which crops the largest square."
            )
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(
                f"mean={self.mean}, std={self.std} must be three numbers each, for red, green and blue in [0, 1], with "
                f"each std above 0."
            )
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads} must be at least 1, or None for a share of the CPU cores.")

    @cached_property
    def sizes(self) -> ImageSizes:
        return ImageSizes(self.image_size)

    def centre(self, size: int) -> tuple[int, int]:
        """Return the part of the shorter side that an evaluation sees at this size, as a fraction."""
        if self.eval_resize is not None:
            return size, self.eval_resize
        return (1, 1) if size < WHOLE_BELOW else (7, 8)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How samples of any kind become batches.

    Args:
        decode: function from the bytes of a file to a sample.
        transform: function of a decoded sample, for training, such as transforms of torchvision.
        eval_transform: the same for validation and test.
        collate: function from a list of samples to a batch; default: `torch.utils.data.default_collate`.
        workers: processes of a rank that make batches; 0: none but the training; default: its share of the CPU cores.
        seed: seed of placement, order and transforms.

    Raises:
        ValueError: if one of them cannot be called, or workers is negative.
    """

    decode: Callable[[bytes], Any]
    transform: Callable[[Any], Any] | None = None
    eval_transform: Callable[[Any], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    workers: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("decode", "transform", "eval_transform", "collate"):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "decode"):
                raise ValueError(f"{name}={value!r} must be a function{'' if name == 'decode' else ' or None'}.")
        if self.workers is not None and self.workers < 0:
            raise ValueError(f"workers={self.workers} must be 0 or more, or None for a share of the CPU cores.")
