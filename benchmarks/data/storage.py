"""Bytes on the storage link and time of each epoch and run, compared with reading the mount directly.

    sudo python -m benchmarks.data.storage OUT [--pictures IMAGES] [--count 3000] [--gbps 0.2]

Two nodes of two ranks read from a storage node behind a slow link (`lightning_sparse.lab`, which needs root and sshfs).
All ranks read an image folder on that mount and make training batches: random resized crop to 224, flip, normalization.
Nothing is trained. Each system runs in its own cluster:

    this library   CachedImageDataModule's loaders: run 1 with an empty cache_dir, run 2 with the cache of run 1
    ImageFolder    torchvision's ImageFolder, DistributedSampler and DataLoader with one worker process per rank: twice
    LitData        if installed: the files as chunks, written before the measurement; StreamingDataset with the folder
                   as a "local:" remote and a cache folder per node: twice

The kernel counts the bytes on the storage node's link, between barriers at the ends of epochs. The images are the given
folder, or 375 x 500 crops of photographs. The page cache is dropped before each run; the data set fits into memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.data.loaders import classes_of, files_of, generated, litdata_loader, make_chunks, transforms
from benchmarks.plots import GRAY, figure
from benchmarks.processes import on_clusters, storage_sent
from benchmarks.record import Rows, parser_of, surroundings, write
from lightning_sparse.topology import Topology

CLUSTER, BATCH, SIZE = "2x2", 50, 224
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


# -- in a rank of a node -----------------------------------------------------------------------------------------------


def read(
    topology: Topology, device: torch.device, gbps: float | None, role: str, source: str, work: Path, epochs: int,
    begun: float,
) -> Rows:  # fmt: skip
    """Return seconds and bytes on the storage link, of the start and of each epoch. A collective."""
    rows, last, before = Rows(), begun, 0

    def note(**about: Any) -> None:
        """Record time and bytes once all ranks have come this far."""
        nonlocal last, before
        dist.barrier()
        if topology.rank == 0:
            now, sent = time.time(), storage_sent()
            rows.append({"seconds": now - last, "storage bytes": sent - before, **about})
            last, before = now, sent
        dist.barrier()

    if role == "ImageFolder":
        loader, close = _image_folder(source)
    else:
        loader, close = _litdata(source, work) if role == "LitData" else _ours(source, work, role)
    note()
    for epoch in range(epochs):
        total = torch.tensor(sum(len(labels) for _, labels in loader(epoch)))
        dist.all_reduce(total)
        note(samples=int(total))
    close()
    return rows


def _ours(source: str, work: Path, shuffle: str) -> tuple[Any, Any]:
    from lightning_sparse.data.config import CacheConfig, ImageOptions
    from lightning_sparse.data.session import DataOptions, open_session

    cache_dir = work / f"local-disk-of-node{os.environ['NODE_RANK']}"
    cache = CacheConfig(source=source, cache_dir=str(cache_dir), memory_gb=1.5, shuffle=shuffle)  # type: ignore[arg-type]
    samples = ImageOptions(image_size=SIZE, backend="torch")
    options = DataOptions(cache=cache, batch_size=BATCH, samples=samples)
    session = open_session(options)
    loader = session.train_loader(fixed=False, on_epoch=lambda epoch: None, on_resume=lambda done: None)

    def batches(epoch: int) -> Any:
        loader.set_epoch(epoch)
        return loader

    def close() -> None:
        assert session.train is not None
        store = session.train.store
        if store.placement.device_index == 0:
            print(f"node {store.placement.node_index}: {store.node_counters()}", flush=True)
        session.close()

    return batches, close


def _image_folder(source: str) -> tuple[Any, Any]:
    from torch.utils.data import DataLoader, DistributedSampler
    from torchvision import datasets

    pictures = datasets.ImageFolder(f"{source}/train", transforms(SIZE))
    sampler: DistributedSampler[Any] = DistributedSampler(pictures, seed=0)
    loader = DataLoader(pictures, BATCH, sampler=sampler, num_workers=1, persistent_workers=True, prefetch_factor=4)

    def batches(epoch: int) -> Any:
        sampler.set_epoch(epoch)
        return loader

    return batches, lambda: None


def _litdata(source: str, work: Path) -> tuple[Any, Any]:
    cache, chunks = work / f"local-disk-of-node{os.environ['NODE_RANK']}", f"local:{source}/chunks"
    loader = litdata_loader(chunks, cache, classes_of(Path(source)), SIZE, batch_size=BATCH, prefetch_factor=4)
    return lambda epoch: loader, lambda: None


# -- the driver --------------------------------------------------------------------------------------------------------


def measure(role: str, source: Path, work: Path, gbps: float, epochs: int) -> dict[str, Any]:
    """Run all ranks once; return bytes on the storage link and seconds of the start and of each epoch."""
    subprocess.run(["sync"], check=True)
    DROP_CACHES.write_text("3\n")
    arguments = role, str(source), work, epochs, time.time()
    rows = on_clusters(read, *arguments, clusters=[CLUSTER], gbps=[1.0], storage=(source, gbps)) or []
    whole = {key: sum(row[key] for row in rows) for key in ("seconds", "storage bytes")}
    return {**whole, "start": rows[0], "epochs": rows[1:]}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--pictures", type=Path, help="image folder with train/<class>/*.jpg; default: generated images"
    )
    parser.add_argument("--count", type=int, default=3000, help="number of generated images (default %(default)s)")
    parser.add_argument("--gbps", type=float, default=0.2, help="rate of the storage node's link in Gbit/s")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--shuffles", nargs="+", default=["global", "local"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="data-storage-") as folder:
        source, work = Path(folder, "storage"), Path(folder, "work")
        if options.pictures is None:
            generated(source, options.count // 2)
        else:
            shutil.copytree(options.pictures, source)
        sizes = [path.stat().st_size for path in files_of(source)]
        systems: dict[str, list[dict[str, Any]]] = {}
        others = ["ImageFolder"]
        if find_spec("litdata") is not None:
            make_chunks(source, source / "chunks", workers=2)
            others.append("LitData")
        for role in [*options.shuffles, *others]:
            work.mkdir()
            runs = [measure(role, source, work, options.gbps, options.epochs) for _ in range(2)]
            systems[role if role in others else f"this library, {role}"] = runs
            shutil.rmtree(work)
    record = {**surroundings("torchvision", "litdata"), "gbps": options.gbps, "pictures": len(sizes)}
    record |= {"data set bytes": sum(sizes), "systems": systems}
    write(options.out / "data-storage.json", record, table(record), plot)


# -- the result --------------------------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    data, rate = record["data set bytes"], record["gbps"]
    lines = [
        f"{record['pictures']:,} images, {data / 1e6:,.1f} MB, behind a link of {1000 * rate:g} Mbit/s, which takes "
        f"{data * 8e-9 / rate:.1f} s at least. {CLUSTER} ranks on one machine; batches of {BATCH} a "
        f"rank, cropped to {SIZE}. Bytes as the kernel counts them, frames and the mount's own traffic included, as a "
        "multiple of the data set. *start* is everything before the first epoch: processes, imports, listing.",
        "",
        "| system | run | start | " + " | ".join(f"epoch {n + 1}" for n in range(_epochs(record))) + " | whole run |",
        "|---|---|" + "---|" * (_epochs(record) + 2),
    ]
    for system, runs in record["systems"].items():
        for number, run in enumerate(runs):
            cells = [_cell(each, data) for each in (run["start"], *run["epochs"], run)]
            lines.append(f"| {system} | {number + 1} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any], data: int) -> str:
    return f"{row['storage bytes'] / data:.3f} x, {row['seconds']:.1f} s"


def _epochs(record: dict[str, Any]) -> int:
    return len(next(iter(record["systems"].values()))[0]["epochs"])


def plot(record: dict[str, Any], file: Path) -> None:
    size, titles = record["data set bytes"], ("bytes over the storage link / data set", "seconds of an epoch")
    with figure(file, columns=2) as panels:
        for system, runs in record["systems"].items():
            rows = [row for run in runs for row in run["epochs"]]
            panels[0].plot([row["storage bytes"] / size for row in rows], "o-", label=system)
            panels[1].plot([row["seconds"] for row in rows], "o-", label=system)
        names = [f"run {run + 1}\nepoch {epoch + 1}" for run in range(2) for epoch in range(_epochs(record))]
        for panel, title in zip(panels, titles, strict=True):
            panel.set(title=title, ylim=(0, None))
            panel.set_xticks(range(len(names)), names)
            panel.grid()
        panels[1].axhline(size * 8e-9 / record["gbps"], color=GRAY, linestyle=":", label="link, once")


if __name__ == "__main__":
    main()
