"""Runs on a node share one copy of the samples in memory, but not counts, log lines or faults."""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import logging
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sparse.data.cache import segment as segments
from lightning_sparse.data.cache.commands import warm
from lightning_sparse.data.cache.memory import content_name
from lightning_sparse.data.cache.store import Placement
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.folders import locked
from lightning_sparse.data.session import common_format
from lightning_sparse.data.sources.listing import load_or_list
from tests.data.programs import program
from tests.helpers.data import Open, config_of, contents, flip_in_memory, store_of, warnings_of

SAMPLES = 20  # number of samples in `folder`


def num_segments() -> int:
    """Return the number of segments that this process has open."""
    gc.collect()  # stores of earlier tests may be in cycles
    files = [each for each in Path("/proc/self/fd").iterdir() if "memfd:lightning_sparse-" in str(each.resolve())]
    return len({each.stat().st_ino for each in files})


# -- one copy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["decoded", "jpeg"])
def test_second_run_reads_the_samples_of_the_first_run_from_memory(
    folder: Path, stores: Open, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_sparse")
    first = store_of(folder, stores, format=format)
    expected = contents(first)
    assert "another run" not in caplog.text
    second = store_of(folder, stores, format=format)
    assert "memory tier of train: 20 samples are there, of another run on this node" in caplog.text
    assert contents(second) == expected
    assert num_segments() == 1 + 2, "the samples, and the counts of each run"
    counts = second.counters()
    assert (counts.memory_samples, counts.disk_samples, counts.storage_samples) == (SAMPLES, 0, 0)
    for store, read in ((first, (0, SAMPLES)), (second, (SAMPLES, 0))):
        counted = store.node_counters()
        assert (counted.memory_samples, counted.storage_samples) == read
    assert first.sizes()[:2] == second.sizes()[:2]


def test_format_of_a_second_run_is_the_format_in_memory(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The free memory would be too small for the second run."""
    first = store_of(folder, stores, format="decoded", memory_gb=None)
    config = config_of(folder, memory_gb=None)
    monkeypatch.setattr(segments, "available_memory", lambda: 10_000)
    assert common_format(config, first.manifest, Placement()) == "decoded"
    assert store_of(folder, stores, memory_gb=None).format == "decoded"
    for store in stores:
        store.close()
    assert common_format(config, first.manifest, Placement()) == "jpeg"


def test_second_run_does_not_copy_the_format_of_pixels_that_do_not_fit(folder: Path, stores: Open) -> None:
    """The first run sets the format, or resumes a run of a larger node."""
    limit = {"memory_gb": 0.00005}
    first = store_of(folder, stores, format="decoded", **limit)
    contents(first)
    assert 0 < first.sizes()[0] < SAMPLES
    assert common_format(config_of(folder, **limit), first.manifest, Placement()) == "jpeg"


OTHERS: list[dict[str, Any]] = [{"source": "/other"}, {"member": "png"}, {"short_side": 20}, {"memory_gb": 0.02}]


def test_segment_name_depends_on_all_options_that_change_samples(
    folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    config = config_of(folder, format="decoded")
    manifest = load_or_list(config, "train")
    everything = np.ones(SAMPLES, np.bool_)

    def name(config: CacheConfig = config, **changed: Any) -> str:
        other = dataclasses.replace(manifest, fingerprint="", **changed)
        return content_name(config, other, everything, "decoded")

    names = [name(), content_name(config, manifest, everything, "jpeg")]
    names.append(content_name(config, manifest, np.arange(SAMPLES) % 2 == 0, "decoded"))  # as on another node
    names += [name(dataclasses.replace(config, **each)) for each in OTHERS]
    there = dataclasses.replace(config, source="s3://there")
    names += [name(dataclasses.replace(there, storage_options={"endpoint_url": each})) for each in ("here", "there")]
    names += [name(sizes=manifest.sizes + 1), name(mtimes_ns=manifest.mtimes_ns + 1), name(split="val")]
    for version, changed in (("lightning_sparse.data.decode.resizer_id", lambda: "0.1"), ("PIL.__version__", "0.1")):
        with monkeypatch.context() as patch:
            patch.setattr(version, changed)
            names.append(name())
    assert len({*names}) == len(names)
    assert name(dataclasses.replace(config, memory_gb=1)) == name(dataclasses.replace(config, memory_gb=1.0))
    same = ({"cache_dir": str(tmp_path)}, {"storage_timeout": 1.0}, {"disk_gb": 1.0}, {"seed": 1})
    assert {name(dataclasses.replace(config, **each)) for each in same} == {name()}


# -- state per run -----------------------------------------------------------------------------------------------------


def test_run_warns_once_that_memory_is_full(folder: Path, stores: Open, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):
        store = store_of(folder, stores, format="jpeg", memory_gb=0.00001)
        for _ in range(2):
            contents(store)
        said = [each for each in warnings_of(caplog) if each.startswith("memory tier")]
        assert len(said) == number + 1


def test_run_that_joins_a_small_segment_warns(
    folder: Path, stores: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first run created the segment when memory was scarce."""
    with monkeypatch.context() as patch:
        patch.setattr(segments, "available_memory", lambda: 160_000)
        store_of(folder, stores, format="decoded", memory_gb=None)
    caplog.clear()
    for _ in range(2):
        contents(store_of(folder, stores, format="decoded", memory_gb=None))
    assert len(warnings_of(caplog)) == 2
    for said in warnings_of(caplog):
        assert "but the copy of another run on this node allows 0.00 GB. About 55 % of them stay in memory" in said


def test_next_run_keeps_samples_when_memory_is_free_again(
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


def test_sample_with_a_flipped_bit_is_repaired_for_all_runs(folder: Path, stores: Open) -> None:
    first, second = store_of(folder, stores), store_of(folder, stores)
    expected = contents(first)
    first.disk.flush()
    flip_in_memory(expected[7])
    assert contents(second) == expected
    assert (second.counters().checksum_errors_memory, second.counters().disk_samples) == (1, 1)
    assert contents(first) == expected
    assert first.counters().checksum_errors_memory == 0


# -- locks -------------------------------------------------------------------------------------------------------------


def test_forked_process_does_not_keep_the_lock_of_a_folder(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    ends, end = os.pipe()
    with locked(lock):
        if (child := os.fork()) == 0:  # as another thread might
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


# -- runs of several processes -----------------------------------------------------------------------------------------

RUN = """
import sys
from pathlib import Path
from tests.helpers.data import contents, store_of
store = store_of(Path(sys.argv[1]), [], format="decoded")
first = contents(store)
counts = store.node_counters()
print(counts.memory_samples, counts.disk_samples, counts.storage_samples, hash(b"".join(first)), flush=True)
sys.stdin.readline()
print(contents(store) == first, flush=True)
"""


@pytest.mark.slow
def test_killed_run_does_not_affect_other_runs(folder: Path) -> None:
    """Of three runs, the run that made the segment is killed, and the others end. The next run makes a new segment."""
    warm(config_of(folder), "train")
    with ExitStack() as stack:
        runs = [stack.enter_context(program(RUN, folder))]
        lines = [runs[0].line()]
        runs += [stack.enter_context(program(RUN, folder)) for _ in range(2)]
        lines += [run.line() for run in runs[1:]]
        assert [line.rpartition(" ")[0] for line in lines] == ["0 20 0", "20 0 0", "20 0 0"]
        assert len({line.rpartition(" ")[2] for line in lines}) == 1, "the pixels"
        runs[0].send(signal.SIGKILL)
        runs[0].wait()
        for run in runs[1:]:
            run.stdin.write("\n")
            assert run.wait() == (0, "True\n", "")
        assert stack.enter_context(program(RUN, folder)).line().startswith("0 20 0 ")


def test_runs_that_start_at_once_make_one_segment(folder: Path, stores: Open) -> None:
    warm(config_of(folder), "train")
    with ExitStack() as stack:
        runs = [stack.enter_context(program(RUN, folder)) for _ in range(4)]
        counts = [[int(number) for number in run.line().split()[:3]] for run in runs]
        assert all(sum(each) == SAMPLES and each[2] == 0 for each in counts)
        store = store_of(folder, stores, format="decoded")
        assert len(contents(store)) == SAMPLES
        assert store.counters().memory_samples == SAMPLES
