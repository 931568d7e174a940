// Outputs of the selection: two tensors, or a message and the residual.
#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <type_traits>
#include <vector>

#include "candidates_cpu.h"

namespace lightning_sparse::cpu {

// Both sinks write each element, and advance only if they keep it. Branches would be mispredicted.
template <typename Index, typename Value>
struct TensorSink {
  const Value* x;
  Value* values;
  Index* indices;

  int64_t take(int64_t slot, int64_t end, const Run& run, uint32_t bound) const {
    for (int64_t i = 0; i < run.n && slot < end; ++i) {
      const int64_t index = run.index(i);
      indices[slot] = static_cast<Index>(index);
      if constexpr (sizeof(Value) == sizeof(float)) {
        values[slot] = run.x[i];
      } else {
        values[slot] = x[index];
      }
      slot += key_of(run.x[i]) >= bound;
    }
    return slot;
  }
};

// The sent elements, by slot. Two-bit values need them, because levels depend on all values of a block.
struct Kept {
  std::unique_ptr<float[]> values;
  std::unique_ptr<uint16_t[]> positions;  // within the block
  std::unique_ptr<uint8_t[]> codes;       // one byte per code, with room to pad k to a multiple of four

  explicit Kept(int64_t k)
      : values(new float[static_cast<size_t>(k)]),
        positions(new uint16_t[static_cast<size_t>(k)]),
        codes(new uint8_t[static_cast<size_t>(k) + 3]) {}
};

template <Dtype dtype, bool with_cells>
struct MessageSink {
  using Stored = std::conditional_t<dtype == Dtype::fp32, uint32_t, uint16_t>;
  using Index = std::conditional_t<with_cells, uint8_t, uint16_t>;
  uint8_t* message;
  MessageLayout layout;
  float* residual;
  uint32_t settled_from;
  const Kept* kept;

  int64_t take(int64_t slot, int64_t end, const Run& run, uint32_t bound) const {
    auto* indices = reinterpret_cast<Index*>(message + layout.indices);
    uint8_t* cells = message + layout.cells;
    int64_t block_end = 0, since = slot;
    for (int64_t i = 0; i < run.n && slot < end; ++i) {
      const int64_t index = run.index(i);
      if (index >= block_end) {
        count(block_end, slot - since);
        block_end = (index / kBlock + 1) * kBlock, since = slot;
      }
      const bool reaches = key_of(run.x[i]) >= bound;
      if constexpr (with_cells) {
        const auto within = static_cast<uint32_t>(index % kSpan), cell = within / static_cast<uint32_t>(kCell);
        indices[slot] = static_cast<Index>(within - cell * kCell);
        cells[index / kSpan * kCells + cell] += reaches;
      } else {
        indices[slot] = static_cast<Index>(index);
      }
      put(slot, index, run.x[i]);
      slot += reaches;
    }
    count(block_end, slot - since);
    if (residual) correct(run, bound);
    return slot;
  }

  void put(int64_t slot, int64_t index, float x) const {
    if constexpr (dtype == Dtype::two_bit) {
      kept->values[slot] = x;
      kept->positions[slot] = static_cast<uint16_t>(index);
    } else {
      reinterpret_cast<Stored*>(message + layout.values)[slot] = static_cast<Stored>(encode_value(x, dtype));
    }
  }

  void count(int64_t block_end, int64_t sent) const {
    if (sent > 0) reinterpret_cast<uint32_t*>(message + layout.counts)[block_end / kBlock - 1] += sent;
  }

  // Corrects the residuals that the pass guessed wrongly: it settled an element that is not sent, or did not settle an
  // element that is sent. Also zeroes the residuals of non-finite elements. With two-bit values, it only zeroes them,
  // and write_two_bits writes the residuals of sent elements. The writes are scattered, so it prefetches.
  void correct(const Run& run, uint32_t bound) const {
    constexpr int64_t kAhead = 32;
    uint16_t wrong[kChunk + 1];
    int64_t count = 0;
    for (int64_t i = 0; i < run.n; ++i) {
      const uint32_t key = key_of(run.x[i]);
      wrong[count] = static_cast<uint16_t>(i);
      const bool settled_wrongly = dtype != Dtype::two_bit && (key >= bound) != (key >= settled_from);
      count += settled_wrongly | (key >= kInfKey);
    }
    for (int64_t j = 0; j < count; ++j) {
      if (j + kAhead < count) __builtin_prefetch(residual + run.index(wrong[j + kAhead]), 1);
      const float acc = run.x[wrong[j]];
      const uint32_t key = key_of(acc);
      residual[run.index(wrong[j])] = key >= bound || key >= kInfKey ? residual_of<dtype>(acc) : acc;
    }
  }
};

// Returns the sum of part(x) over the values. Four partial sums let compilers use vectors. All sums here are exact, so
// their order does not matter.
template <typename Part>
double sum_of(const float* x, int64_t n, const Part& part) {
  double lanes[4] = {};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int64_t j = 0; j < 4; ++j) lanes[j] += part(x[i + j]);
  }
  for (; i < n; ++i) lanes[0] += part(x[i]);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

struct Split {
  Rounding rounded;
  double at;
  Levels levels;
};

// Chooses the levels. All values must be finite.
inline Split split(const float* x, int64_t n) {
  uint32_t largest = 0, smallest = n > 0 ? kInfKey : 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = bits_of(x[i]) & 0x7FFFFFFFu;
    largest = key > largest ? key : largest;
    smallest = key < smallest ? key : smallest;
  }
  const Rounding rounded(largest);
  const auto count = static_cast<double>(n);
  const double sum = sum_of(x, n, rounded), at = split_of(sum, count, rounded(float_of(smallest)));
  const double sum_above = sum_of(x, n, [&](float each) {
    const double size = rounded(each);
    return size > at ? size : 0.0;
  });
  const double count_above = sum_of(x, n, [&](float each) { return rounded(each) > at ? 1.0 : 0.0; });
  return {rounded, at, Levels(sum, count, sum_above, count_above)};
}

inline Split split_finite(const float* x, int64_t n) {
  const auto is_finite = [](float each) { return key_of(each) < kInfKey; };
  if (std::all_of(x, x + n, is_finite)) return split(x, n);
  std::vector<float> finite;
  std::copy_if(x, x + n, std::back_inserter(finite), is_finite);
  return split(finite.data(), static_cast<int64_t>(finite.size()));
}

// Writes the levels of one block, the codes of its values (slots [begin, end)), and their residuals.
inline void write_two_bits(const Kept& kept, int64_t block, int64_t begin, int64_t end, uint8_t* levels,
                           float* residual) {
  constexpr int64_t kAhead = 96;
  const Split chosen = split_finite(kept.values.get() + begin, end - begin);
  std::memcpy(levels + 8 * block, &chosen.levels, sizeof chosen.levels);
  for (int64_t i = begin; i < end; ++i) {
    const float x = kept.values[i];
    const auto finite = static_cast<uint32_t>(key_of(x) < kInfKey);
    kept.codes[i] = static_cast<uint8_t>(code_of(x, chosen.rounded(x) > chosen.at) & (0u - finite));
  }
  if (!residual) return;
  float sent[4], *to = residual + block * kBlock;
  for (uint32_t code = 0; code < 4; ++code) {
    sent[code] = decode_two_bits(code, chosen.levels.lower, chosen.levels.upper);
  }
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) __builtin_prefetch(to + kept.positions[i + kAhead], 1);
    const float x = kept.values[i];
    to[kept.positions[i]] = key_of(x) < kInfKey ? x - sent[kept.codes[i]] : 0.0f;
  }
}

// Packs four codes into a byte.
inline void pack_codes(const Kept& kept, int64_t k, uint8_t* to) {
  for (int64_t i = k; i % 4 != 0; ++i) kept.codes[i] = 0;
  for (int64_t i = 0; i < k; i += 4) {
    const uint8_t* four = kept.codes.get() + i;
    to[i / 4] = static_cast<uint8_t>(four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6);
  }
}

}  // namespace lightning_sparse::cpu
