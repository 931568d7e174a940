// Outputs of the selection: two tensors, or a message and the residual.
#pragma once

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

template <Dtype dtype>
struct MessageSink {
  using Stored = std::conditional_t<dtype == Dtype::fp32, uint32_t, uint16_t>;
  uint8_t* message;
  MessageLayout layout;
  int32_t exponent;
  float* residual;
  uint32_t settled_from;

  int64_t take(int64_t slot, int64_t end, const Run& run, uint32_t bound) const {
    auto* indices = reinterpret_cast<uint16_t*>(message + layout.indices);
    auto* values = reinterpret_cast<Stored*>(message + layout.values);
    int64_t block_end = 0, since = slot;
    for (int64_t i = 0; i < run.n && slot < end; ++i) {
      const int64_t index = run.index(i);
      if (index >= block_end) {
        count(block_end, slot - since);
        block_end = (index / kBlock + 1) * kBlock, since = slot;
      }
      indices[slot] = static_cast<uint16_t>(index);
      values[slot] = static_cast<Stored>(encode_value(run.x[i], exponent, dtype));
      slot += key_of(run.x[i]) >= bound;
    }
    count(block_end, slot - since);
    if (residual) correct(run, bound);
    return slot;
  }

  void count(int64_t block_end, int64_t kept) const {
    if (kept > 0) reinterpret_cast<uint32_t*>(message + layout.counts)[block_end / kBlock - 1] += kept;
  }

  // Corrects residuals that the pass did not settle, or settled wrongly. For fp16, it settled none, so most of the run
  // needs scattered writes: prefetch.
  void correct(const Run& run, uint32_t bound) const {
    constexpr int64_t kAhead = 32;
    uint16_t wrong[kChunk + 1];
    int64_t count = 0;
    for (int64_t i = 0; i < run.n; ++i) {
      const uint32_t key = key_of(run.x[i]);
      wrong[count] = static_cast<uint16_t>(i);
      count += ((key >= bound) != (key >= settled_from)) | (key >= kInfKey);
    }
    for (int64_t j = 0; j < count; ++j) {
      if (j + kAhead < count) __builtin_prefetch(residual + run.index(wrong[j + kAhead]), 1);
      const float acc = run.x[wrong[j]];
      const uint32_t key = key_of(acc);
      residual[run.index(wrong[j])] = key >= bound || key >= kInfKey ? left_of<dtype>(acc, exponent) : acc;
    }
  }
};

}  // namespace lightning_sparse::cpu
