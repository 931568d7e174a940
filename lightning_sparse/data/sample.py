"""A sample, and the interface of what reads samples: the contract between the tiers, the peer server and pipelines."""

import hashlib
import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Format = Literal["jpeg", "decoded", "bytes"]
EXIT_PRIORITY = 30
"""Of threads that make batches, when the program ends (`multiprocessing.util.Finalize`): what they read from ends their
waits for storage before that, and closes after it."""


DIGEST_BYTES = 16  # of a key


class FileKey(NamedTuple):
    """A file, as listed. size: -1 if unknown. mtime_ns, tag: 0 if unknown; see `Manifest`."""

    path: str
    size: int
    mtime_ns: int
    tag: int = 0

    def digest(self) -> bytes:
        return hashlib.blake2b(os.fsencode(self.path), digest_size=DIGEST_BYTES).digest()


class View(NamedTuple):
    """The contents of a sample, read-only: uint8 [H, W, 3] if decoded, else the bytes of the file.

    Of files that are not images, the height is 1 and the width is their size.
    """

    data: npt.NDArray[np.uint8]
    height: int
    width: int


class Sample(NamedTuple):
    """A sample with its label, or a list of labels. data, height, width: as in `View`, of the upright image.

    `index` is the requested index, unless another sample replaces a corrupt one.
    """

    data: npt.NDArray[np.uint8]
    label: Any
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


class ReplacingReader(SampleReader, Protocol):
    """A reader that can replace a sample that cannot be decoded.

    replacement: `index` is the sample that cannot be decoded: `requested`, or its earlier replacement.
    interrupt: end waits for storage.
    """

    def replacement(self, requested: int, index: int, reason: str) -> Sample: ...
    def interrupt(self) -> None: ...
