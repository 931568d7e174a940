"""An image folder of small pictures, decoded once, and the order in which training sees it. Used by images.py."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

SUFFIXES = {".jpg", ".jpeg", ".png"}


@dataclass(frozen=True)
class Pictures:
    train_x: Tensor  # uint8 [N, 3, H, W]
    train_y: Tensor  # int64 [N]
    val_x: Tensor
    val_y: Tensor
    classes: tuple[str, ...]
    mean_C: Tensor  # of the training pictures, in 0..255
    std_C: Tensor

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def normalised(self, x_BCHW: Tensor) -> Tensor:
        return (x_BCHW - self.mean_C[:, None, None]) / self.std_C[:, None, None]


def augmented(padded_NCHW: Tensor, index_B: Tensor, top_B: Tensor, left_B: Tensor, flip_B: Tensor, size: int) -> Tensor:
    """Crops of `size` at (top, left) of the pictures `index`, some mirrored; float, channels last in memory."""
    rows_BH = top_B[:, None] + torch.arange(size)
    columns_BW = left_B[:, None] + torch.where(flip_B[:, None], torch.arange(size - 1, -1, -1), torch.arange(size))
    # Indices on both sides of a slice put the indexed dimensions first: [B, H, W, C].
    crops_BHWC = padded_NCHW[index_B[:, None, None], :, rows_BH[:, :, None], columns_BW[:, None, :]]
    return crops_BHWC.permute(0, 3, 1, 2).float()


class EpochOrder:
    """Which pictures, crops and mirrorings a rank sees in one epoch: a pure function of (seed, epoch)."""

    PAD = 4

    def __init__(self, num_pictures: int, seed: int, epoch: int, global_batch: int) -> None:
        generator = torch.Generator().manual_seed(seed * 10_007 + epoch)
        self.order_N = torch.randperm(num_pictures, generator=generator)
        self.shift_N2 = torch.randint(0, 2 * self.PAD + 1, (num_pictures, 2), generator=generator)
        self.flip_N = torch.rand(num_pictures, generator=generator) < 0.5
        self.global_batch = global_batch
        self.steps = num_pictures // global_batch

    def batch(self, padded_NCHW: Tensor, step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
        first = step * self.global_batch
        picked_B = torch.arange(first + rank, first + self.global_batch, world)
        index_B, shift_B2 = self.order_N[picked_B], self.shift_N2[picked_B]
        size = padded_NCHW.shape[-1] - 2 * self.PAD
        x = augmented(padded_NCHW, index_B, shift_B2[:, 0], shift_B2[:, 1], self.flip_N[picked_B], size)
        return x, index_B


def load_pictures(source: Path, cache: Path) -> Path:
    """The file in `cache` with the decoded pictures of `source`, made if it is not there."""
    if not source.exists():
        raise ValueError(f"{source} does not exist; give a folder, or a .tar of one, with {{train,val}}/<class>/*.jpg")
    stat = source.stat()
    key = hashlib.sha256(f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    file = cache / f"pictures-{key}.pt"
    if not file.exists():
        temporary = file.with_suffix(".tmp")
        torch.save(decode(source), temporary)
        temporary.replace(file)
    return file


def decode(source: Path) -> Pictures:
    """Sorted by path, so that the result does not depend on the order of a directory or a tar."""
    samples: dict[str, list[tuple[str, str, np.ndarray]]] = {"train": [], "val": []}
    for path, data in tqdm(_files(source), desc=f"decoding {source.name}", unit="picture"):
        split, label, _ = PurePosixPath(path).parts[-3:]
        if split in samples:
            samples[split].append((path, label, np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))))
    if not samples["train"] or not samples["val"]:
        raise ValueError(f"{source} holds no pictures under train/<class>/ and val/<class>/; both are needed")
    classes = tuple(sorted({label for _, label, _ in samples["train"]}))
    shapes = {pixels.shape for split in samples.values() for _, _, pixels in split}
    if len(shapes) > 1:
        raise ValueError(f"{source} holds pictures of {len(shapes)} sizes, such as {sorted(shapes)[:2]}; one is needed")
    tensors = {}
    for name, found in samples.items():
        found.sort(key=lambda sample: sample[0])
        tensors[f"{name}_x"] = (
            torch.from_numpy(np.stack([pixels for *_, pixels in found])).permute(0, 3, 1, 2).contiguous()
        )
        tensors[f"{name}_y"] = torch.tensor([classes.index(label) for _, label, _ in found])
    values = tensors["train_x"].double()
    return Pictures(
        **tensors, classes=classes, mean_C=values.mean((0, 2, 3)).float(), std_C=values.std((0, 2, 3)).float()
    )


def _files(source: Path) -> Iterator[tuple[str, bytes]]:
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.suffix.lower() in SUFFIXES:
                yield path.relative_to(source.parent).as_posix(), path.read_bytes()
        return
    with tarfile.open(source) as archive:
        for member in archive:
            if member.isfile() and PurePosixPath(member.name).suffix.lower() in SUFFIXES:
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, content.read()
