"""Several runs on a node share one copy of the samples in memory, and nothing else: counts and log lines are each run's
own, and what happens to one of them does not happen to the others."""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sparse.data.cache import memory
from lightning_sparse.data.cache import segment as segments
from lightning_sparse.data.cache.commands import warm
from lightning_sparse.data.cache.memory import content_name
from lightning_sparse.data.cache.store import Placement, SampleStore
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.folders import locked
from lightning_sparse.data.session import common_format
from lightning_sparse.data.sources.listing import load_or_list
from tests.data.stores import Open, config_of, contents, store_of, warnings_of
from tests.data.test_memory import NAME, joined, put, slab

SAMPLES = 20  # of `folder`


def inode(store: SampleStore) -> int:
    """Which segment it is."""
    return os.fstat(store._tiers().memory._segment.file).st_ino


# ------------------------------------------------------------------------------------------------- one copy


@pytest.mark.parametrize("format", ["decoded", "jpeg"])
def test_a_second_run_reads_what_the_first_one_has_read(
    folder: Path, stores: Open, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_sparse")
    first = store_of(folder, stores, format=format)
    expected = contents(first)
    assert "another run" not in caplog.text
    second = store_of(folder, stores, format=format)
    assert "memory tier of train: 20 samples are there, of another run on this node" in caplog.text
    assert contents(second) == expected
    assert inode(second) == inode(first)
    counts = second.counters()
    assert (counts.memory_samples, counts.disk_samples, counts.storage_samples) == (SAMPLES, 0, 0)
    for store, read in ((first, (0, SAMPLES)), (second, (SAMPLES, 0))):
        counted = store.node_counters()
        assert (counted.memory_samples, counted.storage_samples) == read
    assert first.sizes()[:2] == second.sizes()[:2]


def test_the_format_is_that_of_the_copy_that_is_there(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By free memory alone, the first run would take half of it for pixels, and the second one find too little."""
    first = store_of(folder, stores, format="decoded", memory_gb=None)
    config = config_of(folder, memory_gb=None)
    monkeypatch.setattr(segments, "available_memory", lambda: 10_000)
    assert common_format(config, first.manifest, Placement()) == "decoded"
    assert store_of(folder, stores, memory_gb=None).format == "decoded"
    for store in stores:
        store.close()
    assert common_format(config, first.manifest, Placement()) == "jpeg"


def test_pixels_that_do_not_fit_are_not_taken_for_the_best_format(folder: Path, stores: Open) -> None:
    """The run that keeps them was told to, or goes on with the format of a larger node."""
    limit = {"memory_gb": 0.00005}
    first = store_of(folder, stores, format="decoded", **limit)
    contents(first)
    assert 0 < first._tiers().memory.cached < SAMPLES
    assert common_format(config_of(folder, **limit), first.manifest, Placement()) == "jpeg"


OTHERS: list[dict[str, Any]] = [{"source": "/other"}, {"member": "png"}, {"short_side": 20}, {"memory_gb": 0.02}]


def test_a_name_says_all_that_decides_what_is_kept(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    config = config_of(folder, format="decoded")
    manifest = load_or_list(config, "train")
    everything = np.ones(SAMPLES, np.bool_)

    def name(config: CacheConfig = config, **changed: Any) -> str:
        other = dataclasses.replace(manifest, fingerprint="", **changed)
        return content_name(config, other, everything, "decoded")

    names = [name(), content_name(config, manifest, everything, "jpeg")]
    names.append(content_name(config, manifest, np.arange(SAMPLES) % 2 == 0, "decoded"))  # as with another node
    names += [name(dataclasses.replace(config, **each)) for each in OTHERS]
    there = dataclasses.replace(config, source="s3://there")
    names += [name(dataclasses.replace(there, storage_options={"endpoint_url": each})) for each in ("here", "there")]
    names += [name(sizes=manifest.sizes + 1), name(mtimes_ns=manifest.mtimes_ns + 1), name(split="val")]
    for version in ("torch.__version__", "PIL.__version__"):
        with monkeypatch.context() as patch:
            patch.setattr(version, "0.1")
            names.append(name())
    assert len({*names}) == len(names)
    assert name(dataclasses.replace(config, memory_gb=1)) == name(dataclasses.replace(config, memory_gb=1.0))
    same = ({"cache_dir": str(tmp_path)}, {"storage_timeout": 1.0}, {"disk_gb": 1.0}, {"seed": 1})
    assert {name(dataclasses.replace(config, **each)) for each in same} == {name()}


# -------------------------------------------------------------------------------------- what stays each run's own


def test_each_run_says_for_itself_that_memory_is_full(
    folder: Path, stores: Open, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        store = store_of(folder, stores, format="jpeg", memory_gb=0.00001)
        for _ in range(2):
            contents(store)
        said = [each for each in warnings_of(caplog) if each.startswith("memory tier")]
        assert len(said) == number + 1


def test_a_run_that_joins_a_small_copy_says_so(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was made when there was little memory."""
    with monkeypatch.context() as patch:
        patch.setattr(segments, "available_memory", lambda: 160_000)
        store_of(folder, stores, format="decoded", memory_gb=None)
    caplog.clear()
    for _ in range(2):
        contents(store_of(folder, stores, format="decoded", memory_gb=None))
    assert len(warnings_of(caplog)) == 2
    for said in warnings_of(caplog):
        assert "but the copy of another run on this node allows 0.00 GB. About 55 % of them stay in memory" in said


def test_memory_that_was_short_for_one_run_may_be_there_for_the_next(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store_of(folder, stores, format="decoded")
    with monkeypatch.context() as patch:
        patch.setattr(segments, "free_memory", lambda: 0)
        contents(first)
    assert first.sizes()[0] == 0
    second = store_of(folder, stores, format="decoded")
    contents(second)
    assert first.sizes()[0] == second.sizes()[0] == SAMPLES


def test_a_sample_that_was_damaged_is_repaired_for_all(folder: Path, stores: Open) -> None:
    first, second = store_of(folder, stores), store_of(folder, stores)
    expected = contents(first)
    first.disk.flush()
    first._tiers().memory._payloads[100] ^= 1
    assert contents(second) == expected
    assert (second.counters().checksum_errors_memory, second.counters().disk_samples) == (1, 1)
    assert contents(first) == expected
    assert first.counters().checksum_errors_memory == 0


# ------------------------------------------------------------------------------------------ what a run leaves behind


def test_a_forked_process_does_not_keep_the_lock_of_a_folder(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    ends, end = os.pipe()
    with locked(lock):
        if (child := os.fork()) == 0:  # by another thread
            os.close(end)
            os.read(ends, 1)
            os._exit(0)
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(end)
        os.waitpid(child, 0)
        os.close(ends)


# ---------------------------------------------------------------------------------------- real runs, and their ends

RUN = """
import sys
from pathlib import Path
from tests.data.stores import *
stores = []
store = store_of(Path(sys.argv[1]), stores, format="decoded")
first = contents(store)
counts = store.node_counters()
print(counts.memory_samples, counts.disk_samples, counts.storage_samples, hash(b"".join(first)), flush=True)
sys.stdin.readline()
print(contents(store) == first, flush=True)
"""


@pytest.fixture
def runs(folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for run in started:
        run.kill()
        run.communicate()


def start(folder: Path, runs: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    runs.append(subprocess.Popen([sys.executable, "-c", RUN, str(folder)], text=True, env=environment, **pipes))  # type: ignore[call-overload]
    return runs[-1]


def line_of(run: subprocess.Popen[str]) -> str:
    assert run.stdout is not None
    return run.stdout.readline().strip()


@pytest.mark.slow
def test_a_killed_run_takes_nothing_from_the_others(folder: Path, runs: list[subprocess.Popen[str]]) -> None:
    """Three runs; the one that made the segment is killed, then one ends; at last the next run starts anew."""
    warm(config_of(folder), "train")
    lines = [line_of(start(folder, runs)).rsplit(" ", 1) for _ in range(3)]
    assert [counts for counts, _ in lines] == ["0 20 0", "20 0 0", "20 0 0"]
    assert len({pixels for _, pixels in lines}) == 1
    runs[0].kill()
    runs[0].wait()
    for run in runs[1:]:
        assert run.communicate("\n", timeout=60)[0] == "True\n"
        assert run.returncode == 0
    assert line_of(start(folder, runs)).startswith("0 20 0 ")


@pytest.mark.slow
def test_runs_that_start_at_once_make_one_segment(
    folder: Path, runs: list[subprocess.Popen[str]], stores: Open
) -> None:
    warm(config_of(folder), "train")
    for _ in range(4):
        start(folder, runs)
    counts = [[int(number) for number in line_of(run).split()[:3]] for run in runs]
    assert all(sum(each) == SAMPLES and each[2] == 0 for each in counts)
    store = store_of(folder, stores, format="decoded")
    assert len(contents(store)) == SAMPLES
    assert store.counters().memory_samples == SAMPLES


def test_a_run_that_is_suspended_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SLURM suspends jobs (SIGSTOP): it may hold the lock of the segment, for hours."""
    monkeypatch.setattr(memory, "LOCK_S", 0.3)
    tier = slab()
    code = f"""
import os, signal
from tests.data.test_memory import *
tier = joined({NAME!r})
with tier._segment.locked():
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
put(tier, 5)
print("done", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        for number in range(4):
            assert put(tier, number)  # not kept, and not said to be full
            assert tier._patience_s == 0  # it waits once, not for each sample
        assert tier.cached == 0
        other.send_signal(signal.SIGCONT)
        assert other.stdout.readline() == b"done\n"
    assert all(put(tier, number) for number in range(4))
    assert joined().cached == 5
    tier.close()
