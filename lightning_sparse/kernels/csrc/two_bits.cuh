// Writes the levels and the codes of each wire block of a two-bit message, and the residuals (two_bit.py). `emit` has
// written the values to the scratch memory, in order, and has cleared the codes.
#pragma once

#include "tile.cuh"

namespace lightning_sparse::cuda {
namespace {

// The pairs of a wire block.
struct WireBlock {
  const Problem& p;
  int64_t number, begin, end;

  __device__ float value(int64_t i) const { return p.sent_values[i]; }
};

struct Split {
  Rounding rounded;
  double at;
  Levels levels;
};

// Chooses the levels. It adds magnitudes as integers, in units of 2^(exponent - 36), so their order does not matter.
__device__ Split split(const WireBlock& block) {
  uint32_t largest = 0, least = 0;  // `least` is the largest inverted key: the inverse of the smallest key
  Count count = 0;
  for (int64_t i = block.begin + threadIdx.x; i < block.end; i += kThreads) {
    const uint32_t key = key_of(block.value(i));
    if (key >= kInfKey) continue;
    largest = key > largest ? key : largest;
    least = ~key > least ? ~key : least;
    ++count;
  }
  const Rounding rounded(max_of_block(largest));
  const double per_unit = power_of_two(36 - rounded.exponent), unit = power_of_two(rounded.exponent - 36);
  const double smallest = rounded(float_of(~max_of_block(least)));
  Count sum = 0;
  for (int64_t i = block.begin + threadIdx.x; i < block.end; i += kThreads) {
    const float x = block.value(i);
    if (key_of(x) < kInfKey) sum += static_cast<Count>(rounded(x) * per_unit);
  }
  const double num_finite = static_cast<double>(sum_of_block(count));
  const double total = static_cast<double>(sum_of_block(sum)) * unit;
  const double at = split_of(total, num_finite, smallest);
  Count above = 0, sum_above = 0;
  for (int64_t i = block.begin + threadIdx.x; i < block.end; i += kThreads) {
    const float x = block.value(i);
    if (key_of(x) >= kInfKey || !(rounded(x) > at)) continue;
    sum_above += static_cast<Count>(rounded(x) * per_unit), ++above;
  }
  const double of_above = static_cast<double>(sum_of_block(sum_above)) * unit;
  return {rounded, at, Levels(total, num_finite, of_above, static_cast<double>(sum_of_block(above)))};
}

// Sixteen codes form a word. Neighboring wire blocks may share a word, so the write is an atomic operation.
__device__ void write_codes(const WireBlock& block, const Split& split, uint32_t* words) {
  float* next_residual = offset_or_null(block.p.source.next_residual, block.number * kBlock);
  for (int64_t first = block.begin / 16 * 16; first < block.end; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    uint32_t word = 0;
    if (i >= block.begin && i < block.end) {
      const float x = block.value(i);
      const bool finite = key_of(x) < kInfKey;
      const uint32_t code = finite ? code_of(x, split.rounded(x) > split.at) : 0;
      word = code << 2 * (i % 16);
      if (next_residual) {
        const float sent = decode_two_bits(code, split.levels.lower, split.levels.upper);
        next_residual[block.p.sent_positions[i]] = finite ? __fsub_rn(x, sent) : 0.0f;
      }
    }
    for (int apart = 8; apart > 0; apart /= 2) word |= __shfl_xor_sync(kAllLanes, word, apart);
    if (lane() % 16 == 0 && i < block.end) atomicOr(&words[i / 16], word);
  }
}

__global__ void __launch_bounds__(kThreads) two_bits_kernel(Problems problems) {
  const Problem p = problem_of_block(problems);
  const MessageLayout layout(p.source.numel, p.k, Dtype::two_bit);
  const int64_t first = layout.num_blocks * blockIdx.x / gridDim.x;
  const int64_t last = layout.num_blocks * (blockIdx.x + 1) / gridDim.x;
  const auto* counts = reinterpret_cast<const uint32_t*>(p.message + layout.counts);
  Count before = 0;
  for (int64_t b = threadIdx.x; b < first; b += kThreads) before += counts[b];
  auto begin = static_cast<int64_t>(sum_of_block(before));
  for (int64_t b = first; b < last; ++b) {
    const WireBlock block{p, b, begin, begin + counts[b]};
    const Split chosen = split(block);
    if (threadIdx.x == 0) reinterpret_cast<Levels*>(p.message + layout.levels)[b] = chosen.levels;
    write_codes(block, chosen, reinterpret_cast<uint32_t*>(p.message + layout.values));
    begin = block.end;
  }
}

}  // namespace
}  // namespace lightning_sparse::cuda
