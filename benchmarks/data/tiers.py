"""What a picture costs: images per CPU-second of each tier of the cache and each backend.

    python -m benchmarks.data.tiers OUT [PICTURES] [--quick] [--device cuda]

PICTURES is an image folder with ``train/<class>/*``; without it, crops of scikit-learn's two photographs are made. All
rows end in the same thing: batches of 64, random resized crop to 224, flip, normalised, float32 [64, 3, 224, 224].

========================== ============================================================================================
row                        work for each image
========================== ============================================================================================
storage, BACKEND           first epoch with a new cache: read, validate by decoding, write to disk and memory, batch
disk, BACKEND              memory_gb=0: read from LMDB and decode in every epoch
memory jpeg, BACKEND       files in memory, decode in every epoch
memory decoded, BACKEND    pixels in memory
========================== ============================================================================================

Each row runs in a process of its own, `ROUNDS` times in turn; its number is the median. On a GPU, where images per
second say more, the backend is DALI. Writes OUT/data.json, .md and .svg.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.data.loaders import BATCH, files_of, generated, throughput
from benchmarks.pictures import bars
from benchmarks.processes import alone
from benchmarks.record import Rows, parser_of, surroundings, write
from lightning_sparse.cli.report import format_table
from lightning_sparse.data.cache.store import SampleStore
from lightning_sparse.data.config import CacheConfig, ImageOptions
from lightning_sparse.data.pipeline.batch import Batch, BatchRequest, Pipeline
from lightning_sparse.data.pipeline.images import has_dali
from lightning_sparse.data.pipeline.sampler import Sampler, SamplerConfig
from lightning_sparse.data.sources.listing import load_or_list

SIZE, ROUNDS = 224, 3
TIERS = ("storage", "disk", "memory jpeg", "memory decoded")


def config_of(tier: str, pictures: Path, cache: Path) -> CacheConfig:
    config = CacheConfig(source=str(pictures), cache_dir=str(cache), memory_gb=4.0, format="decoded")
    if tier == "disk":
        return replace(config, memory_gb=0.0)
    return replace(config, format="jpeg") if tier == "memory jpeg" else config


def pipeline_of(backend: str, store: SampleStore, device: int | None) -> Pipeline:
    if backend == "dali":
        from lightning_sparse.data.pipeline.dali import DaliPipeline

        return DaliPipeline(store, ImageOptions(), batch_size=BATCH, threads=1, device=device)
    from lightning_sparse.data.pipeline.images import TorchPipeline

    return TorchPipeline(store, ImageOptions(), threads=1)


def batches_of(
    tier: str, backend: str, pictures: Path, cache: Path, epochs: int, device: int | None
) -> Iterator[Batch]:
    """Yield the batches of some epochs of a tier. All tiers but "storage" are filled before the first batch."""
    config = config_of(tier, pictures, cache)
    manifest = load_or_list(config, "train")
    store = SampleStore(config, manifest)
    pipeline = pipeline_of(backend, store, device)
    sampler = Sampler(np.arange(len(manifest)), lambda nodes: store.owners, SamplerConfig(batch_size=BATCH))
    if tier != "storage":
        for first in range(0, len(manifest), BATCH):
            store.get(range(first, min(first + BATCH, len(manifest))))
        store.disk.flush()
    try:
        for epoch in range(epochs):
            plan = sampler.epoch(epoch)
            yield from pipeline.run(BatchRequest(plan.batch(s, 0, 0), epoch, SIZE, True) for s in range(plan.steps))
    finally:
        pipeline.close()
        store.close()


def one_row(tier: str, backend: str, pictures: Path, images: int, device: int | None) -> dict[str, float]:
    """Measure the whole first epoch of the tier "storage"; of others `images` images after the first epoch."""
    torch.set_num_threads(1)
    count = len(files_of(pictures))
    with tempfile.TemporaryDirectory(prefix="data-benchmark-") as cache:
        if tier == "storage":
            return throughput(batches_of(tier, backend, pictures, Path(cache), 1, device))
        batches = batches_of(tier, backend, pictures, Path(cache), 1 + -(-images // count), device)
        throughput(batches, count)
        return throughput(batches)


def measure(pictures: Path, device: int | None, rounds: int, images: int) -> Rows:
    """One row for each tier and backend; of decoded images, four times as many."""
    backends = ["dali"] if device is not None else ["torch", *["dali"] * has_dali()]
    found: dict[str, list[dict[str, float]]] = {}
    cases = [(tier, backend) for tier in TIERS for backend in backends]
    for tier, backend in tqdm(cases * rounds, unit="row", disable=None):
        name, wanted = f"{tier}, {backend}", (4 if tier == "memory decoded" else 1) * images
        row = alone(f"the row {name!r}", one_row, tier, backend, pictures, wanted, device)
        found.setdefault(name, []).append(row)
    return [
        {"row": name, **{key: median(each[key] for each in runs) for key in runs[0]}, "rounds": rounds}
        for name, runs in found.items()
    ]


def table(rows: Rows) -> str:
    lines = [(row["row"], round(row["per_cpu_second"]), round(row["per_second"])) for row in rows]
    return format_table(("", "images per CPU-second", "images per second"), lines)


def plot(record: dict[str, Any], file: Path) -> None:
    values = {row["row"]: row["per_cpu_second"] for row in record["rows"]}
    by_backend = {"torch": "#d1495b", "dali": "#2e7d32"}
    colours = [by_backend.get(name.rpartition(", ")[2], "#8a8a8a") for name in values]
    bars(file, values, colours, f"images per CPU-second, random resized crop to {SIZE}, normalised")


def main() -> None:
    parser = parser_of(__doc__, quick="one round of fewer images")
    parser.add_argument("pictures", type=Path, nargs="?")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    if options.pictures is not None and not (options.pictures / "train").is_dir():
        parser.error(f"{options.pictures} has no folder train/. Pass an image folder.")
    device = torch.cuda.current_device() if options.device == "cuda" else None
    images = (192 if options.quick else 640) * (1 if device is None else 20)
    with tempfile.TemporaryDirectory(prefix="data-benchmark-") as folder:
        pictures = options.pictures or generated(Path(folder))
        rows = measure(pictures, device, 1 if options.quick else ROUNDS, images)
    what = "an image folder" if options.pictures else "375 x 500 crops of scikit-learn's photographs"
    record = {**surroundings("torchvision", "nvidia-dali-cuda130", "pillow", "numpy"), "pictures": what, "rows": rows}
    write(options.out / "data.json", record, table(rows), plot)


if __name__ == "__main__":
    main()
