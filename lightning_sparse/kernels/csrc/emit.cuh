// Writes the output, with ascending indices. A warp handles a tile, and a block handles a group of kWarps tiles. The
// output of a group begins after the outputs of all groups before it. Decoupled look-back (Merrill and Garland, 2016)
// finds this place: each group publishes its own sums. Then it adds up the sums of its predecessors, back to the
// nearest group that has published its prefix sum.
#pragma once

#include "sinks.cuh"

namespace lightning_sparse::cuda {
namespace {

struct Tally {
  Count above, ties;  // above: number of keys above the k-th largest key; ties: keys equal to it
};

// A published sum and its flag are one 64-bit word, so no fence is needed. 0: not published yet.
constexpr int kFlag = 62;
constexpr Count kAggregate = Count{1} << kFlag, kPrefix = Count{2} << kFlag, kSum = kAggregate - 1;

__device__ void publish(const Problem& p, int64_t group, Count flag, Tally sums) {
  put(&p.above[group], flag | sums.above);
  put(&p.ties[group], flag | sums.ties);
}

// One warp calls it. Returns the sums of all groups before this group.
__device__ Tally look_back(const Problem& p, int64_t group) {
  Tally sums{0, 0};
  for (int64_t nearest = group - 1; nearest >= 0; nearest -= 32) {
    const int64_t other = nearest - lane();
    Count above = kPrefix, ties = kPrefix;  // before the first group, the sum is zero
    // `above` and `ties` are published one after the other. So this waits until both have the same flag.
    while (other >= 0) {
      above = peek(&p.above[other]), ties = peek(&p.ties[other]);
      if (above >> kFlag != 0 && above >> kFlag == ties >> kFlag) break;
    }
    const unsigned running = __ballot_sync(kAllLanes, above >> kFlag == kPrefix >> kFlag);
    const int last = running ? __ffs(running) - 1 : 31;
    sums.above += sum_of_warp(lane() <= last ? above & kSum : 0);
    sums.ties += sum_of_warp(lane() <= last ? ties & kSum : 0);
    if (running) break;
  }
  return sums;
}

__device__ Tally tally(const Tile& tile, uint32_t kth) {
  unsigned above = 0, ties = 0;
#pragma unroll 4
  for (int64_t first = 0; first < tile.size; first += 32) {
    const int64_t i = first + lane();
    const uint32_t key = i < tile.size ? key_of(tile.value(i)) : 0;
    above += __popc(__ballot_sync(kAllLanes, i < tile.size && key > kth));
    ties += __popc(__ballot_sync(kAllLanes, i < tile.size && key == kth));
  }
  return {above, ties};
}

// Keeps the elements above the k-th key, and the first `quota` ties. Returns the number of kept elements.
template <typename Sink>
__device__ int64_t emit_tile(const Problem& p, const Tile& tile, uint32_t kth, int64_t slot, int64_t quota,
                             const Sink& sink) {
  const int64_t begin = slot;
#pragma unroll 2
  for (int64_t first = 0; first < tile.size; first += 32) {
    const int64_t i = first + lane();
    const bool inside = i < tile.size;
    const float value = inside ? tile.value(i) : 0.0f;
    const uint32_t key = key_of(value);
    const unsigned tied = __ballot_sync(kAllLanes, inside && key == kth);
    const bool tie = inside && key == kth && below_this_lane(tied) < quota;
    const unsigned kept = __ballot_sync(kAllLanes, tie || (inside && key > kth));
    if (kept >> lane() & 1u) {
      sink.keep(p, slot + below_this_lane(kept), tile.index(i), value);
    } else if (inside && key >= kInfKey) {
      sink.drop(p, tile.index(i));
    }
    slot += __popc(kept), quota -= __popc(tied);
  }
  return slot - begin;
}

template <typename Sink>
__global__ void __launch_bounds__(kThreads, 4) emit_kernel(Problems problems) {
  const Problem p = problem_of_block(problems);
  __shared__ uint32_t cells[kWarps][kCells];
  const Sink sink(p, cells[warp()]);
  __shared__ Tally of_warp[kWarps];
  __shared__ Tally of_groups_before;
  const auto group = static_cast<int64_t>(take(&p.control->groups));
  const int64_t number = group * kWarps + warp();
  const uint32_t kth = p.control->prefix;
  const Tile tile(p, number, candidates_fail(p));
  const Tally mine = tally(tile, kth);
  if (lane() == 0) of_warp[warp()] = mine;
  __syncthreads();
  if (warp() == 0) {
    Tally of_group{0, 0};
    for (int w = 0; w < kWarps; ++w) of_group.above += of_warp[w].above, of_group.ties += of_warp[w].ties;
    if (lane() == 0 && group > 0) publish(p, group, kAggregate, of_group);
    const Tally before = look_back(p, group);
    if (lane() == 0) {
      publish(p, group, kPrefix, {before.above + of_group.above, before.ties + of_group.ties});
      of_groups_before = before;
    }
  }
  __syncthreads();
  Tally before = of_groups_before;
  for (int w = 0; w < warp(); ++w) before.above += of_warp[w].above, before.ties += of_warp[w].ties;
  const Count remaining = p.control->remaining, used = before.ties < remaining ? before.ties : remaining;
  const auto slot = static_cast<int64_t>(before.above + used), quota = static_cast<int64_t>(remaining - used);
  const int64_t kept = emit_tile(p, tile, kth, slot, quota, sink);
  __syncthreads();
  sink.finish(number, kept);
}

}  // namespace
}  // namespace lightning_sparse::cuda
