"""The emulated CUDA kernels for regions, for rounding and for a node's models, as in test_cuda_on_cpu.py."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from lightning_sparse.kernels import wire
from tests.kernels.emulation import ORDERS, Emulation, cuda_library
from tests.kernels.paths import DTYPES, PLAIN, VALUES, inputs, same_bits
from tests.kernels.test_models import SHARES, models, pieces_of
from tests.kernels.test_rounded import rows_of

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on PATH"), pytest.mark.slow]


# -- several regions ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulation() -> Emulation:
    return Emulation(cuda_library())


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
    [(5, 5, 1), (100, 7, 3), (4097, 2, 4000), pytest.param(9001, 17, 5, marks=pytest.mark.slow)],
)
def test_regions_equal_plain_torch(cuda: Emulation, numel: int, num_regions: int, k: int) -> None:
    residual, scale = torch.randn(numel, generator=torch.Generator().manual_seed(9)) * 0.1, torch.tensor(1 / 3)
    for turn, x in enumerate(inputs(numel).values()):
        every = 9 if num_regions > 8 else 3  # each size tests another share of the inputs
        if turn % every != numel % every:
            continue
        grad, value_dtype = x.to(DTYPES[turn // 2 % 3]), VALUES[turn // 3 % len(VALUES)]
        check_regions(
            cuda, grad, num_regions, k, value_dtype, residual if turn % 2 else None, scale if turn % 4 > 1 else None
        )


def test_regions_of_several_groups_of_tiles(cuda: Emulation) -> None:
    """The first region ends at the end of a tile, the second one element later. Each region has two groups of tiles."""
    numel = 2 * 9 * 4096 + 1
    x = inputs(numel)["few values"].clone()
    x[: numel // 2] *= 1e-3  # thresholds differ
    check_regions(cuda, x, 2, 700)


def test_last_region_with_another_wire_block(cuda: Emulation) -> None:
    check_regions(cuda, torch.randn(2 * 65_536 + 1, generator=torch.Generator().manual_seed(1)), 2, 9)


def test_region_with_a_misleading_sample(emulation: Emulation) -> None:
    """One region has more equal elements than candidates fit, so only this region runs over all elements."""
    numel = 3 * 40_000
    x = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    x[40_000:80_000] = 0.0
    emulation.start(4000)
    check_regions(emulation, x, 3, 100)


def test_regions_at_odd_offsets(cuda: Emulation) -> None:
    base = torch.randn(9016, generator=torch.Generator().manual_seed(3))
    for dtype in DTYPES:
        check_regions(cuda, base.to(dtype)[1:9002], 3, 30, residual=base[4:9005])


def test_bad_message_affects_only_its_region(cuda: Emulation) -> None:
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
    """Additional regions only add their counts, bins and messages."""
    numel, taken = 32_768, []
    x = torch.randn(2, numel, generator=torch.Generator().manual_seed(4))
    for num_regions in (1, 4, 16):
        emulation.start(5000)
        emulation.compress_regions(x[0], x[1], torch.empty(numel), 320 // num_regions, num_regions, torch.bfloat16)
        taken.append(emulation.nbytes)
    of_a_region = 3 * 2048 * (8 + 8) + 10_000  # bins are cleared and read
    assert taken[1] - taken[0] < 3 * of_a_region
    assert taken[2] - taken[0] < 15 * of_a_region


def test_regions_of_unequal_sizes(cuda: Emulation) -> None:
    generator = torch.Generator().manual_seed(6)
    residual = torch.randn(9005, generator=generator)
    check_regions(cuda, torch.randn(9005, generator=generator), 2, 70, residual=residual)
    check_regions(cuda, inputs(9005)["few values"], 3, 40, torch.float32)
    # two regions of four elements, three of five
    check_regions(cuda, torch.randn(23, generator=generator), 5, 5, torch.float32)


# -- rounding ----------------------------------------------------------------------------------------------------------


def check_round(
    emulation: Emulation, grad: Tensor, residual: Tensor | None, num_rows: int, scale: Tensor | None
) -> None:
    got, want = torch.full((2, grad.numel()), 3.0)
    rows = emulation.round_rows(grad, residual, got, num_rows, scale)
    assert emulation.counts == (1, 0), "launches, memsets"
    assert same_bits(rows, PLAIN.round_rows(grad, residual, want, num_rows, scale)), "other bits"
    assert same_bits(got, want), "other bits"


def check_sum(emulation: Emulation, rows: Tensor, own: int) -> None:
    got, want = torch.randn(own).expand(2, -1).clone()
    row = emulation.sum_rows(rows, got if own else None)
    assert emulation.counts == (1, 0), "launches, memsets"
    assert same_bits(row, PLAIN.sum_rows(rows, want if own else None)), "other bits"
    assert same_bits(got, want), "other bits"


@pytest.mark.parametrize(("numel", "num_rows"), [(1, 5), (100, 3), (4096, 1), (9001, 8)])
def test_round_rows_equals_plain_torch(emulation: Emulation, numel: int, num_rows: int) -> None:
    residual, scale = torch.randn(numel) * 0.1, torch.tensor(1 / 3)
    for turn, x in enumerate(inputs(numel).values()):
        before = residual if turn % 2 else None
        check_round(emulation, x.to(DTYPES[turn % 3]), before, num_rows, scale if turn % 4 > 1 else None)
    assert same_bits(
        emulation.round_rows(residual, None, None, num_rows), PLAIN.round_rows(residual, None, None, num_rows, None)
    )


@pytest.mark.parametrize(("num_rows", "numel"), [(1, 1), (3, 100), (2, 2048), (9, 6160), (70, 2049)])
def test_sum_rows_equals_plain_torch(emulation: Emulation, num_rows: int, numel: int) -> None:
    for own in (numel, numel // 2, min(numel, 1), 0):
        for seed in range(3):
            check_sum(emulation, rows_of(num_rows, numel, seed), own)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_at_odd_offsets(emulation: Emulation, dtype: torch.dtype) -> None:
    base = torch.randn(9016)
    for offset in (1, 8):
        check_round(emulation, base.to(dtype)[offset : offset + 9001], base[3:9004], 2, None)
        rows = base.bfloat16()[offset : offset + 9000].view(2, 4500)[:, :4496].contiguous()
        check_sum(emulation, rows, 4496)
        check_sum(emulation, base.bfloat16()[offset : offset + 8992].view(2, 4496), 4495)


def test_rounding_reads_inputs_and_writes_outputs_once(emulation: Emulation) -> None:
    numel, num_rows = 32_768, 8
    x = torch.randn(2, numel)
    rows = emulation.round_rows(x[0], x[1], torch.empty(numel), num_rows)
    assert emulation.nbytes == numel * (4 + 4 + 4 + 2)
    emulation.sum_rows(rows, x[0][: numel // num_rows].clone())
    assert emulation.nbytes == numel * 2 + numel // num_rows * (2 + 4 + 4)


def test_rounding_of_unaligned_rows(emulation: Emulation) -> None:
    for numel, num_rows in ((9001, 8), (8192, 3)):
        check_round(emulation, torch.randn(numel + 1).bfloat16()[1:], torch.randn(numel), num_rows, None)
        check_round(emulation, torch.randn(numel), torch.randn(numel), num_rows, None)
    for count, numel in ((4, 2056), (3, 6151)):
        rows = torch.randn(count, numel) * torch.logspace(-3, 3, count)[:, None]  # the sum depends on the order
        check_sum(emulation, rows.bfloat16(), numel - 5)
        check_sum(emulation, rows.bfloat16(), 0)


# -- the models of a node ----------------------------------------------------------------------------------------------


MOST = 96  # pieces per launch


def check_models(emulation: Emulation, sizes: tuple[int, ...], ahead: float, mixed: bool) -> None:
    own, shared = models(sum(sizes))
    before = own.clone(), shared.clone()
    got, want = (pieces_of(torch.zeros(sum(sizes)), sizes, mixed) for _ in range(2))
    emulation.lerp_into(own, shared, got, ahead)
    assert emulation.counts == (-(-len(sizes) // MOST), 0), "launches, memsets"
    PLAIN.lerp_into(own, shared, want, ahead)
    assert all(same_bits(*each) for each in zip(got, want, strict=True)), "other bits"
    assert same_bits(own, before[0]), "other bits"
    for turn, piece in enumerate(got):
        piece += turn * 0.5
    emulation.accumulate_delta(own, shared, got, ahead)
    assert emulation.counts == (-(-len(sizes) // MOST), 0), "launches, memsets"
    PLAIN.accumulate_delta(before[0], shared, got, ahead)
    assert same_bits(own, before[0]), "other bits"
    assert same_bits(shared, before[1]), "other bits"


@pytest.mark.parametrize("ahead", SHARES)
def test_model_operators_equal_plain_torch(emulation: Emulation, ahead: float) -> None:
    many = [tuple(1 + piece % 3 for piece in range(count)) for count in (MOST, MOST + 1)]
    for turn, sizes in enumerate([(1,), (7, 2047, 2049), (2048, 2048), (5, 2048, 1, 4097, 3000), *many]):
        check_models(emulation, sizes, ahead, mixed=(turn + SHARES.index(ahead)) % 2 == 0)


def test_models_are_read_and_written_once(emulation: Emulation) -> None:
    numel = 32_768
    own, shared = models(numel)
    emulation.lerp_into(own, shared, [torch.zeros(numel)], 0.5)
    assert emulation.nbytes == numel * 12
    emulation.accumulate_delta(own, shared, [torch.zeros(numel)], 0.5)
    assert emulation.nbytes == numel * 16
