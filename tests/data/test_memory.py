"""The memory tier: one slab a node, shared, verified, bounded, and gone with its run."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from lightning_sparse.data.cache import free_memory, shared_memory
from lightning_sparse.data.cache import memory as memory_tier
from lightning_sparse.data.cache.memory import EMPTY, FILLING, READY, MemoryCache
from lightning_sparse.data.config import DataError

NAME = "0123456789abcdef-n0-train"


def pixels(number: int, height: int = 20, width: int = 30) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)


def slab(tmp_path: Path, slots: int = 10, capacity: int = 100_000, name: str = NAME) -> MemoryCache:
    return memory_tier.create(tmp_path / name, "decoded", slots, capacity)


def joined(tmp_path: Path, name: str = NAME) -> MemoryCache:
    segment = shared_memory.attach(tmp_path / name)
    assert segment is not None
    return MemoryCache(segment)


def put(memory: MemoryCache, number: int) -> bool:
    return memory.put(number, pixels(number), 20, 30)


# ------------------------------------------------------------------------------------------------------- samples


def test_what_is_put_is_seen_by_all(tmp_path: Path) -> None:
    first = slab(tmp_path)
    second = joined(tmp_path)
    assert put(first, 3)
    assert put(second, 4)
    assert put(second, 3)  # it is there already
    views, flipped = second.get([4, 5, 3])
    assert flipped == 0
    assert views[1] is None
    for view, number in ((views[0], 4), (views[2], 3)):
        assert view is not None
        assert np.array_equal(view.data, pixels(number))
        assert (view.height, view.width) == (20, 30)
        assert not view.data.flags.writeable
        assert not view.data.flags.owndata
    assert (first.cached, first.format) == (2, "decoded")
    first.close()
    second.close()


def test_views_outlive_the_slab(tmp_path: Path) -> None:
    memory = slab(tmp_path)
    put(memory, 3)
    view = memory.get([3])[0][0]
    memory.close()
    del memory
    assert view is not None
    assert np.array_equal(view.data, pixels(3))


def test_inserting_ends_when_full_and_nothing_is_evicted(tmp_path: Path) -> None:
    memory = slab(tmp_path, slots=100, capacity=10 * 1856)  # 1800 bytes, rounded up to 64
    assert [put(memory, number) for number in range(12)] == [True] * 10 + [False] * 2
    assert memory.full
    assert [view is not None for view in memory.get(range(12))[0]] == [True] * 10 + [False] * 2
    memory.close()


def test_shared_memory_that_is_full_is_an_error_that_is_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is reserved before it is written to: a write without it would end the process by SIGBUS."""
    memory = slab(tmp_path, capacity=1 << 30)
    reserve = os.posix_fallocate
    taken = []

    def limited(file: int, offset: int, length: int) -> None:
        if taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken.append(length)
        reserve(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    monkeypatch.setattr(memory_tier, "RESERVE_BYTES", 4096)
    assert [put(memory, number) for number in range(4)] == [True, True, False, False]
    assert memory.full
    memory.close()


def test_the_last_free_memory_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is reserved in large pieces. The last one is larger than what is left."""
    memory = slab(tmp_path, capacity=1 << 30)
    begin, free, reserve = memory._payloads_at, 5 * 1800 + 1000, os.posix_fallocate

    def limited(file: int, offset: int, length: int) -> None:
        if offset + length > begin + free:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    assert [put(memory, number) for number in range(7)] == [True] * 5 + [False] * 2
    memory.close()


@pytest.mark.parametrize("field", ["length", "offset", "height", "width", "checksum", "payload"])
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path, field: str) -> None:
    memory = slab(tmp_path)
    put(memory, 3)
    put(memory, 4)
    if field == "payload":
        memory._payloads[1000] ^= 0x20
    else:
        memory._slots[3:4][field] ^= 4
    views, flipped = memory.get([3, 4])
    assert (views[0], flipped) == (None, 1)
    assert views[1] is not None
    assert put(memory, 3)
    view = memory.get([3])[0][0]
    assert view is not None
    assert np.array_equal(view.data, pixels(3))
    memory.close()


def _fill_all(folder: Path, connection: object) -> None:
    memory = joined(folder)
    for number in range(200):
        put(memory, number)
    memory.close()


def test_processes_that_fill_together_do_not_overlap(tmp_path: Path) -> None:
    memory = slab(tmp_path, slots=200, capacity=200 * 1856)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_fill_all, args=(tmp_path, None)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    views, flipped = memory.get(range(200))
    assert flipped == 0
    assert memory.cached == 200
    assert all(view is not None and np.array_equal(view.data, pixels(number)) for number, view in enumerate(views))
    memory.close()


def test_room_is_taken_by_one_process_at_a_time(tmp_path: Path) -> None:
    memory = slab(tmp_path)
    code = f"""
import sys
from tests.data.test_memory import *
memory = joined(Path({str(tmp_path)!r}))
with memory._segment.locked():
    print("held", flush=True)
    sys.stdin.read()
"""
    filling = threading.Thread(target=put, args=(memory, 3))
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        filling.start()
        filling.join(0.3)
        assert filling.is_alive()
        assert memory.bytes == 0
        holder.kill()  # its lock dies with it
    filling.join(10)
    assert memory.get([3])[0][0] is not None
    memory.close()


def test_a_process_killed_while_filling_leaves_nothing_to_read(tmp_path: Path) -> None:
    memory = slab(tmp_path)
    code = f"""
import os, signal
from tests.data.test_memory import *
memory = joined(Path({str(tmp_path)!r}))
memory._reserve(3, 1800)
memory._payloads[:900] = 1
with memory._segment.locked():  # and with the lock in its hands
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert memory._states[3] == FILLING
    assert memory.get([3]) == ([None], 0)
    assert put(memory, 4)
    memory.close()


# ------------------------------------------------------------------------------------------------- whose it is


def test_the_last_to_close_removes_it(tmp_path: Path) -> None:
    first, second = slab(tmp_path), joined(tmp_path)
    first.close()
    assert (tmp_path / NAME).exists()
    assert put(second, 1)
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_removed_and_what_lives_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_sparse")
    other = NAME.replace("0123", "4567")
    code = f"""
import sys
from tests.data.test_memory import *
memory = slab(Path({str(tmp_path)!r}), name={other!r})
print("ready", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        (tmp_path / "something-else").touch()
        assert shared_memory.remove_stale([tmp_path]) == 0
        run.kill()
        run.wait()
    assert (tmp_path / other).exists()
    assert shared_memory.remove_stale([tmp_path]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["something-else"]
    assert "runs that have ended" in caplog.text


def test_it_is_the_users_alone(tmp_path: Path) -> None:
    folder = shared_memory.memory_folder(tmp_path)
    assert folder is not None
    former = os.umask(0)
    try:
        memory = slab(folder)
    finally:
        os.umask(former)
    assert (folder / NAME).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    memory.close()


def test_a_folder_that_somebody_else_prepared_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"lightning_sparse-{os.geteuid()}").symlink_to(tmp_path)
    with pytest.raises(DataError, match="not a folder of this user"):
        shared_memory.memory_folder(tmp_path)


def _shared_bytes(folder: Path) -> tuple[int, int]:
    """(this process's part of shared memory, its own memory that holds samples) after reading all samples."""
    memory = joined(folder)
    before = _rollup("Private_Dirty") + _rollup("Private_Clean")
    total = sum(int(view.data.sum()) for view in memory.get(range(64))[0] if view is not None)
    assert total
    import torch.distributed as dist

    dist.barrier()  # all have read, and all still have it mapped
    shared, private = _rollup("Pss_Shmem"), _rollup("Private_Dirty") + _rollup("Private_Clean") - before
    dist.barrier()
    memory.close()
    return shared, private


def _rollup(name: str) -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def test_four_ranks_hold_one_copy() -> None:
    """Proportional set sizes share a page among those who map it, so their sum is what the node really holds."""
    folder = shared_memory.memory_folder()
    from tests.helpers.distributed import run_ranks  # torch, which the other processes of this file do without

    if folder is None or not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("needs /dev/shm and /proc/self/smaps_rollup")
    samples, nbytes = 64, 64 * 256 * 341 * 3
    memory = memory_tier.create(folder / f"{NAME}-{os.getpid()}", "decoded", samples, 2 * nbytes)
    try:
        for number in range(samples):
            memory.put(number, pixels(number, 256, 341), 256, 341)
        # the ranks join by name
        path = folder / NAME
        os.rename(memory.path, path)
        memory._segment.path = path
        parts = run_ranks(_shared_bytes, folder, nodes=1, devices=4)
    finally:
        memory.close()
    assert sum(shared for shared, _ in parts) < 1.1 * nbytes
    assert max(private for _, private in parts) < 0.5 * nbytes


def test_what_is_promised_to_one_split_is_not_given_to_another(tmp_path: Path) -> None:
    before = free_memory.available_memory(tmp_path)
    memory = slab(tmp_path, capacity=before // 2)
    assert free_memory.available_memory(tmp_path) < 0.6 * before
    memory.close()


def test_states_are_what_the_reader_expects() -> None:
    assert (EMPTY, FILLING, READY) == (0, 1, 2)  # a hole in the file reads as empty
