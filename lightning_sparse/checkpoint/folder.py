"""Verifies checkpoints before they are read, and writes checkpoint folders completely or not at all.

    last.ckpt/                      files of `torch.distributed.checkpoint`, and Lightning's ``meta.pt``
    last.ckpt/lightning_sparse/     the side files (`lightning_sparse.checkpoint.side_files`)
    .last.ckpt.part/                an unfinished save; the next save removes it

torch.save writes archives with CRC-32 checksums, also inside the files of `torch.distributed.checkpoint`. Neither
looks at them when it reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader  # type: ignore[attr-defined]  # re-exported, unannounced
from torch.distributed.checkpoint.api import CheckpointException

from lightning_sparse.agree import all_agree
from lightning_sparse.messages import log_if_slow

META = "meta.pt"  # Lightning's name


@contextmanager
def atomic_directory(path: Path, device: torch.device) -> Iterator[Path]:
    """Yield the temporary name of a folder that all ranks write; when all have, it takes the place of ``path``. A
    collective of the world.

    Args:
        device: of the collective.

    Raises:
        RuntimeError: when another rank could not write, or nodes do not share the folder. ``path`` is then unchanged.
    """
    partial, rank = path.with_name(f".{path.name}.part"), dist.get_rank()
    with raise_on_all_ranks(path, device):
        if rank == 0:
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
    with raise_on_all_ranks(path, device):
        if rank > 0:
            _require_shared_directory(partial)
    with raise_on_all_ranks(path, device):
        yield partial
    with raise_on_all_ranks(path, device):
        if rank == 0:
            _replace(path, partial)


def _require_shared_directory(made: Path) -> None:
    """Raise where a folder that rank 0 has made is not there."""
    try:
        made.mkdir()  # asks the server, where exists() may answer from what a client of NFS remembers
    except FileExistsError:
        return
    except FileNotFoundError:
        pass
    else:
        made.rmdir()
    raise RuntimeError(
        f"{made.parent} on this node is not the folder that rank 0 writes to: a distributed checkpoint needs one that "
        "all nodes share. Set default_root_dir, or the checkpoint callback's dirpath, to a path on shared storage."
    )


@contextmanager
def raise_on_all_ranks(path: Path, device: torch.device) -> Iterator[None]:
    """Leave when all ranks do; where one raises inside, all do."""
    error: Exception | None = None
    with log_if_slow(f"writing {path}"):
        try:
            yield
        except CheckpointException as raised:  # torch's, of the ranks that failed, is no Exception
            error = RuntimeError(f"a rank could not write {path}, what stood there stays: {raised}")
        except Exception as raised:
            error = raised
        whole = all_agree(error is None, dist.all_reduce, device)
    if error is not None:
        raise error
    if not whole:
        raise RuntimeError(f"another rank could not write {path}, and its error says why: what stood there stays.")


def verify(path: Path, device: torch.device) -> None:
    """Compare all checksums of a folder, each by one rank. A collective of the world.

    Raises:
        RuntimeError: on all ranks, for one that is damaged.
    """
    with log_if_slow(f"verifying {path}"):
        damaged = _damaged(path)
        whole = all_agree(not damaged, dist.all_reduce, device)
    if not whole:
        raise RuntimeError(
            f"the checkpoint {path} is damaged: {damaged or 'another rank says where'}. Resume from another one."
        )


def _damaged(path: Path) -> str:
    """Return where this rank's share of the checksums is wrong; empty where none is."""
    try:
        items = _items(path)
    except Exception as error:  # a rank that cannot see it tells the others
        return f"{type(error).__name__}: {error}"
    for index, (file, offset, length) in enumerate(items):
        if index % dist.get_world_size() != dist.get_rank():
            continue
        try:
            with open(path / file, "rb") as opened:
                opened.seek(offset)
                wrong = _wrong_entry(io.BytesIO(opened.read(length)))
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            return f"{file} at byte {offset} ({wrong})"
    return ""


def _wrong_entry(content: io.BytesIO) -> str | None:
    """Return the entry of an archive whose checksum is wrong.

    Raises:
        Exception: of any type, from the parser of Python or of torch. They check different fields.
    """
    with zipfile.ZipFile(content) as archive:
        wrong = archive.testzip()
    content.seek(0)
    with contextlib.suppress(pickle.UnpicklingError):  # of types that are loaded by others
        torch.load(content, map_location="cpu", weights_only=True)
    return wrong


def verify_file(path: Path) -> None:
    """Compare all checksums of a file of torch.save(). No collective: where nodes do not share it some ranks may have
    none.

    Raises:
        RuntimeError: for one that is damaged.
    """
    if not (path.is_file() and zipfile.is_zipfile(path)):
        return
    try:
        with zipfile.ZipFile(path) as archive, log_if_slow(f"verifying {path}"):
            wrong = archive.testzip()
    except Exception as error:  # the parser can raise any type
        wrong = f"{type(error).__name__}: {error}"
    if wrong is not None:
        raise RuntimeError(f"the checkpoint {path} is damaged ({wrong}). Resume from another one.")


def _items(path: Path) -> list[tuple[str, int, int]]:
    """Return file, offset and length of each torch.save() archive in a folder."""
    stored = FileSystemReader(path).read_metadata().storage_data
    items = sorted({(each.relative_path, each.offset, each.length) for each in stored.values()})
    meta = path / META
    return [*items, (META, 0, meta.stat().st_size)] if meta.is_file() else items


def _replace(path: Path, whole: Path) -> None:
    """Replace the file or folder at ``path``, atomically if the file system supports it."""
    for file in filter(Path.is_file, whole.rglob("*")):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())  # otherwise, a crash of the machine may keep the name and lose the contents
    if path.is_file() or path.is_symlink():
        path.unlink()
    if not path.exists():
        whole.rename(path)
        return
    if not _swap_atomically(path, whole):
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)  # from a kill between the two renames; the folder at path is newer
        path.rename(old)
        whole.rename(path)
        old.rename(whole)
    shutil.rmtree(whole)


def _swap_atomically(one: Path, other: Path) -> bool:
    """Exchange two names at once, on Linux; return whether that worked."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2 is not None and renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
