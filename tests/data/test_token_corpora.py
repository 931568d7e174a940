"""Random corpora in every mode, in place and through a URL, compared with a few lines of NumPy.

TOKEN_CORPORA=2000 tests 2,000 corpora of each kind. The default is small.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_sparse.data.pipeline.sampler import Sampler, SamplerConfig
from lightning_sparse.data.tokens import files_of
from lightning_sparse.data.windows import IGNORED, Documents, PackedStream, TokenStream, TokenWindows, split
from lightning_sparse.flavours.pytorch_lightning import TokenDataModule
from tests.helpers.data import corpus_of

CORPORA = int(os.environ.get("TOKEN_CORPORA", "40"))
FIRST = int(os.environ.get("TOKEN_CORPORA_SEED", "0"))
END, VOCAB = 0, 60_000
MODES: tuple[Documents, ...] = ("joined", "separate", "packed")
Files = list[NDArray[np.int64]]
Pairs = Counter[tuple[int, int]]


# -- the reference -----------------------------------------------------------------------------------------------------


def documents_of(files: Files) -> Files:
    """Return each document with its end. The end of a file also ends a document."""
    found = []
    for ids in files:
        cuts = np.flatnonzero(ids == END) + 1
        found += [each for each in np.split(ids, cuts) if len(each)]
    return found


def expected_windows(files: Files, context: int, mode: Documents) -> list[tuple[list[int], ...]]:
    """Return (inputs, targets) or (inputs, targets, positions) of windows that are not packed."""
    ids = np.concatenate(files)
    documents = documents_of(files)
    number = np.repeat(np.arange(len(documents)), [len(each) for each in documents])
    place = np.concatenate([np.arange(len(each)) for each in documents]) if documents else np.zeros(0, int)
    found: list[tuple[list[int], ...]] = []
    for first in range(0, len(ids) - context, context):
        inputs, targets = slice(first, first + context), slice(first + 1, first + context + 1)
        if mode == "joined":
            found.append((ids[inputs].tolist(), ids[targets].tolist()))
            continue
        seen = np.where(number[inputs] == number[targets], ids[targets], IGNORED)
        begun = np.where(number[inputs] == number[first], first - np.flatnonzero(number == number[first])[0], 0)
        found.append((ids[inputs].tolist(), seen.tolist(), (place[inputs] - begun).tolist()))
    return found


def expected_pairs(documents: Files) -> Pairs:
    """Count each (input, target) of separate documents."""
    return Counter(pair for each in documents for pair in zip(each[:-1].tolist(), each[1:].tolist(), strict=True))


def pairs_of(windows: TokenWindows) -> Pairs:
    inputs, targets, *_ = windows.windows(np.arange(len(windows)))
    kept = targets != IGNORED
    return Counter(zip(inputs[kept].tolist(), targets[kept].tolist(), strict=True))


# -- random corpora ----------------------------------------------------------------------------------------------------


def random_files(rng: np.random.Generator, *, unique: bool = False) -> Files:
    """Return ids of up to nine files, some empty, some without an end, with documents of all lengths."""
    longest = int(rng.choice([1, 4, 30, 300]))
    files, next_id = [], 1
    for _ in range(rng.integers(1, 10)):
        ids = []
        for _ in range(rng.integers(0, 8)):
            length = int(rng.integers(0, longest + 1))
            ids += list(range(next_id, next_id + length)) if unique else rng.integers(1, VOCAB, length).tolist()
            ids.append(END)
            next_id += length
        files.append(np.array(ids[: len(ids) - int(rng.integers(0, 2))], np.int64))
    return files


def write(folder: Path, files: Files, rng: np.random.Generator) -> Path:
    """Write files, some in subfolders, in the order of their paths."""
    for number, ids in enumerate(files):
        path = folder / f"{number // 3}{'/deep' * (number % 3)}" / f"{number}.BIN"
        path = path if rng.integers(2) else path.with_suffix(".bin")
        path.parent.mkdir(parents=True, exist_ok=True)
        dtype = "uint16" if rng.integers(2) else "uint32"
        ids.astype("<u2" if dtype == "uint16" else "<u4").tofile(path)
        path.with_suffix(".json").write_text(json.dumps({"dtype": dtype, "vocab_size": VOCAB, "end": END}))
    return folder


def in_order(folder: Path) -> Files:
    """Return the ids of the files below a folder, sorted by path."""
    paths = sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.suffix.lower() == ".bin")
    found = []
    for each in paths:
        about = json.loads((folder / each).with_suffix(".json").read_text())
        found.append(np.fromfile(folder / each, {"uint16": "<u2", "uint32": "<u4"}[about["dtype"]]).astype(np.int64))
    return found


def stream_of(folder: Path, context: int, mode: Documents) -> TokenStream | None:
    """Return the windows of a folder, or None if it has too few tokens for a window."""
    kind = PackedStream if mode == "packed" else TokenStream
    files = in_order(folder)
    is_enough = (
        max(map(len, documents_of(files)), default=0) > 1 if mode == "packed" else sum(map(len, files)) > context
    )
    if is_enough:
        return kind(corpus_of(folder), context, mode)
    with pytest.raises(ValueError, match="needs|no document of two tokens"):
        kind(corpus_of(folder), context, mode)
    return None


def rows_of(windows: TokenWindows) -> list[tuple[list[int], ...]]:
    return [tuple(map(np.ndarray.tolist, each)) for each in zip(*windows.windows(np.arange(len(windows))), strict=True)]


@pytest.mark.parametrize("mode", MODES)
def test_windows_of_random_corpora_equal_a_plain_reader(mode: Documents, tmp_path: Path) -> None:
    for number in range(FIRST, FIRST + CORPORA):
        rng = np.random.default_rng([number, MODES.index(mode)])
        folder = write(tmp_path / str(number), random_files(rng), rng)
        files, context = in_order(folder), int(rng.choice([1, 2, 7, 33]))
        stream = stream_of(folder, context, mode)
        if mode != "packed":
            expected = expected_windows(files, context, mode)
            assert (rows_of(stream) if stream else []) == expected, number
        else:
            found = pairs_of(stream) if stream else Counter()
            assert found == expected_pairs(documents_of(files)), number


@pytest.mark.parametrize("mode", MODES)
def test_held_out_documents_of_random_corpora_are_complete(mode: Documents, tmp_path: Path) -> None:
    for number in range(FIRST, FIRST + CORPORA):
        rng = np.random.default_rng([number, 7])
        folder = write(tmp_path / str(number), random_files(rng, unique=True), rng)
        documents = [set(each.tolist()) - {END} for each in documents_of(in_order(folder))]
        context, fraction = int(rng.choice([1, 3, 9])), float(rng.uniform(0.02, 0.9))
        stream = stream_of(folder, context, mode)
        if stream is None:
            continue
        sizes = [len(each) for each in documents_of(in_order(folder)) if len(each) >= stream.least_document]
        if sum(sizes) - max(stream.least_tokens, round(fraction * sum(sizes))) < stream.least_tokens:
            with pytest.raises(ValueError, match="each part needs"):
                split(stream, fraction)
            continue
        train, held_out = split(stream, fraction)
        sets = [{*each.windows(np.arange(len(each)))[0].flatten().tolist()} - {END} for each in (train, held_out)]
        assert not sets[0] & sets[1], number
        cut = sum(bool(each & sets[0]) and bool(each & sets[1]) for each in documents)
        assert cut <= 1, number
        if mode != "packed":  # all inputs are used, except an end in each part
            total = sum(map(len, in_order(folder)))
            assert total - 2 * (context + 1) <= (len(train) + len(held_out)) * context < total, number


@pytest.mark.parametrize("mode", MODES)
def test_random_world_sizes_see_each_window_once(mode: Documents, tmp_path: Path) -> None:
    for number in range(FIRST, FIRST + CORPORA):
        rng = np.random.default_rng([number, 8])
        folder = write(tmp_path / str(number), random_files(rng), rng)
        stream = stream_of(folder, int(rng.choice([1, 2, 5])), mode)
        devices = tuple(rng.integers(1, 4, rng.integers(1, 4)).tolist())
        if stream is None or len(stream) < len(devices):
            continue
        config = SamplerConfig(batch_size=int(rng.integers(1, 5)), devices=devices, seed=number)
        samples = np.arange(len(stream))
        plan = Sampler(samples, lambda nodes, samples=samples: samples % nodes, config).epoch(int(rng.integers(3)))
        seen = [
            plan.batch(step, node, device)
            for step in range(plan.steps)
            for node, count in enumerate(devices)
            for device in range(count)
        ]
        counts = np.bincount(np.concatenate(seen), minlength=len(stream))
        assert counts.min() >= 1, number
        assert counts.sum() - len(stream) == plan.num_repeated, number


def batches(source: str | Path, **options: Any) -> list[Any]:
    data = TokenDataModule(source, batch_size=1, **options)
    data.setup("fit")
    found = [[each.tolist() for each in batch] for batch in data.train_dataloader()]
    found.append(data._streams["train"].fingerprint)
    data.teardown("fit")
    return found


@pytest.mark.parametrize("number", range(FIRST, FIRST + max(1, CORPORA // 30)))
def test_folder_of_ids_has_the_same_windows_in_place_and_through_a_url(number: int, tmp_path: Path) -> None:
    rng = np.random.default_rng([number, 9])
    mode = MODES[number % 3]
    while True:
        folder = write(tmp_path / str(rng.integers(2**40)), random_files(rng), rng)
        if stream_of(folder, 5, mode):
            break
    for each in files_of(folder):  # ids in the cache have the smallest type
        ids = np.fromfile(each.path, each.dtype)
        ids.astype("<u2").tofile(each.path)
        about = json.loads(each.path.with_suffix(".json").read_text())
        each.path.with_suffix(".json").write_text(json.dumps({**about, "dtype": "uint16"}))
    (folder / "._0.bin").write_bytes(b"\0" * 9)
    (folder / "notes.md").touch()
    cache = str(tmp_path / "cache")
    in_place = batches(folder, context=5, documents=mode)
    assert batches(f"file://{folder}", context=5, documents=mode, cache_dir=cache) == in_place


@pytest.mark.parametrize("number", range(FIRST, FIRST + max(1, CORPORA // 30)))
def test_random_text_has_each_byte_in_the_joined_windows(number: int, tmp_path: Path) -> None:
    rng = np.random.default_rng([number, 10])
    source, expected = tmp_path / "source", list[int]()
    source.mkdir()
    for file in range(int(rng.integers(1, 30))):
        suffix = str(rng.choice([".txt", ".TXT", ".jsonl", ".ndjson", ".jsonl.gz"]))
        count = 1 if suffix.lower() == ".txt" else int(rng.integers(0, 5))
        texts = ["".join(map(chr, rng.integers(32, 400, rng.integers(0, 90)))) for _ in range(count)]
        data = texts[0] if suffix.lower() == ".txt" else "".join(json.dumps({"text": each}) + "\n" for each in texts)
        raw = data.encode()
        (source / f"{file:02}{suffix}").write_bytes(gzip.compress(raw) if suffix.endswith(".gz") else raw)
        expected += [id for each in texts if each for id in (*each.encode(), END)]
    context = 8
    for url in (str(source), f"file://{source}"):
        cache = str(tmp_path / f"cache{len(url)}")
        if len(expected) <= context:
            with pytest.raises(ValueError, match="needs 9 tokens or more"):
                batches(url, context=context, cache_dir=cache)
            continue
        found = sorted(batches(url, context=context, cache_dir=cache)[:-1])
        starts = range(0, len(expected) - context, context)
        windows = [[[expected[at : at + context]], [expected[at + 1 : at + context + 1]]] for at in starts]
        assert found == sorted(windows)
