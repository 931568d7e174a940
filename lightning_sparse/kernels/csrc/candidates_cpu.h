// Collects the candidates, the elements that may be among the k largest, in one pass over memory.
//
// The source is split into ranges of consecutive 65,536-element blocks. So the candidates of a range are ascending, and
// no two ranges add to the same block count of a message. A worker appends the candidates of its ranges to its own
// buffer, and each range records its start there. The results do not depend on the assignment of ranges to workers.
//
// If acc is stored, the pass also settles the elements that will probably be sent: while their chunk is in the L1
// cache, it writes acc - decoded(acc) instead of acc. Afterwards, only wrong guesses are corrected, because a random
// access costs as much as a hundred sequential accesses.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "source_cpu.h"

namespace lightning_sparse::cpu {

constexpr int64_t kSortBelow = 4096;  // up to this many elements: no sample, and nth_element instead of histograms
constexpr int kLowBits = 15;          // keys have 31 bits: 16 high bits, 15 low bits
constexpr int64_t kHighBins = (kNanKey >> kLowBits) + 1;
constexpr uint32_t kNever = 0xFFFFFFFFu;  // above every key
constexpr int64_t kRangesPerThread = 8;
constexpr size_t kSpareBytes = size_t{64} << 20;  // larger buffers are freed after a call

// Takes n elements from `begin` on, at most kChunk. Writes acc and position of each element that reaches the threshold,
// and returns their number. `first` is the position of element `begin`. Stores acc of all elements if needed.
int64_t pack(const Source& source, int64_t begin, int64_t n, uint32_t first, uint32_t threshold, uint32_t* positions,
             float* values);

struct Tally {
  int64_t above = 0, ties = 0, nonfinite = 0;  // numbers of keys above the k-th key, equal to it, and not finite
};

struct Range {
  int64_t begin, end;
  const uint32_t* positions = nullptr;  // positions of its candidates, relative to begin
  const float* values = nullptr;
  int64_t count = 0;
  bool overflow = false;
  Tally tally;
};

inline std::vector<Range> make_ranges(int64_t numel, int64_t threads) {
  const int64_t blocks = (numel + kBlock - 1) / kBlock;
  const int64_t at_least = (numel >> 31) + 1;  // positions within a range have 32 bits
  const int64_t count = std::min(blocks, std::max(threads == 1 ? 1 : kRangesPerThread * threads, at_least));
  std::vector<Range> ranges(static_cast<size_t>(count));
  for (int64_t r = 0; r < count; ++r) {
    ranges[r].begin = blocks * r / count * kBlock;
    ranges[r].end = std::min(numel, blocks * (r + 1) / count * kBlock);
  }
  return ranges;
}

// ------------------------------------------------------------------------------------------------- workers' memory

struct Worker {
  std::unique_ptr<uint32_t[]> positions;
  std::unique_ptr<float[]> values;
  int64_t capacity = 0, used = 0;
  std::vector<uint32_t> bins;

  void make_room(int64_t wanted) {
    used = 0;
    if (wanted <= capacity) return;
    positions.reset(new uint32_t[static_cast<size_t>(wanted)]);  // pages are allocated on first write
    values.reset(new float[static_cast<size_t>(wanted)]);
    capacity = wanted;
  }
};

using Workers = std::vector<Worker>;

// Calls reuse the buffers, because page faults cost more than the writes themselves.
inline thread_local std::unique_ptr<Workers> spare;

struct GiveBack {
  void operator()(Workers* workers) const {
    size_t nbytes = 0;
    for (const Worker& worker : *workers) nbytes += static_cast<size_t>(worker.capacity) * 8;
    spare.reset(nbytes <= kSpareBytes ? workers : (delete workers, nullptr));
  }
};

using Loan = std::unique_ptr<Workers, GiveBack>;

inline Loan borrow(int64_t count) {
  Loan workers(spare ? spare.release() : new Workers);
  workers->resize(static_cast<size_t>(count));
  return workers;
}

// -------------------------------------------------------------------------------------------------------- the elements

// Consecutive elements, or the elements at `positions`.
struct Run {
  const float* x;
  const uint32_t* positions;
  int64_t n, base;

  int64_t index(int64_t i) const { return base + (positions ? positions[i] : i); }
};

// The candidates of all ranges, or the whole source if the candidates are not usable.
struct Population {
  Source source;
  std::vector<Range> ranges;
  Loan workers;
  bool whole = false;
  bool tied = false;     // the k-th key is probably threshold - 1; candidates are the elements above it, fewer than k
  bool counted = false;  // the workers' bins hold a histogram of the candidates' high bits
  uint32_t threshold = 0;
  uint32_t settled_from = kNever;  // candidates with at least this key are settled

  int64_t count() const {
    if (whole) return source.numel;
    int64_t total = 0;
    for (const Range& range : ranges) total += range.count;
    return total;
  }

  template <typename Visit>  // visit(run), ascending, runs of at most kChunk
  void each(const Range& range, const Visit& visit) const {
    if (whole) {
      each_element(range.begin, range.end, visit);
    } else {
      each_candidate(range, 0, visit);
    }
  }

  template <typename Visit>
  void each_element(int64_t begin, int64_t end, const Visit& visit) const {
    scan(source, begin, end, [&](const float* x, int64_t n, int64_t first) { visit(Run{x, nullptr, n, first}); });
  }

  template <typename Visit>
  void each_candidate(const Range& range, int64_t from, const Visit& visit) const {
    for (int64_t i = from; i < range.count; i += kChunk) {
      visit(Run{range.values + i, range.positions + i, std::min(kChunk, range.count - i), range.begin});
    }
  }
};

// ------------------------------------------------------------------------------------------------------- the sample

struct Sample {
  uint32_t threshold;  // slightly more than k elements should reach it
  uint32_t middle;     // about k elements should reach it
  int64_t capacity;    // limit for the candidates of each worker
  bool tied = false;   // probably, the k-th key is threshold - 1
};

inline void fetch(const Source& source, int64_t first) {
  const int64_t width = value_bytes(source.dtype);
  for (int64_t i = first; i < first + kSamplePiece; i += 64 / width) {
    __builtin_prefetch(static_cast<const char*>(source.grad) + i * width);
  }
  for (int64_t i = first; source.residual && i < first + kSamplePiece; i += 16) __builtin_prefetch(source.residual + i);
}

template <typename Visit>  // visit(x, n, first index)
void scan_sample(const Source& source, int64_t pieces, const Visit& visit) {
  constexpr int64_t kAhead = 16;  // prefetch distance, because the pieces are scattered
  for (int64_t i = -kAhead; i < pieces; ++i) {
    if (i + kAhead < pieces) fetch(source, sample_piece(source.numel, i + kAhead, pieces));
    if (i < 0) continue;
    const int64_t first = sample_piece(source.numel, i, pieces);
    scan(source, first, first + kSamplePiece, visit);
  }
}

// Returns the key that more than half of the sampled keys in the bin have, if there is such a key, otherwise any key of
// the bin (Boyer and Moore's majority vote).
inline uint32_t usual_key(const Source& source, int64_t pieces, uint32_t bin, int shift) {
  uint32_t usual = bin << shift;
  int64_t lead = 0;
  scan_sample(source, pieces, [&](const float* x, int64_t n, int64_t) {
    for (int64_t j = 0; j < n; ++j) {
      const uint32_t key = key_of(x[j]);
      if (key >> shift != bin) continue;
      if (lead == 0) usual = key;
      lead += key == usual ? 1 : -1;
    }
  });
  return usual;
}

inline Sample sample(const Source& stored, int64_t k, std::vector<uint32_t>& bins) {
  const Source source = without_next_residual(stored);
  const int64_t pieces = std::clamp<int64_t>(source.numel / 512, 128, kSampleAll / kSamplePiece);
  const int64_t size = pieces * kSamplePiece;
  const SamplePlan plan = plan_sample(source.numel, k, size);
  if (source.numel <= kSortBelow || plan.target == 0) return {0, 0, source.numel};
  const int shift = size < kSampleAll ? kSampleShift + 3 : kSampleShift;  // coarser bins suffice for a small sample
  bins.assign(static_cast<size_t>(kNanKey >> shift) + 1, 0);
  scan_sample(source, pieces, [&](const float* x, int64_t n, int64_t) {
    for (int64_t j = 0; j < n; ++j) ++bins[key_of(x[j]) >> shift];
  });
  const auto expected =
      static_cast<int64_t>(static_cast<double>(size) * static_cast<double>(k) / static_cast<double>(source.numel));
  auto bin = static_cast<int64_t>(bins.size());
  int64_t reached = 0;
  while (bin > 0 && reached < expected) reached += bins[--bin];
  const auto middle = static_cast<uint32_t>(bin << shift);
  while (bin > 0 && reached < plan.target) reached += bins[--bin];
  const auto threshold = static_cast<uint32_t>(bin << shift);
  // If too many elements would be candidates, many of them are probably equal. Then only the elements above the most
  // frequent key become candidates.
  if (static_cast<double>(reached) * source.numel > static_cast<double>(plan.capacity) * size && threshold < kInfKey) {
    const uint32_t tie = usual_key(source, pieces, static_cast<uint32_t>(bin), shift);
    if (tie < kInfKey) return {tie + 1, kNever, plan.capacity, true};
  }
  // Thresholds are at most kInfKey, so that all non-finite elements are candidates: only candidates are counted, and
  // their residuals must become zero.
  return {std::min(threshold, kInfKey), std::min(middle, kInfKey), plan.capacity};
}

// --------------------------------------------------------------------------------------------------------- the pass

// Returns the residual of a sent element.
template <Dtype dtype>
float residual_of(float acc) {
  if (key_of(acc) >= kInfKey) return 0.0f;
  return acc - decode_value(encode_value(acc, dtype), dtype);
}

// For candidates of one chunk whose key is at least `from`, replaces acc by the residual. `acc` begins with
// the range. The loop uses masks, because branches would be mispredicted. MessageSink corrects non-finite elements
// later.
template <Dtype dtype>
void settle(float* acc, const uint32_t* positions, const float* values, int64_t n, uint32_t from) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = values[i];
    const uint32_t key = key_of(x), settled = 0u - static_cast<uint32_t>(key >= from);
    const uint32_t residual = dtype == Dtype::bf16 ? bits_of(x - from_bf16(to_bf16(x))) : 0u;
    acc[positions[i]] = float_of((residual & settled) | (bits_of(x) & ~settled));
  }
}

// How to process a chunk's candidates while they are in the L1 cache.
struct Treatment {
  uint32_t threshold, settled_from;
  Dtype value_dtype;
  bool counted;
};

inline void pack_range(const Source& source, Range& range, Worker& worker, int64_t capacity, const Treatment& how) {
  uint32_t* positions = worker.positions.get() + worker.used;
  float* values = worker.values.get() + worker.used;
  capacity -= worker.used;
  for (int64_t begin = range.begin; begin < range.end; begin += kChunk) {
    const int64_t n = std::min(kChunk, range.end - begin);
    range.overflow = range.overflow || range.count + n > capacity;
    if (range.overflow) {
      if (source.next_residual) acc_of(source, begin, n, source.next_residual + begin);
      continue;
    }
    uint32_t* at = positions + range.count;
    float* acc = values + range.count;
    const int64_t found = pack(source, begin, n, static_cast<uint32_t>(begin - range.begin), how.threshold, at, acc);
    for (int64_t i = 0; how.counted && i < found; ++i) ++worker.bins[key_of(acc[i]) >> kLowBits];
    if (how.settled_from != kNever) {
      const auto settle_as = how.value_dtype == Dtype::bf16 ? settle<Dtype::bf16> : settle<Dtype::fp32>;
      settle_as(source.next_residual + range.begin, at, acc, found, how.settled_from);
    }
    range.count += found;
  }
  range.positions = positions, range.values = values;
  worker.used += range.count;
}

// Restores acc of settled elements.
inline void unsettle(Population& population, const Source& source, const Parallel& parallel) {
  auto& ranges = population.ranges;
  parallel.run(static_cast<int64_t>(ranges.size()), [&](int64_t r, int64_t) {
    const Range& range = ranges[r];
    for (int64_t i = 0; i < range.count; ++i) source.next_residual[range.begin + range.positions[i]] = range.values[i];
  });
  population.settled_from = kNever;
}

// Returns a population that contains the k largest elements, as candidates if possible. It does not settle two-bit
// values, because their rounding depends on all values of their block.
inline Population gather(const Source& source, int64_t k, Dtype value_dtype, bool use_whole, const Parallel& parallel) {
  Population population{source, make_ranges(source.numel, parallel.threads), borrow(parallel.threads)};
  auto& ranges = population.ranges;
  auto& workers = *population.workers;
  const Sample chosen = sample(source, k, workers[0].bins);
  population.threshold = chosen.threshold;
  if (source.next_residual && value_dtype != Dtype::two_bit) population.settled_from = chosen.middle;
  // Room for one more chunk, because pack_range requires room for all elements of a chunk before it packs.
  const int64_t capacity = chosen.capacity + kChunk;
  for (Worker& worker : workers) worker.make_room(capacity + kPackSlack);
  population.counted = k > kSortBelow;
  for (Worker& worker : workers) worker.bins.assign(population.counted ? kHighBins : 0, 0);
  const Treatment how{chosen.threshold, population.settled_from, value_dtype, population.counted};
  parallel.run(static_cast<int64_t>(ranges.size()),
               [&](int64_t r, int64_t worker) { pack_range(source, ranges[r], workers[worker], capacity, how); });
  const bool overflow = std::any_of(ranges.begin(), ranges.end(), [](const Range& range) { return range.overflow; });
  const int64_t found = population.count();
  population.tied = chosen.tied && !overflow && found < k && !use_whole;
  population.whole = !population.tied && (overflow || found < k || use_whole);
  if (population.whole && population.settled_from != kNever) unsettle(population, source, parallel);
  // The pass has stored acc, so later steps read acc instead of computing it again.
  population.source =
      source.next_residual ? Source{source.next_residual, Dtype::fp32, source.numel} : without_next_residual(source);
  return population;
}

}  // namespace lightning_sparse::cpu
