"""Compare loaders of images: images per CPU-second in the first epoch, with preparation, and in later epochs.

    python -m benchmarks.data.peers OUT NAME=IMAGES:SIZE ...

such as ``photographs=/data/imagenet:224 tiny=/data/cifar10:32``. IMAGES is an image folder with ``train/<class>/*`` on
local disk. All rows make equal batches: 64 images, random resized crop to SIZE, flip, normalized, float32.

========================== =================================================================================
row                        loader
========================== =================================================================================
ImageFolder + DataLoader   torchvision: open, decode, transforms v2, one worker process
DALI file reader           DALI: readers.file, decoders.image_random_crop, resize, ...
LitData                    `optimize` writes chunks; StreamingDataset, transforms v2, one worker process
pixels in one file         as in FFCV: decoded once to a short side of 8/7 SIZE, memory-mapped, transforms v2
CachedImageDataModule      this library, with its defaults
========================== =================================================================================

The first epoch starts with an empty folder: it includes imports, listing, conversion and the first batches. Only
Lightning is imported before, in all rows. Each row runs in its own process, `ROUNDS` times, interleaved; the table has
medians. LitData is left out if it is not installed. Writes OUT/data-peers.json and .md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data import loaders
from benchmarks.record import Rows, parser_of, surroundings, write
from lightning_sparse.cli import format_table

ROUNDS, LATER_IMAGES = 3, 1500
PARTS = ("first", "later")
Row = Callable[[Path, Path, int], Iterator[Any]]
"""The batches of (image folder, folder to write to, size), one epoch after the other."""


def litdata(pictures: Path, work: Path, size: int) -> Iterator[Any]:
    loaders.make_chunks(pictures, work / "chunks")
    classes, options = loaders.classes_of(pictures), {"batch_size": loaders.BATCH, "multiprocessing_context": "fork"}
    loader = loaders.litdata_loader(str(work / "chunks"), work / "cache", classes, size, **options)
    while True:
        yield from loader


class Pixels(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Images in one memory-mapped file."""

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

    names, shapes, labels = loaders.classes_of(pictures), [], []
    with (work / "pixels").open("wb") as stream:
        for path in loaders.files_of(pictures):
            pixels = decode(path.read_bytes(), -(-size * 8 // 7))
            stream.write(pixels.tobytes())
            shapes.append((pixels.shape[0], pixels.shape[1]))
            labels.append(names.index(path.parent.name))
    yield from loaders.over_and_over(Pixels(work / "pixels", shapes, labels, loaders.transforms(size)))


def ours(pictures: Path, work: Path, size: int) -> Iterator[Any]:
    from lightning_sparse.flavours.pytorch_lightning import CachedImageDataModule

    module = CachedImageDataModule(str(pictures), str(work), loaders.BATCH, size)
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
    "ImageFolder + DataLoader": loaders.image_folder,
    "DALI file reader": loaders.dali_reader,
    "LitData": litdata,
    "pixels in one file": one_file,
    "CachedImageDataModule": ours,
}


def measure(name: str, pictures: Path, size: int) -> dict[str, float]:
    """Return images per CPU-second and per second of the first and later epochs, and CPU-seconds of three epochs."""
    import pytorch_lightning  # noqa: F401  # as any training does

    torch.set_num_threads(1)
    count = len(loaders.files_of(pictures))
    with tempfile.TemporaryDirectory(prefix="data-peers-") as work:
        batches = ROWS[name](pictures, Path(work), size)
        found: dict[str, float] = {}
        for part, wanted in zip(PARTS, (count, max(2 * count, LATER_IMAGES)), strict=True):
            speed = loaders.throughput(batches, wanted)
            found |= {f"{part}_{key}": speed[key] for key in ("per_cpu_second", "per_second")}
        batches.close()  # type: ignore[attr-defined]  # a generator
    seconds = count / found["first_per_cpu_second"] + 2 * count / found["later_per_cpu_second"]
    return {**found, "cpu_seconds_of_three_epochs": seconds}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("sets", nargs="+", metavar="NAME=FOLDER:SIZE")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), metavar="ROW", help="default: all installed")
    options = parser.parse_args()
    names = options.rows or [name for name in ROWS if name != "LitData" or find_spec("litdata") is not None]
    parts = [(each.partition("=")[0], *each.partition("=")[2].rsplit(":", 1)) for each in options.sets]
    cases = {f"{name}, {label}": (name, Path(of), int(size)) for label, of, size in parts for name in names}
    keys = [{"set": label, "row": name} for label, *_ in parts for name in names]
    found = loaders.in_turn(measure, cases, ROUNDS).values()
    rows: Rows = [
        {**key, **{of: round(value, 2) for of, value in row.items()}} for key, row in zip(keys, found, strict=True)
    ]
    about = surroundings("torchvision", "nvidia-dali-cuda130", "pillow", "litdata")
    write(options.out / "data-peers.json", {**about, "rounds": ROUNDS, "rows": rows}, table(rows))


def table(rows: Rows) -> str:
    keys = [*(f"{part}_per_cpu_second" for part in PARTS), "cpu_seconds_of_three_epochs"]
    head = ("", "images per CPU-second", "first epoch", "later", "CPU-seconds of three epochs")
    return format_table(head, [(row["set"], row["row"], *(row[key] for key in keys)) for row in rows])


if __name__ == "__main__":
    main()
