// Exact selection in one pass over memory.
//
//   sample   choose a threshold from up to 65,536 elements, so that slightly more than k elements should reach it
//   pass     read all elements once; copy elements that reach it (candidates), with positions; store acc if needed
//   refine   find the k-th largest key of the candidates, with histograms of the high bits, then of the low bits
//   emit     write the candidates above the k-th key, and the first candidates equal to it, to the output
//
// The sample affects only the amount of work. With too few or too many candidates, "refine" and "emit" process all
// elements instead, in bounded memory. If many elements tie at the threshold, only the elements above it are
// candidates, and `emit` reads the ties again. The result does not depend on the number of threads. "sample" and "pass"
// are in candidates_cpu.h.
#include "mstopk_cpu.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "candidates_cpu.h"
#include "pack.h"
#include "sinks_cpu.h"

namespace lightning_sparse::cpu {

namespace {
std::atomic<int> forced{kForceNothing};
}  // namespace

void force(int flags) { forced = flags; }

bool scalar_only() { return (forced & kForceScalar) != 0; }

#if LS_HAVE_AVX2
bool vectorized() {
  static const bool fast =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
  return fast && !scalar_only();
}

namespace {

// Packs whole groups of 64 elements. x is acc, or the place for acc if this function computes it.
int64_t pack_groups(const Source& source, const float* x, int64_t begin, int64_t n, uint32_t first, uint32_t threshold,
                    uint32_t* positions, float* values) {
  if (source.plain()) return pack_avx2(Loaded<8192>{x}, n, first, threshold, positions, values);
  if (!source.summed()) return pack_avx2(Loaded<0>{x}, n, first, threshold, positions, values);
  float* to = source.next_residual + begin;
  const float *grad = static_cast<const float*>(source.grad) + begin, *residual = source.residual + begin;
  if (!source.scale) {
    return pack_avx2(Summed<false>{to, grad, residual, 1.0f}, n, first, threshold, positions, values);
  }
  return pack_avx2(Summed<true>{to, grad, residual, *source.scale}, n, first, threshold, positions, values);
}

}  // namespace
#endif

int64_t pack(const Source& source, int64_t begin, int64_t n, uint32_t first, uint32_t threshold, uint32_t* positions,
             float* values) {
  alignas(64) float buffer[kChunk];
  float* to = source.next_residual ? source.next_residual + begin : buffer;
  int64_t groups = 0, kept = 0;
#if LS_HAVE_AVX2
  if (vectorized()) {
    groups = n / 64 * 64;
    const float* x = source.summed() ? to : acc_of(source, begin, groups, to);
    kept = pack_groups(source, x, begin, groups, first, threshold, positions, values);
  }
#endif
  const float* rest = acc_of(source, begin + groups, n - groups, to + groups);
  return kept + pack_scalar(rest, n - groups, first + static_cast<uint32_t>(groups), threshold, positions + kept,
                            values + kept);
}

namespace {

// -------------------------------------------------------------------------------------------------------- the k-th key

constexpr int64_t kLowBins = 1 << kLowBits;
constexpr int64_t kRefineAlone = 1 << 16, kEmitAlone = 1 << 16;  // up to this many elements run on one thread

struct Found {
  int64_t bin, above;  // above: number of elements in higher bins
};

// Returns the bin of the k-th largest of `total` elements. It searches upwards, because the k-th largest is among the
// smallest candidates.
Found find_bin(const Workers& workers, int64_t begin, int64_t end, int64_t total, int64_t k) {
  int64_t above = total;
  for (int64_t bin = begin; bin < end; ++bin) {
    for (const Worker& worker : workers) above -= worker.bins[static_cast<size_t>(bin)];
    if (above < k) return {bin, above};
  }
  return {end - 1, 0};
}

uint32_t kth_by_selection(const Population& population, int64_t k) {
  std::vector<uint32_t> keys;
  keys.reserve(static_cast<size_t>(population.count()));
  for (const Range& range : population.ranges) {
    population.each(range, [&](const Run& run) {
      for (int64_t i = 0; i < run.n; ++i) keys.push_back(key_of(run.x[i]));
    });
  }
  std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end(), std::greater<uint32_t>());
  return keys[static_cast<size_t>(k - 1)];
}

// Counts keys in the workers' bins. `bin_of` returns the bin, or a negative number to skip the key.
template <typename BinOf>
void count_into_bins(Population& population, int64_t num_bins, const BinOf& bin_of, const Parallel& parallel) {
  for (Worker& worker : *population.workers) worker.bins.assign(static_cast<size_t>(num_bins), 0);
  parallel.run(static_cast<int64_t>(population.ranges.size()), [&](int64_t r, int64_t worker) {
    uint32_t* bins = (*population.workers)[worker].bins.data();
    population.each(population.ranges[r], [&](const Run& run) {
      for (int64_t i = 0; i < run.n; ++i) {
        const int64_t bin = bin_of(key_of(run.x[i]));
        if (bin >= 0) ++bins[bin];
      }
    });
  });
}

uint32_t kth_key(Population& population, int64_t k, const Parallel& parallel) {
  const int64_t total = population.count();
  if (total <= kSortBelow) return kth_by_selection(population, k);
  const auto lowest = static_cast<int64_t>(population.whole ? 0 : population.threshold >> kLowBits);
  const auto high_of = [](uint32_t key) { return static_cast<int64_t>(key >> kLowBits); };
  if (population.whole || !population.counted) count_into_bins(population, kHighBins, high_of, parallel);
  const Found high = find_bin(*population.workers, lowest, kHighBins, total, k);
  int64_t inside = 0;
  for (const Worker& worker : *population.workers) inside += worker.bins[static_cast<size_t>(high.bin)];
  const auto low_of = [&](uint32_t key) {
    return high_of(key) == high.bin ? static_cast<int64_t>(key & (kLowBins - 1)) : int64_t{-1};
  };
  count_into_bins(population, kLowBins, low_of, parallel);
  const Found low = find_bin(*population.workers, 0, kLowBins, inside, k - high.above);
  return static_cast<uint32_t>(high.bin << kLowBits | low.bin);
}

// ------------------------------------------------------------------------------------------------------------ output

// For vectorization by the compiler: 32-bit counters, signed comparisons, and no branches on the counts.
Tally tally_of(const Run& run, uint32_t kth_key) {
  const auto kth = static_cast<int32_t>(kth_key);
  constexpr auto kInf = static_cast<int32_t>(kInfKey), kNan = static_cast<int32_t>(kNanKey);
  int32_t above = 0, ties = 0, nonfinite = 0;
  for (int64_t i = 0; i < run.n; ++i) {
    const auto bits = static_cast<int32_t>(bits_of(run.x[i]) & 0x7FFFFFFFu);
    const int32_t key = bits < kNan ? bits : kNan;
    above += key > kth;
    ties += key == kth;
    nonfinite += bits >= kInf;
  }
  return {above, ties, nonfinite};
}

void tally(Population& population, uint32_t kth, const Parallel& parallel) {
  auto& ranges = population.ranges;
  parallel.run(static_cast<int64_t>(ranges.size()), [&](int64_t r, int64_t) {
    Tally sum;
    population.each(ranges[r], [&](const Run& run) {
      const Tally more = tally_of(run, kth);
      sum.above += more.above, sum.ties += more.ties, sum.nonfinite += more.nonfinite;
    });
    ranges[r].tally = sum;
  });
}

// For the tied case, in which ties are not candidates: counts ties from the first range on, until there are enough.
// Returns false if there are too few ties. Then the k-th key is lower.
bool count_ties(Population& population, int64_t k) {
  const uint32_t kth = population.threshold - 1;
  int64_t left = k - population.count();
  for (Range& range : population.ranges) {
    for (int64_t at = range.begin; at < range.end && left > range.tally.ties; at += kChunk) {
      population.each_element(at, std::min(range.end, at + kChunk),
                              [&](const Run& run) { range.tally.ties += tally_of(run, kth).ties; });
    }
    left = std::max<int64_t>(0, left - range.tally.ties);
  }
  return left == 0;
}

Run part_of(const Run& run, int64_t begin, int64_t end) {
  return {run.x + begin, run.positions ? run.positions + begin : nullptr, end - begin,
          run.positions ? run.base : run.base + begin};
}

// Returns the number of elements up to and including the run's quota-th tie. The run has at least that many ties.
int64_t cut_of(const Run& run, uint32_t kth, int64_t quota) {
  int64_t i = 0;
  for (; quota > 0; ++i) quota -= key_of(run.x[i]) == kth;
  return i;
}

// Passes the runs of a range to sink.take(slot, end, run, bound). The sink writes the elements whose key reaches the
// bound to the slots from `slot` up to `end`, and returns the next slot. The bound is the k-th key until the range's
// quota of ties is used up. Then it is the next higher key.
template <typename Sink>
void emit_range(const Population& population, const Range& range, uint32_t kth, int64_t slot, int64_t quota,
                const Sink& sink) {
  const int64_t end = slot + range.tally.above + quota;
  const bool all = quota == range.tally.ties;
  population.each(range, [&](const Run& run) {
    if (all || quota == 0) {
      slot = sink.take(slot, end, run, all ? kth : kth + 1);
      return;
    }
    const int64_t ties = tally_of(run, kth).ties, cut = ties > quota ? cut_of(run, kth, quota) : run.n;
    quota -= std::min(ties, quota);
    slot = sink.take(slot, end, part_of(run, 0, cut), kth);
    slot = sink.take(slot, end, part_of(run, cut, run.n), kth + 1);
  });
}

// As emit_range, if ties are not candidates: passes all elements until the quota is used up, then candidates.
template <typename Sink>
void emit_tied_range(const Population& population, const Range& range, uint32_t kth, int64_t slot, int64_t quota,
                     const Sink& sink) {
  const int64_t end = slot + range.tally.above + quota;
  int64_t at = range.begin;
  while (quota > 0) {
    population.each_element(at, std::min(range.end, at + kChunk), [&](const Run& run) {
      const int64_t ties = tally_of(run, kth).ties, cut = ties >= quota ? cut_of(run, kth, quota) : run.n;
      quota -= std::min(ties, quota);
      slot = sink.take(slot, end, part_of(run, 0, cut), kth);
      at += cut;
    });
  }
  const auto* rest = std::lower_bound(range.positions, range.positions + range.count, at - range.begin);
  population.each_candidate(range, rest - range.positions,
                            [&](const Run& run) { slot = sink.take(slot, end, run, kth + 1); });
}

template <typename Sink>
void emit(const Population& population, uint32_t kth, int64_t k, const Sink& sink, const Parallel& parallel) {
  const auto& ranges = population.ranges;
  int64_t left = k;
  for (const Range& range : ranges) left -= range.tally.above;
  std::vector<int64_t> slots(ranges.size()), quotas(ranges.size());
  int64_t slot = 0;
  for (size_t r = 0; r < ranges.size(); ++r) {
    slots[r] = slot;
    quotas[r] = std::min(left, ranges[r].tally.ties);
    left -= quotas[r];
    slot += ranges[r].tally.above + quotas[r];
  }
  parallel.run(static_cast<int64_t>(ranges.size()), [&](int64_t r, int64_t) {
    const auto emit_one = population.tied ? emit_tied_range<Sink> : emit_range<Sink>;
    emit_one(population, ranges[r], kth, slots[r], quotas[r], sink);
  });
}

// ---------------------------------------------------------------------------------------------------------- selection

struct Choice {
  Population population;
  uint32_t kth;  // key of the k-th largest element
};

const Parallel& alone() {
  static const Parallel one{1, [](int64_t n, const std::function<void(int64_t, int64_t)>& body) {
                              for (int64_t i = 0; i < n; ++i) body(i, 0);
                            }};
  return one;
}

const Parallel& unless_few(int64_t count, int64_t few, const Parallel& parallel) {
  return count <= few ? alone() : parallel;
}

Choice choose(const Source& source, int64_t k, Dtype value_dtype, const Parallel& parallel) {
  const bool use_whole = (forced & kForceFallback) != 0;
  Choice choice{gather(source, k, value_dtype, use_whole, parallel), 0};
  Population& population = choice.population;
  const Parallel& on = unless_few(population.count(), kRefineAlone, parallel);
  if (population.tied) {
    choice.kth = population.threshold - 1;
    tally(population, choice.kth, on);
    if (count_ties(population, k)) return choice;
    population.tied = false, population.whole = true;
  }
  choice.kth = kth_key(population, k, unless_few(population.count(), kRefineAlone, parallel));
  tally(population, choice.kth, unless_few(population.count(), kRefineAlone, parallel));
  return choice;
}

// -------------------------------------------------------------------------------------------------------- the outputs

template <typename Index>
void emit_tensors(const Choice& choice, const Source& source, int64_t k, void* values, Index* indices,
                  const Parallel& parallel) {
  if (source.dtype == Dtype::fp32) {
    const TensorSink<Index, float> sink{nullptr, static_cast<float*>(values), indices};
    emit(choice.population, choice.kth, k, sink, parallel);
  } else {
    const auto* x = static_cast<const uint16_t*>(source.grad);
    const TensorSink<Index, uint16_t> sink{x, static_cast<uint16_t*>(values), indices};
    emit(choice.population, choice.kth, k, sink, parallel);
  }
}

template <Dtype dtype>
void emit_message(const Choice& choice, int64_t k, uint8_t* message, const MessageLayout& layout, float* residual,
                  const Kept* kept, const Parallel& parallel) {
  const Population& population = choice.population;
  if (layout.num_cells > 0) {
    const MessageSink<dtype, true> sink{message, layout, residual, population.settled_from, kept};
    emit(population, choice.kth, k, sink, parallel);
  } else {
    const MessageSink<dtype, false> sink{message, layout, residual, population.settled_from, kept};
    emit(population, choice.kth, k, sink, parallel);
  }
}

void emit_two_bits(const Choice& choice, int64_t k, uint8_t* message, const MessageLayout& layout, float* residual,
                   const Parallel& parallel) {
  const Kept kept(k);
  emit_message<Dtype::two_bit>(choice, k, message, layout, residual, &kept, parallel);
  const auto* counts = reinterpret_cast<const uint32_t*>(message + layout.counts);
  std::vector<int64_t> starts(static_cast<size_t>(layout.num_blocks) + 1);
  for (int64_t b = 0; b < layout.num_blocks; ++b) starts[b + 1] = starts[b] + counts[b];
  parallel.run(layout.num_blocks, [&](int64_t block, int64_t) {
    write_two_bits(kept, block, starts[block], starts[block + 1], message + layout.levels, residual);
  });
  pack_codes(kept, k, message + layout.values);
}

void compress_region(const Source& source, int64_t k, Dtype value_dtype, uint8_t* message, int64_t row_nbytes,
                     const Parallel& parallel) {
  const Choice choice = choose(source, k, value_dtype, parallel);
  int64_t nonfinite = 0;
  for (const Range& range : choice.population.ranges) nonfinite += range.tally.nonfinite;
  const MessageLayout layout(source.numel, k, value_dtype);
  std::memset(message, 0, static_cast<size_t>(layout.indices));
  // Clears the padding of the last two sections. `emit` then overwrites the bytes that hold indices and values.
  std::memset(message + layout.values - 16, 0, 16);
  std::memset(message + layout.nbytes - 16, 0, static_cast<size_t>(row_nbytes - layout.nbytes + 16));
  const Header header{kMagic,
                      static_cast<int32_t>(std::min<int64_t>(nonfinite, INT32_MAX)),
                      0,
                      static_cast<int32_t>(value_dtype),
                      source.numel,
                      k};
  std::memcpy(message, &header, sizeof header);
  const Parallel& on = unless_few(choice.population.count(), kEmitAlone, parallel);
  if (value_dtype == Dtype::two_bit) return emit_two_bits(choice, k, message, layout, source.next_residual, on);
  const auto send = value_dtype == Dtype::fp32 ? emit_message<Dtype::fp32> : emit_message<Dtype::bf16>;
  send(choice, k, message, layout, source.next_residual, nullptr, on);
}

}  // namespace

void mstopk(const Source& source, int64_t k, void* values, void* indices, const Parallel& parallel) {
  const Choice choice = choose(source, k, Dtype::fp32, parallel);
  const Parallel& on = unless_few(choice.population.count(), kEmitAlone, parallel);
  if (source.numel < (int64_t{1} << 31)) {
    emit_tensors(choice, source, k, values, static_cast<int32_t*>(indices), on);
  } else {
    emit_tensors(choice, source, k, values, static_cast<int64_t*>(indices), on);
  }
}

void compress(const Source& source, int64_t k, const Regions& regions, Dtype value_dtype, uint8_t* messages,
              const Parallel& parallel) {
  const int64_t nbytes = row_nbytes(regions, k, value_dtype);
  for (uint32_t region = 0; region < regions.count; ++region) {
    const Source part = part_of(source, regions, region);
    compress_region(part, std::min(k, part.numel), value_dtype, messages + region * nbytes, nbytes, parallel);
  }
}

}  // namespace lightning_sparse::cpu
