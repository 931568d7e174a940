"""The CUDA kernels of regions, of rounding and of a node's models without a GPU, as in test_cuda_on_cpu.py; and kernels
that are wrong in one line each, which the emulation must find."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparse.kernels import wire
from tests.kernels.emulation import CSRC, ORDERS, Emulation, EmulationError, build, finds_each, with_fault
from tests.kernels.paths import DTYPES, PLAIN, VALUES, inputs, same_bits
from tests.kernels.test_models import SHARES, models, pieces_of
from tests.kernels.test_rounded import rows_of

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on PATH"), pytest.mark.slow]


# -- several regions ---------------------------------------------------------------------------------------------------


def choosing(folder: Path, csrc: Path = CSRC) -> Emulation:
    return Emulation(build(folder, csrc, flags=["-DLS_MOST_BLOCKS=7"]))


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    return choosing(tmp_path_factory.mktemp("regions"))


@pytest.fixture(params=ORDERS)
def cuda(emulation: Emulation, request: pytest.FixtureRequest) -> Emulation:
    emulation.start(*request.param)
    return emulation


def check_regions(
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
    assert same_bits(rows, PLAIN.compress_regions(grad, residual, want, k, num_regions, value_dtype, scale)), (
        "other bits"
    )
    assert same_bits(got, want), "other bits"
    cuda.accumulate_regions(rows, got, k, value_dtype)
    assert cuda.counts == (1, 1), "launches, memsets"
    PLAIN.accumulate_regions(rows, want, k, value_dtype)
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
        grad, value_dtype = x.to(DTYPES[turn // 2 % 3]), VALUES[turn // 3 % len(VALUES)]
        check_regions(
            cuda, grad, num_regions, k, value_dtype, residual if turn % 2 else None, scale if turn % 4 > 1 else None
        )


def test_regions_of_several_groups_of_tiles(cuda: Emulation) -> None:
    """The first region ends with a tile, the second one element later; each has two groups of tiles."""
    numel = 2 * 9 * 4096 + 1
    x = inputs(numel)["few values"].clone()
    x[: numel // 2] *= 1e-3  # thresholds differ
    check_regions(cuda, x, 2, 700)


def test_a_wire_block_more_in_the_last_region(cuda: Emulation) -> None:
    check_regions(cuda, torch.randn(2 * 65_536 + 1, generator=torch.Generator().manual_seed(1)), 2, 9)


def test_a_region_whose_sample_misleads(emulation: Emulation) -> None:
    """More equal elements in one region than there is room for candidates; it alone goes over all elements."""
    numel = 3 * 40_000
    x = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    x[40_000:80_000] = 0.0
    emulation.start(4000)
    check_regions(emulation, x, 3, 100)


def test_regions_at_odd_offsets(cuda: Emulation) -> None:
    base = torch.randn(9016, generator=torch.Generator().manual_seed(3))
    for dtype in DTYPES:
        check_regions(cuda, base.to(dtype)[1:9002], 3, 30, residual=base[4:9005])


def test_a_bad_message_is_that_of_its_region_alone(cuda: Emulation) -> None:
    numel, k, shard = 9001, 5, torch.empty(9001)
    rows = cuda.compress_regions(torch.randn(numel), None, None, k, 3, torch.bfloat16)
    for place in (4, 82):  # a count of non-finite elements, an index
        bad = rows.clone()
        bad[1, place : place + 2] = 255
        want = torch.empty(numel)
        PLAIN.accumulate_regions(bad, want, k, torch.bfloat16)
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


def try_regions(cuda: Emulation) -> None:
    few, x = torch.Generator().manual_seed(6), inputs(9005)["few values"]
    for seed in (1, 2):
        cuda.start(seed)
        check_regions(cuda, torch.randn(9005, generator=few), 2, 70, residual=torch.randn(9005, generator=few))
        check_regions(cuda, x, 3, 40, torch.float32)
        check_regions(
            cuda, torch.randn(23, generator=few), 5, 5, torch.float32
        )  # two regions of four elements, three of five
    test_a_bad_message_is_that_of_its_region_alone(cuda)


# -- rounding ----------------------------------------------------------------------------------------------------------


def rounding(folder: Path, csrc: Path = CSRC) -> Emulation:
    return Emulation(build(folder, csrc, kernels=[csrc / "rounded_cuda.cu"], drivers=["driver_rounded.cpp"]))


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    return rounding(tmp_path_factory.mktemp("rounded"))


def check_round(rounds: Emulation, grad: Tensor, residual: Tensor | None, num_rows: int, scale: Tensor | None) -> None:
    got, want = torch.full((2, grad.numel()), 3.0)
    rows = rounds.round_rows(grad, residual, got, num_rows, scale)
    assert rounds.counts == (1, 0), "launches, memsets"
    assert same_bits(rows, PLAIN.round_rows(grad, residual, want, num_rows, scale)), "other bits"
    assert same_bits(got, want), "other bits"


def check_sum(rounds: Emulation, rows: Tensor, own: int) -> None:
    got, want = torch.randn(own).expand(2, -1).clone()
    row = rounds.sum_rows(rows, got if own else None)
    assert rounds.counts == (1, 0), "launches, memsets"
    assert same_bits(row, PLAIN.sum_rows(rows, want if own else None)), "other bits"
    assert same_bits(got, want), "other bits"


@pytest.mark.parametrize(("numel", "num_rows"), [(1, 5), (100, 3), (4096, 1), (9001, 8)])
def test_round(rounds: Emulation, numel: int, num_rows: int) -> None:
    residual, scale = torch.randn(numel) * 0.1, torch.tensor(1 / 3)
    for turn, x in enumerate(inputs(numel).values()):
        before = residual if turn % 2 else None
        check_round(rounds, x.to(DTYPES[turn % 3]), before, num_rows, scale if turn % 4 > 1 else None)
    assert same_bits(
        rounds.round_rows(residual, None, None, num_rows), PLAIN.round_rows(residual, None, None, num_rows, None)
    )


@pytest.mark.parametrize(("num_rows", "numel"), [(1, 1), (3, 100), (2, 2048), (9, 6160), (70, 2049)])
def test_sum(rounds: Emulation, num_rows: int, numel: int) -> None:
    for own in (numel, numel // 2, min(numel, 1), 0):
        for seed in range(3):
            check_sum(rounds, rows_of(num_rows, numel, seed), own)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_at_odd_offsets(rounds: Emulation, dtype: torch.dtype) -> None:
    base = torch.randn(9016)
    for offset in (1, 8):
        check_round(rounds, base.to(dtype)[offset : offset + 9001], base[3:9004], 2, None)
        rows = base.bfloat16()[offset : offset + 9000].view(2, 4500)[:, :4496].contiguous()
        check_sum(rounds, rows, 4496)
        check_sum(rounds, base.bfloat16()[offset : offset + 8992].view(2, 4496), 4495)


def test_bytes_of_rounding_are_those_of_inputs_and_outputs(rounds: Emulation) -> None:
    numel, num_rows = 32_768, 8
    x = torch.randn(2, numel)
    rows = rounds.round_rows(x[0], x[1], torch.empty(numel), num_rows)
    assert rounds.nbytes == numel * (4 + 4 + 4 + 2)
    rounds.sum_rows(rows, x[0][: numel // num_rows].clone())
    assert rounds.nbytes == numel * 2 + numel // num_rows * (2 + 4 + 4)


def try_rounding(rounds: Emulation) -> None:
    for numel, num_rows in ((9001, 8), (8192, 3)):
        check_round(rounds, torch.randn(numel + 1).bfloat16()[1:], torch.randn(numel), num_rows, None)
        check_round(rounds, torch.randn(numel), torch.randn(numel), num_rows, None)
    for count, numel in ((4, 2056), (3, 6151)):
        rows = torch.randn(count, numel) * torch.logspace(-3, 3, count)[:, None]  # whose sum depends on the order
        check_sum(rounds, rows.bfloat16(), numel - 5)
        check_sum(rounds, rows.bfloat16(), 0)


# -- the models of a node ----------------------------------------------------------------------------------------------


MOST = 96  # pieces of a launch


def moving(folder: Path, csrc: Path = CSRC) -> Emulation:
    return Emulation(build(folder, csrc, kernels=[csrc / "models_cuda.cu"], drivers=["driver_models.cpp"]))


@pytest.fixture(scope="module")
def moves(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    return moving(tmp_path_factory.mktemp("models"))


def check_models(moves: Emulation, sizes: tuple[int, ...], ahead: float, mixed: bool) -> None:
    own, shared = models(sum(sizes))
    before = own.clone(), shared.clone()
    got, want = (pieces_of(torch.zeros(sum(sizes)), sizes, mixed) for _ in range(2))
    moves.write_between(own, shared, got, ahead)
    assert moves.counts == (-(-len(sizes) // MOST), 0), "launches, memsets"
    PLAIN.write_between(own, shared, want, ahead)
    assert all(same_bits(*each) for each in zip(got, want, strict=True)), "other bits"
    assert same_bits(own, before[0]), "other bits"
    for turn, piece in enumerate(got):
        piece += turn * 0.5
    moves.add_change(own, shared, got, ahead)
    assert moves.counts == (-(-len(sizes) // MOST), 0), "launches, memsets"
    PLAIN.add_change(before[0], shared, got, ahead)
    assert same_bits(own, before[0]), "other bits"
    assert same_bits(shared, before[1]), "other bits"


def try_models(moves: Emulation) -> None:
    for ahead in (1.0, 0.3):
        check_models(moves, (5, 2048, 1, 4097, 3000), ahead, mixed=True)
    check_models(moves, tuple(1 + each % 3 for each in range(MOST + 9)), 0.5, mixed=False)
    check_models(moves, (2048, 2048), 0.5, mixed=False)


@pytest.mark.parametrize("ahead", SHARES)
def test_models(moves: Emulation, ahead: float) -> None:
    for mixed in (False, True):
        for sizes in ((1,), (7, 2047, 2049), (1,) * MOST, (1,) * (MOST + 1)):
            check_models(moves, sizes, ahead, mixed)


def test_bytes_of_models_are_those_of_inputs_and_outputs(moves: Emulation) -> None:
    numel = 32_768
    own, shared = models(numel)
    moves.write_between(own, shared, [torch.zeros(numel)], 0.5)
    assert moves.nbytes == numel * 12
    moves.add_change(own, shared, [torch.zeros(numel)], 0.5)
    assert moves.nbytes == numel * 16


# -- kernels that are wrong --------------------------------------------------------------------------------------------


# What is wrong -> the file, the line, what it becomes, and what is said of it.
REGIONS = {
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
# The same, of one file.
ROUNDING = {
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
MODELS = {
    "a piece ends too late": ("if (i >= piece.numel) return;", "", "out of bounds"),
    "reads past the end": ("i < piece.numel;", "i <= piece.numel;", "out of bounds"),
    "a block of the piece before": (".end > blockIdx.x", ".end >= blockIdx.x", "out of bounds|other bits"),
    "begins with the table": ("low ? m.parts[low - 1].end : 0", "0u", "other bits"),
    "had is not rounded": ("rounded_to<dtype>(lies)", "lies", "other bits"),
    "pieces begin at 0": ("m.shared[piece.begin + i]", "m.shared[i]", "other bits"),
    "the last launch is forgotten": ("if (m.count > 0) launch", "if (m.count > 95) launch", "launches"),
}
WRONG = {
    **{name: (choosing, try_regions, *fault) for name, fault in REGIONS.items()},
    **{name: (rounding, try_rounding, "rounded_cuda.cu", *fault) for name, fault in ROUNDING.items()},
    **{name: (moving, try_models, "models_cuda.cu", *fault) for name, fault in MODELS.items()},
}


def test_what_finds_the_wrong_ones_passes(emulation: Emulation, rounds: Emulation, moves: Emulation) -> None:
    try_regions(emulation)
    try_rounding(rounds)
    try_models(moves)


@finds_each(WRONG, "rows end too late", "a piece ends too late")
def test_what_is_wrong_is_found(fault: tuple[Any, ...], tmp_path: Path) -> None:
    made, try_everything, *change, said = fault
    wrong = made(tmp_path, with_fault(tmp_path, *change))
    with pytest.raises((AssertionError, EmulationError), match=said):
        try_everything(wrong)
