"""What arguments of the operators must be: each check raises a ValueError with what was given and the rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.kernels import wire

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_acc(grad: Tensor, residual: Tensor | None, next_residual: Tensor | None, scale: Tensor | None) -> None:
    check_flat("grad_S", grad, FLOATS)
    for name, other in (("residual_S", residual), ("next_residual_S", next_residual)):
        if other is not None:
            check_flat(name, other, (torch.float32,))
            if other.numel() != grad.numel() or other.device != grad.device:
                raise ValueError(
                    f"{name} has {other.numel()} elements on {other.device}, grad_S {grad.numel()} on {grad.device}: "
                    "they must agree"
                )
    if next_residual is not None and any(overlap(next_residual, other) for other in (grad, residual)):
        raise ValueError(
            "next_residual_S shares memory with grad_S or residual_S, which must stay intact until the optimizer has "
            "stepped: pass a separate tensor"
        )
    if scale is not None and (scale.dtype != torch.float32 or scale.dim() != 0 or scale.device != grad.device):
        raise ValueError(
            f"scale is {scale.dtype}{list(scale.shape)} on {scale.device}: it must be a 0-dim float32 tensor on "
            f"{grad.device}"
        )


def check_sum_rows(rows: Tensor, residual: Tensor | None) -> None:
    if rows.dtype != torch.bfloat16 or rows.dim() != 2 or not rows.numel() or not rows.is_contiguous():
        raise ValueError(
            f"rows_MR is {rows.dtype}{list(rows.shape)}: it must be contiguous bfloat16[M >= 1, R >= 1]; pass "
            "rows_MR.contiguous()"
        )
    if residual is None:
        return
    check_flat("residual_R", residual, (torch.float32,))
    if residual.numel() > rows.shape[1] or residual.device != rows.device:
        raise ValueError(
            f"residual_R has {residual.numel()} elements on {residual.device}, rows_MR {list(rows.shape)} on "
            f"{rows.device}: it must be on the same device, and no longer than a row"
        )
    if overlap(rows, residual):
        raise ValueError("residual_R shares memory with rows_MR: pass a separate tensor")


def check_accumulate(messages: Tensor, shard: Tensor, k: int, num_regions: int, value_dtype: torch.dtype) -> None:
    check_flat("shard_S", shard, (torch.float32,))
    check_k(k, shard.numel())
    check_count("num_regions", num_regions, shard.numel())
    nbytes = wire.Regions(shard.numel(), num_regions, k, value_dtype).row_nbytes
    fits = messages.dtype == torch.uint8 and messages.dim() == 2 and messages.shape[0] >= 1
    fits = fits and messages.shape[1] == nbytes and messages.is_contiguous() and messages.device == shard.device
    if not fits or num_regions not in (1, messages.shape[0]):
        rows = "M >= 1" if num_regions == 1 else num_regions
        raise ValueError(
            f"messages_MB is {messages.dtype}{list(messages.shape)} on {messages.device}: numel={shard.numel()}, k={k} "
            f"and {value_dtype} need contiguous uint8[{rows}, {nbytes}] on {shard.device}"
        )
    if not is_traced(messages) and messages.data_ptr() % wire.ALIGN:
        raise ValueError(f"messages_MB must be aligned to {wire.ALIGN} bytes: pass messages_MB.clone()")
    if overlap(messages, shard):
        raise ValueError("shard_S shares memory with messages_MB: pass a separate tensor")


def check_flat(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}: it must be one of {list(dtypes)}")
    if tensor.layout != torch.strided or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() < 1:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}: it must be flat, contiguous and not empty; "
            f"pass {name}.contiguous().view(-1)"
        )


def check_k(k: int, numel: int) -> None:
    if not isinstance(k, (int, torch.SymInt)) or isinstance(k, bool) or not 1 <= k <= numel:
        raise ValueError(f"k={k!r} of {numel} elements: k must be an integer with 1 <= k <= {numel}")


def check_count(name: str, count: int, most: int | None = None) -> None:
    """Check the number of regions or rows, which the shard's elements may limit."""
    if not isinstance(count, (int, torch.SymInt)) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{name}={count!r}: it must be an integer of at least 1")
    if most is not None and count > min(most, wire.MAX_REGIONS):
        raise ValueError(f"{name}={count} of {most} elements: there can be {min(most, wire.MAX_REGIONS)} at most")


def overlap(a: Tensor, b: Tensor | None) -> bool:
    if b is None or a is b:
        return b is not None
    if is_traced(a) or is_traced(b):
        return False
    (first, first_end), (second, second_end) = _memory(a), _memory(b)
    return first < second_end and second < first_end


def _memory(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()


def _any_overlap(own: Tensor, shared: Tensor, model: Sequence[Tensor]) -> bool:
    """A model has hundreds of pieces, which are checked in every step: so in few calls for each."""
    (own_begin, own_end), (shared_begin, shared_end) = _memory(own), _memory(shared)
    if own_begin < shared_end and shared_begin < own_end:
        return True
    spans = map(_memory, model)
    return any(
        (begin < own_end and own_begin < end) or (begin < shared_end and shared_begin < end) for begin, end in spans
    )


def is_traced(tensor: Tensor) -> bool:
    """Whether the tensor has no storage to inspect; compiled implementations check again at run time."""
    return torch.compiler.is_compiling() or tensor.is_meta or type(tensor) not in (Tensor, torch.nn.Parameter)


def check_models(own: Tensor, shared: Tensor, model: Sequence[Tensor], ahead: float) -> None:
    check_flat("own_S", own, (torch.float32,))
    check_flat("shared_S", shared, (torch.float32,))
    for piece in model:
        check_flat("a piece of the model", piece, FLOATS)
    numels = [shared.numel(), sum(piece.numel() for piece in model)]
    devices = {each.device for each in (shared, *model)}
    if numels != [own.numel()] * 2 or devices != {own.device}:
        raise ValueError(
            f"own_S has {own.numel()} elements on {own.device}, shared_S {numels[0]} and the pieces of the model "
            f"{numels[1]}, on {sorted(map(str, devices))}: they must agree"
        )
    if not is_traced(own) and _any_overlap(own, shared, model):
        raise ValueError("own_S, shared_S and the pieces of the model share memory: pass separate tensors")
    if not 0.0 < ahead <= 1.0:
        raise ValueError(f"ahead={ahead}: it must be more than 0, and at most 1")
