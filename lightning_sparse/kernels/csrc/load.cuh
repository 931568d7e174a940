// Loads and stores the elements of a thread. If pointers are aligned, each access to the gradient takes 16 bytes.
#pragma once

#include "tile.cuh"

namespace lightning_sparse::cuda {
namespace {

template <Dtype dtype>
constexpr int kEach = dtype == Dtype::fp32 ? 4 : 8;  // elements per 16 bytes

__device__ void unpack(uint4 four, float* to) {
  to[0] = float_of(four.x), to[1] = float_of(four.y), to[2] = float_of(four.z), to[3] = float_of(four.w);
}

template <Dtype dtype>
__device__ void load_grad(const void* grad, int64_t i, float* to) {
  if constexpr (dtype == Dtype::fp32) {
    unpack(*reinterpret_cast<const uint4*>(static_cast<const float*>(grad) + i), to);
  } else {
    const uint4 eight = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(grad) + i);
    const uint32_t words[] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const auto half = static_cast<uint16_t>(words[j / 2] >> (16 * (j % 2)));
      to[j] = dtype == Dtype::bf16 ? from_bf16(half) : from_fp16(half);
    }
  }
}

// Loads acc of kEach elements, from element i on; 0 past the end.
template <Dtype dtype>
__device__ void load_acc(const Source& source, bool aligned, int64_t i, float* acc) {
  if (!aligned || i + kEach<dtype> > source.numel) {
#pragma unroll
    for (int e = 0; e < kEach<dtype>; ++e) acc[e] = i + e < source.numel ? acc_at<dtype>(source, i + e) : 0.0f;
    return;
  }
  load_grad<dtype>(source.grad, i, acc);
  if (source.scale) {
#pragma unroll
    for (int e = 0; e < kEach<dtype>; ++e) acc[e] = __fmul_rn(acc[e], *source.scale);
  }
  if (source.residual == nullptr) return;
#pragma unroll
  for (int e = 0; e < kEach<dtype>; e += 4) {
    float residual[4];
    unpack(*reinterpret_cast<const uint4*>(source.residual + i + e), residual);
#pragma unroll
    for (int j = 0; j < 4; ++j) acc[e + j] = __fadd_rn(residual[j], acc[e + j]);
  }
}

template <Dtype dtype>
__device__ void store_acc(const Source& source, bool aligned, int64_t i, const float* acc) {
  float* to = source.next_residual + i;
#pragma unroll
  for (int e = 0; e < kEach<dtype>; e += 4) {
    if (aligned && i + e + 4 <= source.numel) {
      const uint4 four{bits_of(acc[e]), bits_of(acc[e + 1]), bits_of(acc[e + 2]), bits_of(acc[e + 3])};
      *reinterpret_cast<uint4*>(to + e) = four;
      continue;
    }
    for (int j = e; j < e + 4; ++j) {
      if (i + j < source.numel) to[j] = acc[j];
    }
  }
}

}  // namespace
}  // namespace lightning_sparse::cuda
