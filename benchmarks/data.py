"""What a picture costs: images per CPU-second of each tier and backend, and the memory that four ranks hold.

    python benchmarks/data.py OUT [PICTURES] [--quick] [--device cuda]

PICTURES is an image folder with ``train/<class>/*``; without it, crops of scikit-learn's two photographs are made. All
rows end in the same thing: batches of 64, random resized crop to 224, flip, normalised, float32 [64, 3, 224, 224].

========================== =====================================================================================
row                        what it does for each picture
========================== =====================================================================================
ImageFolder + DataLoader   torchvision's own: open, decode, transforms v2, one worker process
DALI file reader           DALI's own: readers.file, decoders.image_random_crop, resize, crop_mirror_normalize
storage, BACKEND           first epoch of a new cache: read, checked by decoding, written to disk and memory, batched
disk, BACKEND              memory_gb=0: read from LMDB and decoded in every epoch
memory jpeg, BACKEND       files in memory, decoded in every epoch
memory decoded, BACKEND    pixels in memory
========================== =====================================================================================

CPU time is that of the process and all its children, so a row's number does not depend on how many threads it has or
what else the machine does (as long as that leaves caches and clock alone). Each row runs in a process of its own,
`ROUNDS` times in turn; its number is the median. With ``--device cuda`` DALI's rows run on the GPU, where images per
second say more, and are compared with the CPU pipeline pixel by pixel.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from lightning_sparse.bench.provenance import commit, processor
from lightning_sparse.data.batch import Batch, Look, Pipeline, Request
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.manifest import load_or_list
from lightning_sparse.data.sampler import Layout, Order
from lightning_sparse.data.store import SampleStore, new_run, open_store
from lightning_sparse.data.tiers import Place

BATCH, SIZE, ROUNDS, RANKS = 64, 224, 3, 4
BASELINES = ["ImageFolder + DataLoader", "DALI file reader"]
TIERS = ["storage", "disk", "memory jpeg", "memory decoded"]
Timed = dict[str, float]


# -- the rows ----------------------------------------------------------------------------------------------------------


def image_folder(pictures: Path, epochs: int) -> Iterator[Batch]:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    look = Look()
    steps = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(look.mean, look.std)]
    data = ImageFolder(str(pictures / "train"), v2.Compose(steps))
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=1, persistent_workers=True)
    for _ in range(epochs):
        yield from loader


def dali_reader(pictures: Path, epochs: int, device: int | None) -> Iterator[Batch]:
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    @pipeline_def
    def graph() -> Any:
        files, labels = fn.readers.file(file_root=str(pictures / "train"), random_shuffle=True, name="reader")
        kind = "cpu" if device is None else "mixed"
        cut = fn.decoders.image_random_crop(files, device=kind, random_area=[0.08, 1.0])
        resized = fn.resize(cut, size=(SIZE, SIZE), antialias=True)
        mean, std = ([255 * each for each in part] for part in (Look().mean, Look().std))
        flip = fn.random.coin_flip()
        return fn.crop_mirror_normalize(resized, mirror=flip, mean=mean, std=std, output_layout="CHW"), labels

    pipe = graph(batch_size=BATCH, num_threads=1, device_id=device, exec_dynamic=True)
    batches = DALIGenericIterator(
        pipe, ["x", "y"], reader_name="reader", last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True
    )
    for _ in range(epochs):
        for (batch,) in batches:
            yield batch["x"], batch["y"]


def config_of(tier: str, pictures: Path, cache: Path) -> CacheConfig:
    config = CacheConfig(source=str(pictures), cache_dir=str(cache), memory_gb=4.0, format="decoded")
    if tier == "disk":
        return replace(config, memory_gb=0.0)
    return replace(config, format="jpeg") if tier == "memory jpeg" else config


def pipeline_of(backend: str, store: SampleStore, device: int | None) -> Pipeline:
    if backend == "dali":
        from lightning_sparse.data.pipeline_dali import DaliPipeline

        return DaliPipeline(store, Look(), batch_size=BATCH, threads=1, device=device)
    from lightning_sparse.data.pipeline_torch import TorchPipeline

    return TorchPipeline(store, Look(), threads=1)


def tier_row(tier: str, backend: str, pictures: Path, cache: Path, epochs: int, device: int | None) -> Iterator[Batch]:
    """Epochs of one tier; but for "storage" the samples are there before the clock starts."""
    config = config_of(tier, pictures, cache)
    manifest = load_or_list(config, "train", quiet=True)
    store = open_store(config, manifest)
    pipeline = pipeline_of(backend, store, device)
    order = Order(np.arange(len(manifest)), lambda nodes: store.owners, Layout(batch_size=BATCH))
    if tier != "storage":
        for first in range(0, len(manifest), BATCH):
            store.get(range(first, min(first + BATCH, len(manifest))))
        store.flush()
    try:
        for epoch in range(epochs):
            plan = order.epoch(epoch)
            yield from pipeline.run(Request(plan.batch(s, 0, 0), epoch, SIZE, True) for s in range(plan.steps))
    finally:
        pipeline.close()
        store.close()


# -- measuring ---------------------------------------------------------------------------------------------------------


def cpu_seconds(process: int) -> float:
    """Of a process, its threads, and all children, living or waited for."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))


def timed(batches: Iterator[Batch], warm: int) -> Timed:
    """After `warm` batches: images per CPU-second and per second."""
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


def one_row(name: str, pictures: Path, images: int, device: int | None) -> Timed:
    """In a process of its own."""
    torch.set_num_threads(1)
    count = sum(1 for _ in (pictures / "train").rglob("*.*"))
    tier, _, backend = name.partition(", ")
    with tempfile.TemporaryDirectory(prefix="data-benchmark-") as cache:
        if tier == "storage":
            return timed(tier_row(tier, backend, pictures, Path(cache), 1, device), 0)
        epochs = 1 + -(-images // count)
        if name == BASELINES[0]:
            batches = image_folder(pictures, epochs)
        elif name == BASELINES[1]:
            batches = dali_reader(pictures, epochs, device)
        else:
            batches = tier_row(tier, backend, pictures, Path(cache), epochs, device)
        return timed(batches, count // BATCH)


def run_row(name: str, pictures: Path, images: int, device: int | None) -> Timed:
    words = [sys.executable, __file__, "unused", str(pictures), "--row", name, "--images", str(images)]
    words += ["--device", "cuda"] if device is not None else []
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    result: Timed = json.loads(done.stdout.splitlines()[-1])
    return result


# -- memory of four ranks ----------------------------------------------------------------------------------------------


def hold(rank: int, config: CacheConfig, run: bytes, ready: Any, go_on: Any, out: Any) -> None:
    """Read everything, then look at what of this process is in memory."""
    manifest = load_or_list(config, "train", quiet=True)
    store = open_store(config, manifest, Place(0, 1, rank, RANKS), run)
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


def memory_of_ranks(pictures: Path, start: Callable[..., Any], context: Any) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="data-benchmark-") as cache:
        config = config_of("memory decoded", pictures, Path(cache))
        load_or_list(config, "train", quiet=True)
        ready, go_on, out = context.Barrier(RANKS), context.Barrier(RANKS), context.Queue()
        run = new_run()
        ranks = [start(target=hold, args=(rank, config, run, ready, go_on, out)) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        answers = [out.get(timeout=300) for _ in ranks]
        for each in ranks:
            each.join()
    return {
        "ranks": RANKS,
        "samples_mb": answers[0][3] / 1e6,
        "resident_mb_of_each_rank": max(sizes["Rss"] for _, sizes, _, _ in answers) / 1e6,
        "resident_mb_of_all_ranks_together": sum(sizes["Pss"] for _, sizes, _, _ in answers) / 1e6,
    }


# -- a GPU against the CPU ---------------------------------------------------------------------------------------------


def compare_with_cpu(pictures: Path, device: int) -> dict[str, Any]:
    """Mean and largest difference in levels of gray between DALI on the GPU and on the CPU, same requests."""
    out: dict[str, Any] = {}
    scale = 255 * torch.tensor(Look().std).view(3, 1, 1)
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


def generated(folder: Path) -> Path:
    """Crops of 375 x 500 of the photographs that scikit-learn carries."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng(0)
    for label, photograph in enumerate(load_sample_images().images):
        (folder / "train" / str(label)).mkdir(parents=True)
        for number in range(96):
            top, left = random.integers(0, photograph.shape[0] - 375), random.integers(0, photograph.shape[1] - 500)
            picture = Image.fromarray(photograph[top : top + 375, left : left + 500])
            picture.save(folder / "train" / str(label) / f"{number}.jpg", quality=92)
    return folder


def measure(pictures: Path, quick: bool, device: int | None) -> dict[str, Any]:
    from tqdm import tqdm

    backends = ["dali"] if device is not None else ["torch", "dali"]
    names = BASELINES + [f"{tier}, {backend}" for tier in TIERS for backend in backends]
    found: dict[str, list[Timed]] = {name: [] for name in names}
    rounds = 1 if quick else ROUNDS
    bar = tqdm(total=rounds * len(names), disable=None, desc="rows")
    for _ in range(rounds):
        for name in names:
            images = (4 if "decoded" in name else 1) * (320 if quick else 640)
            found[name].append(run_row(name, pictures, images if device is None else 20 * images, device))
            bar.update()
    bar.close()
    rows = [
        {"row": name, **{key: median(each[key] for each in runs) for key in runs[0]}, "rounds": len(runs)}
        for name, runs in found.items()
    ]
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    record: dict[str, Any] = {"rows": rows, "memory": memory_of_ranks(pictures, context.Process, context)}
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


def plot(record: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    rows = record["rows"][::-1]
    colours = {"torch": "#d1495b", "dali": "#2e7d32"}
    figure, axes = plt.subplots(figsize=(7.5, 0.36 * len(rows) + 1))
    tints = [colours.get(row["row"].rpartition(", ")[2], "#8a8a8a") for row in rows]
    bars = axes.barh([row["row"] for row in rows], [row["per_cpu_second"] for row in rows], color=tints)
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.set_xlabel(f"images per CPU-second, random resized crop to {SIZE}, normalised")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a picture costs, by tier and backend.")
    parser.add_argument("out", type=Path)
    parser.add_argument("pictures", type=Path, nargs="?")
    parser.add_argument("--quick", action="store_true", help="one round of fewer images")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--images", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: there is no CUDA device here")
    device = torch.cuda.current_device() if options.device == "cuda" else None
    if options.row:
        print(json.dumps(one_row(options.row, options.pictures, options.images, device)))
        return
    folder = Path(tempfile.mkdtemp(prefix="data-benchmark-")) if options.pictures is None else None
    try:
        record = measure(options.pictures or generated(folder), options.quick, device)  # type: ignore[arg-type]
    finally:
        if folder is not None:
            shutil.rmtree(folder)
    write(options, record)


def write(options: argparse.Namespace, record: dict[str, Any]) -> None:
    words = ["OUT", *(["PICTURES"] if options.pictures else []), *(["--quick"] if options.quick else [])]
    words += ["--device", "cuda"] if options.device == "cuda" else []
    about = {
        "command": " ".join(["python benchmarks/data.py", *words]),
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
    print("| row | images per CPU-second | images per second |\n|---|---|---|")
    for row in record["rows"]:
        print(f"| {row['row']} | {row['per_cpu_second']:.0f} | {row['per_second']:.0f} |")
    for name, value in {**about["ratios"], **record["memory"], **record.get("difference_to_cpu", {})}.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
