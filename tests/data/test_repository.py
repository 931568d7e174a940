"""Unmodified Hugging Face data set repositories: labels as in `datasets`, and errors for unclear repositories."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.data.cache.commands import warm_splits
from lightning_sparse.data.config import CacheConfig, DataError
from lightning_sparse.data.sources.listing import classes_of, has_split, load_or_list
from tests.data.fits import ours
from tests.data.test_parquet import config_of, image_column, payload, write
from tests.helpers.data import jpeg, needs_s3, read, s3_server, upload
from tests.helpers.data import write as write_file

pytest.importorskip("pyarrow", reason="it reads Parquet files")
NAMES = ("zebra", "ant", "dog")  # in the order of their numbers, which is not alphabetical
ROWS = 4


def files_of(split: str, count: int, folder: str = "data") -> list[str]:
    return [f"{folder}/{split}-{number:05}-of-{count:05}.parquet" for number in range(count)]


def fill(root: Path, files: list[str], make: Any = payload, labels: Any = lambda number: number % 3) -> Path:
    """Write rows that are numbered across all files. A label differs from the alphabetical place of its name."""
    for number, name in enumerate(files):
        numbers = range(number * ROWS, (number + 1) * ROWS)
        columns = {"image": image_column([make(each) for each in numbers]), "label": [labels(each) for each in numbers]}
        write(root / name, columns, names=NAMES)
    return root


def repository(root: Path, make: Any = payload) -> Path:
    """Create a clone with three splits, of which test has no labels, and other files of a repository."""
    fill(root, files_of("train", 3), make)
    fill(root, files_of("validation", 1), make, lambda number: 2 - number % 3)
    fill(root, ["data/test-00000-of-00001-a09b74b3ef9c3b56.parquet"], make, lambda number: -1)
    (root / ".git").mkdir()
    (root / "README.md").write_text("---\nlicense: mit\n---\n")
    (root / "data" / "notes.txt").write_text("not a split")
    return root


def check(config: CacheConfig) -> None:
    """Compare all splits with load_dataset(), row by row."""
    assert classes_of(config, "train")[0] == NAMES
    assert [has_split(config, split) for split in ("train", "val", "test")] == [True] * 3
    labels = {"train": lambda i: i % 3, "val": lambda i: 2 - i % 3, "test": lambda i: -1}
    for split, label in labels.items():
        count = 3 * ROWS if split == "train" else ROWS
        manifest, data, _ = read(config, split)
        assert data == [payload(each) for each in range(count)]
        assert manifest.labels.tolist() == [[label(each)] for each in range(count)]


def test_cloned_repository_is_read_unchanged(tmp_path: Path) -> None:
    check(config_of(repository(tmp_path / "source")))


@needs_s3
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.slow
def test_repository_in_s3_is_read_as_the_clone(tmp_path: Path) -> None:
    folder = repository(tmp_path / "source")
    with s3_server() as (options, files):
        files.mkdir("repositories")
        upload(files, folder, "repositories/cats")
        check(config_of("s3://repositories/cats", tmp_path / "cache", storage_options=options))


def test_repository_configuration_is_a_source_and_val_means_validation(tmp_path: Path) -> None:
    source = tmp_path / "source" / "plain"
    for name in (*files_of("train", 1, "plain"), "plain/val.parquet"):
        fill(source.parent, [name])
    config = config_of(source, tmp_path / "cache")
    for split in ("train", "val"):
        manifest, data, _ = read(config, split)
        assert data == [payload(each) for each in range(ROWS)]
        assert manifest.labels.tolist() == [[each % 3] for each in range(ROWS)]
    assert not has_split(config, "test")


def test_image_module_trains_on_a_repository(tmp_path: Path) -> None:
    folder = repository(tmp_path / "source", jpeg)
    data = ours("pytorch_lightning").CachedImageDataModule(
        str(folder), str(tmp_path / "cache"), batch_size=4, image_size=16, backend="torch", with_indices=True
    )
    assert (data.num_classes, data.class_names) == (3, NAMES)
    for stage, rows, label in (("fit", 12, lambda i: i % 3), ("validate", 4, lambda i: 2 - i % 3), ("test", 4, None)):
        data.setup(stage)
        try:
            loader = data.train_dataloader() if stage == "fit" else data.val_dataloader()
            found = {i: y for _, labels, indices in loader for i, y in zip(indices.tolist(), labels.tolist())}  # noqa: B905
        finally:
            data.teardown(stage)
        assert found == {i: -1 if label is None else label(i) for i in range(rows)}


def test_warming_finds_the_splits_and_a_new_file_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = repository(tmp_path / "source")
    config = config_of(folder)
    reports = warm_splits(config)
    assert [(each.split, each.fetched) for each in reports] == [("train", 12), ("val", 4), ("test", 4)]
    caplog.set_level(logging.INFO)
    assert len(load_or_list(config, "train")) == 12
    assert "listing" not in caplog.text, "the source is unchanged"
    for old, new in zip(files_of("train", 3), files_of("train", 4), strict=False):
        os.rename(folder / old, folder / new)
    with pytest.raises(ValueError, match=r"3 of 4 files train-00000-of-00004.parquet, \.\.\. are there"):
        load_or_list(config, "train")
    fill(folder, files_of("train", 4))
    assert len(load_or_list(config, "train")) == 16


@pytest.mark.parametrize(
    ("files", "split", "says"),
    [
        (["train/cat/0.jpg", *files_of("train", 1)], "train", "has both train/ and data/train-00000-of-00001.parquet"),
        (["train/cat/0.jpg", *files_of("validation", 1)], "val", "has both train/ and data/validation-00000"),
        (files_of("test", 1), "train", "has no train/, and Parquet files of test only"),
        (files_of("train", 1), "val", "has no val/, and Parquet files of train only"),
        ([*files_of("val", 1), *files_of("validation", 1)], "val", "has files of validation and of val: remove one"),
        ([*files_of("train", 1), *files_of("train", 1, ".")], "train", "has Parquet files in the folder and in data/"),
        (
            files_of("train", 3)[::2],
            "train",
            "2 of 3 files train-00000-of-00003.parquet, ... are there: some are missing",
        ),
        ([*files_of("train", 1), "data/train-00000-of-00001-b.parquet"], "train", "belong to another version"),
        ([*files_of("train", 1, "en"), *files_of("train", 1, "fr")], "train", r"in en/, fr/\. Give one .*source/en"),
        (["other/0.txt"], "train", "has no folder train/ to read"),
    ],
)
def test_unclear_repository_is_refused(tmp_path: Path, files: list[str], split: str, says: str) -> None:
    for name in files:
        write_file(tmp_path / "source" / name)
    with pytest.raises((ValueError, DataError), match=says):
        load_or_list(config_of(tmp_path / "source"), split)


def test_repository_without_its_large_files_says_what_to_run(tmp_path: Path) -> None:
    folder = repository(tmp_path / "source")
    (folder / files_of("train", 3)[1]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match=r"train-00001-of-00003.parquet cannot be used: .*run `git lfs pull`"):
        load_or_list(config_of(folder), "train")


def test_files_with_other_names_of_classes_are_refused(tmp_path: Path) -> None:
    folder = repository(tmp_path / "source")
    write(folder / files_of("train", 3)[2], {"image": image_column([b"x"]), "label": [0]}, names=("ant", "dog"))
    with pytest.raises(ValueError, match="has other names of classes than data/train-00000-of-00003.parquet"):
        load_or_list(config_of(folder), "train")
