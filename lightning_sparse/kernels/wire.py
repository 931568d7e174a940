"""The message that a device sends to its peers on the other nodes.

A message holds exactly k (index, value) pairs of a shard of S elements. Its size depends only on (S, k, value_dtype),
so the all-gather needs no exchange of sizes. Little-endian:

    offset  bytes   field
    0       4       magic "LSP1" (0x3150534c): layout version 1
    4       4       i32  number of non-finite elements in the whole shard; saturates at 2^31 - 1
    8       4       i32  exponent e: decoded value = stored value * 2^e (0 unless the values are fp16)
    12      4       i32  value code: 0 fp32, 1 bf16, 2 fp16
    16      8       i64  S
    24      8       i64  k
    32      32      zero
    64      4*B     u32  pairs in each block of 65,536 elements, B = ceil(S / 65,536)
    *       2*k     u16  index within its block; ascending inside a block
    *       w*k     values, w = 4 or 2 bytes, in index order

`*`: each section is zero-padded to 16 bytes, so that the rows of an all-gathered [M, bytes] tensor are aligned for
vector loads.

Example: S = 100,000, k = 1,000, bf16: 64 + 16 (B = 2, 8 bytes) + 2,000 + 2,000 = 4,080 bytes, 4.08 per pair; int32 and
fp32 pairs would take 8.

Values:
- Finite values stay finite. bf16 saturates at its largest finite value. fp16 values are scaled by the power of two that
  moves the largest into [2^14, 2^15), and saturate at 32,752, the last fp16 below 2^15. So 7e4 does not overflow, and
  values down to 2^-38 of the largest do not decode to zero; smaller ones stay in the sender's residual.
- Infinities keep their sign; NaN becomes the canonical quiet NaN. Receivers check the count, not the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAGIC = 0x3150534C
HEADER_BYTES = 64
BLOCK = 65_536
ALIGN = 16
VALUE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
VALUE_DTYPES: tuple[torch.dtype, ...] = tuple(VALUE_CODES)
MAX_REGIONS = 65_535  # a dimension of a CUDA grid

INF_BITS = 0x7F80_0000
_BF16_MAX = torch.finfo(torch.bfloat16).max
_FP16_LIMIT = 32_752.0
_FP16_EXPONENT = 14
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class MessageLayout:
    """The byte offsets of a message's sections."""

    numel: int
    k: int
    value_dtype: torch.dtype
    num_blocks: int
    counts: int
    indices: int
    values: int
    nbytes: int


def message_layout(numel: int, k: int, value_dtype: torch.dtype) -> MessageLayout:
    """Compute the layout of a message."""
    if value_dtype not in VALUE_CODES:
        raise ValueError(f"value_dtype={value_dtype} must be one of {list(VALUE_CODES)}")
    if not 1 <= k <= numel:
        raise ValueError(f"k={k} with numel={numel}: k must satisfy 1 <= k <= numel")
    num_blocks = -(-numel // BLOCK)
    indices = HEADER_BYTES + _round_up(4 * num_blocks)
    values = indices + _round_up(2 * k)
    nbytes = values + _round_up(value_dtype.itemsize * k)
    return MessageLayout(numel, k, value_dtype, num_blocks, HEADER_BYTES, indices, values, nbytes)


def message_bytes(numel: int, k: int, value_dtype: torch.dtype) -> int:
    """Size in bytes of a message with k pairs of a shard of `numel` elements."""
    return message_layout(numel, k, value_dtype).nbytes


@dataclass(frozen=True)
class Regions:
    """A shard cut into regions, as equal as whole numbers allow, with a message for each.

    Args:
        numel: S, elements of the shard.
        num_regions: M, at most S.
        k: pairs of a region; a smaller region sends all of its elements.

    Worked example: S = 10, M = 3: [0, 3), [3, 6), [6, 10).
    """

    numel: int
    num_regions: int
    k: int
    value_dtype: torch.dtype

    def place(self, region: int) -> slice:
        """Where a region lies in the shard."""
        return slice(region * self.numel // self.num_regions, (region + 1) * self.numel // self.num_regions)

    def size(self, region: int) -> int:
        """R, elements of that region."""
        place = self.place(region)
        return int(place.stop - place.start)

    def pairs(self, region: int) -> int:
        """Of its message."""
        return min(self.k, self.size(region))

    def nbytes(self, region: int) -> int:
        """Of its message."""
        return message_bytes(self.size(region), self.pairs(region), self.value_dtype)

    @property
    def row_nbytes(self) -> int:
        """B, the bytes of the longest message: each travels in a row of so many. The last region is the largest."""
        return self.nbytes(self.num_regions - 1)


def encode(
    values_K: Tensor, indices_K: Tensor, numel: int, value_dtype: torch.dtype, nonfinite: Tensor | int = 0
) -> Tensor:
    """Pack fp32 values and ascending indices into a uint8 message, without device synchronisation."""
    layout = message_layout(numel, indices_K.numel(), value_dtype)
    device = values_K.device
    message = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
    stored_K, exponent = _to_stored(values_K.float(), value_dtype)

    words = message[:32].view(torch.int32)
    words[0] = MAGIC
    words[1] = torch.as_tensor(nonfinite, device=device).clamp(max=_INT32_MAX)
    words[2] = exponent
    words[3] = VALUE_CODES[value_dtype]
    words[4:8].view(torch.int64)[0] = numel
    words[4:8].view(torch.int64)[1] = layout.k

    edges = torch.arange(layout.num_blocks + 1, device=device, dtype=torch.int64) * BLOCK
    counts = torch.searchsorted(indices_K.long(), edges).diff()
    _section(message, layout.counts, counts.to(torch.int32))
    low = indices_K & (BLOCK - 1)
    _section(message, layout.indices, (low - BLOCK * (low >= BLOCK // 2)).to(torch.int16))
    _section(message, layout.values, stored_K)
    return message


def decode(message: Tensor, numel: int, k: int, value_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp32 values, int64 indices and a 0-dim bool: valid, i.e. well-formed and without non-finite elements.

    The indices of an invalid message are within bounds too, so a caller can scatter first and then overwrite the result
    with NaN, without device synchronisation.
    """
    layout = message_layout(numel, k, value_dtype)
    if message.dtype != torch.uint8 or message.shape != (layout.nbytes,):
        raise ValueError(
            f"message is {message.dtype}{list(message.shape)}, but numel={numel}, k={k} and {value_dtype} need "
            f"uint8[{layout.nbytes}]"
        )
    words = message[:HEADER_BYTES].clone().view(torch.int32)
    counts = message[layout.counts : layout.counts + 4 * layout.num_blocks].clone().view(torch.int32).long()
    low_K = message[layout.indices : layout.indices + 2 * k].clone().view(torch.int16).long() & (BLOCK - 1)
    stored_K = message[layout.values : layout.values + value_dtype.itemsize * k].clone().view(value_dtype)

    ends = counts.cumsum(0)
    block_K = torch.searchsorted(ends, torch.arange(k, device=message.device), right=True)
    indices_K = block_K * BLOCK + low_K
    valid = _header_is_valid(words, layout) & (counts >= 0).all() & (counts <= BLOCK).all() & (ends[-1] == k)
    valid = valid & (indices_K[1:] > indices_K[:-1]).all() & (indices_K < numel).all()
    return _from_stored(stored_K, words[2]), indices_K.clamp(0, numel - 1), valid


def indices_of(message: Tensor, numel: int, k: int, value_dtype: torch.dtype) -> Tensor:
    """The ascending int64 indices in a message, without device synchronisation."""
    return decode(message, numel, k, value_dtype)[1]


def indices_of_regions(messages_MB: Tensor, regions: Regions) -> Tensor:
    """Where in the shard the messages' pairs lie, int64[M * k], without device synchronisation.

    A region of fewer than k elements sends all of them, and one of them is named twice.
    """
    of_small, of_large = (
        message_layout(regions.size(region), regions.pairs(region), regions.value_dtype)
        for region in (0, regions.num_regions - 1)
    )
    device, k = messages_MB.device, of_large.k
    starts = torch.arange(regions.num_regions + 1, device=device) * regions.numel // regions.num_regions
    starts_M1, sizes_M1 = starts[:-1, None], starts.diff()[:, None]
    small_M1 = sizes_M1 < of_large.numel

    counts = messages_MB[:, HEADER_BYTES : HEADER_BYTES + 4 * of_large.num_blocks].contiguous().view(torch.int32).long()
    counts[:, of_small.num_blocks :].masked_fill_(small_M1, 0)
    pairs = torch.arange(k, device=device)
    block_Mk = torch.searchsorted(counts.cumsum(1), pairs.repeat(regions.num_regions, 1), right=True)
    begin_M1 = torch.where(small_M1, of_small.indices // 2, of_large.indices // 2)
    low_Mk = messages_MB.view(torch.int16).gather(1, begin_M1 + pairs).long() & (BLOCK - 1)
    return (starts_M1 + (block_Mk * BLOCK + low_Mk).minimum(sizes_M1 - 1)).flatten()


def round_trip(values_K: Tensor, value_dtype: torch.dtype) -> Tensor:
    """The values that a receiver decodes: decode(encode(values))."""
    return _from_stored(*_to_stored(values_K, value_dtype))


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _section(message: Tensor, start: int, data: Tensor) -> None:
    raw = data.contiguous().view(torch.uint8)
    message[start : start + raw.numel()] = raw


def _header_is_valid(words: Tensor, layout: MessageLayout) -> Tensor:
    sizes = words[4:8].clone().view(torch.int64)
    same = (words[0] == MAGIC) & (words[3] == VALUE_CODES[layout.value_dtype])
    same = same & (sizes[0] == layout.numel) & (sizes[1] == layout.k)
    return same & (words[1] == 0) & (words[2] >= -200) & (words[2] <= 200)


def _to_stored(values_K: Tensor, value_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    exponent = torch.zeros((), dtype=torch.int32, device=values_K.device)
    canonical = torch.where(values_K.isnan(), torch.nan, values_K)
    if value_dtype == torch.float32:
        return canonical, exponent
    finite = values_K.isfinite()
    if value_dtype == torch.bfloat16:
        stored = canonical.clamp(-_BF16_MAX, _BF16_MAX).bfloat16()
    else:
        largest = torch.where(finite, values_K.abs(), 0.0).max()
        # frexp: largest = f * 2^n with f in [0.5, 1)
        exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 1 - _FP16_EXPONENT, 0).to(torch.int32)
        scaled = canonical.double() * _power_of_two(-exponent)
        stored = scaled.clamp(-_FP16_LIMIT, _FP16_LIMIT).half()
    stored = torch.where(finite, stored, canonical.to(value_dtype))
    quiet = 0x7FC0 if value_dtype == torch.bfloat16 else 0x7E00  # torch's NaN conversion is platform-dependent
    return stored.view(torch.int16).masked_fill(values_K.isnan(), quiet).view(value_dtype), exponent


def _from_stored(stored_K: Tensor, exponent: Tensor) -> Tensor:
    if stored_K.dtype != torch.float16:
        return stored_K.float()
    return (stored_K.double() * _power_of_two(exponent)).float()


def _power_of_two(exponent: Tensor) -> Tensor:
    """2.0 ** exponent, exactly; exp2 and pow can be off by one ulp. fp64, since denormals need 2^163."""
    return ((exponent.long().clamp(-1000, 1000) + 1023) << 52).view(torch.float64)
