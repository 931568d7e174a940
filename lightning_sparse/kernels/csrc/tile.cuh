// Common code of the kernels: the problem of a selection and its scratch memory, the elements of a tile, and functions
// for the threads of a warp, the threads of a block, and the blocks of a launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "mstopk_cuda.h"

namespace lightning_sparse::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kTile = 4096;  // elements
constexpr int kDigits = 3, kBins = 2048;
static_assert(kBlock % kTile == 0 && kSpan == kTile, "a tile lies in one wire block, and is a span");

using Count = unsigned long long;

__host__ __device__ inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

struct Control {
  uint32_t threshold;
  uint32_t prefix;  // known digits of the k-th largest key; after `refine`, the whole key
  uint32_t digits;  // number of known digits
  Count remaining;  // how many of the k elements have this prefix; after `refine`, the number of ties to keep
  Count nonfinite;
  Count cursor;         // number of candidates, also if it exceeds the capacity
  Count items;          // items of `refine` that blocks have taken
  Count done[kDigits];  // completed items of `refine`, per digit
  Count groups;         // groups of `emit` that blocks have taken
};

struct Problem {
  Source source;
  int64_t k, num_tiles, capacity, target;
  bool forced, aligned;
  uint8_t* message;  // the output; null if the output is tensors
  Dtype value_dtype;
  void *kept_values, *kept_indices;
  Control* control;
  Count* bins;               // [kDigits][kBins]
  Count *above, *ties;       // per group of kWarps tiles; see emit.cuh
  int64_t* start;            // per tile: first candidate
  uint32_t* count;           // per tile: number of candidates
  float* values;             // candidates
  uint16_t* offsets;         // candidates: position within the tile
  float* sent_values;        // values of a two-bit message, until its levels are known
  uint16_t* sent_positions;  // their positions within the wire block
};

template <typename T>
void carve(char*& at, T*& pointer, int64_t count) {
  pointer = reinterpret_cast<T*>(at);
  at += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
}

// The argument of the kernels: one selection per region. `first` is a template for `problem_of_block`. Its source is
// the whole shard, and its k is not yet limited to the region. Its arrays begin with the part of region 0. Its
// num_tiles and capacity are large enough for every region.
struct Problems {
  Problem first;
  Regions regions;
  int64_t row_nbytes;  // from one message to the next
};

__host__ __device__ int64_t groups_of(const Problem& p) { return (p.num_tiles + kWarps - 1) / kWarps; }

// Lays out the arrays in the scratch memory, and returns its size. Nothing needs to be cleared before: the first
// kernels initialize the arrays of later kernels.
int64_t lay_out(Problems& problems, char* scratch) {
  char* at = scratch;
  Problem& p = problems.first;
  const int64_t count = problems.regions.count, groups = groups_of(p);
  carve(at, p.control, count);
  carve(at, p.bins, count * kDigits * kBins);
  carve(at, p.above, count * groups);
  carve(at, p.ties, count * groups);
  carve(at, p.start, count * p.num_tiles);
  carve(at, p.count, count * p.num_tiles);
  carve(at, p.values, count * p.capacity);
  carve(at, p.offsets, count * p.capacity);
  const int64_t sent = p.value_dtype == Dtype::two_bit ? count * p.k : 0;
  carve(at, p.sent_values, sent);
  carve(at, p.sent_positions, sent);
  return at - scratch;
}

// Returns the number of CUDA blocks per region: at most one per `item` elements, and about kMostBlocks in all regions.
unsigned blocks_of_region(const Regions& regions, int64_t item) {
  return static_cast<unsigned>(
      std::min((kMostBlocks + regions.count - 1) / regions.count, (regions.most() + item - 1) / item));
}

// Returns the problem of this block's region.
__device__ Problem problem_of_block(const Problems& problems) {
  const unsigned region = blockIdx.y;
  Problem p = problems.first;
  p.source = part_of(p.source, problems.regions, region);
  p.aligned = is_aligned(p.source.grad) && is_aligned(p.source.residual) && is_aligned(p.source.next_residual);
  p.k = p.k < p.source.numel ? p.k : p.source.numel;
  p.message = offset_or_null(p.message, region * problems.row_nbytes);
  p.control += region;
  p.bins += region * (kDigits * kBins);
  p.above += region * groups_of(p), p.ties += region * groups_of(p);
  p.start += region * p.num_tiles, p.count += region * p.num_tiles;
  p.values += region * p.capacity, p.offsets += region * p.capacity;
  p.sent_values += region * problems.first.k, p.sent_positions += region * problems.first.k;
  return p;
}

// -------------------------------------------------------------------------------------------------------- the elements

template <Dtype dtype>
__device__ float acc_at(const Source& source, int64_t i) {
  float acc;
  if constexpr (dtype == Dtype::fp32) acc = static_cast<const float*>(source.grad)[i];
  if constexpr (dtype == Dtype::bf16) acc = from_bf16(static_cast<const uint16_t*>(source.grad)[i]);
  if constexpr (dtype == Dtype::fp16) acc = from_fp16(static_cast<const uint16_t*>(source.grad)[i]);
  if (source.scale) acc = __fmul_rn(acc, *source.scale);
  return source.residual ? __fadd_rn(source.residual[i], acc) : acc;
}

// Returns acc; call it after the pass.
__device__ float stored_at(const Source& source, int64_t i) {
  if (source.next_residual) return source.next_residual[i];
  if (source.dtype == Dtype::fp32) return acc_at<Dtype::fp32>(source, i);
  return source.dtype == Dtype::bf16 ? acc_at<Dtype::bf16>(source, i) : acc_at<Dtype::fp16>(source, i);
}

__device__ bool candidates_fail(const Problem& p) {
  const Control& control = *p.control;
  return p.forced || control.cursor < static_cast<Count>(p.k) || control.cursor > static_cast<Count>(p.capacity);
}

// The candidates of a tile, or all its elements if the candidates are not used. Past the last tile, it is empty.
struct Tile {
  const Problem& p;
  int64_t base, first = 0, size = 0;
  bool whole;

  __device__ Tile(const Problem& problem, int64_t tile, bool whole) : p(problem), base(tile * kTile), whole(whole) {
    const int64_t left = p.source.numel - base;
    if (left <= 0) return;
    first = whole ? base : p.start[tile];
    size = whole ? (left < kTile ? left : kTile) : p.count[tile];
  }
  __device__ float value(int64_t i) const { return whole ? stored_at(p.source, first + i) : p.values[first + i]; }
  __device__ int64_t index(int64_t i) const { return base + (whole ? i : p.offsets[first + i]); }
};

// ------------------------------------------------------------------------------------------------------------ a warp

__device__ int lane() { return static_cast<int>(threadIdx.x % 32); }
__device__ int warp() { return static_cast<int>(threadIdx.x / 32); }

__device__ int below_this_lane(unsigned ballot) { return __popc(ballot & ((1u << lane()) - 1u)); }

// With shuffles, because __reduce_add_sync and __reduce_max_sync need sm_80 and do not support 64 bits.
template <typename T>
__device__ T sum_of_warp(T value) {
  for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(kAllLanes, value, apart);
  return value;
}

__device__ uint32_t max_of_warp(uint32_t value) {
  for (int apart = 16; apart > 0; apart /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, value, apart);
    value = other > value ? other : value;
  }
  return value;
}

// ------------------------------------------------------------------------------------- a block: all threads call these

__device__ Count sum_of_block(Count value) {
  __shared__ Count of_warps[kWarps];
  value = sum_of_warp(value);
  __syncthreads();  // an earlier call may still be reading
  if (lane() == 0) of_warps[warp()] = value;
  __syncthreads();
  Count total = 0;
  for (int w = 0; w < kWarps; ++w) total += of_warps[w];
  return total;
}

__device__ uint32_t max_of_block(uint32_t value) {
  __shared__ uint32_t of_warps[kWarps];
  value = max_of_warp(value);
  __syncthreads();
  if (lane() == 0) of_warps[warp()] = value;
  __syncthreads();
  uint32_t most = 0;
  for (int w = 0; w < kWarps; ++w) most = of_warps[w] > most ? of_warps[w] : most;
  return most;
}

// Returns the sum of the counts of all warps before this warp. `total` receives the sum of all warps. All lanes of a
// warp pass the same count. Call it once per kernel, because no barrier protects `counts` from a second call.
__device__ int before_this_warp(int count, int& total) {
  __shared__ int counts[kWarps];
  if (lane() == 0) counts[warp()] = count;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int other = 0; other < kWarps; ++other) {
    if (other == warp()) before = total;
    total += counts[other];
  }
  return before;
}

// ------------------------------------------------------------------------------------------------ blocks of one launch
//
// Blocks may run in any order, and not all at once. So a block takes its work from a counter, and waits only for work
// with a lower number. The block with that work has already started, and waits only for even lower numbers, so waiting
// never deadlocks.

__device__ Count take(Count* counter) {
  __shared__ Count taken;
  __syncthreads();  // an earlier call may still be reading
  if (threadIdx.x == 0) taken = atomicAdd(counter, 1);
  __syncthreads();
  return taken;
}

template <typename T>
__device__ T peek(const T* at) {
  return *static_cast<const volatile T*>(at);
}

template <typename T>
__device__ void put(T* at, T value) {
  *static_cast<volatile T*>(at) = value;
}

// Waits until *at >= value. Afterwards, this block sees all writes that other blocks made before they announced it.
__device__ void wait_for(const uint32_t* at, uint32_t value) {
  if (threadIdx.x == 0) {
    while (peek(at) < value) {
    }
    __threadfence();
  }
  __syncthreads();
}

__device__ void announce(uint32_t* at, uint32_t value) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  put(at, value);
}

// Counts a call, and returns whether it is the last of `total` calls. The last block sees all writes that other blocks
// made before their calls.
__device__ bool arrives_last(Count* calls, Count total) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(calls, 1) == total - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace
}  // namespace lightning_sparse::cuda
