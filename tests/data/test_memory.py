"""The memory tier: one slab a node, shared, verified, bounded, and gone with its run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from lightning_sparse.data.cache import memory as memory_tier
from lightning_sparse.data.cache import segment as segments
from lightning_sparse.data.cache.memory import FILLING, MemoryCache

NAME = f"test-{os.getpid()}"


def pixels(number: int, height: int = 20, width: int = 30) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)


def slab(slots: int = 10, capacity: int = 100_000, name: str = NAME) -> MemoryCache:
    return memory_tier.create(name, "decoded", slots, capacity)


def joined(name: str = NAME) -> MemoryCache:
    segment = segments.find(name)
    assert segment is not None
    return MemoryCache(segment)


def put(memory: MemoryCache, number: int) -> bool:
    return memory.put(number, pixels(number), 20, 30)


# ------------------------------------------------------------------------------------------------------- samples


def test_what_is_put_is_seen_by_all() -> None:
    first = slab()
    second = joined()
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


def test_views_outlive_the_slab() -> None:
    memory = slab()
    put(memory, 3)
    view = memory.get([3])[0][0]
    memory.close()
    del memory
    assert view is not None
    assert np.array_equal(view.data, pixels(3))


def test_inserting_ends_when_full_and_nothing_is_evicted() -> None:
    memory = slab(slots=100, capacity=10 * 1856)  # 1800 bytes, rounded up to 64
    assert [put(memory, number) for number in range(12)] == [True] * 10 + [False] * 2
    assert memory.full
    assert [view is not None for view in memory.get(range(12))[0]] == [True] * 10 + [False] * 2
    memory.close()


def test_the_last_free_memory_is_used_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is reserved in large pieces. The last one is larger than what is left."""
    memory = slab(capacity=1 << 30)
    free = 5 * 1856 + 1000
    monkeypatch.setattr(segments, "free_memory", lambda: free - int(memory._header[memory_tier._Header.RESERVED]))
    assert [put(memory, number) for number in range(7)] == [True] * 5 + [False] * 2
    assert memory.full
    memory.close()


@pytest.mark.parametrize("field", ["length", "offset", "height", "width", "checksum", "payload"])
def test_a_flipped_bit_is_found_wherever_it_is(field: str) -> None:
    memory = slab()
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


def _fill_all(name: str) -> None:
    memory = joined(name)
    for number in range(200):
        put(memory, number)
    memory.close()


@pytest.mark.slow
def test_processes_that_fill_together_do_not_overlap() -> None:
    memory = slab(slots=200, capacity=200 * 1856)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_fill_all, args=(NAME,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    views, flipped = memory.get(range(200))
    assert flipped == 0
    assert memory.cached == 200
    assert all(view is not None and np.array_equal(view.data, pixels(number)) for number, view in enumerate(views))
    memory.close()


def test_a_process_killed_while_filling_leaves_nothing_to_read() -> None:
    memory = slab()
    code = f"""
import os, signal
from tests.data.test_memory import *
memory = joined({NAME!r})
memory._reserve(3, 1800)
memory._payloads[:900] = 1
with memory._segment.locked():  # and with the lock in its hands
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert memory._states[3] == FILLING
    assert memory.get([3]) == ([None], 0)
    assert put(memory, 4)
    assert put(memory, 3)  # it is filled by another process then
    assert memory.get([3, 4])[0][0] is not None
    assert memory.cached == 2
    memory.close()


# ------------------------------------------------------------------------------------------------- whose it is


def test_it_ends_with_the_last_process_that_has_it_open() -> None:
    first = slab()
    code = f"""
import sys
from tests.data.test_memory import *
memory = joined({NAME!r})
print(put(memory, 1), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"True\n"
        first.close()
        del first
        again = joined()
        assert again.get([1])[0][0] is not None
        again.close()
        del again
        other.kill()
    assert segments.find(NAME) is None


def test_it_is_the_users_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = slab()
    assert os.fstat(memory._segment.file).st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert segments.find(NAME) is None
    memory.close()


def test_a_segment_that_is_not_prepared_is_not_found() -> None:
    """As of a process that was killed, or of one that does not lock the same folder."""
    file = os.memfd_create(f"lightning_sparse-{NAME}", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 1 << 20)
    assert segments.find(NAME) is None
    os.close(file)


def _shared_bytes(name: str) -> tuple[int, int]:
    """(this process's part of shared memory, its own memory that holds samples) after reading all samples."""
    memory = joined(name)
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
    from tests.helpers.distributed import run_ranks  # torch, which the other processes of this file do without

    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("needs /proc/self/smaps_rollup")
    samples, nbytes = 64, 64 * 256 * 341 * 3
    memory = slab(samples, 2 * nbytes)
    for number in range(samples):
        memory.put(number, pixels(number, 256, 341), 256, 341)
    parts = run_ranks(_shared_bytes, NAME, nodes=1, devices=4)
    memory.close()
    assert sum(shared for shared, _ in parts) < 1.1 * nbytes
    assert max(private for _, private in parts) < 0.5 * nbytes


def test_what_is_promised_to_one_split_is_not_given_to_another() -> None:
    before = segments.available_memory()
    memory = slab(capacity=before // 2)
    assert segments.available_memory() < 0.6 * before
    memory.close()
