"""The size, the format and the limits of the memory tier."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sparse.data.cache import memory as memory_tier
from lightning_sparse.data.cache import segment as segments
from lightning_sparse.data.cache.counts import Counter
from lightning_sparse.data.cache.memory import MemoryCache
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.sources import layout
from lightning_sparse.data.sources.manifest import Manifest
from tests.helpers.data import listed, make_folder


def manifest(count: int = 100, size: int = 100_000) -> Manifest:
    zeros = np.zeros(count, np.int64)
    paths = [f"train/c/{number:03}.jpg" for number in range(count)]
    return Manifest("train", "/somewhere", ("c",), paths, zeros, zeros + size, zeros)


@pytest.fixture
def open_memory(tmp_path: Path) -> Iterator[Callable[..., MemoryCache]]:
    """Yield a function that opens the memory tier of a run."""
    with contextlib.ExitStack() as stack:

        def opened(run: str = "a run", **options: Any) -> MemoryCache:
            config = CacheConfig(source="/somewhere", cache_dir=str(tmp_path), **options)
            counters = Counter(f"{os.getpid()} {run}")
            memory = memory_tier.open_memory(config, manifest(), np.ones(100, np.bool_), counters)
            stack.callback(counters.close)
            stack.callback(memory.close)
            return memory

        yield opened


def test_budget_that_is_too_small_is_warned_about_once(
    open_memory: Callable[..., MemoryCache], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert open_memory(memory_gb=0.005, format="jpeg").capacity == 5_000_000
    assert [record.getMessage() for record in caplog.records] == [
        "memory tier of train: 100 samples of this node need 0.01 GB as jpeg, but memory_gb=0.005 allows 0.01 GB. "
        "50 % of them stay in memory; every epoch reads the others from local disk."
    ]


def test_memory_tier_uses_at_most_the_free_memory(
    open_memory: Callable[..., MemoryCache], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(segments, "available_memory", lambda: 1_000_000)
    for gigabytes, capacity, said in (
        (7.0, 1_000_000, "of which 0.00 GB are free"),
        (None, 500_000, "half of the free memory"),
    ):
        caplog.clear()
        assert open_memory(run=said, memory_gb=gigabytes, format="jpeg").capacity == capacity
        assert said in caplog.text


@pytest.mark.parametrize(("gigabytes", "format"), [(0.1, "decoded"), (0.02, "jpeg"), (0.001, "jpeg"), (0.0, "jpeg")])
def test_pixels_are_kept_if_they_fit(open_memory: Callable[..., MemoryCache], gigabytes: float, format: str) -> None:
    assert open_memory(memory_gb=gigabytes).format == format


def test_decoded_size_of_small_images_is_estimated_from_probes(tmp_path: Path) -> None:
    """The decoded size comes from a sample of the files. An estimate from file sizes would be ten times too high."""
    folder = make_folder(tmp_path / "pictures", per_class=50, classes=2)  # of 40 x 60 pixels
    (folder / "train" / "c0" / "0.jpg").write_bytes(b"corrupt")
    small = listed(folder)
    assert len(small.probed) == layout.PROBES - 1
    owned = np.ones(100, np.bool_)
    for short_side, true in ((256, 100 * (40 * 60 * 3 + 64)), (20, 100 * (20 * 30 * 3 + 64))):
        assert true <= memory_tier.needed_bytes(small, owned, "decoded", short_side) <= 1.01 * true
    config = CacheConfig(source="/somewhere", cache_dir=str(tmp_path), memory_gb=0.001)
    assert memory_tier.format_for(config, small, owned) == "decoded"


@pytest.mark.parametrize("format", ["decoded", "jpeg"])
def test_memory_tier_reserves_at_most_the_size_of_the_samples(tmp_path: Path, format: str) -> None:
    """A run keeps its reserved memory, so that other runs on the node cannot use it."""
    small, owned = listed(make_folder(tmp_path / "pictures", per_class=50, classes=2)), np.ones(100, np.bool_)
    config = CacheConfig(source="/somewhere", cache_dir=str(tmp_path), memory_gb=1, format=format)  # type: ignore[arg-type]
    needed = memory_tier.needed_bytes(small, owned, format, 256)  # type: ignore[arg-type]
    counters = Counter(f"{os.getpid()} {format}")
    with (
        contextlib.closing(counters),
        contextlib.closing(memory_tier.open_memory(config, small, owned, counters)) as memory,
    ):
        assert memory.capacity == needed


GROUPS = {
    "version 2": ("0::/system.slice/job_7/step_0", "", "memory.max", "memory.current", "inactive_file"),
    "version 1": ("4:cpu,memory:/system.slice/job_7/step_0", "memory", "memory.limit_in_bytes",
                  "memory.usage_in_bytes", "total_inactive_file"),
}  # fmt: skip


@pytest.mark.parametrize("version", GROUPS)
def test_free_memory_follows_the_tightest_control_group(tmp_path: Path, version: str) -> None:
    """SLURM limits a job step in an inner control group, which the outer groups do not show."""
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
    left = segments._left_to_control_groups(tmp_path / "cgroup", tmp_path / "own")
    assert left == [9000 - 3000 + 1000, 5000 - 3000 + 1000]
