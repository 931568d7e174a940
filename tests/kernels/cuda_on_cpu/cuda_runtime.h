// As much of CUDA as the kernels use, on a CPU: the threads of a block are coroutines that run one after the other from
// one barrier to the next. It finds wrong logic (indices, scans, races with a fixed order, uninitialised scratch), not
// wrong memory orders, and says nothing about speed. Warp collectives count as barriers of the whole block, so a kernel
// must reach them in step, which `launch` checks.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(threads)

struct Dim {
  unsigned x;
};
inline Dim threadIdx, blockIdx, blockDim, gridDim;

using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "none"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t) {
  std::memset(to, value, size);
  return cudaSuccess;
}

namespace on_cpu {

struct Thread {
  ucontext_t start;
  jmp_buf resume;
  std::vector<char> stack = std::vector<char>(65536);
  bool started, done;
  unsigned collectives;
  long barriers;
};

inline std::vector<Thread> threads(1024);
inline jmp_buf scheduler;
inline unsigned current;
inline const std::function<void()>* kernel;
inline uint32_t deposits[2][1024];  // of alternate collectives, since a fast thread may be one ahead
inline bool backwards = false;      // the order of blocks and of threads between barriers

inline void wait() {
  Thread& self = threads[current];
  ++self.barriers;
  if (!_setjmp(self.resume)) _longjmp(scheduler, 1);
}

inline void run() {
  (*kernel)();
  threads[current].done = true;
  _longjmp(scheduler, 1);
}

inline void step(unsigned t) {
  current = threadIdx.x = t;
  if (_setjmp(scheduler)) return;
  if (threads[t].started) _longjmp(threads[t].resume, 1);
  threads[t].started = true;
  setcontext(&threads[t].start);
}

inline void start(unsigned t) {
  Thread& thread = threads[t];
  thread.started = thread.done = false;
  thread.collectives = 0;
  thread.barriers = 0;
  getcontext(&thread.start);
  thread.start.uc_stack.ss_sp = thread.stack.data();
  thread.start.uc_stack.ss_size = thread.stack.size();
  thread.start.uc_link = nullptr;
  makecontext(&thread.start, run, 0);
}

inline bool step_all(unsigned block) {  // false when all have returned
  long barriers = -1;
  for (unsigned i = 0; i < block; ++i) {
    const unsigned t = backwards ? block - 1 - i : i;
    if (threads[t].done) continue;
    step(t);
    if (threads[t].done) continue;
    if (barriers >= 0 && barriers != threads[t].barriers) {
      std::fprintf(stderr, "threads of one block wait at different barriers\n");
      std::abort();
    }
    barriers = threads[t].barriers;
  }
  return barriers >= 0;
}

// alone: the kernel has no barriers, so that its threads need no coroutines.
inline void launch(unsigned grid, unsigned block, bool alone, const std::function<void()>& body) {
  kernel = &body;
  gridDim.x = grid;
  blockDim.x = block;
  for (unsigned i = 0; i < grid; ++i) {
    blockIdx.x = backwards ? grid - 1 - i : i;
    if (alone) {
      for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) body();
      continue;
    }
    for (unsigned t = 0; t < block; ++t) start(t);
    while (step_all(block)) {
    }
  }
}

inline const uint32_t* exchange(uint32_t value) {
  const unsigned self = current, turn = threads[self].collectives++ & 1;
  deposits[turn][self] = value;
  wait();
  return &deposits[turn][self / 32 * 32];
}

}  // namespace on_cpu

inline void __syncthreads() { on_cpu::wait(); }

inline unsigned __ballot_sync(unsigned, bool predicate) {
  const uint32_t* lanes = on_cpu::exchange(predicate);
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane) ballot |= lanes[lane] << lane;
  return ballot;
}

inline uint32_t __shfl_xor_sync(unsigned, uint32_t value, int apart) {
  const uint32_t* lanes = on_cpu::exchange(value);
  return lanes[on_cpu::current % 32 ^ apart];
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

template <typename T>
T atomicAdd(T* to, T value) {
  const T old = *to;
  *to += value;
  return old;
}

inline uint32_t atomicMax(uint32_t* to, uint32_t value) {
  const uint32_t old = *to;
  *to = value > old ? value : old;
  return old;
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
