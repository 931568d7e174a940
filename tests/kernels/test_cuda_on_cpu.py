"""The logic of the CUDA kernels without a GPU: compiled as C++ against `cuda_on_cpu/`, and held against plain torch.

The sources are the very .cu files; only `kernel<<<...>>>(...)` is rewritten. test_cuda.py asks the same of a GPU.
A minute.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_sparse.kernels import plain, reference, wire
from tests.kernels.paths import DTYPES, inputs, ks, same_bits
from tests.kernels.test_accumulate import damaged, messages_of

HERE = Path(__file__).parent / "cuda_on_cpu"
CSRC = Path(__file__).parents[2] / "lightning_sparse/kernels/csrc"
CODES = wire.VALUE_CODES
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on PATH")


def as_cpp(source: str) -> str:
    def launch(match: re.Match[str]) -> str:
        name, grid, block = match.groups()
        body = re.search(rf"void (?:__launch_bounds__\(\w+\) )?{name}\(.*?\n}}\n", source, re.DOTALL)
        assert body, f"no kernel {name}"
        calls = body.group(0)
        alone = "false" if re.search(r"sync|before_this_warp|suffix_sums", calls) else "true"
        return f"on_cpu::launch({grid}, {block}, {alone}, [&] {{ {name}("

    text, count = re.subn(r"(\w+)<<<(.*?), (\w+), 0, \w+>>>\(", launch, source)
    text = re.sub(r"(on_cpu::launch\(.*?\]\s*\{ \w+\(.*?\));", r"\1; });", text)
    assert count == source.count("<<<") > 0
    return text


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    sources = [HERE / "driver.cpp"]
    for path in CSRC.glob("*.cu"):
        sources.append(folder / f"{path.stem}.cpp")
        sources[-1].write_text(as_cpp(path.read_text()))
    flags = [
        "-O1",
        "-std=c++20",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
        "-U_FORTIFY_SOURCE",
        f"-I{HERE}",
        f"-I{CSRC}",
    ]
    command = ["g++", *flags, "-o", str(folder / "kernels.so"), *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "kernels.so"))


@pytest.fixture(params=[(0, 0), (0, 1), (1, 0)], ids=["candidates", "backwards", "whole"])
def cuda(library: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    library.emulate_force(*request.param)
    yield library
    library.emulate_force(0, 0)


def at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def mstopk(cuda: ctypes.CDLL, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, indices = torch.empty(k, dtype=x.dtype), torch.empty(k, dtype=torch.int32)
    size, count = ctypes.c_int64(x.numel()), ctypes.c_int64(k)
    cuda.emulate_mstopk(at(x), CODES[x.dtype], size, count, at(values), at(indices))
    return values, indices


@pytest.mark.parametrize("numel", [1, 4097, *(pytest.param(numel, marks=pytest.mark.slow) for numel in (100, 70_001))])
def test_select(cuda: ctypes.CDLL, numel: int) -> None:
    for turn, (name, x) in enumerate(inputs(numel).items()):
        if numel > 5000 and name not in ("layered", "5 % dense", "special"):
            continue
        for k in ks(numel)[turn % 2 :: 2] if numel < 5000 else (700,):
            x = x.to(DTYPES[(turn + k) % 3])
            got, want = mstopk(cuda, x, k), reference.topk(x, k)
            assert same_bits(got[1], want[1]), (name, k)
            assert same_bits(got[0], want[0]), (name, k)


@pytest.mark.parametrize("numel", [1, 100, 70_001])
def test_compress(cuda: ctypes.CDLL, numel: int) -> None:
    k, scale = max(1, numel // 50), torch.tensor(1 / 3)
    residual = torch.randn(numel, generator=torch.Generator().manual_seed(9)) * 0.1
    for turn, (name, x) in enumerate(inputs(numel).items()):
        if numel > 5000 and name not in ("layered", "special", "huge"):
            continue
        for value_dtype in DTYPES:
            grad = x.to(DTYPES[turn % 3])
            before, factor = (residual, scale) if turn % 2 else (None, None)
            got, want = torch.full((2, numel), 3.0)
            message = torch.full((wire.message_bytes(numel, k, value_dtype),), 77, dtype=torch.uint8)
            size, count = ctypes.c_int64(numel), ctypes.c_int64(k)
            arguments = (at(before), at(got), count, CODES[value_dtype], at(factor), at(message))
            cuda.emulate_compress(at(grad), CODES[grad.dtype], size, *arguments)
            assert same_bits(message, plain.compress(grad, before, want, k, value_dtype, factor)), name
            assert same_bits(got, want), name


def accumulate(
    cuda: ctypes.CDLL, messages: Tensor, numel: int, k: int, dtype: torch.dtype, alpha: float | None = None
) -> Tensor:
    shard = torch.full((numel,), 5.0)
    sizes = ctypes.c_int64(numel), ctypes.c_int64(k)
    count, factor = ctypes.c_int64(messages.shape[0]), None if alpha is None else ctypes.byref(ctypes.c_float(alpha))
    cuda.emulate_accumulate(at(messages), count, at(shard), *sizes, CODES[dtype], factor)
    return shard


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accumulate(cuda: ctypes.CDLL, dtype: torch.dtype) -> None:
    for numel, k in ((1, 1), (100, 100), (140_000, 3000)):
        messages = messages_of(numel, k, 4, dtype)
        for alpha in (None, -0.25):
            want = torch.full((numel,), 5.0)
            plain.accumulate(messages, want, k, dtype, alpha)
            assert same_bits(accumulate(cuda, messages, numel, k, dtype, alpha), want)


def test_damaged_messages_poison(cuda: ctypes.CDLL) -> None:
    messages = messages_of(70_001, 70, 2, torch.float32)
    for name, bad in damaged(messages[1]).items():
        shard = accumulate(cuda, torch.stack([messages[0], bad]), 70_001, 70, torch.float32)
        assert bool(shard.isnan().all()), name
