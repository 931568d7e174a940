// How the CPU cuts a source into ranges, and what mode "paper" must know of all elements: mean, maximum, what is
// finite.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "source_cpu.h"

namespace lightning_sparse::cpu {

struct Range {
  int64_t begin, end;
  std::unique_ptr<uint32_t[]> positions;  // relative to begin
  std::unique_ptr<float[]> values;
  int64_t count = 0;
  bool overflow = false;
  // what `tally` finds
  int64_t certain = 0, band = 0, nonfinite = 0;
  uint32_t largest = 0;  // key of the largest finite
};

inline std::vector<Range> make_ranges(int64_t numel, int64_t threads) {
  const int64_t blocks = (numel + kBlock - 1) / kBlock;
  const int64_t at_least = (numel >> 31) + 1;  // positions in a range have 32 bits
  const int64_t count = std::min(blocks, std::max(threads, at_least));
  std::vector<Range> ranges(static_cast<size_t>(count));
  for (int64_t r = 0; r < count; ++r) {
    ranges[r].begin = blocks * r / count * kBlock;
    ranges[r].end = std::min(numel, blocks * (r + 1) / count * kBlock);
  }
  return ranges;
}

struct Statistics {
  float mean = 0, largest = 0;
  int64_t nonfinite = 0;
};

inline double block_sum(const float* x, int64_t n, Range& range) {
  double lanes[kMeanLanes] = {};
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = key_of(x[i]);
    const bool finite = key < kInfKey;
    lanes[i % kMeanLanes] += finite ? static_cast<double>(float_of(key)) : 0.0;
    range.nonfinite += !finite;
    range.largest = std::max(range.largest, finite ? key : 0);
  }
  for (int half = kMeanLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// In the order of reference.mean_of.
inline Statistics statistics(const Source& source, const Parallel& parallel) {
  auto ranges = make_ranges(source.numel, parallel.threads);
  const int64_t blocks = (source.numel + kMeanBlock - 1) / kMeanBlock;
  int64_t padded = 1;
  while (padded < blocks) padded *= 2;
  std::vector<double> sums(static_cast<size_t>(padded));
  parallel.run(static_cast<int64_t>(ranges.size()), [&](int64_t r) {
    scan(source, ranges[r].begin, ranges[r].end,
         [&](const float* x, int64_t n, int64_t first) { sums[first / kMeanBlock] = block_sum(x, n, ranges[r]); });
  });
  for (int64_t half = padded / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  Statistics result;
  uint32_t largest = 0;
  for (const Range& range : ranges) {
    result.nonfinite += range.nonfinite;
    largest = std::max(largest, range.largest);
  }
  result.largest = float_of(largest);
  const int64_t finite = source.numel - result.nonfinite;
  if (finite > 0) result.mean = static_cast<float>(sums[0] / static_cast<double>(finite));
  return result;
}

}  // namespace lightning_sparse::cpu
