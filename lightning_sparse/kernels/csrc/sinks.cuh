// Outputs of the selection: two tensors, or a message and the residual.
#pragma once

#include "tile.cuh"

namespace lightning_sparse::cuda {
namespace {

template <typename Index, typename Value>
struct TensorSink {
  __device__ TensorSink(const Problem&, uint32_t*) {}

  __device__ void keep(const Problem& p, int64_t slot, int64_t index, float) const {
    static_cast<Index*>(p.kept_indices)[slot] = static_cast<Index>(index);
    static_cast<Value*>(p.kept_values)[slot] = static_cast<const Value*>(p.source.grad)[index];
  }
  __device__ void drop(const Problem&, int64_t) const {}
  __device__ void finish(int64_t, int64_t) const {}
};

struct MessageSink {
  uint8_t* message;
  Dtype dtype;
  MessageLayout layout;
  uint32_t* cells;  // number of pairs in each cell of the warp's tile

  // Needs a barrier afterwards.
  __device__ MessageSink(const Problem& p, uint32_t* cells)
      : message(p.message), dtype(p.value_dtype), layout(p.source.numel, p.k, dtype), cells(cells) {
    if (lane() < kCells) cells[lane()] = 0;
  }

  __device__ void keep(const Problem& p, int64_t slot, int64_t index, float acc) const {
    keep_index(slot, index);
    if (dtype == Dtype::two_bit) {
      p.sent_values[slot] = acc;
      p.sent_positions[slot] = static_cast<uint16_t>(index % kBlock);
      // two_bits_kernel ORs codes into this word.
      if (slot % 16 == 0) reinterpret_cast<uint32_t*>(message + layout.values)[slot / 16] = 0;
      return;
    }
    const uint32_t stored = encode_value(acc, dtype);
    if (dtype == Dtype::fp32) {
      reinterpret_cast<uint32_t*>(message + layout.values)[slot] = stored;
    } else {
      reinterpret_cast<uint16_t*>(message + layout.values)[slot] = static_cast<uint16_t>(stored);
    }
    if (!p.source.next_residual) return;
    p.source.next_residual[index] = key_of(acc) >= kInfKey ? 0.0f : __fsub_rn(acc, decode_value(stored, dtype));
  }
  // A non-finite element that is not sent must not stay in the residual.
  __device__ void drop(const Problem& p, int64_t index) const {
    if (p.source.next_residual) p.source.next_residual[index] = 0.0f;
  }
  // Needs a barrier first, so that `cells` is complete.
  __device__ void finish(int64_t tile, int64_t kept) const {
    uint32_t* counts = reinterpret_cast<uint32_t*>(message + layout.counts);
    if (lane() == 0 && kept > 0) atomicAdd(&counts[tile * kTile / kBlock], static_cast<uint32_t>(kept));
    if (tile * kCells < layout.num_cells && lane() < kCells) {
      message[layout.cells + tile * kCells + lane()] = static_cast<uint8_t>(cells[lane()]);
    }
  }

 private:
  __device__ void keep_index(int64_t slot, int64_t index) const {
    if (layout.num_cells == 0) {
      reinterpret_cast<uint16_t*>(message + layout.indices)[slot] = static_cast<uint16_t>(index % kBlock);
      return;
    }
    const auto within = static_cast<uint32_t>(index % kTile), cell = within / static_cast<uint32_t>(kCell);
    message[layout.indices + slot] = static_cast<uint8_t>(within - cell * kCell);
    atomicAdd(&cells[cell], 1u);
  }
};

}  // namespace
}  // namespace lightning_sparse::cuda
