"""Verifies checkpoints before they are read, and writes checkpoint folders completely or not at all.

    last.ckpt/                      files of `torch.distributed.checkpoint`, and Lightning's ``meta.pt``
    last.ckpt/lightning_sparse/     side files (`lightning_sparse.checkpoint.side_files`)
    .last.ckpt.part/                an unfinished save; the next save removes it

Archives of torch.save have CRC-32 checksums, also inside these files. torch does not verify them.
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
    """Yield a temporary name for a folder that all ranks write, and rename it to ``path`` at the end.

    A collective of the world.

    Raises:
        RuntimeError: if another rank could not write, or nodes do not share the folder. ``path`` is then unchanged.
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
    try:
        made.mkdir()  # asks the server; exists() may use the cache of an NFS client
    except FileExistsError:
        return
    except FileNotFoundError:
        pass
    else:
        made.rmdir()
    raise RuntimeError(
        f"{made.parent} on this node is not the folder that rank 0 writes to: a distributed checkpoint needs a folder "
        "that all nodes share. Set default_root_dir, or the checkpoint callback's dirpath, to a path on shared storage."
    )


@contextmanager
def raise_on_all_ranks(path: Path, device: torch.device) -> Iterator[None]:
    """Return a context that raises on all ranks if one rank raises inside. A collective of the world."""
    error: Exception | None = None
    with log_if_slow(f"writing {path}"):
        try:
            yield
        except CheckpointException as raised:  # a BaseException of torch, with the failed ranks
            error = RuntimeError(f"a rank could not write {path}; an earlier checkpoint there is unchanged: {raised}")
        except Exception as raised:
            error = raised
        whole = all_agree(error is None, dist.all_reduce, device)
    if error is not None:
        raise error
    if not whole:
        raise RuntimeError(f"another rank could not write {path}, so the existing checkpoint stays. See its error.")


def verify(path: Path, device: torch.device) -> None:
    """Verify all checksums of a folder, each on one rank. A collective of the world.

    Raises:
        RuntimeError: on all ranks, if an archive is damaged.
    """
    with log_if_slow(f"verifying {path}"):
        damaged = _damaged(path)
        whole = all_agree(not damaged, dist.all_reduce, device)
    if not whole:
        raise RuntimeError(
            f"the checkpoint {path} is damaged: {damaged or 'another rank reports where'}. Resume from another "
            f"checkpoint."
        )


def _damaged(path: Path) -> str:
    try:
        items = _items(path)
    except Exception as error:  # reported to the other ranks
        return f"{type(error).__name__}: {error}"
    # Each rank reads its share of the archives, so a folder is read once in total.
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
    # The parsers of Python and of torch check different fields. Either may raise an exception of any type.
    with zipfile.ZipFile(content) as archive:
        wrong = archive.testzip()
    content.seek(0)
    with contextlib.suppress(pickle.UnpicklingError):  # types that a safe load refuses
        torch.load(content, map_location="cpu", weights_only=True)
    return wrong


def verify_file(path: Path) -> None:
    """Verify all checksums of a file of torch.save(), or raise RuntimeError."""
    # Not a collective, because some ranks may not see the file.
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
    stored = FileSystemReader(path).read_metadata().storage_data
    items = sorted({(info.relative_path, info.offset, info.length) for info in stored.values()})
    meta = path / META
    return [*items, (META, 0, meta.stat().st_size)] if meta.is_file() else items


def _replace(path: Path, whole: Path) -> None:
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
        shutil.rmtree(old, ignore_errors=True)  # left by a kill between the two renames; the folder at path is newer
        path.rename(old)
        whole.rename(path)
        old.rename(whole)
    shutil.rmtree(whole)


def _swap_atomically(one: Path, other: Path) -> bool:
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2 is not None and renameat2(cwd, os.fsencode(one), cwd, os.fsencode(other), exchange) == 0
