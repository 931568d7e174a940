"""Interpolation between a node's local weights and the global weights: every path equals plain torch bit for bit."""

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


def between(local: Tensor, global_: Tensor, local_fraction: float) -> Tensor:
    return local if local_fraction == 1.0 else global_ + (local - global_) * local_fraction


def models(numel: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(numel)
    global_ = torch.randn(numel, generator=generator)
    return global_ + torch.randn(numel, generator=generator) * 1e-3, global_


@every_path
@pytest.mark.parametrize(("sizes", "local_fraction"), [*zip(SIZES, SHARES, strict=True)])
def test_lerp_into_writes_the_interpolated_weights(path: Path, sizes: tuple[int, ...], local_fraction: float) -> None:
    local, global_ = models(sum(sizes))
    before = local.clone(), global_.clone()
    for mixed in (False, True):
        model = pieces_of(torch.zeros(sum(sizes)), sizes, mixed)
        path.lerp_into(local, global_, model, local_fraction)
        for piece, want in zip(model, torch.split(between(local, global_, local_fraction), list(sizes)), strict=True):
            assert same_bits(piece, want.to(piece.dtype))
    assert same_bits(local, before[0])
    assert same_bits(global_, before[1])


@every_path
@pytest.mark.parametrize(("sizes", "local_fraction"), [*zip(SIZES, SHARES, strict=True)])
def test_accumulate_delta_adds_the_change_of_the_model(
    path: Path, sizes: tuple[int, ...], local_fraction: float
) -> None:
    for mixed in (False, True):
        local, global_ = models(sum(sizes))
        before, model = local.clone(), pieces_of(torch.zeros(sum(sizes)), sizes, mixed)
        path.lerp_into(local, global_, model, local_fraction)
        path.accumulate_delta(local, global_, model, local_fraction)
        assert same_bits(local, before), "the model did not change"
        had = [piece.float().clone() for piece in model]
        for turn, piece in enumerate(model):
            piece += 0.25 * (turn + 1)
        path.accumulate_delta(local, global_, model, local_fraction)
        for piece, was, now, old in zip(
            model, had, torch.split(local, list(sizes)), torch.split(before, list(sizes)), strict=True
        ):
            exact = local_fraction == 1.0 and piece.dtype == torch.float32
            assert same_bits(now, piece if exact else old + (piece.float() - was))


@every_path
def test_lerp_into_of_special_values_equals_plain_torch(path: Path) -> None:
    numel = 4099
    for name, local in inputs(numel).items():
        for global_ in (local.roll(1), torch.zeros(numel)):
            for local_fraction in (1.0, 0.7):
                got, want = (pieces_of(torch.zeros(numel), (99, 1000, 3000), mixed=True) for _ in range(2))
                path.lerp_into(local, global_, got, local_fraction)
                PLAIN.lerp_into(local, global_, want, local_fraction)
                assert all(same_bits(*each) for each in zip(got[1:], want[1:], strict=True)), name  # 16 bits
                assert torch.equal(got[0].nan_to_num(7e37), want[0].nan_to_num(7e37)), name  # any NaN is accepted


@every_path
def test_local_fraction_is_rounded_to_fp32(path: Path) -> None:
    local, global_ = models(4099)
    for mixed in (False, True):
        model = pieces_of(torch.zeros(4099), (99, 1000, 3000), mixed)
        path.lerp_into(local, global_, model, NEARLY_ONE)
        for piece, want in zip(model, torch.split(local, [99, 1000, 3000]), strict=True):
            assert same_bits(piece, want.to(piece.dtype))
    now = [torch.randn(4099)]
    path.accumulate_delta(local, global_, now, NEARLY_ONE)
    assert same_bits(local, now[0])


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    local_fraction=st.floats(0.001, 1.0),
    scale=st.sampled_from([1e-8, 1e-3, 1.0, 1e6]),
    seed=st.integers(0, 99),
)
def test_repeated_deltas_lose_no_update(sizes: list[int], local_fraction: float, scale: float, seed: int) -> None:
    """Over several steps `local` differs from the sum of updates by rounding errors only."""
    numel, generator = sum(sizes), torch.Generator().manual_seed(seed)
    global_, local = torch.randn(2, numel, generator=generator)
    exact, model = local.double(), pieces_of(torch.zeros(numel), sizes)
    for _ in range(5):
        lerp_into(local, global_, model, local_fraction)
        for piece in model:
            update = torch.randn(piece.numel(), generator=generator) * scale
            piece += update
        held = torch.cat(model).double()
        wrote = global_ + (local - global_) * local_fraction if local_fraction != 1.0 else local
        exact += held - wrote.double()
        accumulate_delta(local, global_, model, local_fraction)
    assert torch.allclose(local.double(), exact, rtol=5e-7, atol=5 * scale * 2**-23 + 1e-6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.zeros(4), torch.zeros(4), [torch.zeros(3)], 1.0), "pieces of the model 3"),
        ((torch.zeros(4), torch.zeros(5), [torch.zeros(4)], 1.0), "global_S 5"),
        ((torch.zeros(4), torch.zeros(4), [torch.zeros(4).double()], 1.0), "a piece of the model is torch.float64"),
        ((torch.zeros(4), torch.zeros(4), [torch.zeros(2, 2)], 1.0), "must be flat"),
        ((torch.zeros(4).half(), torch.zeros(4), [torch.zeros(4)], 1.0), "local_S is torch.float16"),
        (
            (torch.zeros(4), torch.zeros(4), [torch.zeros(4)], 0.0),
            "local_fraction=0.0: it must be more than 0, and at most 1",
        ),
        ((torch.zeros(4), torch.zeros(4), [torch.zeros(4)], 1.5), "local_fraction=1.5"),
    ],
)
def test_model_operators_refuse_invalid_arguments(
    arguments: tuple[Tensor, Tensor, list[Tensor], float], said: str
) -> None:
    for operator in (accumulate_delta, lerp_into):
        with pytest.raises(ValueError, match=said):
            operator(*arguments)


@pytest.mark.skipif(kernel_report().cpu != "compiled", reason="plain torch leaves the check to the functions")
@pytest.mark.parametrize("shared", ["model", "local"])
def test_models_that_share_memory_are_refused(shared: str) -> None:
    local, other = torch.zeros(2, 4)
    model = local if shared == "model" else torch.zeros(4)
    for operator in (accumulate_delta, lerp_into):
        with pytest.raises(RuntimeError, match="an output shares memory with an input"):
            operator(local, local if shared == "local" else other, [model], 1.0)


@pytest.mark.skipif(kernel_report().cpu != "compiled", reason="plain torch leaves the check to the functions")
@pytest.mark.parametrize("local_fraction", [0.0, -1.0, 1.5, float("nan"), float("inf")])
def test_raw_model_operators_refuse_invalid_local_fraction(local_fraction: float) -> None:
    for name in ("accumulate_delta", "lerp_into"):
        with pytest.raises((ValueError, RuntimeError), match="local_fraction="):
            getattr(torch.ops.lightning_sparse, name)(torch.ones(4), torch.zeros(4), [torch.ones(4)], local_fraction)
