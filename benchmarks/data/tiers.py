"""What a picture costs: images per CPU-second of each tier and backend, and the memory that four ranks hold.

    python -m benchmarks.data.tiers OUT [PICTURES] [--quick] [--device cuda]

PICTURES is an image folder with ``train/<class>/*``; without it, crops of scikit-learn's two photographs are made. All
rows end in the same thing: batches of 64, random resized crop to 224, flip, normalised, float32 [64, 3, 224, 224].

========================== =====================================================================================
row                        what it does for each picture
========================== =====================================================================================
ImageFolder + DataLoader   torchvision's own: open, decode, transforms v2, one worker process
DALI file reader           DALI's own: readers.file, decoders.image_random_crop, resize, crop_mirror_normalize
TIER, BACKEND              see lightning_sparse/bench/data.py
========================== =====================================================================================

CPU time is that of the process and all its children, so a row's number does not depend on how many threads it has or
what else the machine does (as long as that leaves caches and clock alone). Each row runs in a process of its own,
`ROUNDS` times in turn; its number is the median. With ``--quick`` all rows share a process and run once. With
``--device cuda`` DALI's rows run on the GPU, where images per second say more, and are compared with the CPU pipeline
pixel by pixel.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
from collections.abc import Iterator
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.pictures import bars
from lightning_sparse.bench.data import BATCH, SIZE, config_of, generated, table, tier_row
from lightning_sparse.bench.data import measure as measure_rows
from lightning_sparse.bench.report import commit, processor
from lightning_sparse.data.cache.store import Placement, SampleStore, new_run
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.pipeline.batch import Batch, Transform
from lightning_sparse.data.pipeline.images import has_dali
from lightning_sparse.data.sources.listing import load_or_list

RANKS, RANKS_QUICK = 4, 2
BASELINES = ["ImageFolder + DataLoader", "DALI file reader"]


# -- the rows it is compared with --------------------------------------------------------------------------------------


def image_folder(pictures: Path, epochs: int, device: int | None, size: int = SIZE) -> Iterator[Batch]:
    from torchvision.datasets import ImageFolder

    loader = loader_of(ImageFolder(str(pictures / "train"), transforms(size)))
    for _ in range(epochs):
        yield from loader


def transforms(size: int) -> Any:
    """torchvision's transforms that end in the batches of all rows."""
    from torchvision.transforms import v2

    transform = Transform()
    steps = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(transform.mean, transform.std)]
    return v2.Compose(steps)


def loader_of(data: Any) -> Any:
    from torch.utils.data import DataLoader

    # forked, as in a script of one's own: a process that was spawned, as each row's is, would spawn its workers, and
    # those read a fifth slower
    return DataLoader(data, BATCH, shuffle=True, num_workers=1, persistent_workers=True, multiprocessing_context="fork")


def dali_reader(pictures: Path, epochs: int, device: int | None, size: int = SIZE) -> Iterator[Batch]:
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    @pipeline_def  # type: ignore[untyped-decorator]
    def graph() -> Any:
        files, labels = fn.readers.file(file_root=str(pictures / "train"), random_shuffle=True, name="reader")
        kind = "cpu" if device is None else "mixed"
        cut = fn.decoders.image_random_crop(files, device=kind, random_area=[0.08, 1.0])
        resized = fn.resize(cut, size=(size, size), antialias=True)
        mean, std = ([255 * each for each in part] for part in (Transform().mean, Transform().std))
        flip = fn.random.coin_flip()
        return fn.crop_mirror_normalize(resized, mirror=flip, mean=mean, std=std, output_layout="CHW"), labels

    pipe = graph(batch_size=BATCH, num_threads=1, device_id=device, exec_dynamic=True)
    batches = DALIGenericIterator(
        pipe, ["x", "y"], reader_name="reader", last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True
    )
    for _ in range(epochs):
        for (batch,) in batches:
            yield batch["x"], batch["y"]


# -- memory of four ranks ----------------------------------------------------------------------------------------------


def hold(rank: int, config: CacheConfig, run: bytes, ready: Any, go_on: Any, out: Any) -> None:
    """Read everything, then look at what of this process is in memory."""
    manifest = load_or_list(config, "train", quiet=True)
    store = SampleStore(config, manifest, Placement(0, 1, rank), run)
    spans = [range(first, min(first + BATCH, len(manifest))) for first in range(0, len(manifest), BATCH)]
    for span in spans:
        store.get(span)
    kept = [store.get(span) for span in spans]  # from memory now, whoever read them first
    total = sum(int(sample.data.astype(np.int64).sum()) for samples in kept for sample in samples)  # touch every page
    ready.wait()
    sizes = {"Rss": 0, "Pss": 0}
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            ours = "lightning_sparse" in line
        elif ours and line.split(":")[0] in sizes:
            sizes[line.split(":")[0]] += 1024 * int(line.split()[1])
    go_on.wait()
    out.put((rank, sizes, total, sum(sample.data.nbytes for samples in kept for sample in samples)))
    kept.clear()
    store.close()


def memory_of_ranks(pictures: Path, count: int, context: Any) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="data-benchmark-") as cache:
        config = config_of("memory decoded", pictures, Path(cache))
        load_or_list(config, "train", quiet=True)
        ready, go_on, out = context.Barrier(count), context.Barrier(count), context.Queue()
        run = new_run()
        ranks = [context.Process(target=hold, args=(rank, config, run, ready, go_on, out)) for rank in range(count)]
        for each in ranks:
            each.start()
        answers = [out.get(timeout=300) for _ in ranks]
        for each in ranks:
            each.join()
    return {
        "ranks": count,
        "samples_mb": answers[0][3] / 1e6,
        "resident_mb_of_each_rank": max(sizes["Rss"] for _, sizes, _, _ in answers) / 1e6,
        "resident_mb_of_all_ranks_together": sum(sizes["Pss"] for _, sizes, _, _ in answers) / 1e6,
    }


# -- a GPU against the CPU ---------------------------------------------------------------------------------------------


def compare_with_cpu(pictures: Path, device: int) -> dict[str, Any]:
    """Mean and largest difference in levels of gray between DALI on the GPU and on the CPU, same requests."""
    out: dict[str, Any] = {}
    scale = 255 * torch.tensor(Transform().std).view(3, 1, 1)
    for tier in ("memory jpeg", "memory decoded"):
        with tempfile.TemporaryDirectory(prefix="data-benchmark-") as cache:
            rows = [list(tier_row(tier, "dali", pictures, Path(cache), 1, each)) for each in (None, device)]
        differences = [((a - b.cpu()) * scale).abs() for (a, _), (b, _) in zip(*rows, strict=True)]
        out[tier] = {
            "same_labels": all(torch.equal(a, b.cpu()) for (_, a), (_, b) in zip(*rows, strict=True)),
            "mean_levels": float(torch.cat(differences).mean()),
            "largest_levels": max(float(each.max()) for each in differences),
        }
    return out


# -- the record --------------------------------------------------------------------------------------------------------


def measure(pictures: Path, quick: bool, device: int | None) -> dict[str, Any]:
    images = (320 if quick else 640) * (1 if device is None else 20)
    rows = measure_rows(
        pictures,
        device=device,
        rounds=1 if quick else 3,
        apart=not quick,
        images=images,
        others=dict(zip(BASELINES, (image_folder, dali_reader), strict=True)),
        progress=partial(tqdm, disable=None, desc="rows"),
    )
    memory = memory_of_ranks(pictures, RANKS_QUICK if quick else RANKS, multiprocessing.get_context("spawn"))
    record: dict[str, Any] = {"rows": rows, "memory": memory}
    if device is not None:
        record["difference_to_cpu"] = compare_with_cpu(pictures, device)
        record["gpu"] = torch.cuda.get_device_name(device)
    return record


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The promises: pixels in memory against JPEG in the same backend, and against ImageFolder."""
    speed = {row["row"]: row["per_cpu_second"] for row in rows}
    out = {}
    for backend in ("torch", "dali"):
        if f"memory decoded, {backend}" in speed:
            cached = speed[f"memory decoded, {backend}"]
            out[f"{backend}: decoded / jpeg in memory"] = cached / speed[f"memory jpeg, {backend}"]
            out[f"{backend}: decoded / DALI file reader"] = cached / speed[BASELINES[1]]
            out[f"{backend}: decoded / ImageFolder"] = cached / speed[BASELINES[0]]
    return {name: round(value, 2) for name, value in out.items()}


def plot(record: dict[str, Any], file: Path) -> None:
    values = {row["row"]: row["per_cpu_second"] for row in record["rows"]}
    by_backend = {"torch": "#d1495b", "dali": "#2e7d32"}
    colours = [by_backend.get(name.rpartition(", ")[2], "#8a8a8a") for name in values]
    bars(file, values, colours, f"images per CPU-second, random resized crop to {SIZE}, normalised")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a picture costs, by tier and backend.")
    parser.add_argument("out", type=Path)
    parser.add_argument("pictures", type=Path, nargs="?")
    parser.add_argument("--quick", action="store_true", help="one round of fewer images, in one process")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: there is no CUDA device here")
    if not has_dali():
        raise SystemExit("DALI is not installed, which this compares with: pip install nvidia-dali-cuda130")
    device = torch.cuda.current_device() if options.device == "cuda" else None
    with tempfile.TemporaryDirectory(prefix="data-benchmark-") as folder:
        record = measure(options.pictures or generated(Path(folder)), options.quick, device)
    write(options, record)


def write(options: argparse.Namespace, record: dict[str, Any]) -> None:
    words = ["OUT", *(["PICTURES"] if options.pictures else []), *(["--quick"] if options.quick else [])]
    words += ["--device", "cuda"] if options.device == "cuda" else []
    about: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.data.tiers", *words]),
        "pictures": "an image folder" if options.pictures else "375 x 500 crops of scikit-learn's photographs",
        "commit": commit(),
        "date": date.today().isoformat(),
        "hardware": f"{processor()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            **{each: version(each) for each in ("torch", "torchvision", "nvidia-dali-cuda130", "pillow", "numpy")},
        },
        "ratios": ratios(record["rows"]),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "data.json").write_text(json.dumps({**about, **record}, indent=1) + "\n")
    plot(record, options.out / "data.svg")
    print(table(record["rows"]))
    for name, value in {**about["ratios"], **record["memory"], **record.get("difference_to_cpu", {})}.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
