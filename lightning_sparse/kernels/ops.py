"""The operators `torch.ops.lightning_sparse.*`.

The dispatcher runs the compiled CPU or CUDA kernel, or plain torch, with bit-identical results.
LIGHTNING_SPARSE_KERNELS=torch disables the compiled library.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.kernels import plain, reference, wire

BUILD_REPORT = Path(__file__).with_name("build_report.txt")
BUILT = ("CPU and CUDA kernels built", "CPU kernels built")
"""The report of a build that compiled kernels begins with one of these."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def mstopk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return values and ascending indices of the k largest |x| of a flat tensor.

    Ties go to the lowest index; NaN > Inf > finite. Indices are int32 if x has fewer than 2^31 elements, otherwise
    int64.

    >>> mstopk(torch.tensor([1.0, -5.0, 2.0, 5.0]), 2)
    (tensor([-5.,  5.]), tensor([1, 3], dtype=torch.int32))
    """
    _check_flat("x", x, FLOATS)
    _check_k(k, x.numel())
    values, indices = torch.ops.lightning_sparse.mstopk(x.detach(), k)
    return values, indices


def compress(
    grad_S: Tensor,
    residual_S: Tensor | None,
    next_residual_S: Tensor | None,
    k: int,
    value_dtype: torch.dtype,
    scale: Tensor | None = None,
) -> Tensor:
    """Pack the k largest |acc|, where acc = residual + grad * scale, into a message.

    next_residual_S receives acc minus the decoded message, and 0 where acc is not finite. Non-finite elements are
    selected first and counted in the message. residual_S defaults to 0, scale to 1.
    """
    return compress_regions(grad_S, residual_S, next_residual_S, k, 1, value_dtype, scale)[0]


def compress_regions(
    grad_S: Tensor,
    residual_S: Tensor | None,
    next_residual_S: Tensor | None,
    k: int,
    num_regions: int,
    value_dtype: torch.dtype,
    scale: Tensor | None = None,
) -> Tensor:
    """Pack the k largest |acc| of each region of the shard into one message per region, uint8[num_regions, B].

    >>> rows = compress_regions(torch.tensor([1.0, -5.0, 2.0, 5.0, 0.5]), None, None, 1, 2, torch.float32)
    >>> shard = torch.empty(5)
    >>> accumulate_regions(rows, shard, 1, torch.float32)
    >>> shard
    tensor([ 0., -5.,  0.,  5.,  0.])
    """
    code = wire.value_code(value_dtype)
    _check_acc(grad_S, residual_S, next_residual_S, scale)
    _check_k(k, grad_S.numel())
    _check_count("num_regions", num_regions, grad_S.numel())
    messages: Tensor = torch.ops.lightning_sparse.compress(
        grad_S.detach(), residual_S, next_residual_S, k, num_regions, code, scale
    )
    return messages


def accumulate(
    messages_MB: Tensor, shard_S: Tensor, k: int, value_dtype: torch.dtype, alpha: float | None = None
) -> None:
    """Overwrite shard_S with the sum of the messages, added in row order.

    With alpha, add alpha times the values to shard_S instead, which touches only the sent entries. If a message counts
    non-finite elements or is malformed, the whole shard becomes NaN.
    """
    code = wire.value_code(value_dtype)
    _check_accumulate(messages_MB, shard_S, k, 1, value_dtype)
    # NaN, because raising an error would need a device synchronization
    if alpha is None:
        torch.ops.lightning_sparse.accumulate(messages_MB, shard_S, k, 1, code)
    else:
        torch.ops.lightning_sparse.add_messages(messages_MB, shard_S, k, code, alpha)


def accumulate_regions(messages_MB: Tensor, shard_S: Tensor, k: int, value_dtype: torch.dtype) -> None:
    """Overwrite each of M regions of shard_S with its message from `compress_regions`; an invalid message gives NaN."""
    code = wire.value_code(value_dtype)
    num_regions = messages_MB.shape[0] if messages_MB.dim() == 2 else 1
    _check_accumulate(messages_MB, shard_S, k, num_regions, value_dtype)
    torch.ops.lightning_sparse.accumulate(messages_MB, shard_S, k, num_regions, code)


def round_rows(
    grad_S: Tensor,
    residual_S: Tensor | None,
    next_residual_S: Tensor | None,
    num_rows: int,
    scale: Tensor | None = None,
) -> Tensor:
    """Return acc = residual + grad * scale as bfloat16[M, R]: M = num_rows, R = ceil(S / M), padded with zeros.

    next_residual_S receives the rounding error, and 0 where the rounded value is not finite.

    >>> left = torch.empty(3)
    >>> round_rows(torch.tensor([1.0, 256.5, -3.0]), None, left, 2)
    tensor([[  1., 256.],
            [ -3.,   0.]], dtype=torch.bfloat16)
    >>> left
    tensor([0.0000, 0.5000, 0.0000])
    """
    _check_acc(grad_S, residual_S, next_residual_S, scale)
    _check_count("num_rows", num_rows)
    rows: Tensor = torch.ops.lightning_sparse.round_rows(grad_S.detach(), residual_S, next_residual_S, num_rows, scale)
    return rows


def sum_rows(rows_MR: Tensor, residual_R: Tensor | None) -> Tensor:
    """Return the sum of bfloat16 rows, made in fp32 and in row order, as bfloat16[R].

    Add the rounding error, or 0 for non-finite sums, to residual_R, which may be shorter than a row.
    """
    _check_sum_rows(rows_MR, residual_R)
    row: Tensor = torch.ops.lightning_sparse.sum_rows(rows_MR, residual_R)
    return row


def lerp_into(local_S: Tensor, global_S: Tensor, model: Sequence[Tensor], local_fraction: float) -> None:
    """Write the interpolation global_S + (local_S - global_S) * local_fraction into a model, rounded to its dtypes.

    The model consists of flat pieces, in the order of local_S.
    """
    _check_models(local_S, global_S, model, local_fraction)
    torch.ops.lightning_sparse.lerp_into(local_S, global_S, model, local_fraction)


def accumulate_delta(local_S: Tensor, global_S: Tensor, model: Sequence[Tensor], local_fraction: float) -> None:
    """Add to local_S the change of the model since `lerp_into` wrote it with the same arguments.

    >>> local_S, global_S, model = torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([1.5])
    >>> accumulate_delta(local_S, global_S, [model], 0.5)  # it held 1
    >>> local_S
    tensor([2.5000])
    """
    _check_models(local_S, global_S, model, local_fraction)
    torch.ops.lightning_sparse.accumulate_delta(local_S, global_S, model, local_fraction)


# deprecated names, until version 0.3
write_between, add_change = lerp_into, accumulate_delta


@dataclass(frozen=True)
class KernelReport:
    """The implementation per device type ("compiled" or "plain torch"), reasons for plain torch, and a fix."""

    cpu: str
    cuda: str
    reasons: tuple[str, ...]
    fix: str = ""


def kernel_report() -> KernelReport:
    return _report


# -------------------------------------------------------------------------------------------------------------- checks
#
# Dtypes, shapes and numbers are checked here, with errors for users. Memory (outputs that overlap inputs, alignment) is
# checked only by the compiled operators.


def _check_acc(grad: Tensor, residual: Tensor | None, next_residual: Tensor | None, scale: Tensor | None) -> None:
    _check_flat("grad_S", grad, FLOATS)
    for name, other in (("residual_S", residual), ("next_residual_S", next_residual)):
        if other is not None:
            _check_flat(name, other, (torch.float32,))
            if other.numel() != grad.numel() or other.device != grad.device:
                raise ValueError(
                    f"{name} has {other.numel()} elements on {other.device}, grad_S {grad.numel()} on {grad.device}: "
                    "they must agree"
                )
    if scale is not None and (scale.dtype != torch.float32 or scale.dim() != 0 or scale.device != grad.device):
        raise ValueError(
            f"scale is {scale.dtype}{list(scale.shape)} on {scale.device}: it must be a 0-dim float32 tensor on "
            f"{grad.device}"
        )


def _check_sum_rows(rows: Tensor, residual: Tensor | None) -> None:
    if rows.dtype != torch.bfloat16 or rows.dim() != 2 or not rows.numel() or not rows.is_contiguous():
        raise ValueError(
            f"rows_MR is {rows.dtype}{list(rows.shape)}: it must be contiguous bfloat16[M >= 1, R >= 1]; pass "
            "rows_MR.contiguous()"
        )
    if residual is None:
        return
    _check_flat("residual_R", residual, (torch.float32,))
    if residual.numel() > rows.shape[1] or residual.device != rows.device:
        raise ValueError(
            f"residual_R has {residual.numel()} elements on {residual.device}, rows_MR {list(rows.shape)} on "
            f"{rows.device}: it must be on the same device, and no longer than a row"
        )


def _check_accumulate(messages: Tensor, shard: Tensor, k: int, num_regions: int, value_dtype: torch.dtype) -> None:
    _check_flat("shard_S", shard, (torch.float32,))
    _check_k(k, shard.numel())
    _check_count("num_regions", num_regions, shard.numel())
    nbytes = wire.Regions(shard.numel(), num_regions, k, value_dtype).row_nbytes
    fits = messages.dtype == torch.uint8 and messages.dim() == 2 and messages.shape[0] >= 1
    fits = fits and messages.shape[1] == nbytes and messages.is_contiguous() and messages.device == shard.device
    if not fits or num_regions not in (1, messages.shape[0]):
        rows = "M >= 1" if num_regions == 1 else num_regions
        raise ValueError(
            f"messages_MB is {messages.dtype}{list(messages.shape)} on {messages.device}: numel={shard.numel()}, k={k} "
            f"and {value_dtype} need contiguous uint8[{rows}, {nbytes}] on {shard.device}"
        )


def _check_models(local_S: Tensor, global_S: Tensor, model: Sequence[Tensor], local_fraction: float) -> None:
    _check_flat("local_S", local_S, (torch.float32,))
    _check_flat("global_S", global_S, (torch.float32,))
    for piece in model:
        _check_flat("a piece of the model", piece, FLOATS)
    numels = [global_S.numel(), sum(piece.numel() for piece in model)]
    devices = {tensor.device for tensor in (global_S, *model)}
    if numels != [local_S.numel()] * 2 or devices != {local_S.device}:
        raise ValueError(
            f"local_S has {local_S.numel()} elements on {local_S.device}, global_S {numels[0]} and the pieces of the "
            f"model {numels[1]}, on {sorted(map(str, devices))}: they must agree"
        )
    if not 0.0 < local_fraction <= 1.0:
        raise ValueError(f"local_fraction={local_fraction}: it must be more than 0, and at most 1")


def _check_flat(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}: it must be one of {list(dtypes)}")
    if tensor.layout != torch.strided or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() < 1:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}: it must be flat, contiguous and not empty; "
            f"pass {name}.contiguous().view(-1)"
        )


def _check_k(k: int, numel: int) -> None:
    if not isinstance(k, (int, torch.SymInt)) or isinstance(k, bool) or not 1 <= k <= numel:
        raise ValueError(f"k={k!r} of {numel} elements: k must be an integer with 1 <= k <= {numel}")


def _check_count(name: str, count: int, most: int | None = None) -> None:
    if not isinstance(count, (int, torch.SymInt)) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{name}={count!r}: it must be an integer of at least 1")
    if most is not None and count > min(most, wire.MAX_REGIONS):
        raise ValueError(f"{name}={count} of {most} elements: there can be {min(most, wire.MAX_REGIONS)} at most")


# -------------------------------------------------------------------------------------------------------- registration

# Keep a reference: garbage collection of a Library removes its schemas.
_library: Any = torch.library.Library("lightning_sparse", "FRAGMENT")  # type: ignore[no-untyped-call]


def _register(schema: str, fake: Callable[..., Any] = lambda *_: None) -> None:
    # plain torch runs on all devices until the compiled library overrides it; `fake` returns an empty result, for
    # tracing
    name = schema.partition("(")[0]
    _library.define(schema)
    # Selection is not differentiable; without no_grad, autograd would record the plain-torch operations.
    _library.impl(name, torch.no_grad()(getattr(plain, name)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lightning_sparse::{name}", fake, lib=_library)


def _fake_compress(grad: Tensor, _: Any, __: Any, k: int, num_regions: int, code: int, ___: Any) -> Tensor:
    regions = wire.Regions(grad.numel(), num_regions, k, wire.VALUE_DTYPES[code])
    return grad.new_empty(num_regions, regions.row_nbytes, dtype=torch.uint8)


_register(
    "mstopk(Tensor x, int k) -> (Tensor, Tensor)",
    lambda x, k: (x.new_empty(k), x.new_empty(k, dtype=reference.index_dtype(x.numel()))),
)
_register(
    "compress(Tensor grad, Tensor? residual, Tensor(a!)? next_residual, int k, int num_regions, int value_code, "
    "Tensor? scale) -> Tensor",
    _fake_compress,
)
_register("accumulate(Tensor messages, Tensor(a!) shard, int k, int num_regions, int value_code) -> ()")
_register("add_messages(Tensor messages, Tensor(a!) shard, int k, int value_code, float alpha) -> ()")
_register(
    "round_rows(Tensor grad, Tensor? residual, Tensor(a!)? next_residual, int num_rows, Tensor? scale) -> Tensor",
    lambda grad, _, __, num_rows, ___: grad.new_empty(num_rows, -(-grad.numel() // num_rows), dtype=torch.bfloat16),
)
_register(
    "sum_rows(Tensor rows, Tensor(a!)? residual) -> Tensor",
    lambda rows, _: rows.new_empty(rows.shape[1]),
)
_register(
    "accumulate_delta(Tensor(a!) local_weights, Tensor global_weights, Tensor[] model, float local_fraction) -> ()"
)
_register("lerp_into(Tensor local_weights, Tensor global_weights, Tensor(a!)[] model, float local_fraction) -> ()")

COMPILE = (
    "install torch, 'setuptools>=77' and ninja, then run `pip install --no-build-isolation '.[pytorch-lightning]'` in "
    "the checkout. Give --no-build-isolation at each later installation, too: without it pip builds without "
    "torch, and plain torch replaces the compiled kernels"
)
TOOLKIT = f"install the CUDA toolkit (nvcc) for torch's CUDA version; put nvcc on PATH or set CUDA_HOME; {COMPILE}"


def _load() -> tuple[KernelReport, ctypes.CDLL | None]:
    def plain_report(reason: str, fix: str) -> KernelReport:
        return KernelReport("plain torch", "plain torch", (reason,), fix)

    if os.environ.get("LIGHTNING_SPARSE_KERNELS", "") == "torch":
        reason, fix = "LIGHTNING_SPARSE_KERNELS=torch is set", "unset LIGHTNING_SPARSE_KERNELS to use compiled kernels"
        return plain_report(reason, fix), None
    build = BUILD_REPORT.read_text().strip() if BUILD_REPORT.exists() else "no build step ran"
    folder = Path(__file__).parent
    path = min(folder.glob("_C*.so"), default=None)
    if path is None and build.startswith(BUILT):  # a build that is not in place leaves its report in this folder, too
        reason = (
            f"{folder} has no compiled library, though one was built: Python imports this source folder, not the "
            f"installed package"
        )
        fix = (
            "start the script outside the checkout, or install the checkout in place: `pip install "
            "--no-build-isolation -e .`"
        )
        return plain_report(reason, fix), None
    if path is None:
        return plain_report(f"nothing was compiled: {build}", COMPILE), None
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        handle = ctypes.CDLL(str(path))
        has_cuda = bool(handle.lightning_sparse_has_cuda())
    except (OSError, AttributeError) as error:
        reason = f"{path.name} does not load under torch {torch.__version__}: {error}"
        return plain_report(reason, COMPILE), None
    if has_cuda:
        return KernelReport("compiled", "compiled", ()), handle
    reason = f"CUDA kernels were not compiled: {build}"
    return KernelReport("compiled", "plain torch", (reason,), TOOLKIT), handle


_report, _handle = _load()
