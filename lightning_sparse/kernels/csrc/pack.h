// Compaction: of a run of floats those whose key reaches a threshold, with their positions, packed to the left.
//
// The vector version first turns 64 elements into 64 bits, then reads the positions of the ones off these bits, four at
// a time without a branch. It wins over permuting 8 elements at a time by a table, whatever the density: few elements
// are kept, so work done per element kept is cheaper than work done per element read.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define LS_HAVE_AVX2 1
#define LS_AVX2 __attribute__((target("avx2,bmi,popcnt")))
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
// 32 elements -> 32 bits, set where the key is above `below`. Keys fit in 31 bits, so a signed comparison will do.
LS_AVX2 inline uint64_t reach_avx2(const float* x, __m256i below) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 8 * i));
    const __m256i hit = _mm256_cmpgt_epi32(_mm256_and_si256(raw, magnitude), below);
    bits |= static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(hit))) << (8 * i);
  }
  return bits;
}

// The positions of the ones in `bits`; writes up to three entries past them.
LS_AVX2 inline int64_t unpack_bits(uint64_t bits, uint32_t first, uint32_t* positions) {
  const auto count = static_cast<int64_t>(_mm_popcnt_u64(bits));
  int64_t i = 0;
  do {
    for (int64_t j = i; j < i + 4; ++j) {
      positions[j] = first + static_cast<uint32_t>(_tzcnt_u64(bits));
      bits = _blsr_u64(bits);
    }
    i += 4;
  } while (i < count);
  return count;
}

// `ahead`: ask for memory 8 KB before it is needed, which the hardware does not do across pages.
template <bool ahead>
LS_AVX2 int64_t pack_avx2(const float* x, int64_t n, uint32_t first, uint32_t threshold, uint32_t* positions,
                          float* values) {
  constexpr int kAhead = 8192, kLine = 64;
  const __m256i below = _mm256_set1_epi32(static_cast<int>(threshold) - 1);
  int64_t kept = 0, i = 0;
  for (; i + 64 <= n; i += 64) {
    if constexpr (ahead) {
      const char* later = reinterpret_cast<const char*>(x + i) + kAhead;
      for (int line = 0; line < 4; ++line) _mm_prefetch(later + line * kLine, _MM_HINT_T0);
    }
    const uint64_t bits = reach_avx2(x + i, below) | reach_avx2(x + i + 32, below) << 32;
    kept += unpack_bits(bits, first + static_cast<uint32_t>(i), positions + kept);
  }
  for (int64_t j = 0; j < kept; ++j) values[j] = x[positions[j] - first];
  return kept + pack_scalar(x + i, n - i, first + static_cast<uint32_t>(i), threshold, positions + kept, values + kept);
}
#endif

}  // namespace lightning_sparse::cpu
