"""Options of the data cache, validated on creation, and the errors that the cache raises."""

import inspect
import ipaddress
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
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
        source: folder: a path or an fsspec URL.
        cache_dir: folder on a local disk of each node. Runs may share it.
        memory_gb: memory limit per node and split; default: half of the free memory.
        disk_gb: disk limit per split; default: all free space except a reserve.
        lists: a CSV or Parquet file per split, such as ``{"train": "train.csv", "val": "val.csv"}``, with the columns
            path (relative to the source), label and, for several labels, more. The first label may be a name.
        member: extension of the member of a WebDataset shard that is the sample, such as ``"npy"``; needed if there
            are several besides ``.cls``, the label. Of Parquet files, the column of samples.
        format: in memory: pixels, image files, or pixels if they fit; "bytes" for files that are not images.
        short_side: shorter side of decoded images.
        shuffle: ``"global"`` or ``"local"``; see `lightning_sparse.data.pipeline.sampler`.
        on_corrupt: ``"raise"`` stops at a file that cannot be read or decoded and names it, ``"skip"`` replaces it by
            another sample.
        seed: seed of placement and order.
        storage_timeout: seconds to wait for storage that does not respond before the run fails.
        storage_readers: files that each process reads from network storage at a time.
        peer_address: address or interface on which a node serves samples to others; default: the interface of the
            process group.
        peer_ports: first and last port to serve samples on, for a firewall; default: any free port. A node uses one
            port for train/ and one for val/.
        storage_options: arguments for fsspec to open the source, such as ``{"endpoint_url": "http://minio:9000"}``; not
            part of the representation, because it may contain keys.

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
                f"the data cache needs {', '.join(missing)}: `pip install 'lightning-sparse[data]'`, or in a checkout "
                f"`pip install '.[data]'`."
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
