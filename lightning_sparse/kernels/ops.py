"""The operators `torch.ops.lightning_sparse.{mstopk, compress, accumulate, add_messages, round_rows, sum_rows}`.

    Python call -> checks (ValueError) -> dispatcher -> compiled CPU or CUDA kernel
                                                     -> plain torch, where there is none

This file defines the schemas and registers plain-torch implementations for all devices. The compiled library overrides
them for CPU and CUDA, with bit-identical results. `kernel_report()` returns which implementations are in use, and why.

LIGHTNING_SPARSE_KERNELS=torch disables the compiled library.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.kernels import plain, reference, wire

NAMESPACE = "lightning_sparse"
BUILD_REPORT = Path(__file__).with_name("build_report.txt")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Keep a reference: garbage collection of a Library removes its schemas.
_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("mstopk(Tensor x, int k) -> (Tensor, Tensor)")
_library.define(
    "compress(Tensor grad, Tensor? residual, Tensor(a!)? next_residual, int k, int value_code, Tensor? scale) -> Tensor"
)
_library.define("accumulate(Tensor messages, Tensor(a!) shard, int k, int value_code) -> ()")
_library.define("add_messages(Tensor messages, Tensor(a!) shard, int k, int value_code, float alpha) -> ()")
_library.define(
    "round_rows(Tensor grad, Tensor? residual, Tensor(a!)? next_residual, int num_rows, Tensor? scale) -> Tensor"
)
_library.define("sum_rows(Tensor rows, Tensor(a!)? residual) -> Tensor")


def mstopk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return values and ascending indices of the k largest |x| of a flat tensor.

    Ties go to the lowest index. NaN ranks above Inf, and Inf above every finite value. Indices are int32 if x has fewer
    than 2^31 elements, otherwise int64.

    >>> mstopk(torch.tensor([1.0, -5.0, 2.0, 5.0]), 2)
    (tensor([-5.,  5.]), tensor([1, 3], dtype=torch.int32))
    """
    _check_mstopk(x, k)
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
    selected first and counted in the message. residual_S defaults to 0, scale to 1; without next_residual_S, no
    residual is written.
    """
    code = _value_code(value_dtype)
    _check_compress(grad_S, residual_S, next_residual_S, k, code, scale)
    message: Tensor = torch.ops.lightning_sparse.compress(grad_S.detach(), residual_S, next_residual_S, k, code, scale)
    return message


def accumulate(
    messages_MB: Tensor, shard_S: Tensor, k: int, value_dtype: torch.dtype, alpha: float | None = None
) -> None:
    """Overwrite shard_S with the sum of the messages, added in row order; with alpha, add alpha times each value of
    them to it, which touches the sent entries alone.

    If a message counts non-finite elements or is malformed, the whole shard becomes NaN: raising an error would need a
    device synchronisation.
    """
    code = _value_code(value_dtype)
    _check_accumulate(messages_MB, shard_S, k, code)
    if alpha is None:
        torch.ops.lightning_sparse.accumulate(messages_MB, shard_S, k, code)
    else:
        torch.ops.lightning_sparse.add_messages(messages_MB, shard_S, k, code, alpha)


def round_rows(
    grad_S: Tensor,
    residual_S: Tensor | None,
    next_residual_S: Tensor | None,
    num_rows: int,
    scale: Tensor | None = None,
) -> Tensor:
    """Return acc = residual + grad * scale as bfloat16[M, R]: M = num_rows, R = ceil(S / M), padded with zeros.

    next_residual_S receives what rounding took off, and 0 where the rounded value is not finite: acc was not, or lies
    beyond the largest bfloat16. residual_S defaults to 0, scale to 1; without next_residual_S, no residual is written.

    >>> left = torch.empty(3)
    >>> round_rows(torch.tensor([1.0, 256.5, -3.0]), None, left, 2)
    tensor([[  1., 256.],
            [ -3.,   0.]], dtype=torch.bfloat16)
    >>> left
    tensor([0.0000, 0.5000, 0.0000])
    """
    _check_round_rows(grad_S, residual_S, next_residual_S, num_rows, scale)
    rows: Tensor = torch.ops.lightning_sparse.round_rows(grad_S.detach(), residual_S, next_residual_S, num_rows, scale)
    return rows


def sum_rows(rows_MR: Tensor, residual_R: Tensor | None) -> Tensor:
    """Return the sum of bfloat16 rows, made in fp32 and in row order, as bfloat16[R].

    What rounding took off, or 0 where the sum is not finite, is added to residual_R, which may be shorter than a row:
    the others are padding.
    """
    _check_sum_rows(rows_MR, residual_R)
    row: Tensor = torch.ops.lightning_sparse.sum_rows(rows_MR, residual_R)
    return row


@dataclass(frozen=True)
class KernelReport:
    """The implementation per device type, "compiled" or "plain torch", and the reasons for the latter."""

    cpu: str
    cuda: str
    library: str | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"kernels: CPU {self.cpu}, CUDA {self.cuda} ({self.library or 'no library'})", *self.reasons])


def kernel_report() -> KernelReport:
    """Return which kernel implementations this process uses."""
    return _report


# ----------------------------------------------------------------------------------------------------------- checks


def _check_mstopk(x: Tensor, k: int) -> None:
    _check_flat("x", x, _FLOATS)
    _check_k(k, x.numel())


def _check_compress(
    grad: Tensor, residual: Tensor | None, next_residual: Tensor | None, k: int, code: int, scale: Tensor | None
) -> None:
    _dtype_of(code)
    _check_acc(grad, residual, next_residual, scale)
    _check_k(k, grad.numel())


def _check_acc(grad: Tensor, residual: Tensor | None, next_residual: Tensor | None, scale: Tensor | None) -> None:
    _check_flat("grad_S", grad, _FLOATS)
    for name, other in (("residual_S", residual), ("next_residual_S", next_residual)):
        if other is not None:
            _check_flat(name, other, (torch.float32,))
            if other.numel() != grad.numel() or other.device != grad.device:
                raise ValueError(
                    f"{name} has {other.numel()} elements on {other.device}, grad_S {grad.numel()} on {grad.device}: "
                    "they must agree"
                )
    if next_residual is not None and any(_overlap(next_residual, other) for other in (grad, residual)):
        raise ValueError(
            "next_residual_S shares memory with grad_S or residual_S, which must stay intact until the optimizer has "
            "stepped: pass a separate tensor"
        )
    if scale is not None and (scale.dtype != torch.float32 or scale.dim() != 0 or scale.device != grad.device):
        raise ValueError(
            f"scale is {scale.dtype}{list(scale.shape)} on {scale.device}: it must be a 0-dim float32 tensor on "
            f"{grad.device}"
        )


def _check_round_rows(
    grad: Tensor, residual: Tensor | None, next_residual: Tensor | None, num_rows: int, scale: Tensor | None
) -> None:
    _check_acc(grad, residual, next_residual, scale)
    if not isinstance(num_rows, (int, torch.SymInt)) or isinstance(num_rows, bool) or num_rows < 1:
        raise ValueError(f"num_rows={num_rows!r}: it must be an integer of at least 1")


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
    if _overlap(rows, residual):
        raise ValueError("residual_R shares memory with rows_MR: pass a separate tensor")


def _check_accumulate(messages: Tensor, shard: Tensor, k: int, code: int, _: float | None = None) -> None:
    _check_flat("shard_S", shard, (torch.float32,))
    _check_k(k, shard.numel())
    nbytes = wire.message_bytes(shard.numel(), k, _dtype_of(code))
    fits = messages.dtype == torch.uint8 and messages.dim() == 2 and messages.shape[0] >= 1
    fits = fits and messages.shape[1] == nbytes and messages.is_contiguous() and messages.device == shard.device
    if not fits:
        raise ValueError(
            f"messages_MB is {messages.dtype}{list(messages.shape)} on {messages.device}: numel={shard.numel()}, k={k} "
            f"and {_dtype_of(code)} need contiguous uint8[M >= 1, {nbytes}] on {shard.device}"
        )
    if not _is_traced(messages) and messages.data_ptr() % wire.ALIGN:
        raise ValueError(f"messages_MB must be aligned to {wire.ALIGN} bytes: pass messages_MB.clone()")
    if _overlap(messages, shard):
        raise ValueError("shard_S shares memory with messages_MB: pass a separate tensor")


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


def _value_code(value_dtype: torch.dtype) -> int:
    code = wire.VALUE_CODES.get(value_dtype)
    if code is None:
        raise ValueError(f"value_dtype={value_dtype} must be one of {list(wire.VALUE_DTYPES)}")
    return code


def _dtype_of(code: int) -> torch.dtype:
    if not 0 <= code < len(wire.VALUE_DTYPES):
        raise ValueError(f"value_code={code}: 0 is fp32, 1 bf16, 2 fp16")
    return wire.VALUE_DTYPES[code]


def _overlap(a: Tensor, b: Tensor | None) -> bool:
    if b is None or a is b:
        return b is not None
    if _is_traced(a) or _is_traced(b):
        return False
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + b.numel() * b.element_size() and second < first + a.numel() * a.element_size()


def _is_traced(tensor: Tensor) -> bool:
    """Whether the tensor has no storage to inspect; the implementations check again at run time."""
    return torch.compiler.is_compiling() or tensor.is_meta or type(tensor) not in (Tensor, torch.nn.Parameter)


# --------------------------------------------------------------------------------- implementations


def _fake_mstopk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(k), x.new_empty(k, dtype=reference.index_dtype(x.numel()))


def _plain_compress(
    grad: Tensor, residual: Tensor | None, next_residual: Tensor | None, k: int, code: int, scale: Tensor | None
) -> Tensor:
    return plain.compress(grad, residual, next_residual, k, _dtype_of(code), scale)


def _fake_compress(grad: Tensor, _: Any, __: Any, k: int, code: int, ___: Any) -> Tensor:
    return grad.new_empty(wire.message_bytes(grad.numel(), k, _dtype_of(code)), dtype=torch.uint8)


def _plain_accumulate(messages: Tensor, shard: Tensor, k: int, code: int, alpha: float | None = None) -> None:
    plain.accumulate(messages, shard, k, _dtype_of(code), alpha)


def _fake_round_rows(grad: Tensor, _: Any, __: Any, num_rows: int, ___: Any) -> Tensor:
    return grad.new_empty(num_rows, -(-grad.numel() // num_rows), dtype=torch.bfloat16)


def _register(name: str, check: Callable[..., None], compute: Callable[..., Any], fake: Callable[..., Any]) -> None:
    def checked(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            check(*arguments)
            return call(*arguments)

        return run

    # Selection is not differentiable; without no_grad, autograd would record the plain-torch operations.
    _library.impl(name, torch.no_grad()(checked(compute)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", checked(fake), lib=_library)


def _load() -> tuple[KernelReport, ctypes.CDLL | None]:
    build = BUILD_REPORT.read_text().strip() if BUILD_REPORT.exists() else "no build step ran"
    if os.environ.get("LIGHTNING_SPARSE_KERNELS", "") == "torch":
        return _plain_report(None, "LIGHTNING_SPARSE_KERNELS=torch is set"), None
    found = sorted(Path(__file__).parent.glob("_C*.so"))
    if not found:
        return _plain_report(None, f"nothing was compiled: {build}"), None
    path = found[0]
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        handle = ctypes.CDLL(str(path))
        has_cuda = bool(handle.lightning_sparse_has_cuda())
    except (OSError, AttributeError) as error:
        return _plain_report(str(path), f"{path.name} does not load under torch {torch.__version__}: {error}"), None
    reasons = () if has_cuda else (f"CUDA kernels were not compiled: {build}",)
    return KernelReport("compiled", "compiled" if has_cuda else "plain torch", str(path), reasons), handle


def _plain_report(library: str | None, reason: str) -> KernelReport:
    return KernelReport("plain torch", "plain torch", library, (reason,))


_register("mstopk", _check_mstopk, plain.mstopk, _fake_mstopk)
_register("compress", _check_compress, _plain_compress, _fake_compress)
_register("accumulate", _check_accumulate, _plain_accumulate, lambda *_: None)
_register("add_messages", _check_accumulate, _plain_accumulate, lambda *_: None)
_register("round_rows", _check_round_rows, plain.round_rows, _fake_round_rows)
_register("sum_rows", _check_sum_rows, plain.sum_rows, lambda rows, _: rows.new_empty(rows.shape[1]))
_report, _handle = _load()
