"""Throughput of the data tiers: images per CPU-second of each tier of the cache and each backend.

All rows end in the same batches: 64 images, random resized crop to 224, flip, normalised, float32 [64, 3, 224, 224].

| row | work for each image |
|---|---|
| storage, BACKEND | first epoch with a new cache: read, validate by decoding, write to disk and memory, batch |
| disk, BACKEND | memory_gb=0: read from LMDB and decode in every epoch |
| memory jpeg, BACKEND | files in memory, decode in every epoch |
| memory decoded, BACKEND | pixels in memory |

CPU time is that of the process and all its children, so it does not depend on the number of threads or on other load
(unless that affects caches and clock). Each row runs in a process of its own, `ROUNDS` times in turn; the result is the
median.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from lightning_sparse.bench.processes import own_process
from lightning_sparse.bench.report import format_table, need
from lightning_sparse.data.cache.store import SampleStore
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.pipeline.batch import Batch, BatchRequest, Pipeline, Transform
from lightning_sparse.data.pipeline.sampler import Sampler, SamplerConfig
from lightning_sparse.data.sources.listing import load_or_list

BATCH, SIZE, ROUNDS = 64, 224, 3
TIERS = ["storage", "disk", "memory jpeg", "memory decoded"]
Timed = dict[str, float]
Source = Callable[[Path, int, "int | None"], Iterator[Batch]]
"""Batches of (image folder, epochs, GPU or None). Pickled by name, so it must be a module-level function."""


def backends(device: int | None) -> list[str]:
    """Return the installed backends; on a GPU only DALI."""
    found = ["dali"] if find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None else []
    return found if device is not None else ["torch", *found]


def config_of(tier: str, pictures: Path, cache: Path) -> CacheConfig:
    config = CacheConfig(source=str(pictures), cache_dir=str(cache), memory_gb=4.0, format="decoded")
    if tier == "disk":
        return replace(config, memory_gb=0.0)
    return replace(config, format="jpeg") if tier == "memory jpeg" else config


def pipeline_of(backend: str, store: SampleStore, device: int | None) -> Pipeline:
    if backend == "dali":
        from lightning_sparse.data.pipeline.dali import DaliPipeline

        return DaliPipeline(store, Transform(), batch_size=BATCH, threads=1, device=device)
    from lightning_sparse.data.pipeline.images import TorchPipeline

    return TorchPipeline(store, Transform(), threads=1)


def tier_row(tier: str, backend: str, pictures: Path, cache: Path, epochs: int, device: int | None) -> Iterator[Batch]:
    """Yield the batches of a tier. All tiers but "storage" are filled before the first batch."""
    config = config_of(tier, pictures, cache)
    manifest = load_or_list(config, "train", quiet=True)
    store = SampleStore(config, manifest)
    pipeline = pipeline_of(backend, store, device)
    sampler = Sampler(np.arange(len(manifest)), lambda nodes: store.owners, SamplerConfig(batch_size=BATCH))
    if tier != "storage":
        for first in range(0, len(manifest), BATCH):
            store.get(range(first, min(first + BATCH, len(manifest))))
        store.flush()
    try:
        for epoch in range(epochs):
            plan = sampler.epoch(epoch)
            yield from pipeline.run(BatchRequest(plan.batch(s, 0, 0), epoch, SIZE, True) for s in range(plan.steps))
    finally:
        pipeline.close()
        store.close()


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a process, its threads and all its children, running or ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        tasks = list(Path(f"/proc/{process}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    children: list[int] = []
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            children += map(int, (task / "children").read_text().split())
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))


def timed(batches: Iterator[Batch], warm: int) -> Timed:
    """Skip `warm` batches, then measure images per CPU-second and per second."""
    for _ in range(warm):
        next(batches)
    _finish()
    images, cpu, wall = 0, cpu_seconds(os.getpid()), time.perf_counter()
    for pixels, _ in batches:
        images += len(pixels)
        if images and not pixels.is_cuda:
            float(pixels[0, 0, 0, 0])
    _finish()
    cpu, wall = cpu_seconds(os.getpid()) - cpu, time.perf_counter() - wall
    return {"images": images, "per_cpu_second": images / cpu, "per_second": images / wall}


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def one_row(name: str, others: dict[str, Source], pictures: Path, images: int, device: int | None) -> Timed:
    """Measure a row in this process. `others`: rows that are not tiers."""
    torch.set_num_threads(1)
    count = sum(1 for _ in (pictures / "train").rglob("*.*"))
    tier, _, backend = name.partition(", ")
    with tempfile.TemporaryDirectory(prefix="data-benchmark-") as cache:
        if tier == "storage":
            return timed(tier_row(tier, backend, pictures, Path(cache), 1, device), 0)
        epochs = 1 + -(-images // count)
        if name in others:
            batches = others[name](pictures, epochs, device)
        else:
            batches = tier_row(tier, backend, pictures, Path(cache), epochs, device)
        return timed(batches, count // BATCH)


def measure(
    pictures: Path,
    *,
    device: int | None = None,
    rounds: int = ROUNDS,
    images: int = 640,
    others: dict[str, Source] | None = None,
    apart: bool = True,
    progress: Callable[[Sequence[str]], Iterable[str]] = iter,
) -> list[dict[str, Any]]:
    """Measure a row for each of `others` and for each tier and backend.

    Args:
        pictures: image folder with ``train/<class>/*``.
        device: index of the GPU; None: CPU.
        rounds: runs per row.
        images: images per row after the first epoch; four times as many for decoded images.
        others: rows that are not tiers, by name.
        apart: run each row in a process of its own; False: all in one, because starting one takes 2 to 3 CPU-seconds.
        progress: wraps the names of the rows, for a progress bar.
    """
    need("lmdb", "the disk tier")
    others = others or {}
    names = [*others, *(f"{tier}, {backend}" for tier in TIERS for backend in backends(device))]
    found: dict[str, list[Timed]] = {name: [] for name in names}
    with own_process() as shared:  # starts its process with the first row, if any
        for name in progress(names * rounds):
            wanted = (4 if "decoded" in name else 1) * images
            row = partial(one_row, name, others, pictures, wanted, device)
            with own_process() if apart else contextlib.nullcontext(shared) as call:
                found[name].append(call(f"the row {name!r}", row))
    return [
        {"row": name, **{key: median(each[key] for each in runs) for key in runs[0]}, "rounds": len(runs)}
        for name, runs in found.items()
    ]


def generated(folder: Path, of_each: int = 96) -> Path:
    """Make an image folder of 375 x 500 crops of scikit-learn's sample photographs.

    Raises:
        ValueError: if scikit-learn or Pillow is not installed.
    """
    load_sample_images = need("scikit-learn", "making images", module="sklearn.datasets").load_sample_images
    Image = need("pillow", "making images", module="PIL.Image")
    random = np.random.default_rng(0)
    for label, photograph in enumerate(load_sample_images().images):
        (folder / "train" / str(label)).mkdir(parents=True)
        for number in range(of_each):
            top, left = random.integers(0, photograph.shape[0] - 375), random.integers(0, photograph.shape[1] - 500)
            picture = Image.fromarray(photograph[top : top + 375, left : left + 500])
            picture.save(folder / "train" / str(label) / f"{number}.jpg", quality=92)
    return folder


def table(rows: list[dict[str, Any]]) -> str:
    lines = [(row["row"], round(row["per_cpu_second"]), round(row["per_second"])) for row in rows]
    return format_table(("", "images per CPU-second", "images per second"), lines)
