"""Sources that fsspec opens: from a real server, and those that cannot be opened."""

from __future__ import annotations

import os
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lightning_sparse.cli import main
from lightning_sparse.data.cache.store import SampleStore
from lightning_sparse.data.config import CacheConfig, DataError
from lightning_sparse.data.sources import storage as storage_module
from lightning_sparse.data.sources.listing import classes_of, load_or_list
from lightning_sparse.data.sources.storage import ReaderProcess, Storage, Unreadable
from lightning_sparse.data.sources.storage_reader import FsspecStorage
from tests.data.small import jpeg, make_folder
from tests.data.stores import warnings_of

KEY = {"client_kwargs": {"headers": {"X-Key": "secret"}}}


class Server:
    """Serves a folder to those who know the key. requests: how often, by method and file type."""

    def __init__(self, folder: Path) -> None:
        requests = self.requests = Counter()

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                requests[self.command, Path(self.path).suffix] += 1
                if self.headers.get("X-Key") != "secret":
                    return self.send_error(403)
                return super().do_GET() if self.command == "GET" else super().do_HEAD()

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("aiohttp", reason="fsspec opens http with it")
    serving = Server(make_folder(tmp_path / "pictures", per_class=3, classes=2))
    yield serving
    serving.close()


def config_of(source: str, tmp_path: Path, **more: object) -> CacheConfig:
    return CacheConfig(source=source, cache_dir=str(tmp_path / "cache"), memory_gb=0.01, **more)  # type: ignore[arg-type]


def test_a_file_is_one_request(server: Server, tmp_path: Path) -> None:
    config = config_of(server.url, tmp_path, storage_options=KEY, format="jpeg")
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


def test_the_command_line_passes_options(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = '{"client_kwargs": {"headers": {"X-Key": "secret"}}}'
    assert main(["cache", "warm", server.url, str(tmp_path / "cache"), "--storage-options", options]) == 0
    assert "train: 6 files, 0 cached before, 6 fetched" in capsys.readouterr().out


def test_a_source_that_fsspec_cannot_open_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fsspec knows no protocol 's4'. Check its spelling"):
        config_of("s4://bucket/pictures", tmp_path)
    with pytest.raises(ValueError, match="fsspec knows no protocol 'htp'"):
        config_of("zip://::htp://there/x.zip", tmp_path)
    with pytest.raises(ValueError, match="storage_options are for an fsspec URL"):
        config_of("/mnt/nfs", tmp_path, storage_options={"key": "a"})
    with pytest.raises(ValueError, match="must be plain values"):
        config_of("memory://there", tmp_path, storage_options={"key": object()})
    with pytest.raises(DataError, match=r"source=zip://there cannot be used: .*IsADirectoryError"):
        load_or_list(config_of("zip://there", tmp_path), "train")
    options = {"client_kwargs": {"nonsense": 1}}
    with pytest.raises(DataError, match=r"cannot be used: TypeError: .*nonsense"):
        load_or_list(config_of("http://127.0.0.1:9", tmp_path, storage_options=options), "train")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever package fsspec would need for a protocol that it knows."""
    from fsspec.registry import known_implementations

    missing = {"class": "not_there.Nowhere", "err": "Install not_there to access it"}
    monkeypatch.setitem(known_implementations, "nowhere", missing)
    with pytest.raises(ValueError, match="needs a package that is not installed: Install not_there to access it"):
        config_of("nowhere://bucket", tmp_path)


SLOW = """
import time
time.sleep(3)
from fsspec.implementations.local import LocalFileSystem
class Slow(LocalFileSystem):
    protocol = "slow"
"""


def test_what_the_import_of_a_file_system_takes_is_no_silence_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That of s3fs takes seconds on a busy machine."""
    source, packages = make_folder(tmp_path / "pictures", per_class=1, classes=2), tmp_path / "packages"
    (packages / "slow_fs-1.dist-info").mkdir(parents=True)
    (packages / "slow_fs-1.dist-info" / "entry_points.txt").write_text("[fsspec.specs]\nslow = slow_fs.Slow\n")
    (packages / "slow_fs-1.dist-info" / "METADATA").write_text("Name: slow-fs\nVersion: 1\n")
    (packages / "slow_fs.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), *sys.path]))
    monkeypatch.setattr(storage_module, "RESTART_S", 0.5)  # shorter than the import, as that of a busy machine may be
    started: list[str] = []
    monkeypatch.setattr(storage_module, "ReaderProcess", lambda *args: started.append("one") or ReaderProcess(*args))
    with Storage(config_of(str(source), tmp_path), f"slow://{source}", timeout=2.0) as storage:
        assert storage.names("").keys() == {"train"}
    assert started == ["one"]
    assert not warnings_of(caplog)


class Bucket:
    """As S3 lists one in which a console has made folders: an empty object marks each."""

    def ls(self, path: str, detail: bool) -> list[dict[str, object]]:
        return [{"name": f"{path}/", "type": "file", "size": 0}, {"name": f"{path}/0.bin", "type": "file", "size": 4}]

    def find(self, path: str, detail: bool, withdirs: bool) -> dict[str, dict[str, object]]:
        return {str(each["name"]): each for each in self.ls(path, detail)}


@pytest.mark.parametrize("kind", ["here", "visible"])
def test_what_marks_a_folder_is_no_file(kind: str) -> None:
    storage = FsspecStorage("memory://", {})
    storage._fs, storage._root = Bucket(), "bucket/data"
    assert storage.listing("train", kind, lambda: None) == ([("train/0.bin", 4, 0, 0)], [], [])


@pytest.mark.parametrize("format", ["bytes", "jpeg"])
def test_web_server_gives_the_samples_of_its_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    """Index pages and their links are not samples; names and labels equal the names and labels on a mount. A web server
    lists no sizes, so that nothing seems changed, and all samples fit in memory."""
    pytest.importorskip("aiohttp", reason="fsspec opens http with it")
    folder, number = tmp_path / "pictures", 0
    for name in ("b c", "ä", "10%41", "[x]&#1"):
        for inner in ("1.jpg", "deep er/2#?.jpg", "deep er/.hidden.jpg"):
            (folder / "train" / name / inner).parent.mkdir(parents=True, exist_ok=True)
            (folder / "train" / name / inner).write_bytes(jpeg(number))
            number += 1
    server = Server(folder)
    try:
        config = config_of(server.url, tmp_path, storage_options=KEY, format=format)
        found = load_or_list(config, "train")
        expected = load_or_list(config_of(str(folder), tmp_path, format=format), "train")
        assert (list(found.paths), found.classes) == (list(expected.paths), expected.classes)
        assert found.labels.tolist() == expected.labels.tolist()
        store = SampleStore(config, found)
        for _ in range(2):
            samples = store.get(range(8))
            assert [each.data.tobytes() for each in samples] == [(folder / path).read_bytes() for path in found.paths]
        counts = store.counters()
        assert (counts.storage_samples, counts.memory_samples, counts.disk_samples, counts.changed) == (8, 8, 0, 0)
        store.close()
    finally:
        server.close()
    assert not warnings_of(caplog)


def test_web_server_that_ignores_ranges_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="fsspec opens http with it")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "0.bin").write_bytes(b"0123456789")
    server = Server(tmp_path / "pictures")
    try:
        with Storage(config_of(server.url, tmp_path, storage_options=KEY)) as storage:
            (found,) = storage.read([("0.bin", 2, 5)])
    finally:
        server.close()
    assert found == Unreadable(
        "storage returned 10 bytes for bytes 2 to 5. If the file has become shorter, run `lightning-sparse cache warm` "
        "to list the source again. Otherwise its server cannot send parts of files"
    )


def test_tar_source_with_mixed_member_names_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("./train/c/0.bin", "train/c/1.bin"):
            tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(DataError, match=r"the names of some members begin with \./, but not all \(train\)"):
        load_or_list(config_of(f"tar://::file://{tmp_path / 'a.tar'}", tmp_path, format="bytes"), "train")


def test_only_file_systems_known_to_be_thread_safe_are_read_by_threads_at_once(tmp_path: Path) -> None:
    import zipfile

    zipfile.ZipFile(tmp_path / "a.zip", "w").close()
    for url in (f"zip://::file://{tmp_path}/a.zip", f"simplecache::file://{tmp_path}", f"dir::file://{tmp_path}"):
        assert hasattr(FsspecStorage(url, {}).turn, "acquire"), url
    for url in ("memory://", "http://127.0.0.1"):
        assert not hasattr(FsspecStorage(url, {}).turn, "acquire"), url
