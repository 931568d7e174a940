"""The part `kernels`: selection and compression, compared with the device's own sum, copy and topk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.exchange.kernels import measure, table
from benchmarks.gpu.claims import Claims, Part, Result, verdict
from benchmarks.record import Rows

SIZES, SMALL_SIZES = (800_000, 6_500_000, 25_600_000, 100_000_000), (100_000, 1_000_000)
LARGEST_TOPK = 30_000_000
"""Elements of the largest tensor for torch.topk, which needs memory and time."""


def kernels(folder: Path, device: torch.device) -> Iterator[Result]:
    """Time each size, the smallest first."""
    sizes = SIZES if device.type == "cuda" else SMALL_SIZES
    rows: Rows = []
    for case in [(size, 0.01, name) for size in sizes for name in ("gaussian", "layered")]:
        rows += measure([case], device.type, repeats=21, seconds=0.5, more=_topk)
        yield claims_of(rows, sizes[0], sizes[-1]), rows
    print(table(rows))


def _topk(x: torch.Tensor, k: int) -> dict[str, Callable[[], object]]:
    return {"topk": lambda: torch.topk(x.abs(), k, sorted=False)} if x.numel() <= LARGEST_TOPK else {}


def claims_of(rows: Rows, smallest: int, largest: int) -> Claims:
    """Return the verdicts of the claims whose rows are available."""
    of: dict[Any, Any] = {(row["numel"], row["distribution"], row["method"]): row for row in rows}
    claims: Claims = {}
    if (smallest, "gaussian", "compress") in of:
        us = 1e3 * of[smallest, "gaussian", "compress"]["ms"]
        claims["small"] = verdict(us <= 100.0, f"{us:.0f} us at {smallest:,}")
    if (largest, "gaussian", "select") in of:
        select = of[largest, "gaussian", "select"]["x sum"]
        compress = of[largest, "gaussian", "compress"]["x copy"]
        claims["select"] = verdict(select <= 3.0, f"{select:.2f} x at {largest:,}")
        claims["compress"] = verdict(compress <= 2.5, f"{compress:.2f} x at {largest:,}")
    slower = [of[key]["ms"] / of[(*key[:2], "select")]["ms"] for key in of if key[2] == "topk"]
    if slower:
        claims["topk"] = verdict(min(slower) > 1.0, f"{min(slower):.1f} to {max(slower):.1f} times")
    return claims


KERNELS = Part(
    kernels,
    60,
    {
        "select": "selecting 1% takes at most 3 times the time of reading the tensor",
        "compress": "compressing 1% takes at most 2.5 times the time of copying the tensor",
        "small": "compressing a shard of a 25 MB bucket on 8 devices takes at most 100 us",
        "topk": "selecting is faster than torch.topk",
    },
)
