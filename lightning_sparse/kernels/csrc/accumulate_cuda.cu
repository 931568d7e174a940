// Sums M messages: one thread block per block of 65,536 elements adds the messages' pairs one message at a time, in row
// order, so no two threads add to the same element concurrently. With alpha, the shard is not cleared before.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "mstopk_cuda.h"

namespace lightning_sparse::cuda {
namespace {

constexpr int kThreads = 512;

struct Sum {
  const uint8_t* messages;
  int64_t num_messages, numel, k;
  Dtype dtype;
  MessageLayout layout;
  float* shard;
  bool clear;
  float alpha;
  int64_t* starts;  // [num_messages][num_blocks + 1]: start of each block's pairs
  int* valid;       // [num_messages]
  int* damaged;     // one flag for all
};

void carve(Sum& sum, char* scratch) {
  sum.damaged = reinterpret_cast<int*>(scratch);
  sum.starts = reinterpret_cast<int64_t*>(scratch + 16);
  sum.valid = reinterpret_cast<int*>(sum.starts + sum.num_messages * (sum.layout.num_blocks + 1));
}

// One block per message: prefix sums of its counts, and whether it is valid.
__global__ void __launch_bounds__(kThreads) open_kernel(Sum sum) {
  __shared__ int64_t sums[kThreads];
  __shared__ int trusted;
  const uint8_t* message = sum.messages + blockIdx.x * sum.layout.nbytes;
  const auto* counts = reinterpret_cast<const uint32_t*>(message + sum.layout.counts);
  int64_t* starts = sum.starts + blockIdx.x * (sum.layout.num_blocks + 1);
  if (threadIdx.x == 0) {
    trusted = header_is_valid(*reinterpret_cast<const Header*>(message), sum.numel, sum.k, sum.dtype);
  }
  __syncthreads();
  const int64_t begin = sum.layout.num_blocks * threadIdx.x / kThreads;
  const int64_t end = sum.layout.num_blocks * (threadIdx.x + 1) / kThreads;
  int64_t total = 0;
  for (int64_t b = begin; b < end; ++b) {
    if (counts[b] > static_cast<uint32_t>(kBlock)) trusted = 0;  // threads only clear it
    total += counts[b];
  }
  sums[threadIdx.x] = total;
  __syncthreads();
  int64_t before = 0;
  for (int i = 0; i < static_cast<int>(threadIdx.x); ++i) before += sums[i];
  for (int64_t b = begin; b < end; ++b) {
    starts[b] = before;
    before += counts[b];
  }
  if (threadIdx.x == kThreads - 1) {
    starts[sum.layout.num_blocks] = before;
    sum.valid[blockIdx.x] = trusted && before == sum.k;
    if (!sum.valid[blockIdx.x]) *sum.damaged = 1;
  }
}

__device__ float value_at(const Sum& sum, const uint8_t* message, int64_t i) {
  const int32_t exponent = reinterpret_cast<const Header*>(message)->exponent;
  const uint8_t* values = message + sum.layout.values;
  if (sum.dtype == Dtype::fp32) return reinterpret_cast<const float*>(values)[i];
  return decode_value(reinterpret_cast<const uint16_t*>(values)[i], exponent, sum.dtype);
}

__global__ void __launch_bounds__(kThreads) add_kernel(Sum sum) {
  const int64_t block = blockIdx.x, base = block * kBlock;
  const int64_t size = sum.numel - base < kBlock ? sum.numel - base : kBlock;
  float* here = sum.shard + base;
  for (int64_t i = threadIdx.x; sum.clear && i < size; i += kThreads) here[i] = 0.0f;
  for (int64_t m = 0; m < sum.num_messages; ++m) {
    __syncthreads();  // the previous message is done
    if (!sum.valid[m]) continue;
    const uint8_t* message = sum.messages + m * sum.layout.nbytes;
    const auto* indices = reinterpret_cast<const uint16_t*>(message + sum.layout.indices);
    const int64_t* starts = sum.starts + m * (sum.layout.num_blocks + 1);
    const int64_t begin = starts[block], end = starts[block + 1];
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
      const int index = indices[i];
      if (index >= size || (i > begin && index <= indices[i - 1])) {
        *sum.damaged = 1;
      } else {
        here[index] = __fadd_rn(here[index], __fmul_rn(sum.alpha, value_at(sum, message, i)));
      }
    }
  }
}

__global__ void poison_kernel(Sum sum) {
  if (!*sum.damaged) return;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < sum.numel; i += stride) {
    sum.shard[i] = float_of(0x7FC00000u);
  }
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

}  // namespace

int64_t accumulate_scratch_bytes(int64_t num_messages, int64_t numel) {
  return 16 + num_messages * (((numel + kBlock - 1) / kBlock + 1) * 8 + 4);
}

void accumulate(const uint8_t* messages, int64_t num_messages, float* shard, int64_t numel, int64_t k,
                Dtype value_dtype, const float* alpha, void* scratch, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  Sum sum{messages,         num_messages,         numel, k, value_dtype, MessageLayout(numel, k, value_dtype), shard,
          alpha == nullptr, alpha ? *alpha : 1.0f};
  carve(sum, static_cast<char*>(scratch));
  check(cudaMemsetAsync(sum.damaged, 0, sizeof(int), on));
  open_kernel<<<static_cast<unsigned>(num_messages), kThreads, 0, on>>>(sum);
  add_kernel<<<static_cast<unsigned>(sum.layout.num_blocks), kThreads, 0, on>>>(sum);
  poison_kernel<<<1024, kThreads, 0, on>>>(sum);
  check(cudaGetLastError());
}

}  // namespace lightning_sparse::cuda
