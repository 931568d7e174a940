"""The part `parity`: losses and final weights of each method on real ranks, compared with DDP and with the CPU.

Each training takes 20 steps from equal weights on equal samples, in fp32 unless its name gives another precision.
On a GPU, ranks use NCCL. If there are fewer GPUs than ranks, ranks share GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from benchmarks.gpu.claims import DDP, NOT_RUN, Claims, Part, Result, verdict
from benchmarks.processes import on_clusters
from benchmarks.record import Rows

CLUSTERS = ("2x2", "2x1", "4x1")
"""Nodes and ranks per node. A session on a CPU takes the first."""
LIKE_DDP, LIKE_CPU = 2e-6, 5e-3
"""Largest relative differences of losses. A GPU rounds sums differently, so near ties it selects other entries."""


def parity(folder: Path, device: torch.device) -> Iterator[Result]:
    """Train with each method on each cluster, on the CPU and on `device`."""
    from benchmarks.gpu.ranks import train_all

    rows = Rows()
    for cluster in CLUSTERS if device.type != "cpu" else CLUSTERS[:1]:
        for kind in dict.fromkeys(("cpu", device.type)):
            found = on_clusters(train_all, clusters=[cluster], cpu=kind == "cpu") or []
            rows += [{"device": kind, **row} for row in found]
        yield check(rows), rows


def check(rows: Rows) -> Claims:
    """Return the verdicts on the trainings so far."""
    losses = {(row["device"], row["cluster"], row["method"]): row["losses"] for row in rows}
    like_ddp = {row["method"] for row in rows if row["like DDP"]}
    unequal = [f"{row['device']} {row['cluster']} {row['method']}" for row in rows if not row["equal weights"]]
    from_ddp = {key: _difference(own, losses[(*key[:2], DDP)]) for key, own in losses.items() if key[2] in like_ddp}
    from_cpu = {key: _difference(own, losses[("cpu", *key[1:])]) for key, own in losses.items() if key[0] != "cpu"}
    return {
        "ranks": verdict(not unequal, f"{len(rows)} trainings; unequal: {', '.join(unequal) or 'none'}"),
        "ddp": _at_most(from_ddp, LIKE_DDP),
        "cpu": _at_most(from_cpu, LIKE_CPU) if from_cpu else (NOT_RUN, "no GPU; the trainings ran"),
    }


def _difference(first: list[float], second: list[float]) -> float:
    """Return the largest relative difference; infinity if a loss is NaN."""
    each = [abs(a - b) / abs(b) for a, b in zip(first, second, strict=True)]
    return math.inf if any(map(math.isnan, each)) else max(each)


def _at_most(differences: Mapping[tuple[str, str, str], float], limit: float) -> tuple[str, str]:
    worst = max(differences, key=lambda key: differences[key])
    return verdict(differences[worst] <= limit, f"{differences[worst]:.1e}, in {' '.join(worst)}")


PARITY = Part(
    parity,
    240,
    {
        "ranks": "the weights of all ranks are bit-identical",
        "ddp": f"losses with dense exchanges equal DDP losses within {LIKE_DDP:g} (relative)",
        "cpu": f"losses on the GPU equal CPU losses within {LIKE_CPU:g} (relative)",
    },
    by_default=False,
)
