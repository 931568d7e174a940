"""What is wanted of the cache. Checked when it is made, before any file is touched."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

Format = Literal["jpeg", "decoded"]
Shuffle = Literal["local", "partial", "global"]
GB = 10**9

_CHOICES = {
    "format": ("auto", "jpeg", "decoded"),
    "shuffle": ("local", "partial", "global"),
    "on_corrupt": ("raise", "skip"),
}

_NEEDED = ("lmdb", "zmq", "xxhash", "PIL")  # of the extra `data`


class DataError(RuntimeError):
    """Something about the stored data, not about the program: the message names the file or the place."""


class CorruptSampleError(DataError):
    """A file of the data set that cannot be used. `path` is relative to the source."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return (
            f"{self.path} cannot be used: {self.reason}. Repair or remove the file, "
            f'or let damaged files be replaced: on_corrupt="skip".'
        )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Where samples come from and where they are kept.

    Args:
        source: the image folder (``<split>/<class>/*``) on network storage: a path or an fsspec URL.
        cache_dir: a folder on a disk of this node; several runs may share it.
        memory_gb: what one node may keep in memory of one split, in GB; None takes half of what is free, 0 nothing.
        disk_gb: what the cache of one split may take on the local disk, in GB; None: what is free, less a reserve.
        format: "decoded" keeps RGB pixels in memory, "jpeg" the file as it is; "auto" keeps pixels where they fit.
        short_side: of pictures kept as pixels, in pixels; at least the largest training size. Smaller ones stay.
        shuffle: "local" trains each node on its own samples, "partial" exchanges a fraction, "global" shuffles all.
        exchange_fraction: of its samples that a node takes from others in each epoch; for shuffle="partial".
        on_corrupt: "raise" ends the run and names the file, "skip" replaces the sample by another and counts.
        seed: of ownership and order.
        storage_timeout: seconds to wait for network storage that does not answer before the run ends.
        storage_readers: files read from network storage at the same time, by each process.
        peer_address: the address or the interface (such as "eth0") on which this node serves its samples to other
            nodes; None takes the interface of the process group.

    Raises:
        ValueError: for a value out of its range.
    """

    source: str
    cache_dir: str
    memory_gb: float | None = None
    disk_gb: float | None = None
    format: Literal["auto", "jpeg", "decoded"] = "auto"
    short_side: int = 256
    shuffle: Shuffle = "local"
    exchange_fraction: float = 0.1
    on_corrupt: Literal["raise", "skip"] = "raise"
    seed: int = 0
    storage_timeout: float = 300.0
    storage_readers: int = 8
    peer_address: str | None = None

    def __post_init__(self) -> None:
        missing = [name for name in _NEEDED if not _is_installed(name)]
        if missing:
            raise ValueError(
                f"the data cache needs {', '.join(missing)}: `pip install 'lightning-sparse[data,vision]'`, or of a "
                f"checkout `pip install '.[data,vision]'`."
            )
        for name in ("source", "cache_dir"):
            if not getattr(self, name):
                raise ValueError(f"{name}='': give the folder, as in {name}='/mnt/nfs/imagenet'.")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(allowed)}.")
        for name in ("memory_gb", "disk_gb"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value}: a size in GB is 0 or more. Leave it out to have it chosen.")
        if not 0 <= self.exchange_fraction <= 1:
            raise ValueError(f"exchange_fraction={self.exchange_fraction}: a fraction is between 0 and 1.")
        if not 1 <= self.short_side <= 16384:
            raise ValueError(
                f"short_side={self.short_side}: give pixels, between 1 and 16384; 256 suits training at 224."
            )
        if not 0 < self.storage_timeout < float("inf"):
            raise ValueError(f"storage_timeout={self.storage_timeout}: give seconds, more than 0.")
        if not 1 <= self.storage_readers <= 256:
            raise ValueError(f"storage_readers={self.storage_readers}: between 1 and 256 files at a time.")
        if self.peer_address is not None:
            _check_address(self.peer_address)


def _check_address(text: str) -> None:
    try:
        everywhere = ipaddress.ip_address(text).is_unspecified
    except ValueError:
        everywhere = text in ("", "*")  # otherwise the name of an interface, looked up when it is needed
    if everywhere:
        raise ValueError(
            f"peer_address={text!r} would serve samples on every network of this node. "
            "Give the address or the name of the one interface that joins the nodes."
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):  # ValueError: it is in sys.modules as something that no file is behind
        return False
