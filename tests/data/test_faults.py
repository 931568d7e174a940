"""What goes wrong around the tiers: each fault costs time or a sample, is said, and ends no run that can go on."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest

from lightning_sparse.cli import main
from lightning_sparse.data import source
from lightning_sparse.data.config import CacheConfig, CorruptSampleError, DataError
from lightning_sparse.data.manifest import load_or_list
from lightning_sparse.data.places import cache_folder
from lightning_sparse.data.source import StorageTimeoutError
from lightning_sparse.data.store import SampleStore, open_store
from lightning_sparse.data.warm import warm
from lightning_sparse.lab import Cluster, LabConfig, why_not
from lightning_sparse.lab.storage import why_not as why_no_storage
from tests.data.small import jpeg, make_folder

Open = list[SampleStore]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "pictures", per_class=10, classes=2)


@pytest.fixture
def stores() -> Iterator[Open]:
    """Closed at the end, however the test ends."""
    opened: Open = []
    yield opened
    for store in opened:
        store.close()


def config_of(folder: Path, **more: object) -> CacheConfig:
    options = {"source": str(folder), "cache_dir": str(folder.parent / "cache"), "memory_gb": 0.01, **more}
    return CacheConfig(**options)  # type: ignore[arg-type]


def store_of(folder: Path, stores: Open, **more: object) -> SampleStore:
    config = config_of(folder, **more)
    stores.append(open_store(config, load_or_list(config, "train", quiet=True)))
    return stores[-1]


def contents(store: SampleStore) -> list[bytes]:
    return [sample.data.tobytes() for sample in store.get(range(len(store.manifest)))]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ------------------------------------------------------------------------------------------------------- storage


def reader_of(store: SampleStore) -> int:
    reader = store._tiers().source._reader
    assert reader is not None
    return reader._process.pid


def test_a_pause_of_storage_is_waited_for(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process that reads is stopped, as a read of a dead mount stops it."""
    monkeypatch.setattr(source, "SAY_S", 0.3)
    monkeypatch.setattr(source, "RETRY_S", 0.1)
    store = store_of(folder, stores)
    store.get([0])
    reader = reader_of(store)
    os.kill(reader, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (reader, signal.SIGCONT)).start()
    assert len(contents(store)) == 20
    assert reader_of(store) == reader
    first, second = warnings_of(caplog)
    assert "does not answer: waiting up to 300 s" in first
    assert "answers again, after" in second


def test_storage_that_stays_away_ends_the_run_with_its_name(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "RETRY_S", 0.1)
    store = store_of(folder, stores)
    store.get([0])
    store._tiers().source.timeout = 0.5  # now that the reader has started, which takes longer on a busy machine
    os.kill(reader_of(store), signal.SIGSTOP)
    with pytest.raises(StorageTimeoutError, match=r"has not answered for .* storage_timeout=0.5"):
        store.get(range(20))


def test_a_reader_that_dies_or_never_comes_back_is_replaced(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "RETRY_S", 0.1)
    monkeypatch.setattr(source, "RESTART_S", 0.5)
    store = store_of(folder, stores)
    store.get([0])
    os.kill(reader_of(store), signal.SIGKILL)
    assert store.get([1])
    os.kill(reader_of(store), signal.SIGSTOP)
    assert store.get([2])


def test_who_waits_when_the_store_is_closed_is_told(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As threads that read ahead do when a run ends: they neither hang nor start another reader."""
    monkeypatch.setattr(source, "RETRY_S", 0.1)
    store = store_of(folder, stores)
    store.get([0])
    storage = store._tiers().source
    os.kill(reader_of(store), signal.SIGSTOP)
    threading.Timer(0.5, storage.close).start()
    with pytest.raises(DataError, match="was closed"):
        store.get([1])
    assert storage._reader is None


def test_a_folder_that_is_not_mounted_is_not_taken_for_missing_files(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(source, "SAY_S", 0.3)
    monkeypatch.setattr(source, "RETRY_S", 0.1)
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
    assert "does not answer" in warnings_of(caplog)[0]


_READ_IN_LAB = """
import logging, sys, time
from pathlib import Path
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data import source
from lightning_sparse.data.manifest import load_or_list
from lightning_sparse.data.store import open_store
logging.basicConfig(format="%(message)s")
source.SAY_S = 1.0
pictures, work, timeout = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
def ask(name):
    (work / name).touch()
    while not (work / f"{name} done").exists():
        time.sleep(0.02)
config = CacheConfig(source=str(pictures), cache_dir=str(work / "cache"), memory_gb=0.01, storage_timeout=timeout)
store = open_store(config, load_or_list(config, "train", quiet=True))
store.get(range(5))
ask("down")
(work / "reading").touch()
store.get(range(20))
ask("down again")
store.get(range(20))
print("epoch 2:", store.counters().describe())
store.close()
"""


def _in_lab(folder: Path, work: Path, timeout: float, outage: float) -> tuple[int, str, list[float]]:
    """Run the above on a node of a lab whose storage link goes down for `outage` seconds: (exit code, output)."""
    for reason in (why_not(), why_no_storage()):
        if reason is not None:
            pytest.skip(reason)
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


@pytest.mark.root
def test_the_storage_link_goes_down_and_comes_back(folder: Path, tmp_path: Path) -> None:
    """In epoch 1 the run waits and goes on; in epoch 2 it does not notice."""
    code, output, _ = _in_lab(folder, tmp_path / "work", timeout=60, outage=2.5)
    assert code == 0, output
    assert "does not answer: waiting up to 60 s" in output
    assert "answers again, after" in output
    assert "epoch 2: memory 25" in output


@pytest.mark.root
def test_the_storage_link_goes_down_for_good(folder: Path, tmp_path: Path) -> None:
    """The process ends, although a read of a dead mount cannot be interrupted."""
    code, output, _ = _in_lab(folder, tmp_path / "work", timeout=3, outage=30)
    assert code != 0
    assert "StorageTimeoutError" in output
    assert f"storage {folder} has not answered for 3 s" in output


# ------------------------------------------------------------------------------------------------- filling the disk


def test_a_killed_fill_goes_on_where_it_was(tmp_path: Path) -> None:
    """kill -9 in the middle, then a run that reads from storage only what was not kept."""
    folder = make_folder(tmp_path / "pictures", per_class=150, classes=2)
    code = f"""
import sys
from lightning_sparse.data import disk_cache
from lightning_sparse.cli import main
disk_cache.BATCH_BYTES = 20_000
main(["cache", "warm", {str(folder)!r}, {str(tmp_path / "cache")!r}, "--splits", "train", "--threads", "1"])
"""
    data = cache_folder(config_of(folder)) / "train.lmdb" / "data.mdb"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as fill:
        while fill.poll() is None and (not data.exists() or data.stat().st_size < 150_000):
            time.sleep(0.002)
        fill.kill()
    report = warm(config_of(folder), "train")
    assert (report.files, report.present + report.fetched) == (300, 300)
    assert 30 < report.present < 300
    again = warm(config_of(folder), "train")
    assert (again.present, again.fetched) == (300, 0)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB."""
    place = tmp_path / "tiny"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tiny", str(place)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("needs root to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("reserve", [0.05, 0.0])
def test_a_full_disk_ends_inserting_and_not_the_run(
    tiny_disk: Path,
    tmp_path: Path,
    stores: Open,
    reserve: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Noticed ahead by what is free; and without a reserve by ENOSPC in the middle of a batch."""
    monkeypatch.setattr("lightning_sparse.data.disk_cache.RESERVE_SHARE", reserve)
    monkeypatch.setattr("lightning_sparse.data.disk_cache.BATCH_BYTES", 30_000)
    if not reserve:
        monkeypatch.setattr("lightning_sparse.data.disk_cache.DiskCache._room", lambda self: (1 << 40, ""))
    folder = make_folder(tmp_path / "pictures", per_class=200, classes=2)
    store = store_of(folder, stores, cache_dir=str(tiny_disk), memory_gb=0)
    expected = [(folder / path).read_bytes() for path in store.manifest.paths]
    assert contents(store) == expected
    assert contents(store) == expected
    counts = store.counters()
    assert 50 < counts.disk_samples < 350
    assert counts.disk_samples + counts.storage_samples == 800  # what is not kept is read again
    said = [text for text in warnings_of(caplog) if "stops at" in text]
    assert len(said) == 1
    assert ("of the disk are free" if reserve else "takes no more") in said[0]


def test_a_small_memory_keeps_a_part(folder: Path, stores: Open, caplog: pytest.LogCaptureFixture) -> None:
    store = store_of(folder, stores, memory_gb=0.00001, format="jpeg")
    expected = contents(store)
    before = store.counters()
    assert contents(store) == expected
    counts = store.counters() - before
    assert 0 < counts.memory_samples < 20
    assert counts.memory_samples + counts.disk_samples == 20
    (said,) = warnings_of(caplog)
    assert "% of them stay in memory" in said


# ------------------------------------------------------------------------------------------------------ flipped bits


def test_a_flipped_bit_in_memory_is_fetched_again(folder: Path, stores: Open) -> None:
    store = store_of(folder, stores)
    expected = contents(store)
    store._tiers().memory._payloads[10_000] ^= 1
    assert contents(store) == expected
    assert contents(store) == expected
    counts = store.counters()
    assert (counts.flipped_memory, counts.disk_samples, counts.memory_samples) == (1, 1, 39)


def test_a_flipped_bit_on_disk_is_fetched_again(folder: Path, stores: Open) -> None:
    first = store_of(folder, stores)
    expected = contents(first)
    first.close()
    path = cache_folder(first.config) / "train.lmdb"
    with lmdb.open(str(path), map_size=1 << 30) as environment, environment.begin(write=True) as transaction:
        digest = first._key(7).digest()
        value = bytearray(transaction.get(digest) or b"")
        value[300] ^= 1
        transaction.put(digest, bytes(value))
    for flipped in (1, 0):
        store = store_of(folder, stores)
        assert contents(store) == expected
        counts = store.counters()
        assert (counts.flipped_disk, counts.storage_samples, counts.disk_samples) == (flipped, flipped, 20 - flipped)
        store.close()


# ---------------------------------------------------------------------------------------------------- damaged files

DAMAGE = {
    "empty": (b"", "empty"),
    "truncated": (jpeg(5)[:-300], "truncated"),
    "no picture": (b"<html>404</html>", "no picture"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("format", ["decoded", "jpeg"])
def test_a_damaged_file_ends_the_run_and_is_named(folder: Path, stores: Open, kind: str, format: str) -> None:
    (folder / "train" / "c0" / "5.jpg").write_bytes(DAMAGE[kind][0])
    store = store_of(folder, stores, format=format)
    with pytest.raises(CorruptSampleError, match=rf"train/c0/5.jpg cannot be used: .*{DAMAGE[kind][1]}.*on_corrupt"):
        contents(store)
    (folder / "train" / "c0" / "5.jpg").write_bytes(jpeg(5))  # repaired
    assert len(contents(store)) == 20


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_replaced_counted_and_not_asked_for_again(
    folder: Path, stores: Open, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "train" / "c0" / "5.jpg").write_bytes(DAMAGE[kind][0])
    (folder / "train" / "c0" / "6.jpg").write_bytes(b"")
    for run in range(2):
        caplog.clear()
        store = store_of(folder, stores, on_corrupt="skip")
        for _ in range(2):
            samples = store.get(range(20))
            assert [sample.index for sample in samples[4:8]] == [4, 7, 7, 7]
            assert np.array_equal(samples[5].data, samples[7].data)
        counts = store.counters()
        assert counts.replaced == 4
        assert counts.storage_samples == (20 if run == 0 else 0)
        said = warnings_of(caplog)
        assert [text.partition(" ")[0] for text in said] == ["train/c0/5.jpg", "train/c0/6.jpg"]
        store.close()
    with pytest.raises(CorruptSampleError, match="c0/5.jpg"):  # who does not skip looks again
        contents(store_of(folder, stores))


def test_a_missing_file_is_the_files_fault(folder: Path, stores: Open) -> None:
    store = store_of(folder, stores)
    (folder / "train" / "c0" / "5.jpg").unlink()
    with pytest.raises(CorruptSampleError, match="c0/5.jpg.*No such file"):
        contents(store)


def test_a_pipe_in_the_place_of_a_picture_does_not_hang(folder: Path, stores: Open) -> None:
    store = store_of(folder, stores)
    (folder / "train" / "c0" / "5.jpg").unlink()
    os.mkfifo(folder / "train" / "c0" / "5.jpg")
    with pytest.raises(CorruptSampleError, match="no regular file"):
        contents(store)


def test_eleven_megapixels_are_no_problem(folder: Path, stores: Open) -> None:
    (folder / "train" / "c0" / "5.jpg").write_bytes(jpeg(5, 2800, 4000))
    for format, shape in (("decoded", (256, 365, 3)), ("jpeg", None)):
        store = store_of(folder, stores, format=format)
        sample = store.get([5])[0]
        assert sample.data.shape == shape if shape else (sample.height, sample.width) == (2800, 4000)
        store.close()


def test_a_file_that_changed_on_storage_is_noticed(
    folder: Path, stores: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Since it was listed: its present content is taken, once. Listed anew, only the changed file is read again."""
    config = config_of(folder)
    load_or_list(config, "train", quiet=True)
    path = folder / "train" / "c0" / "5.jpg"
    path.write_bytes(jpeg(99))
    for run in range(2):
        store = store_of(folder, stores, format="jpeg")
        assert contents(store)[5] == jpeg(99)
        assert store.counters().changed == (run == 0)
        store.close()
    assert ["train/c0/5.jpg is not the file that was listed" in text for text in warnings_of(caplog)] == [True]
    path.write_bytes(jpeg(98))
    report = warm(config, "train")
    assert (report.present, report.fetched) == (19, 1)
    store = store_of(folder, stores, format="jpeg")
    assert contents(store)[5] == jpeg(98)
    assert store.counters().storage_samples == 0


def test_a_link_that_leads_out_of_the_source_is_refused(folder: Path, tmp_path: Path, stores: Open) -> None:
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(jpeg(1))
    (folder / "train" / "c0" / "5.jpg").unlink()
    (folder / "train" / "c0" / "5.jpg").symlink_to(secret)
    (folder / "train" / "c0" / "6.jpg").unlink()
    (folder / "train" / "c0" / "6.jpg").symlink_to(folder / "train" / "c1" / "6.jpg")
    store = store_of(folder, stores)
    assert store.get([6])  # one that stays inside is fine
    with pytest.raises(CorruptSampleError, match="c0/5.jpg.*outside the source, to .*secret.jpg"):
        store.get([5])


# ------------------------------------------------------------------------------------------------------- other runs


def test_two_runs_at_once_share_a_cache(folder: Path) -> None:
    """Each has memory of its own, both fill one disk cache, and neither removes what the other uses."""
    code = f"""
import hashlib, sys
from pathlib import Path
from tests.data.test_faults import *
store = store_of(Path({str(folder)!r}), [], format="jpeg")
sys.stdin.readline()
digest = hashlib.sha256(b"".join(b"".join(contents(store)) for _ in range(20))).hexdigest()
print(digest, store._tiers().memory.path.name, flush=True)
sys.stdin.readline()
store.close()
"""
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = []
    for line in ("go\n", "end\n"):
        for run in runs:
            assert run.stdin is not None
            run.stdin.write(line)
            run.stdin.flush()
        if line == "go\n":
            answers = [run.stdout.readline().split() for run in runs if run.stdout is not None]
    assert [run.wait() for run in runs] == [0, 0]
    for run in runs:
        assert run.stdin is not None
        assert run.stdout is not None
        run.stdin.close()
        run.stdout.close()
    (first, first_name), (second, second_name) = answers
    assert first == second
    assert first_name != second_name


def test_a_killed_run_is_cleaned_up_after(folder: Path, stores: Open) -> None:
    """kill -9 in the first epoch: its memory is freed by the next run, which reads again only what was not kept."""
    code = f"""
import os, signal
from pathlib import Path
from tests.data.test_faults import *
store = store_of(Path({str(folder)!r}), [])
store.get(range(12))
store.flush()
store.get(range(12, 16))
print(store._tiers().memory.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    left = Path(done.stdout.strip())
    assert left.exists()
    store = store_of(folder, stores)
    assert not left.exists()
    assert len(contents(store)) == 20
    assert (store.counters().disk_samples, store.counters().storage_samples) == (12, 8)


def test_all_files_of_a_run_are_the_users_alone(folder: Path, stores: Open) -> None:
    former = os.umask(0)
    try:
        store = store_of(folder, stores)
        contents(store)
        store.flush()
        segment = store._tiers().memory.path
        places = [segment, segment.parent, *(folder.parent / "cache").rglob("*"), folder.parent / "cache"]
        for place in places:
            assert place.stat().st_mode & 0o777 == (0o700 if place.is_dir() else 0o600), place
    finally:
        os.umask(former)


def test_a_cache_of_another_version_is_left_alone(
    folder: Path, stores: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layout's version is in the folder's name; a file's version inside is an error that says what to do."""
    store = store_of(folder, stores)
    own = cache_folder(store.config)
    store.close()
    other = own.with_name(own.name.replace("v1-", "v7-"))
    os.rename(own, other)
    assert len(contents(store_of(folder, stores))) == 20
    stores[-1].close()
    assert main(["cache", "info", str(own.parent)]) == 0
    printed = capsys.readouterr().out
    assert "version 7, not used by this one" in printed
    assert "train: 20 of 20 files" in printed
    path = own / "train.lmdb"
    with lmdb.open(str(path), map_size=1 << 30) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"format", b"lightning_sparse disk cache 2")
    with pytest.raises(DataError, match="written by another version.*cache clear"):
        store_of(folder, stores)
    assert main(["cache", "clear", str(own.parent), "--source", str(folder)]) == 0
    assert list(own.parent.iterdir()) == []


def test_the_command_line_warms_what_a_node_owns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(folder, per_class=2, classes=2, split="val")
    for number in range(2):  # each node owns one of them
        (folder / "val" / "c1" / f"{number}.jpg").write_bytes(b"")
    cache = str(folder.parent / "cache")
    assert main(["cache", "warm", str(folder), cache, "--nodes", "2", "--node", "1"]) == 1
    printed = capsys.readouterr().out
    assert "train: 10 files, 0 were there, 10 fetched" in printed
    assert main(["cache", "warm", str(folder), cache, "--on-corrupt", "skip"]) == 0
    printed = capsys.readouterr().out
    assert "train: 20 files, 10 were there, 10 fetched" in printed
    assert "val: 4 files, 1 were there, 1 fetched (0.0 MB), 2 damaged" in printed
    assert "val/c1/0.jpg: the file is empty" in printed
    assert main(["cache", "warm", str(folder.parent / "nowhere"), cache]) == 2
    assert "no folder train/" in capsys.readouterr().err
