// The entry points of rounding.
#include "driver.h"

extern "C" {

const char* emulate_round_rows(const void* grad, int dtype, int64_t numel, const float* residual, float* next_residual,
                               int64_t num_rows, const float* scale, uint16_t* rows) {
  return run([&] {
    reads(grad, bytes_of(dtype, numel), "grad");
    reads(residual, 4 * numel, "residual");
    reads(scale, 4, "scale");
    writes(next_residual, 4 * numel, "next_residual");
    writes(rows, 2 * num_rows * row_numel(numel, num_rows), "rows");
    cuda::round_rows({grad, static_cast<Dtype>(dtype), numel, residual, scale, next_residual}, num_rows, rows, nullptr);
  });
}

const char* emulate_sum_rows(const uint16_t* rows, int64_t num_rows, int64_t numel, uint16_t* row, float* residual,
                             int64_t residual_numel) {
  return run([&] {
    reads(rows, 2 * num_rows * numel, "rows");
    writes(row, 2 * numel, "row");
    reads(residual, 4 * residual_numel, "residual");
    cuda::sum_rows(rows, num_rows, numel, row, residual, residual_numel, nullptr);
  });
}
}
