"""How fast selection is, next to what it is measured against and to the floor that memory sets.

    python -m benchmarks.exchange.kernels runs/kernels      # an hour; CPU, or the GPU with --device cuda
    python -m benchmarks.exchange.kernels runs/kernels --slow-up-to 30_000_000 --densities 0.01 --seconds 0.5  # short
    python -m benchmarks.exchange.kernels /tmp/try --quick  # seconds

All methods of one case are timed in turns within one loop, so that a busy machine disturbs them alike, and medians are
reported. A method that is slow is repeated less often (see `--seconds`), or left out where x is large (see
`--slow-up-to`). `x sum` and `x copy` are ratios to `x.sum()` and `y.copy_(x)` of the same case: reading x once, and
reading and writing it once.

| row | what it is |
|---|---|
| sum, read, copy, add, select, compress, round, change, write | see lightning_sparse/bench/kernels.py |
| round, torch | the same without compiled kernels |
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
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.pictures import picture
from lightning_sparse.bench.kernels import (
    BASELINES,
    DISTRIBUTIONS,
    NODES,
    QUICK,
    Case,
    Method,
    about,
    measure,
    methods,
    table,
)
from lightning_sparse.bench.report import commit, processor
from lightning_sparse.kernels import plain

SLOW = ("topk", "mstopk 30", "mstopk 30 compiled", "argpartition", "DGC")
SIZES = (100_000, 1_000_000, 10_000_000, 25_600_000, 100_000_000)


def resnet50(numel: int, g: torch.Generator) -> Tensor:
    """The gradient of a ResNet-50 (25,557,032 elements) on random images, repeated or cut to `numel`."""
    from torchvision import models

    torch.manual_seed(g.initial_seed())
    net = models.resnet50()
    images, labels = torch.randn(8, 3, 128, 128, generator=g), torch.randint(1000, (8,), generator=g)
    loss: Tensor = torch.nn.functional.cross_entropy(net(images), labels)
    torch.autograd.backward(loss)
    flat = torch.cat([parameter.grad.flatten() for parameter in net.parameters() if parameter.grad is not None])
    return flat.repeat(-(-numel // flat.numel()))[:numel].contiguous()


VECTORS = {**DISTRIBUTIONS, "resnet50": resnet50}


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


def rounded(x: Tensor, residual: Tensor, left: Tensor) -> Tensor:
    rows = plain.round_rows(x, residual, left, NODES, None)
    return plain.sum_rows(rows, left[: rows.shape[1]])


def with_threads(method: Method, threads: int, usual: int) -> Method:
    def run() -> None:
        torch.set_num_threads(threads)
        try:
            method()
        finally:
            torch.set_num_threads(usual)

    return run


def others(options: argparse.Namespace) -> Callable[[Tensor, int], dict[str, Method]]:
    """What ours is measured against."""
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
                found["argpartition"] = lambda: np.argpartition(np.abs(x.numpy()), x.numel() - k)[x.numel() - k :]
        if options.more_threads:
            for name, method in methods(x, k).items():
                many = with_threads(method, options.more_threads, options.threads)
                found[f"{name}, {options.more_threads} threads"] = many
        return found

    return of


def cases(options: argparse.Namespace) -> list[Case]:
    if options.quick:
        return QUICK
    sizes = options.sizes or [*SIZES, *[1_000_000_000] * (options.device != "cpu")]
    result = [(numel, density, "gaussian") for numel in sizes for density in options.densities]
    return result + [(numel, 0.01, name) for numel in sizes for name in options.distributions if name != "gaussian"]


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "commit": commit(),
        "cpu": processor(),
        **about(),
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }


def plot(record: dict[str, Any], file: Path) -> None:
    """Time over size, for 1 % of a Gaussian vector."""
    shown = [row for row in record["rows"] if row["distribution"] == "gaussian" and row["density"] == 0.01]
    shown = [row for row in shown if "threads" not in row["method"]]
    with picture(file) as (axes,):
        for name in dict.fromkeys(row["method"] for row in shown):
            line = [(row["numel"], row["ms"]) for row in shown if row["method"] == name]
            style = ":" if name in BASELINES else "-"
            axes.loglog(*zip(*line, strict=True), style, marker="o", label=name)
        axes.set(xlabel="elements", ylabel="ms (median)", title="Selecting 1 % of a Gaussian vector")


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
    parser.add_argument("--distributions", nargs="+", choices=VECTORS, default=tuple(VECTORS))
    parser.add_argument("--slow-up-to", type=int, help=f"leave {SLOW} out where x has more elements than this")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = measure(
        tqdm(cases(options), unit="case"),
        options.device,
        repeats=options.repeats,
        seconds=options.seconds,
        more=others(options),
        distributions=VECTORS,
    )
    print(table(rows))
    result = {**provenance(options), "rows": rows}
    (options.folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    try:
        plot(result, options.folder / "kernels.svg")
    except ValueError as error:
        print(f"no plot: {error}")
    print(f"\nwrote {options.folder / 'results.json'}")


if __name__ == "__main__":
    main()
