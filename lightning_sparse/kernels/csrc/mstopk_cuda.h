// The CUDA kernels: selection, compression, accumulation, rounding, and interpolation of weights. They take raw
// pointers. The caller has checked every argument, has made the device current, and provides scratch memory. All work
// goes to `stream`. Nothing waits for the device, so a graph can capture every call. A launch that fails throws
// std::runtime_error.
#pragma once

#include <cstdint>

#include "common.h"

namespace lightning_sparse::cuda {

// As in mstopk_cpu.h. The pointers after `numel` may be null. They have no defaults, because a kernel also keeps a
// Source in shared memory, which cannot be initialized.
struct Source {
  const void* grad;
  Dtype dtype;
  int64_t numel;
  const float* residual;
  const float* scale;    // on the device
  float* next_residual;  // receives acc
};

// Kernels whose blocks process several work items each have about this many CUDA blocks at most, over all regions. Each
// region has at least one block. Tests set a lower limit, so that each block processes several items.
#ifdef LS_MOST_BLOCKS
constexpr int64_t kMostBlocks = LS_MOST_BLOCKS;
#else
constexpr int64_t kMostBlocks = 1024;
#endif

// Processes all elements instead of the candidates, for tests. Results do not depend on it.
void force_fallback(bool on);

int64_t mstopk_scratch_bytes(int64_t numel, int64_t k);
int64_t compress_scratch_bytes(const Regions& regions, int64_t k, Dtype value_dtype);
constexpr int64_t kAccumulateScratchBytes = 16;  // per region

void mstopk(const Source& source, int64_t k, void* values, void* indices, void* scratch, void* stream);
// Writes a message of min(k, elements of the region) pairs per region, in rows of `row_nbytes`.
void compress(const Source& source, int64_t k, const Regions& regions, Dtype value_dtype, uint8_t* messages,
              void* scratch, void* stream);
// Overwrites each region of the shard with the sum of its `num_messages` messages. With alpha, which lies on the host,
// it adds alpha times each value instead. If a message is invalid, its whole region becomes NaN.
void accumulate(const uint8_t* messages, int64_t num_messages, const Regions& regions, float* shard, int64_t k,
                Dtype value_dtype, const float* alpha, void* scratch, void* stream);
// Rounds acc to bf16, and writes it to rows of equal length, padded with zeros. `next_residual` receives the rounding
// errors.
void round_rows(const Source& source, int64_t num_rows, uint16_t* rows, void* stream);
// Sums bf16 rows in fp32, in row order, and rounds the sum to bf16. Adds the rounding errors to the residual, which may
// be null or shorter than a row.
void sum_rows(const uint16_t* rows, int64_t num_rows, int64_t numel, uint16_t* row, float* residual,
              int64_t residual_numel, void* stream);
// Adds to `local` the change of the model since `lerp_into` wrote it with these arguments.
void accumulate_delta(float* local, const float* global, const Model& model, float local_fraction, void* stream);
// Writes global + (local - global) * local_fraction into the model, rounded to its types.
void lerp_into(const float* local, const float* global, const Model& model, float local_fraction, void* stream);

}  // namespace lightning_sparse::cuda
