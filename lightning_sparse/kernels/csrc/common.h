// Scalar functions: keys, the message layout, 16-bit formats. The CPU and CUDA kernels share them, so both give the
// same bits. This file uses no torch headers and has no state. Compile it with FMA contraction off.
//
// The key of an element is the fp32 bits of its magnitude. As unsigned integers, keys order like |x|: finite < Inf <
// NaN. All NaN have one key.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define LS_HD __host__ __device__ __forceinline__
#else
#define LS_HD inline
#endif

namespace lightning_sparse {

// 0, 1 and 3 are the value codes of wire.py. Gradients are fp32, bf16 or fp16; message values are never fp16.
enum class Dtype : int { fp32 = 0, bf16 = 1, fp16 = 2, two_bit = 3 };

constexpr uint32_t kInfKey = 0x7F800000u;
constexpr uint32_t kNanKey = 0x7F800001u;

LS_HD uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

LS_HD float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

LS_HD uint32_t key_of(float x) {
  const uint32_t bits = bits_of(x) & 0x7FFFFFFFu;
  return bits < kNanKey ? bits : kNanKey;
}

// ------------------------------------------------------------------------------------------------------ the sample

constexpr int64_t kSampleAll = 65536;  // largest sample, in elements; the CPU samples numel / 16, CUDA kSample
constexpr int64_t kSamplePiece = 32;   // consecutive elements per sampled piece
constexpr int kSampleShift = 15;       // thresholds keep 16 of a key's 31 bits: the exponent and 8 bits of mantissa

// Returns the start of the i-th piece: a pseudo-random place in the i-th of `pieces` equal parts.
LS_HD int64_t sample_piece(int64_t numel, int64_t i, int64_t pieces = kSampleAll / kSamplePiece) {
  const int64_t slots = numel / kSamplePiece;
  const int64_t first = slots * i / pieces, width = slots * (i + 1) / pieces - first;
  const uint64_t hash = (static_cast<uint64_t>(i) + 1) * 0x9E3779B97F4A7C15u;
  return (first + static_cast<int64_t>((hash >> 33) % static_cast<uint64_t>(width))) * kSamplePiece;
}

struct SamplePlan {
  int64_t target;    // number of sampled elements to reach the threshold; 0: all elements are candidates
  int64_t capacity;  // maximum number of candidates; with more, the kernels process all elements
};

// The target is six standard deviations above the expected number. Too few candidates are then rare, even if neighbors
// correlate. Many ties at the threshold, for example zeros, exceed the capacity and are not worth copying.
inline SamplePlan plan_sample(int64_t numel, int64_t k, int64_t size = kSampleAll) {
  if (numel <= size) return {k, numel};
  const double scale = static_cast<double>(numel) / static_cast<double>(size);
  const double expected = static_cast<double>(k) / scale;
  const double target = std::ceil(expected + 6.0 * std::sqrt(expected) + 8.0);
  if (target >= static_cast<double>(size)) return {0, numel};
  const int64_t capacity = static_cast<int64_t>(1.4 * target * scale) + kSampleAll;
  return {static_cast<int64_t>(target), capacity < numel ? capacity : numel};
}

// ------------------------------------------------------------------------------------------------ 16-bit formats

LS_HD float from_bf16(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

LS_HD float from_fp16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, magnitude = static_cast<uint32_t>(h & 0x7FFFu) << 13;
  if (magnitude >= 0x0F800000u) return float_of(sign | 0x70000000u | magnitude);  // infinity, NaN
  if (magnitude >= 0x00800000u) return float_of(sign | (magnitude + 0x38000000u));
  const float denormal = float_of(0x38800000u | magnitude) - float_of(0x38800000u);  // exact even with flush to zero
  return float_of(sign | bits_of(denormal));
}

// Rounds to nearest even. Magnitudes that round beyond the largest finite bf16 become infinite. For NaN, the result is
// meaningless.
LS_HD uint32_t nearest_bf16(float x) {
  const uint32_t bits = bits_of(x);
  return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

// Rounds a finite x to nearest even, and saturates at the largest finite bf16.
LS_HD uint16_t to_bf16(float x) {
  const uint32_t rounded = nearest_bf16(x);
  return static_cast<uint16_t>((rounded & 0x7FFFu) == 0x7F80u ? rounded - 1 : rounded);
}

// Casts any x. Every NaN becomes 0x7FC0. It uses masks, because compilers do not vectorize branches.
LS_HD uint16_t cast_bf16(float x) {
  const uint32_t nan = -static_cast<uint32_t>((bits_of(x) & 0x7FFFFFFFu) > kInfKey);
  return static_cast<uint16_t>((nearest_bf16(x) & ~nan) | (0x7FC0u & nan));
}

// Returns the rounding error of `cast_bf16`, which fp32 holds exactly; 0 if the rounded value is not finite.
LS_HD float lost_to_bf16(float x, uint16_t rounded) {
  const uint32_t finite = (rounded & 0x7F80u) != 0x7F80u;
  return float_of(bits_of(x - from_bf16(rounded)) & -finite);
}

// Rounds to nearest even. Requires |x| < 65,536.
LS_HD uint16_t to_fp16(float x) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude < 0x38800000u) {  // below 2^-14, a denormal: adding 1/2 leaves |x| / 2^-24, rounded, in the low bits
    return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u));
  }
  const uint32_t rebased = magnitude - 0x38000000u;
  return static_cast<uint16_t>(sign | ((rebased + 0x0FFFu + ((rebased >> 13) & 1u)) >> 13));
}

// Casts any x. Magnitudes beyond the largest finite fp16 become infinite, and every NaN becomes 0x7E00.
LS_HD uint16_t cast_fp16(float x) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > kInfKey) return 0x7E00u;
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);
  return to_fp16(x);
}

template <Dtype dtype>
LS_HD float load_as(const void* data, int64_t i) {
  if constexpr (dtype == Dtype::fp32) return static_cast<const float*>(data)[i];
  if constexpr (dtype == Dtype::bf16) return from_bf16(static_cast<const uint16_t*>(data)[i]);
  if constexpr (dtype == Dtype::fp16) return from_fp16(static_cast<const uint16_t*>(data)[i]);
}

// Rounds x to a type, and returns the result in fp32.
template <Dtype dtype>
LS_HD float rounded_to(float x) {
  if constexpr (dtype == Dtype::fp32) return x;
  if constexpr (dtype == Dtype::bf16) return from_bf16(cast_bf16(x));
  if constexpr (dtype == Dtype::fp16) return from_fp16(cast_fp16(x));
}

template <Dtype dtype>
LS_HD void store_as(void* data, int64_t i, float x) {
  if constexpr (dtype == Dtype::fp32) static_cast<float*>(data)[i] = x;
  if constexpr (dtype == Dtype::bf16) static_cast<uint16_t*>(data)[i] = cast_bf16(x);
  if constexpr (dtype == Dtype::fp16) static_cast<uint16_t*>(data)[i] = cast_fp16(x);
}

LS_HD double power_of_two(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(1023 + exponent) << 52;
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(static_cast<long long>(bits));
#else
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

// Divides a shard into regions of nearly equal sizes: region r begins at floor(r * numel / count).
constexpr int64_t kMostRegions = 65535;  // limit of gridDim.y; also, rest * region must fit into 32 bits

struct Regions {
  int64_t each;          // elements of the smallest region
  uint32_t rest, count;  // rest: number of regions with one more element

  Regions(int64_t numel, int64_t num_regions)
      : each(numel / num_regions),
        rest(static_cast<uint32_t>(numel % num_regions)),
        count(static_cast<uint32_t>(num_regions)) {}
  LS_HD int64_t start(uint32_t region) const { return each * region + rest * region / count; }
  LS_HD int64_t numel(uint32_t region) const { return each + (rest * region % count + rest >= count); }
  int64_t most() const { return each + (rest > 0); }
};

template <typename T>
LS_HD T* offset_or_null(T* pointer, int64_t by) {
  return pointer ? pointer + by : nullptr;
}

// Returns the part of a cpu::Source or cuda::Source that lies in a region.
template <typename Source>
LS_HD Source part_of(Source source, const Regions& regions, uint32_t region) {
  const int64_t start = regions.start(region);
  source.grad = static_cast<const char*>(source.grad) + start * (source.dtype == Dtype::fp32 ? 4 : 2);
  source.numel = regions.numel(region);
  source.residual = offset_or_null(source.residual, start);
  source.next_residual = offset_or_null(source.next_residual, start);
  return source;
}

// Returns the row length if `num_rows` rows hold a shard. The last rows may have padding.
LS_HD int64_t row_numel(int64_t numel, int64_t num_rows) { return (numel - 1) / num_rows + 1; }

// --------------------------------------------------------------------------------------- local and global weights

// A parameter, or a part of it. It corresponds to elements [begin, begin + numel) of the flat weights.
struct Piece {
  void* data;
  Dtype dtype;
  int64_t begin, numel;
};

struct Model {
  const Piece* pieces;  // contiguous in the flat weights
  int64_t count;

  const Piece* begin() const { return pieces; }
  const Piece* end() const { return pieces + count; }
};

// Returns the weight that the optimizer steps: exactly `local` if local_fraction = 1, otherwise a weight between
// `global` and `local`. `global` is the global weight. `local` also contains the updates of this node that the global
// weight lacks.
LS_HD float interpolate(float global, float local, float local_fraction) {
  return local_fraction == 1.0f ? local : global + (local - global) * local_fraction;
}

// Returns `local` plus the change of a parameter from `before` to `now`. In fp32 with local_fraction = 1, `before`
// equals `local`. So the result is exactly `now`, without the rounding of local + (now - before).
template <Dtype dtype>
LS_HD float with_change(float local, float before, float now, float local_fraction) {
  return dtype == Dtype::fp32 && local_fraction == 1.0f ? now : local + (now - before);
}

// --------------------------------------------------------------------------------------------------- the message

constexpr uint32_t kMagic = 0x3250534Cu;
// Each wire block has a pair count. With 8-bit indices, a span has kCells cells, each with its own pair count
// (wire.py). A cell has fewer than 256 elements, so its pair count fits into a byte.
constexpr int64_t kBlock = 65536, kSpan = 4096, kCell = 241;
constexpr int kCells = 17;  // per span; the last cell has 240 elements
constexpr int64_t kHeaderBytes = 64;

// The first 32 of kHeaderBytes bytes. wire.py then writes the number of the exchange, which the kernels ignore.
struct Header {
  uint32_t magic;
  int32_t nonfinite;
  int32_t zero;  // former versions sent the exponent of fp16 values here
  int32_t value_code;
  int64_t numel;
  int64_t k;
};

LS_HD int64_t round_up16(int64_t bytes) { return (bytes + 15) / 16 * 16; }
LS_HD int64_t value_bytes(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

// Offsets of the sections in bytes; see wire.py.
struct MessageLayout {
  int64_t num_blocks, num_cells;  // num_cells is 0 if indices have 16 bits
  int64_t counts, levels, cells, indices, values, values_nbytes, nbytes;

  LS_HD MessageLayout(int64_t numel, int64_t k, Dtype dtype)
      : num_blocks((numel + kBlock - 1) / kBlock),
        num_cells(cells_of(numel, k)),
        counts(kHeaderBytes),
        levels(counts + round_up16(4 * num_blocks)),
        cells(levels + (dtype == Dtype::two_bit ? round_up16(8 * num_blocks) : 0)),
        indices(cells + round_up16(num_cells)),
        values(indices + round_up16(index_bytes() * k)),
        values_nbytes(dtype == Dtype::two_bit ? (k + 3) / 4 : value_bytes(dtype) * k),
        nbytes(values + round_up16(values_nbytes)) {}

  LS_HD int64_t index_bytes() const { return num_cells > 0 ? 1 : 2; }

 private:
  // Returns 0 if 16-bit indices need fewer bytes. Compares sizes with padding, so that the message of a larger shard is
  // never smaller.
  LS_HD static int64_t cells_of(int64_t numel, int64_t k) {
    const int64_t cells = (numel + kSpan - 1) / kSpan * kCells;
    return round_up16(cells) + round_up16(k) < round_up16(2 * k) ? cells : 0;
  }
};

// Returns the row size if each region has a message in its own row: the size of the longest message.
inline int64_t row_nbytes(const Regions& regions, int64_t k, Dtype dtype) {
  return MessageLayout(regions.most(), k < regions.most() ? k : regions.most(), dtype).nbytes;
}

LS_HD bool header_is_valid(const Header& header, int64_t numel, int64_t k, Dtype dtype) {
  return header.magic == kMagic && header.nonfinite == 0 && header.value_code == static_cast<int32_t>(dtype) &&
         header.numel == numel && header.k == k && header.zero == 0;
}

// Returns the exponent of a finite magnitude, given its key, which is not 0.
LS_HD int exponent_of(uint32_t key) {
  if (key >= 0x00800000u) return static_cast<int>(key >> 23) - 127;
  int exponent = -127;  // denormal
  for (uint32_t bit = 0x00400000u; !(key & bit); bit >>= 1) --exponent;
  return exponent;
}

// Encodes a value of a message with fp32 or bf16 values.
LS_HD uint32_t encode_value(float x, Dtype dtype) {
  const uint32_t key = key_of(x), sign = bits_of(x) >> 31;
  if (dtype == Dtype::fp32) return key == kNanKey ? 0x7FC00000u : bits_of(x);
  if (key == kNanKey) return 0x7FC0u;
  if (key == kInfKey) return 0x7F80u | (sign << 15);
  return to_bf16(x);
}

LS_HD float decode_value(uint32_t stored, Dtype dtype) {
  return dtype == Dtype::fp32 ? float_of(stored) : from_bf16(static_cast<uint16_t>(stored));
}

// ----------------------------------------------------------------------------- two bits per value: see two_bit.py

// Rounds magnitudes to multiples of 2^(exponent - 36). The sum of 65,536 such magnitudes is exact in fp64.
struct Rounding {
  int exponent;
  double shift;

  LS_HD explicit Rounding(uint32_t largest_key)
      : exponent(largest_key == 0 ? 0 : exponent_of(largest_key)), shift(power_of_two(exponent + 16)) {}
  LS_HD double operator()(float x) const {
    return (static_cast<double>(float_of(bits_of(x) & 0x7FFFFFFFu)) + shift) - shift;
  }
};

LS_HD double split_of(double sum, double count, double smallest) {
  const double mean = sum / count;
  return mean + (mean - smallest) * 0.59375;
}

struct Levels {
  float lower, upper;

  LS_HD Levels(double sum, double count, double sum_above, double count_above) : lower(0.0f), upper(0.0f) {
    if (count == 0.0) return;
    lower = upper = static_cast<float>((sum - sum_above) / (count - count_above));
    if (count_above > 0.0) upper = static_cast<float>(sum_above / count_above);
  }
};

LS_HD uint32_t code_of(float x, bool above) { return bits_of(x) >> 31 << 1 | static_cast<uint32_t>(above); }

LS_HD float decode_two_bits(uint32_t code, float lower, float upper) {
  const float level = code & 1u ? upper : lower;
  return code & 2u ? -level : level;
}

}  // namespace lightning_sparse
