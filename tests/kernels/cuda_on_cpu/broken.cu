// Kernels with one fault each, which the emulation must find, and one kernel without a fault.
#include <cuda_runtime.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include "emulation.h"

namespace {

constexpr int kThreads = 64, kBlocks = 6;

struct Data {
  unsigned* words;  // [kThreads * kBlocks], initialized
  unsigned* fresh;  // [kThreads * kBlocks], uninitialized
  unsigned* count;  // [2], zero
  float* sum;       // zero
};

unsigned __device__ place() { return blockIdx.x * kThreads + threadIdx.x; }

__global__ void writes_past_the_end(Data data) { data.words[place() + 1] = 1; }

__global__ void reads_before_the_start(Data data) { data.fresh[place()] = *(data.words + place() - 1); }

__global__ void shared_past_the_end(Data data) {
  __shared__ unsigned mine[kThreads];
  mine[threadIdx.x + 1] = data.words[place()];
}

__global__ void misaligned(Data data) {
  const auto* bytes = reinterpret_cast<const char*>(data.words);
  data.fresh[place()] = *reinterpret_cast<const unsigned*>(bytes + 2 * threadIdx.x);
}

__global__ void reads_unwritten(Data data) { data.words[place()] = data.fresh[place()]; }

__global__ void reads_unwritten_shared(Data data) {
  __shared__ unsigned mine[kThreads];
  if (threadIdx.x > 0) mine[threadIdx.x] = 1;
  __syncthreads();
  data.words[place()] = mine[threadIdx.x];
}

__global__ void lacks_a_barrier(Data data) {
  __shared__ unsigned mine[kThreads];
  mine[threadIdx.x] = 0;
  __syncthreads();
  mine[threadIdx.x] = data.words[place()];
  data.words[place()] = mine[kThreads - 1 - threadIdx.x];
}

__global__ void blocks_share_a_word(Data data) {
  if (threadIdx.x == 0) *data.count += 1;
}

__device__ void sum_up(Data data) {
  unsigned sum = 0;
  for (int i = 0; i < kThreads * kBlocks; ++i) sum += data.words[i];
  data.fresh[0] = sum;
}

__global__ void last_block_without_a_fence(Data data) {
  data.words[place()] += 1;
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(data.count, 1) == kBlocks - 1) sum_up(data);
}

__global__ void last_block_before_the_barrier(Data data) {
  data.words[place()] += 1;
  if (threadIdx.x != 0) return;
  __threadfence();
  const bool last = atomicAdd(data.count, 1) == kBlocks - 1;
  __threadfence();
  if (last) sum_up(data);
}

__global__ void half_at_a_barrier(Data data) {
  if (threadIdx.x < 40) __syncthreads();
  if (threadIdx.x >= 40) data.words[place()] = __ballot_sync(~0u, true);
}

__global__ void waits_for_the_block_before(Data data) {
  if (threadIdx.x != 0) return;
  while (*static_cast<volatile unsigned*>(data.count) < blockIdx.x) {
  }
  atomicAdd(data.count, 1);
}

__global__ void adds_in_any_order(Data data) {
  if (threadIdx.x == 0) atomicAdd(data.sum, blockIdx.x == 0 ? 1e8f : 3.0f);
}

__global__ void right(Data data) {
  __shared__ unsigned turn;
  __shared__ bool last;
  if (threadIdx.x == 0) turn = atomicAdd(data.count, 1);
  __syncthreads();
  data.words[turn * kThreads + threadIdx.x] += 1;
  __syncthreads();
  if (threadIdx.x == 0) {
    while (*static_cast<volatile unsigned*>(data.count + 1) < turn) {
    }
    __threadfence();
    last = atomicAdd(data.count + 1, 1) == kBlocks - 1;
    __threadfence();
  }
  __syncthreads();
  if (last && threadIdx.x == 0) sum_up(data);
}

std::string said;

void run(void (*kernel)(Data)) {
  constexpr size_t kWords = kThreads * kBlocks, kBytes = 4 * kWords;
  const std::unique_ptr<unsigned[]> words(new unsigned[kWords]()), fresh(new unsigned[kWords]());
  const std::unique_ptr<unsigned[]> count(new unsigned[2]());
  const std::unique_ptr<float> total(new float(0));
  on_cpu::add_memory(words.get(), kBytes, true, "words");
  on_cpu::add_memory(fresh.get(), kBytes, false, "fresh");
  on_cpu::add_memory(count.get(), 8, true, "count");
  on_cpu::add_memory(total.get(), 4, true, "sum");
  const Data data{words.get(), fresh.get(), count.get(), total.get()};
  try {
    kernel<<<kBlocks, kThreads, 0, stream>>>(data);
    said = "sum " + std::to_string(*total);
  } catch (const std::exception& error) {
    said = error.what();
  }
  on_cpu::forget_all_memory();
}

}  // namespace

// Runs the kernel of that name. Returns the fault that was found, or the sum.
extern "C" const char* emulate_broken(const char* name, uint64_t seed) {
#define KERNEL(kernel) {#kernel, kernel}
  const std::map<std::string, void (*)(Data)> kernels{
      KERNEL(writes_past_the_end),       KERNEL(reads_before_the_start),        KERNEL(shared_past_the_end),
      KERNEL(misaligned),                KERNEL(reads_unwritten),               KERNEL(reads_unwritten_shared),
      KERNEL(lacks_a_barrier),           KERNEL(blocks_share_a_word),           KERNEL(last_block_without_a_fence),
      KERNEL(half_at_a_barrier),         KERNEL(last_block_before_the_barrier), KERNEL(waits_for_the_block_before),
      KERNEL(adds_in_any_order),         KERNEL(right)};
  on_cpu::seed(seed);
  run(kernels.at(name));
  return said.c_str();
}
