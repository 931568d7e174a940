"""Options of the data cache and of batches, validated on creation; errors of the cache."""

import ipaddress
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_sparse.options import function, number, one_of, whole

Shuffle = Literal["local", "global"]
SHUFFLES = get_args(Shuffle)
GB = 10**9

SPLITS = ("train", "val", "test")

_REQUIRED = ("lmdb", "zmq", "xxhash", "PIL")  # the extra `data`; Pillow only for images


class DataError(RuntimeError):
    """The data or a cache folder cannot be used."""


class CorruptSampleError(DataError):
    """A file of the data set is corrupt. `path` is relative to the source."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return (
            f"{self.path} cannot be used: {self.reason}. Repair or remove the file, "
            f'or set on_corrupt="skip" to replace corrupt files by other samples.'
        )


def no_address_space(what: str, size: int) -> str:
    return (
        f"{what} maps {size / GB:,.2f} GB of address space, which is not memory, and this process may not: remove its "
        "limit (ulimit -v unlimited, or that of the scheduler), or lower memory_gb if it is the memory tier."
    )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Options of the data cache.

    Args:
        source: Folder of the data set: a path or an fsspec URL.
        cache_dir: Folder on a local disk of each node. Runs may share it.
        memory_gb: Memory limit per node and split, in GB. Samples above the limit are read from local disk. Default:
            half of the free memory.
        disk_gb: Disk limit per split, in GB. Default: all free space except 1 GiB, or 5% of a smaller disk.
        lists: CSV or Parquet file of each split, such as ``{"train": "train.csv", "val": "val.csv"}``. Columns: path
            (relative to the source), then one or more labels. The first label may be a name.
        member: Extension of the member of a WebDataset shard that is the sample, such as ``"npy"``. Required if a
            sample has several members other than its label (``.cls``). For Parquet files, the column of samples.
        format: Format in memory: pixels, image files, or pixels if they fit; "bytes" for files that are not images.
        short_side: Shorter side of decoded images, in pixels. Range: 1 to 16384.
        shuffle: Batches have samples of all nodes (``"global"``), or only the node's own samples, without traffic
            (``"local"``).
        on_corrupt: How to handle an unreadable file: ``"raise"`` an error that names it, or ``"skip"`` and use another
            sample.
        seed: Seed of the order of samples. It also places samples on nodes.
        storage_timeout: Seconds to wait for storage that does not respond before the run fails.
        storage_readers: Number of files that each process reads from network storage at a time. Range: 1 to 256.
        peer_address: Address or interface on which a node serves samples to others. Default: the interface of the
            process group.
        peer_ports: First and last port to serve samples on, for a firewall. A node uses one port per split. Default:
            any free port.
        storage_options: Arguments for fsspec to open the source, such as ``{"endpoint_url": "http://minio:9000"}``.
            ``repr()`` hides them.
    """

    source: str
    cache_dir: str
    memory_gb: float | None = None
    disk_gb: float | None = None
    lists: dict[str, str] | None = None
    member: str | None = None
    format: Literal["auto", "jpeg", "decoded", "bytes"] = "auto"
    short_side: int = 256
    shuffle: Shuffle = "global"
    on_corrupt: Literal["raise", "skip"] = "raise"
    seed: int = 0
    storage_timeout: float = 300.0
    storage_readers: int = 8
    peer_address: str | None = None
    peer_ports: tuple[int, int] | None = None
    # not in the repr, because it may contain keys
    storage_options: dict[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        needed = [name for name in _REQUIRED if name != "PIL" or self.format != "bytes"]
        missing = [name for name in needed if not is_installed(name)]
        if missing:
            raise ValueError(
                f"the data cache needs {', '.join(missing)}: `pip install lmdb pyzmq xxhash pillow simplejpeg`, or "
                f"`pip install '.[data]'` in your clone."
            )
        for name in ("source", "cache_dir"):
            if getattr(self, name) in ("", "None"):  # a path of None is "None"
                raise ValueError(f"{name}={getattr(self, name)!r}: give the folder, as in {name}='/mnt/nfs/imagenet'.")
        source, cache = Path(self.source).resolve(), Path(self.cache_dir).resolve()
        if cache == source or any(cache.is_relative_to(source / split) for split in SPLITS):
            raise ValueError(
                f"cache_dir={self.cache_dir!r} is in source={self.source!r}, where it would be taken for data: give a "
                "folder on a local disk of each node."
            )
        one_of(self, "format", ("auto", "jpeg", "decoded", "bytes"))
        one_of(self, "shuffle", SHUFFLES, hint="Use 'global' to draw batches from all samples")
        one_of(self, "on_corrupt", ("raise", "skip"))
        number(self, "memory_gb", low=0, optional=True, hint="omit it to use the default")
        number(self, "disk_gb", low=0, optional=True, hint="omit it to use the default")
        whole(self, "short_side", low=1, high=16384, hint="use 256 pixels to train at 224")
        number(self, "storage_timeout", above=0, hint="it is a number of seconds")
        whole(self, "storage_readers", low=1, high=256, hint="it is the number of files read at a time")
        whole(self, "seed")
        ports = self.peer_ports
        if ports is not None and not (_are(Integral, ports, 2) and 1 <= ports[0] <= ports[1] <= 65535):
            raise ValueError(f"peer_ports={ports!r} must be two ports, first and last. Use (29600, 29699).")
        _check_storage(self.source, self.storage_options)
        if self.lists is not None:
            object.__setattr__(self, "lists", _checked_lists(self.lists))
        if self.peer_address is not None:
            _check_address(self.peer_address)


def _check_storage(source: str, options: dict[str, Any] | None) -> None:
    if "://" not in source:
        if options:
            raise ValueError(f"storage_options are for an fsspec URL, but source={source!r} is a path: omit them.")
        return
    try:
        json.dumps(options)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"storage_options of {source} must be plain values, which another process can be given: {error}."
        ) from error
    # Fail now, not in the process that reads storage: fsspec imports the package of a protocol only on use.
    import fsspec

    for part in source.split("::"):
        protocol, mark, _ = part.partition("://")
        if not mark and protocol not in fsspec.available_protocols():
            continue  # a path, the last part of a chain
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError:
            raise ValueError(
                f"source={source!r}: fsspec knows no protocol {protocol!r}. Check its spelling, or install the package "
                "that adds it."
            ) from None
        except ImportError as error:
            raise ValueError(
                f"source={source!r} needs a package that is not installed: {str(error).rstrip('.')}."
            ) from error


def _are(kind: type, values: object, count: int) -> bool:
    items = list(values) if isinstance(values, Iterable) else []
    return len(items) == count and all(isinstance(item, kind) and not isinstance(item, bool) for item in items)


def _checked_lists(lists: object) -> dict[str, str]:
    if not isinstance(lists, Mapping) or "train" not in lists or not set(lists) <= set(SPLITS):
        raise ValueError(
            f"lists={lists!r} must give a file for train, and may give a file for val and test. Use "
            "{'train': 'train.csv', 'val': 'val.csv'}."
        )
    files = {split: str(file) for split, file in lists.items()}
    for file in files.values():
        if not file.lower().endswith((".csv", ".parquet")):
            raise ValueError(f"the list {file!r} must be a .csv or a .parquet file.")
        if file.lower().endswith(".parquet") and not is_installed("pyarrow"):
            raise ValueError(f"the list {file!r} needs pyarrow: `pip install pyarrow`, or give a .csv file.")
    return files


def _check_address(text: str) -> None:
    try:
        everywhere = ipaddress.ip_address(text).is_unspecified
    except ValueError:
        everywhere = text in ("", "*")  # else the name of an interface, which the server looks up
    if everywhere:
        raise ValueError(
            f"peer_address={text!r} would serve samples on every network of this node. "
            "Give the address or the name of the interface that connects the nodes."
        )


def check_limit(limit: Any) -> None:
    is_count = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1
    if limit is not None and not is_count and not (isinstance(limit, Real) and 0 < float(limit) < 1):
        raise ValueError(f"limit={limit!r} must be a number of samples, 1 or more, or a fraction of them below 1.")


def check_fraction(config: Any) -> None:
    number(config, "val_fraction", above=0, below=1, optional=True, hint="it is a fraction of train")


def check_batch_size(config: Any) -> None:
    whole(config, "batch_size", low=1, hint="it is the number of samples per device and step")


def limited_count(limit: int | float, count: int) -> int:
    if limit > count:
        raise ValueError(f"limit={limit} is more than the {count:,} samples to train on: omit it.")
    return int(limit) if limit >= 1 else max(1, round(limit * count))


def is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):  # ValueError: a module in sys.modules without a spec
        return False


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, for pixels in [0, 1]
Backend = Literal["auto", "dali", "torch"]
BACKENDS = get_args(Backend)
FULL_IMAGE_BELOW = 64  # evaluation does not crop smaller images, because their objects reach the edges


def size_at(sizes: dict[int, int] | None, epoch: int) -> int:
    """Return the size of images in an epoch; 0 for samples that are not images. `sizes` is ordered by first epoch.

    >>> [size_at({0: 128, 6: 224}, epoch) for epoch in (0, 5, 6, 90)]
    [128, 128, 224, 224]
    """
    return 0 if sizes is None else next(size for first, size in reversed(sizes.items()) if first <= epoch)


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """How images become batches.

    Args:
        image_size: Height and width of the images in a batch, or {first epoch: size} to start with small images.
        backend: Decoder: ``"dali"``, ``"torch"`` or ``"auto"``. ``"auto"`` uses DALI on a GPU if it is installed, else
            torch. A resumed run keeps the choice.
        crop_scale: Range of the area of a random crop, as a fraction of the image's area.
        flip: Probability of a horizontal flip.
        eval_resize: Shorter side of an image in validation and test before the center crop, in pixels. Default: 8/7 of
            image_size, such as 256 for 224; image_size if it is below 64.
        mean: Mean per channel, for pixels in [0, 1].
        std: Standard deviation per channel, for pixels in [0, 1].
        threads: Number of threads per rank that make batches. Default: the rank's share of the CPU cores, at most 16.
        seed: Seed of the order of samples. It also places samples on nodes and draws the augmentation.
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
        largest, area = max(self.sizes.values()), self.crop_scale
        hint = "Use 'dali' to decode on the GPU" if self.backend in ("gpu", "cuda") else ""
        one_of(self, "backend", BACKENDS, hint=hint)
        if not _are(Real, area, 2) or not 0 < area[0] <= area[1] <= 1:
            raise ValueError(
                f"crop_scale={area!r} must be two fractions of the image's area, least and greatest. Use (0.08, 1.0)."
            )
        number(self, "flip", low=0, high=1, hint="it is a probability")
        hint = f"the largest image_size, {largest}, is cropped from it; {largest} crops the largest square"
        whole(self, "eval_resize", low=largest, optional=True, hint=hint)
        if not _are(Real, self.mean, 3) or not _are(Real, self.std, 3) or not min(self.std) > 0:
            raise ValueError(
                f"mean={self.mean!r}, std={self.std!r} must be three numbers each, for red, green and blue in [0, 1]. "
                "Each std must be above 0."
            )
        whole(self, "seed")
        whole(self, "threads", low=1, optional=True, hint="None uses a share of the CPU cores")

    @cached_property
    def sizes(self) -> dict[int, int]:
        image_size = self.image_size
        sizes = dict(sorted(image_size.items())) if isinstance(image_size, Mapping) else {0: image_size}
        are_whole = all(_are(int, pair, 2) for pair in sizes.items())
        if not are_whole or 0 not in sizes or min(sizes) < 0 or min(sizes.values()) < 1:
            raise ValueError(
                f"image_size={image_size!r} must be a size in pixels, or a dict of sizes by first epoch, starting with "
                f"epoch 0, such as {{0: 128, 6: 224}}."
            )
        return sizes

    def eval_crop(self, size: int) -> tuple[int, int]:
        """Return the fraction of the shorter side that an evaluation sees at this size, as (numerator, denominator)."""
        if self.eval_resize is not None:
            return size, self.eval_resize
        return (1, 1) if size < FULL_IMAGE_BELOW else (7, 8)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How samples of any kind become batches.

    Args:
        decode: Function from the bytes of a file to a sample.
        transform: Function of a decoded training sample, such as a transform of torchvision.
        eval_transform: Function of a decoded sample in validation and test.
        collate: Function from a list of samples to a batch. Default: `torch.utils.data.default_collate`.
        workers: Number of worker processes per rank that make batches; 0 uses the training process. Default: its share
            of the CPU cores.
        seed: Seed of the order of samples. It also places samples on nodes and draws the transforms.
    """

    decode: Callable[[bytes], Any]
    transform: Callable[[Any], Any] | None = None
    eval_transform: Callable[[Any], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    workers: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        function(self, "decode")
        for name in ("transform", "eval_transform", "collate"):
            function(self, name, optional=True)
        whole(self, "seed")
        whole(self, "workers", low=0, optional=True, hint="None uses a share of the CPU cores")
