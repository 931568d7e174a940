"""The message that a device sends to its peers on the other nodes.

A message holds exactly k (index, value) pairs of a shard of S elements. Its size depends only on (S, k, value_dtype),
so nodes all-gather messages without exchanging sizes first. Little-endian:

    offset  bytes   field
    0       4       magic "LSP2" (0x3250534c): layout version 2
    4       4       i32  number of non-finite elements in the whole shard; saturates at 2^31 - 1
    8       4       zero
    12      4       i32  value code: 0 fp32, 1 bf16, 3 two bits
    16      8       i64  S
    24      8       i64  k
    32      8       i64  number of the exchange, which receivers compare (`write_step_id`); zero if the sender set none
    40      24      zero
    64      4*B     u32  pairs in each block of 65,536 elements, B = ceil(S / 65,536)
    *       8*B     f32  lower and upper level of each block (two-bit values only)
    *       F       u8   pairs in each cell, F = 17 * ceil(S / 4,096) (8-bit indices only)
    *       i*k     u8 index within its cell, or u16 index within its block; ascending inside each
    *       w*k/8   values, w = 32, 16 or 2 bits, in index order

`*`: each section is zero-padded to 16 bytes, so that kernels can load vectors from the rows of [M, bytes] messages.

Example: S = 100,000, k = 1,000, bf16: 64 + 16 (B = 2, 8 bytes) + 432 (F = 425) + 1,008 + 2,000 = 3,520 bytes.
With two bits per value: 64 + 16 + 16 + 432 + 1,008 + 256 = 1,792 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.kernels import two_bit

MAGIC = 0x3250534C
HEADER_BYTES = 64
BLOCK = 65_536
# A cell of 256 elements could have 256 pairs, a count that needs nine bits. So a span of 4,096 elements has 16 cells of
# 241 elements and one of 240.
SPAN, CELL = 4_096, 241
CELLS = 17  # in a span
ALIGN = 16
TWO_BIT: torch.dtype = torch.uint2  # type: ignore[attr-defined]  # torch's stubs lack it
VALUE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, TWO_BIT: 3}  # 2 was fp16
VALUE_DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in VALUE_CODES.items()}
MAX_REGIONS = 65_535  # a dimension of a CUDA grid

_NONFINITE = slice(4, 8)
_MARK = slice(32, 40)

INF_BITS = 0x7F80_0000
_BF16_MAX = torch.finfo(torch.bfloat16).max
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class MessageLayout:
    """The byte offsets of a message's sections. `num_cells` is 0 with 16-bit indices, `num_levels` without levels."""

    numel: int
    k: int
    value_dtype: torch.dtype
    num_blocks: int
    num_levels: int
    num_cells: int
    counts: int
    levels: int
    cells: int
    indices: int
    values: int
    nbytes: int

    @property
    def index_bytes(self) -> int:
        return 1 if self.num_cells else 2


def value_code(value_dtype: torch.dtype) -> int:
    if value_dtype not in VALUE_CODES:
        hint = "use torch.bfloat16" if value_dtype == torch.float16 else f"use one of {list(VALUE_CODES)}"
        raise ValueError(f"value_dtype={value_dtype} is not a format of messages: {hint}.")
    return VALUE_CODES[value_dtype]


def message_layout(numel: int, k: int, value_dtype: torch.dtype) -> MessageLayout:
    value_code(value_dtype)  # raises for a format that messages do not have
    if not 1 <= k <= numel:
        raise ValueError(f"k={k} with numel={numel}: k must satisfy 1 <= k <= numel")
    num_blocks = -(-numel // BLOCK)
    num_levels = 2 * num_blocks if value_dtype == TWO_BIT else 0
    # Indices have 16 bits where that is smaller, below 0.42% of the shard. Padding counts, so that the message of a
    # larger shard is never shorter.
    num_cells = CELLS * -(-numel // SPAN)
    if _round_up(num_cells) + _round_up(k) >= _round_up(2 * k):
        num_cells = 0
    levels = HEADER_BYTES + _round_up(4 * num_blocks)
    cells = levels + _round_up(4 * num_levels)
    indices = cells + _round_up(num_cells)
    values = indices + _round_up(k if num_cells else 2 * k)
    nbytes = values + _round_up(-(-k // 4) if value_dtype == TWO_BIT else value_dtype.itemsize * k)
    return MessageLayout(
        numel, k, value_dtype, num_blocks, num_levels, num_cells, HEADER_BYTES, levels, cells, indices, values, nbytes
    )


def message_bytes(numel: int, k: int, value_dtype: torch.dtype) -> int:
    return message_layout(numel, k, value_dtype).nbytes


@dataclass(frozen=True)
class Regions:
    """A shard cut into regions of almost equal size, with one message per region.

    numel: S, elements of the shard. num_regions: M, at most S. k: pairs of a region, at most its elements. Example: S =
    10, M = 3: [0, 3), [3, 6), [6, 10).
    """

    numel: int
    num_regions: int
    k: int
    value_dtype: torch.dtype

    def place(self, region: int) -> slice:
        return slice(region * self.numel // self.num_regions, (region + 1) * self.numel // self.num_regions)

    def size(self, region: int) -> int:
        place = self.place(region)
        return int(place.stop - place.start)

    def pairs(self, region: int) -> int:
        return min(self.k, self.size(region))

    def nbytes(self, region: int) -> int:
        return message_bytes(self.size(region), self.pairs(region), self.value_dtype)

    @property
    def row_nbytes(self) -> int:
        # a row holds the longest message; the last region is the largest
        return self.nbytes(self.num_regions - 1)


def encode(
    values_K: Tensor, indices_K: Tensor, numel: int, value_dtype: torch.dtype, nonfinite: Tensor | int = 0
) -> Tensor:
    """Pack fp32 values and ascending indices into a uint8 message, without device synchronization."""
    layout = message_layout(numel, indices_K.numel(), value_dtype)
    device, indices_K = values_K.device, indices_K.long()
    message = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
    if value_dtype == TWO_BIT:
        levels, stored = two_bit.encode(values_K.float(), indices_K // BLOCK, layout.num_blocks)
        _section(message, layout.levels, levels)
    else:
        # NaN becomes the canonical quiet NaN, because torch's conversion is platform-dependent. Receivers check the
        # count of non-finite elements, not the values.
        stored = torch.where(values_K.isnan(), torch.nan, values_K.float())
        if value_dtype == torch.bfloat16:  # finite values stay finite: they saturate
            saturated = stored.clamp(-_BF16_MAX, _BF16_MAX).bfloat16()
            stored = torch.where(values_K.isfinite(), saturated, stored.bfloat16())
            stored = stored.view(torch.int16).masked_fill(values_K.isnan(), 0x7FC0)

    words = message[:32].view(torch.int32)
    words[0] = MAGIC
    words[1] = torch.as_tensor(nonfinite, device=device).clamp(max=_INT32_MAX)
    words[3] = VALUE_CODES[value_dtype]
    words[4:8].view(torch.int64)[0] = numel
    words[4:8].view(torch.int64)[1] = layout.k

    _section(message, layout.counts, _counts(indices_K, _starts(layout.num_blocks, device, 1, BLOCK)).to(torch.int32))
    if layout.num_cells:
        starts = _starts(layout.num_cells, device, CELLS, SPAN)
        _section(message, layout.cells, _counts(indices_K, starts).to(torch.uint8))
        _section(message, layout.indices, (indices_K % SPAN % CELL).to(torch.uint8))
    else:
        low = indices_K & (BLOCK - 1)
        _section(message, layout.indices, (low - BLOCK * (low >= BLOCK // 2)).to(torch.int16))
    _section(message, layout.values, stored)
    return message


def decode(message: Tensor, numel: int, k: int, value_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp32 values, int64 indices and a 0-dim bool: valid, i.e. well-formed and without non-finite elements."""
    layout = message_layout(numel, k, value_dtype)
    if message.dtype != torch.uint8 or message.shape != (layout.nbytes,):
        raise ValueError(
            f"message is {message.dtype}{list(message.shape)}, but numel={numel}, k={k} and {value_dtype} need "
            f"uint8[{layout.nbytes}]"
        )
    words = message[:HEADER_BYTES].clone().view(torch.int32)
    block_K, indices_K, valid = (rows[0] for rows in _positions(message[None], layout))
    sizes = words[4:8].view(torch.int64)
    valid = valid & (words[0] == MAGIC) & (words[1] == 0) & (words[2] == 0) & (words[3] == VALUE_CODES[value_dtype])
    valid = valid & (sizes[0] == numel) & (sizes[1] == k)
    stored = message[layout.values :].clone()
    if value_dtype == TWO_BIT:
        levels = message[layout.levels : layout.levels + 4 * layout.num_levels].clone().view(torch.float32)
        values_K = two_bit.decode(levels, stored, block_K)
    else:
        values_K = stored[: value_dtype.itemsize * k].view(value_dtype).float()
    # The indices of an invalid message are within bounds too. So a caller can scatter first and then overwrite the
    # result with NaN, without device synchronization.
    return values_K, indices_K.clamp(0, numel - 1), valid


def write_step_id(message: Tensor, number: int) -> None:
    message[_MARK].view(torch.int64).fill_(number)


def read_step_ids(messages_MB: Tensor) -> Tensor:
    """Return the exchange number of each message, int64[M]."""
    return messages_MB[:, _MARK].contiguous().view(torch.int64).view(-1)


def nonfinite_of(message: Tensor) -> int:
    """Return the number of non-finite elements in the shard. Waits for the device."""
    return int(message[_NONFINITE].view(torch.int32))


def indices_of(message: Tensor, numel: int, k: int, value_dtype: torch.dtype) -> Tensor:
    """Return the ascending int64 indices in a message, without device synchronization."""
    return _positions(message[None], message_layout(numel, k, value_dtype))[1][0].clamp(0, numel - 1)


def indices_of_regions(messages_MB: Tensor, regions: Regions) -> Tensor:
    """Return the places of the pairs in the shard, int64[M * k], without device synchronization."""
    small, large = (
        message_layout(regions.size(region), regions.pairs(region), regions.value_dtype)
        for region in (0, regions.num_regions - 1)
    )
    starts = torch.arange(regions.num_regions + 1, device=messages_MB.device) * regions.numel // regions.num_regions
    starts_M1, sizes_M1 = starts[:-1, None], starts.diff()[:, None]
    indices_Mk = _positions(messages_MB, large)[1]
    if small != large:  # regions have one of two sizes
        of_small = _positions(messages_MB, small)[1]
        # a region of fewer than k elements sends all of them; its last element then occurs more than once
        of_small = torch.nn.functional.pad(of_small, (0, large.k - small.k), value=small.numel - 1)
        indices_Mk = torch.where(sizes_M1 < large.numel, of_small, indices_Mk)
    return (starts_M1 + indices_Mk.clamp(min=0).minimum(sizes_M1 - 1)).flatten()


def _positions(messages_MB: Tensor, layout: MessageLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks and indices of pairs, int64[M, k], and whether messages are well-formed, bool[M]."""
    num_messages, device = messages_MB.shape[0], messages_MB.device
    pairs_Mk = torch.arange(layout.k, device=device).repeat(num_messages, 1)

    def section(begin: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        return messages_MB[:, begin : begin + nbytes].clone().view(dtype).long()

    counts_MB = section(layout.counts, 4 * layout.num_blocks, torch.int32)
    ends_MB = counts_MB.cumsum(1)
    block_Mk = torch.searchsorted(ends_MB, pairs_Mk, right=True)
    valid = (counts_MB >= 0).all(1) & (counts_MB <= BLOCK).all(1) & (ends_MB[:, -1] == layout.k)
    if layout.num_cells:
        cells_MF = section(layout.cells, layout.num_cells, torch.uint8)
        low_Mk = section(layout.indices, layout.k, torch.uint8)
        cell_Mk = torch.searchsorted(cells_MF.cumsum(1), pairs_Mk, right=True)
        within_Mk = cell_Mk % CELLS * CELL + low_Mk
        indices_Mk = cell_Mk // CELLS * SPAN + within_Mk
        per_block = CELLS * BLOCK // SPAN
        padded = torch.nn.functional.pad(cells_MF, (0, per_block * layout.num_blocks - layout.num_cells))
        valid = valid & (padded.view(num_messages, -1, per_block).sum(2) == counts_MB).all(1)
        valid = valid & (low_Mk < CELL).all(1) & (within_Mk < SPAN).all(1)
    else:
        low_Mk = section(layout.indices, 2 * layout.k, torch.int16) & (BLOCK - 1)
        indices_Mk = block_Mk * BLOCK + low_Mk
    ascending = (indices_Mk.diff(dim=1) > 0).all(1)
    valid = valid & ascending & (indices_Mk < layout.numel).all(1)
    # indices of a malformed message may lie outside the shard
    return block_Mk.clamp(max=layout.num_blocks - 1), indices_Mk, valid


def _starts(count: int, device: torch.device, per_span: int, span: int) -> Tensor:
    # first element of each of `count` blocks or cells, and the end; a span has `per_span` of them
    number = torch.arange(count + 1, device=device)
    return number // per_span * span + number % per_span * CELL


def _counts(indices_K: Tensor, starts: Tensor) -> Tensor:
    return torch.searchsorted(indices_K, starts).diff()


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _section(message: Tensor, start: int, data: Tensor) -> None:
    raw = data.contiguous().view(torch.uint8)
    message[start : start + raw.numel()] = raw
