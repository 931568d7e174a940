"""Lists of samples: CSV and Parquet, names and numbers, changes, and errors."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.sources.listing import classes_of, load_or_list
from lightning_sparse.data.sources.manifest import Manifest
from tests.helpers.data import bytes_of, write

NEEDS_PYARROW = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create files in folders that are not classes."""
    for name in ("a/1.bin", "a/b/2.bin", "c/3.bin", "4.bin"):
        write(tmp_path / "source" / name, name)
    return tmp_path / "source"


def config_of(folder: Path, text: str | None = None, **more: Any) -> CacheConfig:
    file = folder.parent / "train.csv"
    if text is not None:
        file.write_text(text)
    return bytes_of(folder, **{"lists": {"train": str(file)}, **more})


def listed(folder: Path, text: str) -> Manifest:
    return load_or_list(config_of(folder, text), "train")


def test_samples_are_in_the_order_of_the_list_and_may_repeat(folder: Path) -> None:
    manifest = listed(folder, "path,kind\nc/3.bin,dog\na/b/2.bin,cat\n4.bin,dog\nc/3.bin,cat\n")
    assert list(manifest.paths) == ["c/3.bin", "a/b/2.bin", "4.bin", "c/3.bin"]
    assert manifest.classes == ("cat", "dog")
    assert manifest.labels.tolist() == [[1], [0], [1], [0]]
    assert manifest.class_ids.tolist() == [1, 0, 1, 0]
    assert manifest.sizes.tolist() == [7, 9, 5, 7]
    assert all(manifest.mtimes_ns > 0)


@pytest.mark.parametrize(
    ("text", "labels", "classes", "count"),
    [
        ("path,x,y\n4.bin,3,1\nc/3.bin,0,2\n", [[3, 1], [0, 2]], (), 4),
        ("path,x,y\n4.bin,3,0.5\nc/3.bin,0,2\n", [[3.0, 0.5], [0.0, 2.0]], (), 0),
        ("path,x,y\n4.bin,b,1\nc/3.bin,a,2\n", [[1, 1], [0, 2]], ("a", "b"), 2),
        ("path,x\n4.bin,007\nc/3.bin,x7\n", [[0], [1]], ("007", "x7"), 2),
        ("path, x\n4.bin, 2\nc/3.bin, 10\n", [[2], [10]], (), 11),
        ("path,x\n4.bin,+1\nc/3.bin,-2\n", [[1], [-2]], (), 2),
        ("path,x\n4.bin,.5\nc/3.bin,1e1\n", [[0.5], [10.0]], (), 0),
        ("path,x\n4.bin,1_0\nc/3.bin,2\n", [[0], [1]], ("1_0", "2"), 2),
        ("path,x\n4.bin,True\nc/3.bin,True\n", [[1], [1]], (), 2),
        ("\ufeffpath,x\r\n4.bin,ä\r\nc/3.bin,ä\r\n", [[0], [0]], ("ä",), 1),
        ("path\n4.bin\nc/3.bin\n", [[], []], (), 0),
    ],
)
def test_labels_are_names_or_numbers(
    folder: Path, text: str, labels: list[Any], classes: tuple[str, ...], count: int
) -> None:
    manifest = listed(folder, text)
    assert manifest.labels.tolist() == labels
    config = config_of(folder)
    assert (manifest.classes, manifest.num_classes) == (classes, count)
    assert classes_of(config, "train") == (classes, count)
    again = Manifest.load(manifest.to_bytes())
    assert (again.fingerprint, again.labels.tolist()) == (manifest.fingerprint, labels)
    assert again.labels.dtype == manifest.labels.dtype


@NEEDS_PYARROW
def test_parquet_list_equals_the_csv_list(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    file = folder.parent / "train.parquet"
    table = pyarrow.table({"path": ["4.bin", "c/3.bin"], "kind": ["dog", "cat"], "score": [1.5, 2.0]})
    pyarrow.parquet.write_table(table, file)
    config = config_of(folder, lists={"train": str(file)})
    found = load_or_list(config, "train")
    expected = listed(folder, "path,kind,score\n4.bin,dog,1.5\nc/3.bin,cat,2.0\n")
    assert (list(found.paths), found.classes) == (list(expected.paths), expected.classes)
    np.testing.assert_array_equal(found.labels, expected.labels)


def test_list_that_has_changed_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_sparse.data.sources import listing as module

    first = listed(folder, "path,x\n4.bin,1\n")
    second = listed(folder, "path,x\n4.bin,2\n")
    assert (first.labels.tolist(), second.labels.tolist()) == ([[1]], [[2]])
    monkeypatch.setattr(module, "list_source", None)
    assert load_or_list(config_of(folder), "train").fingerprint == second.fingerprint
    monkeypatch.undo()
    time.sleep(0.02)  # the resolution of times on this file system
    (folder / "4.bin").unlink()
    with pytest.raises(ValueError, match=r"lists 1 file\(s\) that .* does not have, such as '4\.bin'"):
        load_or_list(config_of(folder), "train")


def test_list_and_folder_of_one_split_are_cached_separately(folder: Path) -> None:
    (folder / "train").mkdir()
    (folder / "train" / "5.bin").write_bytes(b"5")
    named = listed(folder, "path,x\n4.bin,1\n")
    plain = load_or_list(config_of(folder, lists=None), "train")
    assert list(plain.paths) == ["train/5.bin"]
    assert load_or_list(config_of(folder), "train").fingerprint == named.fingerprint


def test_names_of_other_splits_are_numbered_as_in_train(folder: Path) -> None:
    val = listed(folder, "path,kind,score\n4.bin,dog,5\nc/3.bin,cow,6\n")
    assert val.relabel(("cat", "cow", "dog")).labels.tolist() == [[2, 5], [1, 6]]
    with pytest.raises(ValueError, match=r"include 1 class\(es\) that train lacks: cow\. Correct the labels"):
        val.relabel(("cat", "dog"))
    with pytest.raises(ValueError, match="the labels of train are names, but the labels of train are not"):
        val.relabel(())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must have a first column named path"),
        ("file,label\n4.bin,1\n", "its columns are file, label"),
        ("path,label\n", "and a row for each sample"),
        ("path,label\n4.bin\n", r"line 2 has 1 column\(s\), but the header has 2"),
        ("path,label\n4.bin,\n", "column label, sample 1: the label is '', which means a missing value"),
        ("path,label\n4.bin,cat\nc/3.bin,NA\n", "sample 2: the label is 'NA', which means a missing value"),
        ("path,a,b\n4.bin,1,dog\n", "column b, sample 1: the label is 'dog', which is not a number"),
        ("path,a,b\n4.bin,1,1\nc/3.bin,1,dog\n", "column b, sample 2: the label is 'dog', which is not a number"),
        (f"path,a,b\n4.bin,1,1\nc/3.bin,1,{10**20}\n", "column b, sample 2: the label is 1000.*, which does not fit"),
        ("path,label\n4.bin, cat\nc/3.bin,cat\n", "sample 1: the label is ' cat': remove the spaces around it"),
        (
            "path,label\n4.bin,10\nc/3.bin,007\n",
            "sample 2: the label is 007, which may be a number or a name: write 7, or",
        ),
        (
            "path,a,b\n4.bin,1,0.5\nc/3.bin,16777217,0.5\n",
            "column a, sample 2: the label is 16777217, which float32 cannot hold",
        ),
        (
            f"path,a,b\n4.bin,{2**53 + 1},0.5\n",
            f"column a, sample 1: the label is {2**53 + 1}, which float32 cannot hold",
        ),
        ("path,label\n4.bin,1\nc/3.bin,inf\n4.bin,2e999\n", "sample 2: the label is inf: give each sample a finite"),
        ("path,label\n4.bin,1.5\nc/3.bin,2e999\n", "sample 2: the label is 2e999: give each sample a finite"),
        ('path,label\n4.bin,"cat\nc/3.bin,dog\n', "is not a CSV file in UTF-8: unexpected end of data"),
        ("path,a,b,a\n4.bin,1,1,2\n", "has several columns named a"),
        ("path,label\nnowhere/4.bin,1\n", "lists files of a folder that is not there"),
        ("path,label\n4.bin,1\n5.bin,1\n", r"lists 1 file\(s\) that .* does not have, such as '5\.bin'"),
    ],
)
def test_invalid_list_is_refused_with_the_reason(folder: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        listed(folder, text)


def test_word_among_numbers_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    listed(folder, "path,label\n4.bin,2\nc/3.bin,10\na/b/2.bin,unknown\n")
    assert "column label has names, because the label of sample 3 is 'unknown'" in caplog.text


def test_file_that_is_not_parquet_is_named(folder: Path) -> None:
    pytest.importorskip("pyarrow")
    (folder / "train.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"train\.parquet is not a Parquet file"):
        load_or_list(config_of(folder, lists={"train": str(folder / "train.parquet")}), "train")


def test_list_with_absolute_paths_inside_the_source_names_its_samples(folder: Path) -> None:
    manifest = listed(folder, f"path,x\n{folder}/a/b/2.bin,1\n./4.bin,2\n")
    assert list(manifest.paths) == ["a/b/2.bin", "4.bin"]


def test_options_of_lists_are_refused_early(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"train\.txt' must be a \.csv or a \.parquet file"):
        config_of(folder, lists={"train": "train.txt"})
    monkeypatch.setattr("lightning_sparse.data.config.find_spec", lambda name: None if name == "pyarrow" else object())
    with pytest.raises(ValueError, match=r"needs pyarrow: `pip install pyarrow`"):
        config_of(folder, lists={"train": "train.parquet"})
    with pytest.raises(ValueError, match=r"the list .*train\.csv of train cannot be read"):
        load_or_list(config_of(folder), "train")
