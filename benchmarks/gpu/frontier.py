"""The part `frontier`: losses of larger models with four simulated workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.claims import Claims, Part, Result, verdict

SIZES = {"2M": 0.002, "6M": 0.0014, "20M": 0.001}
"""The learning rate of each size."""


def frontier(folder: Path, device: torch.device) -> Iterator[Result]:
    """Train each size at one learning rate. It continues an interrupted run."""
    from benchmarks.convergence.text import corpus_of, read_library
    from benchmarks.frontier.runs import ROWS, Finished, Run, work_through

    cuda = device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    finished, corpus, claims = Finished(folder / "runs.jsonl"), corpus_of(read_library(whole=cuda)), Claims()
    for size, lr in SIZES.items():
        of: dict[str, Any] = {"size": size, "steps": 0} if cuda else {"size": "0.1M", "steps": 60}
        runs = [Run(row, lr, ROWS[row].options[0], 0, **of) for row in ("dense", "updates 1%", "one node alone")]
        work_through(runs, finished, corpus, device)
        dense, sparse, alone = (finished.get(run)["val_bits"] for run in runs)  # type: ignore[index]
        held = sparse <= 1.03 * dense and sparse < alone
        claims[size] = verdict(held, f"{sparse / dense - 1:+.1%}; one node alone {alone / dense - 1:+.1%}")
        yield claims, finished.records


FRONTIER = Part(
    frontier,
    900,
    {
        size: f"{size} parameters: 1 % of the updates ends within 3 % of dense training, and below one node alone"
        for size in SIZES
    },
    by_default=False,
)
