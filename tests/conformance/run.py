"""Runs Lightning's own tests of DDP against our strategy, and reports the differences from DDP itself.

    python tests/conformance/run.py /path/to/pytorch-lightning       # a checkout of the installed version
    make conformance LIGHTNING=/path/to/pytorch-lightning

Every test that mentions DDP runs in its own process. It runs first with stock DDP on CPUs instead of GPUs; some tests
assert CUDA and cannot pass. It then runs with our strategy, with the two processes as one node and as two nodes. Both
Lightning packages are tested.
"""

import argparse
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "strategies/test_ddp.py",
    "strategies/test_ddp_integration.py",
    "strategies/test_ddp_integration_comm_hook.py",
    "strategies/test_common.py",
    "overrides/test_distributed.py",
    "models/test_hooks.py",
    "models/test_cpu.py",
    "models/test_restore.py",
    "models/test_amp.py",
    "checkpointing/test_checkpoint_callback_frequency.py",
    "checkpointing/test_torch_saving.py",
    "callbacks/test_early_stopping.py",
    "callbacks/test_stochastic_weight_avg.py",
    "callbacks/test_weight_averaging.py",
    "loops/test_prediction_loop.py",
    "trainer/optimization/test_manual_optimization.py",
    "trainer/optimization/test_optimizers.py",
    "trainer/logging_/test_distributed_logging.py",
    "trainer/logging_/test_train_loop_logging.py",
    "trainer/flags/test_overfit_batches.py",
    "trainer/test_ddp_sigterm_handling.py",
    "utilities/test_all_gather_grad.py",
    "utilities/test_compile.py",
)
WAYS = {"stock": "1", "one node": "1", "two nodes": "2"}
STRATEGIES = ("MSTopKHierStrategy", "MSTopKLocalStrategy")


def tests_of(checkout: Path, package: str, scratch: Path) -> Path:
    """Copy the checkout's tests, with the imports of this Lightning package."""
    source = checkout / "tests" / "tests_pytorch"
    if not source.is_dir():
        raise SystemExit(f"{checkout} has no tests/tests_pytorch: give the path of a checkout of Lightning.")
    target = scratch / package / "tests_pytorch"
    shutil.copytree(source, target)
    if package == "pytorch_lightning":
        for path in target.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            text = re.sub(r"\blightning\.pytorch\b", "pytorch_lightning", text)
            text = re.sub(r"\blightning\.fabric\b", "lightning_fabric", text)
            path.write_text(text, encoding="utf-8")
    return target


def run(tests: Path, package: str, way: str, words: list[str], seconds: float, ours: str = "") -> tuple[int, str]:
    paths = [str(ROOT / "tests/conformance/site"), str(ROOT / "tests/conformance"), str(tests.parent), str(ROOT)]
    environment = {
        **os.environ, "LS_PACKAGE": package, "LS_STRATEGY": "stock" if way == "stock" else ours, "LS_NODES": WAYS[way],
        "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-p", "lightning_plugin", "-p", "no:cacheprovider", "-q", *words]
    process = subprocess.Popen(
        command, cwd=tests, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return 124, f"still running after {seconds:g} s\n{process.communicate()[0]}"
    return process.returncode, output


def outcome(code: int, output: str) -> str:
    last = output.strip().splitlines()[-1] if output.strip() else ""
    if code == 0:
        return "skipped" if "skipped" in last and "passed" not in last else "passed"
    return "hung" if code == 124 else "failed"


def reason(output: str) -> str:
    errors = [line for line in output.splitlines() if line.startswith("E  ")]
    return errors[-1][1:].strip() if errors else output.strip().splitlines()[-1]


def compare_ways(tests: Path, package: str, ours: str, ways: list[str], seconds: float, name: str) -> dict[str, str]:
    """Run one test with DDP and, if that passes, with our strategy."""
    row = {"package": package, "test": name}
    for way in ["stock", *ways]:
        code, output = run(tests, package, way, [name], seconds, ours)
        row[way] = outcome(code, output)
        if row[way] in ("failed", "hung"):
            row[f"{way}: why"] = reason(output)
        if way == "stock" and row[way] != "passed":
            break
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/conformance.json"))
    parser.add_argument("--packages", nargs="+", default=["lightning.pytorch", "pytorch_lightning"])
    parser.add_argument("--strategy", choices=STRATEGIES, default=STRATEGIES[0])
    parser.add_argument("--files", nargs="+", default=FILES)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS)[1:], default=list(WAYS)[1:])
    parser.add_argument("--seconds", type=float, default=120, help="time limit per test")
    parser.add_argument("--jobs", type=int, default=1, help="parallel tests; each may start two processes")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for package in options.packages:
            tests = tests_of(options.checkout, package, Path(scratch))
            _, listed = run(tests, package, "stock", ["--collect-only", *options.files], 300)
            names = [line for line in listed.splitlines() if "::" in line and not line.startswith(("ERROR", "FAILED"))]
            if not names:
                raise SystemExit(f"no tests were collected:\n{listed}")
            compare = functools.partial(compare_ways, tests, package, options.strategy, options.ways, options.seconds)
            with ThreadPoolExecutor(options.jobs) as pool:
                for row in tqdm(pool.map(compare, names), desc=package, total=len(names)):
                    rows.append(row)
                    # saved after each test, because the run takes long
                    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    compared = [row for row in rows if row["stock"] == "passed"]
    different = [row for row in compared if {row[way] for way in options.ways} != {"passed"}]
    print(f"{len(rows)} tests, {len(compared)} pass with DDP on CPUs; of these {len(different)} differ with ours:")
    for row in different:
        for way in options.ways:
            if row[way] != "passed":
                print(f"  {row['package']} {row['test']} ({way}): {row[way]}: {row.get(f'{way}: why', '')}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
