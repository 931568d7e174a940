"""Folders with another layout are refused with their place, or read with a warning."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lightning_sparse.data.config import DataError
from tests.helpers.data import jpeg, listed, make_folder, write


def test_missing_split_is_compared_with_existing_folders(tmp_path: Path) -> None:
    for name in ("Train", "valid"):
        make_folder(tmp_path / "source", split=name)
    with pytest.raises(DataError, match=r"has no folder train/ to read \(.*; it has Train, valid\)"):
        listed(tmp_path / "source")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("000000.tar", r"no folder train/ .*; it has 000000.tar\).*train/<shard>.tar"),
        ("train/shards/000000.tar", r"train/shards contains no images.*\.tar.* belong into train/ itself"),
    ],
)
def test_shards_in_another_folder_are_refused_with_their_place(tmp_path: Path, name: str, says: str) -> None:
    write(tmp_path / name)
    with pytest.raises((ValueError, DataError), match=says):
        listed(tmp_path)


def test_shards_in_class_folders_are_samples_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a/0.tar", "b/1.parquet"):
        write(tmp_path / "train" / name, b"x")
    assert list(listed(tmp_path, format="bytes").paths) == ["train/a/0.tar", "train/b/1.parquet"]
    assert "such as train/a/0.tar, is one sample. If these files are shards, move them" in caplog.text


@pytest.mark.parametrize("classes", [1, 2])
def test_classes_one_level_too_deep_are_refused(tmp_path: Path, classes: int) -> None:
    """A single folder inside the only class, as in Tiny ImageNet, may be intended."""
    make_folder(tmp_path, split="train/images", classes=classes)
    if classes == 1:
        assert listed(tmp_path).classes == ("images",)
        return
    with pytest.raises(ValueError, match=r"train/images/ would be the only class.*train/images/c0/.*move them into"):
        listed(tmp_path)


def test_link_of_a_class_to_nothing_is_refused(tmp_path: Path) -> None:
    """The data set behind the link is not mounted."""
    (make_folder(tmp_path) / "train" / "c3").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="train/c3 is a broken link"):
        listed(tmp_path)


def test_files_next_to_class_folders_are_ignored_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = make_folder(tmp_path) / "train"
    for name in ("stray.JPG", "README", "._stray.jpg"):
        (train / name).write_bytes(jpeg(1))
    with caplog.at_level(logging.WARNING):
        assert len(listed(tmp_path)) == 12
    assert "train: ignored 2 file(s) that are not in a class folder: README, stray.JPG" in caplog.text
