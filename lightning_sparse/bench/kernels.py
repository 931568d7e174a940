"""Time selection on this machine against the memory bandwidth.

| row | operation |
|---|---|
| sum, read, copy | baselines: x.sum(), x.amax(), y.copy_(x) |
| add | torch.add(x, y, out=z), the memory traffic of error feedback |
| select | mstopk(x, k) |
| compress | error feedback, selection and packing into a bf16 message |
| round | of dense16: error feedback, rounding to bf16 rows for 8 nodes, and the sum of 8 such rows |
| change | of updates: what the optimizer changed is added to the node's model (add_change, step_ahead 0.5) |
| write | of updates: the model is written between the shared one and the node's (write_between) |

The methods of a case take turns in one loop, so that other load affects them alike. Rows report medians. `x sum` and
`x copy` are ratios to the baselines of the same case: reading x once, and reading and writing it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.bench.report import format_table
from lightning_sparse.kernels import (
    add_change,
    compress,
    kernel_report,
    mstopk,
    round_rows,
    sum_rows,
    write_between,
)

Method = Callable[[], object]
Distribution = Callable[[int, torch.Generator], Tensor]
Case = tuple[int, float, str]
"""Elements, density, distribution."""

NODES = 8
BASELINES = ("sum", "read", "copy", "add")
QUICK: list[Case] = [(100_000, 0.01, "gaussian"), (2_000_000, 0.01, "gaussian"), (2_000_000, 0.01, "layered")]
FULL: list[Case] = [(n, d, "gaussian") for n in (10**5, 10**6, 10**7, 25_600_000) for d in (0.001, 0.01, 0.1)]
FULL += [(25_600_000, 0.01, name) for name in ("laplace", "heavy-tailed", "layered")]


def gaussian(numel: int, g: torch.Generator) -> Tensor:
    return torch.randn(numel, generator=g)


def laplace(numel: int, g: torch.Generator) -> Tensor:
    return torch.empty(numel).exponential_(generator=g) * torch.randn(numel, generator=g).sign()


def heavy_tailed(numel: int, g: torch.Generator) -> Tensor:
    """Similar to Student's t with two degrees of freedom."""
    return torch.randn(numel, generator=g) / torch.empty(numel).exponential_(generator=g).sqrt().clamp(min=1e-3)


def layered(numel: int, g: torch.Generator) -> Tensor:
    """Similar to gradients: layers of different sizes and scales, and rows of zeros."""
    x = torch.randn(numel, generator=g)
    edges = (torch.rand(40, generator=g).pow(2).cumsum(0) / 20 * numel).long().clamp(max=numel).tolist()
    for begin, end in zip([0, *edges], [*edges, numel], strict=True):
        x[begin:end] *= 10 ** float(-3 * torch.rand((), generator=g))
    rows = x[: numel // 64 * 64].view(-1, 64)
    rows[torch.rand(rows.shape[0], generator=g) < 0.1] = 0.0
    return x


DISTRIBUTIONS = {"gaussian": gaussian, "laplace": laplace, "heavy-tailed": heavy_tailed, "layered": layered}


def measure(
    cases: Iterable[Case],
    device: str,
    *,
    repeats: int = 21,
    seconds: float = 5.0,
    more: Callable[[Tensor, int], dict[str, Method]] = lambda x, k: {},
    distributions: Mapping[str, Distribution] = DISTRIBUTIONS,
) -> list[dict[str, Any]]:
    """Return a row for each case and method.

    Args:
        seconds: time limit for each method of a case.
        more: returns further methods of a case, timed in the same loop.
        distributions: functions that draw a vector, by name.
    """
    rows: list[dict[str, Any]] = []
    for case in cases:
        numel, density, distribution = case
        x = distributions[distribution](numel, torch.Generator().manual_seed(0)).to(device)
        k = max(1, int(numel * density))
        times = interleaved({**methods(x, k), **more(x, k)}, device, repeats, seconds)
        rows += [_row(case, name, times) for name in times]
    return rows


def _row(case: Case, name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    numel, density, distribution = case
    middle = median(times[name])
    return {
        "numel": numel,
        "density": density,
        "distribution": distribution,
        "method": name,
        "ms": middle * 1e3,
        "fastest_ms": min(times[name]) * 1e3,
        "GB/s of x": 4 * numel / middle / 1e9,
        "x sum": middle / median(times["sum"]),
        "x copy": middle / median(times["copy"]),
        "repeats": len(times[name]),
    }


def about() -> dict[str, Any]:
    """The kernel implementation and the number of threads."""
    report = kernel_report()  # without its path, which is specific to this machine
    threads = torch.get_num_threads()
    return {"threads": threads, "kernels": {"cpu": report.cpu, "cuda": report.cuda, "reasons": report.reasons}}


def methods(x: Tensor, k: int) -> dict[str, Method]:
    """The baselines and kernels."""
    y, residual, left = torch.empty_like(x), torch.randn_like(x) * 0.1, torch.empty_like(x)
    return {
        "sum": lambda: x.sum(),
        "read": lambda: x.amax(),
        "copy": lambda: y.copy_(x),
        "add": lambda: torch.add(x, residual, out=y),
        "select": lambda: mstopk(x, k),
        "compress": lambda: compress(x, residual, left, k, torch.bfloat16),
        "round": lambda: sum_rows(round_rows(x, residual, left, NODES), left[: -(-x.numel() // NODES)]),
        "change": lambda: add_change(left, residual, [y], 0.5),
        "write": lambda: write_between(left, residual, [y], 0.5),
    }


def seconds_of(method: Method, device: str) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        method()
        return time.perf_counter() - begin
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    method()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def interleaved(methods: dict[str, Method], device: str, repeats: int, seconds: float) -> dict[str, list[float]]:
    """Time each method up to `repeats` times or `seconds` seconds, after a warm-up call."""
    for method in methods.values():
        method()
    taken: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            if sum(taken[name]) < seconds:
                taken[name].append(seconds_of(method, device))
    return taken


def table(rows: list[dict[str, Any]]) -> str:
    """One block per case."""
    head = ("ms", "GB/s of x", "x sum", "x copy", "repeats")
    blocks = []
    for (numel, density, name), of_case in groupby(rows, itemgetter("numel", "density", "distribution")):
        lines = [(row["method"], f"{row['ms']:.3f}", *(row[key] for key in head[1:])) for row in of_case]
        blocks.append(f"\nd = {numel:,}, density {density:g}, {name}\n{format_table(('', *head), lines)}")
    return "\n".join(blocks)
