"""Validation numbers the classes as training does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_sparse.data.config import CacheConfig, ImageOptions, SampleOptions
from lightning_sparse.data.session import DataOptions, Session, open_session
from lightning_sparse.data.sources.listing import load_or_list
from tests.helpers.data import config_of, jpeg, make_folder, write
from tests.helpers.distributed import run_ranks


@pytest.fixture
def sessions() -> Iterator[list[Session]]:
    """Yield a list of sessions, which are closed after the test."""
    opened: list[Session] = []
    yield opened
    for session in opened:
        session.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create three classes in train/. val/ lacks the first class."""
    folder = make_folder(tmp_path / "pictures", per_class=4, classes=3)
    make_folder(folder, per_class=2, classes=3, split="val")
    shutil.rmtree(folder / "val" / "c0")
    return folder


def opened(folder: Path, sessions: list[Session], *, stage: str = "fit", **more: Any) -> Session:
    options = DataOptions(
        cache=config_of(folder),
        batch_size=3,
        samples=ImageOptions(image_size=16, backend="torch"),
        **more,
    )
    sessions.append(open_session(options, stage=stage))
    return sessions[-1]


def labels(session: Session) -> list[int]:
    return [label for _, batch in session.eval_loader() for label in batch.tolist()]


@pytest.mark.parametrize("stage", ["fit", "validate"])
@pytest.mark.parametrize("kept", [False, True])
def test_validation_has_the_labels_of_train(folder: Path, sessions: list[Session], stage: str, kept: bool) -> None:
    """This also holds with the lists of another run, and in a run that only tests."""
    if kept:
        for split in ("train", "val"):
            load_or_list(config_of(folder), split)
    session = opened(folder, sessions, stage=stage)
    assert labels(session) == [1, 1, 2, 2]
    assert session.val is not None
    assert session.val.store.manifest.classes == ("c0", "c1", "c2")


def test_class_that_train_does_not_have_is_refused_by_name(folder: Path, sessions: list[Session]) -> None:
    make_folder(folder / "other", per_class=1, classes=1, split="val")
    (folder / "other" / "val" / "c0").rename(folder / "val" / "zebra")
    with pytest.raises(ValueError, match=r"val/ has 1 folder\(s\) that train/ does not have: zebra\. .*val_fraction"):
        opened(folder, sessions)


def test_limit_leaves_an_equal_part_of_each_class(tmp_path: Path, sessions: list[Session]) -> None:
    """Other samples use no memory. A lower limit keeps a subset of the samples of a higher limit."""
    folder = make_folder(tmp_path / "pictures", per_class=10, classes=3)
    kept: list[set[str]] = []
    for limit in (6, 0.5):
        session = opened(folder, sessions, limit=limit, val_fraction=0.1)
        assert session.train is not None
        assert session.val is not None
        manifest = session.train.store.manifest
        kept.append({manifest.paths[each] for each in session.train.samples.tolist()})
        assert len(manifest) == len(session.train.samples) + len(session.val.samples)
        assert not set(session.train.samples) & set(session.val.samples)
        assert manifest.num_classes == 3
        session.close()
    assert [len(each) for each in kept] == [6, 14]
    assert kept[0] < kept[1]
    counts = [sum(f"train/c{label}/" in path for path in kept[0]) for label in range(3)]
    assert counts == [2, 2, 2]
    with pytest.raises(ValueError, match="limit=31 is more than the 30 samples to train on: omit it"):
        opened(folder, sessions, limit=31)


@pytest.mark.parametrize(("place", "said"), [("images", "does not have: images"), (".", "contains no class folders")])
def test_flat_folder_is_refused_with_the_fix(folder: Path, sessions: list[Session], place: str, said: str) -> None:
    """Tiny ImageNet has this layout: all images of val/ in one folder, and their labels in a text file."""
    shutil.rmtree(folder / "val")
    (folder / "val" / place).mkdir(parents=True)
    for number in range(3):
        (folder / "val" / place / f"{number}.jpg").write_bytes(jpeg(number))
    with pytest.raises(ValueError, match=rf"{said}.*ut each image into"):
        opened(folder, sessions)


def test_source_to_test_on_needs_no_train(folder: Path, sessions: list[Session]) -> None:
    shutil.rmtree(folder / "train")
    session = opened(folder, sessions, stage="test")
    assert labels(session) == [0, 0, 1, 1]
    assert [session.check_classes(used) for used in (None, 7)] == [2, 7]  # 7: of a model from elsewhere


def test_missing_val_is_refused_with_the_fix(folder: Path, sessions: list[Session]) -> None:
    shutil.rmtree(folder / "val")
    with pytest.raises(ValueError, match=r"has no folder val/.*val_fraction=0\.05 \(--data\.val_fraction=0\.05\)"):
        opened(folder, sessions).eval_loader()
    assert len(labels(opened(folder, sessions, val_fraction=0.25))) == 3


def num_classes(folder: str) -> str:
    """Run two nodes. The second node has a list in its cache and cannot read the source when it creates its model."""
    from lightning_sparse.flavours.pytorch_lightning import CachedImageDataModule

    node = os.environ["NODE_RANK"]
    source = Path(folder) / ("pictures" if node == "0" else "mount")
    cache = Path(folder) / f"cache{node}"
    if node == "1":
        source.symlink_to(Path(folder) / "pictures")
        load_or_list(CacheConfig(source=str(source), cache_dir=str(cache)), "train")
        source.unlink()
    dist.barrier()
    if node == "0":
        make_folder(source / "other", per_class=1, classes=1)
        (source / "other" / "train" / "c0").rename(source / "train" / "zebra")
    data = CachedImageDataModule(str(source), str(cache), batch_size=2, image_size=16, memory_gb=0.01)
    dist.barrier()
    assert data.num_classes == (4 if node == "0" else 3)
    with pytest.raises(ValueError, match="has 4 classes, but num_classes was 3 on rank 1") as caught:
        data.setup("fit")
    data.on_exception(caught.value)
    again = CachedImageDataModule(str(source), str(cache), batch_size=2, image_size=16, memory_gb=0.01)
    again.setup("fit")
    classes = again.num_classes
    again.teardown("fit")
    return f"{classes} classes"


@pytest.mark.slow
def test_nodes_have_equally_many_classes(folder: Path) -> None:
    assert run_ranks(num_classes, str(folder.parent), nodes=2, devices=1) == ["4 classes"] * 2


def with_lists(folder: Path, **rows: str) -> DataOptions:
    """Return options with a list for each split, whose rows end with the given text."""
    for split, end in rows.items():
        files = sorted((folder / ("train" if split == "train" else "val")).rglob("*.jpg"))
        lines = ["path,label" if end else "path", *(f"{file.relative_to(folder)}{end}" for file in files)]
        write(folder / f"{split}.csv", "\n".join(lines) + "\n")
    cache = replace(config_of(folder), lists={split: str(folder / f"{split}.csv") for split in rows})
    return DataOptions(cache=cache, samples=ImageOptions(image_size=16, backend="torch"), batch_size=3)


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_labels_have_one_type_in_all_splits(folder: Path, sessions: list[Session], stage: str) -> None:
    """This also holds if all numbers of one split are whole, and in a run that only tests."""
    sessions.append(open_session(with_lists(folder, train=",0.5", val=",1", test=",1"), stage=stage))
    assert {batch.dtype for _, batch in sessions[-1].eval_loader()} == {torch.float32}
    with pytest.raises(ValueError, match=r"of (val|test) are not whole numbers, but the labels of train are"):
        open_session(with_lists(folder, train=",1", val=",0.5", test=",0.5"), stage=stage)


def test_labels_stay_whole_numbers_if_train_has_none(folder: Path, sessions: list[Session]) -> None:
    sessions.append(open_session(with_lists(folder, train="", test=",3"), stage="test"))
    assert {batch.dtype for _, batch in sessions[-1].eval_loader()} == {torch.int64}


def numbered(folder: Path, *, limit: float | None = None, **numbers: list[int]) -> DataOptions:
    """Return options with a list for each split, whose samples have these labels."""
    for split, given in numbers.items():
        files = sorted((folder / "train").rglob("*.jpg"))
        lines = [f"{files[place % len(files)].relative_to(folder)},{label}" for place, label in enumerate(given)]
        write(folder / f"{split}.csv", "\n".join(["path,label", *lines]) + "\n")
    cache = replace(config_of(folder), lists={split: str(folder / f"{split}.csv") for split in numbers})
    return DataOptions(cache=cache, samples=ImageOptions(image_size=16, backend="torch"), batch_size=3, limit=limit)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_number_of_classes_is_that_of_train_although_a_split_lacks_the_largest_label(
    folder: Path, sessions: list[Session], stage: str
) -> None:
    sessions.append(open_session(numbered(folder, train=[0, 1, 2, 3], val=[0, 1], test=[1, 2]), stage=stage))
    assert sessions[-1].check_classes(4) == sessions[-1].check_classes(None) == 4
    with pytest.raises(ValueError, match="has 4 classes, but num_classes was 3 on rank 0"):
        sessions[-1].check_classes(3)


def test_number_of_classes_is_that_of_all_samples_with_a_limit(folder: Path, sessions: list[Session]) -> None:
    rare = numbered(folder, train=[0] * 50 + [1] * 40 + [2], val=[0], limit=0.1)
    sessions.append(open_session(rare))
    train = sessions[-1].train
    assert train is not None
    assert train.store.manifest.num_classes == 2
    assert sessions[-1].check_classes(None) == 3


def test_test_samples_without_labels_leave_the_number_of_classes(folder: Path, sessions: list[Session]) -> None:
    (folder / "test").mkdir()
    (folder / "test" / "a.jpg").write_bytes(jpeg(0))
    cache, samples = replace(config_of(folder), format="bytes"), SampleOptions(decode=len, workers=0)
    sessions.append(open_session(DataOptions(cache=cache, samples=samples), stage="predict"))
    assert sessions[-1].check_classes(3) == 3
