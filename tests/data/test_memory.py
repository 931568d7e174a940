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

from lightning_sparse.data.cache import budget, shared_memory
from lightning_sparse.data.cache import manifest as listing
from lightning_sparse.data.cache import memory as memory_tier
from lightning_sparse.data.cache.manifest import list_source
from lightning_sparse.data.cache.memory import EMPTY, FILLING, READY, MemoryCache
from lightning_sparse.data.cache.samples import Manifest
from lightning_sparse.data.config import CacheConfig, DataError
from tests.data.small import make_folder

NAME = "0123456789abcdef-n0-train"


def pixels(number: int, height: int = 20, width: int = 30) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)


def slab(tmp_path: Path, slots: int = 10, capacity: int = 100_000, name: str = NAME) -> MemoryCache:
    return memory_tier.create(tmp_path / name, "decoded", slots, capacity)


def joined(tmp_path: Path, name: str = NAME) -> MemoryCache:
    file = shared_memory.attach(tmp_path / name)
    assert file is not None
    return MemoryCache(tmp_path / name, file)


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
with memory._locked():
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
with memory._locked():  # and with the lock in its hands
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
        memory.path = path
        parts = run_ranks(_shared_bytes, folder, nodes=1, devices=4)
    finally:
        memory.close()
    assert sum(shared for shared, _ in parts) < 1.1 * nbytes
    assert max(private for _, private in parts) < 0.5 * nbytes


# -------------------------------------------------------------------------------------------------------- budget


def manifest(count: int = 100, size: int = 100_000) -> Manifest:
    zeros = np.zeros(count, np.int64)
    paths = [f"train/c/{number:03}.jpg" for number in range(count)]
    return Manifest("train", "/somewhere", ("c",), paths, zeros, zeros + size, zeros)


def open_memory(tmp_path: Path, shared_memory: Path, **options: object) -> MemoryCache:
    config = CacheConfig(source="/somewhere", cache_dir=str(tmp_path), **options)  # type: ignore[arg-type]
    (tmp_path / "cache").mkdir(exist_ok=True)
    return budget.open_memory(config, manifest(), np.ones(100, np.bool_), NAME, tmp_path / "cache", shared_memory)


def test_a_budget_that_is_too_small_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    first = open_memory(tmp_path, shared, memory_gb=0.005, format="jpeg")
    second = open_memory(tmp_path, shared, memory_gb=7, format="decoded")  # joins what is there
    assert (second.capacity, second.format) == (5_000_000, "jpeg")
    assert [record.getMessage() for record in caplog.records] == [
        "memory tier of train: 100 samples of this node need 0.01 GB as jpeg, but memory_gb=0.005 allows 0.01 GB. "
        "50 % of them stay in memory; every epoch reads the others from local disk."
    ]
    first.close()
    second.close()


def test_no_more_is_taken_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_memory, "available_memory", lambda folder: 1_000_000)
    for gigabytes, capacity, said in (
        (7.0, 1_000_000, "of which 0.00 GB are free"),
        (None, 500_000, "half of the free memory"),
    ):
        caplog.clear()
        memory = open_memory(tmp_path, tmp_path / "none", memory_gb=gigabytes, format="jpeg")
        assert memory.capacity == capacity
        assert said in caplog.text
        memory.close()


@pytest.mark.parametrize(("gigabytes", "format"), [(0.1, "decoded"), (0.02, "jpeg"), (0.001, "jpeg"), (0.0, "jpeg")])
def test_pixels_are_kept_where_they_fit(tmp_path: Path, gigabytes: float, format: str) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    memory = open_memory(tmp_path, shared, memory_gb=gigabytes)
    assert memory.format == format
    assert memory.path.parent.parent == shared
    memory.close()


def test_small_images_are_not_taken_for_photographs(tmp_path: Path) -> None:
    """Their decoded size is known from some of them: estimated from the files it would be ten times too high."""
    folder = make_folder(tmp_path / "pictures", per_class=50, classes=2)  # of 40 x 60 pixels
    (folder / "train" / "c0" / "0.jpg").write_bytes(b"corrupt")
    small = list_source(str(folder), "train", quiet=True)
    assert len(small.probed) == listing.PROBES - 1
    owned = np.ones(100, np.bool_)
    for short_side, true in ((256, 100 * (40 * 60 * 3 + 64)), (20, 100 * (20 * 30 * 3 + 64))):
        assert true <= budget.needed_bytes(small, owned, "decoded", short_side) <= 1.01 * true
    config = CacheConfig(source="/somewhere", cache_dir=str(tmp_path))
    assert budget.choose_format(config, small, owned, 1_000_000) == "decoded"


@pytest.mark.parametrize("small", [False, True])
def test_without_enough_shared_memory_the_slab_lies_on_disk(
    tmp_path: Path, small: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shm"
    if small:
        shared.mkdir()
        available = shared_memory.available_memory
        limit = 1_000_000
        monkeypatch.setattr(
            shared_memory, "available_memory", lambda folder: limit if shared in folder.parents else available(folder)
        )
    memory = open_memory(tmp_path, shared, memory_gb=0.05)
    assert memory.path.parent == tmp_path / "cache" / "memory"
    assert memory.put(0, pixels(0), 20, 30)
    assert ("--shm-size" in caplog.text) == small
    again = open_memory(tmp_path, shared, memory_gb=0.05)
    assert again.get([0])[0][0] is not None
    memory.close()
    again.close()
    assert list((tmp_path / "cache" / "memory").iterdir()) == []


def test_what_is_promised_to_one_split_is_not_given_to_another(tmp_path: Path) -> None:
    before = shared_memory.available_memory(tmp_path)
    memory = slab(tmp_path, capacity=before // 2)
    assert shared_memory.available_memory(tmp_path) < 0.6 * before
    memory.close()


GROUPS = {
    "version 2": ("0::/system.slice/job_7/step_0", "", "memory.max", "memory.current", "inactive_file"),
    "version 1": ("4:cpu,memory:/system.slice/job_7/step_0", "memory", "memory.limit_in_bytes",
                  "memory.usage_in_bytes", "total_inactive_file"),
}  # fmt: skip


@pytest.mark.parametrize("version", GROUPS)
def test_the_tightest_control_group_counts(tmp_path: Path, version: str) -> None:
    """SLURM limits a job of a step: an inner group, that the limits of the outermost do not show."""
    line, mount, limit, used, inactive = GROUPS[version]
    (tmp_path / "own").write_text(f"9:pids:/other\n{line}\n")
    root = tmp_path / "cgroup" / mount
    limits = {"": "max", "system.slice": "max", "system.slice/job_7": "5000", "system.slice/job_7/step_0": "9000"}
    for path, most in limits.items():
        (root / path).mkdir(parents=True, exist_ok=True)
        (root / path / limit).write_text(f"{most}\n")
        (root / path / used).write_text("3000\n")
        (root / path / "memory.stat").write_text(f"anon 10\n{inactive} 1000\n")
    (tmp_path / "cgroup" / "cgroup.controllers").touch()
    left = shared_memory._left_to_control_groups(tmp_path / "cgroup", tmp_path / "own")
    assert left == [9000 - 3000 + 1000, 5000 - 3000 + 1000]


def test_a_limit_of_a_real_control_group_is_seen(tmp_path: Path) -> None:
    group = Path("/sys/fs/cgroup/memory") / f"lightning_sparse-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs root and control groups of version 1")
    code = f"""
import os
from pathlib import Path
from lightning_sparse.data.cache.shared_memory import available_memory
group = Path({str(group)!r})
(group / "memory.limit_in_bytes").write_text("500000000")
(group / "cgroup.procs").write_text(str(os.getpid()))
print(available_memory(Path({str(tmp_path)!r})))
"""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    finally:
        group.rmdir()
    assert 300_000_000 < int(done.stdout) <= 500_000_000


def test_states_are_what_the_reader_expects() -> None:
    assert (EMPTY, FILLING, READY) == (0, 1, 2)  # a hole in the file reads as empty
