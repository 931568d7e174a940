"""Received messages: sums in row order, duplicates and damaged messages."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.kernels import wire
from tests.kernels.paths import DTYPES, PATHS, PLAIN, VALUES, Path, decoded, every_path, same_bits


@lru_cache(maxsize=8)
def messages_of(numel: int, k: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return messages of random gradients. The tensor is cached, so clone it before you write to it."""
    grads = torch.randn(count, numel, generator=torch.Generator().manual_seed(seed))
    return torch.stack([PLAIN.compress(grad, None, None, k, dtype, None) for grad in grads])


@lru_cache(maxsize=3)
def decoded_of(numel: int, k: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the messages of `messages_of` as dense vectors."""
    return [decoded(message, numel, k, dtype) for message in messages_of(numel, k, count, dtype)]


@every_path
@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize(("numel", "k"), [(1, 1), (100, 100), (70_001, 700), (140_000, 30_000)])
def test_sums_in_row_order(path: Path, dtype: torch.dtype, numel: int, k: int) -> None:
    messages = messages_of(numel, k, 5, dtype)
    want = torch.zeros(numel)
    for dense in decoded_of(numel, k, 5, dtype):
        want += dense
    shard = torch.full((numel,), 7.0)
    path.accumulate(messages, shard, k, dtype)
    assert same_bits(shard, want)


@every_path
@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("alpha", [1.0, -0.25, 1 / 3])
def test_accumulate_with_alpha_adds_to_the_shard(path: Path, dtype: torch.dtype, alpha: float) -> None:
    numel, k = 140_000, 3_000
    messages, shard = messages_of(numel, k, 3, dtype), torch.randn(numel)
    want = shard.clone()
    for dense in decoded_of(numel, k, 3, dtype):
        want += dense * alpha
    path.accumulate(messages, shard, k, dtype, alpha)
    assert same_bits(shard, want)


@every_path
def test_equal_indices_add_in_row_order(path: Path) -> None:
    rows = [
        wire.encode(torch.tensor([value]), torch.tensor([70_000]), 70_001, DTYPES[0]) for value in (1e8, 1.0, -1e8, 1.0)
    ]
    shard = torch.empty(70_001)
    path.accumulate(torch.stack(rows), shard, 1, DTYPES[0])
    assert shard[70_000].item() == 1.0, "1e8 + 1 - 1e8 + 1 in fp32: another order gives another result"
    assert int(shard.count_nonzero()) == 1


@every_path
@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_count_of_non_finite_elements_makes_all_elements_nan(path: Path, dtype: torch.dtype) -> None:
    messages = messages_of(70_001, 70, 3, dtype).clone()
    grad = torch.ones(70_001)
    grad[9] = torch.inf
    messages[1] = PLAIN.compress(grad, None, None, 70, dtype, None)
    for alpha in (None, 0.5):
        shard = torch.empty(70_001)
        path.accumulate(messages, shard, 70, dtype, alpha)
        assert bool(shard.isnan().all())


def damaged(message: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    """Return damaged copies of a message of 70,001 fp32 elements, by the kind of damage."""
    table = wire.message_layout(70_001, k, torch.float32)
    result = {"noise": torch.randint(0, 256, message.shape, dtype=torch.uint8), "zeros": torch.zeros_like(message)}

    def change(name: str, dtype: torch.dtype, at: int, value: int | torch.Tensor) -> None:
        copy = message.clone()
        copy.view(dtype)[at] = value
        result[name] = copy

    for word in (0, 3, 4, 6, table.counts // 4, table.counts // 4 + 1):
        for wrong in (-1, 2**31 - 1, 12_345):
            change(f"word {word} = {wrong}", torch.int32, word, wrong)
    kind = torch.uint8 if table.num_cells else torch.int16
    first = table.indices // table.index_bytes
    indices = message.view(kind)
    change("index past the end", kind, first + k - 1, -1 if kind == torch.int16 else 255)
    change("the same index twice", kind, first, indices[first + 1])
    if table.num_cells:
        change("past its cell", torch.uint8, table.indices, 241)
        change("a pair more in a cell", torch.uint8, table.cells, message[table.cells] + 1)
        change("more than a cell holds", torch.uint8, table.cells + 16, 255)
        result["moved by a cell"] = message.clone()
        at = table.cells + int(message[table.cells : table.indices].argmax())
        result["moved by a cell"][at : at + 2] += torch.tensor([255, 1], dtype=torch.uint8)
    return result


@every_path
@pytest.mark.parametrize("k", [70, 700])
def test_damaged_message_makes_all_elements_nan(path: Path, k: int) -> None:
    torch.manual_seed(0)
    messages = messages_of(70_001, k, 2, torch.float32)
    for name, bad in damaged(messages[1], k).items():
        shard = torch.empty(70_001)
        path.accumulate(torch.stack([messages[0], bad]), shard, k, torch.float32)
        assert bool(shard.isnan().all()), name


@settings(deadline=None, max_examples=25)
@given(data=st.data(), flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_messages_have_equal_results_on_all_paths(data: st.DataObject, flips: list[tuple[int, int]]) -> None:
    numel, k = data.draw(st.sampled_from([(70_001, 70), (70_001, 700), (5, 3)]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, wire.TWO_BIT]))
    messages = messages_of(numel, k, 2, dtype).clone()
    for at, value in flips:
        messages[1, at % messages.shape[1]] = value
    want = torch.empty(numel)
    PLAIN.accumulate(messages, want, k, dtype)
    for path in PATHS[1:]:
        shard = torch.empty(numel)
        path.accumulate(messages, shard, k, dtype)
        assert torch.equal(shard.isnan(), want.isnan())
        assert torch.equal(shard.nan_to_num(), want.nan_to_num())
