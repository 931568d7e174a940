"""A run waits for storage that pauses, and names storage that never answers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.data.cache.store import SampleStore
from lightning_sparse.data.config import DataError
from lightning_sparse.data.sources import storage, storage_reader
from lightning_sparse.data.sources.local_storage import LocalStorage
from lightning_sparse.data.sources.storage import StorageTimeoutError
from tests.data.programs import run
from tests.helpers.data import Open, config_of, contents, listed, sshfs_mount, store_of, warnings_of

PACKAGES = str(Path(storage.__file__).parents[3])
"""The folder with this package."""


def reader_of(store: SampleStore) -> int:
    reader = store._tiers().storage._reader
    assert reader is not None
    return reader._child.process.pid


def after_warning(caplog: pytest.LogCaptureFixture, act: Callable[..., None], *args: Any) -> threading.Thread:
    """Call ``act(*args)`` in a thread, once the run has logged a warning."""

    def wait() -> None:
        while not warnings_of(caplog):
            time.sleep(0.02)
        act(*args)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_run_waits_for_storage_that_pauses(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader process is stopped, as a read from a dead mount would stop it."""
    monkeypatch.setattr(storage, "RETRY_S", 0.1)
    store = store_of(folder, stores)
    store.get([0])
    monkeypatch.setattr(storage, "WARN_S", 0.3)  # after the reader has started, which takes longer on a busy machine
    reader = reader_of(store)
    os.kill(reader, signal.SIGSTOP)
    after_warning(caplog, os.kill, reader, signal.SIGCONT)
    assert len(contents(store)) == 20
    assert reader_of(store) == reader
    first, second = warnings_of(caplog)
    assert "does not respond: waiting up to 300 s" in first
    assert "responds again after" in second


def test_storage_that_never_answers_ends_the_run(folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "RETRY_S", 0.1)
    store = store_of(folder, stores)
    store.get([0])
    store._tiers().storage.timeout = 0.5  # after the reader has started, which takes longer on a busy machine
    os.kill(reader_of(store), signal.SIGSTOP)
    with pytest.raises(StorageTimeoutError, match=r"has not responded for .* storage_timeout=0.5"):
        store.get(range(20))


def test_reader_that_dies_or_hangs_is_replaced(folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "RETRY_S", 0.1)
    monkeypatch.setattr(storage, "RESTART_S", 0.5)
    store = store_of(folder, stores)
    store.get([0])
    os.kill(reader_of(store), signal.SIGKILL)
    assert store.get([1])
    os.kill(reader_of(store), signal.SIGSTOP)
    assert store.get([2])


def test_slow_listing_is_not_restarted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder of a million files takes minutes; its entries arrive one after another."""
    slow = tmp_path / "slow.py"
    slow.write_text(f"""
import sys, time
sys.path.insert(0, {PACKAGES!r})
from lightning_sparse.data.sources import storage_reader
from lightning_sparse.data.sources import local_storage
walk, local_storage.PROGRESS_S = local_storage.LocalStorage._walk, 0.1
def slowly(self, *args):
    for each in walk(self, *args):
        time.sleep(0.1)
        yield each
local_storage.LocalStorage._walk = slowly
open({str(tmp_path / "starts")!r}, "a").write("started ")
storage_reader.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
""")
    monkeypatch.setattr(storage, "_READER", slow)
    monkeypatch.setattr(storage, "RETRY_S", 0.1)
    monkeypatch.setattr(storage, "RESTART_S", 1.0)
    assert len(listed(folder, storage_timeout=1.5)) == 20
    assert (tmp_path / "starts").read_text() == "started "


def test_storage_request_that_always_loses_its_connection_raises(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try reads some entries, which resets the timeout, and then loses its connection."""
    breaks = tmp_path / "breaks.py"
    breaks.write_text(f"""
import sys, time
sys.path.insert(0, {PACKAGES!r})
from lightning_sparse.data.sources import storage_reader
def fails(self, path, kind, progress):
    progress()
    raise TimeoutError("connection lost")
storage_reader.LocalStorage.listing = fails
storage_reader.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
""")
    monkeypatch.setattr(storage, "_READER", breaks)
    monkeypatch.setattr(storage, "RETRY_S", 0.05)
    with (
        storage.Storage(config_of(folder), timeout=2.0) as source,
        pytest.raises(
            DataError, match=r"a request \(list train\) began and failed \d+ times: .*connection lost\. Check"
        ),
    ):
        list(source.listing(["train"]))


def test_thread_that_waits_for_a_closed_store_raises(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that read ahead wait so when a run ends. They must not hang or start another reader."""
    monkeypatch.setattr(storage, "RETRY_S", 0.1)
    store = store_of(folder, stores)
    store.get([0])
    opened = store._tiers().storage
    os.kill(reader_of(store), signal.SIGSTOP)
    threading.Timer(0.5, opened.close).start()
    with pytest.raises(DataError, match="was closed"):
        store.get([1])
    assert opened._reader is None


def test_run_waits_for_a_folder_that_is_not_mounted(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(storage, "WARN_S", 0.3)
    monkeypatch.setattr(storage, "RETRY_S", 0.1)
    store = store_of(folder, stores, on_corrupt="skip")
    away = folder.with_name("away")
    os.rename(folder, away)
    folder.mkdir()  # an empty mount point

    def mount() -> None:
        folder.rmdir()
        os.rename(away, folder)

    after_warning(caplog, mount)
    assert [sample.index for sample in store.get(range(20))] == list(range(20))
    assert store.counters().replaced == 0
    assert "does not respond" in warnings_of(caplog)[0]


def test_missing_file_is_read_again_if_storage_is_mounted_after_the_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = next(each for each in folder.rglob("*") if each.is_file())
    contents, away = path.read_bytes(), folder.with_name("away")
    os.rename(folder, away)
    folder.mkdir()

    def mount(_: LocalStorage) -> bool:
        folder.rmdir()
        os.rename(away, folder)
        return True

    monkeypatch.setattr(LocalStorage, "alive", mount)
    source = storage_reader.Source(str(folder), {})
    status, read, *_ = storage_reader.answer(source, "read", (str(path.relative_to(folder)),), lambda: None)
    assert (status, bytes(read)) == (storage_reader.OK, contents)


@pytest.mark.sshfs
def test_run_waits_for_a_mount_that_stops_answering(
    folder: Path, tmp_path: Path, stores: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In epoch 1 the run waits and continues. In epoch 2 it reads only from memory."""
    monkeypatch.setattr(storage, "RETRY_S", 0.1)
    with sshfs_mount(folder, tmp_path / "mount") as server:
        store = store_of(tmp_path / "mount", stores)
        store.get(range(5))
        monkeypatch.setattr(storage, "WARN_S", 0.3)
        os.kill(server, signal.SIGSTOP)
        continues = after_warning(caplog, os.kill, server, signal.SIGCONT)
        assert len(contents(store)) == 20
        continues.join()
        assert "does not respond: waiting up to 300 s" in warnings_of(caplog)[0]
        assert "responds again after" in warnings_of(caplog)[1]
        os.kill(server, signal.SIGSTOP)
        assert len(contents(store)) == 20
        counts = store.counters()
        assert (counts.memory_samples, counts.storage_samples) == (25, 20)
        os.kill(server, signal.SIGCONT)
        stores.pop().close()


READ = """
import os, signal, sys
from pathlib import Path
from tests.helpers.data import contents, store_of
store = store_of(Path(sys.argv[1]), [], storage_timeout=3.0)
store.get(range(5))
os.kill(int(sys.argv[2]), signal.SIGSTOP)
contents(store)
"""


@pytest.mark.sshfs
def test_mount_that_never_answers_again_ends_the_program(folder: Path, tmp_path: Path) -> None:
    """A read from a dead mount cannot be interrupted."""
    with sshfs_mount(folder, tmp_path / "mount") as server:
        ended = run(READ, tmp_path / "mount", server, whole=True)
    assert ended.status == 1
    assert f"StorageTimeoutError: storage {tmp_path / 'mount'} has not responded for 3 s" in ended.stderr
