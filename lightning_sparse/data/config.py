"""Options of the data cache and of how its samples become batches, validated on creation; the errors of the cache."""

import inspect
import ipaddress
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

Shuffle = Literal["local", "global"]
SHUFFLES = get_args(Shuffle)
GB = 10**9

SPLITS = ("train", "val", "test")
_CHOICES = {
    "format": ("auto", "jpeg", "decoded", "bytes"),
    "shuffle": SHUFFLES,
    "on_corrupt": ("raise", "skip"),
}

_REQUIRED = ("lmdb", "zmq", "xxhash", "PIL")  # the extra `data`; Pillow only for images


class DataError(RuntimeError):
    """The data or a cache folder cannot be used. The message names the file or the folder."""


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
    """Say that a mapping of `size` bytes was refused."""
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
        memory_gb: Memory limit per node and split, in GB. Default: half of the free memory.
        disk_gb: Disk limit per split, in GB. Default: all free space except a reserve.
        lists: CSV or Parquet file of each split, such as ``{"train": "train.csv", "val": "val.csv"}``. Its columns are
            path (relative to the source), label and, for several labels, more. The first label may be a name.
        member: Extension of the member of a WebDataset shard that is the sample, such as ``"npy"``. Required if a
            sample has several members other than its label (``.cls``). For Parquet files, the column of samples.
        format: Format in memory: pixels, image files, or pixels if they fit; "bytes" for files that are not images.
        short_side: Shorter side of decoded images, in pixels.
        shuffle: Order of the samples, ``"global"`` or ``"local"``. See `lightning_sparse.data.pipeline.sampler`.
        on_corrupt: How to handle an unreadable file: ``"raise"`` an error that names it, or ``"skip"`` and use another
            sample.
        seed: Seed of the order of samples. It also places samples on nodes.
        storage_timeout: Seconds to wait for storage that does not respond before the run fails.
        storage_readers: Number of files that each process reads from network storage at a time.
        peer_address: Address or interface on which a node serves samples to others. Default: the interface of the
            process group.
        peer_ports: First and last port to serve samples on, for a firewall. A node uses one port for train/ and one for
            val/. Default: any free port.
        storage_options: Arguments for fsspec to open the source, such as ``{"endpoint_url": "http://minio:9000"}``.
            They are not part of the representation, because they may contain keys.

    Raises:
        ValueError: if an option is out of range.
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
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(allowed)}.")
        for name in ("memory_gb", "disk_gb"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value} must be a size in GB, 0 or more. Omit it to use the default.")
        if not 1 <= self.short_side <= 16384:
            raise ValueError(
                f"short_side={self.short_side} must be between 1 and 16384 pixels; use 256 to train at 224."
            )
        if not 0 < self.storage_timeout < float("inf"):
            raise ValueError(f"storage_timeout={self.storage_timeout} must be a number of seconds, more than 0.")
        if not 1 <= self.storage_readers <= 256:
            raise ValueError(f"storage_readers={self.storage_readers} must be between 1 and 256 files at a time.")
        if self.peer_ports is not None and not 1 <= self.peer_ports[0] <= self.peer_ports[-1] <= 65535:
            raise ValueError(
                f"peer_ports={self.peer_ports} must be the first and the last port of a range, such as (29600, 29699)."
            )
        _check_storage(self.source, self.storage_options)
        _check_lists(self.lists)
        if self.peer_address is not None:
            _check_address(self.peer_address)


def _check_storage(source: str, options: dict[str, Any] | None) -> None:
    """Check that fsspec can open the source: its protocols are known, and their packages are installed."""
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


def _check_lists(lists: dict[str, str] | None) -> None:
    """Check that there is a list to train on, and that its kind can be read."""
    if lists is None:
        return
    unknown = [name for name in lists if name not in SPLITS]
    if "train" not in lists or unknown:
        raise ValueError(
            f"lists={lists} must give a file for train, and may give one for val and test, as in "
            "{'train': 'train.csv', 'val': 'val.csv'}."
        )
    for file in lists.values():
        if not file.endswith((".csv", ".parquet")):
            raise ValueError(f"the list {file!r} must be a .csv or a .parquet file.")
        if file.endswith(".parquet") and not is_installed("pyarrow"):
            raise ValueError(f"the list {file!r} needs pyarrow: `pip install pyarrow`, or give a .csv file.")


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


def check_limit(limit: int | float | None) -> None:
    """Raise ValueError if it is neither a number of samples nor a fraction."""
    whole = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1
    if limit is not None and not whole and not 0 < limit < 1:
        raise ValueError(f"limit={limit!r} must be a number of samples, 1 or more, or a fraction of them below 1.")


def check_fraction(val_fraction: float | None) -> None:
    """Raise ValueError if it is no part of the samples to train on."""
    if val_fraction is not None and not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction={val_fraction} must be between 0 and 1: it is a fraction of train.")


def limited_count(limit: int | float, count: int) -> int:
    """Return how many of `count` samples a limit leaves. Raises ValueError if it is above their number."""
    if limit > count:
        raise ValueError(f"limit={limit} is more than the {count:,} samples to train on: omit it.")
    return int(limit) if limit >= 1 else max(1, round(limit * count))


def is_installed(name: str) -> bool:
    """Whether a module can be imported."""
    try:
        return find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):  # ValueError: a module in sys.modules without a spec
        return False


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
        image_size: Height and width of the images in a batch, or {first epoch: size} to start with small images.
        backend: Decoder: ``"dali"``, ``"torch"``, or ``"auto"`` for the faster one. A resumed run keeps the choice.
        crop_scale: Range of the area of a random crop, as a fraction of the image's area.
        flip: Probability of a horizontal flip.
        eval_resize: Shorter side of an image in validation and test before the center crop, in pixels. Default: 8/7 of
            image_size, such as 256 for 224; below 64, image_size itself, so that small images are not cropped.
        mean: Mean per channel for normalization, for pixels in [0, 1].
        std: Standard deviation per channel for normalization, for pixels in [0, 1].
        threads: Number of threads per rank that make batches. Default: its share of the CPU cores.
        seed: Seed of the order of samples. It also places samples on nodes and draws the augmentation.

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
        decode: Function from the bytes of a file to a sample.
        transform: Function of a decoded training sample, such as a transform of torchvision.
        eval_transform: Function of a decoded sample in validation and test.
        collate: Function from a list of samples to a batch. Default: `torch.utils.data.default_collate`.
        workers: Number of worker processes per rank that make batches; 0 uses the training process. Default: its share
            of the CPU cores.
        seed: Seed of the order of samples. It also places samples on nodes and draws the transforms.

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


Init = TypeVar("Init", bound=Callable[..., None])


def with_options_of(*configs: type, without: tuple[str, ...] = ()) -> Callable[[Init], Init]:
    """Decorate a constructor that finds options of configs among its ``**options``, so that each is spelt, explained
    and checked in its config alone: the signature and the docstring tell them, to LightningCLI and help()."""

    def decorate(init: Init) -> Init:
        *named, _ = inspect.signature(init, eval_str=True).parameters.values()
        found = {each.name: each for each in named}
        for config in configs:
            types = get_type_hints(config)
            for each in fields(config):
                if each.default is not MISSING and each.name not in without:  # one without is for the constructor
                    option = inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default)
                    found.setdefault(each.name, option.replace(annotation=types[each.name]))
        init.__signature__ = inspect.Signature(list(found.values()))  # type: ignore[attr-defined]
        init.__doc__ = "\n\n".join(inspect.getdoc(each) or "" for each in configs)
        return init

    return decorate


def options_of(*configs: type, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each config. Raises TypeError for one that none of them has."""
    names = [{each.name for each in fields(config)} for config in configs]
    unknown = sorted(given.keys() - set().union(*names))
    if unknown:
        raise TypeError(f"unexpected option(s) {', '.join(unknown)}: the DataModule has no such options.")
    return [{name: value for name, value in given.items() if name in each} for each in names]
