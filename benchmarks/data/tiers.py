"""The cost of an image: images per CPU-second by tier of the cache and backend.

    python -m benchmarks.data.tiers OUT [IMAGES] [--quick] [--device cuda]

IMAGES is an image folder with ``train/<class>/*``; without it, crops of scikit-learn's two photographs are made. All
rows make equal batches: 64 images, random resized crop to 224, flip, normalized, float32 [64, 3, 224, 224].

========================== ============================================================================================
row                        work per image
========================== ============================================================================================
storage, BACKEND           first epoch with a new cache: read, validate by decoding, write to disk and memory, batch
disk, BACKEND              memory_gb=0: read from LMDB and decode in every epoch
memory jpeg, BACKEND       files in memory, decoded in every epoch
memory decoded, BACKEND    pixels in memory
========================== ============================================================================================

Each row runs in its own process, `ROUNDS` times, interleaved; the table has medians. On a GPU, the backend is DALI, and
images per second are more informative. Writes OUT/data.json, .md and .svg.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.data.loaders import BATCH, files_of, generated, in_turn, throughput
from benchmarks.plots import figure
from benchmarks.record import Rows, parser_of, surroundings, write
from lightning_sparse.cli import format_table
from lightning_sparse.data.config import Backend, CacheConfig, ImageOptions
from lightning_sparse.data.pipeline.images import Batch, has_dali
from lightning_sparse.data.session import DataOptions, open_session

SIZE, ROUNDS = 224, 3
TIERS = ("storage", "disk", "memory jpeg", "memory decoded")


def batches_of(
    tier: str, backend: Backend, pictures: Path, folder: Path, epochs: int, device: torch.device
) -> Iterator[Batch]:
    """Yield the batches of some epochs of a tier; the first epoch fills the tier."""
    memory_gb, kept = 0.0 if tier == "disk" else 4.0, "jpeg" if tier == "memory jpeg" else "decoded"
    cache = CacheConfig(source=str(pictures), cache_dir=str(folder), memory_gb=memory_gb, format=kept)  # type: ignore[arg-type]
    options = DataOptions(cache=cache, batch_size=BATCH, samples=ImageOptions(backend=backend, threads=1))
    session = open_session(options, device=device)
    try:
        loader = session.train_loader(fixed=False, on_epoch=lambda epoch: None, on_resume=lambda done: None)
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            yield from loader
            assert session.train is not None
            session.train.store.disk.flush()
    finally:
        session.close()


def one_row(tier: str, backend: Backend, pictures: Path, images: int, device: torch.device) -> dict[str, float]:
    """Measure the first epoch for the tier "storage", and `images` images after the first epoch for other tiers."""
    torch.set_num_threads(1)
    count = len(files_of(pictures))
    with tempfile.TemporaryDirectory(prefix="data-benchmark-") as cache:
        if tier == "storage":
            return throughput(batches_of(tier, backend, pictures, Path(cache), 1, device))
        batches = batches_of(tier, backend, pictures, Path(cache), 1 + -(-images // count), device)
        throughput(batches, count)
        return throughput(batches)


def measure(pictures: Path, device: torch.device, rounds: int, images: int) -> Rows:
    """Return one row per tier and backend, with four times as many images if they are decoded."""
    backends = ["dali"] if device.type == "cuda" else ["torch", *["dali"] * has_dali()]
    cases = {
        f"{tier}, {backend}": (tier, backend, pictures, (4 if tier == "memory decoded" else 1) * images, device)
        for tier in TIERS
        for backend in backends
    }
    return [{"row": name, **row, "rounds": rounds} for name, row in in_turn(one_row, cases, rounds).items()]


def table(rows: Rows) -> str:
    lines = [(row["row"], round(row["per_cpu_second"]), round(row["per_second"])) for row in rows]
    return format_table(("", "images per CPU-second", "images per second"), lines)


def plot(record: dict[str, Any], file: Path) -> None:
    """Draw horizontal bars, the first row at the top."""
    values = {row["row"]: row["per_cpu_second"] for row in record["rows"]}
    by_backend = {"torch": "#d1495b", "dali": "#2e7d32"}
    colors = [by_backend.get(name.rpartition(", ")[2], "#8a8a8a") for name in values]
    with figure(file, height=0.36 * len(values) + 1.2) as (axes,):
        axes.bar_label(axes.barh(list(values), list(values.values()), color=colors), fmt="%.0f", padding=3)
        axes.invert_yaxis()
        axes.set(xlabel=f"images per CPU-second, random resized crop to {SIZE}, normalized")
        axes.margins(x=0.12)


def main() -> None:
    parser = parser_of(__doc__, quick="one round of fewer images")
    parser.add_argument("pictures", type=Path, nargs="?")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    if options.pictures is not None and not (options.pictures / "train").is_dir():
        parser.error(f"{options.pictures} has no folder train/. Pass an image folder.")
    device = torch.device(*(["cuda", 0] if options.device == "cuda" else ["cpu"]))
    images = (192 if options.quick else 640) * (1 if device.type == "cpu" else 20)
    with tempfile.TemporaryDirectory(prefix="data-benchmark-") as folder:
        pictures = options.pictures or generated(Path(folder))
        rows = measure(pictures, device, 1 if options.quick else ROUNDS, images)
    what = "an image folder" if options.pictures else "375 x 500 crops of scikit-learn's photographs"
    record = {**surroundings("torchvision", "nvidia-dali-cuda130", "pillow", "numpy"), "pictures": what, "rows": rows}
    write(options.out / "data.json", record, table(rows), plot)


if __name__ == "__main__":
    main()
