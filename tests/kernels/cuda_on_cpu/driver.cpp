// The entry points of selection and accumulation.
#include "driver.h"

extern "C" {

void emulate_whole(int whole) { cuda::force_fallback(whole); }

const char* emulate_mstopk(const void* x, int dtype, int64_t numel, int64_t k, void* values, void* indices) {
  return run([&] {
    reads(x, bytes_of(dtype, numel), "x");
    writes(values, bytes_of(dtype, k), "values");
    writes(indices, 4 * k, "indices");
    const auto memory = scratch(cuda::mstopk_scratch_bytes(numel, k));
    cuda::mstopk({x, static_cast<Dtype>(dtype), numel}, k, values, indices, memory.get(), nullptr);
  });
}

const char* emulate_compress(const void* grad, int dtype, int64_t numel, const float* residual, float* next_residual,
                             int64_t k, int64_t num_regions, int value_code, const float* scale, uint8_t* messages) {
  return run([&] {
    const auto value_dtype = static_cast<Dtype>(value_code);
    const Regions regions(numel, num_regions);
    reads(grad, bytes_of(dtype, numel), "grad");
    reads(residual, 4 * numel, "residual");
    reads(scale, 4, "scale");
    writes(next_residual, 4 * numel, "next_residual");
    writes(messages, num_regions * row_nbytes(regions, k, value_dtype), "messages");
    const auto memory = scratch(cuda::compress_scratch_bytes(regions, k, value_dtype));
    cuda::compress({grad, static_cast<Dtype>(dtype), numel, residual, scale, next_residual}, k, regions, value_dtype,
                   messages, memory.get(), nullptr);
  });
}

// Damaged messages may contain an element twice. Then two threads add to it at once, before it becomes NaN.
const char* emulate_accumulate(const uint8_t* messages, int64_t num_messages, int64_t num_regions, float* shard,
                               int64_t numel, int64_t k, int value_code, const float* alpha, int damaged) {
  const char* error = run([&] {
    const auto dtype = static_cast<Dtype>(value_code);
    on_cpu::ignore_races(damaged);
    const Regions regions(numel, num_regions);
    reads(messages, num_regions * num_messages * row_nbytes(regions, k, dtype), "messages");
    alpha ? reads(shard, 4 * numel, "shard") : writes(shard, 4 * numel, "shard");
    const auto memory = scratch(num_regions * cuda::kAccumulateScratchBytes);
    cuda::accumulate(messages, num_messages, regions, shard, k, dtype, alpha, memory.get(), nullptr);
  });
  on_cpu::ignore_races(false);
  return error;
}
}
