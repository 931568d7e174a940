// The entry points for ctypes. Each returns null, or what went wrong. The kernels may use the memory that they are
// given, to the byte, and only what was written is read.
#include "mstopk_cuda.h"

#include <memory>
#include <stdexcept>
#include <vector>

#include "cuda_runtime.h"
#include "emulation.h"

using namespace lightning_sparse;

namespace {

std::string said;

template <typename Call>
const char* run(const Call& call) {
  on_cpu::counts = {};
  said.clear();
  try {
    call();
  } catch (const std::exception& error) {
    said = error.what();
  }
  on_cpu::forget_all_memory();
  return said.empty() ? nullptr : said.c_str();
}

void reads(const void* data, int64_t size, const char* name) {
  if (data) on_cpu::add_memory(data, static_cast<size_t>(size), true, name);
}

void writes(const void* data, int64_t size, const char* name) {
  if (data) on_cpu::add_memory(data, static_cast<size_t>(size), false, name);
}

std::unique_ptr<char[]> scratch(int64_t size) {
  std::unique_ptr<char[]> memory(new (std::align_val_t(256)) char[static_cast<size_t>(size)]);
  std::memset(memory.get(), 0x5D, static_cast<size_t>(size));
  writes(memory.get(), size, "the scratch memory");
  return memory;
}

int64_t bytes_of(int dtype, int64_t numel) { return value_bytes(static_cast<Dtype>(dtype)) * numel; }

}  // namespace

extern "C" {

void emulate_seed(uint64_t value) { on_cpu::seed(value); }
void emulate_whole(int whole) { cuda::force_fallback(whole); }
void emulate_counts(int64_t* to) {
  to[0] = on_cpu::counts.launches, to[1] = on_cpu::counts.memsets, to[2] = on_cpu::counts.bytes;
}

const char* emulate_mstopk(const void* x, int dtype, int64_t numel, int64_t k, void* values, void* indices) {
  return run([&] {
    reads(x, bytes_of(dtype, numel), "x");
    writes(values, bytes_of(dtype, k), "values");
    writes(indices, 4 * k, "indices");
    const auto memory = scratch(cuda::select_scratch_bytes(numel, k));
    cuda::mstopk({x, static_cast<Dtype>(dtype), numel}, k, values, indices, memory.get(), nullptr);
  });
}

const char* emulate_compress(const void* grad, int dtype, int64_t numel, const float* residual, float* next_residual,
                             int64_t k, int value_code, const float* scale, uint8_t* message) {
  return run([&] {
    const auto value_dtype = static_cast<Dtype>(value_code);
    reads(grad, bytes_of(dtype, numel), "grad");
    reads(residual, 4 * numel, "residual");
    reads(scale, 4, "scale");
    writes(next_residual, 4 * numel, "next_residual");
    writes(message, MessageLayout(numel, k, value_dtype).nbytes, "message");
    const auto memory = scratch(cuda::select_scratch_bytes(numel, k));
    cuda::compress({grad, static_cast<Dtype>(dtype), numel, residual, scale, next_residual}, k, value_dtype, message,
                   memory.get(), nullptr);
  });
}

// Messages that are damaged may hold an element twice, so that two threads add to it at once, before it becomes NaN.
const char* emulate_accumulate(const uint8_t* messages, int64_t count, float* shard, int64_t numel, int64_t k,
                               int value_code, const float* alpha, int damaged) {
  const char* error = run([&] {
    const auto dtype = static_cast<Dtype>(value_code);
    on_cpu::ignore_races(damaged);
    reads(messages, count * MessageLayout(numel, k, dtype).nbytes, "messages");
    alpha ? reads(shard, 4 * numel, "shard") : writes(shard, 4 * numel, "shard");
    const auto memory = scratch(cuda::kAccumulateScratchBytes);
    cuda::accumulate(messages, count, shard, numel, k, dtype, alpha, memory.get(), nullptr);
  });
  on_cpu::ignore_races(false);
  return error;
}
}
