"""How fast selection is, next to what it is measured against and to the floor that memory sets.

    python benchmarks/kernels.py runs/kernels               # an hour; CPU, or the GPU with --device cuda
    python benchmarks/kernels.py runs/kernels --slow-up-to 30_000_000 --densities 0.01 0.1 --seconds 0.5   # minutes
    python benchmarks/kernels.py /tmp/try --quick           # seconds

All methods of one case are timed in turns within one loop, so that a busy machine disturbs them alike, and medians are
reported. A method that is slow is repeated less often (see `--seconds`), or left out where x is large (see
`--slow-up-to`). `x sum` and `x copy` are ratios to `x.sum()` and `y.copy_(x)` of the same case: reading x once, and
reading and writing it once.

| row | what it is |
|---|---|
| sum, read, copy | the floors: x.sum(), x.amax(), y.copy_(x) |
| add | torch.add(x, y, out=z): the three streams of memory that error feedback needs |
| select | mstopk(x, k) |
| compress | error feedback, selection and a bf16 message |
| topk | torch.topk(|x|, k, sorted=False) |
| mstopk 30 | the paper's loop as it circulates, 30 counting passes; `compiled` under torch.compile |
| argpartition | numpy, CPU only |
| DGC | a threshold from the top-k of a 1 % sample, then a second selection among what reached it |
| ..., n threads | the same with `--more-threads n`, in the same loop |

Writes results.json (hardware, date, versions, commit, command, every row) and kernels.svg.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lightning_sparse.bench.provenance import commit, processor
from lightning_sparse.kernels import compress, kernel_report, mstopk

Method = Callable[[], object]
FLOORS = ("sum", "read", "copy", "add")
SLOW = ("topk", "mstopk 30", "mstopk 30 compiled", "argpartition", "DGC")
SIZES = (100_000, 1_000_000, 10_000_000, 25_600_000, 100_000_000)


def gaussian(numel: int, g: torch.Generator) -> Tensor:
    return torch.randn(numel, generator=g)


def laplace(numel: int, g: torch.Generator) -> Tensor:
    return torch.empty(numel).exponential_(generator=g) * torch.randn(numel, generator=g).sign()


def heavy_tailed(numel: int, g: torch.Generator) -> Tensor:
    """Like Student's t with two degrees of freedom."""
    return torch.randn(numel, generator=g) / torch.empty(numel).exponential_(generator=g).sqrt().clamp(min=1e-3)


def layered(numel: int, g: torch.Generator) -> Tensor:
    """Like a network's gradient: layers of very different sizes and scales, some rows exactly zero."""
    x = torch.randn(numel, generator=g)
    edges = (torch.rand(40, generator=g).pow(2).cumsum(0) / 20 * numel).long().clamp(max=numel).tolist()
    for begin, end in zip([0, *edges], [*edges, numel], strict=True):
        x[begin:end] *= 10 ** float(-3 * torch.rand((), generator=g))
    rows = x[: numel // 64 * 64].view(-1, 64)
    rows[torch.rand(rows.shape[0], generator=g) < 0.1] = 0.0
    return x


def resnet50(numel: int, g: torch.Generator) -> Tensor:
    """The gradient of a ResNet-50 (25,557,032 elements) after one step on noise, in the order of its parameters;
    repeated or cut to the length that is asked for."""
    from torchvision import models

    torch.manual_seed(g.initial_seed())
    net = models.resnet50()
    images, labels = torch.randn(8, 3, 128, 128, generator=g), torch.randint(1000, (8,), generator=g)
    torch.nn.functional.cross_entropy(net(images), labels).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in net.parameters() if parameter.grad is not None])
    return flat.repeat(-(-numel // flat.numel()))[:numel].contiguous()


DISTRIBUTIONS = {
    "gaussian": gaussian,
    "laplace": laplace,
    "heavy-tailed": heavy_tailed,
    "layered": layered,
    "resnet50": resnet50,
}


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


def with_threads(method: Method, threads: int, usual: int) -> Method:
    def run() -> None:
        torch.set_num_threads(threads)
        try:
            method()
        finally:
            torch.set_num_threads(usual)

    return run


def methods_for(x: Tensor, k: int, compiled: Callable[..., Tensor] | None, more_threads: int) -> dict[str, Method]:
    y, residual, left = torch.empty_like(x), torch.randn_like(x) * 0.1, torch.empty_like(x)
    methods: dict[str, Method] = {
        "sum": lambda: x.sum(),
        "read": lambda: x.amax(),
        "copy": lambda: y.copy_(x),
        "add": lambda: torch.add(x, residual, out=y),
        "select": lambda: mstopk(x, k),
        "compress": lambda: compress(x, residual, left, k, torch.bfloat16),
        "topk": lambda: torch.topk(x.abs(), k, sorted=False),
        "mstopk 30": lambda: thirty_passes(x, k),
        "DGC": lambda: dgc(x, k),
    }
    if compiled is not None:
        methods["mstopk 30 compiled"] = lambda: compiled(x, k)
    if x.device.type == "cpu":
        methods["argpartition"] = lambda: np.argpartition(np.abs(x.numpy()), x.numel() - k)[x.numel() - k :]
    if more_threads:
        usual = torch.get_num_threads()
        for name in [*FLOORS, "select", "compress"]:
            methods[f"{name}, {more_threads} threads"] = with_threads(methods[name], more_threads, usual)
    return methods


def seconds_of(method: Method, device: str) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        method()
        return time.perf_counter() - begin
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    method()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def interleaved(methods: dict[str, Method], device: str, repeats: int, seconds: float) -> dict[str, list[float]]:
    """Times of each method, after one call that is not counted; no method is begun again after `seconds` of it."""
    for method in methods.values():
        method()
    taken: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            if sum(taken[name]) < seconds:
                taken[name].append(seconds_of(method, device))
    return taken


def cases(options: argparse.Namespace) -> list[tuple[int, float, str]]:
    if options.quick:
        return [(100_000, 0.01, "gaussian"), (2_000_000, 0.01, "gaussian"), (2_000_000, 0.01, "layered")]
    sizes = options.sizes or [*SIZES, *[1_000_000_000] * (options.device != "cpu")]
    result = [(numel, density, "gaussian") for numel in sizes for density in options.densities]
    return result + [(numel, 0.01, name) for numel in sizes for name in options.distributions if name != "gaussian"]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    compiled = None if options.no_compile else torch.compile(thirty_passes, dynamic=True)
    progress = tqdm(cases(options), unit="case")
    for numel, density, distribution in progress:
        progress.set_description(f"d={numel:.0e} density={density:g} {distribution}")
        g = torch.Generator().manual_seed(0)
        x = DISTRIBUTIONS[distribution](numel, g).to(options.device)
        k = max(1, int(numel * density))
        methods = methods_for(x, k, compiled, options.more_threads)
        if options.slow_up_to is not None and numel > options.slow_up_to:
            methods = {name: method for name, method in methods.items() if name not in SLOW}
        times = interleaved(methods, options.device, options.repeats, options.seconds)
        floor, copy = float(np.median(times["sum"])), float(np.median(times["copy"]))
        for name, taken in times.items():
            middle = float(np.median(taken))
            rows.append(
                {
                    "numel": numel,
                    "density": density,
                    "distribution": distribution,
                    "method": name,
                    "ms": middle * 1e3,
                    "fastest_ms": min(taken) * 1e3,
                    "GB/s of x": 4 * numel / middle / 1e9,
                    "x sum": middle / floor,
                    "x copy": middle / copy,
                    "repeats": len(taken),
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines, case = [], None
    for row in rows:
        if case != (row["numel"], row["density"], row["distribution"]):
            case = (row["numel"], row["density"], row["distribution"])
            lines.append(f"\nd = {case[0]:,}, density {case[1]:g}, {case[2]}")
            lines.append(f"  {'':<20}{'ms':>12}{'GB/s of x':>12}{'x sum':>9}{'x copy':>9}{'repeats':>9}")
        lines.append(
            f"  {row['method']:<20}{row['ms']:>12.3f}{row['GB/s of x']:>12.2f}{row['x sum']:>9.2f}{row['x copy']:>9.2f}"
            f"{row['repeats']:>9}"
        )
    return "\n".join(lines)


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    report = kernel_report()  # not its path, which tells of one machine only
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "commit": commit(),
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "kernels": {"cpu": report.cpu, "cuda": report.cuda, "reasons": report.reasons},
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(7, 5), layout="tight")
    axes = figure.add_subplot()
    shown = [row for row in rows if row["distribution"] == "gaussian" and row["density"] == 0.01]
    shown = [row for row in shown if "threads" not in row["method"]]
    for name in dict.fromkeys(row["method"] for row in shown):
        line = [(row["numel"], row["ms"]) for row in shown if row["method"] == name]
        style = ":" if name in FLOORS else "-"
        axes.loglog(*zip(*line, strict=True), style, marker="o", label=name)
    axes.set_xlabel("elements")
    axes.set_ylabel("ms (median)")
    axes.set_title("Selecting 1 % of a Gaussian vector")
    axes.legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where results.json and kernels.svg go")
    parser.add_argument("--quick", action="store_true", help="three small cases")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on the CPU")
    parser.add_argument("--more-threads", type=int, default=0, help="time floors and ours with so many threads, too")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=5.0, help="spent at most on one method of one case")
    parser.add_argument("--sizes", type=int, nargs="+", help=f"default: {SIZES}, and 10^9 on a GPU")
    parser.add_argument("--densities", type=float, nargs="+", default=(1e-4, 1e-3, 1e-2, 1e-1))
    parser.add_argument("--distributions", nargs="+", choices=DISTRIBUTIONS, default=tuple(DISTRIBUTIONS))
    parser.add_argument("--slow-up-to", type=int, help=f"leave {SLOW} out where x has more elements than this")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = measure(options)
    print(table(rows))
    result = {**provenance(options), "rows": rows}
    (options.folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(rows, options.folder / "kernels.svg")
    print(f"\nwrote {options.folder / 'results.json'}")


if __name__ == "__main__":
    main()
