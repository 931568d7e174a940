// Common code of the entry points for ctypes. Each returns null or an error text. The kernels may use the given memory
// up to its last byte, and may read only initialized memory.
#pragma once

#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "cuda_runtime.h"
#include "emulation.h"
#include "mstopk_cuda.h"

using namespace lightning_sparse;  // only the drivers include this file

inline std::string said;

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

inline void reads(const void* data, int64_t size, const char* name) {
  if (data) on_cpu::add_memory(data, static_cast<size_t>(size), true, name);
}

inline void writes(const void* data, int64_t size, const char* name) {
  if (data) on_cpu::add_memory(data, static_cast<size_t>(size), false, name);
}

constexpr std::align_val_t kAligned{256};

struct DeleteAligned {
  void operator()(char* memory) const { operator delete[](memory, kAligned); }
};

inline std::unique_ptr<char[], DeleteAligned> scratch(int64_t size) {
  std::unique_ptr<char[], DeleteAligned> memory(new (kAligned) char[static_cast<size_t>(size)]);
  std::memset(memory.get(), 0x5D, static_cast<size_t>(size));
  writes(memory.get(), size, "the scratch memory");
  return memory;
}

inline int64_t bytes_of(int dtype, int64_t numel) { return value_bytes(static_cast<Dtype>(dtype)) * numel; }
