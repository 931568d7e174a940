"""Interpolation between a node's own weights and the shared weights: every path equals plain torch bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.kernels import accumulate_delta, kernel_report, lerp_into
from tests.kernels.paths import DTYPES, PLAIN, Path, every_path, inputs, same_bits

SIZES = [(1,), (3, 70_001, 1, 64, 5), (4096, 1, 200_003), tuple(range(1, 120))]
SHARES = (1.0, 0.5, 0.3, 0.001)
NEARLY_ONE = 1 - 1e-9  # fp32 rounds it to 1


def pieces_of(flat: Tensor, sizes: Sequence[int], mixed: bool = False) -> list[Tensor]:
    """Return pieces of tensors at any offset, in all dtypes in turn or in fp32."""
    pieces = []
    for turn, values in enumerate(torch.split(flat, list(sizes))):
        dtype = DTYPES[turn % 3] if mixed else torch.float32
        pieces.append(torch.cat([torch.zeros(turn % 3), values]).to(dtype)[turn % 3 :])
    return pieces


def between(own: Tensor, shared: Tensor, ahead: float) -> Tensor:
    return own if ahead == 1.0 else shared + (own - shared) * ahead


def models(numel: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(numel)
    shared = torch.randn(numel, generator=generator)
    return shared + torch.randn(numel, generator=generator) * 1e-3, shared


@every_path
@pytest.mark.parametrize(("sizes", "ahead"), [*zip(SIZES, SHARES, strict=True)])
def test_lerp_into_writes_the_interpolated_weights(path: Path, sizes: tuple[int, ...], ahead: float) -> None:
    own, shared = models(sum(sizes))
    before = own.clone(), shared.clone()
    for mixed in (False, True):
        model = pieces_of(torch.zeros(sum(sizes)), sizes, mixed)
        path.lerp_into(own, shared, model, ahead)
        for piece, want in zip(model, torch.split(between(own, shared, ahead), list(sizes)), strict=True):
            assert same_bits(piece, want.to(piece.dtype))
    assert same_bits(own, before[0])
    assert same_bits(shared, before[1])


@every_path
@pytest.mark.parametrize(("sizes", "ahead"), [*zip(SIZES, SHARES, strict=True)])
def test_accumulate_delta_adds_the_change_of_the_model(path: Path, sizes: tuple[int, ...], ahead: float) -> None:
    for mixed in (False, True):
        own, shared = models(sum(sizes))
        before, model = own.clone(), pieces_of(torch.zeros(sum(sizes)), sizes, mixed)
        path.lerp_into(own, shared, model, ahead)
        path.accumulate_delta(own, shared, model, ahead)
        assert same_bits(own, before), "the model did not change"
        had = [piece.float().clone() for piece in model]
        for turn, piece in enumerate(model):
            piece += 0.25 * (turn + 1)
        path.accumulate_delta(own, shared, model, ahead)
        for piece, was, now, old in zip(
            model, had, torch.split(own, list(sizes)), torch.split(before, list(sizes)), strict=True
        ):
            exact = ahead == 1.0 and piece.dtype == torch.float32
            assert same_bits(now, piece if exact else old + (piece.float() - was))


@every_path
def test_lerp_into_of_special_values_equals_plain_torch(path: Path) -> None:
    numel = 4099
    for name, own in inputs(numel).items():
        for shared in (own.roll(1), torch.zeros(numel)):
            for ahead in (1.0, 0.7):
                got, want = (pieces_of(torch.zeros(numel), (99, 1000, 3000), mixed=True) for _ in range(2))
                path.lerp_into(own, shared, got, ahead)
                PLAIN.lerp_into(own, shared, want, ahead)
                assert all(same_bits(*each) for each in zip(got[1:], want[1:], strict=True)), name  # 16 bits
                assert torch.equal(got[0].nan_to_num(7e37), want[0].nan_to_num(7e37)), name  # any NaN is accepted


@every_path
def test_ahead_is_rounded_to_fp32(path: Path) -> None:
    own, shared = models(4099)
    for mixed in (False, True):
        model = pieces_of(torch.zeros(4099), (99, 1000, 3000), mixed)
        path.lerp_into(own, shared, model, NEARLY_ONE)
        for piece, want in zip(model, torch.split(own, [99, 1000, 3000]), strict=True):
            assert same_bits(piece, want.to(piece.dtype))
    now = [torch.randn(4099)]
    path.accumulate_delta(own, shared, now, NEARLY_ONE)
    assert same_bits(own, now[0])


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    ahead=st.floats(0.001, 1.0),
    scale=st.sampled_from([1e-8, 1e-3, 1.0, 1e6]),
    seed=st.integers(0, 99),
)
def test_repeated_deltas_lose_no_update(sizes: list[int], ahead: float, scale: float, seed: int) -> None:
    """Over several steps `own` differs from the sum of updates by rounding errors only."""
    numel, generator = sum(sizes), torch.Generator().manual_seed(seed)
    shared, own = torch.randn(2, numel, generator=generator)
    exact, model = own.double(), pieces_of(torch.zeros(numel), sizes)
    for _ in range(5):
        lerp_into(own, shared, model, ahead)
        for piece in model:
            update = torch.randn(piece.numel(), generator=generator) * scale
            piece += update
        held = torch.cat(model).double()
        wrote = shared + (own - shared) * ahead if ahead != 1.0 else own
        exact += held - wrote.double()
        accumulate_delta(own, shared, model, ahead)
    assert torch.allclose(own.double(), exact, rtol=5e-7, atol=5 * scale * 2**-23 + 1e-6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.zeros(4), torch.zeros(4), [torch.zeros(3)], 1.0), "pieces of the model 3"),
        ((torch.zeros(4), torch.zeros(5), [torch.zeros(4)], 1.0), "shared_S 5"),
        ((torch.zeros(4), torch.zeros(4), [torch.zeros(4).double()], 1.0), "a piece of the model is torch.float64"),
        ((torch.zeros(4), torch.zeros(4), [torch.zeros(2, 2)], 1.0), "must be flat"),
        ((torch.zeros(4).half(), torch.zeros(4), [torch.zeros(4)], 1.0), "own_S is torch.float16"),
        ((torch.zeros(4), torch.zeros(4), [torch.zeros(4)], 0.0), "ahead=0.0: it must be more than 0, and at most 1"),
        ((torch.zeros(4), torch.zeros(4), [torch.zeros(4)], 1.5), "ahead=1.5"),
    ],
)
def test_model_operators_refuse_invalid_arguments(
    arguments: tuple[Tensor, Tensor, list[Tensor], float], said: str
) -> None:
    for operator in (accumulate_delta, lerp_into):
        with pytest.raises(ValueError, match=said):
            operator(*arguments)


@pytest.mark.skipif(kernel_report().cpu != "compiled", reason="plain torch leaves the check to the functions")
@pytest.mark.parametrize("shared", ["model", "own"])
def test_models_that_share_memory_are_refused(shared: str) -> None:
    own, other = torch.zeros(2, 4)
    model = own if shared == "model" else torch.zeros(4)
    for operator in (accumulate_delta, lerp_into):
        with pytest.raises(RuntimeError, match="an output shares memory with an input"):
            operator(own, own if shared == "own" else other, [model], 1.0)


@pytest.mark.skipif(kernel_report().cpu != "compiled", reason="plain torch leaves the check to the functions")
@pytest.mark.parametrize("ahead", [0.0, -1.0, 1.5, float("nan"), float("inf")])
def test_raw_model_operators_refuse_invalid_ahead(ahead: float) -> None:
    for name in ("accumulate_delta", "lerp_into"):
        with pytest.raises((ValueError, RuntimeError), match="ahead="):
            getattr(torch.ops.lightning_sparse, name)(torch.ones(4), torch.zeros(4), [torch.ones(4)], ahead)
