// The three CUDA entry points for ctypes, with scratch memory that is neither zero nor a byte longer than asked for.
#include <algorithm>

#include "cuda_runtime.h"
#include "mstopk_cuda.h"

using namespace lightning_sparse;

namespace {

class Scratch {
 public:
  explicit Scratch(int64_t size) : size_(size), raw_(static_cast<size_t>(size) + 512, kFill) {}
  ~Scratch() {
    const bool intact = std::all_of(data() + size_, raw_.data() + raw_.size(), [](char c) { return c == kFill; });
    if (intact) return;
    std::fprintf(stderr, "written past the end of the scratch memory\n");
    std::abort();
  }
  char* data() { return raw_.data() + (256 - reinterpret_cast<uintptr_t>(raw_.data()) % 256) % 256; }

 private:
  static constexpr char kFill = 0x5D;
  int64_t size_;
  std::vector<char> raw_;
};

}  // namespace

extern "C" {

void emulate_force(int whole, int backwards) {
  cuda::force_fallback(whole);
  on_cpu::backwards = backwards;
}

void emulate_mstopk(const void* x, int dtype, int64_t numel, int64_t k, void* values, void* indices) {
  Scratch scratch(cuda::select_scratch_bytes(numel, k));
  cuda::mstopk({x, static_cast<Dtype>(dtype), numel}, k, values, indices, scratch.data(), nullptr);
}

void emulate_compress(const void* grad, int dtype, int64_t numel, const float* residual, float* next_residual,
                      int64_t k, int value_code, const float* scale, uint8_t* message) {
  Scratch scratch(cuda::select_scratch_bytes(numel, k));
  cuda::compress({grad, static_cast<Dtype>(dtype), numel, residual, scale, next_residual}, k,
                 static_cast<Dtype>(value_code), message, scratch.data(), nullptr);
}

void emulate_accumulate(const uint8_t* messages, int64_t count, float* shard, int64_t numel, int64_t k, int value_code,
                        const float* alpha) {
  Scratch scratch(cuda::accumulate_scratch_bytes(count, numel));
  cuda::accumulate(messages, count, shard, numel, k, static_cast<Dtype>(value_code), alpha, scratch.data(), nullptr);
}
}
