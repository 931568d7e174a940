// Selection, compression, accumulation, rounding and a node's models on CUDA, on raw pointers. The caller has checked
// every argument, has made the device current, and provides scratch memory. All work goes to `stream`; nothing waits
// for the device, so every call can be captured in a graph. Throws std::runtime_error when a launch fails.
#pragma once

#include <cstdint>

#include "common.h"

namespace lightning_sparse::cuda {

// The pointers after `numel` may be null. No defaults: it lies in shared memory, too, which nobody initialises.
struct Source {
  const void* grad;
  Dtype dtype;
  int64_t numel;
  const float* residual;
  const float* scale;  // on the device
  float* store;        // optional: receives acc
};

// Of kernels whose blocks take work until none is left. Tests choose fewer, so that blocks have several turns.
#ifdef LS_MOST_BLOCKS
constexpr int64_t kMostBlocks = LS_MOST_BLOCKS;
#else
constexpr int64_t kMostBlocks = 1024;
#endif

// For tests: process all elements instead of the candidates. Results do not depend on it.
void force_fallback(bool on);

int64_t mstopk_scratch_bytes(int64_t numel, int64_t k);
int64_t compress_scratch_bytes(const Regions& regions, int64_t k, Dtype value_dtype);
constexpr int64_t kAccumulateScratchBytes = 16;  // a region

void mstopk(const Source& source, int64_t k, void* values, void* indices, void* scratch, void* stream);
// A message of k pairs for each region, or of all elements of a smaller one, in rows of `row_nbytes`.
void compress(const Source& source, int64_t k, const Regions& regions, Dtype value_dtype, uint8_t* messages,
              void* scratch, void* stream);
// Overwrites each region of the shard with the sum of its `num_messages` messages; with alpha, on the host, adds alpha
// times each value instead.
void accumulate(const uint8_t* messages, int64_t num_messages, const Regions& regions, float* shard, int64_t k,
                Dtype value_dtype, const float* alpha, void* scratch, void* stream);
// acc, of numel elements, as bf16 in so many rows of equal length, padded with zeros; `store` receives what rounding
// took off.
void round_rows(const Source& source, int64_t num_rows, uint16_t* rows, void* stream);
// The sum of bf16 rows, in row order and fp32, as bf16; what rounding took off is added to the residual, which may be
// null, or shorter than a row.
void sum_rows(const uint16_t* rows, int64_t num_rows, int64_t numel, uint16_t* row, float* residual,
              int64_t residual_numel, void* stream);
// Adds to `own` what the model has changed by since it held what lies between own and `shared`.
void accumulate_delta(float* own, const float* shared, const Model& model, float ahead, void* stream);
void lerp_into(const float* own, const float* shared, const Model& model, float ahead, void* stream);

}  // namespace lightning_sparse::cuda
