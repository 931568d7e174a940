// Outputs of the selection: two tensors, or a message and the residual.
#pragma once

#include <limits>
#include <memory>
#include <type_traits>

#include "candidates_cpu.h"

namespace lightning_sparse::cpu {

// Both write each element and then advance only if it is kept, since branches would be mispredicted.
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

// What is sent, in slots: for two-bit values, which are made once all of a block is known.
struct Kept {
  std::unique_ptr<float[]> values;
  std::unique_ptr<uint16_t[]> positions;  // within their block

  explicit Kept(int64_t k)
      : values(new float[static_cast<size_t>(k)]), positions(new uint16_t[static_cast<size_t>(k)]) {}
};

template <Dtype dtype, bool with_cells>
struct MessageSink {
  using Stored = std::conditional_t<dtype == Dtype::fp32, uint32_t, uint16_t>;
  using Index = std::conditional_t<with_cells, uint8_t, uint16_t>;
  uint8_t* message;
  MessageLayout layout;
  int32_t exponent;
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
      reinterpret_cast<Stored*>(message + layout.values)[slot] = static_cast<Stored>(encode_value(x, exponent, dtype));
    }
  }

  void count(int64_t block_end, int64_t sent) const {
    if (sent > 0) reinterpret_cast<uint32_t*>(message + layout.counts)[block_end / kBlock - 1] += sent;
  }

  // Corrects residuals that the pass did not settle, or settled wrongly. For fp16, it settled none, so most of the run
  // needs scattered writes: prefetch. For two bits, it drops what is not finite, and the rest comes with the levels.
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
      residual[run.index(wrong[j])] = key >= bound || key >= kInfKey ? left_of<dtype>(acc, exponent) : acc;
    }
  }
};

// Writes the codes and the levels of one block's values, slots [begin, end), and what that leaves of them.
class TwoBits {
 public:
  TwoBits(const Kept& kept, uint8_t* message, const MessageLayout& layout, float* residual)
      : kept_(kept), message_(message), layout_(layout), residual_(residual) {}

  void write(int64_t block, int64_t begin, int64_t end) const {
    const float* x = kept_.values.get();
    uint32_t largest = 0;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t key = key_of(x[i]);
      largest = key < kInfKey && key > largest ? key : largest;
    }
    const Rounding rounded(largest);
    double sum = 0, smallest = std::numeric_limits<double>::infinity();
    int64_t count = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (key_of(x[i]) >= kInfKey) continue;
      const double size = rounded(x[i]);
      sum += size, ++count;
      smallest = size < smallest ? size : smallest;
    }
    const double split = split_of(sum, static_cast<double>(count), smallest);
    double sum_above = 0;
    int64_t count_above = 0;
    for (int64_t i = begin; i < end; ++i) {
      const double size = rounded(x[i]);
      const bool above = size > split && key_of(x[i]) < kInfKey;
      sum_above += above ? size : 0.0, count_above += above;
    }
    const Levels levels(sum, static_cast<double>(count), sum_above, static_cast<double>(count_above));
    std::memcpy(message_ + layout_.levels + 8 * block, &levels, sizeof levels);
    write_codes(rounded, split, begin, end);
    if (residual_) leave(levels, block, begin, end);
  }

 private:
  // A byte at the edge holds codes of two blocks, which two threads may write.
  void write_codes(const Rounding& rounded, double split, int64_t begin, int64_t end) const {
    uint8_t* codes = message_ + layout_.values;
    for (int64_t at = begin / 4; at * 4 < end; ++at) {
      uint32_t byte = 0;
      const int64_t first = std::max(begin, 4 * at), last = std::min(end, 4 * at + 4);
      for (int64_t i = first; i < last; ++i) {
        const float x = kept_.values[i];
        const uint32_t code = key_of(x) < kInfKey ? code_of(x, rounded(x) > split) : 0;
        byte |= code << 2 * (i % 4);
      }
      if (last - first == 4) {
        codes[at] = static_cast<uint8_t>(byte);
      } else {
        __atomic_fetch_or(codes + at, static_cast<uint8_t>(byte), __ATOMIC_RELAXED);
      }
    }
  }

  void leave(const Levels& levels, int64_t block, int64_t begin, int64_t end) const {
    constexpr int64_t kAhead = 32;
    const uint8_t* codes = message_ + layout_.values;
    float* to = residual_ + block * kBlock;
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) __builtin_prefetch(to + kept_.positions[i + kAhead], 1);
      const float x = kept_.values[i];
      const uint32_t code = codes[i / 4] >> 2 * (i % 4) & 3u;
      to[kept_.positions[i]] = key_of(x) >= kInfKey ? 0.0f : x - decode_two_bits(code, levels.lower, levels.upper);
    }
  }

  const Kept& kept_;
  uint8_t* message_;
  const MessageLayout& layout_;
  float* residual_;
};

}  // namespace lightning_sparse::cpu
