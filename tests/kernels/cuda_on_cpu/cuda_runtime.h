// The parts of CUDA that the kernels use, on a CPU. emulation.py rewrites launches and `__shared__`. It compiles the
// kernels so that each memory access calls memory.cpp, which checks it. threads.cpp runs the threads of several blocks
// as coroutines, in an order that a seed decides.
//
// The emulation finds wrong logic and results that depend on the order of blocks or warps. It finds accesses that are
// out of bounds, misaligned or of uninitialized memory. It finds data races (also between blocks without fences),
// barriers and warp collectives that not all threads reach, and blocks that wait for a block that may never start. It
// cannot find faults that depend on the timing of real hardware, and it says nothing about speed.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#define UNCHECKED __attribute__((no_sanitize("thread")))
#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y;
  constexpr dim3(unsigned x = 1, unsigned y = 1) : x(x), y(y) {}
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {
void check_alignment(const void* at, size_t size);
}

// Compilers copy them word by word, so the checks of single accesses would not detect a misaligned vector.
struct alignas(8) uint2 {
  unsigned x, y;

  uint2(unsigned x, unsigned y) : x(x), y(y) {}
  uint2(const uint2& from) : x(from.x), y(from.y) { on_cpu::check_alignment(&from, sizeof from); }
  uint2& operator=(const uint2& from) {
    on_cpu::check_alignment(this, sizeof from);
    x = from.x, y = from.y;
    return *this;
  }
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;

  uint4(unsigned x, unsigned y, unsigned z, unsigned w) : x(x), y(y), z(z), w(w) {}
  uint4(const uint4& from) : x(from.x), y(from.y), z(from.z), w(from.w) {
    on_cpu::check_alignment(&from, sizeof from);
  }
  uint4& operator=(const uint4& from) {
    on_cpu::check_alignment(this, sizeof from);
    x = from.x, y = from.y, z = from.z, w = from.w;
    return *this;
  }
};

using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "none"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t);

namespace on_cpu {

void launch(dim3 grid, unsigned block, const char* kernel, void (*call)(const void*), const void* body);
// The calling block's variable; `site` identifies the declaration.
void* shared_memory(const void* site, size_t size);
// Returns the deposits of all 32 lanes. All lanes of the warp must call it.
const uint64_t* exchange(uint64_t deposit);
// Checks an atomic access, and may let other threads run before it.
void atomic(const void* at, size_t size);

// body must stay on the stack, because accesses to the heap are checked. A std::function would move it to the heap.
template <typename Body>
void launch(dim3 grid, unsigned block, const char* kernel, const Body& body) {
  launch(grid, block, kernel, [](const void* self) { (*static_cast<const Body*>(self))(); }, &body);
}

template <typename T, typename Site>
T& shared(Site) {
  static const char site = 0;
  return *static_cast<T*>(shared_memory(&site, sizeof(T)));
}

template <typename T, typename Change>
UNCHECKED T update(T* at, const Change& change) {
  atomic(at, sizeof(T));
  T old;
  std::memcpy(&old, at, sizeof old);
  const T changed = change(old);
  std::memcpy(at, &changed, sizeof changed);
  return old;
}

}  // namespace on_cpu

void __syncthreads();
int __syncthreads_count(int predicate);
int __syncthreads_or(int predicate);
void __threadfence();

UNCHECKED inline unsigned __ballot_sync(unsigned, bool predicate) {
  const uint64_t* lanes = on_cpu::exchange(predicate);
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane) ballot |= static_cast<unsigned>(lanes[lane]) << lane;
  return ballot;
}

inline int __all_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) == 0xFFFFFFFFu; }

template <typename T>
UNCHECKED T __shfl_sync(unsigned, T value, int lane) {
  return static_cast<T>(on_cpu::exchange(static_cast<uint64_t>(value))[lane]);
}

template <typename T>
UNCHECKED T __shfl_xor_sync(unsigned, T value, int apart) {
  return static_cast<T>(on_cpu::exchange(static_cast<uint64_t>(value))[static_cast<int>(threadIdx.x % 32) ^ apart]);
}

template <typename T>
UNCHECKED T __shfl_up_sync(unsigned, T value, int apart) {
  const int from = static_cast<int>(threadIdx.x % 32) - apart;
  const uint64_t* lanes = on_cpu::exchange(static_cast<uint64_t>(value));
  return from < 0 ? value : static_cast<T>(lanes[from]);
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

template <typename T>
UNCHECKED T atomicAdd(T* at, std::type_identity_t<T> value) {
  return on_cpu::update(at, [&](T old) { return old + value; });
}
template <typename T>
UNCHECKED T atomicMax(T* at, std::type_identity_t<T> value) {
  return on_cpu::update(at, [&](T old) { return value > old ? value : old; });
}
template <typename T>
UNCHECKED T atomicOr(T* at, std::type_identity_t<T> value) {
  return on_cpu::update(at, [&](T old) { return old | value; });
}
template <typename T>
UNCHECKED T atomicExch(T* at, std::type_identity_t<T> value) {
  return on_cpu::update(at, [&](T) { return value; });
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
