// Sums M messages block by block. A block of 65,536 floats stays in the L2 cache while this code adds the pairs of all
// messages to it, in row order. With alpha, it does not clear the block first. It never reads outside a message, even
// if the message is malformed.
#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "mstopk_cpu.h"

namespace lightning_sparse::cpu {
namespace {

struct Message {
  const uint8_t* data;
  MessageLayout layout;
  std::vector<int64_t> starts;  // first pair of each block, then the end; empty if the message is invalid
};

Message open(const uint8_t* data, int64_t numel, int64_t k, Dtype dtype) {
  Header header;
  std::memcpy(&header, data, sizeof header);
  Message message{data, MessageLayout(numel, k, dtype), {}};
  if (!header_is_valid(header, numel, k, dtype)) return message;
  const int64_t num_blocks = message.layout.num_blocks;
  const auto* counts = reinterpret_cast<const uint32_t*>(data + message.layout.counts);
  std::vector<int64_t> starts(static_cast<size_t>(num_blocks) + 1);
  for (int64_t b = 0; b < num_blocks; ++b) {
    if (counts[b] > static_cast<uint32_t>(kBlock)) return message;
    starts[b + 1] = starts[b] + counts[b];
  }
  if (starts.back() == k) message.starts = std::move(starts);
  return message;
}

// The values of one block's pairs.
template <Dtype dtype>
struct Values {
  const void* values;

  Values(const Message& message, int64_t) : values(message.data + message.layout.values) {}
  float operator[](int64_t i) const { return load_as<dtype>(values, i); }
};

template <>
struct Values<Dtype::two_bit> {
  const uint8_t* codes;
  float of[4];

  Values(const Message& message, int64_t block) : codes(message.data + message.layout.values) {
    float levels[2];
    std::memcpy(levels, message.data + message.layout.levels + 8 * block, sizeof levels);
    for (uint32_t code = 0; code < 4; ++code) of[code] = decode_two_bits(code, levels[0], levels[1]);
  }
  float operator[](int64_t i) const { return of[codes[i / 4] >> 2 * (i % 4) & 3]; }
};

// Adds values `first`, `first + 1`, ... Returns false at the first position that is not ascending or is out of bounds.
template <typename Values>
bool add(const Values& values, const uint16_t* positions, int64_t first, int64_t n, float* to, int64_t size,
         float alpha) {
  int64_t previous = -1;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = positions[i];
    if (at <= previous || at >= size) return false;
    to[at] += alpha * values[first + i];  // if alpha is 1, the product is exact
    previous = at;
  }
  return true;
}

// Writes the position within the span of each of its pairs. Few cells have more than four pairs, so it always writes
// four entries without a branch. It may read a few bytes past the indices, because the values follow them.
void expand(const uint8_t* cells, const uint8_t* indices, uint16_t* positions) {
  int64_t n = 0;
  for (int cell = 0; cell < kCells; ++cell) {
    const int64_t count = cells[cell];
    const auto begin = static_cast<uint16_t>(cell * kCell);
    for (int64_t j = 0; j < 4; ++j) positions[n + j] = static_cast<uint16_t>(begin + indices[n + j]);
    for (int64_t j = 4; j < count; ++j) positions[n + j] = static_cast<uint16_t>(begin + indices[n + j]);
    n += count;
  }
}

template <typename Values>
bool add_cells(const Message& message, const Values& values, int64_t block, float* shard, int64_t size, float alpha) {
  const uint8_t* cells = message.data + message.layout.cells + block * (kBlock / kSpan * kCells);
  const uint8_t* indices = message.data + message.layout.indices;
  int64_t at = message.starts[block];
  const int64_t end = message.starts[block + 1];
  uint16_t positions[kSpan + 4];
  for (int64_t begin = 0; begin < size; begin += kSpan, cells += kCells) {
    int64_t n = 0;
    for (int cell = 0; cell < kCells; ++cell) n += cells[cell];
    if (n == 0) continue;
    if (n > std::min(end - at, kSpan)) return false;
    expand(cells, indices + at, positions);
    uint8_t largest = 0;
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, indices[at + i]);
    if (largest >= kCell) return false;
    if (!add(values, positions, at, n, shard + begin, std::min(kSpan, size - begin), alpha)) return false;
    at += n;
  }
  return at == end;
}

template <Dtype dtype>
bool add_block(const Message& message, int64_t block, float* shard, int64_t size, float alpha) {
  const Values<dtype> values(message, block);
  if (message.layout.num_cells > 0) return add_cells(message, values, block, shard, size, alpha);
  const int64_t begin = message.starts[block];
  const auto* positions = reinterpret_cast<const uint16_t*>(message.data + message.layout.indices) + begin;
  return add(values, positions, begin, message.starts[block + 1] - begin, shard, size, alpha);
}

auto adder_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::fp32:
      return add_block<Dtype::fp32>;
    case Dtype::bf16:
      return add_block<Dtype::bf16>;
    default:
      return add_block<Dtype::two_bit>;
  }
}

// Reads a block in order, because the CPU then prefetches it. Additions of single pairs would wait for each cache line.
// This is not worth it if pairs are few, or if each message has pairs in most lines and so reads them in order anyway.
void fetch(const std::vector<Message>& messages, int64_t block, const float* here, int64_t size) {
  constexpr int64_t kLine = 64 / sizeof(float);  // elements
  constexpr int64_t kFew = 8 * kLine;            // elements that the CPU reads in order in the time of one cache miss
  int64_t pairs = 0;
  for (const Message& message : messages) pairs += message.starts[block + 1] - message.starts[block];
  if (pairs * kFew < size || pairs * kLine > size * static_cast<int64_t>(messages.size())) return;
  for (int64_t i = 0; i < size; i += kLine) static_cast<void>(static_cast<const volatile float*>(here)[i]);
}

void accumulate_region(const std::vector<Message>& opened, float* shard, int64_t numel, Dtype value_dtype,
                       const float* alpha, const Parallel& parallel) {
  const auto add_to = adder_of(value_dtype);
  std::atomic<bool> valid =
      std::none_of(opened.begin(), opened.end(), [](const Message& message) { return message.starts.empty(); });
  if (valid) {
    parallel.run((numel + kBlock - 1) / kBlock, [&](int64_t block, int64_t) {
      float* here = shard + block * kBlock;
      const int64_t size = std::min(kBlock, numel - block * kBlock);
      if (alpha) {
        fetch(opened, block, here, size);
      } else {
        std::fill_n(here, size, 0.0f);
      }
      for (const Message& message : opened) {
        if (!add_to(message, block, here, size, alpha ? *alpha : 1.0f)) valid = false;
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
