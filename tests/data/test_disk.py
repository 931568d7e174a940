"""The disk tier: it returns whole files or nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import lmdb
import pytest

from lightning_sparse.data.cache import disk
from lightning_sparse.data.cache.counts import Counter
from lightning_sparse.data.cache.disk import CachedFile, DiskCache, FileKey, corrupt_file
from lightning_sparse.data.config import DataError
from tests.data.programs import program
from tests.helpers.data import warnings_of


def key(number: int, size: int = 100, mtime: int = 5) -> FileKey:
    return FileKey(f"train/c/{number}.jpg", size, mtime)


def stored(number: int, length: int = 1000) -> CachedFile:
    return CachedFile(number.to_bytes(4, "little") * (length // 4), 40, 60, 7)


def test_disk_cache_keeps_files(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "c")
    cache.put(key(1), stored(1))
    cache.put(key(2), corrupt_file("it is empty", 7))
    for _ in range(2):  # before and after it is written
        assert cache.get([key(1), key(3), key(2)]) == [stored(1), None, corrupt_file("it is empty", 7)]
        cache.flush()
    assert cache.has([key(1), key(3)]) == [True, False]
    assert (cache.get([key(2)])[0] or stored(0)).error == "it is empty"
    assert stored(1).error is None
    assert cache.entries() == 2
    cache.close()
    again = DiskCache(tmp_path / "c")
    assert again.get([key(1)]) == [stored(1)]
    again.close()


def test_file_that_changed_on_storage_is_not_answered_from_disk(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "c")
    cache.put(key(1), stored(1))
    for _ in range(2):
        assert cache.get([key(1, size=101)]) == cache.get([key(1, mtime=6)]) == [None]
        assert cache.has([key(1)]) == [_ == 1]  # pending files are not on disk yet
        cache.flush()
    cache.put(key(1, mtime=6), stored(9))
    assert cache.get([key(1, mtime=6)]) == [stored(9)]
    cache.close()


@pytest.mark.parametrize("place", [0, 4, 8, 16, 24, 28, 32, 40, 500, -1, None])
def test_flipped_bit_anywhere_in_an_entry_is_found(tmp_path: Path, place: int | None) -> None:
    """The bit is in the header, in the file, or in the key."""
    counter = Counter()
    cache = DiskCache(tmp_path / "c", counter=counter)
    cache.put(key(1), stored(1))
    cache.put(key(2), stored(2))
    cache.close()
    with lmdb.open(str(tmp_path / "c"), map_size=1 << 30) as environment, environment.begin(write=True) as transaction:
        value = bytearray(transaction.get(key(2 if place is None else 1).digest()) or b"")
        if place is not None:
            value[place] ^= 0x10
        transaction.put(key(1).digest(), bytes(value))
    cache = DiskCache(tmp_path / "c", counter=counter)
    assert cache.get([key(1)]) == [None]
    assert counter.read().checksum_errors_disk == 1
    cache.put(key(1), stored(1))
    cache.flush()
    assert cache.get([key(1)]) == [stored(1)]
    cache.close()


def test_disk_cache_stops_at_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = DiskCache(tmp_path / "c", limit_bytes=2_000_000)
    for number in range(100):
        cache.put(key(number), stored(number, 50_000))
        cache.flush()
    assert cache.full
    assert (tmp_path / "c" / "data.mdb").stat().st_size <= 2_000_000
    kept = cache.get([key(number) for number in range(100)])
    count = sum(each is not None for each in kept)
    assert 25 <= count <= 40
    assert kept[:count] == [stored(number, 50_000) for number in range(count)]
    (said,) = warnings_of(caplog)
    assert "disk_gb=0.002 is reached" in said
    cache.close()


@pytest.mark.parametrize("spoil", ["version", "garbage", "cut", "foreign"])
def test_cache_of_another_version_is_named(tmp_path: Path, spoil: str) -> None:
    folder = tmp_path / "c"
    cache = DiskCache(folder)
    for number in range(20):
        cache.put(key(number), stored(number, 20_000))
    cache.close()
    data = folder / "data.mdb"
    if spoil == "version":
        with lmdb.open(str(folder), map_size=1 << 30) as environment, environment.begin(write=True) as transaction:
            transaction.put(b"format", b"lightning_sparse disk cache 99")
    elif spoil == "garbage":
        data.write_bytes(os.urandom(data.stat().st_size))
    elif spoil == "cut":
        os.truncate(data, data.stat().st_size // 2)
    else:
        with lmdb.open(str(folder), map_size=1 << 30) as environment, environment.begin(write=True) as transaction:
            transaction.delete(b"format")
    with pytest.raises(DataError, match="cache clear"):
        DiskCache(folder)


def _fill(folder: Path, begin: int) -> None:
    cache = DiskCache(folder)
    for number in range(begin, begin + 200):
        cache.put(key(number), stored(number, 20_000))
    cache.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_several_processes_fill_one_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_fill, args=(tmp_path / "c", 200 * each)) for each in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    cache = DiskCache(tmp_path / "c")
    assert cache.get([key(number) for number in range(600)]) == [stored(number, 20_000) for number in range(600)]
    cache.close()


WRITER = """
import sys
from tests.data.test_disk import *
cache = DiskCache(Path(sys.argv[1]))
for number in range(100_000):
    if cache.has([key(number)]) != [True]:
        cache.put(key(number), stored(number, 100_000))
        print(number, flush=True)
"""


@pytest.mark.slow
def test_killed_writer_loses_less_than_a_batch(tmp_path: Path) -> None:
    """The writer gets SIGKILL three times while it fills the cache. All other files are complete."""
    begun = -1
    for _ in range(3):
        with program(WRITER, tmp_path / "c") as writer:
            before = begun
            while begun < before + 250:
                begun = max(begun, int(writer.line()))
            writer.send(signal.SIGKILL)
            rest = writer.wait().stdout.rpartition("\n")[0].split()
            begun = max([begun, *map(int, rest)])
        counter = Counter()
        cache = DiskCache(tmp_path / "c", counter=counter)
        kept = cache.get([key(number) for number in range(begun + 1)])
        assert counter.read().checksum_errors_disk == 0
        assert all(each is None or each == stored(number, 100_000) for number, each in enumerate(kept))
        assert sum(each is None for each in kept) <= disk.BATCH_BYTES / 100_000 + 1
        cache.close()


def _reads(folder: Path, other: Connection) -> None:
    """Run a child of a process that has read the cache. It reads, and again after the next child has read."""
    cache = DiskCache(folder)
    for _ in range(2):
        other.send(cache.get([key(1)]) == [stored(1)])
        other.recv()
    cache.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_children_leave_each_other_their_reader_slots(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "c")
    cache.put(key(1), stored(1))
    cache.flush()
    assert cache.get([key(1)]) == [stored(1)], "the slot of this process"
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(2)]
    children = [context.Process(target=_reads, args=(tmp_path / "c", there)) for _, there in pipes]
    for child, (here, _) in zip(children, pipes, strict=True):
        child.start()
        assert here.poll(30), "the child has failed"
        assert here.recv()
    assert cache.get([key(1)]) == [stored(1)]
    for here, _ in pipes:
        here.send(None)
        assert here.poll(30), "the child has failed"
        assert here.recv()
        here.send(None)
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    cache.close()


def test_files_validated_by_another_decoder_need_no_additional_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new version of Pillow writes all files again. A nearly full cache must not stop that."""
    keys = [key(number) for number in range(100)]
    for decoder in (7, 8):
        cache = DiskCache(tmp_path / "c", limit_bytes=5_700_000)
        for number, each in enumerate(keys):
            cache.put(each, stored(number, 50_000)._replace(decoder=decoder))
            if number % 10 == 9:
                cache.flush()
        assert warnings_of(caplog) == []
        assert [each and each.decoder for each in cache.get(keys)] == [decoder] * 100
        cache.close()
    assert (tmp_path / "c" / "data.mdb").stat().st_size < 5_700_000 + 2 * 10 * 54_000


def test_space_of_files_removed_from_the_source_is_reused(tmp_path: Path) -> None:
    """LMDB's file does not shrink, so its free pages must be reused."""
    cache = DiskCache(tmp_path / "c", limit_bytes=5_000_000)

    def fill(numbers: range) -> int:
        for number in numbers:
            cache.put(key(number), stored(number, 200_000))
            cache.flush()
        return sum(cache.has([key(number) for number in numbers]))

    first = fill(range(40))
    assert 20 < first < 25
    assert cache.full
    assert cache.prune([key(0), key(1), key(99)]) == first - 2
    assert not cache.full
    assert cache.get([key(0), key(2)]) == [stored(0, 200_000), None]
    assert first - 8 <= fill(range(100, 140)) < first
    assert cache.bytes() < 5_500_000
    cache.close()
    again = DiskCache(tmp_path / "c")
    assert again.get([key(1), key(100)]) == [stored(1, 200_000), stored(100, 200_000)]
    again.close()
