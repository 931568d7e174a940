// The sample, and the single pass over memory that collects the candidates.
#pragma once

#include "load.cuh"

namespace lightning_sparse::cuda {
namespace {

// ---------------------------------------------------------------------------------------------------------- the sample

constexpr int kSampleThreads = 1024;
constexpr int64_t kSample = 32 * kSampleThreads;  // elements: 32 per thread, which fit into its registers

// One CUDA block per region. Initializes *p.control, clears the bins, and chooses the threshold: the highest multiple
// of 2^kSampleShift that at least `target` sampled keys reach, or 0 if `target` is 0.
template <Dtype dtype>
__global__ void __launch_bounds__(kSampleThreads) sample_kernel(Problems problems) {
  const Problem p = problem_of_block(problems);
  __shared__ int reached[32];  // number of sampled keys that reach the trial threshold, per bit
  const int64_t numel = p.source.numel, piece = threadIdx.x;  // each lane has a piece, which the whole warp loads
  const int64_t mine = numel <= kSample ? piece * kSamplePiece : sample_piece(numel, piece, kSample / kSamplePiece);
  uint32_t keys[32];
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const int64_t at = __shfl_sync(kAllLanes, mine, j) + lane();
    keys[j] = at < numel ? key_of(acc_at<dtype>(p.source, at)) : 0;  // 0 reaches no threshold but 0
  }
  for (int i = threadIdx.x; i < kDigits * kBins; i += kSampleThreads) p.bins[i] = 0;
  if (threadIdx.x < 32) reached[threadIdx.x] = 0;
  __syncthreads();
  uint32_t threshold = 0;
  for (int bit = 30; bit >= kSampleShift && p.target > 0; --bit) {
    const uint32_t trial = threshold | 1u << bit;
    int count = 0;
#pragma unroll
    for (int j = 0; j < 32; ++j) count += keys[j] >= trial;
    count = sum_of_warp(count);
    if (lane() == 0) atomicAdd(&reached[bit], count);
    __syncthreads();
    if (reached[bit] >= p.target) threshold = trial;
  }
  if (threadIdx.x != 0) return;
  Control control{};
  // At most kInfKey, so that all non-finite elements are candidates: their residuals must become zero.
  control.threshold = threshold < kInfKey ? threshold : kInfKey;
  control.remaining = static_cast<Count>(p.k);
  *p.control = control;
}

// ------------------------------------------------------------------------------------------------------------ the pass
//
// A warp owns 512 consecutive elements of its tile. In each round, neighboring lanes read neighboring 16 bytes of the
// gradient. So ballots can number the kept elements in ascending order.

// Clears the counters of this tile's group and wire block. Later kernels add to them or wait for them.
__device__ void clear_for_tile(const Problem& p, int64_t tile) {
  if (tile % kWarps == 0) p.above[tile / kWarps] = p.ties[tile / kWarps] = 0;
  if (p.message && tile % (kBlock / kTile) == 0 && tile * kTile < p.source.numel) {
    reinterpret_cast<uint32_t*>(p.message + kHeaderBytes)[tile / (kBlock / kTile)] = 0;
  }
}

template <Dtype dtype>
__global__ void __launch_bounds__(kThreads, dtype == Dtype::fp32 ? 4 : 3) pass_kernel(Problems problems) {
  const Problem p = problem_of_block(problems);
  __shared__ Count reserved;
  constexpr int kPer = kEach<dtype>, kRounds = kTile / kThreads / kPer;
  const int64_t base = static_cast<int64_t>(blockIdx.x) * kTile;
  const int place = warp() * (kTile / kWarps) + lane() * kPer;  // place of this thread's first element
  float acc[kRounds][kPer];
  unsigned ballots[kRounds][kPer];
#pragma unroll
  for (int j = 0; j < kRounds; ++j) load_acc<dtype>(p.source, p.aligned, base + place + j * 32 * kPer, acc[j]);
  if (threadIdx.x == 0) clear_for_tile(p, blockIdx.x);
  const uint32_t threshold = p.control->threshold;
  int count = 0, nonfinite = 0;
#pragma unroll
  for (int j = 0; j < kRounds; ++j) {
    const int64_t i = base + place + j * 32 * kPer;
    if (p.source.next_residual) store_acc<dtype>(p.source, p.aligned, i, acc[j]);
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      const uint32_t key = key_of(acc[j][e]);
      nonfinite += key >= kInfKey;
      ballots[j][e] = __ballot_sync(kAllLanes, i + e < p.source.numel && key >= threshold);
      count += __popc(ballots[j][e]);
    }
  }
  nonfinite = sum_of_warp(nonfinite);
  if (lane() == 0 && nonfinite > 0) atomicAdd(&p.control->nonfinite, static_cast<Count>(nonfinite));
  int total, before = before_this_warp(count, total);
  if (threadIdx.x == 0) {
    reserved = atomicAdd(&p.control->cursor, static_cast<Count>(total));
    p.start[blockIdx.x] = static_cast<int64_t>(reserved);
    p.count[blockIdx.x] = static_cast<uint32_t>(total);
  }
  __syncthreads();
  if (reserved + total > static_cast<Count>(p.capacity)) return;  // too many candidates: later kernels do not use them
#pragma unroll
  for (int j = 0; j < kRounds; ++j) {
    int64_t to = static_cast<int64_t>(reserved) + before;
#pragma unroll
    for (int e = 0; e < kPer; ++e) to += below_this_lane(ballots[j][e]), before += __popc(ballots[j][e]);
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      if (!(ballots[j][e] >> lane() & 1u)) continue;
      p.values[to] = acc[j][e];
      p.offsets[to++] = static_cast<uint16_t>(place + j * 32 * kPer + e);
    }
  }
}

}  // namespace
}  // namespace lightning_sparse::cuda
