"""Loaders of images beside each other: images per CPU-second in the first epoch, with preparation, and in later ones.

    python -m benchmarks.data.peers OUT NAME=PICTURES:SIZE ...

as in ``photographs=/data/imagenet:224 tiny=/data/cifar10:32``. PICTURES is an image folder with ``train/<class>/*`` on
local disk. All rows end in the same: batches of 64, random resized crop to SIZE, flip, normalised, float32.

========================== =================================================================================
row                        what it does
========================== =================================================================================
ImageFolder + DataLoader   torchvision's own: open, decode, transforms v2, one worker process
DALI file reader           DALI's own: readers.file, decoders.image_random_crop, resize, ...
LitData                    `optimize` writes chunks; StreamingDataset, transforms v2, one worker process
pixels in one file         as FFCV does: decoded once to a short side of 8/7 SIZE, memory-mapped, transforms v2
CachedImageDataModule      this library, with its defaults
========================== =================================================================================

The first epoch is everything from an empty folder on: imports, listing, converting, the first batches. Only Lightning
is imported before, by all rows. CPU time is that of the process and all its children, so a number does not depend
on how many threads a row has, and little on what else the machine does. Each row runs in a process of its own,
`ROUNDS` times in turn; shown are medians. LitData is left out if it is not installed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.data import tiers as data
from lightning_sparse.bench.data import BATCH, cpu_seconds
from lightning_sparse.bench.processes import own_process
from lightning_sparse.bench.report import commit, format_table, surroundings

ROUNDS, LATER_IMAGES = 3, 1500
PARTS = ("first", "later")
FOR_EVER = 10**6  # epochs
Row = Callable[[Path, Path, int], Iterator[Any]]
"""The batches of (image folder, folder to write to, size), one epoch after the other."""


def image_folder(pictures: Path, work: Path, size: int) -> Iterator[Any]:
    return data.image_folder(pictures, FOR_EVER, None, size)


def dali_reader(pictures: Path, work: Path, size: int) -> Iterator[Any]:
    return data.dali_reader(pictures, FOR_EVER, None, size)


def as_chunk(path: str) -> dict[str, Any]:
    return {"image": Path(path).read_bytes(), "class": Path(path).parent.name}


def litdata(pictures: Path, work: Path, size: int) -> Iterator[Any]:
    from litdata import StreamingDataLoader, StreamingDataset, optimize
    from PIL import Image

    look, labels = data.transforms(size), {name: label for label, name in enumerate(classes_of(pictures))}

    def sample(item: dict[str, Any]) -> tuple[torch.Tensor, int]:
        with Image.open(io.BytesIO(item["image"])) as image:
            return look(image.convert("RGB")), labels[item["class"]]

    files = [str(path) for path in files_of(pictures)]
    optimize(as_chunk, files, str(work / "chunks"), chunk_bytes="16MB", num_workers=1, verbose=False)
    chunks = StreamingDataset(str(work / "chunks"), cache_dir=str(work / "cache"), shuffle=True, transform=sample)
    loader = StreamingDataLoader(
        chunks, batch_size=BATCH, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    while True:
        yield from loader


class Pixels(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Images in one file that is mapped into memory."""

    def __init__(self, file: Path, shapes: list[tuple[int, int]], labels: list[int], look: Any) -> None:
        self._shapes, self._labels, self._look = shapes, labels, look
        self._ends = np.cumsum([3 * height * width for height, width in shapes])
        self._pixels = np.memmap(file, np.uint8, "r")

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        height, width = self._shapes[index]
        pixels = self._pixels[self._ends[index] - 3 * height * width : self._ends[index]].reshape(height, width, 3)
        return self._look(torch.from_numpy(np.array(pixels)).permute(2, 0, 1)), self._labels[index]


def one_file(pictures: Path, work: Path, size: int) -> Iterator[Any]:
    from lightning_sparse.data.decode import decode

    names, shapes, labels = classes_of(pictures), [], []
    with (work / "pixels").open("wb") as stream:
        for path in files_of(pictures):
            pixels = decode(path.read_bytes(), -(-size * 8 // 7))
            stream.write(pixels.tobytes())
            shapes.append((pixels.shape[0], pixels.shape[1]))
            labels.append(names.index(path.parent.name))
    loader = data.loader_of(Pixels(work / "pixels", shapes, labels, data.transforms(size)))
    while True:
        yield from loader


def ours(pictures: Path, work: Path, size: int) -> Iterator[Any]:
    from lightning_sparse.flavours.pytorch_lightning import CachedImageDataModule

    module = CachedImageDataModule(str(pictures), str(work), BATCH, size)
    module.setup("fit")
    try:
        loader, epoch = module.train_dataloader(), 0
        while True:
            loader.set_epoch(epoch)
            yield from loader
            epoch += 1
    finally:
        module.teardown("fit")


ROWS: dict[str, Row] = {
    "ImageFolder + DataLoader": image_folder,
    "DALI file reader": dali_reader,
    "LitData": litdata,
    "pixels in one file": one_file,
    "CachedImageDataModule": ours,
}


def classes_of(pictures: Path) -> list[str]:
    return sorted(each.name for each in (pictures / "train").iterdir())


def files_of(pictures: Path) -> list[Path]:
    return sorted(path for path in (pictures / "train").rglob("*.*") if path.is_file())


def measure(name: str, pictures: Path, size: int) -> dict[str, float]:
    """Images per CPU-second and per second, of the first epoch and of later ones; CPU-seconds of three epochs."""
    import pytorch_lightning  # noqa: F401  # a training has imported it, whatever loads its data

    torch.set_num_threads(1)
    count = len(files_of(pictures))
    with tempfile.TemporaryDirectory(prefix="data-peers-") as work:
        batches = ROWS[name](pictures, Path(work), size)
        found: dict[str, float] = {}
        for part, wanted in zip(PARTS, (count, max(2 * count, LATER_IMAGES)), strict=True):
            images, cpu, wall = 0, cpu_seconds(os.getpid()), time.perf_counter()
            while images < wanted:
                images += len(next(batches)[0])
            cpu, wall = cpu_seconds(os.getpid()) - cpu, time.perf_counter() - wall
            images = min(images, wanted)  # without those that fill a last batch
            found |= {f"{part}_per_cpu_second": images / cpu, f"{part}_per_second": images / wall}
        batches.close()  # type: ignore[attr-defined]  # a generator
    seconds = count / found["first_per_cpu_second"] + 2 * count / found["later_per_cpu_second"]
    return {**found, "cpu_seconds_of_three_epochs": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description="Loaders of images beside each other.")
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", nargs="+", metavar="NAME=PICTURES:SIZE")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), metavar="ROW", help="default: all that are installed")
    options = parser.parse_args()
    names = options.rows or [name for name in ROWS if name != "LitData" or find_spec("litdata") is not None]
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    parts = [(each.partition("=")[0], *each.partition("=")[2].rsplit(":", 1)) for each in options.sets]
    runs = [(part, name) for _ in range(ROUNDS) for part in parts for name in names]
    for (label, pictures, size), name in tqdm(runs, disable=None):
        with own_process() as call:
            row = call(f"the row {name!r} of {label}", measure, name, Path(pictures), int(size))
        found.setdefault((label, name), []).append(row)
    rows: list[dict[str, Any]] = [
        {"set": label, "row": name, **{key: round(median(run[key] for run in each), 2) for key in each[0]}}
        for (label, name), each in found.items()
    ]
    shown = [f"{label}=PICTURES:{size}" for label, _, size in parts]
    command = f"python -m benchmarks.data.peers OUT {' '.join(shown)}"
    command += f" --rows {' '.join(map(repr, options.rows))}" if options.rows else ""
    about: dict[str, Any] = {**surroundings(command)}
    packages = ["torchvision", "nvidia-dali-cuda130", "pillow", *(["litdata"] if "LitData" in names else [])]
    about |= {"commit": commit(), "rounds": ROUNDS, "packages": {each: version(each) for each in packages}}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "data-peers.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    shown = [
        (
            row["set"],
            row["row"],
            *(round(row[f"{part}_per_cpu_second"]) for part in PARTS),
            row["cpu_seconds_of_three_epochs"],
        )
        for row in rows
    ]
    return format_table(("", "images per CPU-second", "first epoch", "later", "CPU-seconds of three epochs"), shown)


if __name__ == "__main__":
    main()
