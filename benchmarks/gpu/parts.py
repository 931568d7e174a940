"""The parts of the GPU session, each in its own process: `python -m benchmarks.gpu.parts PART FOLDER [--cpu]`.

A part prints its output, then a line of JSON after `RESULT`: its claims, each with a verdict and a number, and its
data. See session.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.models import FULL, SMALL
from benchmarks.gpu.session import RESULT
from benchmarks.gpu.trace import hidden, lanes_of, length, record
from benchmarks.gpu.ways import LANES, NONE, ONE_STREAM, SETTLING, UPDATES, Way, begin, times

ROOT = Path(__file__).resolve().parents[2]
HELD, NOT_HELD, NOT_RUN = "held", "not held", "not run"
Claims = dict[str, tuple[str, str]]
"""The verdict and the number of each claim."""
Result = tuple[Claims, Any]


def verdict(held: bool, number: str) -> tuple[str, str]:
    return (HELD if held else NOT_HELD, number)


def build(folder: Path, device: torch.device) -> Result:
    """Compile the kernels for this GPU, in place."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        _run(
            [sys.executable, "setup.py", "build_ext", "--inplace"],
            {"LIGHTNING_SPARSE_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}", "MAX_JOBS": "8"},
        )
    code = "from lightning_sparse.kernels import kernel_report as r; print('report', r().cpu, '|', r().cuda)"
    said = _run([sys.executable, "-c", code])
    cpu, cuda = re.findall(r"report (.*) \| (.*)", said)[0]
    used = cuda if device.type == "cuda" else cpu
    return {"compiled": verdict(used == "compiled", f"{device.type}: {used}")}, {"cpu": cpu, "cuda": cuda}


def tests(folder: Path, device: torch.device) -> Result:
    """Run the tests marked ``gpu``, by file, because packages of other tests may be missing."""
    files = [path for part in ("kernels", "strategy") for path in sorted((ROOT / "tests" / part).glob("test_*.py"))]
    where = [str(path.relative_to(ROOT)) for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]
    words = [sys.executable, "-m", "pytest", "-p", "tests.helpers.timeout_optional", "-m", "gpu", "-q", *where]
    words += ["--continue-on-collection-errors", "--durations=5"]
    said = _run(words, check=False)
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|errors?|skipped)", said)}
    number = ", ".join(f"{count} {name}" for name, count in counts.items()) or (said.splitlines() or ["nothing"])[-1]
    failed = any(name not in ("passed", "skipped") for name in counts)
    if not failed and not counts.get("passed"):
        return {"pass": (NOT_RUN, number)}, counts
    return {"pass": verdict(not failed, number)}, counts


def kernels(folder: Path, device: torch.device) -> Result:
    """Time selection and compression, and this device's own copy and sum."""
    from benchmarks.exchange.kernels import measure, table

    sizes = [800_000, 6_500_000, 25_600_000, 100_000_000] if device.type == "cuda" else [100_000, 1_000_000]

    def topk(x: torch.Tensor, k: int) -> dict[str, Callable[[], object]]:
        return {"topk": lambda: torch.topk(x.abs(), k, sorted=False)} if x.numel() <= 30_000_000 else {}

    cases = [(size, 0.01, name) for size in sizes for name in ("gaussian", "layered")]
    rows = measure(cases, device.type, repeats=21, seconds=0.5, more=topk)
    print(table(rows))
    of = {(row["numel"], row["distribution"], row["method"]): row for row in rows}
    largest, smallest = (sizes[-1], "gaussian"), (sizes[0], "gaussian")
    select, compress = of[(*largest, "select")]["x sum"], of[(*largest, "compress")]["x copy"]
    small = 1e3 * of[(*smallest, "compress")]["ms"]
    faster = [of[key]["ms"] / of[(*key[:2], "select")]["ms"] for key in of if key[2] == "topk"]
    return {
        "select": verdict(select <= 3.0, f"{select:.2f} x at {largest[0]:,}"),
        "compress": verdict(compress <= 2.5, f"{compress:.2f} x at {largest[0]:,}"),
        "small": verdict(small <= 100.0, f"{small:.0f} us at {smallest[0]:,}"),
        "topk": verdict(min(faster) > 1.0, f"{min(faster):.1f} to {max(faster):.1f} times"),
    }, rows


def _step(model: str, folder: Path, device: torch.device) -> Result:
    """Time a step of ResNet-50 or of a GPT of 124 M parameters, on two nodes of one device each."""
    task = (FULL if device.type == "cuda" else SMALL)[model]
    seconds = 12.0 if device.type == "cuda" else 1.5
    ddp = {} if device.type == "cuda" else {"bucket_cap_mb": 0.2}
    begin(device)
    ways = [Way(name, task, device, ddp=ddp) for name in (NONE, ONE_STREAM, LANES, UPDATES)]
    free = times(ways, device, seconds)
    received = ways[2].received
    for way in ways:  # a link that the bytes of a step take half a step to cross
        way.communicator.gbps = 8e-9 * received / (0.5e-3 * free[NONE]["ms"])
    slow = times(ways, device, seconds)
    for way in ways:
        way.end()
    tables = {"without a link": free, "with a link of half a step": slow}
    for place, rows in tables.items():
        print(f"\n{model}, {place}")
        for name, row in rows.items():
            print(f"  {name:12} {row['ms']:9.2f} ms, queued after {row['host ms']:8.2f} ms ({row['steps']:.0f} steps)")

    return step_claims(free, slow, 0.5 * free[NONE]["ms"]), {"received bytes": received, **tables}


Times = dict[str, dict[str, float]]


def step_claims(free: Times, slow: Times, wire_ms: float) -> Claims:
    """Return claims about steps with an ideal link, and with a link that takes a given time."""

    def added(rows: Times, name: str) -> float:
        return rows[name]["ms"] - rows[NONE]["ms"]

    def adds_little(name: str) -> tuple[str, str]:
        share = added(free, name) / free[NONE]["ms"]
        return verdict(share <= 0.10, f"{share:+.1%}")

    def hides(name: str, most: float) -> tuple[str, str]:
        seen = added(slow, name) - added(free, name)
        return verdict(seen <= most * wire_ms, f"{seen:.2f} ms of {wire_ms:.2f} are seen")

    lanes, at_once = slow[LANES]["ms"], slow[ONE_STREAM]["ms"]
    return {
        "lanes": adds_little(LANES),
        "updates": adds_little(UPDATES),
        "beside": verdict(lanes <= at_once, f"{lanes:.2f} ms, at once {at_once:.2f} ms"),
        "hides": hides(LANES, 0.5),
        "hides_updates": hides(UPDATES, 0.2),
    }


SYNC_CASES: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "sparse": (LANES, {}, 1, {}),
    "sparse_of_8": (LANES, {}, 8, {}),
    "dense16": (LANES, {"exchange": "dense16"}, 1, {}),
    "excluded": (LANES, {"exclude": "vectors"}, 1, {}),
    "unused": (LANES, {}, 1, {"find_unused_parameters": True}),
    "updates": (UPDATES, {}, 1, {}),
}


def sync(folder: Path, device: torch.device) -> Result:
    """Run steps in which every wait of the host for the device is an error."""
    begin(device)
    claims: Claims = {}
    for name, (kind, config, devices, ddp) in SYNC_CASES.items():
        way = Way(kind, SMALL["gpt"], device, config, devices, {"bucket_cap_mb": 0.2, **ddp})
        for _ in range(SETTLING):
            way.step()
        try:
            with _no_waits() if device.type == "cuda" else nullcontext():
                for _ in range(2):
                    way.step()
            claims[name] = (HELD, "no wait") if device.type == "cuda" else (NOT_RUN, "no GPU; the steps ran")
        except RuntimeError as error:
            claims[name] = (NOT_HELD, str(error).splitlines()[0])
        way.end()
    return claims, {}


@contextmanager
def _no_waits() -> Any:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def trace(folder: Path, device: torch.device) -> Result:
    """Trace one backward pass of ResNet-50 and one step with updates, as lanes over time.

    A GPT's largest gradient, that of the embedding, is ready last and cannot overlap, so gradients are those of
    ResNet-50.
    """
    begin(device)
    cuda = device.type == "cuda"
    ddp = {} if cuda else {"bucket_cap_mb": 0.2}
    lanes_by_part, claims = {}, Claims()
    for name, kind, model in (("backward", LANES, "resnet50"), ("updates", UPDATES, "gpt")):
        task = (FULL if cuda else SMALL)[model]
        plain = times([Way(NONE, task, device, ddp=ddp)], device, 1.0)[NONE]["ms"]
        way = Way(kind, task, device, ddp=ddp)
        for _ in range(SETTLING):
            way.step()
        way.communicator.gbps = 8e-9 * way.received / (0.3e-3 * plain)
        step = way.backward if name == "backward" else partial(_update_and_step, way)
        way.step()
        lanes_by_part[name] = lanes_of(record(step, folder / f"{name}.json.gz", device))
        way.end()
        share = hidden(lanes_by_part[name])
        claims[name] = (NOT_RUN, "no link seen") if share is None else verdict(share >= 0.7, f"{share:.0%}")
    return claims, {name: {lane.name: length(lane.work) for lane in lanes} for name, lanes in lanes_by_part.items()}


def _update_and_step(way: Way) -> None:
    """Run two steps: the exchange of one step ends in the next."""
    way.update()
    way.step()


def _loss(size: str, folder: Path, device: torch.device) -> Result:
    """Train a larger model with four simulated nodes, by eight methods. It continues an interrupted run."""
    from benchmarks.gpu.loss import loss

    torch.set_float32_matmul_precision("high")
    if device.type == "cpu":
        torch.set_num_threads(1)  # models this small are slower on more
    result: Result = {}, None
    for result in loss(size, folder, device):
        print(RESULT + json.dumps({"claims": result[0], "data": result[1]}), flush=True)
    return result


PARTS: dict[str, Callable[[Path, torch.device], Result]] = {
    **{each.__name__: each for each in (build, tests, kernels, sync, trace)},
    **{model: partial(_step, model) for model in FULL},
    "loss": partial(_loss, "20M"),
    "loss_124M": partial(_loss, "124M"),
}


def _run(words: list[str], env: dict[str, str] | None = None, *, check: bool = True) -> str:
    """Run a command, show its output, and return it."""
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="One part of the GPU session.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu") if options.cpu else torch.device("cuda", 0)
    if device.type == "cuda" and options.part != "build":
        _needs_kernels()
    claims, data = PARTS[options.part](options.folder, device)
    if dist.is_initialized():
        dist.destroy_process_group()
    print("\n" + RESULT + json.dumps({"claims": claims, "data": data}))


def _needs_kernels() -> None:
    """Raise an error without compiled kernels, whose numbers would be those of plain torch."""
    from lightning_sparse.kernels import kernel_report

    report = kernel_report()
    if report.cuda != "compiled":
        raise SystemExit(f"no CUDA kernels: {'; '.join(report.reasons)}")


if __name__ == "__main__":
    main()
