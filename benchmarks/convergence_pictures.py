"""An image folder of small pictures, decoded once into one tensor for each split. Used by convergence.py."""

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
    for name, split in samples.items():
        split.sort(key=lambda sample: sample[0])
        tensors[f"{name}_x"] = (
            torch.from_numpy(np.stack([pixels for *_, pixels in split])).permute(0, 3, 1, 2).contiguous()
        )
        tensors[f"{name}_y"] = torch.tensor([classes.index(label) for _, label, _ in split])
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
