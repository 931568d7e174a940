"""Selection, error feedback and message packing on one flat tensor: no communication, no Lightning.

| file | what it holds |
|---|---|
| reference.py | the paper's loop and an exact top-k, step by step: the oracle |
| wire.py | the message layout, encode and decode |
| plain.py | the operators in plain torch |
| ops.py | schemas, checks, and which implementation runs |
| csrc/ | the compiled CPU and CUDA kernels |
"""

from lightning_sparse.kernels import reference
from lightning_sparse.kernels.ops import KernelReport, accumulate, compress, kernel_report, mstopk
from lightning_sparse.kernels.wire import indices_of, message_bytes

__all__ = [
    "KernelReport",
    "accumulate",
    "compress",
    "indices_of",
    "kernel_report",
    "message_bytes",
    "mstopk",
    "reference",
]
