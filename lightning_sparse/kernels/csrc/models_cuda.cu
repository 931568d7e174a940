// The optimizer steps weights that lie between the global weights, `global`, and the node's weights, `local`
// (common.h). One kernel adds the optimizer's change to `local`, or writes the interpolated weights. A launch handles
// up to kMostPieces pieces. Every element is read once and written once, and threads share nothing.
#include <cuda_runtime.h>

#include "tile.cuh"

namespace lightning_sparse::cuda {
namespace {

constexpr int kPerThread = 8;                     // elements, kThreads apart, so that lanes of a warp read neighbors
constexpr int kPerBlock = kPerThread * kThreads;  // elements per block, all of one piece
constexpr int kMostPieces = 96;  // their table fits into 4 KB, the limit for kernel arguments before CUDA 12.1

struct Part {
  Piece piece;
  uint32_t end;  // the block after the last block of the piece
};

struct Interpolation {
  float* local;
  const float* global;
  float local_fraction;
  int count;
  Part parts[kMostPieces];
};
static_assert(sizeof(Interpolation) <= 4096);

template <Dtype dtype, bool add>
__device__ void interpolate_span(const Interpolation& m, const Piece& piece, int64_t first) {
  float local[kPerThread], global[kPerThread], now[kPerThread];
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) {
    const int64_t i = first + threadIdx.x + kThreads * e;
    const bool inside = i < piece.numel;
    local[e] = inside ? m.local[piece.begin + i] : 0.0f;
    global[e] = inside ? m.global[piece.begin + i] : 0.0f;
    if constexpr (add) now[e] = inside ? load_as<dtype>(piece.data, i) : 0.0f;
  }
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) {
    const int64_t i = first + threadIdx.x + kThreads * e;
    if (i >= piece.numel) return;
    const float between = interpolate(global[e], local[e], m.local_fraction);
    if constexpr (add) {
      m.local[piece.begin + i] = with_change<dtype>(local[e], rounded_to<dtype>(between), now[e], m.local_fraction);
    } else {
      store_as<dtype>(piece.data, i, between);
    }
  }
}

template <bool add>
__global__ void __launch_bounds__(kThreads, 4) interpolate_kernel(const Interpolation m) {
  int low = 0, high = m.count - 1;  // the first part that ends after this block
  while (low < high) {
    const int middle = (low + high) / 2;
    if (m.parts[middle].end > blockIdx.x) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const Piece piece = m.parts[low].piece;
  const uint32_t begin = low ? m.parts[low - 1].end : 0;
  const int64_t first = static_cast<int64_t>(blockIdx.x - begin) * kPerBlock;
  if (piece.dtype == Dtype::fp32) interpolate_span<Dtype::fp32, add>(m, piece, first);
  if (piece.dtype == Dtype::bf16) interpolate_span<Dtype::bf16, add>(m, piece, first);
  if (piece.dtype == Dtype::fp16) interpolate_span<Dtype::fp16, add>(m, piece, first);
}

template <bool add>
void launch(const Interpolation& m, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const unsigned blocks = m.parts[m.count - 1].end;
  interpolate_kernel<add><<<blocks, kThreads, 0, on>>>(m);
  check(cudaGetLastError());
}

template <bool add>
void interpolate_model(float* local, const float* global, const Model& model, float local_fraction, void* stream) {
  Interpolation m{.local = local, .global = global, .local_fraction = local_fraction, .count = 0, .parts = {}};
  uint32_t blocks = 0;
  for (const Piece& piece : model) {
    blocks += static_cast<uint32_t>((piece.numel + kPerBlock - 1) / kPerBlock);
    m.parts[m.count++] = {piece, blocks};
    if (m.count == kMostPieces) {
      launch<add>(m, stream);
      m.count = 0, blocks = 0;
    }
  }
  if (m.count > 0) launch<add>(m, stream);
}

}  // namespace

void accumulate_delta(float* local, const float* global, const Model& model, float local_fraction, void* stream) {
  interpolate_model<true>(local, global, model, local_fraction, stream);
}

void lerp_into(const float* local, const float* global, const Model& model, float local_fraction, void* stream) {
  interpolate_model<false>(const_cast<float*>(local), global, model, local_fraction, stream);  // it only reads `local`
}

}  // namespace lightning_sparse::cuda
