"""Storage that pauses, dies or stays away: it is waited for, is named, and hangs nobody."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_sparse.data.cache.store import SampleStore
from lightning_sparse.data.config import DataError
from lightning_sparse.data.sources import storage
from lightning_sparse.data.sources.storage import StorageTimeoutError
from lightning_sparse.lab import Cluster, LabConfig
from tests.data.stores import Open, config_of, contents, listed, store_of, warnings_of


def reader_of(store: SampleStore) -> int:
    reader = store._tiers().storage._reader
    assert reader is not None
    return reader._child.process.pid


def test_a_pause_of_storage_is_waited_for(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process that reads is stopped, as a read of a dead mount stops it."""
    monkeypatch.setattr(storage, "RETRY_S", 0.1)
    store = store_of(folder, stores)
    store.get([0])
    monkeypatch.setattr(storage, "WARN_S", 0.3)  # now that the reader has started, which takes longer on a busy machine
    reader = reader_of(store)
    os.kill(reader, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (reader, signal.SIGCONT)).start()
    assert len(contents(store)) == 20
    assert reader_of(store) == reader
    first, second = warnings_of(caplog)
    assert "does not respond: waiting up to 300 s" in first
    assert "responds again after" in second


def test_storage_that_stays_away_ends_the_run_with_its_name(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "RETRY_S", 0.1)
    store = store_of(folder, stores)
    store.get([0])
    store._tiers().storage.timeout = 0.5  # now that the reader has started, which takes longer on a busy machine
    os.kill(reader_of(store), signal.SIGSTOP)
    with pytest.raises(StorageTimeoutError, match=r"has not responded for .* storage_timeout=0.5"):
        store.get(range(20))


def test_a_reader_that_dies_or_never_comes_back_is_replaced(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "RETRY_S", 0.1)
    monkeypatch.setattr(storage, "RESTART_S", 0.5)
    store = store_of(folder, stores)
    store.get([0])
    os.kill(reader_of(store), signal.SIGKILL)
    assert store.get([1])
    os.kill(reader_of(store), signal.SIGSTOP)
    assert store.get([2])


def test_a_listing_that_takes_long_is_not_begun_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder of a million files takes minutes; its entries arrive meanwhile."""
    slow = tmp_path / "slow.py"
    slow.write_text(f"""
import sys, time
sys.path.insert(0, {str(Path(storage.__file__).parent)!r})
import storage_reader
walk, storage_reader.PROGRESS_S = storage_reader.LocalStorage._walk, 0.1
def slowly(self, *args):
    for each in walk(self, *args):
        time.sleep(0.1)
        yield each
storage_reader.LocalStorage._walk = slowly
open({str(tmp_path / "starts")!r}, "a").write("started ")
storage_reader.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
""")
    monkeypatch.setattr(storage, "_READER", slow)
    monkeypatch.setattr(storage, "RETRY_S", 0.1)
    monkeypatch.setattr(storage, "RESTART_S", 1.0)
    assert len(listed(folder, storage_timeout=1.5)) == 20
    assert (tmp_path / "starts").read_text() == "started "


def test_storage_request_that_always_breaks_off_raises(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try reads some entries, which resets the timeout, and then loses its connection."""
    breaks = tmp_path / "breaks.py"
    breaks.write_text(f"""
import sys, time
sys.path.insert(0, {str(Path(storage.__file__).parent)!r})
import storage_reader
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


def test_who_waits_when_the_store_is_closed_is_told(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As threads that read ahead do when a run ends: they neither hang nor start another reader."""
    monkeypatch.setattr(storage, "RETRY_S", 0.1)
    store = store_of(folder, stores)
    store.get([0])
    opened = store._tiers().storage
    os.kill(reader_of(store), signal.SIGSTOP)
    threading.Timer(0.5, opened.close).start()
    with pytest.raises(DataError, match="was closed"):
        store.get([1])
    assert opened._reader is None


def test_a_folder_that_is_not_mounted_is_not_taken_for_missing_files(
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

    threading.Timer(1.0, mount).start()
    assert [sample.index for sample in store.get(range(20))] == list(range(20))
    assert store.counters().replaced == 0
    assert "does not respond" in warnings_of(caplog)[0]


_READ_IN_LAB = """
import logging, sys, time
from pathlib import Path
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.sources import storage
from lightning_sparse.data.sources.listing import load_or_list
from lightning_sparse.data.cache.store import SampleStore
logging.basicConfig(format="%(message)s")
storage.WARN_S = 1.0
pictures, work, timeout = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
def ask(name):
    (work / name).touch()
    while not (work / f"{name} done").exists():
        time.sleep(0.02)
config = CacheConfig(source=str(pictures), cache_dir=str(work / "cache"), memory_gb=0.01, storage_timeout=timeout)
store = SampleStore(config, load_or_list(config, "train"))
store.get(range(5))
ask("down")
(work / "reading").touch()
store.get(range(20))
ask("down again")
store.get(range(20))
print("epoch 2:", store.counters())
store.close()
"""


def _in_lab(folder: Path, work: Path, timeout: float, outage: float) -> tuple[int, str, list[float]]:
    """Run the above on a node of a lab whose storage link goes down for `outage` seconds: (exit code, output)."""
    work.mkdir()
    output = io.StringIO()
    ended = threading.Event()
    seconds = []
    with Cluster(LabConfig(nodes=1, devices=1, storage=folder, storage_gbps=0.5)) as cluster:

        def link(state: str) -> None:
            command = ["ip", "-n", f"{cluster.name}.switch", "link", "set", "storage", state]
            subprocess.run(command, check=True)

        def wait_for(name: str) -> None:
            while not (work / name).exists() and not ended.wait(0.02):
                pass

        def drive() -> None:
            wait_for("down")
            link("down")
            (work / "down done").touch()
            wait_for("reading")
            if not ended.wait(outage):
                link("up")
                wait_for("down again")
                link("down")
                (work / "down again done").touch()
            seconds.append(time.monotonic())

        driver = threading.Thread(target=drive)
        driver.start()
        try:
            command = [sys.executable, "-c", _READ_IN_LAB, str(folder), str(work), str(timeout)]
            result = cluster.run(command, output=output, timeout=120)
        finally:
            ended.set()
            driver.join()
    return result.exit_code, output.getvalue(), seconds


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.sshfs
def test_the_storage_link_goes_down_and_comes_back(folder: Path, tmp_path: Path) -> None:
    """In epoch 1 the run waits and goes on; in epoch 2 it does not notice."""
    code, output, _ = _in_lab(folder, tmp_path / "work", timeout=60, outage=2.5)
    assert code == 0, output
    assert "does not respond: waiting up to 60 s" in output
    assert "responds again after" in output
    assert "epoch 2: TierCounts(memory_samples=25," in output


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.sshfs
def test_the_storage_link_goes_down_for_good(folder: Path, tmp_path: Path) -> None:
    """The process ends, although a read of a dead mount cannot be interrupted."""
    code, output, _ = _in_lab(folder, tmp_path / "work", timeout=3, outage=30)
    assert code != 0
    assert "StorageTimeoutError" in output
    assert f"storage {folder} has not responded for 3 s" in output
