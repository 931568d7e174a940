"""The identity of cached samples: replaced, restored or rewritten files never give old contents."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_sparse.cli import main
from lightning_sparse.data.cache.commands import caches, warm
from lightning_sparse.data.cache.store import SampleStore
from lightning_sparse.data.config import CacheConfig, DataError
from lightning_sparse.data.sources import local_storage
from lightning_sparse.data.sources.listing import load_or_list
from lightning_sparse.data.sources.local_storage import LocalStorage
from tests.helpers.data import bytes_of, read

TIME = 1_600_000_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Create two classes whose files have equal sizes and times, as unpacked archives may have."""
    for name in ("cat", "dog"):
        for number in range(3):
            write(tmp_path / "source" / "train" / name / f"{number}.bin", f"{name}{number}")
    settle(tmp_path / "source")
    return tmp_path / "source"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (TIME, TIME))


def settle(folder: Path) -> None:
    """Set the modification time of all folders to the same value."""
    for each in (folder, *folder.rglob("*")):
        if each.is_dir():
            os.utime(each, (TIME, TIME))


def contents(config: CacheConfig) -> dict[str, str]:
    manifest, data, _ = read(config)
    return {path: each.decode() for path, each in zip(manifest.paths, data, strict=True)}


def exchange_folders(train: Path) -> None:
    for old, new in (("cat", "t"), ("dog", "cat"), ("t", "dog")):
        os.rename(train / old, train / new)


def exchange_files(train: Path) -> None:
    for old, new in (("cat/0.bin", "t"), ("dog/1.bin", "cat/0.bin"), ("t", "dog/1.bin")):
        os.rename(train / old, train / new)


def restore_a_copy(train: Path) -> None:
    shutil.copytree(train, train.with_name("copy"), copy_function=shutil.copy2)
    write(train.with_name("copy") / "dog" / "2.bin", "DOG2")
    shutil.rmtree(train)
    os.rename(train.with_name("copy"), train)


def replace_a_file(train: Path) -> None:
    write(train.parent / "new", "CAT1")
    os.replace(train.parent / "new", train / "cat" / "1.bin")


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("change", [exchange_folders, exchange_files, restore_a_copy, replace_a_file])
def test_sources_with_equal_sizes_and_times_give_the_contents_after_a_change(
    source: Path, tmp_path: Path, scheme: str, change: Callable[[Path], None]
) -> None:
    config = bytes_of(f"{scheme}{source}", tmp_path / "cache")
    before = contents(config)
    change(source / "train")
    settle(source)
    expected = {str(each.relative_to(source)): each.read_text() for each in sorted(source.rglob("*.bin"))}
    assert expected != before
    assert contents(config) == expected


def test_file_rewritten_in_place_with_its_old_time_is_read_again_by_cache_warm(source: Path, tmp_path: Path) -> None:
    config = bytes_of(source)
    contents(config)
    write(source / "train" / "cat" / "1.bin", "CAT1")
    report = warm(config, "train")
    assert (report.present, report.fetched) == (5, 1)
    assert contents(config)["train/cat/1.bin"] == "CAT1"


def test_file_that_changed_during_a_run_and_was_restored_gives_its_own_contents(source: Path, tmp_path: Path) -> None:
    """The run reads contents that differ from the list. The disk cache does not keep them under the listed key."""
    config = bytes_of(source)
    load_or_list(config, "train")
    os.rename(source / "train" / "cat", source / "kept")
    for number in range(3):
        write(source / "train" / "cat" / f"{number}.bin", "other")
    manifest = load_or_list(config, "train")
    assert manifest.sizes.tolist() == [5, 5, 5, 4, 4, 4]
    shutil.rmtree(source / "train" / "cat")
    os.rename(source / "kept", source / "train" / "cat")
    store = SampleStore(config, manifest)
    assert store.get([0])[0].data.tobytes() == b"cat0"
    assert store.counters().changed == 1
    store.close()
    assert contents(config)["train/cat/0.bin"] == "cat0"


def test_files_on_fuse_mounts_have_no_tags(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many FUSE file systems change inode numbers at each mount. With tags, cached files would not be found again."""

    def tags() -> list[int]:
        files, _, _ = LocalStorage(str(source)).listing("train", "visible", lambda: None)
        return [tag for *_, tag in files]

    assert len(set(tags())) == 6
    assert 0 not in tags()
    monkeypatch.setattr(local_storage, "_volatile_devices", lambda: frozenset({os.stat(source).st_dev}))
    assert tags() == [0] * 6


def test_cache_warm_verify_names_and_replaces_samples_that_differ(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cached file differs from the source, as after a change that no listing shows."""
    command = ["cache", "warm", str(source), str(tmp_path / "cache"), "--bytes", "--splits", "train"]
    assert main(command) == 0
    config = bytes_of(source)
    manifest = load_or_list(config, "train")
    store = SampleStore(config, manifest)
    wrong = store.disk.get([manifest.key(4)])[0]
    assert wrong is not None
    store.disk.put(manifest.key(4), wrong._replace(data=b"OLD!"))
    store.close()
    capsys.readouterr()
    assert main([*command, "--verify"]) == 1
    output = capsys.readouterr().out
    assert "6 files, 6 cached before, 0 fetched" in output
    assert "1 replaced, which differed from the source" in output
    assert "  train/dog/1.bin: replaced, because the cached file differed from the source" in output
    assert main([*command, "--verify"]) == 0
    assert contents(config)["train/dog/1.bin"] == "dog1"


def test_source_that_is_missing_leaves_nothing_in_the_cache_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    config = bytes_of(tmp_path / "typo")
    with pytest.raises(DataError, match="has no folder train/"):
        load_or_list(config, "train")
    assert main_fails(["cache", "warm", str(tmp_path / "typo"), str(tmp_path / "cache")])
    assert not list((tmp_path / "cache").iterdir())
    assert caches(str(tmp_path / "cache")) == []


def main_fails(command: list[str]) -> bool:
    try:
        return main(command) != 0
    except (DataError, ValueError, SystemExit):
        return True
