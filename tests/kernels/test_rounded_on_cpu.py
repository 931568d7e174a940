"""The CUDA kernels of rounding without a GPU, as in test_cuda_on_cpu.py, and kernels that are wrong in one line each,
which the emulation must find. Ten seconds, and twenty of slow ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_sparse.kernels import plain
from tests.kernels.emulation import CSRC, Emulation, EmulationError, build, finds_each, with_fault
from tests.kernels.paths import DTYPES, inputs, same_bits
from tests.kernels.test_rounded import rows_of

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on PATH"), pytest.mark.slow]
# What is wrong -> the line, what it becomes, and what is said of it.
WRONG = {
    "padding is left out": ("blocks_of(r.padded, kTile)", "blocks_of(source.numel, kTile)", "other bits"),
    "rows end too late": ("if (i + e < r.padded) r.rows", "r.rows", "out of bounds: writes 2 bytes"),
    "any pointer is aligned": ("is_aligned(source.grad) &&", "true ||", "misaligned access of 4 bytes"),
    "the gradient is kept": ("x[e] = lost_to_bf16(x[e], rounded[e]);", "", "other bits"),
    "rows of any length are aligned": (" && numel % kEight == 0", "", "misaligned access of 4 bytes"),
    "the sum begins with its result": (
        "load_row<together>(s.rows + base",
        "load_row<together>(s.row + base",
        "reads what",
    ),
    "rows in another order": ("s.rows + m * s.numel", "s.rows + (s.num_rows - m) * s.numel", "other bits"),
    "a row ends too late": (  # behind it lies no tensor, or one nobody wrote yet
        "s.residual ? s.residual_numel : s.numel",
        "s.numel + kSpan",
        "out of bounds|reads what nobody wrote",
    ),
    "the residual is as long as a row": (
        "s.residual_numel - base, sum",
        "s.numel - base, sum",
        "out of bounds: reads 4 bytes",
    ),
}


def rounding(folder: Path, csrc: Path = CSRC) -> Emulation:
    return Emulation(build(folder, csrc, kernels=[csrc / "rounded_cuda.cu"], drivers=["driver_rounded.cpp"]))


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    return rounding(tmp_path_factory.mktemp("rounded"))


def check_round(cuda: Emulation, grad: Tensor, residual: Tensor | None, num_rows: int, scale: Tensor | None) -> None:
    got, want = torch.full((2, grad.numel()), 3.0)
    rows = cuda.round_rows(grad, residual, got, num_rows, scale)
    assert cuda.counts == (1, 0), "launches, memsets"
    assert same_bits(rows, plain.round_rows(grad, residual, want, num_rows, scale)), "other bits"
    assert same_bits(got, want), "other bits"


def check_sum(cuda: Emulation, rows: Tensor, own: int) -> None:
    got, want = torch.randn(own).expand(2, -1).clone()
    row = cuda.sum_rows(rows, got if own else None)
    assert cuda.counts == (1, 0), "launches, memsets"
    assert same_bits(row, plain.sum_rows(rows, want if own else None)), "other bits"
    assert same_bits(got, want), "other bits"


@pytest.mark.parametrize(("numel", "num_rows"), [(1, 5), (100, 3), (4096, 1), (9001, 8)])
def test_round(cuda: Emulation, numel: int, num_rows: int) -> None:
    residual, scale = torch.randn(numel) * 0.1, torch.tensor(1 / 3)
    for turn, x in enumerate(inputs(numel).values()):
        before = residual if turn % 2 else None
        check_round(cuda, x.to(DTYPES[turn % 3]), before, num_rows, scale if turn % 4 > 1 else None)
    assert same_bits(
        cuda.round_rows(residual, None, None, num_rows), plain.round_rows(residual, None, None, num_rows, None)
    )


@pytest.mark.parametrize(("num_rows", "numel"), [(1, 1), (3, 100), (2, 2048), (9, 6160), (70, 2049)])
def test_sum(cuda: Emulation, num_rows: int, numel: int) -> None:
    for own in (numel, numel // 2, min(numel, 1), 0):
        for seed in range(3):
            check_sum(cuda, rows_of(num_rows, numel, seed), own)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_at_odd_offsets(cuda: Emulation, dtype: torch.dtype) -> None:
    base = torch.randn(9016)
    for offset in (1, 8):
        check_round(cuda, base.to(dtype)[offset : offset + 9001], base[3:9004], 2, None)
        rows = base.bfloat16()[offset : offset + 9000].view(2, 4500)[:, :4496].contiguous()
        check_sum(cuda, rows, 4496)
        check_sum(cuda, base.bfloat16()[offset : offset + 8992].view(2, 4496), 4495)


def test_bytes_are_those_of_inputs_and_outputs(cuda: Emulation) -> None:
    numel, num_rows = 32_768, 8
    x = torch.randn(2, numel)
    rows = cuda.round_rows(x[0], x[1], torch.empty(numel), num_rows)
    assert cuda.nbytes == numel * (4 + 4 + 4 + 2)
    cuda.sum_rows(rows, x[0][: numel // num_rows].clone())
    assert cuda.nbytes == numel * 2 + numel // num_rows * (2 + 4 + 4)


def try_everything(cuda: Emulation) -> None:
    for numel, num_rows in ((9001, 8), (8192, 3)):
        check_round(cuda, torch.randn(numel + 1).bfloat16()[1:], torch.randn(numel), num_rows, None)
        check_round(cuda, torch.randn(numel), torch.randn(numel), num_rows, None)
    for count, numel in ((4, 2056), (3, 6151)):
        rows = torch.randn(count, numel) * torch.logspace(-3, 3, count)[:, None]  # whose sum depends on the order
        check_sum(cuda, rows.bfloat16(), numel - 5)
        check_sum(cuda, rows.bfloat16(), 0)


def test_what_finds_the_wrong_ones_passes(cuda: Emulation) -> None:
    try_everything(cuda)


@finds_each(WRONG, "rows end too late")
def test_what_is_wrong_is_found(fault: tuple[str, ...], tmp_path: Path) -> None:
    *change, said = fault
    wrong = rounding(tmp_path, with_fault(tmp_path, "rounded_cuda.cu", *change))
    with pytest.raises((AssertionError, EmulationError), match=said):
        try_everything(wrong)
