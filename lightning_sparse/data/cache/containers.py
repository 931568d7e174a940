"""Files that contain many samples: members of tar files, and rows of Parquet files.

`storage_reader.py` loads this file by its path. It imports the standard library only, and pyarrow for Parquet.
"""

import struct
import tarfile
import time
from collections.abc import Callable
from typing import Any

MAX_LABEL_BYTES = 64  # of a member that is a label: `.cls`
PROGRESS_S = 1.0
READ_BYTES = 4 << 20  # Parquet files are read in parts, so that slow storage is seen to answer

LFS_POINTER = b"version https://git-lfs"


class ContainerError(Exception):
    """The file cannot be used, now or later."""


def members(file: Any, progress: "Callable[[], None]") -> list[tuple[str, int, int, str]]:
    """Return (name, offset, size, contents of a ``.cls`` member) of each file in a tar file, from its headers.

    Raises:
        ContainerError: if it is not an uncompressed tar file.
    """
    found, told = [], time.monotonic()
    try:
        with file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.isreg():
                    is_label = member.name.endswith(".cls") and member.size <= MAX_LABEL_BYTES
                    stream = tar.extractfile(member) if is_label else None
                    label = stream.read().decode("ascii", "replace").strip() if stream else ""
                    found.append((member.name, member.offset_data, member.size, label))
                if time.monotonic() - told >= PROGRESS_S:
                    progress()
                    told = time.monotonic()
    except tarfile.TarError as error:
        raise ContainerError(f"it is not an uncompressed tar file: {error}") from error
    return found


def row_groups(file: Any, column: str, progress: "Callable[[], None]") -> dict[str, Any]:
    """Return what a Parquet file contains: (rows, bytes of the samples) of each row group, labels, names of classes.

    Args:
        column: of the samples; "": the only one of bytes, or of a struct with a field `bytes`.

    Raises:
        ContainerError: if it is not a Parquet file, or its columns do not tell what the samples are.
    """
    with file:
        parquet = _opened(file, progress)
        schema = parquet.schema_arrow
        sample, label = _columns(schema, column)
        groups = []
        for number in range(parquet.metadata.num_row_groups):
            about = parquet.metadata.row_group(number)
            parts = (about.column(each) for each in range(about.num_columns))
            groups.append((about.num_rows, sum(p.total_uncompressed_size for p in parts if p.path_in_schema == sample)))
        labels = parquet.read(columns=[label]).column(0).to_pylist() if label else []
    return {"groups": groups, "labels": labels, "names": _names(schema, label)}


def rows(file: Any, column: str, group: int, progress: "Callable[[], None]") -> bytes:
    """Return the samples of a row group: their number and lengths, int64, -1 if there is none; and their bytes."""
    with file:
        parquet = _opened(file, progress)
        sample, _ = _columns(parquet.schema_arrow, column)
        values = parquet.read_row_group(group, columns=[sample]).column(0).to_pylist()
    found = [each.get("bytes") if isinstance(each, dict) else each for each in values]
    lengths = [-1 if each is None else len(each) for each in found]
    return struct.pack(f"<{len(found) + 1}q", len(found), *lengths) + b"".join(each or b"" for each in found)


class _Reporting:
    """A file that reports each read."""

    def __init__(self, file: Any, progress: "Callable[[], None]") -> None:
        self._file, self._progress = file, progress

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._file.read(size)
        self._progress()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _opened(file: Any, progress: "Callable[[], None]") -> Any:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    if file.read(len(LFS_POINTER)) == LFS_POINTER:
        raise ContainerError("it is a pointer of Git LFS: run `git lfs pull` in the repository")
    file.seek(0)
    try:
        return ParquetFile(pyarrow.PythonFile(_Reporting(file, progress), "r"), buffer_size=READ_BYTES)
    except pyarrow.ArrowInvalid as error:
        raise ContainerError(f"it is not a Parquet file: {error}") from error


def _columns(schema: Any, wanted: str) -> tuple[str, str]:
    """Return the path of the column of samples, and the name of that of labels, "" if there is none."""
    from pyarrow import types

    samples, numbers = {}, []
    for field in schema:
        inner = {each.name for each in field.type} if types.is_struct(field.type) else set()
        if types.is_binary(field.type) or types.is_large_binary(field.type):
            samples[field.name] = field.name
        elif "bytes" in inner:
            samples[field.name] = f"{field.name}.bytes"
        elif types.is_integer(field.type):
            numbers.append(field.name)
    chosen = [wanted] if wanted in samples else list(samples)
    if len(chosen) != 1 or (wanted and wanted not in samples):
        raise ContainerError(
            f"of its columns {', '.join(schema.names)}, {len(samples)} contain bytes. Give the name of the one that is "
            "the sample, as in member='image'"
        )
    labels = [name for name in ("label", "labels") if name in schema.names] or (numbers if len(numbers) == 1 else [])
    return samples[chosen[0]], labels[0] if labels else ""


def _names(schema: Any, label: str) -> list[str]:
    """Return the names of the classes, if the data set library of Hugging Face wrote them; else none."""
    import json

    about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    return list(about.get("info", {}).get("features", {}).get(label, {}).get("names") or [])
