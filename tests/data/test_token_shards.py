"""Shards of tokens: read once, tokenized once, kept on the local disk, and refused if they are wrong."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sparse.data.config import DataError
from lightning_sparse.data.shards import TokenSource
from lightning_sparse.data.sources.storage import Storage
from lightning_sparse.data.tokens import prepare
from lightning_sparse.flavours.pytorch_lightning import TokenDataModule
from tests.helpers.data import KEY, Server, needs_s3, s3_server, tar_of, upload, write
from tests.helpers.distributed import RunRanks

TEXTS = ["In the beginning. " * 20, "And then, héllo. " * 30, "The end. " * 40]


def encoded(text: str) -> list[int]:
    """Return the ids of a document: its bytes and its end."""
    return [*text.encode(), 0]


def module(source: str | Path | dict[str, float], cache: Path, **more: Any) -> TokenDataModule:
    return TokenDataModule(source, **{"context": 8, "batch_size": 4, "cache_dir": str(cache), **more})


def ids(source: str | Path, cache: Path, **more: Any) -> list[list[int]]:
    """Return the ids of each shard."""
    data = module(source, cache, **more)
    data.setup("fit")
    corpus = data._streams["train"].corpus
    begins = zip(corpus.begins.tolist(), corpus.files, strict=False)
    found = [corpus.read(begin, each.tokens).tolist() if each.tokens else [] for begin, each in begins]
    data.teardown("fit")
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in zip(("a.txt", "b.txt", "deep/c.txt"), TEXTS, strict=True):
        write(tmp_path / "source" / name, text)
    return tmp_path / "source"


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with Server(folder) as serving:
        yield serving


def test_ids_from_storage_equal_the_ids_of_a_local_file(folder: Path, tmp_path: Path) -> None:
    assert ids(folder, tmp_path / "cache") == [encoded(text) for text in TEXTS]
    assert ids(folder / "b.txt", tmp_path / "cache") == [encoded(TEXTS[1])]
    plain = prepare([folder / "a.txt"], tmp_path / "plain", end=0)
    mapped, cached = TokenDataModule(plain, context=8), module(folder / "a.txt", tmp_path / "cache")
    for each in (mapped, cached):
        each.setup("fit")
    assert mapped._streams["train"].fingerprint == cached._streams["train"].fingerprint
    assert module(plain, tmp_path / "unused").vocab_size == cached.vocab_size == 256
    assert not (tmp_path / "unused").exists(), "plain local files stay in place"


def test_storage_is_read_once_over_epochs_and_restarts(server: Server, tmp_path: Path) -> None:
    for _ in range(3):
        data = module(server.url, tmp_path / "cache", storage_options=KEY)
        data.setup("fit")
        for _ in range(3):
            assert sum(1 for _ in data.train_dataloader()) > 3
        data.teardown("fit")
        read = {key: count for key, count in server.requests.items() if key[0] == "GET" and key[1]}
        assert read == {("GET", ".txt"): 3}


@needs_s3
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_s3_is_read_once_and_may_disappear_during_an_epoch(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with s3_server() as (options, files), caplog.at_level(logging.INFO, "werkzeug"):
        files.mkdir("texts")
        upload(files, folder, "texts")
        for _ in range(2):
            data = module("s3://texts", tmp_path / "cache", storage_options=options)
            data.setup("fit")
            steps = sum(1 for _ in data.train_dataloader())
        batches = iter(data.train_dataloader())
        next(batches)
    assert sum("GET /texts/" in said and ".txt" in said for said in caplog.messages) == len(TEXTS)
    assert 1 + sum(1 for _ in batches) == steps > 20
    data.teardown("fit")


def test_text_formats_give_their_documents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    source = tmp_path / "source"
    source.mkdir()
    lines = [json.dumps({"text": each}) for each in ("one", "", "twö")]
    (source / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": ["one", None, "twö"]}), source / "b.parquet")
    members = {"1.txt": b"one", "1.jpg": b"xx", "2.json": lines[2].encode(), "3.txt": b""}
    write(source / "c.tar", tar_of(members))
    with caplog.at_level(logging.INFO, "lightning_sparse"):
        assert ids(source, tmp_path / "cache", context=2) == [[*encoded("one"), *encoded("twö")]] * 3
    assert "skipped 3 empty document(s)" in caplog.text


def test_shards_of_ids_are_kept_and_verified(server: Server, folder: Path, tmp_path: Path) -> None:
    for text in folder.rglob("*.txt"):
        prepare([text], text.with_suffix(".bin"), lambda text: [300 + each for each in text.encode()], 1000)
        text.unlink()
    data = module(server.url, tmp_path / "cache", storage_options=KEY)
    assert data.vocab_size == 1000
    expected = [[300 + each for each in text.encode()] for text in TEXTS]
    assert ids(server.url, tmp_path / "cache", storage_options=KEY) == expected
    about = json.loads((folder / "a.json").read_text())
    (folder / "a.json").write_text(json.dumps({**about, "checksum": 1}))
    with pytest.raises(ValueError, match=r"a\.bin is damaged: its checksum"):
        ids(server.url, tmp_path / "other", storage_options=KEY)


def test_changed_description_of_a_shard_is_noticed(folder: Path, tmp_path: Path) -> None:
    """The ids on a mount may come from another tokenizer."""
    for text in folder.rglob("*.txt"):
        prepare([text], text.with_suffix(".bin"), vocab_size=1000, end=0)
        text.unlink()
    source = TokenSource.of(str(folder), str(tmp_path / "cache"), "bytes", None)
    for vocab_size in (1000, 1000, 500):
        about = json.loads((folder / "a.json").read_text())
        (folder / "a.json").write_text(json.dumps({**about, "vocab_size": vocab_size}))
        shards = source.listed()
        kept = [source.is_kept(each) for each in shards]
        with Storage(source.config) as storage:
            for each in shards:
                source.make(each, storage, lambda size: None)
    assert kept == [False, True, True], "only the first shard is read again"
    assert source.size_of_vocabulary(shards) == 500


@pytest.mark.parametrize("damaged", ["", "3", "[1]", '[["a.txt"]]'])
def test_damaged_list_of_shards_is_created_again(folder: Path, tmp_path: Path, damaged: str) -> None:
    expected = ids(folder, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").rglob("shards.json")
    whole = kept.read_text()
    kept.write_text(damaged)
    assert ids(folder, tmp_path / "cache") == expected
    assert kept.read_text() == whole


def test_numpy_arrays_need_vocab_size(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    np.save(tmp_path / "source" / "a.npy", np.arange(50, dtype=np.int32))
    assert ids(tmp_path / "source", tmp_path / "cache", vocab_size=50) == [list(range(50))]
    with pytest.raises(ValueError, match=r"a\.npy does not contain its vocabulary size: give vocab_size"):
        ids(tmp_path / "source", tmp_path / "cache")
    with pytest.raises(ValueError, match=r"a\.npy has ids from 0 to 49, but vocab_size=49 allows"):
        ids(tmp_path / "source", tmp_path / "cache", vocab_size=49)
    whole = (tmp_path / "source" / "a.npy").read_bytes()
    (tmp_path / "source" / "a.npy").write_bytes(whole[:-3])
    with pytest.raises(ValueError, match=r"a\.npy ends before the 50 ids that it has"):
        ids(tmp_path / "source", tmp_path / "cache", vocab_size=50)
    np.save(tmp_path / "source" / "a.npy", np.ones((3, 3)))
    with pytest.raises(ValueError, match=r"a\.npy has float64 \(3, 3\), but ids are whole numbers"):
        ids(tmp_path / "source", tmp_path / "cache", vocab_size=50)


FAKE = """
class Tokenizer:
    model = None
    from_str = classmethod(lambda cls, text: cls(text))
    no_truncation = no_padding = lambda self: None
    add_special_tokens = lambda self, tokens: None
    get_vocab = lambda self: {"</s>": 1999}
    token_to_id = lambda self, name: 1999 if name == "</s>" else None
    def __init__(self, text):
        self.shift = int(text)
    def encode(self, text, add_special_tokens):
        print("noise")
        self.ids = [self.shift + ord(each) for each in text]
        return self
"""


def test_ids_of_other_tokenizers_are_kept_separately(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "tokenizers.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.delitem(sys.modules, "tokenizers", raising=False)
    file, cache = tmp_path / "tokenizer.json", tmp_path / "cache"
    for shift in (500, 600, 500):
        file.write_text(str(shift))  # the same name, other contents
        assert ids(folder, cache, tokenizer=f"tokenizers:{file}") == [
            [*(shift + ord(c) for c in text), 1999] for text in TEXTS
        ]
    assert ids(folder, cache) == [encoded(text) for text in TEXTS]
    lines = folder / "lines.jsonl"
    lines.write_text('{"text": "one"}\n{"text": "two"}\n')
    found = ids(lines, cache, tokenizer=f"tokenizers:{file}", context=2)
    assert found == [[500 + ord("o"), 500 + ord("n"), 500 + ord("e"), 1999, *(500 + ord(c) for c in "two"), 1999]]
    given = module(folder, cache, tokenizer=f"tokenizers:{file}")
    assert given.vocab_size == pickle.loads(pickle.dumps(given)).vocab_size == 2000  # a launcher may spawn the ranks
    sys.modules.pop("tokenizers")  # monkeypatch would restore it


def test_missing_tokenizer_package_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ValueError, match=r"'tiktoken:gpt2' needs tiktoken: `pip install tiktoken`"):
        module(folder, tmp_path / "cache", tokenizer="tiktoken:gpt2")
    with pytest.raises(ValueError, match="tokenizer='words' must be 'bytes', 'tiktoken:<encoding>' or"):
        module(folder, tmp_path / "cache", tokenizer="words")
    with pytest.raises(
        ValueError, match=r"absent\.json' does not exist\. Give the path of an existing tokenizer\.json"
    ):
        module(folder, tmp_path / "cache", tokenizer=f"tokenizers:{tmp_path}/absent.json")


def test_changed_shard_is_logged_and_created_again(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids(folder, tmp_path / "cache")
    kept = {each: each.stat().st_mtime_ns for each in (tmp_path / "cache").rglob("*.bin")}
    (folder / "b.txt").write_text("other " * 30)
    (folder / "deep" / "c.txt").unlink()
    (folder / "new.txt").write_text("new " * 30)
    with caplog.at_level(logging.INFO, "lightning_sparse"):
        found = ids(folder, tmp_path / "cache")
    assert found == [encoded(text) for text in (TEXTS[0], "other " * 30, "new " * 30)]
    assert "b.txt has changed: reading it" in caplog.text
    assert "new.txt is new: reading it" in caplog.text
    assert "a.txt" not in caplog.text
    assert sum(each.stat().st_mtime_ns == time for each, time in kept.items()) == 2, "unchanged shards are kept"


@pytest.mark.slow
def test_cached_ids_are_used_if_storage_does_not_answer(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(folder)
    first = ids(server.url, tmp_path / "cache", storage_options=KEY)
    server.close()
    assert ids(server.url, tmp_path / "cache", storage_options=KEY, storage_timeout=1.0) == first
    assert "using the list of shards in the cache, because storage did not answer" in caplog.text
    with pytest.raises(DataError, match="has not responded"):
        ids(server.url, tmp_path / "other", storage_options=KEY, storage_timeout=1.0)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.tar", b"no tar" * 200, r"a\.tar cannot be read as text \(ReadError"),
        ("a.parquet", b"no parquet", r"a\.parquet (cannot be read as text|needs pyarrow)"),
        ("a.bin", b"ab", r"a\.json must describe a\.bin"),
        ("a.jpg", b"", r"has no shards: there must be files of ids \(\.bin, \.npy\) or of text"),
    ],
)
def test_shard_of_another_kind_is_refused(name: str, data: bytes, says: str, tmp_path: Path) -> None:
    write(tmp_path / "source" / name, data)
    with pytest.raises(ValueError, match=says):
        ids(f"file://{tmp_path / 'source'}", tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_ids_mixed_with_text_and_ids_beyond_the_vocabulary_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.txt has ids from 32 to \d+, but vocab_size=100 allows 0 to 99"):
        ids(folder, tmp_path / "cache", vocab_size=100)
    (folder / "deep" / "d.npy").touch()
    with pytest.raises(
        ValueError, match=r"has ids \(deep/d\.npy\) and text \(a\.txt\): put them into separate folders"
    ):
        ids(folder, tmp_path / "cache")
    with pytest.raises(ValueError, match="cannot be listed: check the path"):
        ids(tmp_path / "missing", tmp_path / "cache")
    (folder / "deep" / "d.npy").unlink()
    with pytest.raises(ValueError, match="or give cache_dir, a local folder, to use text or"):
        TokenDataModule(folder)


@pytest.mark.parametrize(
    ("names", "fix"),
    [
        (["data/train-00000-of-00002.txt", "data/validation-00000-of-00001.txt"], "data/train-*.txt"),
        (["train-1.jsonl.gz", "test.jsonl.gz"], "train-*.jsonl.gz"),
        (["train.txt", "val.txt"], "train.txt"),
        (["train/a.txt", "train/b.txt", "valid/a.txt"], "train"),
        (["train.bin", "val.bin"], "train.bin"),
        (["fineweb_train_000001.txt", "fineweb_val_000000.txt"], "fineweb_train_*.txt"),
        (["TinyStories-train.txt", "TinyStories-valid.txt"], "TinyStories-train.txt"),
        (["wiki.train.txt", "wiki.test.txt"], "wiki.train.txt"),
        (["Training/a.txt", "Evaluation/a.txt"], "Training"),
        (["train.txt", "val.txt", "readme.txt"], "train.txt"),
        (["0_train.txt", "1_train.txt", "2_val.txt"], "*train*.txt"),
        (["part-0.train.txt", "part-1.train.txt", "part-0.valid.txt"], "*train*.txt"),
        (["train-a.txt", "train-b.txt", "dev-a.txt"], "train-*.txt"),
        (["train_1.1.txt", "train_1.2.txt", "val_1.1.txt"], "train_*.txt"),
        (["a/train/x.txt", "b/train/x.txt", "b/test/x.txt"], "Put each split into a folder of its own"),
    ],
)
def test_token_folder_with_several_splits_is_refused(names: list[str], fix: str, tmp_path: Path) -> None:
    for name in names:
        path = write(tmp_path / "source" / name, b"abcdefghijkl")
        if path.suffix == ".bin":
            path.with_suffix(".json").write_text('{"dtype": "uint16", "vocab_size": 65536}')
    with pytest.raises(ValueError, match="shards of several splits .*would include held-out data") as raised:
        ids(tmp_path / "source", tmp_path / "cache")
    assert fix in str(raised.value).partition("held-out data. ")[2]


@pytest.mark.parametrize(
    "names",
    [
        ["The Ghost Train.txt", "The Acid Test.txt", "Dracula.txt"],
        ["Val Kilmer.txt", "Training Day.txt"],
        ["en/training.txt", "en/testing.txt", "en/quicktour.txt"],
        ["Test_cricket.txt", "Train.txt", "Paris.txt"],
        ["trainset.txt", "latest.txt"],
        ["train/test.txt", "train/val.txt"],
    ],
)
def test_titles_that_contain_the_name_of_a_split_are_read(names: list[str], tmp_path: Path) -> None:
    for name in names:
        write(tmp_path / "source" / name, b"abcdefghijkl")
    assert len(ids(tmp_path / "source", tmp_path / "cache")) == len(names)


def test_token_pattern_reads_only_matching_files(tmp_path: Path) -> None:
    for name in ("train-1.txt", "train-2.txt", "validation-1.txt", ".train-3.txt", "train-4.jsonl"):
        write(tmp_path / "source" / name, f"text of {name}")
    expected = [encoded(f"text of {name}") for name in ("train-1.txt", "train-2.txt")]
    assert ids(tmp_path / "source" / "train-*.txt", tmp_path / "cache") == expected
    assert ids(f"file://{tmp_path}/source/*-2.txt", tmp_path / "cache") == expected[1:]
    assert ids(tmp_path / "source" / "*-2.*txt*", tmp_path / "cache") == expected[1:]
    with pytest.raises(ValueError, match="has no shards"):
        ids(tmp_path / "source" / "none-*.txt", tmp_path / "cache")


SCRIPT = """
import sys
from lightning_sparse.flavours.pytorch_lightning import TokenDataModule
data = TokenDataModule(sys.argv[1], context=8, cache_dir=sys.argv[2])
data.setup("fit")
print(len(data.train_dataloader()))
"""


@pytest.mark.slow
def test_script_without_a_guard_tokenizes(folder: Path, tmp_path: Path) -> None:
    """The processes that tokenize do not run the script again."""
    command = [sys.executable, str(write(tmp_path / "run.py", SCRIPT)), str(folder), str(tmp_path / "cache")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, timeout=120, check=True, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1
    assert len(list((tmp_path / "cache").rglob("*.bin"))) == len(TEXTS)


def on_two_nodes(source: str, cache: str) -> tuple[list[list[int]], str]:
    own = Path(cache) / os.environ["NODE_RANK"]
    try:
        return ids(source, own, storage_options=KEY), ""
    except ValueError as error:
        return [], str(error)


@pytest.mark.slow
def test_hosts_read_storage_once_and_errors_reach_all_ranks(
    ranks: RunRanks, server: Server, folder: Path, tmp_path: Path
) -> None:
    found = ranks(on_two_nodes, server.url, str(tmp_path / "cache"), nodes=2, devices=2, timeout=120)
    assert found == [([encoded(text) for text in TEXTS], "")] * 4
    assert server.requests["GET", ".txt"] <= 2 * 3
    (folder / "z.jsonl").write_text("{")
    found = ranks(on_two_nodes, server.url, str(tmp_path / "cache"), nodes=2, devices=2, timeout=120)
    assert all("z.jsonl cannot be read as text" in said for _, said in found)


def seen(data: TokenDataModule, epochs: int = 1) -> list[list[tuple[int, ...]]]:
    """Return the windows of each epoch, in order, without their last token."""
    loader = data.train_dataloader()
    found = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        found.append([tuple(row) for inputs, _ in loader for row in inputs.tolist()])
    return found


@pytest.fixture
def mixed(tmp_path: Path) -> dict[str, float]:
    """Create a source of text with 96 windows below 128, and a mapped file with 400 windows of ids from 128 on."""
    rng = np.random.default_rng(0)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(rng.integers(1, 128, 96 * 8 + 1, np.uint8).tobytes())
    (tmp_path / "b.txt").write_bytes(rng.integers(128, 256, 400 * 8 + 1, np.uint8).tobytes())
    return {str(tmp_path / "text"): 3, str(prepare([tmp_path / "b.txt"], tmp_path / "b")): 2}


def test_mixture_keeps_proportions_and_repeats_windows_only_after_all_are_used(
    mixed: dict[str, float], tmp_path: Path
) -> None:
    data = module(mixed, tmp_path / "cache", val=next(iter(mixed)))
    data.setup("fit")
    epochs = seen(data, 8)
    second = [[row for row in epoch if row[0] >= 128] for epoch in epochs]
    assert [len(each) for each in epochs] == [160] * 8
    assert [len(each) for each in second] == [64] * 8, "2 of 5"
    positions = [np.flatnonzero([row[0] >= 128 for row in each]).mean() for each in epochs]
    assert 60 < np.mean(positions) < 100, "mixed within an epoch"
    for epoch in epochs:
        assert len({row for row in epoch if row[0] < 128}) == 96, "all windows of the source that ends the epoch"
    stream = TokenDataModule(list(mixed)[1], context=8)
    stream.setup("fit")
    assert len(set(sum(second[:6], []))) == 6 * 64, "no window repeats while others are unused"
    assert set(sum(second[:7], [])) == set(seen(stream)[0]), "seven epochs use all 400 windows"
    assert sorted(second[0]) != sorted(second[1])
    data.teardown("fit")


def test_mixture_resumes_exactly_with_other_batch_sizes(mixed: dict[str, float], tmp_path: Path) -> None:
    """Other weights with the same ratio change nothing. Other batch sizes take the place of other nodes."""

    def rows_after(state: dict[str, Any] | None, weights: dict[str, float], batch_size: int, steps: int = 999) -> Any:
        data = module(weights, tmp_path / "cache", batch_size=batch_size, seed=3)
        data.setup("fit")
        loader = data.train_dataloader()
        loader.set_epoch(2)
        if state is not None:
            loader.load_state_dict(state)
        rows = [row for _, (inputs, _) in zip(range(steps), loader, strict=False) for row in inputs.tolist()]
        state = loader.state_dict()
        data.teardown("fit")
        return rows, state

    whole, _ = rows_after(None, mixed, 8)
    first, state = rows_after(None, mixed, 8, steps=7)
    assert first == whole[:56]
    tenth = {path: weight / 10 for path, weight in mixed.items()}
    for weights, batch_size in ((mixed, 8), (tenth, 8), (mixed, 4)):
        assert rows_after(state, weights, batch_size)[0] == whole[56:]


def mixture_on_ranks(sources: dict[str, float], cache: str, state: dict[str, Any] | None, steps: int) -> Any:
    data = module(sources, Path(cache) / os.environ["NODE_RANK"], seed=5, batch_size=4)
    data.setup("fit")
    loader = data.train_dataloader()
    if state is not None:
        loader.load_state_dict(state)
    rows = [tuple(row) for _, (inputs, _) in zip(range(steps), loader, strict=False) for row in inputs.tolist()]
    return rows, loader.state_dict()


@pytest.mark.slow
def test_mixture_resumes_on_other_nodes(ranks: RunRanks, mixed: dict[str, float], tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    first = ranks(mixture_on_ranks, mixed, cache, None, 4, nodes=2, devices=2, timeout=120)
    state = first[0][1]
    assert all(each[1] == state for each in first)
    then = ranks(mixture_on_ranks, mixed, cache, state, 99, nodes=4, devices=1, timeout=120)
    alone = module(mixed, tmp_path / "alone", seed=5, batch_size=16)
    alone.setup("fit")
    assert sorted(row for rows, _ in (*first, *then) for row in rows) == sorted(seen(alone)[0])


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), "1", 10**400])
def test_mixture_with_a_bad_weight_is_refused(weight: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weight .* of a\.bin must be a finite number above 0"):
        module({"a.bin": weight}, tmp_path / "cache")
    with pytest.raises(ValueError, match="names no source"):
        module({}, tmp_path / "cache")


def test_sources_of_other_tokenizers_are_not_mixed(mixed: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("other " * 30)
    other = prepare([tmp_path / "c.txt"], tmp_path / "c", vocab_size=1000)
    with pytest.raises(ValueError, match="use one tokenizer for all"):
        TokenDataModule({list(mixed)[1]: 1, str(other): 1}, context=8)
    data = module({next(iter(mixed)): 1, str(other): 1}, tmp_path / "cache")
    with pytest.raises(ValueError, match="has vocab_size 256, but train=.* has 1000: use one tokenizer"):
        data.setup("fit")
