// Branch-free compaction: of a run of floats, those whose key reaches a threshold, with their positions, left-packed.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define LS_HAVE_AVX2 1
#else
#define LS_HAVE_AVX2 0
#endif

#include "common.h"

namespace lightning_sparse::cpu {

constexpr int64_t kPackSlack = 8;  // both versions may write this many entries past the last one they keep

// threshold <= kInfKey, so NaN needs no clamping here. Worked example: x = [1, -5, 2, 5], first = 40, the key of 2.0:
// keeps values -5, 2, 5 at positions 41, 42, 43 and returns 3.
inline int64_t pack_scalar(const float* x, int64_t n, uint32_t first, uint32_t threshold, uint32_t* positions,
                           float* values) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    positions[kept] = first + static_cast<uint32_t>(i);
    values[kept] = x[i];
    kept += (bits_of(x[i]) & 0x7FFFFFFFu) >= threshold;
  }
  return kept;
}

#if LS_HAVE_AVX2
struct PackTable {
  alignas(32) uint32_t lane[256][8];
  PackTable() {
    for (int mask = 0; mask < 256; ++mask) {
      int kept = 0;
      for (uint32_t bit = 0; bit < 8; ++bit) {
        if (mask & (1 << bit)) lane[mask][kept++] = bit;
      }
      while (kept < 8) lane[mask][kept++] = 0;
    }
  }
};

__attribute__((target("avx2,popcnt"))) inline int64_t pack_avx2(const float* x, int64_t n, uint32_t first,
                                                                uint32_t threshold, uint32_t* positions,
                                                                float* values) {
  static const PackTable table;
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  const __m256i below = _mm256_set1_epi32(static_cast<int>(threshold) - 1);  // keys fit in 31 bits: signed compare
  const __m256i eight = _mm256_set1_epi32(8);
  __m256i position = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first)),
                                      _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  int64_t kept = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    const __m256i hit = _mm256_cmpgt_epi32(_mm256_and_si256(bits, magnitude), below);
    const int mask = _mm256_movemask_ps(_mm256_castsi256_ps(hit));
    const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(table.lane[mask]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + kept), _mm256_permutevar8x32_epi32(bits, order));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(positions + kept), _mm256_permutevar8x32_epi32(position, order));
    kept += _mm_popcnt_u32(static_cast<unsigned>(mask));
    position = _mm256_add_epi32(position, eight);
  }
  return kept + pack_scalar(x + i, n - i, first + static_cast<uint32_t>(i), threshold, positions + kept,
                            values + kept);
}
#endif

}  // namespace lightning_sparse::cpu
