"""The message: its size, what its values survive, and what a receiver makes of a damaged one. Pure, a second."""

from __future__ import annotations

import pytest
import torch

from lightning_sparse.kernels import message_bytes, wire
from tests.kernels.paths import DTYPES, inputs, nonfinite_count, same_bits


def round_trip(values: list[float], dtype: torch.dtype) -> list[float]:
    x = torch.tensor(values)
    message = wire.encode(x, torch.arange(x.numel()), x.numel(), dtype)
    decoded, indices, valid = wire.decode(message, x.numel(), x.numel(), dtype)
    assert bool(valid)
    assert indices.tolist() == list(range(x.numel()))
    return decoded.tolist()


def test_worked_example_of_the_size() -> None:
    assert message_bytes(100_000, 1000, torch.bfloat16) == 4080
    assert message_bytes(1, 1, torch.float32) == 64 + 16 + 16 + 16
    assert message_bytes(65_537, 3, torch.float16) == 64 + 16 + 16 + 16


def test_two_bytes_an_index_at_scale() -> None:
    numel, k = 25_600_000, 256_000
    assert message_bytes(numel, k, torch.bfloat16) < 4.01 * k
    assert message_bytes(3_000_000_000, 30_000_000, torch.float32) < 6.01 * 30_000_000


def test_byte_table() -> None:
    message = wire.encode(torch.tensor([1.5, -2.0, 3.0]), torch.tensor([3, 70_000, 70_001]), 70_002, torch.float32, 0)
    raw = bytes(message.tolist())
    assert raw[:4] == b"LSP1"
    assert [int.from_bytes(raw[at : at + 4], "little", signed=True) for at in (4, 8, 12)] == [0, 0, 0]
    assert [int.from_bytes(raw[at : at + 8], "little") for at in (16, 24)] == [70_002, 3]
    assert [int.from_bytes(raw[at : at + 4], "little") for at in (64, 68)] == [1, 2]
    assert [int.from_bytes(raw[at : at + 2], "little") for at in (80, 82, 84)] == [3, 70_000 - 65_536, 70_001 - 65_536]
    assert message[96:108].view(torch.float32).tolist() == [1.5, -2.0, 3.0]
    assert len(raw) == 112
    assert not any(raw[86:96] + raw[108:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_finite_values_stay_finite(dtype: torch.dtype) -> None:
    big = torch.finfo(torch.float32).max
    for values in ([7e4, -7e4], [big, -big], [1e-9, -1e-9], [1e-45, 0.0], [65_520.0, 1.0], [32_760.0, 1.0]):
        for value, back in zip(values, round_trip(values, dtype), strict=True):
            assert abs(back) < float("inf")
            assert back == pytest.approx(value, rel=2**-7 if dtype == torch.bfloat16 else 2**-10)


def test_small_values_beside_large_ones_in_fp16() -> None:
    assert round_trip([7e4, 1e-5], torch.float16)[1] == pytest.approx(1e-5, rel=0.5)
    assert round_trip([1e-9, 3e-9], torch.float16) == pytest.approx([1e-9, 3e-9], rel=2**-10)
    assert round_trip([1e6, 1e-9], torch.float16)[1] == 0.0, "beyond 2^38: left to the residual"


def test_bf16_saturates_and_not_earlier() -> None:
    largest = torch.finfo(torch.bfloat16).max
    assert round_trip([largest, 3.4e38, -3.4e38], torch.bfloat16) == [largest, largest, -largest]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_is_canonical(dtype: torch.dtype) -> None:
    back = torch.tensor(round_trip([float("nan"), float("inf"), float("-inf"), 1.0, -0.0], dtype))
    assert same_bits(back, torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0, -0.0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_indices_survive(dtype: torch.dtype) -> None:
    numel = 300_001
    for indices in ([0], [numel - 1], [65_535, 65_536], list(range(65_530, 200_000, 3)), list(range(numel))):
        where = torch.tensor(indices)
        message = wire.encode(torch.ones(len(indices)), where, numel, dtype)
        assert message.numel() == message_bytes(numel, len(indices), dtype)
        assert wire.decode(message, numel, len(indices), dtype)[1].equal(where)


def test_round_trip_is_decode_of_encode() -> None:
    for name, x in inputs(5000).items():
        for dtype in DTYPES:
            message = wire.encode(x, torch.arange(5000), 5000, dtype)
            assert same_bits(wire.decode(message, 5000, 5000, dtype)[0], wire.round_trip(x, dtype)), (name, dtype)


def test_count_is_in_the_header() -> None:
    message = wire.encode(torch.ones(1), torch.tensor([0]), 9, torch.float32, torch.tensor(5))
    assert nonfinite_count(message) == 5
    assert not bool(wire.decode(message, 9, 1, torch.float32)[2])
    huge = wire.encode(torch.ones(1), torch.tensor([0]), 9, torch.float32, torch.tensor(2**40))
    assert nonfinite_count(huge) == 2**31 - 1


@pytest.mark.parametrize(("numel", "k", "dtype"), [(10, 0, torch.float32), (10, 11, torch.float32), (9, 1, torch.int8)])
def test_no_such_message(numel: int, k: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="numel|value_dtype"):
        message_bytes(numel, k, dtype)


def test_wrong_length_says_the_right_one() -> None:
    with pytest.raises(ValueError, match=r"uint8\[112\]"):
        wire.decode(torch.zeros(111, dtype=torch.uint8), 100, 1, torch.float32)
