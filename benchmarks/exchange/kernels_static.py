"""What can be said of the CUDA kernels without a GPU: registers, launches, bytes, and a model of time made of them.

    python -m benchmarks.exchange.kernels_static OUT

Compiles the kernels for each architecture (nvcc, cuobjdump), and counts launches and bytes of global memory in the
emulation of `tests/kernels/cuda_on_cpu/`, at two sizes: their difference is what an element costs. No GPU is used, and
no time is measured.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import parser_of, surroundings, write
from tests.kernels.emulation import CSRC, Emulation, build

ARCHITECTURES = ("75", "80", "86", "90", "100", "120")
NVCC = ["-O3", "-std=c++20", "--fmad=false"]
SIZES = (262_144, 524_288)
DENSITY, MESSAGES, REGIONS = 0.01, 8, 8
LAUNCH_SECONDS = 3e-6
MODEL_SIZES = (800_000, 6_500_000, 100_000_000, 1_000_000_000)
# Bytes a second, from NVIDIA's data sheets: A100 80GB SXM, H100 SXM, H200 SXM.
BANDWIDTH = {"A100": 2.039e12, "H100": 3.35e12, "H200": 4.8e12}
USAGE = re.compile(r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Cost:
    """Of one call: launches, memsets, and bytes of global memory that do and do not grow with the elements."""

    launches: int
    memsets: int
    fixed_bytes: float
    bytes_an_element: float

    def seconds(self, numel: int, bandwidth: float) -> float:
        return (self.launches + self.memsets) * LAUNCH_SECONDS + (
            self.fixed_bytes + self.bytes_an_element * numel
        ) / bandwidth


def cuobjdump() -> str:
    """Of CUDA, or the one that triton brings along."""
    beside_torch = Path(torch.__file__).parents[1] / "triton/backends/nvidia/bin/cuobjdump"
    return shutil.which("cuobjdump") or str(beside_torch)


def kernel_name(mangled: str) -> str:
    """Without namespaces and arguments."""
    text = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout
    text = re.sub(r"lightning_sparse::|cuda::|\(anonymous namespace\)::|^void ", "", text.strip())
    text = re.sub(r"\(Dtype\)(\d)", lambda match: ("fp32", "bf16", "fp16")[int(match[1])], text)
    return re.sub(r"\([A-Za-z ,:<>]*\)$", "", text).replace("unsigned short", "16 bits").replace("unsigned int", "fp32")


def resources(folder: Path) -> Iterator[dict[str, object]]:
    """Registers, spills and shared memory of each kernel, compiled for each architecture."""
    for architecture in ARCHITECTURES:
        for source in sorted(CSRC.glob("*.cu")):
            cubin = str(folder / f"{source.stem}.{architecture}.cubin")
            subprocess.run(["nvcc", "-cubin", f"-arch=sm_{architecture}", *NVCC, "-o", cubin, str(source)], check=True)
            said = [
                subprocess.run([cuobjdump(), way, cubin], capture_output=True, text=True, check=True).stdout
                for way in ("--dump-resource-usage", "-sass")
            ]
            sass = {
                part.split()[0]: len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", part, re.MULTILINE))
                for part in said[1].split("Function : ")[1:]
            }
            for name, registers, stack, shared, local in USAGE.findall(said[0]):
                yield {
                    "kernel": kernel_name(name),
                    "architecture": f"sm_{architecture}",
                    "registers": int(registers),
                    "spilled_bytes": int(stack) + int(local),
                    "shared_bytes": int(shared),
                    "instructions": sass[name],
                }


def costs(folder: Path) -> dict[str, Cost]:
    """What a call of each operator does, by the emulation, with few blocks, as if the tensors were large. Bytes of
    `sum_rows` are of an element of the shard, whose rows it sums."""
    emulation = Emulation(build(folder, flags=["-DLS_MOST_BLOCKS=8"]))
    emulation.start(0)
    seen: dict[str, list[tuple[int, int, int]]] = {}

    def see(name: str) -> None:
        seen.setdefault(name, []).append((*emulation.counts, emulation.nbytes))

    for numel in SIZES:
        grad, residual = torch.randn(2, numel, generator=torch.Generator().manual_seed(0))
        left, k = torch.empty(numel), int(DENSITY * numel)
        message = emulation.compress(grad, residual, left, k, torch.bfloat16)
        see("compress")
        emulation.mstopk(grad, k)
        see("mstopk")
        emulation.accumulate(message.expand(MESSAGES, -1).contiguous(), left, k, torch.bfloat16)
        see("accumulate")
        pairs = k // REGIONS
        messages = emulation.compress_regions(grad, residual, left, pairs, REGIONS, torch.bfloat16)
        see("compress_regions")
        emulation.accumulate_regions(messages, left, pairs, torch.bfloat16)
        see("accumulate_regions")
        rows = emulation.round_rows(grad, residual, left, MESSAGES)
        see("round_rows")
        emulation.sum_rows(rows, left[: rows.shape[1]])
        see("sum_rows")
        emulation.write_between(grad, residual, [left], 0.5)
        see("write_between")
        emulation.add_change(grad, residual, [left], 0.5)
        see("add_change")
    found = {}
    for name, ((launches, memsets, small), (_, _, large)) in seen.items():
        slope = (large - small) / (SIZES[1] - SIZES[0])
        found[name] = Cost(launches, memsets, small - slope * SIZES[0], slope)
    return found


def model(found: dict[str, Cost]) -> dict[str, dict[str, list[float]]]:
    """Operator -> GPU -> microseconds for each size."""
    return {
        name: {gpu: [round(cost.seconds(n, rate) * 1e6, 1) for n in MODEL_SIZES] for gpu, rate in BANDWIDTH.items()}
        for name, cost in found.items()
    }


def main() -> None:
    options = parser_of(__doc__).parse_args()
    release = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    result: dict[str, Any] = {**surroundings(), "hardware": "none"}
    result["versions"] += f", nvcc {re.findall(r'V([0-9.]+)', release)[0]}"
    result["setting"] = (
        f"density {DENSITY}, fp32 gradients with a residual, bf16 messages, {MESSAGES} messages a sum; "
        f"{REGIONS} regions"
    )
    with tempfile.TemporaryDirectory() as name:
        found = costs(Path(name))
        result["costs"] = {key: vars(cost) for key, cost in found.items()}
        result["model_us"] = {"sizes": MODEL_SIZES, **model(found)}
        text = json.dumps(result, indent=1)
        result["kernels"] = list(resources(Path(name)))
    write(options.out / "kernels-static.json", result, text)


if __name__ == "__main__":
    main()
