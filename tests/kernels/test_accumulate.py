"""The receiving side: sums in row order, duplicates, and messages that are not what they should be."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.kernels import plain, wire
from tests.kernels.paths import DTYPES, PATHS, Path, decoded, every_path, same_bits


@lru_cache(maxsize=4)
def messages_of(numel: int, k: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Messages of random gradients; the same tensor each time, so that who writes to it clones it."""
    grads = torch.randn(count, numel, generator=torch.Generator().manual_seed(seed))
    return torch.stack([plain.compress(grad, None, None, k, dtype, None) for grad in grads])


@lru_cache(maxsize=3)
def decoded_of(numel: int, k: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The same, dense."""
    return [decoded(message, numel, k, dtype) for message in messages_of(numel, k, count, dtype)]


@every_path
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alpha", [1.0, -0.25, 1 / 3])
def test_alpha_adds_to_what_is_there(path: Path, dtype: torch.dtype, alpha: float) -> None:
    numel, k = 140_000, 3_000
    messages, shard = messages_of(numel, k, 3, dtype), torch.randn(numel)
    want = shard.clone()
    for dense in decoded_of(numel, k, 3, dtype):
        want += dense * alpha
    path.accumulate(messages, shard, k, dtype, alpha)
    assert same_bits(shard, want)


@every_path
def test_the_same_index_adds_in_the_order_of_rows(path: Path) -> None:
    rows = [
        wire.encode(torch.tensor([value]), torch.tensor([70_000]), 70_001, DTYPES[0]) for value in (1e8, 1.0, -1e8, 1.0)
    ]
    shard = torch.empty(70_001)
    path.accumulate(torch.stack(rows), shard, 1, DTYPES[0])
    assert shard[70_000].item() == 1.0, "1e8 + 1 - 1e8 + 1 in fp32: another order gives another number"
    assert int(shard.count_nonzero()) == 1


@every_path
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_count_of_non_finite_poisons_all(path: Path, dtype: torch.dtype) -> None:
    messages = messages_of(70_001, 70, 3, dtype).clone()
    grad = torch.ones(70_001)
    grad[9] = torch.inf
    messages[1] = plain.compress(grad, None, None, 70, dtype, None)
    for alpha in (None, 0.5):
        shard = torch.empty(70_001)
        path.accumulate(messages, shard, 70, dtype, alpha)
        assert bool(shard.isnan().all())


def damaged(message: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a message of 70,001 elements with k = 70 in fp32: each thing that a receiver must not trust."""
    table = wire.message_layout(70_001, 70, torch.float32)
    words = [0, 3, 4, 6, table.counts // 4, table.counts // 4 + 1]
    result = {"noise": torch.randint(0, 256, message.shape, dtype=torch.uint8), "zeros": torch.zeros_like(message)}
    for word in words:
        for value in (-1, 2**31 - 1, 12_345):
            copy = message.clone()
            copy.view(torch.int32)[word] = value
            result[f"word {word} = {value}"] = copy
    low = message.clone()
    low.view(torch.int16)[table.indices // 2 + 69] = -1  # 65,535 in a last block of 4,465
    result["index past the end"] = low
    falling = message.clone()
    falling.view(torch.int16)[table.indices // 2] = falling.view(torch.int16)[table.indices // 2 + 1]
    result["the same index twice"] = falling
    return result


@every_path
def test_a_damaged_message_poisons_and_never_crashes(path: Path) -> None:
    torch.manual_seed(0)
    messages = messages_of(70_001, 70, 2, torch.float32)
    for name, bad in damaged(messages[1]).items():
        shard = torch.empty(70_001)
        path.accumulate(torch.stack([messages[0], bad]), shard, 70, torch.float32)
        assert bool(shard.isnan().all()), name


@settings(deadline=None, max_examples=25)
@given(data=st.data(), flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8))
def test_any_damage_reads_the_same_on_every_path(data: st.DataObject, flips: list[tuple[int, int]]) -> None:
    numel, k = data.draw(st.sampled_from([(70_001, 70), (5, 3)]))
    messages = messages_of(numel, k, 2, torch.bfloat16).clone()
    for at, value in flips:
        messages[1, at % messages.shape[1]] = value
    want = torch.empty(numel)
    plain.accumulate(messages, want, k, torch.bfloat16)
    for path in PATHS[1:]:
        shard = torch.empty(numel)
        path.accumulate(messages, shard, k, torch.bfloat16)
        assert torch.equal(shard.isnan(), want.isnan())
        assert torch.equal(shard.nan_to_num(), want.nan_to_num())
