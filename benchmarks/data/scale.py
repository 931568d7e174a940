"""Costs of the list of samples and of the sampler on large clusters, with a synthetic list.

    python -m benchmarks.data.scale OUT

For each cluster (nodes x devices, files in 1,000 classes), it measures the list: seconds and bytes to make it from the
answers of storage, to write it and to map it. It measures seconds per rank to assign samples to nodes and to begin an
epoch, and milliseconds and CPU time per step of the sampler. It also measures how evenly foreign samples are spread
over devices. The code is the code of a run, except that the answers of storage are synthetic and take no time.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import alone
from benchmarks.record import parser_of, surroundings, write
from lightning_sparse.data.cache.store import owners
from lightning_sparse.data.pipeline.sampler import EpochPlan, Sampler, SamplerConfig
from lightning_sparse.data.sources.layout import manifest_of
from lightning_sparse.data.sources.manifest import Manifest
from lightning_sparse.data.sources.storage import Listed

CLUSTERS = ((1_281_167, 16, 8), (14_197_122, 128, 8))  # ImageNet-1k on 16 x 8, the whole of ImageNet on 128 x 8
CLASSES, BATCH, STEPS = 1000, 256, 20


def answers(files: int) -> dict[str, Listed]:
    """Return the answers of storage: the files of each class."""
    each = [files // CLASSES + (label < files % CLASSES) for label in range(CLASSES)]
    return {
        f"n{label:08}": Listed(
            [
                (f"train/n{label:08}/n{label:08}_{number}.JPEG", 110_000 + number, number + 1, number)
                for number in range(count)
            ],
            [(f"train/n{label:08}", 1)],
            [],
        )
        for label, count in enumerate(each)
    }


@contextmanager
def timed(row: dict[str, Any], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    row[name] = round(time.perf_counter() - begin, 3)


def measure(files: int, nodes: int, devices: int) -> dict[str, Any]:
    row: dict[str, Any] = {"files": files, "nodes": nodes, "devices": devices, "batch": BATCH}
    below = answers(files)
    with timed(row, "make_s"):
        made = manifest_of("/storage", "train", {name: 1 for name in below}, below)
    del below
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.manifest"
        with timed(row, "write_s"):
            file.write_bytes(made.to_bytes())
        row["file_bytes"] = file.stat().st_size
        with timed(row, "map_s"):
            manifest = Manifest.load(file)
        assert manifest.fingerprint == made.fingerprint
        row |= steps(manifest, nodes, devices)
    row["peak_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)
    return row


def steps(manifest: Manifest, nodes: int, devices: int) -> dict[str, Any]:
    """Measure the work of each rank: at the start, at the start of an epoch, and in each step."""
    row: dict[str, Any] = {}
    with timed(row, "place_s"):
        placed = owners(manifest.class_ids, nodes, 0)
    config = SamplerConfig(batch_size=BATCH, devices=(devices,) * nodes, shuffle="global")
    sampler = Sampler(np.arange(len(manifest)), lambda count: placed, config)
    with timed(row, "epoch_s"):
        plan = sampler.epoch(0)
        plan.batch(0, 0, 0)
    count = min(STEPS, plan.steps)
    begin, cpu = time.perf_counter(), time.thread_time()
    for step in range(count):
        plan.batch(step, 0, 0)
    row["step_ms"] = round((time.perf_counter() - begin) / count * 1e3, 2)
    row["step_cpu_ms"] = round((time.thread_time() - cpu) / count * 1e3, 2)
    return row | foreign(plan, placed, count)


def foreign(plan: EpochPlan, placed: np.ndarray[Any, Any], count: int) -> dict[str, Any]:
    """Return the fraction of foreign samples of each device of node 0, over some steps."""
    batches = [[plan.batch(step, 0, device) for device in range(plan.config.devices[0])] for step in range(count)]
    shares = np.array([[np.mean(placed[batch] != 0) for batch in each] for each in batches])
    spread = shares.max(1) - shares.min(1)
    return {
        "foreign_percent_by_device": [round(100 * share, 2) for share in shares.mean(0).tolist()],
        "foreign_samples_spread_in_a_step": round(float(spread.max()) * BATCH, 1),
    }


def main() -> None:
    options = parser_of(__doc__).parse_args()
    rows = [alone(f"{cluster[0]:,} files", measure, *cluster) for cluster in CLUSTERS]  # to measure memory
    write(options.out / "data-scale.json", {**surroundings("numpy"), "rows": rows}, json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
