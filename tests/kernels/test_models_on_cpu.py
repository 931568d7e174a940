"""The CUDA kernel of a node's models without a GPU, as in test_cuda_on_cpu.py, and kernels that are wrong in one line
each, which the emulation must find. Ten seconds, and twenty of slow ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lightning_sparse.kernels import plain
from tests.kernels.emulation import CSRC, Emulation, EmulationError, build, finds_each, with_fault
from tests.kernels.paths import same_bits
from tests.kernels.test_models import SHARES, models, pieces_of

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on PATH"), pytest.mark.slow]
MOST = 96  # pieces of a launch
# What is wrong -> the line, what it becomes, and what is said of it.
WRONG = {
    "a piece ends too late": ("if (i >= piece.numel) return;", "", "out of bounds"),
    "reads past the end": ("i < piece.numel;", "i <= piece.numel;", "out of bounds"),
    "a block of the piece before": (".end > blockIdx.x", ".end >= blockIdx.x", "out of bounds|other bits"),
    "begins with the table": ("low ? m.parts[low - 1].end : 0", "0u", "other bits"),
    "had is not rounded": ("rounded_to<dtype>(lies)", "lies", "other bits"),
    "pieces begin at 0": ("m.shared[piece.begin + i]", "m.shared[i]", "other bits"),
    "the last launch is forgotten": ("if (m.count > 0) launch", "if (m.count > 95) launch", "launches"),
}


def moving(folder: Path, csrc: Path = CSRC) -> Emulation:
    return Emulation(build(folder, csrc, kernels=[csrc / "models_cuda.cu"], drivers=["driver_models.cpp"]))


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    return moving(tmp_path_factory.mktemp("models"))


def check(cuda: Emulation, sizes: tuple[int, ...], ahead: float, mixed: bool) -> None:
    own, shared = models(sum(sizes))
    before = own.clone(), shared.clone()
    got, want = (pieces_of(torch.zeros(sum(sizes)), sizes, mixed) for _ in range(2))
    cuda.write_between(own, shared, got, ahead)
    assert cuda.counts == (-(-len(sizes) // MOST), 0), "launches, memsets"
    plain.write_between(own, shared, want, ahead)
    assert all(same_bits(*each) for each in zip(got, want, strict=True)), "other bits"
    assert same_bits(own, before[0]), "other bits"
    for turn, piece in enumerate(got):
        piece += turn * 0.5
    cuda.add_change(own, shared, got, ahead)
    assert cuda.counts == (-(-len(sizes) // MOST), 0), "launches, memsets"
    plain.add_change(before[0], shared, got, ahead)
    assert same_bits(own, before[0]), "other bits"
    assert same_bits(shared, before[1]), "other bits"


def try_everything(cuda: Emulation) -> None:
    for ahead in (1.0, 0.3):
        check(cuda, (5, 2048, 1, 4097, 3000), ahead, mixed=True)
    check(cuda, tuple(1 + each % 3 for each in range(MOST + 9)), 0.5, mixed=False)
    check(cuda, (2048, 2048), 0.5, mixed=False)


@pytest.mark.parametrize("ahead", SHARES)
def test_models(cuda: Emulation, ahead: float) -> None:
    for mixed in (False, True):
        for sizes in ((1,), (7, 2047, 2049), (1,) * MOST, (1,) * (MOST + 1)):
            check(cuda, sizes, ahead, mixed)


def test_bytes_are_those_of_inputs_and_outputs(cuda: Emulation) -> None:
    numel = 32_768
    own, shared = models(numel)
    cuda.write_between(own, shared, [torch.zeros(numel)], 0.5)
    assert cuda.nbytes == numel * 12
    cuda.add_change(own, shared, [torch.zeros(numel)], 0.5)
    assert cuda.nbytes == numel * 16


def test_what_finds_the_wrong_ones_passes(cuda: Emulation) -> None:
    try_everything(cuda)


@finds_each(WRONG, "a piece ends too late")
def test_what_is_wrong_is_found(fault: tuple[str, ...], tmp_path: Path) -> None:
    *change, said = fault
    wrong = moving(tmp_path, with_fault(tmp_path, "models_cuda.cu", *change))
    with pytest.raises((AssertionError, EmulationError), match=said):
        try_everything(wrong)
