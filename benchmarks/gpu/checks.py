"""The parts `build` and `tests`: compile the kernels for this GPU, and run the tests marked ``gpu``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.claims import NOT_RUN, Part, Result, verdict

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "lab", "strategy")


def build(folder: Path, device: torch.device) -> Iterator[Result]:
    """Compile the kernels for this GPU, in place."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        _run(
            [sys.executable, "setup.py", "build_ext", "--inplace"],
            {"LIGHTNING_SPARSE_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}", "MAX_JOBS": "8"},
        )
    code = "from lightning_sparse.kernels import kernel_report as r; print('report', r().cpu, '|', r().cuda)"
    output = _run([sys.executable, "-c", code])
    cpu, cuda = re.findall(r"report (.*) \| (.*)", output)[0]
    used = cuda if device.type == "cuda" else cpu
    yield {"compiled": verdict(used == "compiled", f"{device.type}: {used}")}, {"cpu": cpu, "cuda": cuda}


def tests(folder: Path, device: torch.device) -> Iterator[Result]:
    """Run the tests marked ``gpu``. Other files are not imported, because their packages may be missing."""
    words = [sys.executable, "-m", "pytest", "-p", "tests.helpers.timeout_optional", "-m", "gpu", "-q", *gpu_tests()]
    words += ["--continue-on-collection-errors", "--durations=5"]
    output = _run(words, check=False)
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|errors?|skipped)", output)}
    number = ", ".join(f"{count} {name}" for name, count in counts.items()) or (output.splitlines() or ["nothing"])[-1]
    failed = any(name not in ("passed", "skipped") for name in counts)
    if not failed and not counts.get("passed"):
        yield {"pass": (NOT_RUN, number)}, counts
    else:
        yield {"pass": verdict(not failed, number)}, counts


def gpu_tests() -> list[str]:
    """Return the files with tests marked ``gpu``, except tests/data, which need DALI."""
    files = [path for name in FOLDERS for path in sorted((ROOT / "tests" / name).glob("test_*.py"))]
    return [str(path.relative_to(ROOT)) for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]


def _run(words: list[str], env: dict[str, str] | None = None, *, check: bool = True) -> str:
    """Run a command, show its output, and return it."""
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}")
    return done.stdout


BUILD = Part(build, 150, {"compiled": "the kernels compile and load"})
TESTS = Part(tests, 150, {"pass": "the tests marked gpu pass"})
