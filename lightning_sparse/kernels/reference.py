"""Reference implementations in plain torch, for the kernel tests: MSTopK and an exact top-k.

MSTopK (Shi et al., MLSys 2021) selects about the k largest |x| without sorting. It bisects a threshold between the mean
and the maximum of |x|. It keeps all elements above the last threshold that kept at most k. The rest comes from the band
down to the last threshold that kept more than k. Comments mark four faults of published versions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.kernels.wire import INF_BITS

ITERATIONS = 30


class Bracket(NamedTuple):
    """count(a >= upper) <= k < count(a >= lower), over the finite |x|; upper may be +inf."""

    lower: float
    upper: float


def mstopk(x: Tensor, k: int, iterations: int = ITERATIONS) -> tuple[Tensor, Tensor]:
    _check(x, k)
    # Fault: a single NaN or Inf spoils the mean and the maximum. Here both ignore non-finite elements, which are
    # selected first.
    a = x.detach().float().abs()
    finite = a.isfinite()
    num_nonfinite = int((~finite).sum())
    if num_nonfinite >= k:
        return topk(x, k)
    num_finite_selected = k - num_nonfinite
    if num_finite_selected == int(finite.sum()):
        return gather(x, torch.arange(x.numel(), device=x.device))
    a = torch.where(finite, a, -1.0)  # below every threshold
    lower, upper = bisect(a, num_finite_selected, iterations)
    certain = (a >= upper) | ~finite
    band = torch.nonzero((a >= lower) & (a < upper)).flatten()
    # Fault: the band's slice starts at random, and an inclusive bound can return k - 1 elements, so ranks disagree on
    # message sizes. Here the slice is the start of the band.
    selected = torch.cat([torch.nonzero(certain).flatten(), band[: k - int(certain.sum())]])
    return gather(x, selected.sort().values)


def bisect(a: Tensor, k: int, iterations: int = ITERATIONS) -> Bracket:
    """Bisect a = |x|, where non-finite elements are -1; needs 1 <= k < count(a >= 0)."""
    mean, largest = (a.clamp(min=0.0).double().sum() / (a >= 0).sum()).float(), a.max()
    if int((a >= mean).sum()) > k:
        # Fault: the upper threshold starts at 0 and stays there if no threshold keeps 1..k elements (constant input;
        # more than k ties at the maximum), so all elements are returned. Here it starts at +inf, and all k come from
        # the band.
        low, high, upper = mean, largest, torch.full_like(mean, torch.inf)
    else:
        # Fault: if k exceeds count(|x| >= mean), as in gradients of embeddings, the bisection never brackets it, and
        # the rest is an arbitrary slice of all elements below the mean. Here it runs between 0 and the mean.
        low, high, upper = torch.zeros_like(mean), mean, mean
    lower, width = low, high - low
    left, right = 0.0, 1.0  # exact in fp64 for up to 52 iterations
    for _ in range(iterations):
        ratio = left + (right - left) / 2
        threshold = low + torch.tensor(ratio, dtype=torch.float32, device=a.device) * width
        if int((a >= threshold).sum()) <= k:
            right, upper = ratio, threshold
        else:
            left, lower = ratio, threshold
    return Bracket(float(lower), float(upper))


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the exact top-k of |x|, with the same order and ties as `ops.mstopk`."""
    _check(x, k)
    order = torch.sort(magnitude_bits(x), descending=True, stable=True).indices
    return gather(x, order[:k].sort().values)


def magnitude_bits(x: Tensor) -> Tensor:
    """Return the fp32 bits of |x| as int32, which order like the magnitudes, with finite < Inf < NaN."""
    # all NaN become equal, since their payloads differ between devices
    return (x.detach().float().view(torch.int32) & 0x7FFF_FFFF).clamp(max=INF_BITS + 1)


def is_nonfinite(bits: Tensor) -> Tensor:
    return bits >= INF_BITS


def gather(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return x.detach()[indices], indices.to(index_dtype(x.numel()))


def index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel < 2**31 else torch.int64


def _check(x: Tensor, k: int) -> None:
    if x.dim() != 1 or not 1 <= k <= x.numel():
        raise ValueError(f"x has shape {list(x.shape)} and k={k}: x must be flat, and 1 <= k <= x.numel()")
