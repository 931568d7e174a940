// The CPU kernels: selection, compression, accumulation, rounding, and interpolation of weights. They take raw
// pointers. The caller has checked every argument.
#pragma once

#include <cstdint>
#include <functional>

#include "common.h"

namespace lightning_sparse::cpu {

// Defines acc = residual + grad * scale. Residual and scale are optional. grad is fp32, bf16 or fp16. If
// `next_residual` is set, the pass writes acc there, and later steps replace acc by the new residual.
struct Source {
  const void* grad;
  Dtype dtype;
  int64_t numel;
  const float* residual = nullptr;
  const float* scale = nullptr;
  float* next_residual = nullptr;

  bool plain() const { return dtype == Dtype::fp32 && !residual && !scale && !next_residual; }  // acc is grad itself
  bool summed() const { return dtype == Dtype::fp32 && residual && next_residual; }
};

// Runs body(i, worker) for i = 0 ... n - 1 on at most `threads` workers. Workers take one i at a time, so a slow thread
// delays only its current i.
struct Parallel {
  int64_t threads;
  std::function<void(int64_t n, const std::function<void(int64_t i, int64_t worker)>& body)> run;
};

// Forces a code path, for tests. Results do not depend on it.
enum Force : int { kForceNothing = 0, kForceScalar = 1, kForceFallback = 2 };
void force(int flags);

// Writes the k largest elements. Indices are int32_t if numel < 2^31, otherwise int64_t. Values have the type of grad.
void mstopk(const Source& source, int64_t k, void* values, void* indices, const Parallel& parallel);
// Writes a message of min(k, elements of the region) pairs per region, in rows of `row_nbytes`.
void compress(const Source& source, int64_t k, const Regions& regions, Dtype value_dtype, uint8_t* messages,
              const Parallel& parallel);
// Overwrites each region of the shard with the sum of its `num_messages` messages. With alpha, it adds alpha times each
// value instead. If a message is invalid, its whole region becomes NaN.
void accumulate(const uint8_t* messages, int64_t num_messages, const Regions& regions, float* shard, int64_t k,
                Dtype value_dtype, const float* alpha, const Parallel& parallel);
// Rounds acc to bf16, and writes it to rows of equal length, padded with zeros. `next_residual` receives the rounding
// errors.
void round_rows(const Source& source, int64_t num_rows, uint16_t* rows, const Parallel& parallel);
// Sums bf16 rows in fp32, in row order, and rounds the sum to bf16. Adds the rounding errors to the residual, which may
// be null or shorter than a row.
void sum_rows(const uint16_t* rows, int64_t num_rows, int64_t numel, uint16_t* row, float* residual,
              int64_t residual_numel, const Parallel& parallel);
// Adds to `local` the change of the model since `lerp_into` wrote it with these arguments.
void accumulate_delta(float* local, const float* global, const Model& model, float local_fraction,
                      const Parallel& parallel);
// Writes global + (local - global) * local_fraction into the model, rounded to its types.
void lerp_into(const float* local, const float* global, const Model& model, float local_fraction,
               const Parallel& parallel);

}  // namespace lightning_sparse::cpu
