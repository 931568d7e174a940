"""Top-k selection, error feedback and message packing for a flat tensor, without communication."""

from lightning_sparse.kernels import reference
from lightning_sparse.kernels.ops import (
    KernelReport,
    accumulate,
    accumulate_delta,
    accumulate_regions,
    add_change,
    compress,
    compress_regions,
    kernel_report,
    lerp_into,
    mstopk,
    round_rows,
    sum_rows,
    write_between,
)
from lightning_sparse.kernels.wire import indices_of, message_bytes

__all__ = [
    "KernelReport",
    "accumulate",
    "accumulate_delta",
    "accumulate_regions",
    "add_change",
    "compress",
    "compress_regions",
    "indices_of",
    "kernel_report",
    "lerp_into",
    "message_bytes",
    "mstopk",
    "reference",
    "round_rows",
    "sum_rows",
    "write_between",
]
