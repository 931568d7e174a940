// Exact selection in one pass over memory.
//
//   sample   65,536 elements give a threshold that a little more than k elements should reach
//   pass     read everything once, keep (position, value) of what reaches it (and write acc, if asked to)
//   refine   the k-th largest key among these candidates, by a histogram of the high and then of the low bits
//   emit     candidates above the k-th key, and of those equal to it the first ones, straight into the output
//
// A range is a run of whole 65,536-element blocks; each is handled by one thread, so candidates come out ascending and
// block counts of a message are written without sharing. The sample decides only how much work there is: if it kept too
// few or too many, "refine" and "emit" run over all elements instead of the candidates, in bounded memory. So the
// result is the same for any number of threads and on any path.
#include "mstopk_cpu.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "pack.h"
#include "source_cpu.h"
#include "statistics_cpu.h"

namespace lightning_sparse::cpu {
namespace {

constexpr int64_t kSortBelow = 4096;
constexpr int kLowBits = 15;  // keys have 31 bits: 16 high ones, 15 low ones
constexpr int64_t kHighBins = 1 << 16, kLowBins = 1 << kLowBits;

std::atomic<int> forced{kForceNothing};

using Pack = int64_t (*)(const float*, int64_t, uint32_t, uint32_t, uint32_t*, float*);

Pack choose_pack() {
#if LS_HAVE_AVX2
  static const bool fast =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
  if (fast && !scalar_only()) return pack_avx2;
#endif
  return pack_scalar;
}

// --------------------------------------------------------------------------------------------------------- candidates

// Either the candidates of all ranges or, when these are of no use, the whole source.
struct Population {
  Source source;
  std::vector<Range> ranges;
  bool whole = false;
  uint32_t threshold = 0;

  int64_t count() const {
    if (whole) return source.numel;
    int64_t total = 0;
    for (const Range& range : ranges) total += range.count;
    return total;
  }

  template <typename Visit>  // visit(index, value), ascending
  void each(const Range& range, const Visit& visit) const {
    if (!whole) {
      for (int64_t i = 0; i < range.count; ++i) visit(range.begin + range.positions[i], range.values[i]);
      return;
    }
    scan(source, range.begin, range.end, [&](const float* x, int64_t n, int64_t first) {
      for (int64_t i = 0; i < n; ++i) visit(first + i, x[i]);
    });
  }
};

struct Sample {
  uint32_t threshold;
  int64_t capacity;  // of candidates, in total; more is an overflow
};

Sample sample(const Source& stored, int64_t k) {
  const Source source = without_store(stored);
  const SamplePlan plan = plan_sample(source.numel, k);
  if (source.numel <= kSortBelow || plan.target == 0) return {0, source.numel};
  std::vector<uint32_t> bins(kSampleBins);
  const auto count = [&](const float* x, int64_t n, int64_t) {
    for (int64_t i = 0; i < n; ++i) ++bins[key_of(x[i]) >> kSampleShift];
  };
  if (source.numel <= kSampleAll) {
    scan(source, 0, source.numel, count);
  } else {
    for (int64_t i = 0; i < kSamplePieces; ++i) {
      const int64_t first = sample_piece(source.numel, i);
      scan(source, first, first + kSamplePiece, count);
    }
  }
  int64_t bin = kSampleBins, reached = 0;
  while (bin > 0 && reached < plan.target) reached += bins[--bin];
  return {std::min(static_cast<uint32_t>(bin << kSampleShift), kInfKey), plan.capacity};
}

void pack_range(const Source& source, Range& range, const Sample& chosen) {
  const Pack pack = choose_pack();
  const int64_t capacity = std::min(chosen.capacity, range.end - range.begin) + kChunk;
  scan(source, range.begin, range.end, [&](const float* x, int64_t n, int64_t first) {
    range.overflow = range.overflow || range.count + n > capacity;
    if (range.overflow) return;
    range.count += pack(x, n, static_cast<uint32_t>(first - range.begin), chosen.threshold,
                        range.positions.get() + range.count, range.values.get() + range.count);
  });
}

// The one pass. Afterwards the population holds the k largest, as candidates if possible.
Population gather(const Source& source, int64_t k, const Parallel& parallel) {
  const Sample chosen = sample(source, k);
  Population population{source, make_ranges(source.numel, parallel.threads), false, chosen.threshold};
  for (Range& range : population.ranges) {  // the system provides these pages only as they are written
    const int64_t capacity = std::min(chosen.capacity, range.end - range.begin) + kChunk + kPackSlack;
    range.positions.reset(new uint32_t[static_cast<size_t>(capacity)]);
    range.values.reset(new float[static_cast<size_t>(capacity)]);
  }
  auto& ranges = population.ranges;
  parallel.run(static_cast<int64_t>(ranges.size()), [&](int64_t r) { pack_range(source, ranges[r], chosen); });
  const bool overflow = std::any_of(ranges.begin(), ranges.end(), [](const Range& range) { return range.overflow; });
  population.whole = overflow || population.count() < k || (forced & kForceFallback);
  population.source = source.store ? Source{source.store, Dtype::fp32, source.numel} : without_store(source);
  return population;
}

// -------------------------------------------------------------------------------------------------------- the k-th key

using Bins = std::vector<std::vector<uint32_t>>;  // one histogram a range

struct Found {
  int64_t bin, above;  // above: how many lie in higher bins
};

Found find_bin(const Bins& bins, int64_t k) {
  int64_t above = 0;
  for (int64_t bin = static_cast<int64_t>(bins[0].size()) - 1;; --bin) {
    int64_t here = 0;
    for (const auto& histogram : bins) here += histogram[bin];
    if (above + here >= k || bin == 0) return {bin, above};
    above += here;
  }
}

uint32_t kth_by_sort(const Population& population, int64_t k) {
  std::vector<uint32_t> keys;
  keys.reserve(static_cast<size_t>(population.count()));
  for (const Range& range : population.ranges) {
    population.each(range, [&](int64_t, float x) { keys.push_back(key_of(x)); });
  }
  std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end(), std::greater<uint32_t>());
  return keys[static_cast<size_t>(k - 1)];
}

uint32_t kth_key(const Population& population, int64_t k, const Parallel& parallel) {
  if (population.count() <= kSortBelow) return kth_by_sort(population, k);
  const auto& ranges = population.ranges;
  const auto count = static_cast<int64_t>(ranges.size());
  Bins high(ranges.size(), std::vector<uint32_t>(kHighBins));
  parallel.run(count, [&](int64_t r) {
    uint32_t* bins = high[r].data();
    population.each(ranges[r], [&](int64_t, float x) { ++bins[key_of(x) >> kLowBits]; });
  });
  const Found first = find_bin(high, k);
  Bins low(ranges.size(), std::vector<uint32_t>(kLowBins));
  parallel.run(count, [&](int64_t r) {
    uint32_t* bins = low[r].data();
    population.each(ranges[r], [&](int64_t, float x) {
      const uint32_t key = key_of(x);
      if (static_cast<int64_t>(key >> kLowBits) == first.bin) ++bins[key & (kLowBins - 1)];
    });
  });
  return static_cast<uint32_t>(first.bin << kLowBits | find_bin(low, k - first.above).bin);
}

// ------------------------------------------------------------------------------------------------------- what is kept

void tally(Population& population, Bracket bracket, const Parallel& parallel) {
  population.whole = population.whole || bracket.lower < population.threshold;
  auto& ranges = population.ranges;
  parallel.run(static_cast<int64_t>(ranges.size()), [&](int64_t r) {
    int64_t certain = 0, band = 0, nonfinite = 0;
    uint32_t largest = 0;
    population.each(ranges[r], [&](int64_t, float x) {
      const uint32_t key = key_of(x);
      certain += key >= bracket.upper;
      band += key >= bracket.lower && key < bracket.upper;
      nonfinite += key >= kInfKey;
      largest = std::max(largest, key < kInfKey ? key : 0);
    });
    ranges[r].certain = certain, ranges[r].band = band, ranges[r].nonfinite = nonfinite, ranges[r].largest = largest;
  });
}

// Sends each range's share of the k kept elements to sink.keep(slot, index, value), slots ascending with the indices;
// sink.drop(index) hears of what is not finite and not kept.
template <typename Sink>
void emit(const Population& population, Bracket bracket, int64_t k, Sink& sink, const Parallel& parallel) {
  const auto& ranges = population.ranges;
  int64_t left = k;
  for (const Range& range : ranges) left -= range.certain;
  std::vector<int64_t> slots(ranges.size()), quotas(ranges.size());
  int64_t slot = 0;
  for (size_t r = 0; r < ranges.size(); ++r) {
    slots[r] = slot;
    quotas[r] = std::min(left, ranges[r].band);
    left -= quotas[r];
    slot += ranges[r].certain + quotas[r];
  }
  parallel.run(static_cast<int64_t>(ranges.size()), [&](int64_t r) {
    int64_t at = slots[r], quota = quotas[r];
    population.each(ranges[r], [&](int64_t index, float x) {
      const uint32_t key = key_of(x);
      if (key >= bracket.upper || (key >= bracket.lower && quota > 0)) {
        quota -= key < bracket.upper;
        sink.keep(at++, index, x);
      } else if (key >= kInfKey) {
        sink.drop(index);
      }
    });
  });
}

// ----------------------------------------------------------------------------------------------------- mode "paper"

// The population and, of mode "paper", the bracket; of mode "exact" the k-th key alone is the band.
Population choose(const Source& source, int64_t k, bool paper, Bracket& bracket, const Parallel& parallel) {
  const Statistics known = paper ? statistics(source, parallel) : Statistics{};
  if (paper && known.nonfinite < k && k < source.numel) {
    Population population = gather(source, k + 1, parallel);
    const float v = float_of(kth_key(population, k + 1, parallel));
    bracket = find_bracket(known.mean, known.largest, v, kIterations);
    return population;
  }
  Population population = gather(source, k, parallel);
  const uint32_t key = kth_key(population, k, parallel);
  bracket = {key, key + 1};
  return population;
}

// --------------------------------------------------------------------------------------------------------- the sinks

template <typename Index, typename Value>
struct TensorSink {
  const Value* x;
  Value* values;
  Index* indices;

  void keep(int64_t slot, int64_t index, float) {
    indices[slot] = static_cast<Index>(index);
    values[slot] = x[index];
  }
  void drop(int64_t) {}
};

template <typename Index>
struct TensorSink<Index, float> {
  float* values;
  Index* indices;

  void keep(int64_t slot, int64_t index, float value) {
    indices[slot] = static_cast<Index>(index);
    values[slot] = value;
  }
  void drop(int64_t) {}
};

struct MessageSink {
  uint8_t* message;
  Layout layout;
  Dtype dtype;
  int32_t exponent;
  float* residual;

  void keep(int64_t slot, int64_t index, float acc) {
    ++reinterpret_cast<uint32_t*>(message + layout.counts)[index / kBlock];
    reinterpret_cast<uint16_t*>(message + layout.indices)[slot] = static_cast<uint16_t>(index % kBlock);
    const uint32_t stored = encode_value(acc, exponent, dtype);
    if (dtype == Dtype::fp32) {
      reinterpret_cast<uint32_t*>(message + layout.values)[slot] = stored;
    } else {
      reinterpret_cast<uint16_t*>(message + layout.values)[slot] = static_cast<uint16_t>(stored);
    }
    if (!residual) return;
    residual[index] = key_of(acc) >= kInfKey ? 0.0f : acc - decode_value(stored, exponent, dtype);
  }
  void drop(int64_t index) {
    if (residual) residual[index] = 0.0f;
  }
};

template <typename Index>
void emit_tensors(const Population& population, const Source& source, Bracket bracket, int64_t k, void* values,
                  Index* indices, const Parallel& parallel) {
  if (source.dtype == Dtype::fp32) {
    TensorSink<Index, float> sink{static_cast<float*>(values), indices};
    emit(population, bracket, k, sink, parallel);
  } else {
    TensorSink<Index, uint16_t> sink{static_cast<const uint16_t*>(source.grad), static_cast<uint16_t*>(values),
                                     indices};
    emit(population, bracket, k, sink, parallel);
  }
}

}  // namespace

void force(int flags) { forced = flags; }

bool scalar_only() { return (forced & kForceScalar) != 0; }

void mstopk(const Source& source, int64_t k, bool paper, void* values, void* indices, const Parallel& parallel) {
  Bracket bracket{};
  Population population = choose(source, k, paper, bracket, parallel);
  tally(population, bracket, parallel);
  if (source.numel < (int64_t{1} << 31)) {
    emit_tensors(population, source, bracket, k, values, static_cast<int32_t*>(indices), parallel);
  } else {
    emit_tensors(population, source, bracket, k, values, static_cast<int64_t*>(indices), parallel);
  }
}

void compress(const Source& source, int64_t k, Dtype value_dtype, uint8_t* message, const Parallel& parallel) {
  Bracket bracket{};
  Population population = choose(source, k, false, bracket, parallel);
  tally(population, bracket, parallel);
  int64_t nonfinite = 0;
  uint32_t largest = 0;
  for (const Range& range : population.ranges) {
    nonfinite += range.nonfinite;
    largest = std::max(largest, range.largest);
  }
  if (nonfinite >= k) largest = 0;  // nothing finite is sent
  const Layout layout(source.numel, k, value_dtype);
  std::memset(message, 0, static_cast<size_t>(layout.indices));
  std::memset(message + layout.values - 16, 0, 16);  // the padding, of which k entries then overwrite their part
  std::memset(message + layout.nbytes - 16, 0, 16);
  const int32_t exponent = message_exponent(largest, value_dtype);
  const Header header{kMagic,       static_cast<int32_t>(std::min<int64_t>(nonfinite, INT32_MAX)),
                      exponent,     static_cast<int32_t>(value_dtype),
                      source.numel, k};
  std::memcpy(message, &header, sizeof header);
  MessageSink sink{message, layout, value_dtype, exponent, source.store};
  emit(population, bracket, k, sink, parallel);
}

}  // namespace lightning_sparse::cpu
