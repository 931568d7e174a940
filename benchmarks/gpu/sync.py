"""The part `sync`: steps in which a wait of the host for the GPU is an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.claims import HELD, NOT_HELD, NOT_RUN, Claims, Part, Result
from benchmarks.gpu.models import SMALL, batches_of
from benchmarks.gpu.waits import waits_raise
from benchmarks.gpu.ways import OVERLAP, SETTLING, UPDATES, Way, begin

CASES: dict[str, tuple[str, str, dict[str, Any], int, dict[str, Any]]] = {
    "sparse": ("sparse", OVERLAP, {}, 1, {}),
    "sparse_of_8": ("sparse, nodes of 8 devices", OVERLAP, {}, 8, {}),
    "dense16": ("dense16", OVERLAP, {"exchange": "dense16"}, 1, {}),
    "excluded": ("exclude='vectors'", OVERLAP, {"exclude": "vectors"}, 1, {}),
    "unused": ("find_unused_parameters", OVERLAP, {}, 1, {"find_unused_parameters": True}),
    "updates": ("updates", UPDATES, {}, 1, {}),
}
"""By name: title, method, options of the exchange, devices per node, options of DDP."""


def sync(folder: Path, device: torch.device) -> Iterator[Result]:
    """Run two steps of each case, once its buckets are settled."""
    begin(device)
    task = SMALL["gpt"]
    batches, claims = batches_of(task, device), Claims()
    for name, (_, method, config, devices, ddp) in CASES.items():
        way = Way(method, task, batches, config, devices, {"bucket_cap_mb": 0.2, **ddp})
        for _ in range(SETTLING):
            way.step()
        try:
            with waits_raise() if device.type == "cuda" else nullcontext():
                for _ in range(2):
                    way.step()
            claims[name] = (HELD, "no wait") if device.type == "cuda" else (NOT_RUN, "no GPU; the steps ran")
        except RuntimeError as error:
            claims[name] = (NOT_HELD, str(error).splitlines()[0])
        way.close()
        yield claims, {}


SYNC = Part(sync, 45, {name: f"the host does not wait for the GPU: {case[0]}" for name, case in CASES.items()})
