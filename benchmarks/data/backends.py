"""torch and DALI on a CPU, which `backend="auto"` decides between: images per CPU-second by format and size.

    python -m benchmarks.data.backends OUT PICTURES

PICTURES is an image folder with photographs. Each case has samples of one size in memory, pixels or JPEG files, made
from them: random resized crop, flip, normalised, in batches of 64. Both backends take turns in one process; numbers are
medians of `ROUNDS`.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.data.loaders import BATCH
from benchmarks.record import parser_of, surroundings, write
from lightning_sparse.cli.report import format_table
from lightning_sparse.data.decode import decode
from lightning_sparse.data.pipeline.batch import BatchRequest, Pipeline, Transform
from lightning_sparse.data.sample import Format, Sample

ROUNDS, FILES, CPU_S = 3, 64, 1.0
# format in memory, shorter side of a sample in memory, size of the images in a batch
CASES: list[tuple[Format, int, int]] = [
    *(("decoded", -(-size * 8 // 7), size) for size in (16, 28, 40, 56, 96, 128, 224)),
    ("decoded", 64, 224),
    *(("jpeg", shorter, 56) for shorter in (64, 128, 375)),
    *(("jpeg", shorter, 224) for shorter in (256, 375, 700, 1050, 2100)),
]


class Samples:
    """Samples of one size, as a store."""

    def __init__(self, files: Sequence[Path], format: Format, shorter: int, size: int) -> None:
        from PIL import Image

        self.format, self.short_side = format, -(-size * 8 // 7)
        self._samples = []
        for path in files:
            stream = io.BytesIO()
            with Image.open(path) as image:
                factor = shorter / min(image.size)
                wanted = (round(factor * image.width), round(factor * image.height))
                image.convert("RGB").resize(wanted).save(stream, "JPEG", quality=90)
            pixels = decode(stream.getvalue())
            data = pixels if format == "decoded" else np.frombuffer(stream.getvalue(), np.uint8)
            self._samples.append(Sample(data, 0, 0, *pixels.shape[:2]))

    def get(self, indices: Sequence[int]) -> list[Sample]:
        return [self._samples[index % len(self._samples)] for index in indices]


def per_cpu_second(pipeline: Pipeline, size: int, batches: int) -> float:
    requests = (BatchRequest(np.arange(BATCH), epoch, size, True) for epoch in range(batches))
    begin = time.process_time()
    for images, _ in pipeline.run(requests):
        float(images[0, 0, 0, 0])
    return batches * BATCH / (time.process_time() - begin)


def measure(files: Sequence[Path], format: Format, shorter: int, size: int) -> dict[str, Any]:
    from lightning_sparse.data.pipeline.dali import DaliPipeline
    from lightning_sparse.data.pipeline.images import TorchPipeline

    store = Samples(files, format, shorter, size)
    pipelines: dict[str, Pipeline] = {
        "torch": TorchPipeline(store, Transform(), threads=1),
        "dali": DaliPipeline(store, Transform(), batch_size=BATCH, threads=1),
    }
    found: dict[str, list[float]] = {name: [] for name in pipelines}
    counts = {name: max(2, round(per_cpu_second(each, size, 3) * CPU_S / BATCH)) for name, each in pipelines.items()}
    for _ in range(ROUNDS):
        for name, pipeline in pipelines.items():
            found[name].append(per_cpu_second(pipeline, size, counts[name]))
    for pipeline in pipelines.values():
        pipeline.close()
    row: dict[str, Any] = {"format": format, "shorter_side": shorter, "image_size": size}
    row |= {name: round(median(each)) for name, each in found.items()}
    return row | {"dali / torch": round(row["dali"] / row["torch"], 2)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("pictures", type=Path, metavar="PICTURES")
    options = parser.parse_args()
    torch.set_num_threads(1)
    files = sorted(path for path in options.pictures.rglob("*.*") if path.is_file())[:FILES]
    rows = [measure(files, *case) for case in tqdm(CASES, disable=None)]
    text = format_table(tuple(rows[0]), [tuple(row.values()) for row in rows])
    write(options.out / "data-backends.json", {**surroundings(), "rounds": ROUNDS, "rows": rows}, text)


if __name__ == "__main__":
    main()
