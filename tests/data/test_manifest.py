"""The list of samples, the ownership of samples, and options. Only listing reads a folder."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse.data import folders
from lightning_sparse.data.cache.store import owners
from lightning_sparse.data.config import DataError
from lightning_sparse.data.folders import NETWORK_FILE_SYSTEMS, cache_folder, file_system, locked, write_private
from lightning_sparse.data.sources import listing, storage
from lightning_sparse.data.sources.listing import classes_of, load_or_list
from lightning_sparse.data.sources.manifest import Manifest, Paths
from lightning_sparse.data.sources.storage import Storage, StoredFile
from tests.helpers.data import config_of, jpeg, listed, make_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "pictures")


def manifest_of(*paths: str) -> Manifest:
    zeros = np.zeros(len(paths), np.int64)
    return Manifest("train", "/somewhere", ("c",), paths, zeros, zeros, zeros)


# -- listing -----------------------------------------------------------------------------------------------------------


KILLED = """
import os, signal, sys
from pathlib import Path
from lightning_sparse.data.folders import write_private
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write_private(Path(sys.argv[1]), b"half")
"""


def test_unfinished_file_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not path.exists()
    write_private(path, b"whole")
    assert path.read_bytes() == b"whole"
    assert [each.name for each in tmp_path.iterdir()] == ["cache.json"]


def test_links_are_followed_as_imagefolder_follows_them(folder: Path, tmp_path: Path) -> None:
    """Links to files and folders, inside and outside the source: subsets and caches of other tools consist of links."""
    outside = make_folder(tmp_path / "blobs", per_class=3, classes=1) / "train" / "c0"
    (folder / "train" / "c0" / "9.jpg").symlink_to(outside / "1.jpg")
    (folder / "train" / "c0" / "linked").symlink_to(outside)
    (folder / "train" / "c1" / "sibling").symlink_to(folder / "train" / "c2")
    (folder / "train" / "zoo").symlink_to(outside)
    manifest = listed(folder)
    datasets = pytest.importorskip("torchvision.datasets")
    expected = [
        (os.path.relpath(path, folder), label) for path, label in datasets.ImageFolder(folder / "train").samples
    ]
    assert sorted(zip(manifest.paths, manifest.labels.tolist(), strict=True)) == sorted(expected)
    assert len(manifest) == 12 + 1 + 3 + 4 + 3
    reader = Storage(config_of(folder))
    for path, answer in zip(manifest.paths, reader.read(list(manifest.paths)), strict=True):
        assert isinstance(answer, StoredFile)
        assert answer.data == (folder / path).read_bytes()
    reader.close()


def test_cycle_of_links_is_left_out(folder: Path) -> None:
    before = list(listed(folder).paths)
    (folder / "train" / "c1" / "up").symlink_to(folder / "train")
    (folder / "train" / "c1" / "self").symlink_to(folder / "train" / "c1")
    found = list(listed(folder).paths)
    assert set(before) < set(found)
    assert "train/c1/up/c0/0.jpg" in found  # as ImageFolder lists it
    assert not [path for path in found if "up/c1/up" in path or "self" in path.split("/")[2]]


CHANGES = {
    "a file is added": lambda root: (root / "train" / "c0" / "9.jpg").write_bytes(jpeg(9)),
    "a file is added deeper": lambda root: (root / "train" / "c0" / "deep" / "9.jpg").write_bytes(jpeg(9)),
    "a file is removed": lambda root: (root / "train" / "c1" / "2.jpg").unlink(),
    "a file is replaced": lambda root: os.replace(root / "train" / "c1" / "2.jpg", root / "train" / "c0" / "1.jpg"),
    "a folder is removed": lambda root: shutil.rmtree(root / "train" / "c0" / "deep"),
    "a class is added": lambda root: make_folder(root / "x", 2, 1).joinpath("train/c0").rename(root / "train" / "bee"),
    "a class is removed": lambda root: shutil.rmtree(root / "train" / "c0"),
    "a class is renamed": lambda root: os.rename(root / "train" / "c0", root / "train" / "zebra"),
}


def deep(folder: Path) -> Path:
    (folder / "train" / "c0" / "deep").mkdir()
    (folder / "train" / "c0" / "deep" / "0.jpg").write_bytes(jpeg(7))
    return folder


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_the_source_is_noticed(
    folder: Path, tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = config_of(deep(folder))
    first = load_or_list(cache, "train")
    assert classes_of(cache, "train")[0] == first.classes
    time.sleep(0.02)  # the resolution of times on this file system
    CHANGES[change](folder)
    caplog.set_level(logging.INFO, "lightning_sparse")
    again, fresh = load_or_list(cache, "train"), listed(folder)
    assert again.fingerprint == fresh.fingerprint != first.fingerprint
    assert again.classes == classes_of(cache, "train")[0] == fresh.classes
    assert ["listing train/ again" in record.getMessage() for record in caplog.records] == [True]


def test_source_that_did_not_change_is_not_listed_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = config_of(deep(folder))
    first = load_or_list(cache, "train")
    monkeypatch.setattr(listing, "list_source", None)
    again = load_or_list(cache, "train")
    assert (again.fingerprint, again.classes, list(again.paths)) == (first.fingerprint, first.classes, [*first.paths])
    monkeypatch.undo()
    (folder / "train" / "c0" / "0.jpg").write_bytes(b"overwritten in place, which does not change the folder")
    assert load_or_list(cache, "train").fingerprint == first.fingerprint
    assert load_or_list(cache, "train", relist=True).fingerprint != first.fingerprint


@pytest.mark.parametrize("away", ["gone", "not mounted", "silent"])
def test_source_that_does_not_answer_is_used_as_last_listed(
    folder: Path, tmp_path: Path, away: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run whose files are all on local disk does not need storage."""
    cache = config_of(folder)
    first = load_or_list(cache, "train")
    if away == "silent":
        (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
        monkeypatch.setattr(storage, "_READER", tmp_path / "hangs.py")
        monkeypatch.setattr(storage, "START_S", 0.5)
        monkeypatch.setattr(listing, "CHECK_S", 0.5)
    else:
        shutil.rmtree(folder)
    if away == "not mounted":
        folder.mkdir()
    assert load_or_list(cache, "train").fingerprint == first.fingerprint
    assert classes_of(cache, "train")[0] == first.classes
    assert "using the list of train/ in the cache, because storage did not answer" in caplog.text


def test_damaged_list_is_created_again(folder: Path, tmp_path: Path) -> None:
    cache = config_of(folder)
    first = load_or_list(cache, "train")
    kept = cache_folder(cache) / "train.manifest"
    whole = kept.read_bytes()
    data = bytearray(whole)
    data[data.index(b"c1/2.jpg")] ^= 1
    for damaged in (bytes(data), whole[:-100], b"", b"nonsense"):
        kept.write_bytes(damaged)
        assert list(load_or_list(cache, "train").paths) == list(first.paths)


@pytest.mark.parametrize("path", ["../x.jpg", "/etc/passwd", "a/../../x.jpg", "a\0b"])
def test_manifest_path_outside_the_source_is_refused(path: str) -> None:
    with pytest.raises(DataError, match="outside the source"):
        manifest_of("train/c/0.jpg", path)
    with pytest.raises(ValueError, match="split="):
        listed("/somewhere", "../train")


def test_manifest_survives_serialization() -> None:
    manifest = manifest_of("train/c/ä.jpg", "train/c/\udcff.jpg", "")
    manifest = replace(manifest, folders=Paths.of(["train/c"]), folder_stamps=np.array([7]))
    for copy in (Manifest.load(manifest.to_bytes()), pickle.loads(pickle.dumps(manifest))):
        assert list(copy.paths) == [copy.paths[i] for i in range(3)] == ["train/c/ä.jpg", "train/c/\udcff.jpg", ""]
        assert copy.fingerprint == manifest.fingerprint
        assert (copy.paths[-1], list(copy.paths)[1:]) == ("", ["train/c/\udcff.jpg", ""])
        assert list(copy.folders) == ["train/c"]
    assert list(Paths.of(["a", "b"])) == ["a", "b"]


@pytest.mark.parametrize(
    ("device", "kind", "name"),
    [
        ("server:/export", "nfs4", "nfs4"),
        ("fs1", "gpfs", "gpfs"),
        ("backend0", "wekafs", "wekafs"),
        ("panfs://realm/x", "panfs", "panfs"),
        ("share0", "virtiofs", "virtiofs"),
        ("dfuse", "fuse.daos", "fuse.daos"),
        ("mountpoint-s3", "fuse", "fuse.mountpoint-s3"),
    ],
)
def test_network_file_systems_are_recognized(tmp_path: Path, device: str, kind: str, name: str) -> None:
    """The format is the format of /proc/mounts."""
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\n{device} {tmp_path} {kind} rw,relatime 0 0\n")
    assert file_system(tmp_path / "cache", mounts) == name in NETWORK_FILE_SYSTEMS
    assert file_system(Path("/var"), mounts) == "ext4"


# -- ownership ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), max_size=200), st.integers(1, 7), st.integers(0, 2**63))
def test_ownership_is_even(labels: list[int], nodes: int, seed: int) -> None:
    array = np.array(labels, np.int64)
    owner = owners(array, nodes, seed)
    assert np.array_equal(owner, owners(array, nodes, seed))
    for members in (owner, *(owner[array == label] for label in range(6))):
        counts = np.bincount(members, minlength=nodes)
        assert counts.max() - counts.min() <= 1


def test_ownership_follows_the_seed_and_mixes_classes() -> None:
    labels = np.repeat(np.arange(10), 100)
    first, second = owners(labels, 2, seed=0), owners(labels, 2, seed=1)
    assert 0.4 < (first == second).mean() < 0.6
    assert 0.3 < (first[:-1] == first[1:]).mean() < 0.7  # a contiguous split would give long runs


def test_waiting_for_a_lock_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The lock may belong to a suspended process."""
    monkeypatch.setattr(folders, "WAIT_S", 0.05)
    caplog.set_level(logging.INFO, "lightning_sparse")
    with locked(tmp_path):
        waiting = threading.Thread(target=lambda: locked(tmp_path).__enter__())
        waiting.start()
        while not caplog.records:
            time.sleep(0.01)
    waiting.join()
    assert f"waiting for another process of this node that uses {tmp_path}" in caplog.text
    with locked(tmp_path / "free"):
        pass
    assert len(caplog.records) == 1
