"""The memory tier: one segment per node, shared, verified, bounded, and freed with its run."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest

from lightning_sparse.data.cache import memory as memory_tier
from lightning_sparse.data.cache import segment as segments
from lightning_sparse.data.cache.memory import MemoryCache
from tests.data.programs import program, run
from tests.helpers.distributed import run_ranks

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


def has(memory: MemoryCache, number: int) -> bool:
    """Return whether a sample is in memory. Fails if it is a different sample."""
    view = memory.get([number])[0][0]
    assert view is None or np.array_equal(view.data, pixels(number))
    return view is not None


# -- samples -----------------------------------------------------------------------------------------------------------


def test_memory_shares_samples_and_views_outlive_it() -> None:
    first = slab()
    second = joined()
    assert put(first, 3)
    assert put(second, 4)
    assert put(second, 3)  # already there
    views, flipped = second.get([4, 5, 3])
    assert flipped == 0
    assert (first.cached, first.format) == (2, "decoded")
    first.close()
    second.close()
    del first, second
    assert views[1] is None
    for view, number in ((views[0], 4), (views[2], 3)):
        assert view is not None
        assert np.array_equal(view.data, pixels(number))
        assert (view.height, view.width) == (20, 30)
        assert not view.data.flags.writeable
        assert not view.data.flags.owndata


def test_memory_that_is_full_keeps_its_samples() -> None:
    memory = slab(slots=100, capacity=10 * 1856)  # 1800 bytes, rounded up to 64
    assert [put(memory, number) for number in range(12)] == [True] * 10 + [False] * 2
    assert memory.full
    assert [has(memory, number) for number in range(12)] == [True] * 10 + [False] * 2
    memory.close()


def test_memory_uses_exactly_the_free_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is reserved in large pieces. The last piece is larger than the remaining free memory."""
    memory = slab(capacity=1 << 30)
    ((_, before),) = segments.sizes(NAME)
    free = before + 3 * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(segments, "free_memory", lambda: free - segments.sizes(NAME)[0][1])
    kept = [put(memory, number) for number in range(12)]
    count = kept.count(True)
    assert kept == [True] * count + [False] * (12 - count)
    assert count >= 4
    assert segments.sizes(NAME)[0][1] == free, "all free memory, and no more"
    assert memory.full
    memory.close()


def test_memory_with_a_flipped_bit_never_returns_a_wrong_sample() -> None:
    """Flip all bits that describe a sample, and some bits of its contents."""
    memory = slab()
    segment = segments.find(NAME)
    assert segment is not None
    put(memory, 4)
    before = np.frombuffer(os.pread(segment.file, 1 << 20, 0), np.uint8)
    put(memory, 3)
    after = os.pread(segment.file, 1 << 20, 0)
    written = np.flatnonzero(before != np.frombuffer(after, np.uint8)).tolist()
    contents = after.index(pixels(3).tobytes())
    found = 0
    for place in [each for each in written if each < contents] + written[-1800::97]:
        for bit in range(8):
            os.pwrite(segment.file, bytes([after[place] ^ 1 << bit]), place)
            views, flipped = memory.get([3, 4])
            assert views[1] is not None
            assert views[0] is None or np.array_equal(views[0].data, pixels(3))
            found += flipped
            if flipped:
                assert put(memory, 3)
                assert has(memory, 3)
            os.pwrite(segment.file, after, 0)
    assert found > 8 * 30
    memory.close()


def _fill_all(name: str) -> None:
    memory = joined(name)
    for number in range(200):
        put(memory, number)
    memory.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_processes_that_fill_memory_together_do_not_overlap() -> None:
    memory = slab(slots=200, capacity=200 * 1856)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_fill_all, args=(NAME,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(has(memory, number) for number in range(200))
    assert memory.cached == 200
    memory.close()


OPENED = "import os, signal, sys, xxhash\nfrom tests.data.test_memory import *\nmemory = joined(sys.argv[1])\n"
DIES = """
def dies(*_):
    segments.find(sys.argv[1]).locked().__enter__()
    os.kill(os.getpid(), signal.SIGKILL)

xxhash.xxh3_64_intdigest = dies
put(memory, 3)
"""


def test_process_killed_while_it_fills_memory_leaves_a_free_place() -> None:
    """The killed process also holds the lock."""
    memory = slab()
    assert run(OPENED + DIES, NAME).status == -signal.SIGKILL
    assert memory.cached == 1
    assert memory.get([3]) == ([None], 0)
    assert put(memory, 4)
    assert put(memory, 3)
    assert has(memory, 3)
    assert has(memory, 4)
    assert memory.cached == 2
    memory.close()


# -- segments ----------------------------------------------------------------------------------------------------------


def test_segment_ends_with_the_last_process_that_has_it_open() -> None:
    first = slab()
    with program(OPENED + "print(put(memory, 1), flush=True)\nsys.stdin.read()", NAME) as other:
        assert other.line() == "True"
        first.close()
        del first
        again = joined()
        assert has(again, 1)
        again.close()
        del again
        other.send(signal.SIGKILL)
        other.wait()
    assert segments.find(NAME) is None


def test_segment_belongs_to_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, segment = slab(), segments.find(NAME)
    assert segment is not None
    assert os.fstat(segment.file).st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert segments.find(NAME) is None
    memory.close()


def test_segment_that_is_not_prepared_is_not_found() -> None:
    """A killed process leaves such a segment."""
    file = os.memfd_create(f"lightning_sparse-{NAME}", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 1 << 20)
    assert segments.find(NAME) is None
    os.close(file)


def test_suspended_process_does_not_stop_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM suspends jobs (SIGSTOP), which may hold the lock of the segment for hours."""
    waited = []
    memory, segment = slab(), segments.find(NAME)
    assert segment is not None
    clock = SimpleNamespace(monotonic=lambda: sum(waited), sleep=waited.append)
    with monkeypatch.context() as patch, segment.locked():
        patch.setattr(segments, "time", clock)
        assert all(put(memory, number) for number in range(4)), "skipped samples do not mark memory as full"
        assert memory.cached == 0
        assert memory_tier.LOCK_S <= sum(waited) < 1.5 * memory_tier.LOCK_S, "it waits once, not for each sample"
    assert all(put(memory, number) for number in range(4))
    assert joined().cached == 4
    memory.close()


def _shared_bytes(name: str) -> tuple[int, int]:
    """Return this process's share of shared memory, and its private memory, after reading all samples."""
    import torch.distributed as dist

    memory = joined(name)
    before = _rollup("Private_Dirty") + _rollup("Private_Clean")
    assert sum(int(view.data.sum()) for view in memory.get(range(64))[0] if view is not None)
    dist.barrier()  # all ranks have read, and still have it mapped
    shared, private = _rollup("Pss_Shmem"), _rollup("Private_Dirty") + _rollup("Private_Clean") - before
    dist.barrier()
    memory.close()
    return shared, private


def _rollup(name: str) -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def test_ranks_of_a_node_hold_one_copy_of_the_samples() -> None:
    """Proportional set sizes divide each page among the processes that map it, so their sum is the node's memory."""
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("needs /proc/self/smaps_rollup")
    samples, nbytes = 64, 64 * 256 * 341 * 3
    memory = slab(samples, 2 * nbytes)
    for number in range(samples):
        memory.put(number, pixels(number, 256, 341), 256, 341)
    parts = run_ranks(_shared_bytes, NAME, nodes=1, devices=3)
    memory.close()
    assert sum(shared for shared, _ in parts) < 1.1 * nbytes
    assert max(private for _, private in parts) < 0.5 * nbytes


def test_memory_promised_to_one_split_is_not_available_to_another() -> None:
    before = segments.available_memory()
    memory = slab(capacity=before // 2)
    assert segments.available_memory() < 0.6 * before
    memory.close()
