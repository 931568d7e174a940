"""The CUDA kernels equal plain torch on the CPU bit for bit; also graph capture and misleading samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu.waits import waits_raise
from lightning_sparse.kernels import (
    accumulate,
    accumulate_delta,
    accumulate_regions,
    compress,
    compress_regions,
    kernel_report,
    lerp_into,
    mstopk,
    ops,
    reference,
    round_rows,
    sum_rows,
)
from tests.kernels.paths import DTYPES, PLAIN, VALUES, inputs, ks, same_bits
from tests.kernels.test_accumulate import damaged, messages_of
from tests.kernels.test_models import SHARES, models, pieces_of
from tests.kernels.test_models import SIZES as PIECES
from tests.kernels.test_rounded import rows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(kernel_report().cuda != "compiled", reason="; ".join(kernel_report().reasons) or "compiled"),
]
SIZES = [1, 7, 100, 4095, 4097, 70_001, 1_000_003]


@pytest.fixture(params=["candidates", "whole"])
def _path(request: pytest.FixtureRequest) -> Iterator[None]:
    assert ops._handle is not None
    ops._handle.lightning_sparse_force(2 if request.param == "whole" else 0)
    yield
    ops._handle.lightning_sparse_force(0)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("numel", SIZES)
def test_cuda_selection_equals_a_full_sort(numel: int) -> None:
    for turn, (name, x) in enumerate(inputs(numel).items()):
        for dtype in DTYPES:
            y = x.to(dtype)
            for k in ks(numel) if numel < 100_000 else ks(numel)[turn % 4 :: 4]:  # the CPU is slow
                values, indices = mstopk(y.cuda(), k)
                want = reference.topk(y, k)
                assert same_bits(indices.cpu(), want[1]), (name, dtype, k)
                assert same_bits(values.cpu(), want[0]), (name, dtype, k)


@pytest.mark.parametrize("numel", [1, 100, 70_001])
def test_plain_torch_on_cuda_selects_the_same_elements(numel: int) -> None:
    for name, x in inputs(numel).items():
        for k in ks(numel):
            assert same_bits(PLAIN.mstopk(x.cuda(), k)[1].cpu(), reference.topk(x, k)[1]), (name, k)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("value_dtype", VALUES, ids=str)
@pytest.mark.parametrize("numel", [1, 100, 4097, 200_003])
def test_compress_equals_plain_torch(numel: int, value_dtype: torch.dtype) -> None:
    residual = torch.randn(numel, generator=torch.Generator().manual_seed(9)) * 0.1
    scale = torch.tensor(1 / 3)
    for name, x in inputs(numel).items():
        for grad in (x, x.bfloat16()):
            for before, factor in ((None, None), (residual, scale)):
                k = max(1, numel // 50)
                got, want = torch.full((numel,), 3.0, device="cuda"), torch.full((numel,), 3.0)
                arguments = [None if t is None else t.cuda() for t in (before, factor)]
                message = compress(grad.cuda(), arguments[0], got, k, value_dtype, arguments[1])
                assert same_bits(message.cpu(), PLAIN.compress(grad, before, want, k, value_dtype, factor)), name
                assert same_bits(got.cpu(), want), name


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("value_dtype", VALUES, ids=str)
@pytest.mark.parametrize(("numel", "num_regions"), [(5, 5), (100, 7), (4097, 1), (70_001, 64), (300_003, 4)])
def test_regions_equal_plain_torch(numel: int, num_regions: int, value_dtype: torch.dtype) -> None:
    k = max(1, numel // num_regions // 20)
    residual = torch.randn(numel, generator=torch.Generator().manual_seed(9)) * 0.1
    for turn, (name, x) in enumerate(inputs(numel).items()):
        grad = x.to(DTYPES[turn % 3])
        got, want = torch.full((numel,), 3.0, device="cuda"), torch.full((numel,), 3.0)
        rows = compress_regions(grad.cuda(), residual.cuda(), got, k, num_regions, value_dtype)
        expected = PLAIN.compress_regions(grad, residual, want, k, num_regions, value_dtype, None)
        assert same_bits(rows.cpu(), expected), name
        assert same_bits(got.cpu(), want), name
        accumulate_regions(rows, got, k, value_dtype)
        PLAIN.accumulate_regions(expected, want, k, value_dtype)
        assert same_bits(got.cpu(), want), name


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize(("numel", "k"), [(1, 1), (100, 100), (70_001, 700), (1_000_003, 30_000)])
def test_accumulate_equals_plain_torch(numel: int, k: int, dtype: torch.dtype) -> None:
    messages = messages_of(numel, k, 5, dtype)
    for count, alpha in ((5, None), (5, -0.25), (1, -0.25)):
        want, shard = torch.full((numel,), 3.0), torch.full((numel,), 3.0, device="cuda")
        PLAIN.accumulate(messages[:count], want, k, dtype, alpha)
        accumulate(messages[:count].cuda(), shard, k, dtype, alpha)
        assert same_bits(shard.cpu(), want)


def test_damaged_messages_make_all_elements_nan() -> None:
    messages = messages_of(70_001, 70, 2, torch.float32)
    for name, bad in damaged(messages[1], 70).items():
        shard = torch.empty(70_001, device="cuda")
        accumulate(torch.stack([messages[0], bad]).cuda(), shard, 70, torch.float32)
        assert bool(shard.isnan().all()), name


@pytest.mark.parametrize("numel", SIZES)
def test_round_rows_equals_plain_torch(numel: int) -> None:
    residual, scale = torch.randn(numel) * 0.1, torch.tensor(1 / 3)
    for turn, (name, x) in enumerate(inputs(numel).items()):
        grad, before, factor = x.to(DTYPES[turn % 3]), residual if turn % 4 > 1 else None, scale if turn % 2 else None
        got, want = torch.full((numel,), 3.0, device="cuda"), torch.full((numel,), 3.0)
        arguments = [None if t is None else t.cuda() for t in (before, factor)]
        rows = round_rows(grad.cuda(), arguments[0], got, 3, arguments[1])
        assert same_bits(rows.cpu(), PLAIN.round_rows(grad, before, want, 3, factor)), name
        assert same_bits(got.cpu(), want), name


@pytest.mark.parametrize("numel", SIZES)
def test_sum_rows_equals_plain_torch(numel: int) -> None:
    for num_rows in (1, 2, 9):
        rows, own = rows_of(num_rows, numel), torch.randn(max(1, numel - 5))
        got = own.cuda()
        assert same_bits(sum_rows(rows.cuda(), got).cpu(), PLAIN.sum_rows(rows, own))
        assert same_bits(got.cpu(), own)


@pytest.mark.parametrize("local_fraction", SHARES)
@pytest.mark.parametrize("sizes", PIECES, ids=len)
def test_model_operators_equal_plain_torch(sizes: tuple[int, ...], local_fraction: float) -> None:
    local, global_ = models(sum(sizes))
    want = pieces_of(torch.zeros(sum(sizes)), sizes, mixed=True)
    got, on_device = [piece.cuda() for piece in want], [local.cuda(), global_.cuda()]
    lerp_into(*on_device, got, local_fraction)
    PLAIN.lerp_into(local, global_, want, local_fraction)
    assert all(same_bits(a.cpu(), b) for a, b in zip(got, want, strict=True))
    for a, b in zip(got, want, strict=True):
        a += 0.5
        b += 0.5
    accumulate_delta(*on_device, got, local_fraction)
    PLAIN.accumulate_delta(local, global_, want, local_fraction)
    assert same_bits(on_device[0].cpu(), local)


def test_hundred_runs_on_cuda_give_the_same_bits() -> None:
    grad, residual = torch.randn(2, 1_000_003, generator=torch.Generator().manual_seed(7)).cuda()
    first = None
    for _ in range(100):
        left = torch.empty_like(residual)
        both = compress(grad, residual, left, 10_000, torch.bfloat16), left
        first = first or both
        assert same_bits(first[0].cpu(), both[0].cpu())
        assert same_bits(first[1].cpu(), both[1].cpu())


@pytest.mark.usefixtures("_path")
def test_compress_and_accumulate_are_captured_in_a_cuda_graph() -> None:
    numel, k = 300_001, 3000
    grad = torch.zeros(numel, device="cuda")
    left, shard = torch.empty_like(grad), torch.empty_like(grad)
    residual = torch.zeros_like(grad)

    def step() -> None:
        message = compress(grad, residual, left, k, torch.bfloat16)
        accumulate(message.unsqueeze(0), shard, k, torch.bfloat16)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(3):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        grad.copy_(x)
        graph.replay()
        want_left, want = torch.empty(numel), torch.empty(numel)
        message = PLAIN.compress(x, torch.zeros(numel), want_left, k, torch.bfloat16, None)
        PLAIN.accumulate(message.unsqueeze(0), want, k, torch.bfloat16)
        assert same_bits(left.cpu(), want_left)
        assert same_bits(shard.cpu(), want)


def test_regions_are_captured_in_one_cuda_graph() -> None:
    numel, num_regions, k = 300_001, 64, 47
    grad = torch.zeros(numel, device="cuda")
    residual, left, shard = torch.zeros_like(grad), torch.empty_like(grad), torch.empty_like(grad)
    graph = torch.cuda.CUDAGraph()
    accumulate_regions(compress_regions(grad, residual, left, k, num_regions, torch.bfloat16), shard, k, torch.bfloat16)
    with torch.cuda.graph(graph):
        rows = compress_regions(grad, residual, left, k, num_regions, torch.bfloat16)
        accumulate_regions(rows, shard, k, torch.bfloat16)
    x = torch.randn(numel)
    grad.copy_(x)
    graph.replay()
    want = torch.empty(numel)
    messages = PLAIN.compress_regions(x, torch.zeros(numel), want, k, num_regions, torch.bfloat16, None)
    assert same_bits(left.cpu(), want)
    PLAIN.accumulate_regions(messages, want, k, torch.bfloat16)
    assert same_bits(shard.cpu(), want)


def test_selection_on_cuda_never_waits() -> None:
    x = torch.randn(100_000, device="cuda")
    mstopk(x, 1000)
    with waits_raise():
        values, indices = mstopk(x, 1000)
    assert values.equal(x[indices.long()])


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 20 << 30, reason="needs 20 GiB"
)
def test_more_than_2_to_the_31_elements() -> None:
    numel = 2**31 + 70_001
    x = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    where = torch.tensor([5, 2**31 - 1, 2**31, numel - 1], device="cuda")
    x[where] = 1.0
    indices = mstopk(x, 4)[1]
    assert indices.dtype == torch.int64
    assert indices.equal(where)
