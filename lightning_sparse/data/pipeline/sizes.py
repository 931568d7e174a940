"""Sizes of the images in a batch, by epoch."""

from collections.abc import Mapping


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
        self._sizes = dict(sorted(({0: sizes} if isinstance(sizes, int) else dict(sizes)).items()))
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
