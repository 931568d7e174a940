// Sums M messages in one launch. A shard of several regions has a row of CUDA blocks per region. A block owns
// consecutive spans of 4,096 elements. It adds the pairs of up to kTogether messages to a span in shared memory, then
// writes the span. It adds one message at a time, in row order, so no two threads add to one element concurrently.
// With alpha, a span begins with the values of the shard instead of zeros. With alpha and few pairs, a block adds the
// pairs to the shard directly, in the same order, and does not touch other elements.
//
// Each block finds on its own where its pairs begin in each message, and whether the header and the counts are valid.
// So blocks need no data from each other. Invalid indices and cell counts are found later, perhaps by a single block.
// This block sets `damaged`. Then the last block to finish fills the whole region with NaN.
#include <cuda_runtime.h>

#include "tile.cuh"

namespace lightning_sparse::cuda {
namespace {

constexpr int kTogether = 64;  // messages that a block has open at a time
// With at least this many elements per pair, reading and writing one sector (32 bytes, 8 floats) per pair moves fewer
// bytes than reading and writing the whole shard.
constexpr int kSparse = 8;

struct Flags {
  Count finished;  // blocks
  uint32_t damaged;
};
static_assert(sizeof(Flags) <= kAccumulateScratchBytes);

// The arguments of the kernel, for all regions.
struct ShardSum {
  Regions regions;
  const uint8_t* messages;
  int64_t num_messages, row_nbytes, k;
  Dtype dtype;
  float* shard;
  bool clear;
  float alpha;
  Flags* flags;
};

// The sum of one region.
struct RegionSum {
  int64_t numel, k, num_messages, row_nbytes;
  const uint8_t* messages;
  Dtype dtype;
  MessageLayout layout;
  float* shard;
  bool clear, aligned;
  float alpha;
  Flags* flags;

  __device__ RegionSum(const ShardSum& whole, uint32_t region)
      : numel(whole.regions.numel(region)),
        k(whole.k < numel ? whole.k : numel),
        num_messages(whole.num_messages),
        row_nbytes(whole.row_nbytes),
        messages(whole.messages + region * num_messages * row_nbytes),
        dtype(whole.dtype),
        layout(numel, k, dtype),
        shard(whole.shard + whole.regions.start(region)),
        clear(whole.clear),
        aligned(is_aligned(shard)),
        alpha(whole.alpha),
        flags(whole.flags + region) {}
};

// Pairs of a message in the current wire block: the first pair, the end, and the next pair to add.
struct Cursor {
  int64_t begin, end, next;
};

struct Span {
  int64_t base, block;
  int start, size, block_size;  // start: within the wire block

  __device__ Span(const RegionSum& sum, int64_t number)
      : base(number * kTile),
        block(base / kBlock),
        start(static_cast<int>(base % kBlock)),
        size(at_most(sum.numel - base, kTile)),
        block_size(at_most(sum.numel - block * kBlock, kBlock)) {}

 private:
  __device__ static int at_most(int64_t value, int64_t limit) {
    return static_cast<int>(value < limit ? value : limit);
  }
};

__device__ const uint8_t* message_at(const RegionSum& sum, int64_t m) { return sum.messages + m * sum.row_nbytes; }
__device__ const uint32_t* counts_of(const RegionSum& sum, const uint8_t* message) {
  return reinterpret_cast<const uint32_t*>(message + sum.layout.counts);
}
__device__ const uint16_t* indices_of(const RegionSum& sum, const uint8_t* message) {
  return reinterpret_cast<const uint16_t*>(message + sum.layout.indices);
}
__device__ const uint8_t* cells_of(const RegionSum& sum, const uint8_t* message, const Span& span) {
  return message + sum.layout.cells + span.base / kSpan * kCells;
}

__device__ float value_at(const RegionSum& sum, const uint8_t* message, const Span& span, int64_t i) {
  const uint8_t* values = message + sum.layout.values;
  if (sum.dtype == Dtype::fp32) return reinterpret_cast<const float*>(values)[i];
  if (sum.dtype == Dtype::two_bit) {
    const float* levels = reinterpret_cast<const float*>(message + sum.layout.levels) + 2 * span.block;
    return decode_two_bits(values[i / 4] >> 2 * (i % 4) & 3u, levels[0], levels[1]);
  }
  return from_bf16(reinterpret_cast<const uint16_t*>(values)[i]);
}

__device__ void damage(const RegionSum& sum) { atomicExch(&sum.flags->damaged, 1u); }

// One warp calls it. Returns the first pair of a wire block whose index is `start` or higher. Earlier pairs belong to
// spans of another CUDA block. If indices ascend, that block stops at this pair, so each pair has one owner. If they
// do not, at least one block finds the wrong order, and calls `damage`.
__device__ int64_t skip(const RegionSum& sum, const uint16_t* indices, int64_t begin, int64_t end, int start) {
  constexpr int kLoads = 4;  // loads that each lane issues before it waits for memory
  int64_t next = begin;
  for (int below = 32 * kLoads; below == 32 * kLoads; next += below) {
    below = 0;
    bool all_below = true;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int64_t i = next + 32 * j + lane();
      const int index = i < end ? indices[i] : 1 << 16;
      if (i < end && i > begin && index <= indices[i - 1]) damage(sum);
      const unsigned beyond = __ballot_sync(kAllLanes, index >= start);
      if (all_below) below += beyond ? __ffs(beyond) - 1 : 32;
      all_below = all_below && beyond == 0;
    }
  }
  return next;
}

// One warp calls it. With 8-bit indices, returns the first pair of a span. The pairs of its wire block begin at
// `begin`.
__device__ int64_t skip_cells(const RegionSum& sum, const uint8_t* message, const Span& span, int64_t begin,
                              int64_t end) {
  const int before = span.start / kTile * kCells;
  const uint8_t* cells = cells_of(sum, message, span) - before;
  int64_t pairs = 0;
  for (int cell = lane(); cell < before; cell += 32) pairs += cells[cell];
  const int64_t next = begin + sum_of_warp(pairs);
  if (next > end) damage(sum);
  return next < end ? next : end;
}

// One warp calls it. For each cell of a span, writes the number of pairs up to the end of this cell.
__device__ void count_cells(const RegionSum& sum, const uint8_t* message, const Span& span, uint16_t* ends) {
  int pairs = lane() < kCells ? cells_of(sum, message, span)[lane()] : 0;
  for (int apart = 1; apart < 32; apart *= 2) {
    const int before = __shfl_up_sync(kAllLanes, pairs, apart);
    pairs += lane() >= apart ? before : 0;
  }
  if (lane() < kCells) ends[lane()] = static_cast<uint16_t>(pairs);
}

// One warp calls it. Sets the cursor to the first pair of span `first`. Returns false if header or counts are invalid.
__device__ bool open_message(const RegionSum& sum, const uint8_t* message, const Span& first, Cursor& cursor) {
  const Header& header = *reinterpret_cast<const Header*>(message);
  const uint32_t* counts = counts_of(sum, message);
  bool valid = header_is_valid(header, sum.numel, sum.k, sum.dtype);
  int64_t total = 0, before = 0;
#pragma unroll 4
  for (int64_t b = lane(); b < sum.layout.num_blocks; b += 32) {
    const uint32_t count = counts[b];
    valid = valid && count <= static_cast<uint32_t>(kBlock);
    total += count;
    before += b < first.block ? count : 0;
  }
  total = sum_of_warp(total), before = sum_of_warp(before);
  if (!__all_sync(kAllLanes, valid) || total != sum.k) return false;
  const int64_t begin = before, end = before + counts[first.block];
  int64_t next = begin;
  if (sum.layout.num_cells > 0) {
    next = skip_cells(sum, message, first, begin, end);
  } else if (first.start > 0) {
    next = skip(sum, indices_of(sum, message), begin, end, first.start);
  }
  if (lane() == 0) cursor = {begin, end, next};
  return true;
}

// Moves the cursors to the next wire block. One thread per message.
__device__ void advance(const RegionSum& sum, int64_t from, int count, int64_t block, Cursor* cursors) {
  const int m = static_cast<int>(threadIdx.x);
  if (m >= count) return;
  cursors[m].begin = cursors[m].next = cursors[m].end;
  cursors[m].end += counts_of(sum, message_at(sum, from + m))[block];
}

// Adds the message's pairs in this span to acc. Pairs are in order, so the pairs of this span come next.
__device__ void add_message(const RegionSum& sum, const uint8_t* message, const Span& span, Cursor& cursor,
                            float* acc) {
  const uint16_t* indices = indices_of(sum, message);
  const Cursor at = cursor;
  int64_t next = at.next;
  for (int taken = kThreads; taken == kThreads; next += taken) {
    const int64_t i = next + threadIdx.x;
    const int index = i < at.end ? indices[i] : -1;
    int previous = __shfl_up_sync(kAllLanes, index, 1);
    if (lane() == 0 && i > at.begin && i < at.end) previous = indices[i - 1];
    bool mine = false;
    if (index >= 0) {
      const bool in_order = index < span.block_size && (i == at.begin || index > previous);
      if (!in_order) damage(sum);
      mine = in_order && index >= span.start && index < span.start + span.size;
      if (mine) {
        float& to = acc[index - span.start];
        to = __fadd_rn(to, __fmul_rn(sum.alpha, value_at(sum, message, span, i)));
      }
    }
    taken = __syncthreads_count(mine);  // the next message may add to the same elements
  }
  if (threadIdx.x == 0) cursor.next = next;
}

// As add_message, for 8-bit indices: the counts of the cells say which pairs belong to this span.
__device__ void add_cells(const RegionSum& sum, const uint8_t* message, const Span& span, const uint16_t* ends,
                          Cursor& cursor, float* acc) {
  const int64_t next = cursor.next, remaining = cursor.end - next;
  const uint8_t* indices = message + sum.layout.indices + next;
  const int in_span = ends[kCells - 1], count = in_span < remaining ? in_span : static_cast<int>(remaining);
  for (int i = threadIdx.x; i < count; i += kThreads) {
    int cell = 0, begin = 0;
    for (; i >= ends[cell]; ++cell) begin = ends[cell];
    const int low = indices[i], position = cell * kCell + low;
    const bool in_order = low < kCell && (i == begin || low > indices[i - 1]);
    if (in_order && position < span.size) {
      const float value = value_at(sum, message, span, next + i);
      acc[position] = __fadd_rn(acc[position], __fmul_rn(sum.alpha, value));
    } else {
      damage(sum);
    }
  }
  __syncthreads();  // the next message may add to the same elements
  if (threadIdx.x != 0) return;
  const bool ends_block = span.start + span.size == span.block_size;
  if (in_span > remaining || (ends_block && in_span < remaining)) damage(sum);
  cursor.next = next + count;
}

// A thread loads and stores the same elements, so store_span and the next load_span need no barrier between them.
__device__ void load_span(const RegionSum& sum, const Span& span, bool clear, float* acc) {
  const float* from = sum.shard + span.base;
  for (int i = 4 * threadIdx.x; i < span.size; i += 4 * kThreads) {
    if (clear) {
      *reinterpret_cast<uint4*>(acc + i) = {0, 0, 0, 0};
    } else if (sum.aligned && i + 4 <= span.size) {
      *reinterpret_cast<uint4*>(acc + i) = *reinterpret_cast<const uint4*>(from + i);
    } else {
      for (int j = i; j < i + 4 && j < span.size; ++j) acc[j] = from[j];
    }
  }
}

__device__ void store_span(const RegionSum& sum, const Span& span, const float* acc) {
  float* to = sum.shard + span.base;
  for (int i = 4 * threadIdx.x; i < span.size; i += 4 * kThreads) {
    if (sum.aligned && i + 4 <= span.size) {
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(acc + i);
    } else {
      for (int j = i; j < i + 4 && j < span.size; ++j) to[j] = acc[j];
    }
  }
}

// Adds messages `from` ... `from + count - 1` to spans `first` ... `last - 1`. Returns false if a message is invalid.
template <bool in_place>
__device__ bool add_messages(const RegionSum& sum, int64_t from, int count, int64_t first, int64_t last) {
  constexpr int kHeld = in_place ? 4 : kTile;
  alignas(16) __shared__ float acc[kHeld];
  __shared__ Cursor cursors[kTogether];
  __shared__ uint16_t ends[kTogether][kCells];
  const bool with_cells = sum.layout.num_cells > 0;
  bool valid = true;
  for (int m = warp(); m < count; m += kWarps) {
    valid = open_message(sum, message_at(sum, from + m), Span(sum, first), cursors[m]) && valid;
  }
  if (__syncthreads_or(!valid)) return false;
  for (int64_t number = first; number < last; ++number) {
    const Span span(sum, number);
    float* to = in_place ? sum.shard + span.base : acc;
    if (!in_place) load_span(sum, span, sum.clear && from == 0, acc);
    if (number > first && span.start == 0) {  // a new wire block
      __syncthreads();                        // thread 0 may still move a cursor
      advance(sum, from, count, span.block, cursors);
    }
    for (int m = warp(); with_cells && m < count; m += kWarps) {
      count_cells(sum, message_at(sum, from + m), span, ends[m]);
    }
    __syncthreads();
    for (int m = 0; m < count; ++m) {
      if (with_cells) {
        add_cells(sum, message_at(sum, from + m), span, ends[m], cursors[m], to);
      } else {
        add_message(sum, message_at(sum, from + m), span, cursors[m], to);
      }
    }
    if (!in_place) store_span(sum, span, acc);
  }
  __syncthreads();
  return true;
}

__device__ void poison(const RegionSum& sum, int64_t begin, int64_t end) {
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) sum.shard[i] = float_of(0x7FC00000u);
}

template <bool in_place>
__global__ void __launch_bounds__(kThreads, in_place ? 2 : 4) accumulate_kernel(ShardSum sums) {
  // 64-bit divisions are function calls. They come before the constructor of `sum`, whose registers would be spilled.
  const int64_t num_spans = (sums.regions.numel(blockIdx.y) + kTile - 1) / kTile;
  const int64_t first = num_spans * blockIdx.x / gridDim.x, last = num_spans * (blockIdx.x + 1) / gridDim.x;
  const RegionSum sum(sums, blockIdx.y);
  bool valid = true;
  for (int64_t from = 0; from < sum.num_messages && valid; from += kTogether) {
    const int64_t remaining = sum.num_messages - from;
    valid =
        add_messages<in_place>(sum, from, static_cast<int>(remaining < kTogether ? remaining : kTogether), first, last);
  }
  if (!valid) poison(sum, first * kTile, last * kTile < sum.numel ? last * kTile : sum.numel);  // all blocks do this
  if (arrives_last(&sum.flags->finished, gridDim.x) && peek(&sum.flags->damaged)) poison(sum, 0, sum.numel);
}

}  // namespace

void accumulate(const uint8_t* messages, int64_t num_messages, const Regions& regions, float* shard, int64_t k,
                Dtype value_dtype, const float* alpha, void* scratch, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  auto* flags = static_cast<Flags*>(scratch);
  const ShardSum sums{.regions = regions,
                      .messages = messages,
                      .num_messages = num_messages,
                      .row_nbytes = row_nbytes(regions, k, value_dtype),
                      .k = k,
                      .dtype = value_dtype,
                      .shard = shard,
                      .clear = alpha == nullptr,
                      .alpha = alpha ? *alpha : 1.0f,
                      .flags = flags};
  check(cudaMemsetAsync(flags, 0, regions.count * sizeof(Flags), on));
  const dim3 blocks(blocks_of_region(regions, kTile), regions.count);
  if (alpha && num_messages * k * kSparse <= regions.numel(0)) {
    accumulate_kernel<true><<<blocks, kThreads, 0, on>>>(sums);
  } else {
    accumulate_kernel<false><<<blocks, kThreads, 0, on>>>(sums);
  }
  check(cudaGetLastError());
}

}  // namespace lightning_sparse::cuda
