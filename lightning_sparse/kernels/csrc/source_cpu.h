// Reads a source on the CPU: computes acc in fp32, in chunks that fit into the L1 cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "mstopk_cpu.h"
#include "pack.h"

namespace lightning_sparse::cpu {

constexpr int64_t kChunk = 4096;

bool scalar_only();  // set by `force`
#if LS_HAVE_AVX2
bool vectorized();  // functions marked LS_AVX2 may run
#endif

#if LS_HAVE_AVX2
// For a signaling NaN, the payload differs from that of from_fp16. Results do not depend on it.
__attribute__((target("avx2,f16c"))) inline void upcast_f16c(const uint16_t* half, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(half + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(eight));
  }
  for (; i < n; ++i) out[i] = from_fp16(half[i]);
}
#endif

template <Dtype dtype>
void upcast(const void* grad, int64_t begin, int64_t n, float* __restrict out) {
#if LS_HAVE_AVX2
  static const bool fast = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (dtype == Dtype::fp16 && fast && !scalar_only()) {
    return upcast_f16c(static_cast<const uint16_t*>(grad) + begin, n, out);
  }
#endif
  for (int64_t i = 0; i < n; ++i) out[i] = load_as<dtype>(grad, begin + i);
}

template <Dtype dtype>
void compute(const Source& source, int64_t begin, int64_t n, float* __restrict out) {
  upcast<dtype>(source.grad, begin, n, out);
  if (source.scale) {
    const float scale = *source.scale;
    for (int64_t i = 0; i < n; ++i) out[i] *= scale;
  }
  if (source.residual) {
    const float* __restrict residual = source.residual + begin;
    for (int64_t i = 0; i < n; ++i) out[i] = residual[i] + out[i];
  }
}

// One loop instead of two for the common case, fp32 with a residual.
inline void compute_fp32(const Source& source, int64_t begin, int64_t n, float* __restrict out) {
  const float* __restrict grad = static_cast<const float*>(source.grad) + begin;
  const float* __restrict residual = source.residual + begin;
  if (source.scale) {
    const float scale = *source.scale;
    for (int64_t i = 0; i < n; ++i) out[i] = residual[i] + grad[i] * scale;
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = residual[i] + grad[i];
  }
}

// Returns acc of n elements: a pointer to grad if it equals acc, otherwise `out`.
inline const float* acc_of(const Source& source, int64_t begin, int64_t n, float* out) {
  if (source.plain()) return static_cast<const float*>(source.grad) + begin;
  if (source.dtype == Dtype::fp32 && source.residual) {
    compute_fp32(source, begin, n, out);
  } else if (source.dtype == Dtype::fp32) {
    compute<Dtype::fp32>(source, begin, n, out);
  } else if (source.dtype == Dtype::bf16) {
    compute<Dtype::bf16>(source, begin, n, out);
  } else {
    compute<Dtype::fp16>(source, begin, n, out);
  }
  return out;
}

// Calls visit(x, n, first index) for chunks of acc. If source.next_residual is set, it also writes acc there.
template <typename Visit>
void scan(const Source& source, int64_t begin, int64_t end, const Visit& visit) {
  alignas(64) float buffer[kChunk];
  for (int64_t at = begin; at < end; at += kChunk) {
    const int64_t n = std::min(kChunk, end - at);
    visit(acc_of(source, at, n, source.next_residual ? source.next_residual + at : buffer), n, at);
  }
}

inline Source without_next_residual(Source source) {
  source.next_residual = nullptr;
  return source;
}

}  // namespace lightning_sparse::cpu
