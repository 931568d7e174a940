"""A selection per region of a shard gives the bits of one call per region, on every CPU path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.kernels import wire
from tests.kernels.paths import DTYPES, PATHS, PLAIN, VALUES, Path, every_path, inputs, same_bits

SHAPES = [(1, 1, 1), (5, 5, 1), (100, 7, 3), (4097, 2, 40), (70_001, 3, 500), (131_073, 2, 9), (8193, 2, 18)]  # S, M, k


@every_path
@pytest.mark.parametrize(("numel", "num_regions", "k"), SHAPES)
def test_regions_give_the_bits_of_one_call_per_region(path: Path, numel: int, num_regions: int, k: int) -> None:
    residual, scale = torch.randn(numel, generator=torch.Generator().manual_seed(9)) * 0.1, torch.tensor(1 / 3)
    for turn, (name, x) in enumerate(inputs(numel).items()):
        if numel > 5000 and name not in ("layered", "few values", "special"):
            continue
        grad, value_dtype = x.to(DTYPES[turn % 3]), VALUES[turn // 3 % 3]
        got, want = torch.full((2, numel), 3.0)
        rows = path.compress_regions(grad, residual, got, k, num_regions, value_dtype, scale)
        regions = wire.Regions(numel, num_regions, k, value_dtype)
        assert rows.shape == (num_regions, regions.row_nbytes)
        applied, expected = torch.full((2, numel), 5.0)
        path.accumulate_regions(rows, applied, k, value_dtype)
        for row, region in zip(rows, range(num_regions), strict=True):
            place, pairs = regions.place(region), regions.pairs(region)
            message = PLAIN.compress(grad[place], residual[place], want[place], pairs, value_dtype, scale)
            assert same_bits(row[: message.numel()], message), name
            assert not row[message.numel() :].any(), name
            PLAIN.accumulate(message[None], expected[place], pairs, value_dtype)
        assert same_bits(got, want), name
        assert same_bits(applied, expected), name


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(PATHS), st.integers(1, 300), st.data())
def test_regions_of_any_shape_equal_plain_torch(path: Path, numel: int, data: st.DataObject) -> None:
    num_regions, k = data.draw(st.integers(1, numel)), data.draw(st.integers(1, numel))
    grad, (got, want) = torch.randn(numel, generator=torch.Generator().manual_seed(numel)), torch.empty(2, numel)
    rows = path.compress_regions(grad, None, got, k, num_regions, torch.bfloat16)
    assert same_bits(rows, PLAIN.compress_regions(grad, None, want, k, num_regions, torch.bfloat16, None))
    assert same_bits(got, want)
    path.accumulate_regions(rows, got, k, torch.bfloat16)
    PLAIN.accumulate_regions(rows, want, k, torch.bfloat16)
    assert same_bits(got, want)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 8), st.sampled_from([1, 3, 17, 65_535, 65_536, 200_001]), st.data())
def test_indices_of_regions(num_regions: int, each: int, data: st.DataObject) -> None:
    numel = num_regions * each + data.draw(st.integers(0, num_regions - 1))
    k = data.draw(st.integers(1, min(numel // num_regions + 1, numel, 40)))
    regions = wire.Regions(numel, num_regions, k, torch.bfloat16)
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(k))
    rows = PATHS[1].compress_regions(grad, None, None, k, num_regions, torch.bfloat16)
    want = [
        wire.indices_of(row[: regions.nbytes(region)], regions.size(region), regions.pairs(region), torch.bfloat16)
        + regions.place(region).start
        for region, row in enumerate(rows)
    ]
    got = wire.indices_of_regions(rows, regions)
    assert set(got.tolist()) == set(torch.cat(want).tolist())
    if regions.size(0) >= k:
        assert got.equal(torch.cat(want))


@every_path
def test_bad_message_affects_only_its_region(path: Path) -> None:
    numel, k = 100, 4
    regions = wire.Regions(numel, 3, k, torch.bfloat16)
    grad = torch.randn(numel)
    rows = path.compress_regions(grad, None, None, k, 3, torch.bfloat16)
    rows[1, 4] = 1  # a count of non-finite elements
    shard = torch.empty(numel)
    path.accumulate_regions(rows, shard, k, torch.bfloat16)
    bad = torch.zeros(numel, dtype=torch.bool)
    bad[regions.place(1)] = True
    assert torch.equal(shard.isnan(), bad)
