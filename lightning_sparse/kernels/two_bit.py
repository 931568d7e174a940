"""Values in two bits: a sign, and one of two levels of the value's block.

The levels of a block are the mean magnitudes of its smaller and of its larger values, so the rounding errors of each
level average to zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The magnitudes of a top-k selection lie above a threshold with a tail that is about exponential. For an exponential
# tail, the two levels with the least squared error are split at mean + 0.594 * (mean - smallest) (Lloyd-Max).
SPLIT = 0.59375  # 0.594 in few bits
# Magnitudes are rounded to multiples of 2^(e - 36), where 2^e is the largest power of two that is not above the largest
# magnitude of the block. So sums of 65,536 magnitudes are exact in fp64, and compiled kernels get the same bits in any
# order of addition. Only values below 2^-13 of the largest are rounded.
_ROUNDING = 16  # adding 2^(e + 16) leaves multiples of 2^(e - 36) in fp64, whose significand has 52 bits


def encode(values_K: Tensor, block_K: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Return the levels, fp32[2 * B], and the codes, four in a byte: uint8[ceil(K / 4)].

    Bit 0 of a code tells the level, bit 1 the sign. Non-finite elements do not affect the levels, and have code 0.
    """
    finite_K = values_K.isfinite()
    size_K = torch.where(finite_K, values_K.abs(), 0.0).double()
    largest_B = size_K.new_zeros(num_blocks).scatter_reduce(0, block_K, size_K, "amax")
    exponent_B = torch.where(largest_B > 0, torch.frexp(largest_B).exponent - 1, 0)
    shift_K = power_of_two(exponent_B + _ROUNDING)[block_K]
    size_K = (size_K + shift_K) - shift_K

    count_B, sum_B = _sums(finite_K.double(), block_K, num_blocks), _sums(size_K, block_K, num_blocks)
    masked_K = torch.where(finite_K, size_K, torch.inf)
    smallest_B = torch.full_like(largest_B, torch.inf).scatter_reduce(0, block_K, masked_K, "amin")
    mean_B = sum_B / count_B
    threshold_B = mean_B + (mean_B - smallest_B) * SPLIT
    above_K = finite_K & (size_K > threshold_B[block_K])

    count_above_B = _sums(above_K.double(), block_K, num_blocks)
    sum_above_B = _sums(torch.where(above_K, size_K, 0.0), block_K, num_blocks)
    lower_B = (sum_B - sum_above_B) / (count_B - count_above_B)
    upper_B = torch.where(count_above_B > 0, sum_above_B / count_above_B, lower_B)
    levels_B2 = torch.stack([lower_B, upper_B], 1)
    levels = torch.where(count_B[:, None] > 0, levels_B2, 0.0).float().flatten()

    negative_K = torch.signbit(values_K) & finite_K
    codes = above_K.to(torch.uint8) | negative_K.to(torch.uint8) << 1
    codes = torch.nn.functional.pad(codes, (0, -codes.numel() % 4)).view(-1, 4)
    return levels, codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6


def decode(levels: Tensor, codes: Tensor, block_K: Tensor) -> Tensor:
    """Return the fp32 values of K codes, at the levels fp32[2 * B] of their blocks."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=codes.device)
    code_K = (codes[:, None] >> shifts & 3).flatten()[: block_K.numel()]
    level_K = levels[2 * block_K + (code_K & 1)]
    return torch.where(code_K > 1, -level_K, level_K)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2.0 ** exponent in fp64, exactly."""
    # exp2 and pow can be off by one ulp. fp64, since denormals need 2^163.
    return ((exponent.long().clamp(-1000, 1000) + 1023) << 52).view(torch.float64)


def _sums(values_K: Tensor, block_K: Tensor, num_blocks: int) -> Tensor:
    return values_K.new_zeros(num_blocks).index_add_(0, block_K, values_K)
