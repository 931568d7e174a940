// Shared declarations of threads.cpp, memory.cpp and driver.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

namespace on_cpu {

using Epochs = std::unordered_map<unsigned, uint32_t>;  // block -> the barrier before which its accesses are visible

// A thread that accesses memory, as seen by memory.cpp.
struct Self {
  unsigned block, thread;
  uint32_t epoch;       // number of its block's barriers that this thread has passed
  Epochs known, heard;  // accesses of other blocks that are visible now, and after the next fence
  Epochs fenced;        // accesses that this thread's atomics publish, since its last fence
  const char* stack;
  size_t stack_size;
};

inline void join(Epochs& into, const Epochs& from) {
  for (const auto& [block, epoch] : from) {
    uint32_t& mine = into[block];
    mine = epoch > mine ? epoch : mine;
  }
}

// memory.cpp
inline constexpr char kSharedMemory[] = "shared memory";
void add_memory(const void* data, size_t size, bool written, const char* name);
void remove_memory(const void* data);
void mark_written(const void* data, size_t size);
void forget_all_memory();
void kernel_starts(const char* frame);  // frame of the launching function
void enter(Self* self);                 // null: no kernel is running
void fence(Self& self);
void ignore_races(bool ignore);
void check_alignment(const void* at, size_t size);

// threads.cpp
void seed(uint64_t value);
bool unlikely_coin();                             // decided by the seed
void yield();                                     // lets other threads run
[[noreturn]] void fail(const std::string& what);  // ends the launch, which throws
struct Counts {
  int64_t launches, memsets, bytes;  // bytes: of global memory, read or written
};
extern Counts counts;

}  // namespace on_cpu
