"""The operators in plain torch, for devices without compiled kernels, with bit-identical results.

They do not synchronize with the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_sparse.kernels import reference, wire

CACHED = 1 << 15  # elements of the few tensors that stay in the cache of a CPU core


def mstopk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return reference.gather(x, select(reference.magnitude_bits(x), k))


def select(bits: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest, ascending; ties go to the lowest index."""
    kth = kth_largest(bits, k, use_topk=bits.is_cuda)
    above, equal = bits > kth, bits == kth
    keep = above | (equal & (equal.cumsum(0) <= k - above.sum()))
    return torch.nonzero_static(keep, size=k).flatten()


def kth_largest(bits: Tensor, k: int, use_topk: bool) -> Tensor:
    if use_topk:  # kthvalue is extremely slow on CUDA (pytorch issue 75599)
        return bits.topk(k, sorted=False).values.min()
    return bits.kthvalue(bits.numel() - k + 1).values


def compress(
    grad_S: Tensor,
    residual_S: Tensor | None,
    next_residual_S: Tensor | None,
    k: int,
    num_regions: int,
    value_code: int,
    scale: Tensor | None,
) -> Tensor:
    _refuse_shared_memory([next_residual_S], [grad_S, residual_S])
    value_dtype = wire.VALUE_DTYPES[value_code]
    regions = wire.Regions(grad_S.numel(), num_regions, k, value_dtype)
    acc_S = grad_S.float()
    if scale is not None:
        acc_S = acc_S * scale
    if residual_S is not None:
        acc_S = residual_S + acc_S
    rows_MB = grad_S.new_zeros(num_regions, regions.row_nbytes, dtype=torch.uint8)
    for region in range(num_regions):
        place, num_pairs = regions.place(region), regions.pairs(region)
        acc_R = acc_S[place]
        bits_R = reference.magnitude_bits(acc_R)
        nonfinite_R = reference.is_nonfinite(bits_R)
        indices_K = select(bits_R, num_pairs)
        values_K = acc_R[indices_K]
        message = wire.encode(values_K, indices_K, acc_R.numel(), value_dtype, nonfinite_R.sum())
        rows_MB[region, : message.numel()] = message
        if next_residual_S is not None:
            unsent_K = values_K - wire.decode(message, acc_R.numel(), num_pairs, value_dtype)[0]
            next_residual_R = next_residual_S[place]
            next_residual_R.copy_(acc_R.masked_fill(nonfinite_R, 0.0))
            next_residual_R[indices_K] = unsent_K.masked_fill(nonfinite_R[indices_K], 0.0)
    return rows_MB


def accumulate(messages_MB: Tensor, shard_S: Tensor, k: int, num_regions: int, value_code: int) -> None:
    _refuse_shared_memory([shard_S], [messages_MB])
    regions = wire.Regions(shard_S.numel(), num_regions, k, wire.VALUE_DTYPES[value_code])
    shard_S.zero_()
    # one region: the messages of all nodes. Several: one message each.
    for region, rows_MB in enumerate(messages_MB.view(num_regions, -1, messages_MB.shape[1])):
        shard_R = shard_S[regions.place(region)]
        add_messages(rows_MB[:, : regions.nbytes(region)], shard_R, regions.pairs(region), value_code, 1.0)


def add_messages(messages_MB: Tensor, shard_S: Tensor, k: int, value_code: int, alpha: float) -> None:
    _refuse_shared_memory([shard_S], [messages_MB])
    all_valid = torch.ones((), dtype=torch.bool, device=shard_S.device)
    for message in messages_MB:
        values_K, indices_K, valid = wire.decode(message, shard_S.numel(), k, wire.VALUE_DTYPES[value_code])
        shard_S[indices_K] = shard_S[indices_K] + values_K * alpha  # indices are distinct within a message
        all_valid = all_valid & valid
    shard_S.masked_fill_(~all_valid, torch.nan)


def round_rows(
    grad_S: Tensor,
    residual_S: Tensor | None,
    next_residual_S: Tensor | None,
    num_rows: int,
    scale: Tensor | None,
) -> Tensor:
    _refuse_shared_memory([next_residual_S], [grad_S, residual_S])
    acc_S = torch.empty_like(grad_S, dtype=torch.float32) if next_residual_S is None else next_residual_S
    if scale is None:
        acc_S.copy_(grad_S)
    else:
        torch.mul(grad_S.float(), scale, out=acc_S)
    if residual_S is not None:
        acc_S += residual_S
    rows_MR = grad_S.new_empty(num_rows, -(-grad_S.numel() // num_rows), dtype=torch.bfloat16)
    rounded, padding = rows_MR.view(-1).tensor_split([grad_S.numel()])
    _round_into(rounded, acc_S, keep_error=next_residual_S is not None)
    padding.zero_()
    return rows_MR


def sum_rows(rows_MR: Tensor, residual_R: Tensor | None) -> Tensor:
    _refuse_shared_memory([residual_R], [rows_MR])
    first, *others = rows_MR.unbind()
    sum_R = first.float()
    for row_R in others:
        sum_R += row_R
    row_R = torch.empty_like(first)
    _round_into(row_R, sum_R, keep_error=residual_R is not None)
    if residual_R is not None:
        residual_R += sum_R[: residual_R.numel()]
    return row_R


def accumulate_delta(local_S: Tensor, global_S: Tensor, model: Sequence[Tensor], local_fraction: float) -> None:
    _refuse_shared_memory([local_S], [global_S, *model])
    # kernels take a float, so a number that rounds to 1 counts as 1
    local_fraction = ctypes.c_float(local_fraction).value
    for local, global_, piece in _blocks(local_S, global_S, model):
        if local_fraction == 1.0 and piece.dtype == torch.float32:
            local.copy_(piece)  # lerp_into wrote `local` itself
            continue
        before = _lerp(local, global_, local_fraction)
        if piece.dtype != torch.float32:
            before = _cast(before, piece.dtype).float()
        local += torch.sub(piece, before, out=before) if piece.dtype == torch.float32 else piece - before


def lerp_into(local_S: Tensor, global_S: Tensor, model: Sequence[Tensor], local_fraction: float) -> None:
    _refuse_shared_memory(model, [local_S, global_S])
    local_fraction = ctypes.c_float(local_fraction).value
    for local, global_, piece in _blocks(local_S, global_S, model):
        piece.copy_(_cast(local if local_fraction == 1.0 else _lerp(local, global_, local_fraction), piece.dtype))


def _blocks(local_S: Tensor, global_S: Tensor, model: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    sizes = [piece.numel() for piece in model]
    for tensors in zip(torch.split(local_S, sizes), torch.split(global_S, sizes), model, strict=True):
        if local_S.is_cuda:
            yield tensors
        else:
            # on a CPU in blocks that fit into its cache
            yield from zip(*(torch.split(tensor, CACHED) for tensor in tensors), strict=True)


def _lerp(local: Tensor, global_: Tensor, local_fraction: float) -> Tensor:
    return local.clone() if local_fraction == 1.0 else (local - global_).mul_(local_fraction).add_(global_)


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        return values
    return values.to(dtype).nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf)  # NaN of one bit pattern


def _round_into(rounded: Tensor, exact: Tensor, keep_error: bool) -> None:
    rounded.copy_(exact)
    rounded.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf)  # NaN of one bit pattern
    if keep_error:
        # now the rounding error, or 0 where the result is not finite
        exact -= rounded
        exact.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _refuse_shared_memory(outputs: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> None:
    spans = [_span(tensor) for tensor in inputs if tensor is not None]
    for begin, end in (_span(tensor) for tensor in outputs if tensor is not None):
        if any(begin < other_end and other_begin < end for other_begin, other_end in spans):
            raise RuntimeError("an output shares memory with an input: pass a separate tensor")


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
