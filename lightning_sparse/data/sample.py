"""A sample, and the interface of what reads samples: the contract between the tiers, the peer server and pipelines."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Format = Literal["jpeg", "decoded"]


class View(NamedTuple):
    """The image of a sample, read-only: uint8 [H, W, 3] if decoded, [bytes] if JPEG."""

    data: npt.NDArray[np.uint8]
    height: int
    width: int


class Sample(NamedTuple):
    """An image with its label. data, height, width: as in `View`, of the upright image.

    `index` is the requested index, unless another sample replaces a corrupt one.
    """

    data: npt.NDArray[np.uint8]
    label: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which a sample does not need
    height: int
    width: int


class SampleReader(Protocol):
    """Reads samples by index. `get` is thread-safe. short_side: shorter side of decoded images, at most."""

    @property
    def format(self) -> Format: ...
    @property
    def short_side(self) -> int: ...
    def get(self, indices: Sequence[int]) -> Sequence[Sample]: ...
