"""Lists of samples, and their labels as numbers.

Values of a CSV file are read as pandas and pyarrow read them. If the two differ, or if a value is probably a mistake,
an error names the file, the column, and the number of the sample, counted from 1 after the header.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_sparse.messages import log

_WHOLE = re.compile(r"[+-]?[0-9]+")
_LEADING_ZERO = re.compile(r"[+-]?0[0-9]+")
_NUMBER = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|(?i:inf(inity)?))")
_BOOLEANS = {"True": 1, "TRUE": 1, "true": 1, "False": 0, "FALSE": 0, "false": 0}
_MISSING = {
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA"),
    *("NULL", "NaN", "None", "n/a", "nan", "null"),
}
"""Values that pandas reads as missing."""
Columns = dict[str, Sequence[Any]]


def columns_of_csv(file: str, data: bytes) -> Columns:
    """Return the columns of a CSV file, values as text."""
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        lines = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file} is not a CSV file in UTF-8: {error}.") from error
    for number, row in lines:
        if len(row) != len(lines[0][1]):
            raise ValueError(
                f"{file}: line {number:,} has {len(row)} column(s), but the header has {len(lines[0][1])}: {row}."
            )
    rows = (row for _, row in lines)
    columns = _columns(file, ((names[0].strip(), names[1:]) for names in zip(*rows, strict=True)))
    for name, values in [*columns.items()][1:]:  # the first column holds paths
        _check_text(file, name, values)
    return columns


def columns_of_parquet(file: str, data: bytes) -> Columns:
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(io.BytesIO(data))
    except (ValueError, OSError) as error:
        raise ValueError(f"{file} is not a Parquet file: {error}.") from error
    values = (column.to_pylist() for column in table.columns)
    return _columns(file, zip(table.column_names, values, strict=True))


def _columns(file: str, named: Iterable[tuple[str, Sequence[Any]]]) -> Columns:
    columns: Columns = {}
    for name, values in named:
        if name in columns:
            raise ValueError(f"{file} has several columns named {name}: rename or remove all but one.")
        columns[name] = values
    return columns


def _check_text(file: str, column: str, values: Sequence[str]) -> None:
    for value in dict.fromkeys(values):
        if value.strip() in _MISSING:
            problem = f"is {value!r}, which means a missing value: give each sample a label, and the class another name"
            raise _refused(file, column, values.index(value), problem)


def numbered(
    file: str, columns: Mapping[str, Sequence[Any]], *, text: bool
) -> tuple[npt.NDArray[Any], tuple[str, ...]]:
    """Return the labels, int64 or float64 [N, L], and the class names of the first label (none if it is a number).

    `text`: values are text that may contain numbers, as in CSV files.
    """
    arrays: list[npt.NDArray[Any]] = []
    classes: tuple[str, ...] = ()
    for position, (name, values) in enumerate(columns.items()):
        # None: names of classes
        array = _numbers_in_text(file, name, values) if text else _numbers(file, name, values)
        if array is None and position:
            which = next((row for row, value in enumerate(values) if not _NUMBER.fullmatch(str(value).strip())), 0)
            problem = f"is {values[which]!r}, which is not a number: only the first label may be a name"
            raise _refused(file, name, which, problem)
        if array is None:
            if text:
                _warn_of_numbers(file, name, values)
            array, classes = _of_names(file, name, values)
        arrays.append(array)
    if any(array.dtype == np.float64 for array in arrays):
        for name, array in zip(columns, arrays, strict=True):
            _check_exact(file, name, array)
    return np.concatenate([array.reshape(len(array), -1) for array in arrays], 1), classes


def _numbers_in_text(file: str, column: str, values: Sequence[str]) -> npt.NDArray[Any] | None:
    distinct = [*dict.fromkeys(values)]
    if all(map(_BOOLEANS.__contains__, distinct)):
        numbers: list[Any] = [_BOOLEANS[word] for word in distinct]
    elif {*distinct} <= {*_BOOLEANS, "0", "1"} and not _BOOLEANS.keys().isdisjoint(distinct):
        other = next(word for word in distinct if word not in _BOOLEANS)
        problem = f"is {other}, but other labels are words such as {min(_BOOLEANS.keys() & {*distinct})}: use one kind"
        raise _refused(file, column, values.index(other), problem)
    elif all(_WHOLE.fullmatch(word.strip()) for word in distinct):
        for word in distinct:
            if _LEADING_ZERO.fullmatch(word.strip()):
                problem = f"is {word}, which may be a number or a name: write {int(word)}, or a name with a letter"
                raise _refused(file, column, values.index(word), problem)
        numbers = [int(word) for word in distinct]
    elif all(_NUMBER.fullmatch(word.strip()) for word in distinct):
        # refuse integers that do not fit into 64 bits
        _whole(file, column, [int(value) if _WHOLE.fullmatch(value.strip()) else 0 for value in values])
        numbers = [float(word) for word in distinct]
        # Python reads 2e999 as inf, so name the text of the file.
        if large := next((word for word, number in zip(distinct, numbers, strict=True) if math.isinf(number)), ""):
            raise _refused(file, column, values.index(large), f"is {large}: give each sample a finite number")
    else:
        return None
    number = dict(zip(distinct, numbers, strict=True))
    labels = [number[value] for value in values]
    return _finite(file, column, np.array(labels)) if isinstance(labels[0], float) else _whole(file, column, labels)


def _numbers(file: str, column: str, values: Sequence[Any]) -> npt.NDArray[Any] | None:
    row, first = next(((row, value) for row, value in enumerate(values) if value is None), (0, values[0]))
    if first is None:
        raise _refused(file, column, row, "has no value: give each sample a label")
    kinds = [*dict.fromkeys(map(type, values))]
    if len(kinds) > 1 and set(kinds) != {int, float}:  # files may differ
        row = next(row for row, value in enumerate(values) if type(value) is kinds[1])
        problem = f"is {values[row]!r}, but the first label is {first!r}: write all labels as one type"
        raise _refused(file, column, row, problem)
    if isinstance(first, list):
        return _vectors(file, column, values)
    if float in kinds:
        return _finite(file, column, np.array(values, np.float64))
    if isinstance(first, (bool, int)):
        return _whole(file, column, [int(value) for value in values])
    if not isinstance(first, str):
        problem = f"is {first!r}, of type {type(first).__name__}: write labels as numbers, names or lists of numbers"
        raise _refused(file, column, 0, problem)
    if all(_NUMBER.fullmatch(value.strip()) for value in values):
        raise _refused(
            file, column, 0, f"is the text {first!r}: write the column as numbers, or as names with a letter"
        )
    return None


def _vectors(file: str, column: str, values: Sequence[list[Any]]) -> npt.NDArray[Any]:
    for row, row_values in enumerate(values):
        if len(row_values) != len(values[0]) or not row_values:
            problem = f"is a list of {len(row_values)} value(s), but the list of the first row has {len(values[0])}"
            raise _refused(file, column, row, f"{problem}: write lists of equal length, such as one 0 or 1 per class")
        if not all(isinstance(value, (bool, int, float)) for value in row_values):
            raise _refused(file, column, row, f"is {row_values!r}: write lists of numbers, without missing values")
    flat = [value for row_values in values for value in row_values]
    floats = any(isinstance(value, float) for value in flat)
    width = len(values[0])
    array = _finite(file, column, np.array(flat), width) if floats else _whole(file, column, [*map(int, flat)], width)
    return array.reshape(len(values), width)


def _whole(file: str, column: str, values: Sequence[int], width: int = 1) -> npt.NDArray[np.int64]:
    try:
        return np.array(values, np.int64)
    except OverflowError:
        place, large = next((place, value) for place, value in enumerate(values) if not -(1 << 63) <= value < 1 << 63)
        problem = f"is {large}, which does not fit into 64 bits: use a smaller number, or a name with a letter"
        raise _refused(file, column, place // width, problem) from None


def _finite(file: str, column: str, values: npt.NDArray[Any], width: int = 1) -> npt.NDArray[np.float64]:
    for place in np.flatnonzero(~np.isfinite(values))[:1].tolist():
        raise _refused(file, column, place // width, f"is {values[place]}: give each sample a finite number")
    return values.astype(np.float64)


def _warn_of_numbers(file: str, column: str, values: Sequence[str]) -> None:
    # A word among numbers, such as "unknown", makes names of all numbers, and gives each of them another number.
    is_number = [_NUMBER.fullmatch(value.strip()) is not None for value in values]
    if any(is_number):
        row, number = is_number.index(False), values[is_number.index(True)]
        log.warning(
            "%s: column %s has names, because the label of sample %s is %r. Some labels are numbers, such as %s. If "
            "all labels should be numbers, correct this label: names are numbered in alphabetical order",
            file,
            column,
            f"{row + 1:,}",
            values[row],
            number,
        )


def _check_exact(file: str, column: str, numbers: npt.NDArray[Any]) -> None:
    # Next to a label with decimals, whole numbers become float32.
    if numbers.dtype == np.int64:
        with np.errstate(invalid="ignore"):  # the largest numbers do not fit into int64 again
            rounded = numbers.astype(np.float32).astype(np.int64)
        is_rounded = (numbers != rounded).reshape(len(numbers), -1).any(1)
        for row in np.flatnonzero(is_rounded)[:1].tolist():
            problem = (
                f"is {numbers[row]}, which float32 cannot hold, next to a label with decimals: use smaller numbers"
            )
            raise _refused(file, column, row, problem)


def _of_names(file: str, column: str, values: Sequence[str]) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Return the place of each name in alphabetical order, and the sorted names."""
    names = sorted(set(values))
    for name in names:
        if name != name.strip() or not name:
            problem = f"is {name!r}: remove the spaces around it, or give each sample a label"
            raise _refused(file, column, values.index(name), problem)
    number = {name: place for place, name in enumerate(names)}
    return np.array([number[value] for value in values], np.int64), tuple(names)


def _refused(file: str, column: str, row: int, problem: str) -> ValueError:
    return ValueError(f"{file}: column {column}, sample {row + 1:,}: the label {problem}.")
