// What mode "paper" must know of all elements: mean, maximum, what is finite.
#pragma once

#include <algorithm>
#include <vector>

#include "candidates_cpu.h"

namespace lightning_sparse::cpu {

struct Statistics {
  float mean = 0, largest = 0;
  int64_t nonfinite = 0;
};

inline double block_sum(const float* x, int64_t n, Tally& tally) {
  double lanes[kMeanLanes] = {};
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = key_of(x[i]);
    const bool finite = key < kInfKey;
    lanes[i % kMeanLanes] += finite ? static_cast<double>(float_of(key)) : 0.0;
    tally.nonfinite += !finite;
    tally.largest = std::max(tally.largest, finite ? key : 0);
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
  parallel.run(static_cast<int64_t>(ranges.size()), [&](int64_t r, int64_t) {
    scan(source, ranges[r].begin, ranges[r].end, [&](const float* x, int64_t n, int64_t first) {
      sums[first / kMeanBlock] = block_sum(x, n, ranges[r].tally);
    });
  });
  for (int64_t half = padded / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  Statistics result;
  uint32_t largest = 0;
  for (const Range& range : ranges) {
    result.nonfinite += range.tally.nonfinite;
    largest = std::max(largest, range.tally.largest);
  }
  result.largest = float_of(largest);
  const int64_t finite = source.numel - result.nonfinite;
  if (finite > 0) result.mean = static_cast<float>(sums[0] / static_cast<double>(finite));
  return result;
}

}  // namespace lightning_sparse::cpu
