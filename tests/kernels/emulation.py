"""The CUDA kernels on a CPU, compiled as C++ with `cuda_on_cpu/`, which checks every memory access.

Only launches and `__shared__` of the .cu files are rewritten. A seed decides the order of blocks, warps and threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparse.kernels import wire

HERE = Path(__file__).parent / "cuda_on_cpu"
CSRC = Path(__file__).parents[2] / "lightning_sparse/kernels/csrc"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_sparse-tests"
DRIVERS = ("driver.cpp", "driver_rounded.cpp", "driver_models.cpp")
CODES = {**wire.VALUE_CODES, torch.float16: 2}  # gradients may also be fp16
FLAGS = ["-O1", "-std=c++20", "-ffp-contract=off", "-fPIC", "-U_FORTIFY_SOURCE"]
CHECKED = [
    "-fsanitize=thread",
    *("--param", "tsan-distinguish-volatile=1"),
    "--param=tsan-instrument-func-entry-exit=0",
]


ORDERS = [
    pytest.param((1000, False), id="candidates"),
    pytest.param((2000, False), id="other-orders", marks=pytest.mark.slow),
    pytest.param((3000, True), id="whole", marks=pytest.mark.slow),
]
"""Arguments of `Emulation.start`."""


class EmulationError(Exception):
    """A fault of a kernel."""


def as_cpp(source: str) -> str:
    """Rewrite CUDA's launches and shared variables as calls."""

    def shared(match: re.Match[str]) -> str:
        each = [re.fullmatch(r"(\w+)((?:\[\w+\])*)", name) for name in match[2].split(", ")]
        assert all(each), match[0]
        return " ".join(f"auto& {m[1]} = on_cpu::shared<{match[1]}{m[2]}>([] {{}});" for m in each if m)

    text, count = re.subn(
        r"([\w:<>]+)<<<([^;]*?), (\w+), 0, \w+>>>\((.*?)\);",
        r'on_cpu::launch(\2, \3, "\1", [&] { \1(\4); });',
        source,
        flags=re.DOTALL,
    )
    assert count == source.count("<<<"), "a launch in another form"
    return re.sub(r"(?:alignas\(\d+\) )?__shared__ ([\w:]+) ([^;]+);", shared, text)


def cuda_library() -> ctypes.CDLL:
    """Return the package's kernels, built with so few blocks that each block has several turns."""
    return library(flags=["-DLS_MOST_BLOCKS=5"])


def library(kernels: Sequence[Path] = (), flags: Sequence[str] = (), drivers: Sequence[str] = DRIVERS) -> ctypes.CDLL:
    """Load all kernels, or `kernels` alone, with their entry points.

    Compiles once for each content of the sources. Test processes and later runs share the library.
    """
    key = hashlib.sha256(_output(["g++", "--version"]).encode())
    key.update(repr(([str(path) for path in kernels], flags, drivers)).encode())
    for path in sorted([Path(__file__), *HERE.glob("*.*"), *CSRC.glob("*.*")]):
        if path.suffix != ".so":
            key.update(path.read_bytes())
    file = CACHE / f"cuda_on_cpu-{key.hexdigest()[:20]}.so"
    if not file.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            _compile(Path(folder), kernels, flags, drivers).replace(file)
    return ctypes.CDLL(str(file))


def _compile(folder: Path, kernels: Sequence[Path], flags: Sequence[str], drivers: Sequence[str]) -> Path:
    for path in [*CSRC.glob("*.cu*"), *kernels]:
        name = path.name if path.suffix == ".cuh" else f"{path.stem}.cpp"
        (folder / name).write_text(as_cpp(path.read_text()))
    checked = [f"{path.stem}.cpp" for path in kernels or sorted(CSRC.glob("*.cu"))]
    includes = [f"-I{each}" for each in (folder, HERE, CSRC)]

    def compile_source(name: str) -> str:
        source, extra = (folder, [*CHECKED, *flags]) if name in checked else (HERE, flags)
        target = str(folder / f"{name}.o")
        _output(["g++", *FLAGS, *extra, *includes, "-c", "-o", target, str(source / name)])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [*pool.map(compile_source, [*checked, "threads.cpp", "memory.cpp", *drivers])]
    _output(["g++", "-shared", "-o", str(folder / "kernels.so"), *objects])
    return folder / "kernels.so"


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


class Emulation:
    """The operators of `lightning_sparse.kernels`, run by `library`. Each call uses another seed.

    Attributes:
        counts: Numbers of launches and memsets in the last call.
        nbytes: Bytes of global memory that the last call read or wrote.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._seed = 0
        self.counts = (0, 0)
        self.nbytes = 0

    def start(self, seed: int, whole: bool = False) -> None:
        """Choose the seed of the next call, and whether to run as with a misleading sample."""
        self._seed = seed
        self._library.emulate_whole(int(whole))

    def mstopk(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, indices = torch.empty(k, dtype=x.dtype), torch.empty(k, dtype=torch.int32)
        self._call("mstopk", _at(x), CODES[x.dtype], x.numel(), k, _at(values), _at(indices))
        return values, indices

    def compress(
        self, grad: Tensor, residual: Tensor | None, next_residual: Tensor | None, k: int, *rest: Any
    ) -> Tensor:
        return self.compress_regions(grad, residual, next_residual, k, 1, *rest)[0]

    def compress_regions(
        self,
        grad: Tensor,
        residual: Tensor | None,
        next_residual: Tensor | None,
        k: int,
        num_regions: int,
        value_dtype: torch.dtype,
        scale: Tensor | None = None,
    ) -> Tensor:
        regions = wire.Regions(grad.numel(), num_regions, k, value_dtype)
        messages = torch.full((num_regions, regions.row_nbytes), 77, dtype=torch.uint8)
        memory = _at(residual), _at(next_residual)
        rest = CODES[value_dtype], _at(scale), _at(messages)
        self._call("compress", _at(grad), CODES[grad.dtype], grad.numel(), *memory, k, num_regions, *rest)
        return messages

    def accumulate(
        self,
        messages: Tensor,
        shard: Tensor,
        k: int,
        value_dtype: torch.dtype,
        alpha: float | None = None,
        damaged: bool = False,
    ) -> None:
        factor = None if alpha is None else ctypes.byref(ctypes.c_float(alpha))
        rest = _at(shard), shard.numel(), k, CODES[value_dtype], factor, int(damaged)
        self._call("accumulate", _at(messages), messages.shape[0], 1, *rest)

    def accumulate_regions(self, messages: Tensor, shard: Tensor, k: int, value_dtype: torch.dtype) -> None:
        rest = _at(shard), shard.numel(), k, CODES[value_dtype], None, 0
        self._call("accumulate", _at(messages), 1, messages.shape[0], *rest)

    def round_rows(
        self,
        grad: Tensor,
        residual: Tensor | None,
        next_residual: Tensor | None,
        num_rows: int,
        scale: Tensor | None = None,
    ) -> Tensor:
        rows = torch.full((num_rows, -(-grad.numel() // num_rows)), 77, dtype=torch.bfloat16)
        memory = _at(residual), _at(next_residual)
        self._call("round_rows", _at(grad), CODES[grad.dtype], grad.numel(), *memory, num_rows, _at(scale), _at(rows))
        return rows

    def sum_rows(self, rows: Tensor, residual: Tensor | None) -> Tensor:
        row = torch.full((rows.shape[1],), 77, dtype=torch.bfloat16)
        memory = _at(residual), 0 if residual is None else residual.numel()
        self._call("sum_rows", _at(rows), *rows.shape, _at(row), *memory)
        return row

    def accumulate_delta(self, local: Tensor, global_: Tensor, model: Sequence[Tensor], local_fraction: float) -> None:
        self._interpolate("accumulate_delta", local, global_, model, local_fraction)

    def lerp_into(self, local: Tensor, global_: Tensor, model: Sequence[Tensor], local_fraction: float) -> None:
        self._interpolate("lerp_into", local, global_, model, local_fraction)

    def _interpolate(
        self, name: str, local: Tensor, global_: Tensor, model: Sequence[Tensor], local_fraction: float
    ) -> None:
        count = len(model)
        data = (ctypes.c_void_p * count)(*(piece.data_ptr() for piece in model))
        dtypes = (ctypes.c_int * count)(*(CODES[piece.dtype] for piece in model))
        numels = (ctypes.c_int64 * count)(*(piece.numel() for piece in model))
        self._call(name, _at(local), _at(global_), data, dtypes, numels, count, ctypes.c_float(local_fraction))

    def _call(self, name: str, *arguments: object) -> None:
        call = getattr(self._library, f"emulate_{name}")
        call.restype = ctypes.c_char_p
        self._library.emulate_seed(ctypes.c_uint64(self._seed))
        self._seed += 1
        error = call(*(ctypes.c_int64(each) if isinstance(each, int) else each for each in arguments))
        counts = (ctypes.c_int64 * 3)()
        self._library.emulate_counts(counts)
        self.counts, self.nbytes = (counts[0], counts[1]), counts[2]
        if error is not None:
            raise EmulationError(error.decode())
