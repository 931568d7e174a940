// Selection, compression, accumulation, rounding and a node's models on the CPU, on raw pointers. The caller has
// checked every argument.
#pragma once

#include <cstdint>
#include <functional>

#include "common.h"

namespace lightning_sparse::cpu {

// Defines acc = residual + grad * scale. Residual and scale are optional; grad has any of the three types.
// If `store` is set, the pass also writes acc there.
struct Source {
  const void* grad;
  Dtype dtype;
  int64_t numel;
  const float* residual = nullptr;
  const float* scale = nullptr;
  float* store = nullptr;

  bool plain() const { return dtype == Dtype::fp32 && !residual && !scale && !store; }  // acc is grad itself
  bool summed() const { return dtype == Dtype::fp32 && residual && store; }
};

// Runs body(i, worker) for i = 0 ... n - 1 on at most `threads` workers. Workers take one i at a time, so that a slow
// thread delays only that i.
struct Parallel {
  int64_t threads;
  std::function<void(int64_t n, const std::function<void(int64_t i, int64_t worker)>& body)> run;
};

// For tests: force a code path. Results do not depend on it.
enum Force : int { kForceNothing = 0, kForceScalar = 1, kForceFallback = 2 };
void force(int flags);

// indices: int32_t while numel < 2^31, else int64_t. values: of the source's type.
void mstopk(const Source& source, int64_t k, void* values, void* indices, const Parallel& parallel);
// A message of k pairs for each region, or of all elements of a smaller one, in rows of `row_nbytes`.
void compress(const Source& source, int64_t k, const Regions& regions, Dtype value_dtype, uint8_t* messages,
              const Parallel& parallel);
// Overwrites each region of the shard with the sum of its `num_messages` messages; with alpha, adds alpha times each
// value instead.
void accumulate(const uint8_t* messages, int64_t num_messages, const Regions& regions, float* shard, int64_t k,
                Dtype value_dtype, const float* alpha, const Parallel& parallel);
// acc, of numel elements, as bf16 in so many rows of equal length, padded with zeros; `store` receives what rounding
// took off.
void round_rows(const Source& source, int64_t num_rows, uint16_t* rows, const Parallel& parallel);
// The sum of bf16 rows, in row order and fp32, as bf16; what rounding took off is added to the residual, which may be
// null, or shorter than a row.
void sum_rows(const uint16_t* rows, int64_t num_rows, int64_t numel, uint16_t* row, float* residual,
              int64_t residual_numel, const Parallel& parallel);
// Adds to `own` what the model has changed by since it held what lies between own and `shared`.
void accumulate_delta(float* own, const float* shared, const Model& model, float ahead, const Parallel& parallel);
void lerp_into(const float* own, const float* shared, const Model& model, float ahead, const Parallel& parallel);

}  // namespace lightning_sparse::cpu
