"""Small data: images of smooth random colors, written as an image folder, and the corpus of some files."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from lightning_sparse.data.id_files import Corpus
from lightning_sparse.data.shards import files_of


def picture(number: int, height: int = 40, width: int = 60, mode: str = "RGB") -> Image.Image:
    small = np.random.default_rng(number).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def jpeg(number: int, height: int = 40, width: int = 60, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    picture(number, height, width, mode).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def make_folder(root: Path, per_class: int = 4, classes: int = 3, split: str = "train") -> Path:
    """<root>/<split>/c<label>/<number>.jpg, each file another picture."""
    for label in range(classes):
        folder = root / split / f"c{label}"
        folder.mkdir(parents=True)
        for number in range(per_class):
            (folder / f"{number}.jpg").write_bytes(jpeg(label * per_class + number))
    return root


def corpus_of(path: str | Path) -> Corpus:
    return Corpus(path, files_of(path))
