// Sums M messages block by block: a block of 65,536 floats stays in the L2 cache while the pairs of all messages are
// added to it, in row order. With alpha, the block is not cleared before. Malformed messages are never read past their
// sections.
#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "mstopk_cpu.h"

namespace lightning_sparse::cpu {
namespace {

struct Message {
  const uint16_t* indices;
  const void* values;
  int32_t exponent;
  std::vector<int64_t> starts;  // of each block, and the end; empty if the message is invalid
};

Message open(const uint8_t* data, int64_t numel, int64_t k, Dtype dtype) {
  const MessageLayout layout(numel, k, dtype);
  Header header;
  std::memcpy(&header, data, sizeof header);
  Message message{reinterpret_cast<const uint16_t*>(data + layout.indices), data + layout.values, header.exponent, {}};
  if (!header_is_valid(header, numel, k, dtype)) return message;
  const auto* counts = reinterpret_cast<const uint32_t*>(data + layout.counts);
  std::vector<int64_t> starts(static_cast<size_t>(layout.num_blocks) + 1);
  for (int64_t b = 0; b < layout.num_blocks; ++b) {
    if (counts[b] > static_cast<uint32_t>(kBlock)) return message;
    starts[b + 1] = starts[b] + counts[b];
  }
  if (starts.back() == k) message.starts = std::move(starts);
  return message;
}

template <Dtype dtype>
inline float value_at(const Message& message, int64_t i) {
  if constexpr (dtype == Dtype::fp32) return static_cast<const float*>(message.values)[i];
  return decode_value(static_cast<const uint16_t*>(message.values)[i], message.exponent, dtype);
}

// Returns false at the first index that is not ascending or is out of bounds.
template <Dtype dtype>
bool add(const Message& message, int64_t block, float* shard, int64_t size, float alpha) {
  int64_t previous = -1;
  for (int64_t i = message.starts[block]; i < message.starts[block + 1]; ++i) {
    const int64_t index = message.indices[i];
    if (index <= previous || index >= size) return false;
    shard[index] += alpha * value_at<dtype>(message, i);  // exact where alpha is 1
    previous = index;
  }
  return true;
}

bool add(const Message& message, int64_t block, float* shard, int64_t size, float alpha, Dtype dtype) {
  if (dtype == Dtype::fp32) return add<Dtype::fp32>(message, block, shard, size, alpha);
  if (dtype == Dtype::bf16) return add<Dtype::bf16>(message, block, shard, size, alpha);
  return add<Dtype::fp16>(message, block, shard, size, alpha);
}

void accumulate_region(const std::vector<Message>& opened, float* shard, int64_t numel, Dtype value_dtype,
                       const float* alpha, const Parallel& parallel) {
  std::atomic<bool> valid =
      std::none_of(opened.begin(), opened.end(), [](const Message& message) { return message.starts.empty(); });
  if (valid) {
    parallel.run((numel + kBlock - 1) / kBlock, [&](int64_t block, int64_t) {
      float* here = shard + block * kBlock;
      const int64_t size = std::min(kBlock, numel - block * kBlock);
      if (!alpha) std::fill_n(here, size, 0.0f);
      for (const Message& message : opened) {
        if (!add(message, block, here, size, alpha ? *alpha : 1.0f, value_dtype)) valid = false;
      }
    });
  }
  if (!valid) std::fill_n(shard, numel, std::numeric_limits<float>::quiet_NaN());
}

}  // namespace

void accumulate(const uint8_t* messages, int64_t num_messages, const Regions& regions, float* shard, int64_t k,
                Dtype value_dtype, const float* alpha, const Parallel& parallel) {
  const int64_t nbytes = row_nbytes(regions, k, value_dtype);
  for (uint32_t region = 0; region < regions.count; ++region) {
    const int64_t numel = regions.numel(region);
    std::vector<Message> opened;
    for (int64_t m = 0; m < num_messages; ++m, messages += nbytes) {
      opened.push_back(open(messages, numel, std::min(k, numel), value_dtype));
    }
    accumulate_region(opened, shard + regions.start(region), numel, value_dtype, alpha, parallel);
  }
}

}  // namespace lightning_sparse::cpu
