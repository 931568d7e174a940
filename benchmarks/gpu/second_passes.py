"""Count the selections of the CUDA kernels that read a tensor a second time.

The kernels choose a threshold from a sample, and collect the elements that reach it (candidates) in one pass. If fewer
than k elements or more than the capacity reach the threshold, the kernels need a second pass over all elements. They do
not report it, because the host would have to wait. So `counted` applies their rule to the same input: kernels/csrc has
it in pass.cuh and common.h. A test compares it with the emulated kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_sparse.exchange import paths
from lightning_sparse.kernels import compress

SAMPLE, PIECE = 32 * 1024, 32  # elements
SHIFT = 15  # low bits of a key that are 0 in a threshold
INF_KEY = 0x7F800000


@contextmanager
def counted() -> Iterator[list[Tensor]]:
    """Record whether each sparse selection needs a second pass. Read the list after the block."""
    found: list[Tensor] = []

    def counting(
        grad: Tensor, residual: Tensor | None, next_residual: Tensor | None, k: int, dtype: Any, scale: Any = None
    ) -> Tensor:
        acc = grad.float() if scale is None else grad.float() * scale
        found.append(needs_second_pass(acc if residual is None else residual + acc, k))
        return compress(grad, residual, next_residual, k, dtype, scale)

    with mock.patch.object(paths, "compress", counting):
        yield found


def needs_second_pass(acc_N: Tensor, k: int) -> Tensor:
    """Return whether the CUDA kernels read the tensor a second time to select k elements; the host does not wait."""
    numel = acc_N.numel()
    target, capacity = plan(numel, k)
    keys_N = (acc_N.float().view(torch.int32) & 0x7FFFFFFF).clamp(max=INF_KEY + 1)
    candidates = torch.tensor(numel)
    if 0 < target < numel:
        sample = keys_N if numel <= SAMPLE else keys_N[sampled(numel, keys_N.device)]
        threshold = (sample.topk(target).values[-1] >> SHIFT << SHIFT).clamp(max=INF_KEY)
        candidates = (keys_N >= threshold).sum()
    return (candidates < k) | (candidates > capacity)


def plan(numel: int, k: int) -> tuple[int, int]:
    """Return how many elements of the sample reach the threshold, 0 for all, and the capacity for candidates."""
    if numel <= SAMPLE:
        return k, numel
    scale = numel / SAMPLE
    expected = k / scale
    target = math.ceil(expected + 6.0 * math.sqrt(expected) + 8.0)
    if target >= SAMPLE:
        return 0, numel
    return target, min(int(1.4 * target * scale) + 65536, numel)


@cache
def sampled(numel: int, device: torch.device) -> Tensor:
    """Return the indices of the sample: a pseudo-random piece of each equal part of the tensor."""
    pieces, slots = SAMPLE // PIECE, numel // PIECE
    begins = []
    for i in range(pieces):
        first = slots * i // pieces
        width = slots * (i + 1) // pieces - first
        hashed = (i + 1) * 0x9E3779B97F4A7C15 % 2**64 >> 33
        begins.append((first + hashed % width) * PIECE)
    return (torch.tensor(begins)[:, None] + torch.arange(PIECE)).flatten().to(device)
