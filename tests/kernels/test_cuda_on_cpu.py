"""The emulated CUDA kernels equal plain torch. The emulation also checks races and memory accesses.

Every call uses another seed, which orders blocks and threads. test_cuda.py runs the kernels on a GPU.
"""

from __future__ import annotations

import shutil

import pytest
import torch

from lightning_sparse.kernels import reference, wire
from tests.kernels.emulation import ORDERS, Emulation, cuda_library
from tests.kernels.paths import DTYPES, PLAIN, VALUES, inputs, ks, same_bits
from tests.kernels.test_accumulate import damaged, messages_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on PATH")


@pytest.fixture(scope="module")
def emulation() -> Emulation:
    return Emulation(cuda_library())


@pytest.fixture(params=ORDERS)
def cuda(emulation: Emulation, request: pytest.FixtureRequest) -> Emulation:
    emulation.start(*request.param)
    return emulation


@pytest.mark.parametrize("numel", [1, 4097, *(pytest.param(numel, marks=pytest.mark.slow) for numel in (100, 70_001))])
def test_selection_equals_the_reference(cuda: Emulation, numel: int) -> None:
    for turn, (name, x) in enumerate(inputs(numel).items()):
        if numel > 5000 and name not in ("layered", "5 % dense", "special"):
            continue
        for k in ks(numel)[turn % 4 :: 4] if numel < 5000 else (700,):
            x = x.to(DTYPES[(turn + k) % 3])
            got, want = cuda.mstopk(x, k), reference.topk(x, k)
            assert same_bits(got[1], want[1]), (name, k)
            assert same_bits(got[0], want[0]), (name, k)


@pytest.mark.parametrize("numel", [100, 4097, *(pytest.param(numel, marks=pytest.mark.slow) for numel in (1, 70_001))])
def test_compress_equals_plain_torch(cuda: Emulation, numel: int) -> None:
    k, scale = max(1, numel // 50), torch.tensor(1 / 3)
    residual = torch.randn(numel, generator=torch.Generator().manual_seed(9)) * 0.1
    for turn, (name, x) in enumerate(inputs(numel).items()):
        if numel > 5000 and name not in ("layered", "special", "huge"):
            continue
        grad, value_dtype = x.to(DTYPES[turn % 3]), VALUES[turn // 3 % len(VALUES)]
        before, factor = (residual, scale) if turn % 2 else (None, None)
        got, want = torch.full((2, numel), 3.0)
        message = cuda.compress(grad, before, got, k, value_dtype, factor)
        assert same_bits(message, PLAIN.compress(grad, before, want, k, value_dtype, factor)), name
        assert same_bits(got, want), name


@pytest.mark.slow
def test_groups_of_tiles_look_back_several_steps(emulation: Emulation) -> None:  # look back 1,048,576 elements per step
    emulation.start(6000)
    check_look_back(emulation, 1_150_001)


def test_groups_of_tiles_look_back(cuda: Emulation) -> None:
    check_look_back(cuda, 140_001)


def check_look_back(cuda: Emulation, numel: int) -> None:
    for name, value_dtype in (("layered", torch.bfloat16), ("few values", wire.TWO_BIT)):
        x, k = inputs(numel)[name], numel // 20
        got, want = torch.empty(2, numel)
        message = cuda.compress(x, None, got, k, value_dtype)
        assert same_bits(message, PLAIN.compress(x, None, want, k, value_dtype, None)), name
        assert same_bits(got, want), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_at_odd_offsets(cuda: Emulation, dtype: torch.dtype) -> None:
    numel, k = 9001, 300
    base = torch.randn(numel + 8, generator=torch.Generator().manual_seed(3))
    for offset in (1, 4):
        grad, residual = base.to(dtype)[offset : offset + numel], base[3 : 3 + numel]
        got, want = torch.empty(numel + 1)[1:], torch.empty(numel)
        message = cuda.compress(grad, residual, got, k, torch.bfloat16)
        assert same_bits(message, PLAIN.compress(grad, residual, want, k, torch.bfloat16, None))
        assert same_bits(got, want)
        shard = torch.empty(numel + 1)[1:]
        cuda.accumulate(message[None], shard, k, torch.bfloat16)
        PLAIN.accumulate(message[None], want, k, torch.bfloat16)
        assert same_bits(shard, want)


@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_accumulate_equals_plain_torch(cuda: Emulation, dtype: torch.dtype) -> None:
    for numel, k in ((1, 1), (100, 100), (140_000, 300), (140_000, 3000)):
        messages = messages_of(numel, k, 4, dtype)
        for alpha in (None, -0.25):
            got, want = torch.full((2, numel), 5.0)
            PLAIN.accumulate(messages, want, k, dtype, alpha)
            cuda.accumulate(messages, got, k, dtype, alpha)
            assert same_bits(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, wire.TWO_BIT], ids=str)
def test_few_pairs_are_added_without_a_pass_over_all_elements(cuda: Emulation, dtype: torch.dtype) -> None:
    numel, k = 400_000, 4000
    messages, nbytes = messages_of(numel, k, 4, dtype), []
    for count in (1, 4):
        cuda.accumulate(messages[:count].contiguous(), torch.zeros(numel), k, dtype, -0.25)
        nbytes.append(cuda.nbytes)
    assert nbytes[1] < numel * 8 / 4, "a pass over all elements"
    cuda.accumulate(messages.repeat(5, 1), torch.zeros(numel), k, dtype, -0.25)  # many messages are added in one pass
    assert cuda.nbytes > numel * 8


@pytest.mark.parametrize(("numel", "k"), [(5000, 40), (50_000, 50)])
def test_more_messages_than_fit_into_one_pass_are_added(cuda: Emulation, numel: int, k: int) -> None:
    messages = messages_of(numel, k, 70, torch.bfloat16).clone()
    got, want = torch.full((2, numel), 0.5)
    PLAIN.accumulate(messages, want, k, torch.bfloat16, 3.0)
    cuda.accumulate(messages, got, k, torch.bfloat16, 3.0)
    assert same_bits(got, want)
    messages[69, 4] = 1  # a count of non-finite elements
    cuda.accumulate(messages, got, k, torch.bfloat16)
    assert bool(got.isnan().all())


def test_launches_do_not_depend_on_the_number_of_messages(cuda: Emulation) -> None:
    x = torch.randn(5000)
    message = cuda.compress(x, x, torch.empty(5000), 50, torch.bfloat16)
    assert cuda.counts == (4, 0), "launches, memsets"
    cuda.compress(x, x, torch.empty(5000), 50, wire.TWO_BIT)
    assert cuda.counts == (5, 0)
    cuda.mstopk(x, 50)
    assert cuda.counts == (4, 0)
    for count in (1, 9):
        cuda.accumulate(message.expand(count, -1).contiguous(), x, 50, torch.bfloat16)
        assert cuda.counts == (1, 1)


@pytest.mark.parametrize("k", [70, 700])
def test_damaged_messages_make_all_elements_nan(cuda: Emulation, k: int) -> None:
    messages = messages_of(70_001, k, 2, torch.float32)
    for name, bad in damaged(messages[1], k).items():
        shard = torch.empty(70_001)
        cuda.accumulate(torch.stack([messages[0], bad]), shard, k, torch.float32, damaged=True)
        assert bool(shard.isnan().all()), name


@pytest.mark.parametrize("k", [200, 2000])
def test_indices_out_of_order_are_found_at_any_position(cuda: Emulation, k: int) -> None:
    numel = 70_001
    messages = messages_of(numel, k, 2, torch.bfloat16)
    layout, g = wire.message_layout(numel, k, torch.bfloat16), torch.Generator().manual_seed(1)
    kind = torch.uint8 if layout.num_cells else torch.int16
    start = layout.indices // layout.index_bytes
    for _ in range(8):
        bad = messages.clone()
        where = torch.randint(k, (2,), generator=g)
        bad[1].view(kind)[start + where] = bad[1].view(kind)[start + where.flip(0)]
        got, want = torch.empty(2, numel)
        PLAIN.accumulate(bad, want, k, torch.bfloat16)
        cuda.accumulate(bad, got, k, torch.bfloat16, damaged=True)
        assert same_bits(got, want)
