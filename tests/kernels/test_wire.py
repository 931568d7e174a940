"""Messages: their sizes, layouts and rounded values."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_sparse.kernels import message_bytes, reference, wire
from tests.kernels.paths import VALUES, inputs, nonfinite_count, same_bits

EXACT = [dtype for dtype in VALUES if dtype != wire.TWO_BIT]


def round_trip(values: list[float], dtype: torch.dtype) -> list[float]:
    x = torch.tensor(values)
    message = wire.encode(x, torch.arange(x.numel()), x.numel(), dtype)
    decoded, indices, valid = wire.decode(message, x.numel(), x.numel(), dtype)
    assert bool(valid)
    assert indices.tolist() == list(range(x.numel()))
    return decoded.tolist()


def test_message_bytes_equal_the_worked_example() -> None:
    assert message_bytes(100_000, 1000, torch.bfloat16) == 3520
    assert message_bytes(100_000, 1000, wire.TWO_BIT) == 1792
    assert message_bytes(1, 1, torch.float32) == 64 + 16 + 16 + 16
    assert message_bytes(65_537, 3, torch.bfloat16) == 64 + 16 + 16 + 16


def test_bytes_of_a_pair_at_scale() -> None:
    numel, k = 25_600_000, 256_000
    assert message_bytes(numel, k, torch.bfloat16) < 3.43 * k
    assert message_bytes(numel, k, wire.TWO_BIT) < 1.69 * k
    assert message_bytes(numel, 3 * k, wire.TWO_BIT) < 1.40 * 3 * k
    assert message_bytes(numel, k // 10, wire.TWO_BIT) < 2.44 * k / 10, "16-bit indices are smaller"
    assert message_bytes(3_000_000_000, 30_000_000, torch.float32) < 5.43 * 30_000_000


@pytest.mark.parametrize("value_dtype", VALUES, ids=str)
def test_message_uses_the_smaller_index(value_dtype: torch.dtype) -> None:
    """One more pair adds at most the pair and the padding of a section."""
    sizes = [message_bytes(300_001, k, value_dtype) for k in range(1, 3000)]
    assert all(0 <= after - before <= 48 for before, after in itertools.pairwise(sizes))


@pytest.mark.parametrize("value_dtype", VALUES, ids=str)
def test_larger_region_has_no_shorter_message(value_dtype: torch.dtype) -> None:
    for spans in (1, 2, 16, 100):
        for k in range(15 * spans, 19 * spans + 40):
            assert message_bytes(4096 * spans, k, value_dtype) <= message_bytes(4096 * spans + 1, k, value_dtype)


def test_byte_table_of_cells_and_levels() -> None:
    """Two bits per value and 8-bit indices: 60 pairs of 4,098 elements, four of them outside cell 0."""
    places = [*range(100, 156), 241, 4095, 4096, 4097]
    values = torch.ones(60)
    values[58] = -3.0
    raw = bytes(wire.encode(values, torch.tensor(places), 4098, wire.TWO_BIT, 0).tolist())
    assert raw[:4] == b"LSP2"
    assert int.from_bytes(raw[12:16], "little") == 3
    assert int.from_bytes(raw[64:68], "little") == 60
    assert torch.tensor(list(raw[80:88]), dtype=torch.uint8).view(torch.float32).tolist() == [1.0, 3.0]
    assert list(raw[96:130]) == [56, 1, *[0] * 14, 1, 2, *[0] * 16]
    assert list(raw[144:204]) == [*range(100, 156), 0, 239, 0, 1]
    assert list(raw[208:223]) == [0] * 14 + [0b00_11_00_00], "third of four codes: negative, upper level"
    assert len(raw) == 224
    assert not any(raw[68:80] + raw[130:144] + raw[204:208] + raw[223:])


def test_byte_table_of_an_fp32_message() -> None:
    message = wire.encode(torch.tensor([1.5, -2.0, 3.0]), torch.tensor([3, 70_000, 70_001]), 70_002, torch.float32, 0)
    raw = bytes(message.tolist())
    assert raw[:4] == b"LSP2"
    assert [int.from_bytes(raw[at : at + 4], "little", signed=True) for at in (4, 8, 12)] == [0, 0, 0]
    assert [int.from_bytes(raw[at : at + 8], "little") for at in (16, 24)] == [70_002, 3]
    assert [int.from_bytes(raw[at : at + 4], "little") for at in (64, 68)] == [1, 2]
    assert [int.from_bytes(raw[at : at + 2], "little") for at in (80, 82, 84)] == [3, 70_000 - 65_536, 70_001 - 65_536]
    assert message[96:108].view(torch.float32).tolist() == [1.5, -2.0, 3.0]
    assert len(raw) == 112
    assert not any(raw[86:96] + raw[108:])


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_finite_values_stay_finite(dtype: torch.dtype) -> None:
    big = torch.finfo(torch.float32).max
    for values in ([7e4, -7e4], [big, -big], [1e-9, -1e-9], [1e-45, 0.0], [65_520.0, 1.0], [32_760.0, 1.0]):
        for value, back in zip(values, round_trip(values, dtype), strict=True):
            assert abs(back) < float("inf")
            assert back == pytest.approx(value, rel=2**-7 if dtype == torch.bfloat16 else 2**-10)


def test_bf16_saturates_only_at_its_largest_value() -> None:
    largest = torch.finfo(torch.bfloat16).max
    assert round_trip([largest, 3.4e38, -3.4e38], torch.bfloat16) == [largest, largest, -largest]


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_non_finite_values_are_canonical(dtype: torch.dtype) -> None:
    back = torch.tensor(round_trip([float("nan"), float("inf"), float("-inf"), 1.0, -0.0], dtype))
    assert same_bits(back, torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0, -0.0]))


@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_indices_survive_encoding(dtype: torch.dtype) -> None:
    numel = 300_001
    for indices in ([0], [numel - 1], [65_535, 65_536], list(range(65_530, 200_000, 3)), list(range(numel))):
        where = torch.tensor(indices)
        message = wire.encode(torch.ones(len(indices)), where, numel, dtype)
        assert message.numel() == message_bytes(numel, len(indices), dtype)
        assert wire.decode(message, numel, len(indices), dtype)[1].equal(where)


def test_two_levels_leave_a_third_of_the_variance() -> None:
    """The best two levels for magnitudes above a threshold leave 35% of the variance."""
    for name, most in (("gaussian", 0.36), ("layered", 0.42)):
        x = inputs(300_001)[name]
        sent = x[reference.topk(x, 3000)[1].long()]
        back = torch.tensor(round_trip(sent.tolist(), wire.TWO_BIT))
        assert bool((back.sign() == sent.sign()).all())
        assert float((back.abs() - sent.abs()).square().mean() / sent.abs().var()) < most, name


def test_two_bits_send_up_to_two_magnitudes_exactly() -> None:
    for values in ([0.1], [-0.1] * 3, [0.1, -0.1, 7.3, 7.3], [0.0, -0.0], [1e-45], [3.4e38, -3.4e38], [0.0, 5.5]):
        assert same_bits(torch.tensor(round_trip(values, wire.TWO_BIT)), torch.tensor(values)), values


def test_two_bit_levels_differ_by_block() -> None:
    values, indices = torch.tensor([1.0, -2.0, 1e-6, 3e-6]), torch.tensor([5, 6, 70_000, 70_001])
    message = wire.encode(values, indices, 140_000, wire.TWO_BIT)
    assert same_bits(wire.decode(message, 140_000, 4, wire.TWO_BIT)[0], values)


def test_non_finite_values_do_not_change_the_levels_of_two_bits() -> None:
    values = [float("nan"), 2.0, float("-inf"), 4.0]
    assert round_trip(values, wire.TWO_BIT) == [2.0, 2.0, 2.0, 4.0]
    assert round_trip(values[:1], wire.TWO_BIT) == [0.0]


def test_count_is_in_the_header() -> None:
    message = wire.encode(torch.ones(1), torch.tensor([0]), 9, torch.float32, torch.tensor(5))
    assert nonfinite_count(message) == 5
    assert not bool(wire.decode(message, 9, 1, torch.float32)[2])
    huge = wire.encode(torch.ones(1), torch.tensor([0]), 9, torch.float32, torch.tensor(2**40))
    assert nonfinite_count(huge) == 2**31 - 1


@pytest.mark.parametrize(("numel", "k", "dtype"), [(10, 0, torch.float32), (10, 11, torch.float32), (9, 1, torch.int8)])
def test_impossible_message_is_refused(numel: int, k: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="numel|value_dtype"):
        message_bytes(numel, k, dtype)


def test_wrong_length_is_refused_with_the_right_length() -> None:
    with pytest.raises(ValueError, match=r"uint8\[112\]"):
        wire.decode(torch.zeros(111, dtype=torch.uint8), 100, 1, torch.float32)
