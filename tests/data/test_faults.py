"""Full disks, killed runs and caches of other versions do not end a run."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from lightning_sparse.cli import main
from lightning_sparse.data.cache.commands import warm
from lightning_sparse.data.config import DataError
from lightning_sparse.data.folders import cache_folder
from tests.data.programs import program
from tests.helpers.data import Open, config_of, contents, make_folder, store_of, warnings_of

# -- filling the disk --------------------------------------------------------------------------------------------------


FILL = """
import itertools, os, signal, sys
from lightning_sparse.data.cache import disk
from lightning_sparse.cli import main
files, packed = itertools.count(1), disk._packed

def dies(*arguments):
    if next(files) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return packed(*arguments)

disk._packed, disk.BATCH_BYTES = dies, 20_000
main(["cache", "warm", sys.argv[1], sys.argv[2], "--splits", "train", "--threads", "1"])
"""


def test_killed_fill_continues_in_the_next_run(tmp_path: Path) -> None:
    """The next run reads only the missing files from storage."""
    folder = make_folder(tmp_path / "pictures", per_class=150, classes=2)
    config, dies_at = config_of(folder), random.randrange(100, 300)
    with program(FILL, folder, config.cache_dir, dies_at) as fill:
        assert fill.wait().status == -signal.SIGKILL
    report = warm(config, "train")
    assert (report.files, report.present + report.fetched) == (300, 300)
    assert 30 < report.present < dies_at
    again = warm(config, "train")
    assert (again.present, again.fetched) == (300, 0)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 400 kB."""
    place = tmp_path / "tiny"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tiny", str(place)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("needs root to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("reserve", [0.05, 0.0])
def test_full_disk_stops_caching_but_not_the_run(
    tiny_disk: Path,
    tmp_path: Path,
    stores: Open,
    reserve: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The cache stops before the disk is full, or, without a reserve, at ENOSPC in a batch."""
    monkeypatch.setattr("lightning_sparse.data.cache.disk.RESERVE_SHARE", reserve)
    monkeypatch.setattr("lightning_sparse.data.cache.disk.BATCH_BYTES", 30_000)
    if not reserve:
        monkeypatch.setattr("lightning_sparse.data.cache.disk.DiskCache._room", lambda self: (1 << 40, ""))
    folder = make_folder(tmp_path / "pictures", per_class=200, classes=2)
    store = store_of(folder, stores, cache=tiny_disk, memory_gb=0)
    expected = [(folder / path).read_bytes() for path in store.manifest.paths]
    assert contents(store) == expected
    assert contents(store) == expected
    counts = store.counters()
    assert 50 < counts.disk_samples < 350
    assert counts.disk_samples + counts.storage_samples == 800  # other files are read again
    said = [text for text in warnings_of(caplog) if "stops at" in text]
    assert len(said) == 1
    assert ("of the disk are free" if reserve else "the write failed") in said[0]


def test_warm_does_not_count_files_that_did_not_fit(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pictures", per_class=3, classes=2)
    report = warm(config_of(folder, disk_gb=1e-6), "train")
    assert (report.files, report.fetched, report.full) == (6, 0, True)
    assert "0 fetched" in report.describe()
    assert "6 did not fit" in report.describe()


# -- other runs --------------------------------------------------------------------------------------------------------


def test_files_of_a_cache_are_private(folder: Path, stores: Open) -> None:
    former = os.umask(0)
    try:
        store = store_of(folder, stores)
        contents(store)
        store.disk.flush()
        places = [*(folder.parent / "cache").rglob("*"), folder.parent / "cache"]
        for place in places:
            assert place.stat().st_mode & 0o777 == (0o700 if place.is_dir() else 0o600), place
    finally:
        os.umask(former)


def test_cache_of_another_version_is_kept(folder: Path, stores: Open, capsys: pytest.CaptureFixture[str]) -> None:
    """The name of the folder contains the version of the layout. Another version inside a file is an error."""
    store = store_of(folder, stores)
    own = cache_folder(store.config)
    store.close()
    other = own.with_name(own.name.replace("v2-", "v7-"))
    os.rename(own, other)
    assert len(contents(store_of(folder, stores))) == 20
    stores[-1].close()
    assert main(["cache", "info", str(own.parent)]) == 0
    printed = capsys.readouterr().out
    assert "version 7, which this version does not use" in printed
    assert "train: 20 of 20 files" in printed
    path = own / "train.lmdb"
    with lmdb.open(str(path), map_size=1 << 30) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"format", b"lightning_sparse disk cache 1")
    with pytest.raises(DataError, match="written by another version.*cache clear"):
        store_of(folder, stores)
    capsys.readouterr()
    assert main(["cache", "clear", str(own.parent), "--source", "another"]) == 0
    assert f"no cache of another found. There are caches of: {folder}\n" in capsys.readouterr().out
    assert main(["cache", "clear", str(own.parent), "--source", str(folder)]) == 0
    assert list(own.parent.iterdir()) == []


def test_command_line_warms_the_files_of_a_node(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(folder, per_class=2, classes=2, split="val")
    for number in range(2):  # each node owns one file
        (folder / "val" / "c1" / f"{number}.jpg").write_bytes(b"")
    cache = str(folder.parent / "cache")
    assert main(["cache", "warm", str(folder), cache, "--nodes", "2", "--node", "1"]) == 1
    printed = capsys.readouterr().out
    assert "train: 10 files, 0 cached before, 10 fetched" in printed
    assert main(["cache", "warm", str(folder), cache, "--on-corrupt", "skip"]) == 0
    printed = capsys.readouterr().out
    assert "train: 20 files, 10 cached before, 10 fetched" in printed
    assert re.search(r"val: 4 files, 1 cached before, 1 fetched \([\d.]+ kB\), 2 corrupt", printed)
    assert "val/c1/0.jpg: the file is empty" in printed
    assert main(["cache", "warm", str(folder.parent / "nowhere"), cache]) == 2
    assert "no folder train/" in capsys.readouterr().err


def test_command_line_prunes_files_that_left_the_source(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["cache", "warm", str(folder), str(folder.parent / "cache"), "--splits", "train"]
    assert main(command) == 0
    for path in sorted((folder / "train" / "c0").iterdir())[:2]:
        path.unlink()
    assert main(command) == 0
    assert "18 cached before, 0 fetched (0 B)\n" in capsys.readouterr().out
    assert main([*command, "--prune"]) == 0
    assert "18 cached before, 0 fetched (0 B), 2 removed\n" in capsys.readouterr().out
