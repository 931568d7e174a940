// Runs a grid. A few blocks at a time are resident, and their threads are coroutines. If a thread waits or yields, the
// seed decides which thread runs next.
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "cuda_runtime.h"
#include "emulation.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace on_cpu {

Counts counts;

namespace {

constexpr size_t kStack = 65536, kGuard = 64, kMostShared = 48 << 10;
constexpr long kMostYields = 3'000'000;

enum class State { ready, at_barrier, at_collective, done };

struct Thread {
  Self self;
  ucontext_t start;
  jmp_buf resume;
  State state = State::ready;
  bool started = false;
  uint64_t deposit = 0;
  unsigned collectives = 0;
  int votes = 0;  // of all threads, at the last barrier
};

struct Warp {
  uint64_t deposits[2][32];  // for alternate collectives, because a fast lane may be one collective ahead
  int arrived = 0;
};

struct Block {
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  std::vector<unsigned> ready;
  std::unordered_map<const void*, std::unique_ptr<char[]>> shared;
  size_t shared_size = 0;
  unsigned index, alive = 0, at_barrier = 0;
  int votes = 0;
  Epochs known;
};

std::mt19937_64 random_source;
jmp_buf scheduler;
Block* block;
Thread* thread;
void (*call)(const void*);
const void* body;
std::string error;
long yields;
std::vector<char*> stacks;

uint64_t random_below(uint64_t limit) { return random_source() % limit; }

char* take_stack() {
  if (stacks.empty()) {
    void* fresh = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) throw std::bad_alloc();
    return static_cast<char*>(fresh);
  }
  char* stack = stacks.back();
  stacks.pop_back();
  return stack;
}

void leave(State state) {
  thread->state = state;
  if (!_setjmp(thread->resume)) _longjmp(scheduler, 1);
}

void run() {
  call(body);
  thread->state = State::done;
  _longjmp(scheduler, 1);
}

void begin(Thread& fresh, const ucontext_t& like, unsigned index) {
  fresh.self.block = block->index, fresh.self.thread = index, fresh.self.epoch = 1;
  fresh.self.stack = take_stack(), fresh.self.stack_size = kStack;
  fresh.start = like;
  fresh.start.uc_stack.ss_sp = const_cast<char*>(fresh.self.stack);
  fresh.start.uc_stack.ss_size = kStack;
  fresh.start.uc_link = nullptr;
  makecontext(&fresh.start, run, 0);
}

std::unique_ptr<Block> admit(unsigned index) {
  auto fresh = std::make_unique<Block>();
  block = fresh.get();
  block->index = index;
  block->alive = blockDim.x;
  block->warps.resize((blockDim.x + 31) / 32);
  ucontext_t like;
  getcontext(&like);
  for (unsigned t = 0; t < blockDim.x; ++t) {
    block->threads.push_back(std::make_unique<Thread>());
    begin(*block->threads.back(), like, t);
    block->ready.push_back(t);
  }
  return fresh;
}

void dismiss(Block& old) {
  for (const auto& each : old.threads) stacks.push_back(const_cast<char*>(each->self.stack));
  for (const auto& [site, memory] : old.shared) remove_memory(memory.get() + kGuard);
}

void make_ready(unsigned t) {
  block->threads[t]->state = State::ready;
  block->ready.push_back(t);
}

void pass_barrier() {
  for (const auto& each : block->threads) join(block->known, each->self.known);
  for (unsigned t = 0; t < block->threads.size(); ++t) {
    Thread& each = *block->threads[t];
    if (each.state != State::at_barrier) continue;
    ++each.self.epoch;
    each.self.known = block->known;
    each.votes = block->votes;
    make_ready(t);
  }
  block->at_barrier = block->votes = 0;
}

void pass_collective(unsigned w) {
  Warp& warp = block->warps[w];
  warp.arrived = 0;
  for (unsigned t = 32 * w; t < 32 * w + 32; ++t) {
    warp.deposits[block->threads[t]->collectives & 1][t % 32] = block->threads[t]->deposit;
    make_ready(t);
  }
}

// Runs one ready thread until it waits, yields or ends.
void step(size_t choice) {
  const unsigned t = block->ready[choice];
  thread = block->threads[t].get();
  threadIdx.x = t, blockIdx = {block->index % gridDim.x, block->index / gridDim.x};
  enter(&thread->self);
  if (!_setjmp(scheduler)) {
    if (thread->started) _longjmp(thread->resume, 1);
    thread->started = true;
    setcontext(&thread->start);
  }
  enter(nullptr);
  if (!error.empty() || thread->state == State::ready) return;
  block->ready[choice] = block->ready.back();
  block->ready.pop_back();
  if (thread->state == State::done) --block->alive;
  if (thread->state == State::at_barrier) ++block->at_barrier;
  if (thread->state == State::at_collective && ++block->warps[t / 32].arrived == 32) pass_collective(t / 32);
  if (block->alive > 0 && block->at_barrier == block->alive) pass_barrier();
  if (block->ready.empty() && block->alive > 0) {
    error = "threads of one block wait at different barriers or warp collectives";
  }
}

// How a launch chooses among runnable threads: uniformly, or staying with one thread for a short or a long time.
size_t choose(size_t before, uint64_t stay) {
  const size_t count = block->ready.size();
  return before < count && random_below(256) < stay ? before : random_below(count);
}

void run_grid(std::vector<unsigned> waiting) {
  constexpr uint64_t kStay[] = {0, 128, 250, 255};
  const size_t most = 1 + random_below(6);
  const uint64_t stay_in_block = kStay[random_below(4)], stay = kStay[random_below(4)];
  std::vector<std::unique_ptr<Block>> resident;
  size_t at = 0, choice = 0;
  while (error.empty() && !(waiting.empty() && resident.empty())) {
    while (resident.size() < most && !waiting.empty()) {
      resident.push_back(admit(waiting.back()));
      waiting.pop_back();
    }
    if (at >= resident.size() || random_below(256) >= stay_in_block) at = random_below(resident.size());
    block = resident[at].get();
    choice = choose(choice, stay);
    step(choice);
    if (block->alive > 0) continue;
    dismiss(*block);
    resident.erase(resident.begin() + static_cast<long>(at));
  }
  for (const auto& left : resident) dismiss(*left);
}

}  // namespace

void seed(uint64_t value) { random_source.seed(value); }

bool unlikely_coin() { return random_below(8) == 0; }

void yield() {
  if (++yields > kMostYields) fail("waits for ever: for something that no running block will do");
  leave(State::ready);
}

void fail(const std::string& what) {
  error = what + " (block " + std::to_string(block->index) + ", thread " + std::to_string(threadIdx.x) + ")";
  _longjmp(scheduler, 1);
}

void launch(dim3 grid, unsigned threads, const char* kernel, void (*kernel_call)(const void*),
            const void* kernel_body) {
  ++counts.launches;
  call = kernel_call, body = kernel_body, yields = 0;
  gridDim = grid, blockDim.x = threads;
  std::vector<unsigned> order(grid.x * grid.y);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random_source);
  kernel_starts(static_cast<const char*>(__builtin_frame_address(0)));
  error.clear();
  run_grid(std::move(order));
  if (!error.empty()) throw std::runtime_error(std::string(kernel) + ": " + error);
}

void* shared_memory(const void* site, size_t size) {
  auto& memory = block->shared[site];
  if (!memory) {
    if ((block->shared_size += size) > kMostShared) fail("more than 48 KiB of shared memory");
    memory.reset(new char[size + 2 * kGuard]);
    add_memory(memory.get() + kGuard, size, false, kSharedMemory);
  }
  return memory.get() + kGuard;
}

const uint64_t* exchange(uint64_t deposit) {
  thread->deposit = deposit;
  ++thread->collectives;
  leave(State::at_collective);
  return block->warps[threadIdx.x / 32].deposits[thread->collectives & 1];
}

}  // namespace on_cpu

using namespace on_cpu;

void __syncthreads() { leave(State::at_barrier); }

int __syncthreads_count(int predicate) {
  block->votes += predicate != 0;
  leave(State::at_barrier);
  return thread->votes;
}

int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }

void __threadfence() { fence(thread->self); }

cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t) {
  ++counts.memsets;
  counts.bytes += static_cast<int64_t>(size);
  std::memset(to, value, size);
  mark_written(to, size);
  return cudaSuccess;
}

extern "C" {
void emulate_seed(uint64_t value) { on_cpu::seed(value); }
void emulate_counts(int64_t* to) { to[0] = counts.launches, to[1] = counts.memsets, to[2] = counts.bytes; }
}
