// Rounding for 16-bit exchanges between nodes, one launch each: `round_kernel` rounds a shard, and `sum_kernel` sums
// the received rows. Every input is read once, every output is written once, and threads share nothing.
#include <cuda_runtime.h>

#include "load.cuh"

namespace lightning_sparse::cuda {
namespace {

constexpr int kEight = 8;                     // elements that 16 bytes hold
constexpr int kPerBlock = kEight * kThreads;  // elements of a row that a block sums

struct Rounding {
  Source source;
  uint16_t* rows;
  int64_t padded;  // elements of all rows, including padding
  bool aligned;
};

struct RowSum {
  const uint16_t* rows;
  int64_t num_rows, numel;  // numel: elements per row
  uint16_t* row;
  float* residual;
  int64_t residual_numel;  // at most numel
  bool aligned;
};

__device__ uint32_t pair_of(const uint16_t* two) { return two[0] | static_cast<uint32_t>(two[1]) << 16; }

// Rounds x, and replaces x by the rounding errors.
template <int kCount>
__device__ void cast_each(float* x, uint16_t* rounded) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    rounded[e] = cast_bf16(x[e]);
    x[e] = lost_to_bf16(x[e], rounded[e]);
  }
}

template <int kCount>
__device__ void store_rounded(const Rounding& r, int64_t i, const uint16_t* rounded) {
  if (r.aligned && i + kCount <= r.padded) {
    if constexpr (kCount == 4) {
      *reinterpret_cast<uint2*>(r.rows + i) = {pair_of(rounded), pair_of(rounded + 2)};
    } else {
      *reinterpret_cast<uint4*>(r.rows + i) = {pair_of(rounded), pair_of(rounded + 2), pair_of(rounded + 4),
                                               pair_of(rounded + 6)};
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    if (i + e < r.padded) r.rows[i + e] = rounded[e];
  }
}

template <Dtype dtype>
__global__ void __launch_bounds__(kThreads, 4) round_kernel(Rounding r) {
  constexpr int kPer = kEach<dtype>, kTurns = kTile / kThreads / kPer;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.x * kPer;
  float acc[kTurns][kPer];
#pragma unroll
  for (int j = 0; j < kTurns; ++j) load_acc<dtype>(r.source, r.aligned, first + j * kThreads * kPer, acc[j]);
#pragma unroll
  for (int j = 0; j < kTurns; ++j) {
    const int64_t i = first + j * kThreads * kPer;
    uint16_t rounded[kPer];
    cast_each<kPer>(acc[j], rounded);
    store_rounded<kPer>(r, i, rounded);  // writes 0 to the padding, because acc is 0 there
    if (r.source.next_residual) store_acc<dtype>(r.source, r.aligned, i, acc[j]);
  }
}

// Returns the offset of a thread's e-th element in a span. With `together`, a thread accesses kEight neighbors as one
// vector. Otherwise its elements are kThreads apart, so that the lanes of a warp access neighbors. Rows need the second
// case if their length is not a multiple of kEight, because they are then not aligned.
template <bool together>
__device__ int place(int e) {
  return static_cast<int>(together ? kEight * threadIdx.x + e : threadIdx.x + kThreads * e);
}

template <bool together>
__device__ void load_row(const uint16_t* row, int64_t left, float* to) {
  if constexpr (together) {
    load_grad<Dtype::bf16>(row, place<true>(0), to);
  } else {
#pragma unroll
    for (int e = 0; e < kEight; ++e) to[e] = place<false>(e) < left ? from_bf16(row[place<false>(e)]) : 0.0f;
  }
}

template <bool together>
__device__ void store_row(uint16_t* row, int64_t left, const uint16_t* from) {
  if constexpr (together) {
    *reinterpret_cast<uint4*>(row + place<true>(0)) = {pair_of(from), pair_of(from + 2), pair_of(from + 4),
                                                       pair_of(from + 6)};
  } else {
#pragma unroll
    for (int e = 0; e < kEight; ++e) {
      if (place<false>(e) < left) row[place<false>(e)] = from[e];
    }
  }
}

template <bool together>
__device__ void add_to(float* residual, int64_t left, const float* more) {
  if constexpr (together) {
#pragma unroll
    for (int e = 0; e < kEight; e += 4) {
      auto* four = reinterpret_cast<uint4*>(residual + place<true>(e));
      float to[4];
      unpack(*four, to);
#pragma unroll
      for (int j = 0; j < 4; ++j) to[j] = __fadd_rn(to[j], more[e + j]);
      *four = {bits_of(to[0]), bits_of(to[1]), bits_of(to[2]), bits_of(to[3])};
    }
  } else {
#pragma unroll
    for (int e = 0; e < kEight; ++e) {
      if (place<false>(e) < left) residual[place<false>(e)] = __fadd_rn(residual[place<false>(e)], more[e]);
    }
  }
}

template <bool together>
__device__ void sum_span(const RowSum& s, int64_t base) {
  float sum[kEight];
  load_row<together>(s.rows + base, s.numel - base, sum);
#pragma unroll 4
  for (int64_t m = 1; m < s.num_rows; ++m) {
    float more[kEight];
    load_row<together>(s.rows + m * s.numel + base, s.numel - base, more);
#pragma unroll
    for (int e = 0; e < kEight; ++e) sum[e] = __fadd_rn(sum[e], more[e]);
  }
  uint16_t rounded[kEight];
  cast_each<kEight>(sum, rounded);
  store_row<together>(s.row + base, s.numel - base, rounded);
  if (s.residual) add_to<together>(s.residual + base, s.residual_numel - base, sum);
}

__global__ void __launch_bounds__(kThreads, 4) sum_kernel(RowSum s) {
  const int64_t base = static_cast<int64_t>(blockIdx.x) * kPerBlock;
  const int64_t whole = s.residual ? s.residual_numel : s.numel;
  if (s.aligned && base + kPerBlock <= whole) {
    sum_span<true>(s, base);
  } else {
    sum_span<false>(s, base);
  }
}

unsigned blocks_of(int64_t numel, int64_t each) { return static_cast<unsigned>((numel + each - 1) / each); }

}  // namespace

void round_rows(const Source& source, int64_t num_rows, uint16_t* rows, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const Rounding r{.source = source,
                   .rows = rows,
                   .padded = num_rows * row_numel(source.numel, num_rows),
                   .aligned = is_aligned(source.grad) && is_aligned(source.residual) &&
                              is_aligned(source.next_residual) && is_aligned(rows)};
  const unsigned blocks = blocks_of(r.padded, kTile);
  if (source.dtype == Dtype::fp32) round_kernel<Dtype::fp32><<<blocks, kThreads, 0, on>>>(r);
  if (source.dtype == Dtype::bf16) round_kernel<Dtype::bf16><<<blocks, kThreads, 0, on>>>(r);
  if (source.dtype == Dtype::fp16) round_kernel<Dtype::fp16><<<blocks, kThreads, 0, on>>>(r);
  check(cudaGetLastError());
}

void sum_rows(const uint16_t* rows, int64_t num_rows, int64_t numel, uint16_t* row, float* residual,
              int64_t residual_numel, void* stream) {
  const RowSum s{.rows = rows,
                 .num_rows = num_rows,
                 .numel = numel,
                 .row = row,
                 .residual = residual,
                 .residual_numel = residual_numel,
                 .aligned = is_aligned(rows) && numel % kEight == 0 && is_aligned(row) && is_aligned(residual)};
  const auto on = static_cast<cudaStream_t>(stream);
  sum_kernel<<<blocks_of(numel, kPerBlock), kThreads, 0, on>>>(s);
  check(cudaGetLastError());
}

}  // namespace lightning_sparse::cuda
