"""The CUDA kernels of several regions without a GPU, as in test_cuda_on_cpu.py, and kernels that are wrong in one line
each, which the emulation must find."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lightning_sparse.kernels import plain, wire
from tests.kernels.emulation import Emulation, EmulationError, build, finds_each, with_fault
from tests.kernels.paths import DTYPES, VALUES, inputs, same_bits

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on PATH"), pytest.mark.slow]
# What is wrong -> the file, the line, what it becomes, and what is said of it.
WRONG = {
    "regions begin too early": ("common.h", "each * region + rest * region / count", "each * region", "race: "),
    "regions of one size": ("common.h", "each + (rest * region % count + rest >= count)", "each", "other bits"),
    "any region is aligned": (
        "tile.cuh",
        "p.aligned = is_aligned(p.source.grad) && is_aligned(p.source.residual) && is_aligned(p.source.store);",
        "p.aligned = true;",
        "misaligned",
    ),
    "one control block": ("tile.cuh", "p.control += region;", "", "race: "),
    "the bins of the first": ("tile.cuh", "p.bins += region * (kDigits * kBins);", "", "race: "),
    "the candidates of the first": ("tile.cuh", "p.values += region * p.capacity, ", "", "race: "),
    "k pairs of a small region": (
        "tile.cuh",
        "p.k = p.k < p.source.numel ? p.k : p.source.numel;",
        "",
        "out of bounds|other bits",
    ),
    "rows end too early": ("refine.cuh", "p.message + row_nbytes)", "p.message + layout.nbytes)", "other bits"),
    "flags of all": ("accumulate_cuda.cu", "flags(all.flags + region)", "flags(all.flags)", "other bits|race: "),
    "a shard of one place": (
        "accumulate_cuda.cu",
        "shard(all.shard + all.regions.start(region))",
        "shard(all.shard)",
        "other bits|race: ",
    ),
}


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    return Emulation(build(tmp_path_factory.mktemp("regions"), flags=["-DLS_MOST_BLOCKS=7"]))


@pytest.fixture(
    params=[
        pytest.param((1000, False), id="candidates"),
        pytest.param((2000, False), id="other-orders", marks=pytest.mark.slow),
        pytest.param((3000, True), id="whole", marks=pytest.mark.slow),
    ]
)
def cuda(emulation: Emulation, request: pytest.FixtureRequest) -> Emulation:
    emulation.start(*request.param)
    return emulation


def check(
    cuda: Emulation,
    grad: torch.Tensor,
    num_regions: int,
    k: int,
    value_dtype: torch.dtype = torch.bfloat16,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    got, want = torch.full((2, grad.numel()), 3.0)
    rows = cuda.compress_regions(grad, residual, got, k, num_regions, value_dtype, scale)
    assert cuda.counts == (5 if value_dtype == wire.TWO_BIT else 4, 0), "launches, memsets"
    assert same_bits(rows, plain.compress_regions(grad, residual, want, k, num_regions, value_dtype, scale)), (
        "other bits"
    )
    assert same_bits(got, want), "other bits"
    cuda.accumulate_regions(rows, got, k, value_dtype)
    assert cuda.counts == (1, 1), "launches, memsets"
    plain.accumulate_regions(rows, want, k, value_dtype)
    assert same_bits(got, want), "other bits"


@pytest.mark.parametrize(
    ("numel", "num_regions", "k"),
    [(5, 5, 1), (100, 7, 3), (4097, 2, 4000), pytest.param(9001, 64, 5, marks=pytest.mark.slow)],
)
def test_regions(cuda: Emulation, numel: int, num_regions: int, k: int) -> None:
    residual, scale = torch.randn(numel, generator=torch.Generator().manual_seed(9)) * 0.1, torch.tensor(1 / 3)
    for turn, x in enumerate(inputs(numel).values()):
        if turn % 3 != numel % 3:  # another third at each size
            continue
        grad, value_dtype = x.to(DTYPES[turn // 2 % 3]), VALUES[turn // 3 % 4]
        check(cuda, grad, num_regions, k, value_dtype, residual if turn % 2 else None, scale if turn % 4 > 1 else None)


def test_regions_of_several_groups_of_tiles(cuda: Emulation) -> None:
    """The first region ends with a tile, the second one element later; each has two groups of tiles."""
    numel = 2 * 9 * 4096 + 1
    x = inputs(numel)["few values"].clone()
    x[: numel // 2] *= 1e-3  # thresholds differ
    check(cuda, x, 2, 700)


def test_a_wire_block_more_in_the_last_region(cuda: Emulation) -> None:
    check(cuda, torch.randn(2 * 65_536 + 1, generator=torch.Generator().manual_seed(1)), 2, 9)


def test_a_region_whose_sample_misleads(emulation: Emulation) -> None:
    """More equal elements in one region than there is room for candidates; it alone goes over all elements."""
    numel = 3 * 40_000
    x = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    x[40_000:80_000] = 0.0
    emulation.start(4000)
    check(emulation, x, 3, 100)


def test_views_at_odd_offsets(cuda: Emulation) -> None:
    base = torch.randn(9016, generator=torch.Generator().manual_seed(3))
    for dtype in DTYPES:
        check(cuda, base.to(dtype)[1:9002], 3, 30, residual=base[4:9005])


def test_a_bad_message_is_that_of_its_region_alone(cuda: Emulation) -> None:
    numel, k, shard = 9001, 5, torch.empty(9001)
    rows = cuda.compress_regions(torch.randn(numel), None, None, k, 3, torch.bfloat16)
    for place in (4, 82):  # a count of non-finite elements, an index
        bad = rows.clone()
        bad[1, place : place + 2] = 255
        want = torch.empty(numel)
        plain.accumulate_regions(bad, want, k, torch.bfloat16)
        cuda.accumulate_regions(bad, shard, k, torch.bfloat16)
        assert same_bits(shard, want), "other bits"
        assert 0 < int(want.isnan().sum()) < numel


def test_bytes_do_not_grow_with_the_regions(emulation: Emulation) -> None:
    """But by the counts, bins and messages that each has."""
    numel, taken = 32_768, []
    x = torch.randn(2, numel, generator=torch.Generator().manual_seed(4))
    for num_regions in (1, 4, 16):
        emulation.start(5000)
        emulation.compress_regions(x[0], x[1], torch.empty(numel), 320 // num_regions, num_regions, torch.bfloat16)
        taken.append(emulation.nbytes)
    of_a_region = 3 * 2048 * (8 + 8) + 10_000  # bins are cleared and read
    assert taken[1] - taken[0] < 3 * of_a_region
    assert taken[2] - taken[0] < 15 * of_a_region


def try_everything(cuda: Emulation) -> None:
    few, x = torch.Generator().manual_seed(6), inputs(9005)["few values"]
    for seed in (1, 2):
        cuda.start(seed)
        check(cuda, torch.randn(9005, generator=few), 2, 70, residual=torch.randn(9005, generator=few))
        check(cuda, x, 3, 40, torch.float16)
        check(cuda, torch.randn(23, generator=few), 5, 5, torch.float32)  # two regions of four elements, three of five
    test_a_bad_message_is_that_of_its_region_alone(cuda)


def test_what_finds_the_wrong_ones_passes(emulation: Emulation) -> None:
    try_everything(emulation)


@finds_each(WRONG)
def test_what_is_wrong_is_found(fault: tuple[str, ...], tmp_path: Path) -> None:
    *change, said = fault
    wrong = Emulation(build(tmp_path, with_fault(tmp_path, *change), flags=["-DLS_MOST_BLOCKS=7"]))
    with pytest.raises((AssertionError, EmulationError), match=said):
        try_everything(wrong)
