"""The parts of the GPU session. To run one part: `python -m benchmarks.gpu.parts PART FOLDER [--cpu]`.

To add a part, write a module with its function, claims and time limit (claims.py), and add it to `PARTS`. A part runs
in its own process. Each of its results is a line of JSON after `RESULT`, with all results so far; see session.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.checks import BUILD, TESTS
from benchmarks.gpu.kernels import KERNELS
from benchmarks.gpu.loss import LOSS, LOSS_124M
from benchmarks.gpu.nccl import NCCL
from benchmarks.gpu.overlap import TRACE
from benchmarks.gpu.parity import PARITY
from benchmarks.gpu.steps import GPT, RESNET50
from benchmarks.gpu.sync import SYNC

PARTS = {
    "build": BUILD,
    "tests": TESTS,
    "kernels": KERNELS,
    "resnet50": RESNET50,
    "gpt": GPT,
    "sync": SYNC,
    "trace": TRACE,
    "parity": PARITY,
    "nccl": NCCL,
    "loss": LOSS,
    "loss_124M": LOSS_124M,
}
RESULT = "RESULT "
"""First word of a line with results. Libraries may print other lines, also after the last result."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one part of the GPU session.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu") if options.cpu else torch.device("cuda", 0)
    if device.type == "cuda" and options.part != "build":
        _needs_kernels()
    if device.type == "cpu":
        torch.set_num_threads(1)  # small models are slower on more threads
    for claims, data in PARTS[options.part].run(options.folder, device):
        print("\n" + RESULT + json.dumps({"claims": claims, "data": data}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def _needs_kernels() -> None:
    """Raise an error if no kernels are compiled, because the part would measure plain torch."""
    from lightning_sparse.kernels import kernel_report

    report = kernel_report()
    if report.cuda != "compiled":
        raise SystemExit(f"no CUDA kernels: {'; '.join(report.reasons)}. Run the part build first.")


if __name__ == "__main__":
    main()
