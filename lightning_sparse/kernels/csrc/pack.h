// Compacts the floats whose key reaches a threshold, and their positions.
//
// The vector version compares 64 elements with the threshold, and collects the results in a 64-bit mask. Then it
// extracts the positions of the set bits, four at a time without a branch. A lookup table that permutes 8 elements at a
// time was slower at every density. Few elements are kept, so work per kept element is cheaper than work per element.
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

constexpr int64_t kPackSlack = 8;  // both versions may write up to this many entries past the last kept entry

// Keeps the elements whose key is at least `threshold`, and returns their number. `threshold` is at most kInfKey, so
// NaN needs no special key. Example: with x = [1, -5, 2, 5], first = 40 and the key of 2.0, the values are -5, 2, 5,
// the positions are 41, 42, 43, and the result is 3.
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
// Loads eight elements at a time. `kAhead` is the prefetch distance in bytes, needed because the hardware prefetcher
// stops at page boundaries. 0 turns prefetching off, for elements that are already in the L1 cache.
template <int kAhead>
struct Loaded {
  const float* x;

  LS_AVX2 void fetch(int64_t i) const {
    if constexpr (kAhead > 0) {
      for (int j = 0; j < 64; j += 16) _mm_prefetch(reinterpret_cast<const char*>(x + i + j) + kAhead, _MM_HINT_T0);
    }
  }
  LS_AVX2 __m256 eight(int64_t i) const { return _mm256_loadu_ps(x + i); }
};

// Computes residual + grad * scale for eight elements at a time, and stores the sum in x.
template <bool scaled>
struct Summed {
  float* x;
  const float *grad, *residual;
  float scale;

  LS_AVX2 void fetch(int64_t i) const {
    constexpr int kAhead = 8192;
    for (int j = 0; j < 64; j += 16) {
      _mm_prefetch(reinterpret_cast<const char*>(grad + i + j) + kAhead, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(residual + i + j) + kAhead, _MM_HINT_T0);
    }
  }
  LS_AVX2 __m256 eight(int64_t i) const {
    __m256 sum = _mm256_loadu_ps(grad + i);
    if constexpr (scaled) sum = _mm256_mul_ps(sum, _mm256_set1_ps(scale));
    sum = _mm256_add_ps(_mm256_loadu_ps(residual + i), sum);
    _mm256_storeu_ps(x + i, sum);
    return sum;
  }
};

// Returns a mask of elements [at, at + 32), with a set bit for each key above `below`. Keys have 31 bits, so a signed
// comparison suffices.
template <typename From>
LS_AVX2 inline uint64_t reach_avx2(const From& from, int64_t at, __m256i below) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) {
    const __m256i raw = _mm256_castps_si256(from.eight(at + 8 * i));
    const __m256i hit = _mm256_cmpgt_epi32(_mm256_and_si256(raw, magnitude), below);
    bits |= static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(hit))) << (8 * i);
  }
  return bits;
}

// Writes the positions of the set bits, and up to four more entries (four if no bit is set).
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

// n must be a multiple of 64.
template <typename From>
LS_AVX2 int64_t pack_avx2(const From& from, int64_t n, uint32_t first, uint32_t threshold, uint32_t* positions,
                          float* values) {
  const __m256i below = _mm256_set1_epi32(static_cast<int>(threshold) - 1);
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += 64) {
    from.fetch(i);
    const uint64_t bits = reach_avx2(from, i, below) | reach_avx2(from, i + 32, below) << 32;
    kept += unpack_bits(bits, first + static_cast<uint32_t>(i), positions + kept);
  }
  for (int64_t j = 0; j < kept; ++j) values[j] = from.x[positions[j] - first];
  return kept;
}
#endif

}  // namespace lightning_sparse::cpu
