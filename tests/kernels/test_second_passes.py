"""The GPU session predicts second passes by the same rule as the emulated CUDA kernels."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.second_passes import counted, needs_second_pass, plan, sampled
from lightning_sparse.exchange import paths
from tests.kernels.emulation import Emulation, cuda_library
from tests.kernels.paths import inputs

NUMEL, K = 140_001, 1_400
TARGET, CAPACITY = plan(NUMEL, K)


def ties(count: int) -> Tensor:
    """Return a tensor with this number of candidates, which all equal the largest element."""
    x = torch.full((NUMEL,), 1e-3)
    x[torch.randperm(NUMEL, generator=torch.Generator().manual_seed(0))[:count]] = -1.0
    return x


def misleading(count: int) -> Tensor:
    """Return a tensor with this number of candidates, of which only TARGET are in the kernels' sample."""
    x = torch.full((NUMEL,), 1e-3)
    sample = sampled(NUMEL, x.device)
    x[sample[-TARGET:]] = 1.0
    others = torch.ones(NUMEL, dtype=torch.bool)
    others[sample] = False
    x[others.nonzero().flatten()[: count - TARGET]] = 1.0
    return x


CASES = {
    "gaussian": (inputs(NUMEL)["gaussian"], False),
    "most candidates that fit": (ties(CAPACITY), False),
    "one candidate too many": (ties(CAPACITY + 1), True),
    "fewest candidates that suffice": (misleading(K), False),
    "one candidate too few": (misleading(K - 1), True),
    "all zero": (torch.zeros(NUMEL), True),
}


@pytest.fixture(scope="module")
def emulation() -> Emulation:
    if shutil.which("g++") is None:
        pytest.skip("no g++ on PATH")
    return Emulation(cuda_library())


@pytest.mark.parametrize("case", CASES)
def test_second_pass_rule_matches_the_kernels(emulation: Emulation, case: str) -> None:
    x, expected = CASES[case]
    emulation.start(1000)
    emulation.mstopk(x, K)
    reads_again = emulation.nbytes > 27 * NUMEL  # if the candidates fit, at most 23 bytes per element, otherwise 31
    assert reads_again == expected
    assert bool(needs_second_pass(x, K)) == expected


def test_small_tensor_never_needs_a_second_pass() -> None:
    assert not needs_second_pass(torch.zeros(32 * 1024), 10)
    assert not needs_second_pass(torch.zeros(NUMEL), NUMEL - 1), "all elements are candidates"


def test_counted_includes_the_residual_and_changes_no_result() -> None:
    grad, residual, scale = torch.zeros(NUMEL), CASES["gaussian"][0], torch.tensor(0.5)
    for before, expected in ((None, True), (residual, False)):
        left, want = torch.empty(NUMEL), torch.empty(NUMEL)
        with counted() as found:
            message = paths.compress(grad, before, left, K, torch.bfloat16, scale)
        assert [bool(each) for each in found] == [expected]
        assert torch.equal(message, paths.compress(grad, before, want, K, torch.bfloat16, scale))
        assert torch.equal(left, want)
    assert len(found) == 1, "later selections are not counted"
