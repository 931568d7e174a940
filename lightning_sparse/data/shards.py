"""Shards of tokens on network storage: read once, tokenized if they are text, and kept on the local disk.

::

    <cache_dir>/v2-<hash of the source>/     as for other sources, see `folders.py`
        tokens-<hash>/                       hash of the tokenizer and vocab_size
            <hash of a shard's path>.bin     its ids
            <hash of a shard's path>.json    their description, and the shard's path, size and time on storage
            shards.json                      the list of the shards, for when storage does not answer

Each file gets its name when it is complete, so a run continues where a killed run stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from glob import has_magic
from multiprocessing.connection import Connection, wait
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from tqdm import tqdm

from lightning_sparse.data.child import Child, end_with_parent
from lightning_sparse.data.config import CacheConfig, DataError
from lightning_sparse.data.folders import (
    NETWORK_FILE_SYSTEMS,
    cache_folder,
    cache_path,
    file_system,
    is_read_only,
    locked,
    make_private_dir,
    wrap_os_errors,
    write_private,
)
from lightning_sparse.data.id_files import (
    IdWriter,
    TokenFile,
    VocabularyError,
    id_writer,
    token_files,
    verified_checksums,
)
from lightning_sparse.data.sources.local_storage import LocalStorage
from lightning_sparse.data.sources.storage import CHECK_S, Entry, MissingFolderError, Storage, Unreadable
from lightning_sparse.data.sources.storage_base import is_visible
from lightning_sparse.data.split_names import check_splits, regex_of
from lightning_sparse.data.text import TEXT_SUFFIXES, UNREADABLE, Tokenizer, documents, text_suffix, tokenizer_of
from lightning_sparse.messages import log, log_ignored

PART = 1 << 24  # bytes of a request
ID_SUFFIXES = (".bin", ".npy")
_NAMED = 10  # files or documents that a message names
Progress = Callable[[int], None]


class Shard(NamedTuple):
    """A file on storage. size: 0 if unknown. beside: changes with the tag of the file, and with its JSON."""

    path: str
    size: int
    mtime_ns: int
    beside: int = 0  # also a key in the JSON files of the cache


class LeftOut(NamedTuple):
    """Skipped documents. empty: their number. corrupt: place and error of each."""

    empty: int = 0
    corrupt: tuple[str, ...] = ()


def id_suffix(path: str) -> str:
    """Return the suffix of a file of ids in lower case, or ""."""
    suffix = PurePosixPath(path).suffix.lower()
    return suffix if suffix in ID_SUFFIXES else ""


def shards_of(source: str, files: Iterable[Entry]) -> tuple[list[Shard], list[str]]:
    """Return the shards of a folder, in the order of their paths, and the paths of the ignored files.

    Raise ValueError if there are no shards, both ids and text, or several splits.
    """
    shards = sorted(Shard(path, max(0, size), mtime_ns, tag) for path, size, mtime_ns, tag in files)
    by_path = {shard.path: shard for shard in shards}
    ids, text = [[shard for shard in shards if kind(shard.path)] for kind in (id_suffix, text_suffix)]
    described = {shard.path: by_path.get(_json_of(shard.path)) for shard in ids if id_suffix(shard.path) == ".bin"}
    left_out = by_path.keys() - {shard.path for shard in (*ids, *text, *filter(None, described.values()))}
    if text and ids:
        raise ValueError(f"{source} has ids ({ids[0].path}) and text ({text[0].path}): put them into separate folders.")
    if not text and not ids:
        contents = f"only {some(sorted(left_out))}" if left_out else "no files"
        raise ValueError(
            f"{source} has no shards: there must be files of ids ({', '.join(ID_SUFFIXES)}) or of text "
            f"({', '.join(TEXT_SUFFIXES)}). It has {contents}."
        )
    check_splits(source, [shard.path for shard in (text or ids)])
    added = {path: json.size + json.mtime_ns + json.beside for path, json in described.items() if json is not None}
    return text or [shard._replace(beside=shard.beside + added.get(shard.path, 0)) for shard in ids], sorted(left_out)


def _json_of(path: str) -> str:
    return f"{os.path.splitext(path)[0]}.json"


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def local_files(folder: Path) -> list[Entry]:
    return LocalStorage(str(folder)).listing("", "visible", lambda: None)[0]


class ShardFile(io.RawIOBase):
    """A file on storage, read in parts. `progress` is called with the size of each part."""

    def __init__(self, storage: Storage, shard: Shard, progress: Progress) -> None:
        self._storage, self._shard, self._progress = storage, shard, progress
        self._at = self._first = 0
        self._part = b""
        self._size = shard.size
        if not shard.size:  # the server does not list sizes
            self._fetch()
            self._size = len(self._part)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._size:
            return 0
        if not self._first <= self._at < self._first + len(self._part):
            self._fetch()
        first = self._at - self._first
        part = memoryview(self._part)[first : first + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _fetch(self) -> None:
        shard, first = self._shard, self._at
        last = min(first + PART, shard.size)
        self._part = b""  # free it before the next read
        (answer,) = self._storage.read([(shard.path, first, last) if shard.size else shard.path])
        if isinstance(answer, Unreadable):
            raise DataError(f"{self._storage.source}: {shard.path} cannot be read: {answer.reason}.")
        if (shard.size and len(answer.data) != last - first) or (answer.mtime_ns and answer.mtime_ns != shard.mtime_ns):
            raise DataError(f"{self._storage.source}: {shard.path} changed while it was read. Start again.")
        self._first, self._part = first, answer.data
        self._progress(len(answer.data))


@dataclass(frozen=True)
class TokenSource:
    """The shards of a source. `only` is the name of the only shard, or a pattern with ``*``; "": all of the folder."""

    config: CacheConfig
    only: str
    tokenizer: str
    vocab_size: int | None

    @classmethod
    def of(cls, path: str, cache_dir: str, tokenizer: str, vocab_size: int | None, **options: Any) -> TokenSource:
        folder, _, name = (path if "://" in path else os.path.abspath(path)).rpartition("/")
        is_file = "*" in name or bool(id_suffix(name) or text_suffix(name))
        config = CacheConfig(source=folder or "/" if is_file else path, cache_dir=cache_dir, format="bytes", **options)
        source = cls(config, name if is_file else "", tokenizer, vocab_size)
        source.encoder  # noqa: B018  an unknown one is refused now
        return source

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "encoder"}  # it cannot be pickled

    @cached_property
    def encoder(self) -> Tokenizer:
        return tokenizer_of(self.tokenizer)

    @cached_property
    def folder(self) -> Path:
        key = f"{self.encoder.identity} {self.encoder.end} {self.vocab_size}"
        return cache_path(self.config) / f"tokens-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"

    def create_folder(self) -> None:
        if not is_read_only(cache_folder(self.config)):
            make_private_dir(self.folder)

    def size_of_vocabulary(self, shards: Sequence[Shard]) -> int:
        if self.vocab_size is not None:
            return self.vocab_size
        if text_suffix(shards[0].path):
            return self.encoder.vocab_size
        if id_suffix(shards[0].path) == ".npy":
            raise ValueError(
                f"{self.config.source}/{shards[0].path} does not contain its vocabulary size: give vocab_size."
            )
        if self.is_kept(shards[0]):
            return TokenFile.at(self.file(shards[0])).vocab_size
        with Storage(self.config, readers=1) as storage:
            return _described(storage, shards[0], None).vocab_size

    def file(self, shard: Shard) -> Path:
        return self.folder / f"{hashlib.blake2b(os.fsencode(shard.path), digest_size=12).hexdigest()}.bin"

    def listed(self) -> list[Shard]:
        """List the shards. If storage does not answer, return the last list."""
        name = hashlib.blake2b(self.only.encode(), digest_size=4).hexdigest() if self.only else "shards"
        file = self.folder / f"{name}.json"
        cached: list[Shard] | None = None
        with contextlib.suppress(OSError, ValueError, TypeError):  # as a loss of power may leave it, it is made again
            cached = [Shard(*row) for row in json.loads(file.read_text())]
        timeout = self.config.storage_timeout if cached is None else min(CHECK_S, self.config.storage_timeout)
        try:
            with Storage(self.config, timeout=timeout, readers=1) as storage:
                shards = self._found(storage)
        except DataError as error:
            if cached is None:
                raise
            log.warning("using the list of shards in the cache, because storage did not answer: %s", error)
            return cached
        self.create_folder()
        for shard in set(shards) - set(cached or shards):
            known = any(other.path == shard.path for other in cached or ())
            log.info("%s: %s %s: reading it", self.config.source, shard.path, "has changed" if known else "is new")
        if shards != cached and os.access(file.parent, os.W_OK):
            with wrap_os_errors(file.parent):
                write_private(file, json.dumps(shards).encode())
        return shards

    def _found(self, storage: Storage) -> list[Shard]:
        source = self.config.source
        try:
            files = storage.files("") if self.only else next(storage.listing([""], images=False)).files
        except MissingFolderError as error:
            raise ValueError(f"{source} cannot be listed: check the path, and that it is mounted.") from error
        if self.only:
            patterns = self.only, _json_of(self.only)
            stars = [regex_of(pattern) for pattern in patterns]
            files = [
                file
                for file in files
                if file[0] in patterns or (is_visible(file[0]) and any(star.fullmatch(file[0]) for star in stars))
            ]
            return shards_of(f"{source}/{self.only}", files)[0]
        shards, left_out = shards_of(source, files)
        log_ignored(source, left_out, "ids or text")
        return shards

    def is_kept(self, shard: Shard) -> bool:
        """Whether the ids of the shard, as it is now, are in the cache."""
        try:
            about = json.loads(self.file(shard).with_suffix(".json").read_text())
            TokenFile.at(self.file(shard))  # raises ValueError if it is incomplete
            is_usable = not about.get("corrupt") or self.config.on_corrupt == "skip"
            return is_usable and [about.get(name, 0) for name in Shard._fields] == [*shard]
        except (OSError, ValueError):
            return False

    def make(self, shard: Shard, storage: Storage, progress: Progress) -> LeftOut:
        """Write the ids of a shard to the cache, unless another process has done it. Return the skipped documents."""
        target = self.file(shard)
        with wrap_os_errors(target.parent), locked(target.with_suffix(".lock")):
            if self.is_kept(shard):
                return LeftOut()
            for left in target.parent.glob(f"{target.name}.*.tmp"):  # left by a killed process
                left.unlink()
            with io.BufferedReader(ShardFile(storage, shard, progress), 1 << 16) as file:
                return self._write(shard, storage, cast(BinaryIO, file))

    def _write(self, shard: Shard, storage: Storage, file: BinaryIO) -> LeftOut:
        name, suffix, left_out = f"{self.config.source}/{shard.path}", id_suffix(shard.path), LeftOut()
        about = _described(storage, shard, file.seek(0, io.SEEK_END)) if suffix == ".bin" else None
        vocab_size = self.vocab_size or (about.vocab_size if about else self.size_of_vocabulary([shard]))
        end = about.end if about else None if suffix else self.encoder.end
        entries: dict[str, Any] = shard._asdict()
        with id_writer(self.file(shard), name, vocab_size, end, entries) as writer:
            if about is not None:
                _copy_bin(name, file, about, writer)
            elif suffix:
                _copy_npy(name, file, writer)
            else:
                left_out = encode_documents(self.encoder, name, file, writer, skip=self.config.on_corrupt == "skip")
                entries["corrupt"] = len(left_out.corrupt)
        return left_out


def encode_documents(encoder: Tokenizer, name: str, file: BinaryIO, writer: IdWriter, *, skip: bool) -> LeftOut:
    """Encode the documents of a text shard, and write their ids, each with its end. Return the skipped documents."""
    empty, corrupt = 0, list[str]()
    try:
        for place, blocks in documents(name, file):
            try:
                for ids in encoder.encode(blocks):
                    writer.write(ids)
            except VocabularyError:
                raise
            except UNREADABLE as error:
                problem = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else "cannot be read as text"
                where = f" in {place}" if place else ""
                corrupt.append(f"{name} {problem} ({type(error).__name__}: {error}){where}")
                if not skip:
                    raise ValueError(f'{corrupt[0]}: repair it, or set on_corrupt="skip" to skip it.') from error
                writer.take_back()
                continue
            if writer.is_empty:
                empty += 1
                continue
            writer.write(np.array([encoder.end]))
            writer.end_document()
    except ImportError as error:
        raise ValueError(f"{name} needs pyarrow: `pip install pyarrow`.") from error
    return LeftOut(empty, tuple(corrupt))


def _described(storage: Storage, shard: Shard, size: int | None) -> TokenFile:
    def read_json() -> bytes:
        (answer,) = storage.read([_json_of(shard.path)])
        if isinstance(answer, Unreadable):
            raise ValueError(answer.reason)
        return answer.data

    return TokenFile.of(f"{storage.source}/{shard.path}", read_json, size)


def _copy_bin(name: str, file: BinaryIO, about: TokenFile, writer: IdWriter) -> None:
    checksum = file.seek(0)
    while part := file.read(PART):
        checksum = zlib.crc32(part, checksum)
        writer.write(np.frombuffer(part, about.dtype))
    if about.checksum not in (0, checksum):
        raise ValueError(f"{name} is damaged: its checksum differs from the checksum in its JSON file. Write it again.")


def _copy_npy(name: str, file: BinaryIO, writer: IdWriter) -> None:
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except ValueError as error:
        raise ValueError(f"{name} is not a file of numpy ({error}).") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ValueError(f"{name} has {dtype} {shape}, but ids are whole numbers, an array [N]: write these.")
    left = int(shape[0])
    while left:
        data = file.read(min(left * dtype.itemsize, PART))
        part = np.frombuffer(data, dtype, count=len(data) // dtype.itemsize)
        if not len(part):
            raise ValueError(f"{name} ends before the {shape[0]:,} ids that it has: write it again.")
        left -= len(part)
        writer.write(part)


def check_cache_dir(path: str, cache_dir: str) -> None:
    is_folder = "://" not in path and Path(path).is_dir()
    if is_folder and Path(cache_dir).resolve().is_relative_to(Path(path).resolve()):
        raise ValueError(
            f"cache_dir={cache_dir!r} is inside {path}, so its files would be read as shards: give another folder."
        )


def is_used_in_place(path: str) -> bool:
    """Whether a path is a ``.bin`` file, or a folder with only ``.bin`` shards, on a local disk."""
    location = Path(path)
    if "://" in path or not location.exists() or file_system(location) in NETWORK_FILE_SYSTEMS:
        return False
    names = [name for name, *_ in local_files(location)] if location.is_dir() else [location.name]
    kinds = {id_suffix(name) or text_suffix(name) for name in names} - {""}
    return kinds == {".bin"}


def files_of(path: str | Path) -> list[TokenFile]:
    """Return the file at `path`, or all ``.bin`` below that folder, in the order of their paths.

    Raises:
        ValueError: if there is no file, or a file cannot be used in place.
    """
    path = Path(path)
    if path.is_file() and (id_suffix(path.name) or text_suffix(path.name)) not in ("", ".bin"):
        raise ValueError(
            f"{path} cannot be used in place as .bin files are: give cache_dir, a local folder for its ids."
        )
    paths = _bins_below(path) if path.is_dir() else [path]
    for file in paths:
        if file.is_symlink() and not file.exists():
            raise ValueError(
                f"{file} is a link to {os.readlink(file)}, which does not exist: repair or remove the link."
            )
    if not path.exists() and ":/" not in str(path) and not has_magic(str(path)):  # with cache_dir, patterns are read
        raise ValueError(f"{path} does not exist. Check the path.")
    if not paths or not paths[0].exists():
        raise ValueError(
            f"{path} is neither a file of token ids nor a folder with *.bin files. Write one with `lightning-sparse "
            "tokens` or `lightning_sparse.data.tokens.prepare`; or give cache_dir, a local folder, to use text or "
            "network storage."
        )
    return token_files(paths)


def _bins_below(folder: Path) -> list[Path]:
    files = local_files(folder)
    if not any(id_suffix(name) for name, *_ in files):
        return []
    shards, _ = shards_of(str(folder), files)
    for shard in shards:
        if id_suffix(shard.path) != ".bin":
            raise ValueError(
                f"{folder} has {shard.path}, which cannot be used in place, because it is not a .bin file: give "
                "cache_dir, a local folder for its ids, or remove the file."
            )
    return [folder / shard.path for shard in shards]


def log_unused_files(path: str) -> None:
    if os.path.isdir(path):
        log_ignored(path, shards_of(path, local_files(Path(path)))[1], "ids or text")


def verified_in_place(files: Sequence[TokenFile], cache_dir: str | None) -> list[int]:
    """Return the checksums of files that are used in place. A cache folder keeps them, so each file is read once."""
    if cache_dir is None:
        return [*verified_checksums(files, {}).values()]
    record, cached = Path(cache_dir) / "checksums.json", dict[str, int]()
    with wrap_os_errors(record.parent):
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError, ValueError):
            cached = json.loads(record.read_text())
        checksums = verified_checksums(files, cached)
        if not checksums.keys() <= cached.keys() and os.access(record.parent, os.W_OK):
            write_private(record, json.dumps(cached | checksums).encode())
    return [*checksums.values()]


MAX_WORKERS = 16


class Workers:
    """Processes that write missing shards to the cache. The first call of `done` starts them."""

    def __init__(self, source: TokenSource, shards: Sequence[Shard], *, quiet: bool) -> None:
        self._source, self._shards, self._quiet = source, shards, quiet
        self._running: dict[Connection, Child] = {}
        self._bar: tqdm[None] | None = None
        self._left_out = LeftOut()

    def done(self, patience_s: float) -> bool:
        """Wait up to `patience_s`, then return whether the cache has all shards."""
        if self._bar is None:
            self._start()
        end = time.monotonic() + patience_s
        while self._running and (left := end - time.monotonic()) > 0:
            for connection in wait([*self._running], left):
                self._receive(cast(Connection, connection))
        return not self._running

    def _start(self) -> None:
        missing = [shard for shard in self._shards if not self._source.is_kept(shard)]
        # large shards first, distributed in turn, so that the processes end at about the same time
        missing.sort(key=lambda shard: -shard.size)
        total, name = sum(shard.size for shard in missing), f"tokens of {self._source.config.source}"
        hidden = self._quiet or not missing
        if missing:
            self._source.create_folder()
        self._bar = tqdm(total=total, desc=name, unit="B", unit_scale=True, disable=hidden)
        count = min(len(missing), len(os.sched_getaffinity(0)), MAX_WORKERS)
        source = replace(self._source)  # a copy without the tokenizer, which starts threads
        for number in range(count):
            child = Child(f"{__name__}:make_shards", own_session=False)
            self._running[child.connection] = child
            child.connection.send((source, missing[number::count]))

    def _receive(self, connection: Connection) -> None:
        assert self._bar is not None
        try:
            kind, value = connection.recv()
        except (EOFError, OSError) as error:
            raise DataError(
                f"a process that tokenizes {self._source.config.source} ended early, probably because memory "
                "ran out: start again with fewer cores or smaller documents."
            ) from error
        if kind == "read":
            self._bar.update(value)
        elif kind == "error":
            raise value
        else:
            self._left_out = LeftOut(*(own + count for own, count in zip(self._left_out, value, strict=True)))
            self._running.pop(connection).process.wait()
            connection.close()

    def close(self) -> None:
        for connection, child in self._running.items():
            child.end(0)
            connection.close()
        self._running = {}
        if self._bar is not None:
            self._bar.close()
        (empty, corrupt), source = self._left_out, self._source.config.source
        if self._quiet:
            return
        if empty:
            log.info("%s: skipped %s empty document(s)", source, f"{empty:,}")
        if corrupt:
            log.warning("%s: skipped %s corrupt document(s): %s", source, f"{len(corrupt):,}", some(corrupt))


def make_shards(connection: Connection) -> None:
    source, shards = connection.recv()
    end_with_parent(connection)
    try:
        with Storage(source.config) as storage:
            made = [source.make(shard, storage, lambda size: connection.send(("read", size))) for shard in shards]
        empty, corrupt = zip(*made, strict=True)
        connection.send(("end", LeftOut(sum(empty), sum(corrupt, ()))))
    except Exception as error:
        message = str(error) if isinstance(error, (ValueError, DataError)) else f"{type(error).__name__}: {error}"
        connection.send(("error", ValueError(message) if isinstance(error, ValueError) else DataError(message)))
    os._exit(0)  # does not wait for the thread, which still reads
