// Shared by the selection kernels: the problem and its scratch memory, the elements of a tile, ordered counting.
//
// A warp owns 512 consecutive elements of its tile, in 16 rounds of 32, so that ballots number kept elements in order.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "mstopk_cuda.h"

namespace lightning_sparse::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kRounds = 16;
constexpr int kTile = kThreads * kRounds;
constexpr int kScanThreads = 1024;
constexpr int kHistogramBlocks = 1024;
constexpr int kDigits = 3, kBins = 2048;
static_assert(kBlock % kTile == 0, "a tile lies in one wire block");

using Count = unsigned long long;

struct Control {
  uint32_t threshold;
  uint32_t prefix;  // of the k-th largest key, so far; all of it after the last digit
  Count cursor;     // candidates found
  Count remaining;  // of the k, how many share the prefix; after the last digit, how many ties are kept
  Count nonfinite;
  uint32_t largest;  // key of the largest finite
  int32_t exponent;
};

// Passed to kernels by value.
struct Problem {
  Source source;
  int64_t k, num_tiles, capacity, target;
  bool forced;
  Control* control;
  uint32_t* sample;                        // [kSampleBins]
  Count* bins;                             // [kDigits][kBins]
  int64_t* start;                          // per tile: its first candidate
  int64_t* slot;                           // per tile: its first output
  uint32_t *count, *above, *ties, *quota;  // per tile
  float* values;                           // candidates
  uint16_t* offsets;                       // candidates, within their tile
};

template <typename T>
void carve(char*& at, T*& pointer, int64_t count) {
  pointer = reinterpret_cast<T*>(at);
  at += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
}

// Lays out the arrays in the scratch memory; returns its size and the size of the part that must be zeroed.
std::pair<int64_t, int64_t> lay_out(Problem& p, char* scratch) {
  char* at = scratch;
  carve(at, p.control, 1);
  carve(at, p.sample, kSampleBins);
  carve(at, p.bins, kDigits * kBins);
  const int64_t zeroed = at - scratch;
  carve(at, p.start, p.num_tiles);
  carve(at, p.slot, p.num_tiles);
  carve(at, p.count, p.num_tiles);
  carve(at, p.above, p.num_tiles);
  carve(at, p.ties, p.num_tiles);
  carve(at, p.quota, p.num_tiles);
  carve(at, p.values, p.capacity);
  carve(at, p.offsets, p.capacity);
  return {at - scratch, zeroed};
}

// ------------------------------------------------------------------------------------------------------ on the device

__device__ float acc_at(const Source& source, int64_t i) {
  float acc;
  if (source.dtype == Dtype::fp32) {
    acc = static_cast<const float*>(source.grad)[i];
  } else if (source.dtype == Dtype::bf16) {
    acc = from_bf16(static_cast<const uint16_t*>(source.grad)[i]);
  } else {
    acc = from_fp16(static_cast<const uint16_t*>(source.grad)[i]);
  }
  if (source.scale) acc = __fmul_rn(acc, *source.scale);
  return source.residual ? __fadd_rn(source.residual[i], acc) : acc;
}

// acc, after the pass.
__device__ float stored_at(const Source& source, int64_t i) {
  return source.store ? source.store[i] : acc_at(source, i);
}

__device__ bool candidates_fail(const Problem& p) {
  const Control& control = *p.control;
  return p.forced || control.cursor < static_cast<Count>(p.k) || control.cursor > static_cast<Count>(p.capacity);
}

// A tile's candidates, or all its elements if the candidates are not used.
struct Tile {
  const Problem& p;
  int64_t first, size;
  bool whole;

  __device__ Tile(const Problem& problem, int64_t tile, bool whole)
      : p(problem), first(whole ? tile * kTile : problem.start[tile]), whole(whole) {
    const int64_t left = p.source.numel - tile * kTile;
    size = whole ? (left < kTile ? left : kTile) : p.count[tile];
    base = tile * kTile;
  }
  __device__ float value(int64_t i) const { return whole ? stored_at(p.source, first + i) : p.values[first + i]; }
  __device__ int64_t index(int64_t i) const { return base + (whole ? i : p.offsets[first + i]); }

 private:
  int64_t base;
};

__device__ int place(int round) { return (threadIdx.x / 32) * (32 * kRounds) + round * 32 + threadIdx.x % 32; }

// The sum of the counts of the warps before this one; `total` is the sum of all. All threads of the block must call it.
__device__ int before_this_warp(int count, int& total) {
  __shared__ int counts[kWarps];
  __syncthreads();  // an earlier call may still be reading
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = count;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp == static_cast<int>(threadIdx.x / 32)) before = total;
    total += counts[warp];
  }
  return before;
}

__device__ int below_this_lane(unsigned ballot) { return __popc(ballot & ((1u << (threadIdx.x % 32)) - 1u)); }

// sums[i] becomes the sum of sums[i] ... sums[size - 1]. All threads of the block must call it.
__device__ void suffix_sums(Count* sums, int size) {
  for (int step = 1; step < size; step *= 2) {
    __syncthreads();
    Count mine[2];
    for (int i = threadIdx.x, j = 0; i < size; i += blockDim.x, ++j) mine[j] = i + step < size ? sums[i + step] : 0;
    __syncthreads();
    for (int i = threadIdx.x, j = 0; i < size; i += blockDim.x, ++j) sums[i] += mine[j];
  }
  __syncthreads();
}

}  // namespace
}  // namespace lightning_sparse::cuda
