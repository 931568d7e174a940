"""Layouts of known data sets: the labels are those of torchvision's ImageFolder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.data.config import DataError
from tests.data.fits import FLAVOURS, ours
from tests.data.small import jpeg, make_folder, picture
from tests.data.stores import listed

image_folder = pytest.importorskip("torchvision.datasets", reason="the labels are compared with it").ImageFolder


def labels_of(loader: Any) -> dict[int, int]:
    """Index -> label."""
    return {
        i: label for _, labels, indices in loader for i, label in zip(indices.tolist(), labels.tolist(), strict=True)
    }


def data_of(source: Path, cache: Path, **more: Any) -> Any:
    given = {"image_size": 16, "memory_gb": 0.01, "backend": "torch", "with_indices": True, "batch_size": 4, **more}
    data = ours(FLAVOURS[0]).CachedImageDataModule(str(source), str(cache), **given)
    data.setup("fit")
    return data


def test_odd_names(tmp_path: Path) -> None:
    """In all formats, and in folders below those of the classes."""
    source, suffixes = tmp_path / "source", [".JPG", ".png", ".webp", ".TIFF", ".bmp"]
    for label, name in enumerate(["Kätzchen 猫", "#1 100%", "10", "2", "it's", "[a]", "Upper", "upper", "-dash"]):
        for number, suffix in enumerate(suffixes):
            path = source / "train" / name / ("deep er" if number % 2 else ".") / f"ü {number}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture(len(suffixes) * label + number).save(path)
    expected = image_folder(str(source / "train"))
    data = data_of(source, tmp_path / "cache", batch_size=5)
    assert data.class_names == tuple(expected.classes)
    assert labels_of(data.train_dataloader()) == {i: label for i, (_, label) in enumerate(expected.samples)}
    data.teardown("fit")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_what_is_hidden_is_left_out(tmp_path: Path, scheme: str) -> None:
    """What macOS, Jupyter and git leave in folders; as classes and images they would shift labels, or be damaged."""
    make_folder(tmp_path / "source", classes=2)
    train = tmp_path / "source" / "train"
    for path in (train / ".git" / "x.jpg", train / "c0" / ".ipynb_checkpoints" / "1.jpg", train / "c1" / "._0.jpg"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"no image")
    manifest = listed(f"{scheme}{tmp_path / 'source'}")
    assert manifest.classes == ("c0", "c1")
    assert manifest.labels.ravel().tolist() == [0] * 4 + [1] * 4
    assert not [path for path in manifest.paths if "/." in path]


def test_a_folder_that_is_missing_is_compared_with_what_is_there(tmp_path: Path) -> None:
    for name in ("Train", "valid"):
        make_folder(tmp_path / "source", split=name)
    with pytest.raises(DataError, match=r"has no folder train/ to read \(.*; it has Train, valid\)"):
        listed(tmp_path / "source")


def test_shards_in_the_source_itself_are_named(tmp_path: Path) -> None:
    (tmp_path / "000000.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"no folder train/ .*; it has 000000.tar\).*train/<shard>.tar"):
        listed(tmp_path)


def test_shards_in_a_folder_of_a_class_are_told_their_place(tmp_path: Path) -> None:
    shard = make_folder(tmp_path, classes=1) / "train" / "shards" / "000000.tar"
    shard.parent.mkdir()
    shard.write_bytes(b"")
    with pytest.raises(ValueError, match=r"train/shards contains no images.*\.tar.* belong into train/ itself"):
        listed(tmp_path)


def test_shards_in_class_folders_are_samples_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a/0.tar", "b/1.parquet"):
        path = tmp_path / "train" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    assert list(listed(tmp_path, format="bytes").paths) == ["train/a/0.tar", "train/b/1.parquet"]
    assert (
        "such as train/a/0.tar, is one sample. If these files are shards, move them into train/ itself" in caplog.text
    )


@pytest.mark.parametrize("classes", [1, 2])
def test_classes_one_level_too_deep_are_not_taken_for_one(tmp_path: Path, classes: int) -> None:
    """One folder below the only class, as tiny ImageNet has, may be meant."""
    make_folder(tmp_path, split="train/images", classes=classes)
    if classes == 1:
        assert listed(tmp_path).classes == ("images",)
        return
    with pytest.raises(ValueError, match=r"train/images/ would be the only class.*train/images/c0/.*move them into"):
        listed(tmp_path)


def test_a_link_of_a_class_that_leads_nowhere_is_no_class_less(tmp_path: Path) -> None:
    """The data set that it leads to is not mounted."""
    (make_folder(tmp_path) / "train" / "c3").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="train/c3 is a link that leads nowhere"):
        listed(tmp_path)


def test_files_next_to_class_folders_are_ignored_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = make_folder(tmp_path) / "train"
    for name in ("stray.JPG", "README", "._stray.jpg"):
        (train / name).write_bytes(jpeg(1))
    with caplog.at_level(logging.WARNING):
        assert len(listed(tmp_path)) == 12
    assert "train: ignored 2 file(s) that are not in a class folder: README, stray.JPG" in caplog.text
