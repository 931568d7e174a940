// Checks each access of a kernel. Code compiled with g++ -fsanitize=thread calls the functions at the end of this file,
// which replace the runtime of the sanitizer.
//
// Two accesses race if one of them writes, not both are atomic, and nothing orders them. A barrier orders accesses of
// one block. Between blocks, the order needs a fence and an atomic write in one block, an atomic read and a fence in
// the other, and a barrier in each block on its side. (Writes since a thread's last barrier do not count as published,
// because kernels should have a barrier there.)
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <vector>

#include "emulation.h"

namespace on_cpu {
namespace {

constexpr size_t kGranule = 1;  // bytes per cell
constexpr size_t kLauncher = 1 << 16;

struct Stamp {  // the last access; launch 0: none
  uint64_t launch : 10 = 0, block : 20 = 0, thread : 10 = 0, epoch : 23 = 0, atomic : 1 = 0;
};

struct Cell {
  Stamp write, read, read_before;  // the last reader, and the last reader of another thread before it
};

struct Region {
  const char *begin, *end;
  const char* name;
  std::unique_ptr<Cell[], void (*)(void*)> cells;
  std::vector<bool> written;
};

std::map<const char*, Region> regions;  // key: end of the region
std::unordered_map<const void*, Epochs> told;  // accesses published by atomics on this address
Self* self;
const char* launcher;  // its frame contains the arguments of the launch
uint64_t launch;
bool races_count = true;

std::pair<uintptr_t, uintptr_t> find_image() {
  std::pair<uintptr_t, uintptr_t> image;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        const auto here = reinterpret_cast<uintptr_t>(&find_image);
        uintptr_t begin = UINTPTR_MAX, end = 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
          begin = std::min<uintptr_t>(begin, info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
          end = std::max<uintptr_t>(end, info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz);
        }
        if (here < begin || here >= end) return 0;
        *static_cast<std::pair<uintptr_t, uintptr_t>*>(found) = {begin, end};
        return 1;
      },
      &image);
  return image;
}

// Stacks, arguments of the launch, constants, threadIdx and similar memory.
bool is_private(const char* at) {
  static const auto image = find_image();
  const auto address = reinterpret_cast<uintptr_t>(at);
  if (at >= self->stack && at < self->stack + self->stack_size) return true;
  if (at >= launcher && at < launcher + kLauncher) return true;
  return address >= image.first && address < image.second;
}

std::string place(const Region& region, const char* at) {
  return std::to_string(at - region.begin) + " of the " + std::to_string(region.end - region.begin) + " bytes of " +
         region.name;
}

[[noreturn]] void out_of_bounds(const char* at, size_t size, const char* verb) {
  std::string where = "nowhere near any memory that it was given";
  long nearest = 4096;
  for (const auto& [end, region] : regions) {
    const long past = at - end, before = region.begin - at;
    if (past > -static_cast<long>(size) && past < nearest) {
      nearest = past, where = std::to_string(past) + " bytes past " + region.name;
    }
    if (before > 0 && before < nearest) {
      nearest = before, where = std::to_string(before) + " bytes before " + region.name;
    }
  }
  fail(std::string("out of bounds: ") + verb + " " + std::to_string(size) + " bytes " + where);
}

bool ordered(const Stamp& before) {
  if (before.launch != launch || (before.block == self->block && before.thread == self->thread)) return true;
  if (before.block == self->block) return before.epoch < self->epoch;
  const auto known = self->known.find(before.block);
  return known != self->known.end() && before.epoch < known->second;
}

void check_race(const Stamp& before, bool atomic, const Region& region, const char* at, const char* verbs) {
  if (!races_count || (before.atomic && atomic) || ordered(before)) return;
  fail(std::string("race: ") + verbs + " block " + std::to_string(before.block) + ", thread " +
       std::to_string(before.thread) + ", at byte " + place(region, at));
}

void access_cell(Region& region, const char* at, bool write, bool atomic) {
  const size_t index = static_cast<size_t>(at - region.begin) / kGranule;
  Cell& cell = region.cells[index];
  const Stamp now{launch, self->block, self->thread, self->epoch, atomic};
  if ((!write || atomic) && !region.written[index]) fail("reads what nobody wrote: byte " + place(region, at));
  check_race(cell.write, atomic, region, at, write ? "writes after" : "reads what was written by");
  if (write) {
    check_race(cell.read, atomic, region, at, "writes what was read by");
    check_race(cell.read_before, atomic, region, at, "writes what was read by");
    cell.write = now;
    region.written[index] = true;
    return;
  }
  if (cell.read.block != now.block || cell.read.thread != now.thread) cell.read_before = cell.read;
  cell.read = now;
}

void access(const void* address, size_t size, bool write, bool atomic) {
  const char* at = static_cast<const char*>(address);
  if (self == nullptr || is_private(at)) return;
  check_alignment(at, size);
  const auto found = regions.upper_bound(at);
  if (found == regions.end() || at < found->second.begin || at + size > found->second.end) {
    out_of_bounds(at, size, write ? "writes" : "reads");
  }
  if (found->second.name != kSharedMemory) counts.bytes += static_cast<int64_t>(size);
  for (size_t i = 0; i < size; i += kGranule) access_cell(found->second, at + i, write, atomic);
}

// An atomic read receives the accesses published at this address. An atomic write publishes the accesses before the
// last fence.
void pass_on(const void* address, bool read, bool write) {
  Epochs& said = told[address];
  if (read) join(self->heard, said);
  if (write && !read) said.clear();
  if (write) join(said, self->fenced);
}

void volatile_access(const void* address, size_t size, bool write) {
  if (self == nullptr || is_private(static_cast<const char*>(address))) return;
  yield();
  access(address, size, write, true);
  pass_on(address, !write, write);
}

}  // namespace

void check_alignment(const void* at, size_t size) {
  if (self == nullptr || reinterpret_cast<uintptr_t>(at) % size == 0) return;
  fail("misaligned access of " + std::to_string(size) + " bytes");
}

void add_memory(const void* data, size_t size, bool written, const char* name) {
  const char* begin = static_cast<const char*>(data);
  const size_t cells = size / kGranule + 1;
  auto* shadow = static_cast<Cell*>(std::calloc(cells, sizeof(Cell)));
  Region region{begin, begin + size, name, {shadow, std::free}, std::vector<bool>(cells, written)};
  regions.emplace(begin + size, std::move(region));
}

void remove_memory(const void* data) {
  for (auto each = regions.begin(); each != regions.end(); ++each) {
    if (each->second.begin != data) continue;
    regions.erase(each);
    return;
  }
}

void mark_written(const void* data, size_t size) {
  const char* at = static_cast<const char*>(data);
  const auto found = regions.upper_bound(at);
  if (found == regions.end() || at < found->second.begin || at + size > found->second.end) return;
  const long first = (at - found->second.begin) / static_cast<long>(kGranule);
  std::fill_n(found->second.written.begin() + first, (size + kGranule - 1) / kGranule, true);
}

void forget_all_memory() {
  regions.clear();
  launch = 0;
}

void kernel_starts(const char* frame) {
  launcher = frame;
  ++launch;
  told.clear();
}

void enter(Self* entering) { self = entering; }

void fence(Self& fencing) {
  join(fencing.known, fencing.heard);
  fencing.fenced = fencing.known;
  fencing.fenced[fencing.block] = fencing.epoch;
}

void ignore_races(bool ignore) { races_count = !ignore; }

void atomic(const void* at, size_t size) {
  if (unlikely_coin()) yield();
  access(at, size, true, true);
  pass_on(at, true, true);
}

}  // namespace on_cpu

#define HOOKS(size)                                                                              \
  void __tsan_read##size(void* at) { on_cpu::access(at, size, false, false); }                   \
  void __tsan_write##size(void* at) { on_cpu::access(at, size, true, false); }                   \
  void __tsan_unaligned_read##size(void* at) { on_cpu::access(at, size, false, false); }         \
  void __tsan_unaligned_write##size(void* at) { on_cpu::access(at, size, true, false); }         \
  void __tsan_volatile_read##size(void* at) { on_cpu::volatile_access(at, size, false); }        \
  void __tsan_volatile_write##size(void* at) { on_cpu::volatile_access(at, size, true); }        \
  void __tsan_unaligned_volatile_read##size(void* at) { on_cpu::volatile_access(at, size, false); } \
  void __tsan_unaligned_volatile_write##size(void* at) { on_cpu::volatile_access(at, size, true); }

extern "C" {
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)

void __tsan_read_range(void* at, size_t size) {
  for (size_t i = 0; i < size; i += on_cpu::kGranule) {
    on_cpu::access(static_cast<char*>(at) + i, on_cpu::kGranule, false, false);
  }
}
void __tsan_write_range(void* at, size_t size) {
  for (size_t i = 0; i < size; i += on_cpu::kGranule) {
    on_cpu::access(static_cast<char*>(at) + i, on_cpu::kGranule, true, false);
  }
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
uint8_t __tsan_atomic8_load(const volatile uint8_t* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
void __tsan_atomic8_store(volatile uint8_t* at, uint8_t value, int) { __atomic_store_n(at, value, __ATOMIC_SEQ_CST); }
}
