"""Sources that fsspec opens, from a real server, and sources that it cannot open."""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_sparse.cli import main
from lightning_sparse.data.cache.store import SampleStore
from lightning_sparse.data.config import DataError
from lightning_sparse.data.sources import storage as storage_module
from lightning_sparse.data.sources.listing import classes_of, load_or_list
from lightning_sparse.data.sources.storage import ReaderProcess, Storage, Unreadable
from lightning_sparse.data.sources.url_storage import FsspecStorage
from tests.helpers.data import KEY, Server, config_of, jpeg, make_folder, warnings_of, write


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(make_folder(tmp_path / "pictures", per_class=3, classes=2)) as serving:
        yield serving


def test_files_are_read_in_one_request_each(server: Server, tmp_path: Path) -> None:
    config = config_of(server.url, tmp_path / "cache", storage_options=KEY, format="jpeg")
    assert classes_of(config, "train")[0] == ("c0", "c1")
    store = SampleStore(config, load_or_list(config, "train"))
    server.requests.clear()
    samples = store.get(range(6))
    store.close()
    assert server.requests == {("GET", ".jpg"): 6}
    for sample, path in zip(samples, store.manifest.paths, strict=True):
        assert sample.data.tobytes() == (tmp_path / "pictures" / path).read_bytes()
    assert store.manifest.labels.tolist() == [0, 0, 0, 1, 1, 1]
    load_or_list(config, "train")
    assert "secret" not in repr(config)


def test_command_line_passes_options(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = '{"client_kwargs": {"headers": {"X-Key": "secret"}}}'
    assert main(["cache", "warm", server.url, str(tmp_path / "cache"), "--storage-options", options]) == 0
    assert "train: 6 files, 0 cached before, 6 fetched" in capsys.readouterr().out


def test_source_that_fsspec_cannot_open_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fsspec knows no protocol 's4'. Check its spelling"):
        config_of("s4://bucket/pictures", tmp_path / "cache")
    with pytest.raises(ValueError, match="fsspec knows no protocol 'htp'"):
        config_of("zip://::htp://there/x.zip", tmp_path / "cache")
    with pytest.raises(ValueError, match="must be plain values"):
        config_of("memory://there", tmp_path / "cache", storage_options={"key": object()})
    with pytest.raises(DataError, match=r"source=zip://there cannot be used: .*IsADirectoryError"):
        load_or_list(config_of("zip://there", tmp_path / "cache"), "train")
    options = {"client_kwargs": {"nonsense": 1}}
    with pytest.raises(DataError, match=r"cannot be used: TypeError: .*nonsense"):
        load_or_list(config_of("http://127.0.0.1:9", tmp_path / "cache", storage_options=options), "train")


def test_missing_package_of_fsspec_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for every protocol that fsspec knows."""
    from fsspec.registry import known_implementations

    missing = {"class": "not_there.Nowhere", "err": "Install not_there to access it"}
    monkeypatch.setitem(known_implementations, "nowhere", missing)
    with pytest.raises(ValueError, match="needs a package that is not installed: Install not_there to access it"):
        config_of("nowhere://bucket", tmp_path / "cache")


SLOW = """
import time
time.sleep(1.5)
from fsspec.implementations.local import LocalFileSystem
class Slow(LocalFileSystem):
    protocol = "slow"
"""


def test_slow_import_of_a_file_system_does_not_restart_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The import of s3fs takes seconds on a busy machine."""
    source, packages = make_folder(tmp_path / "pictures", per_class=1, classes=2), tmp_path / "packages"
    (packages / "slow_fs-1.dist-info").mkdir(parents=True)
    (packages / "slow_fs-1.dist-info" / "entry_points.txt").write_text("[fsspec.specs]\nslow = slow_fs.Slow\n")
    (packages / "slow_fs-1.dist-info" / "METADATA").write_text("Name: slow-fs\nVersion: 1\n")
    (packages / "slow_fs.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), *sys.path]))
    monkeypatch.setattr(storage_module, "RESTART_S", 0.5)  # shorter than the import
    started: list[str] = []
    monkeypatch.setattr(storage_module, "ReaderProcess", lambda *args: started.append("one") or ReaderProcess(*args))
    with Storage(config_of(source), f"slow://{source}", timeout=1.0) as storage:
        assert storage.names("").keys() == {"train"}
    assert started == ["one"]
    assert not warnings_of(caplog)


class Bucket:
    """Lists a folder as S3 does after a console has created it: an empty object marks the folder."""

    def ls(self, path: str, detail: bool) -> list[dict[str, object]]:
        return [{"name": f"{path}/", "type": "file", "size": 0}, {"name": f"{path}/0.bin", "type": "file", "size": 4}]

    def find(self, path: str, detail: bool, withdirs: bool) -> dict[str, dict[str, object]]:
        return {str(each["name"]): each for each in self.ls(path, detail)}


@pytest.mark.parametrize("kind", ["here", "visible"])
def test_s3_folder_marker_is_not_a_file(kind: str) -> None:
    storage = FsspecStorage("memory://", {})
    storage._fs, storage._root = Bucket(), "bucket/data"
    assert storage.listing("train", kind, lambda: None) == ([("train/0.bin", 4, 0, 0)], [], [])


@pytest.mark.parametrize("format", ["bytes", "jpeg"])
def test_web_server_source_equals_its_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture, format: str) -> None:
    """Index pages and their links are not samples. Names and labels equal the names and labels on a mount.

    A web server lists no sizes, so that nothing seems changed, and all samples fit in memory.
    """
    folder, number = tmp_path / "pictures", 0
    for name in ("b c", "ä", "10%41", "[x]&#1"):
        for inner in ("1.jpg", "deep er/2#?.jpg", "deep er/.hidden.jpg"):
            write(folder / "train" / name / inner, jpeg(number))
            number += 1
    with Server(folder) as server:
        config = config_of(server.url, tmp_path / "cache", storage_options=KEY, format=format)
        found = load_or_list(config, "train")
        expected = load_or_list(config_of(folder, format=format), "train")
        assert (list(found.paths), found.classes) == (list(expected.paths), expected.classes)
        assert found.labels.tolist() == expected.labels.tolist()
        store = SampleStore(config, found)
        for _ in range(2):
            samples = store.get(range(8))
            assert [each.data.tobytes() for each in samples] == [(folder / path).read_bytes() for path in found.paths]
        counts = store.counters()
        assert (counts.storage_samples, counts.memory_samples, counts.disk_samples, counts.changed) == (8, 8, 0, 0)
        store.close()
    assert not warnings_of(caplog)


def test_web_server_that_ignores_ranges_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "pictures" / "0.bin", b"0123456789")
    with (
        Server(tmp_path / "pictures") as server,
        Storage(config_of(server.url, tmp_path / "cache", storage_options=KEY)) as storage,
    ):
        (found,) = storage.read([("0.bin", 2, 5)])
    assert found == Unreadable(
        "storage returned 10 bytes for bytes 2 to 5. If the file has become shorter, run `lightning-sparse cache warm` "
        "to list the source again. Otherwise its server cannot send parts of files"
    )


def test_tar_source_with_mixed_member_names_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("./train/c/0.bin", "train/c/1.bin"):
            tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(DataError, match=r"the names of some members begin with \./, but not all \(train\)"):
        load_or_list(config_of(f"tar://::file://{tmp_path / 'a.tar'}", tmp_path / "cache", format="bytes"), "train")


def test_only_thread_safe_file_systems_are_read_in_parallel(tmp_path: Path) -> None:
    import zipfile

    zipfile.ZipFile(tmp_path / "a.zip", "w").close()
    for url in (f"zip://::file://{tmp_path}/a.zip", f"simplecache::file://{tmp_path}", f"dir::file://{tmp_path}"):
        assert hasattr(FsspecStorage(url, {}).turn, "acquire"), url
    for url in ("memory://", "http://127.0.0.1"):
        assert not hasattr(FsspecStorage(url, {}).turn, "acquire"), url
