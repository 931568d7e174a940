// Rounding for 16-bit exchanges between nodes. One pass over memory rounds a shard. Another pass sums the received
// rows, one chunk at a time in the L1 cache.
#include <algorithm>
#include <type_traits>

#include "mstopk_cpu.h"
#include "source_cpu.h"

namespace lightning_sparse::cpu {
namespace {

constexpr int64_t kPerTask = 16 * kChunk;  // elements that a worker takes at a time

// Calls body(begin, end) for spans of `numel` elements.
template <typename Body>
void for_spans(int64_t numel, const Parallel& parallel, const Body& body) {
  parallel.run((numel + kPerTask - 1) / kPerTask,
               [&](int64_t span, int64_t) { body(span * kPerTask, std::min(numel, (span + 1) * kPerTask)); });
}

// Rounds x, and replaces x by the rounding error unless x is const.
template <typename Float>
inline void cast_one(Float& x, uint16_t& rounded) {
  rounded = cast_bf16(x);
  if constexpr (!std::is_const_v<Float>) x = lost_to_bf16(x, rounded);
}

// The same loop, compiled for AVX2: the compiler inlines and vectorizes it.
#if LS_HAVE_AVX2
template <typename Float>
LS_AVX2 void cast_avx2(Float* __restrict x, int64_t n, uint16_t* __restrict rounded) {
  for (int64_t i = 0; i < n; ++i) cast_one(x[i], rounded[i]);
}
#endif

template <typename Float>
void cast_each(Float* __restrict x, int64_t n, uint16_t* __restrict rounded) {
#if LS_HAVE_AVX2
  if (vectorized()) return cast_avx2(x, n, rounded);
#endif
  for (int64_t i = 0; i < n; ++i) cast_one(x[i], rounded[i]);
}

void add_each(const uint16_t* __restrict from, int64_t n, float* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] += from_bf16(from[i]);
}

}  // namespace

void round_rows(const Source& source, int64_t num_rows, uint16_t* rows, const Parallel& parallel) {
  for_spans(source.numel, parallel, [&](int64_t begin, int64_t end) {
    scan(source, begin, end, [&](const float* acc, int64_t n, int64_t at) {
      if (source.next_residual) {
        cast_each(source.next_residual + at, n, rows + at);
      } else {
        cast_each(acc, n, rows + at);
      }
    });
  });
  const int64_t padded = num_rows * row_numel(source.numel, num_rows);
  std::fill(rows + source.numel, rows + padded, uint16_t{0});
}

void sum_rows(const uint16_t* rows, int64_t num_rows, int64_t numel, uint16_t* row, float* residual,
              int64_t residual_numel, const Parallel& parallel) {
  for_spans(numel, parallel, [&](int64_t begin, int64_t end) {
    alignas(64) float sum[kChunk];
    for (int64_t at = begin; at < end; at += kChunk) {
      const int64_t n = std::min(kChunk, end - at);
      upcast<Dtype::bf16>(rows, at, n, sum);
      for (int64_t m = 1; m < num_rows; ++m) add_each(rows + m * numel + at, n, sum);
      cast_each(sum, n, row + at);
      const int64_t own = residual ? std::min(n, residual_numel - at) : 0;
      for (int64_t i = 0; i < own; ++i) residual[at + i] += sum[i];
    }
  });
}

}  // namespace lightning_sparse::cpu
