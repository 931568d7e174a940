"""Common loaders of the data benchmarks, and their measurement in images per CPU-second.

CPU time is that of the process and all its children. So it does not depend on the number of threads, or on other load,
except through caches and clock rates.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.processes import alone
from lightning_sparse.cli import import_optional
from lightning_sparse.data.config import MEAN, STD

BATCH = 64


# -- measuring ---------------------------------------------------------------------------------------------------------


def throughput(batches: Iterator[Any], images: float = math.inf) -> dict[str, float]:
    """Return images per CPU-second and per second, for a number of images or until the loader ends."""
    seen, cpu, wall = 0.0, cpu_seconds(os.getpid()), time.perf_counter()
    for pixels, *_ in batches:
        seen += len(pixels)
        float(pixels[0, 0, 0, 0])  # on a GPU, wait for it
        if seen >= images:
            break
    seen = min(seen, images)  # without repeated images in the last batch
    cpu, wall = cpu_seconds(os.getpid()) - cpu, time.perf_counter() - wall
    return {"images": seen, "per_cpu_second": seen / cpu, "per_second": seen / wall}


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a process, its threads and all its children, running or ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        tasks = list(Path(f"/proc/{process}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    children: list[int] = []
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            children += map(int, (task / "children").read_text().split())
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))


def in_turn(
    measure: Callable[..., dict[str, float]], cases: dict[str, tuple[Any, ...]], rounds: int
) -> dict[str, dict[str, float]]:
    """Measure cases (name -> arguments) interleaved, each repetition in a new process; return the medians by name."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for name in tqdm([*cases] * rounds, unit="row", disable=None):
        found[name].append(alone(f"the row {name!r}", measure, *cases[name]))
    return {name: {key: median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}


# -- image folders -----------------------------------------------------------------------------------------------------


def files_of(pictures: Path) -> list[Path]:
    """Return the files of ``train/<class>/*``, sorted."""
    return sorted(path for path in (pictures / "train").rglob("*.*") if path.is_file())


def classes_of(pictures: Path) -> list[str]:
    return sorted(each.name for each in (pictures / "train").iterdir())


def generated(folder: Path, of_each: int = 96) -> Path:
    """Make an image folder of 375 x 500 crops of scikit-learn's sample photographs."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng(0)
    for label, photograph in enumerate(load_sample_images().images):
        (folder / "train" / str(label)).mkdir(parents=True)
        for number in range(of_each):
            top, left = random.integers(0, photograph.shape[0] - 375), random.integers(0, photograph.shape[1] - 500)
            picture = Image.fromarray(photograph[top : top + 375, left : left + 500])
            picture.save(folder / "train" / str(label) / f"{number}.jpg", quality=92)
    return folder


# -- endless loaders of other libraries --------------------------------------------------------------------------------


def transforms(size: int) -> Any:
    """Return torchvision's transforms: random resized crop, flip, normalization, float32."""
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()]
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return v2.Compose(steps)


def over_and_over(data: Any) -> Iterator[Any]:
    """Yield the batches of a data set from torch's DataLoader with one worker process."""
    from torch.utils.data import DataLoader

    # Forked, as in a user's script. Each row runs in a spawned process, which would spawn its workers, and spawned
    # workers read 20% slower.
    loader = DataLoader(
        data, BATCH, shuffle=True, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    while True:
        yield from loader


def image_folder(pictures: Path, work: Path, size: int) -> Iterator[Any]:
    from torchvision.datasets import ImageFolder

    yield from over_and_over(ImageFolder(str(pictures / "train"), transforms(size)))


def dali_reader(pictures: Path, work: Path, size: int) -> Iterator[Any]:
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    @pipeline_def  # type: ignore[untyped-decorator]
    def graph() -> Any:
        files, labels = fn.readers.file(file_root=str(pictures / "train"), random_shuffle=True, name="reader")
        cut = fn.decoders.image_random_crop(files, device="cpu", random_area=[0.08, 1.0])
        resized = fn.resize(cut, size=(size, size), antialias=True)
        mean, std = ([255 * each for each in part] for part in (MEAN, STD))
        flip = fn.random.coin_flip()
        return fn.crop_mirror_normalize(resized, mirror=flip, mean=mean, std=std, output_layout="CHW"), labels

    pipe = graph(batch_size=BATCH, num_threads=1, device_id=None, exec_dynamic=True)
    batches = DALIGenericIterator(
        pipe, ["x", "y"], reader_name="reader", last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True
    )
    while True:
        for (batch,) in batches:
            yield batch["x"], batch["y"]


# -- LitData -----------------------------------------------------------------------------------------------------------


def _as_chunk(path: str) -> dict[str, Any]:
    return {"image": Path(path).read_bytes(), "class": Path(path).parent.name}


def make_chunks(pictures: Path, chunks: Path, workers: int = 1) -> None:
    """Write the files of an image folder as LitData's chunks."""
    optimize = import_optional("litdata", "its rows").optimize
    files = [str(path) for path in files_of(pictures)]
    optimize(_as_chunk, files, str(chunks), chunk_bytes="16MB", num_workers=workers, verbose=False)


def litdata_loader(chunks: str, cache: Path, classes: list[str], size: int, **options: Any) -> Any:
    """Return LitData's loader of chunks, with one worker process."""
    from litdata import StreamingDataLoader, StreamingDataset
    from PIL import Image

    look = transforms(size)

    def sample(item: dict[str, Any]) -> tuple[torch.Tensor, int]:
        with Image.open(io.BytesIO(item["image"])) as image:
            return look(image.convert("RGB")), classes.index(item["class"])

    cache.mkdir(parents=True, exist_ok=True)
    data = StreamingDataset(chunks, cache_dir=str(cache), shuffle=True, transform=sample)
    return StreamingDataLoader(data, num_workers=1, persistent_workers=True, **options)
