"""Splits in the names of token files and folders, such as ``train.bin``, ``fineweb_val_000000.bin`` and ``test/``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_WORD = "((train|val|valid|validation|dev|eval|evaluation|test)(?:ing)?)"
# names of folders and files that are surely a split
_PLAIN = re.compile(r"(train|val|valid|validation|dev|test)(-\d+[\w-]*)?((?:\.\w+)*)")
_SPLIT_FOLDER = re.compile(_WORD, re.IGNORECASE)
# without the suffix, as in fineweb_val_000000, wiki.test and train-a; titles have spaces
_SPLIT_FILE = re.compile(rf"(?:.*[-_.\d])?{_WORD}(?:[-_.]?\d.*)?|{_WORD}[-_.\d].*", re.IGNORECASE)
_SUFFIXES = re.compile(r"(\.(bin|npy|txt|jsonl|ndjson|tar|parquet))?(\.(gz|bz2|xz))?$", re.IGNORECASE)


def check_splits(source: str, paths: Sequence[str]) -> None:
    """Raise ValueError if the names of shards, or of their folders, say that some are held out."""
    named = {path: _split_of(path) for path in paths}
    splits = {split.name for split in named.values() if split is not None}
    plain = {next((match[1] for part in path.split("/") if (match := _PLAIN.fullmatch(part))), "") for path in paths}
    # other names are splits only if all shards have one: they may be titles or domains
    if len(splits) < 2 or (len(plain - {""}) < 2 and (None in named.values() or "train" not in splits)):
        return
    patterns = [_pattern_of(split, named) for split in sorted(splits)]
    fix = f"Give the path of one split, which ends in {' or '.join(patterns)}."
    if not all(patterns):
        fix = "Put each split into a folder of its own, or give a pattern for the files of one split."
    raise ValueError(
        f"{source} has shards of several splits ({', '.join(sorted(splits))}), and training would include held-out "
        f"data. {fix}"
    )


class _Split(NamedTuple):
    name: str
    folder: str  # path of the folder that names the split; "" if the file names it
    word: str  # as written in the name


def _split_of(path: str) -> _Split | None:
    *folders, file = path.split("/")
    for place, folder in enumerate(folders):
        if (match := _SPLIT_FOLDER.fullmatch(folder) or _PLAIN.fullmatch(folder)) is not None:
            return _Split(match[1].lower().removesuffix("ing"), "/".join(folders[: place + 1]), folder)
    match = _SPLIT_FILE.fullmatch(_SUFFIXES.sub("", file))
    word = "" if match is None else match[1] or match[3]
    return _Split(word.lower().removesuffix("ing"), "", word) if word else None


def _pattern_of(name: str, named: Mapping[str, _Split | None]) -> str:
    """Return a folder, file or pattern of all files of a split, and of no other file; "" if there is none."""
    mine = [path for path, split in named.items() if split is not None and split.name == name]
    first, split = mine[0], named[mine[0]]
    assert split is not None
    folder, slash, file = first.rpartition("/")
    end = file.rfind(split.word) + len(split.word)
    suffix = file[_SUFFIXES.search(file).start() :]  # type: ignore[union-attr]  # it always matches
    names = [f"{file[: end + 1]}*{suffix}", file, f"*{split.word}*{suffix}"]
    patterns = [f"{split.folder}/*"] if split.folder else [f"{folder}{slash}{name}" for name in names]
    in_one_folder = split.folder or all(path.rpartition("/")[0] == folder for path in mine)
    for pattern in patterns:
        if in_one_folder and [path for path in named if regex_of(pattern).fullmatch(path)] == mine:
            return pattern.removesuffix("/*")
    return ""


def regex_of(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern with ``*``."""
    return re.compile(re.escape(pattern).replace(r"\*", ".*"))
