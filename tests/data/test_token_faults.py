"""Errors and log lines name corrupt documents, ignored files, files that change, and windows that repeat."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sparse.data import id_files as corpus_module
from lightning_sparse.data.config import DataError
from lightning_sparse.data.tokens import TokenStream, prepare
from lightning_sparse.flavours.pytorch_lightning import TokenDataModule
from tests.data.programs import run
from tests.data.test_token_shards import encoded, ids, module
from tests.helpers.data import corpus_of, counted, tar_of, write
from tests.helpers.distributed import run_ranks


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "\\ud800"}', "UnicodeEncodeError"),
        (b'{"text": null}', "TypeError: the field text is NoneType, not a string"),
        (b'{"body": "x"}', "KeyError: 'text'"),
        (b'{"text": "x"', "JSONDecodeError"),
        (b"[1]", "TypeError"),
        (b"[" * 100_000, "RecursionError"),
        (b'{"text": "\xff"}', "UnicodeDecodeError"),
    ],
)
def test_corrupt_line_is_named_or_skipped(
    line: bytes, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = b'{"text": "good"}'
    source, cache = tmp_path / "source", tmp_path / "cache"
    write(source / "a.jsonl", b"\n".join([good, b"", line, good]))
    with pytest.raises(ValueError, match=rf"a\.jsonl (cannot be read as text|is not UTF-8) \({reason}.*\) in line 3: "):
        ids(source, cache, context=2)
    assert ids(source, cache, context=2, on_corrupt="skip") == [encoded("good") * 2]
    assert "skipped 1 corrupt document(s): " in caplog.text
    assert "in line 3" in caplog.text
    with pytest.raises(ValueError, match='in line 3: repair it, or set on_corrupt="skip"'):
        ids(source, cache, context=2)  # although the cache has the other documents


def words_of(folder: Path, names: str) -> str:
    """Write a tokenizer of the package `tokenizers` that knows some words. Return the option."""
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    ids = {name: number for number, name in enumerate(["</s>", *names.split()])}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="</s>"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    found.save(str(folder / "tokenizer.json"))
    return f"tokenizers:{folder / 'tokenizer.json'}"


def test_document_with_a_corrupt_end_is_skipped_completely(tmp_path: Path) -> None:
    source, options = tmp_path / "source", {"tokenizer": words_of(tmp_path, "a b"), "context": 2}
    for name, data in {"a.txt": b"a b a", "b.txt": b"a " * 400_000 + b"\xff", "c.txt": b"b a b"}.items():
        write(source / name, data)
    with pytest.raises(ValueError, match=r"b\.txt is not UTF-8 \(UnicodeDecodeError.*800000"):
        ids(source, tmp_path / "cache", **options)
    assert ids(source, tmp_path / "cache", **options, on_corrupt="skip") == [[1, 2, 1, 0], [], [2, 1, 2, 0]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("é" * 70_001 + "ü", None),  # a block ends inside a character
        ("naïve".encode("latin-1"), r"is not UTF-8 \(UnicodeDecodeError"),
        ("word".encode("utf-16"), r"is not UTF-8 \(UnicodeDecodeError"),
        ("word".encode("utf-16-le"), r"cannot be read as text \(ValueError: it contains a NUL character"),
    ],
)
def test_bytes_in_another_encoding_are_refused(text: str | bytes, problem: str | None, tmp_path: Path) -> None:
    source, cache = tmp_path / "source", tmp_path / "cache"
    write(source / "a.txt", text)
    write(source / "b.txt", "good")
    if problem is None:
        assert ids(source, cache, context=2) == [[*str(text).encode(), 0], encoded("good")]
    else:
        with pytest.raises(ValueError, match=rf"a\.txt {problem}"):
            ids(source, cache, context=2)
        assert ids(source, cache, context=2, on_corrupt="skip") == [[], encoded("good")]


def parquet_of(texts: Any) -> bytes:
    pyarrow = pytest.importorskip("pyarrow", reason="it writes the Parquet file")
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts}), file)
    return file.getvalue()


def damaged_page() -> bytes:
    data = parquet_of(["a" * 1000, "b" * 1000])
    return data[:4] + b"\xff" * 30 + data[34:]  # the header of the first page


ONE, TWO = tar_of({"1.txt": b"one"}), tar_of({"1.txt": b"one", "2.txt": b"two"})
CUT = tar_of({"1.txt": b"one", "._2.txt": b"\0", "2.JSON": b'{"text": 3}', "3.txt": b"x" * 2000})[: 512 * 8 + 100]
BAD_HEADER = TWO[:1024] + b"\1" * 512 + TWO[1536:]
AFTER_END = r" cannot be read as text .*data after its end, at byte 1,0"


@pytest.mark.parametrize(
    ("name", "data", "says", "left"),
    [
        ("a.tar", CUT, r" cannot be read as text \(TypeError: .*\) in member 2\.JSON", "one"),
        ("a.jsonl.gz", CUT, r" cannot be read as text \(BadGzipFile: .*in the data after its", ""),
        ("a.tar", BAD_HEADER, AFTER_END, "one"),
        ("a.tar", ONE + TWO, AFTER_END, "one"),
        ("a.tar.gz", gzip.compress(ONE + TWO), AFTER_END, "one"),
        ("a.txt.bz2", b"no bzip2", r" cannot be read as text \(ValueError: Invalid data stream\)", ""),
        ("a.parquet", damaged_page, r" cannot be read as text \(.*in the data after its beginning", ""),
    ],
)
def test_rest_of_a_damaged_shard_is_named_or_skipped(
    name: str, data: bytes | Callable[[], bytes], says: str, left: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    write(source / name, data() if callable(data) else data)
    write(source / "b.txt", "good")
    with pytest.raises(ValueError, match=re.escape(name) + says):
        ids(source, tmp_path / "cache", context=2)
    expected = [encoded(left) if left else [], encoded("good")]
    assert ids(source, tmp_path / "cache", context=2, on_corrupt="skip") == expected


def test_hidden_members_of_a_tar_file_are_not_used(tmp_path: Path) -> None:
    members = {"./1.txt": b"one", "._1.txt": b"x", ".git/2.txt": b"x", "a/.b/3.txt": b"x", "a/b/4.txt": b"four"}
    write(tmp_path / "source" / "a.tar", tar_of(members))
    assert ids(tmp_path / "source", tmp_path / "cache", context=2) == [encoded("one") + encoded("four")]


def test_row_of_parquet_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="it writes the Parquet file")
    _, *buffers = pyarrow.array([b"one", b"\xff\xfe", b"two"]).buffers()
    write(tmp_path / "source" / "a.parquet", parquet_of(pyarrow.StringArray.from_buffers(3, *buffers)))
    with pytest.raises(ValueError, match=r"a\.parquet is not UTF-8 \(UnicodeDecodeError.*in row 2"):
        ids(tmp_path / "source", tmp_path / "cache", context=2)


def test_file_names_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with open(os.fsencode(tmp_path / "source") + b"/\xff.txt", "wb") as file:
        file.write(b"text")
    assert ids(tmp_path / "source", tmp_path / "cache", context=2) == [encoded("text")]
    assert ids(tmp_path / "source", tmp_path / "cache", context=2) == [encoded("text")]


def test_files_that_are_not_used_are_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text, bins = tmp_path / "text", tmp_path / "bins"
    write(text / "a.jsonl", '{"text": "good"}')
    counted(bins / "a.bin", 30)
    for folder in (text, bins):
        for name in ("b.jsonl.zst", "c.json", "README.md", ".hidden.md"):
            (folder / name).touch()
        with caplog.at_level(logging.INFO, "lightning_sparse"):
            ids(folder, tmp_path / "cache", context=2)
        line = f"{folder}: ignored 3 file(s) that are not ids or text: README.md, b.jsonl.zst, c.json"
        assert caplog.text.count(line) == 1
    (text / "a.jsonl").unlink()
    with pytest.raises(ValueError, match=r"has no shards: .*README\.md, b\.jsonl\.zst, c\.json"):
        ids(text, tmp_path / "cache")


def test_missing_source_leaves_nothing_in_the_cache_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be listed"):
        ids(f"file://{tmp_path}/missing", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_npy_next_to_bin_is_read_with_a_cache_and_refused_without(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    counted(source / "a.bin", 9)
    counted(source / "deep" / "c.bin", 5, 40)
    assert ids(source, tmp_path / "cache", context=2) == [[*range(9)], [*range(40, 45)]]
    np.save(source / "b.npy", np.arange(20, 24))
    assert ids(source, tmp_path / "cache", context=2, vocab_size=1000)[1] == [*range(20, 24)]
    with pytest.raises(
        ValueError, match=r"has b\.npy, which cannot be used in place, because it is not a \.bin file: give cache_dir"
    ):
        TokenDataModule(source)


@pytest.mark.parametrize("name", ["a.npy", "a.txt", "a.jsonl.gz"])
def test_file_of_another_kind_is_not_read_in_place(name: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    (tmp_path / "a.npy").rename(tmp_path / name)
    (tmp_path / "a.json").write_text('{"dtype": "uint16", "vocab_size": 50257}')
    with pytest.raises(ValueError, match=r"cannot be used in place as \.bin files are: give cache_dir"):
        TokenDataModule(tmp_path / name, context=2)


def test_cache_in_a_folder_that_is_used_in_place_is_refused(tmp_path: Path) -> None:
    counted(tmp_path / "a.bin", 30)
    with pytest.raises(ValueError, match="is inside .*, so its files would be read as shards: give another"):
        module(tmp_path, tmp_path / "cache")


# -- files that differ or change ---------------------------------------------------------------------------------------


def test_wrong_checksum_in_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 99)
    path = prepare([tmp_path / "a.txt"], tmp_path / "a")
    for cache in (None, str(tmp_path / "cache")):
        data = TokenDataModule(path, context=8, cache_dir=cache)
        data.setup("fit")
        data.teardown("fit")
    with open(path, "r+b") as file:
        file.write(b"x")
    for cache in (None, str(tmp_path / "cache")):
        with pytest.raises(ValueError, match=r"a\.bin is damaged: its checksum differs from the checksum in its JSON"):
            TokenDataModule(path, context=8, cache_dir=cache).setup("fit")


def test_checksums_in_place_are_kept_in_the_cache_folder(tmp_path: Path) -> None:
    path = counted(tmp_path / "a.bin", 99)
    data = module(path, tmp_path / "cache")
    data.setup("fit")
    data.teardown("fit")
    record = tmp_path / "cache" / "checksums.json"
    (name,) = json.loads(record.read_text())
    assert str(path) in name
    record.write_text(json.dumps({name: 7}))
    data.setup("fit")
    assert data._streams["train"].corpus.files[0].checksum == 7, "not read again"
    data.teardown("fit")


def differing(folder: str) -> str:
    rank = os.environ["NODE_RANK"]
    root = Path(folder) / rank
    root.mkdir()
    path = counted(root / "a.bin", 99, int(rank))  # equal lengths, and no checksum in the JSON
    with pytest.raises(ValueError, match="has different tokens on rank 1 and on rank 0") as caught:
        TokenDataModule(path, context=4).setup("fit")
    return str(caught.value)


def test_nodes_with_different_ids_of_equal_length_are_refused(tmp_path: Path) -> None:
    said = run_ranks(differing, str(tmp_path), nodes=2, devices=1, timeout=120)
    assert all("copy the same files to all nodes" in each for each in said)


@pytest.mark.parametrize("kept_open", [256, 0])
def test_file_that_becomes_shorter_during_a_run_is_an_error(
    kept_open: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "_KEPT_OPEN", kept_open)
    path = counted(tmp_path / "a.bin", 900)
    stream = TokenStream(corpus_of(path), 8)
    os.truncate(path, 1000)
    assert stream.windows(np.array([0]))[0].tolist() == [[*range(8)]]
    with pytest.raises(DataError, match=r"a\.bin has become shorter since the run began: files must not change"):
        stream.windows(np.array([80]))


def test_more_token_files_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    for number in range(300):
        counted(tmp_path / f"{number:03}.bin", 3, 3 * number)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 290, hard))
    try:
        inputs, _ = TokenStream(corpus_of(tmp_path), 10).windows(np.arange(89))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert inputs.flatten().tolist() == [*range(890)]


def old_fingerprint(context: int, paths: list[Path]) -> str:
    """Return the fingerprint of earlier versions, which cut each file into windows separately."""
    about = [("uint16", 1000, each.stat().st_size // 2, 0) for each in paths]
    return hashlib.blake2b(repr((context, about)).encode(), digest_size=16).hexdigest()


def test_position_saved_by_an_earlier_version_restarts_the_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [counted(tmp_path / "a.bin", 30), counted(tmp_path / "b.bin", 30)]
    assert TokenStream(corpus_of(paths[0]), 4).fingerprint == old_fingerprint(4, paths[:1]), "windows are equal"
    data = TokenDataModule(tmp_path, context=4, batch_size=2)
    data.setup("fit")
    loader = data.train_dataloader()
    next(iter(loader))
    loader.load_state_dict({**loader.state_dict(), "fingerprint": old_fingerprint(4, paths)})
    assert "the data set has changed since the checkpoint was saved: restarting the epoch" in caplog.text
    assert sum(1 for _ in loader) == len(loader)
    data.teardown("fit")


# -- windows that repeat -----------------------------------------------------------------------------------------------


def test_batch_that_repeats_windows_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    large, small = counted(tmp_path / "a.bin", 800), counted(tmp_path / "b.bin", 13)
    sources: list[Any] = [(small, {}), (large, {"limit": 3}), ({str(large): 1, str(small): 1}, {})]
    for source, more in sources:
        caplog.clear()
        data = TokenDataModule(source, context=4, batch_size=8, **more)
        data.setup("fit")
        with caplog.at_level(logging.INFO, "lightning_sparse"):
            data.train_dataloader()
        assert "windows repeated to fill the last steps" in caplog.text
        assert "each batch of 8 repeats windows: use a smaller batch_size" in caplog.text
        data.teardown("fit")


def test_mixture_that_cannot_keep_its_weights_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    large, small = counted(tmp_path / "a.bin", 801), counted(tmp_path / "b.bin", 801)
    data = TokenDataModule({str(large): 1, str(small): 0.0001}, context=4, batch_size=8)
    data.setup("fit")
    data.train_dataloader()
    assert f"{small} has a weight of 0.01% but 0.50% of the windows of an epoch" in caplog.text
    assert "each batch" not in caplog.text
    data.teardown("fit")


# -- memory ------------------------------------------------------------------------------------------------------------

MADE = """
import sys
from pathlib import Path
from lightning_sparse.data import shards
from lightning_sparse.data.sources.storage import Storage

shards.PART = 1 << 20
for name in ("small", "large"):
    source = shards.TokenSource.of(f"{sys.argv[1]}/{name}", sys.argv[1] + "/cache", sys.argv[2], None)
    with Storage(source.config) as storage:
        (shard,) = source.listed()
        source.make(shard, storage, lambda size: None)
    print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0], flush=True)
"""


@pytest.mark.parametrize("kind", ["bytes", "tokenizers"])
def test_memory_for_a_document_does_not_depend_on_its_size(kind: str, tmp_path: Path) -> None:
    tokenizer = words_of(tmp_path, "word") if kind == "tokenizers" else kind
    for name, megabytes in (("small", 8), ("large", 24)):
        write(tmp_path / name / "a.txt", b"word " * (megabytes * 10**6 // 5))
    small, large = map(int, run(MADE, tmp_path, tokenizer).stdout.split())
    assert large - small < 4000, "kB"
