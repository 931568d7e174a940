"""Reads the row groups of a Parquet file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from lightning_sparse.data.sources.storage_base import UnreadableFileError

READ_BYTES = 4 << 20  # Parquet files are read in parts, so that slow storage is seen to answer
LFS_POINTER = b"version https://git-lfs"


def row_groups(file: Any, column: str, progress: Callable[[], None]) -> dict[str, Any]:
    """Return (rows, bytes of the samples) of each row group of a Parquet file, its labels, and the names of classes.

    If it is unclear which column has the labels, the result names the candidates. `column` has the samples; "": the
    only column of bytes, or of a struct with a field `bytes`.
    """
    with _opened(file, progress) as parquet:
        schema = parquet.schema_arrow
        sample, label, unclear = _columns(schema, column)
        groups = []
        for number in range(parquet.metadata.num_row_groups):
            about = parquet.metadata.row_group(number)
            parts = (about.column(column_number) for column_number in range(about.num_columns))
            groups.append((about.num_rows, sum(p.total_uncompressed_size for p in parts if p.path_in_schema == sample)))
        labels = parquet.read(columns=[label]).column(0).to_pylist() if label else []
    about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))  # written by its data set library
    names = about.get("info", {}).get("features", {}).get(label, {}).get("names")
    return {"groups": groups, "label": label or "", "labels": labels, "names": list(names or []), "unclear": unclear}


def rows(file: Any, column: str, group: int, progress: Callable[[], None]) -> list[bytes | None]:
    with _opened(file, progress) as parquet:
        sample, *_ = _columns(parquet.schema_arrow, column)
        if group >= parquet.metadata.num_row_groups:  # the file was replaced
            return []
        values = parquet.read_row_group(group, columns=[sample]).column(0).to_pylist()
    return [value.get("bytes") if isinstance(value, dict) else value for value in values]


class _Reporting:
    def __init__(self, file: Any, progress: Callable[[], None]) -> None:
        self._file, self._progress, self.failed = file, progress, False

    def read(self, size: int = -1) -> bytes:
        try:
            data: bytes = self._file.read(size)
        except BaseException:
            self.failed = True
            raise
        self._progress()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def _opened(file: Any, progress: Callable[[], None]) -> Iterator[Any]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    reported = _Reporting(file, progress)
    with file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UnreadableFileError("it is a pointer of Git LFS: run `git lfs pull` in the repository")
        file.seek(0)
        try:
            parquet = ParquetFile(pyarrow.PythonFile(reported, "r"), buffer_size=READ_BYTES)
        except pyarrow.ArrowInvalid as error:
            raise UnreadableFileError(f"it is not a Parquet file: {error}") from error
        try:
            yield parquet
        except OSError as error:  # of pyarrow too, which is no fault of the network that a later try may pass
            if reported.failed:
                raise
            raise UnreadableFileError(f"it is damaged: {' '.join(str(error).split())}") from error


def _columns(schema: Any, requested: str) -> tuple[str, str, list[str]]:
    """Return the path of the column of samples, the name of the column of labels ("" if unclear), and candidates."""
    from pyarrow import types

    kinds = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    samples, numbers = {}, []
    for field in schema:
        inner = {member.name for member in field.type} if types.is_struct(field.type) else set()
        if any(is_kind(field.type) for is_kind in kinds):
            samples[field.name] = field.name
        elif "bytes" in inner:
            samples[field.name] = f"{field.name}.bytes"
        elif types.is_integer(field.type):
            numbers.append(field.name)
    chosen = [requested] if requested in samples else list(samples)
    if len(chosen) != 1 or (requested and requested not in samples):
        raise UnreadableFileError(
            f"{len(samples)} of its columns {', '.join(schema.names)} contain bytes. Name the column of the sample, as "
            f"in member='image'"
        )
    labels = [name for name in ("label", "labels") if name in schema.names][:1] or numbers
    return (samples[chosen[0]], labels[0], []) if len(labels) == 1 else (samples[chosen[0]], "", labels)
