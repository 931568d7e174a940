"""Measure the speed of selection, compared with other methods and with the memory bandwidth.

    python -m benchmarks.exchange.kernels OUT               # an hour; CPU, or the GPU with --device cuda
    python -m benchmarks.exchange.kernels OUT --slow-up-to 30_000_000 --densities 0.01 --seconds 0.5  # short
    python -m benchmarks.exchange.kernels OUT --quick       # seconds

The methods of a case take turns in one loop, so that other load affects them alike. Rows report medians. A slow method
is repeated less often (see `--seconds`), or left out where x is large (see `--slow-up-to`). `x sum` and `x copy` are
ratios to the baselines of the same case: reading x once, and reading and writing x.

| row | operation |
|---|---|
| sum, read, copy | baselines: x.sum(), x.amax(), y.copy_(x) |
| add | torch.add(x, y, out=z), the memory traffic of error feedback |
| select | mstopk(x, k) |
| compress, compress 2bit | error feedback, selection and packing into a message with bfloat16 or two-bit values |
| sum 4, sum 4 2bit | the sum of four such messages |
| round | of dense16: error feedback, rounding to bf16 rows for 8 nodes, and the sum of 8 such rows |
| round, torch | round without compiled kernels |
| change | of updates: add the change by the optimizer to the node's model (accumulate_delta, step_ahead 0.5) |
| write | of updates: write a model between the global and the local weights (lerp_into) |
| topk | torch.topk(|x|, k, sorted=False) |
| mstopk 30 | the published loop of the paper, 30 counting passes; `compiled` under torch.compile |
| argpartition | numpy, CPU only |
| DGC | a threshold from the top-k of a 1% sample, then a second selection among the entries above it |

Writes OUT/kernels.json, .md and .svg.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.plots import figure
from benchmarks.record import Rows, parser_of, surroundings, write
from lightning_sparse.cli import format_table
from lightning_sparse.kernels import (
    accumulate,
    accumulate_delta,
    compress,
    kernel_report,
    lerp_into,
    mstopk,
    plain,
    round_rows,
    sum_rows,
)
from lightning_sparse.kernels.wire import TWO_BIT

Method = Callable[[], object]
Distribution = Callable[[int, torch.Generator], Tensor]
Case = tuple[int, float, str]
"""Elements, density, distribution."""

NODES = 8
BASELINES = ("sum", "read", "copy", "add")
QUICK: list[Case] = [(100_000, 0.01, "gaussian"), (2_000_000, 0.01, "gaussian"), (2_000_000, 0.01, "layered")]
SIZES = (100_000, 1_000_000, 10_000_000, 25_600_000, 100_000_000)
SLOW = ("topk", "mstopk 30", "mstopk 30 compiled", "argpartition", "DGC")


def gaussian(numel: int, g: torch.Generator) -> Tensor:
    return torch.randn(numel, generator=g)


def laplace(numel: int, g: torch.Generator) -> Tensor:
    return torch.empty(numel).exponential_(generator=g) * torch.randn(numel, generator=g).sign()


def heavy_tailed(numel: int, g: torch.Generator) -> Tensor:
    """Return a tensor similar to Student's t with two degrees of freedom."""
    return torch.randn(numel, generator=g) / torch.empty(numel).exponential_(generator=g).sqrt().clamp(min=1e-3)


def layered(numel: int, g: torch.Generator) -> Tensor:
    """Return a tensor similar to gradients: layers of different sizes and scales, and rows of zeros."""
    x = torch.randn(numel, generator=g)
    edges = (torch.rand(40, generator=g).pow(2).cumsum(0) / 20 * numel).long().clamp(max=numel).tolist()
    for begin, end in zip([0, *edges], [*edges, numel], strict=True):
        x[begin:end] *= 10 ** float(-3 * torch.rand((), generator=g))
    rows = x[: numel // 64 * 64].view(-1, 64)
    rows[torch.rand(rows.shape[0], generator=g) < 0.1] = 0.0
    return x


def resnet50(numel: int, g: torch.Generator) -> Tensor:
    """Return the gradient of a ResNet-50 (25,557,032 elements) on random images, repeated or cut to `numel`."""
    from torchvision import models

    torch.manual_seed(g.initial_seed())
    net = models.resnet50()
    images, labels = torch.randn(8, 3, 128, 128, generator=g), torch.randint(1000, (8,), generator=g)
    loss: Tensor = torch.nn.functional.cross_entropy(net(images), labels)
    torch.autograd.backward(loss)
    flat = torch.cat([parameter.grad.flatten() for parameter in net.parameters() if parameter.grad is not None])
    return flat.repeat(-(-numel // flat.numel()))[:numel].contiguous()


DISTRIBUTIONS: dict[str, Distribution] = {
    "gaussian": gaussian,
    "laplace": laplace,
    "heavy-tailed": heavy_tailed,
    "layered": layered,
    "resnet50": resnet50,
}


def measure(
    cases: Iterable[Case],
    device: str,
    *,
    repeats: int = 21,
    seconds: float = 5.0,
    more: Callable[[Tensor, int], dict[str, Method]] = lambda x, k: {},
) -> Rows:
    """Return a row for each case and method.

    Args:
        seconds: time limit for each method of a case.
        more: returns further methods of a case, timed in the same loop.
    """
    rows: Rows = []
    for case in cases:
        numel, density, distribution = case
        x = DISTRIBUTIONS[distribution](numel, torch.Generator().manual_seed(0)).to(device)
        k = max(1, int(numel * density))
        times = interleaved({**ours(x, k), **more(x, k)}, device, repeats, seconds)
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


def ours(x: Tensor, k: int) -> dict[str, Method]:
    """Return the baselines and kernels."""
    y, residual, left = torch.empty_like(x), torch.randn_like(x) * 0.1, torch.empty_like(x)
    four, four_2bit = (
        torch.stack([compress(x.roll(node), None, None, k, dtype) for node in range(4)])
        for dtype in (torch.bfloat16, TWO_BIT)
    )
    return {
        "sum": lambda: x.sum(),
        "read": lambda: x.amax(),
        "copy": lambda: y.copy_(x),
        "add": lambda: torch.add(x, residual, out=y),
        "select": lambda: mstopk(x, k),
        "compress": lambda: compress(x, residual, left, k, torch.bfloat16),
        "compress 2bit": lambda: compress(x, residual, left, k, TWO_BIT),
        "sum 4": lambda: accumulate(four, left, k, torch.bfloat16),
        "sum 4 2bit": lambda: accumulate(four_2bit, left, k, TWO_BIT),
        "round": lambda: sum_rows(round_rows(x, residual, left, NODES), left[: -(-x.numel() // NODES)]),
        "change": lambda: accumulate_delta(left, residual, [y], 0.5),
        "write": lambda: lerp_into(left, residual, [y], 0.5),
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


def table(rows: Rows) -> str:
    """Return one block per case."""
    head = ("ms", "GB/s of x", "x sum", "x copy", "repeats")
    blocks = []
    for (numel, density, name), of_case in groupby(rows, itemgetter("numel", "density", "distribution")):
        lines = [(row["method"], f"{row['ms']:.3f}", *(row[key] for key in head[1:])) for row in of_case]
        blocks.append(f"\nd = {numel:,}, density {density:g}, {name}\n{format_table(('', *head), lines)}")
    return "\n".join(blocks)


def thirty_passes(x: Tensor, k: int) -> Tensor:
    a = x.abs()
    mean, width = a.mean(), a.max() - a.mean()
    left, right = torch.zeros_like(mean), torch.ones_like(mean)
    for _ in range(30):
        ratio = left + (right - left) / 2
        few = (a >= mean + ratio * width).sum() <= k
        left, right = torch.where(few, left, ratio), torch.where(few, ratio, right)
    return torch.nonzero_static(a >= mean + left * width, size=k)


def dgc(x: Tensor, k: int) -> Tensor:
    a = x.abs()
    sample = a[torch.randint(a.numel(), (max(a.numel() // 100, 1),), device=a.device)]
    threshold = torch.topk(sample, max(1, sample.numel() * k // a.numel()), sorted=False).values.min()
    hits = torch.nonzero(a >= threshold).flatten()
    return hits[torch.topk(a[hits], min(k, hits.numel()), sorted=False).indices]


def argpartition(x: Tensor, k: int) -> Any:
    import numpy as np

    return np.argpartition(np.abs(x.numpy()), x.numel() - k)[x.numel() - k :]


def rounded(x: Tensor, residual: Tensor, left: Tensor) -> Tensor:
    rows = plain.round_rows(x, residual, left, NODES, None)
    return plain.sum_rows(rows, left[: rows.shape[1]])


def others(options: argparse.Namespace) -> Callable[[Tensor, int], dict[str, Method]]:
    """Return the methods to compare with."""
    compiled = None if options.no_compile else torch.compile(thirty_passes, dynamic=True)

    def of(x: Tensor, k: int) -> dict[str, Method]:
        residual, left = torch.randn_like(x) * 0.1, torch.empty_like(x)
        found: dict[str, Method] = {"round, torch": lambda: rounded(x, residual, left)}
        if options.slow_up_to is None or x.numel() <= options.slow_up_to:
            found["topk"] = lambda: torch.topk(x.abs(), k, sorted=False)
            found["mstopk 30"] = lambda: thirty_passes(x, k)
            found["DGC"] = lambda: dgc(x, k)
            if compiled is not None:
                found["mstopk 30 compiled"] = lambda: compiled(x, k)
            if x.device.type == "cpu":
                found["argpartition"] = lambda: argpartition(x, k)
        return found

    return of


def cases(options: argparse.Namespace) -> list[Case]:
    if options.quick:
        return QUICK
    sizes = options.sizes or [*SIZES, *[1_000_000_000] * (options.device != "cpu")]
    result = [(numel, density, "gaussian") for numel in sizes for density in options.densities]
    return result + [(numel, 0.01, name) for numel in sizes for name in options.distributions if name != "gaussian"]


def plot(record: dict[str, Any], file: Path) -> None:
    """Draw time over size, for 1% of a Gaussian vector."""
    shown = [row for row in record["rows"] if row["distribution"] == "gaussian" and row["density"] == 0.01]
    shown = [row for row in shown if "threads" not in row["method"]]  # older files have such rows
    with figure(file) as (axes,):
        for name in dict.fromkeys(row["method"] for row in shown):
            line = [(row["numel"], row["ms"]) for row in shown if row["method"] == name]
            style = ":" if name in BASELINES else "-"
            axes.loglog(*zip(*line, strict=True), style, marker="o", label=name)
        axes.set(xlabel="elements", ylabel="ms (median)", title="Selecting 1% of a Gaussian vector")


def main() -> None:
    from tqdm import tqdm  # imported here, because the GPU session uses this module without tqdm

    parser = parser_of(__doc__, quick="three small cases")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="number of torch threads on the CPU")
    parser.add_argument("--seconds", type=float, default=5.0, help="time limit per method and case")
    parser.add_argument("--sizes", type=int, nargs="+", help=f"default: {SIZES}, and 10^9 on a GPU")
    parser.add_argument("--densities", type=float, nargs="+", default=(1e-4, 1e-3, 1e-2, 1e-1))
    parser.add_argument("--distributions", nargs="+", choices=DISTRIBUTIONS, default=tuple(DISTRIBUTIONS))
    parser.add_argument("--slow-up-to", type=int, help=f"measure {SLOW} only up to this number of elements")
    parser.add_argument("--no-compile", action="store_true", help="do not measure torch.compile")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    repeats, seconds = (11, min(1.0, options.seconds)) if options.quick else (21, options.seconds)
    chosen = tqdm(cases(options), unit="case", disable=None)
    rows = measure(chosen, options.device, repeats=repeats, seconds=seconds, more=others(options))
    report = kernel_report()
    kernels = {"cpu": report.cpu, "cuda": report.cuda, "reasons": report.reasons}
    about = {**surroundings("numpy"), "device": options.device, "threads": options.threads, "kernels": kernels}
    write(options.out / "kernels.json", {**about, "rows": rows}, table(rows), plot)


if __name__ == "__main__":
    main()
