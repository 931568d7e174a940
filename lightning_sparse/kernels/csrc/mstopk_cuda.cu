// The algorithm of mstopk_cpu.cpp as a fixed sequence of launches without read-back, which a CUDA graph can capture.
//
//   sample     histogram of 65,536 elements; choose a threshold that slightly more than k elements should reach
//   pass       read all elements once, compact those that reach it (candidates), store acc if needed
//   3 x digit  histogram and choice of the next 11, 10, 10 bits of the k-th largest key
//   tally      per tile: number of keys above the k-th key, and equal to it (ties)
//   scan       per tile: its first output slot, and how many ties it may keep
//   emit       write the output, indices ascending
//
// A tile is 4,096 elements and one thread block. An atomic reserves the memory of a tile's candidates, so their order
// differs between runs; the results do not, since each tile records its start. All other atomics add or take the
// maximum of integers. With too few or too many candidates, the kernels after the pass read all elements: same
// launches, same result.
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "sinks.cuh"
#include "tile.cuh"

namespace lightning_sparse::cuda {
namespace {

// ------------------------------------------------------------------------------------------------------------ kernels

__global__ void sample_kernel(Problem p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t numel = p.source.numel;
  if (i >= (numel < kSampleAll ? numel : kSampleAll)) return;
  const int64_t at = numel <= kSampleAll ? i : sample_piece(numel, i / kSamplePiece) + i % kSamplePiece;
  atomicAdd(&p.sample[key_of(acc_at(p.source, at)) >> kSampleShift], 1u);
}

// One block: the highest bin edge that reaches the target.
__global__ void __launch_bounds__(kScanThreads) threshold_kernel(Problem p) {
  __shared__ Count sums[kScanThreads];
  constexpr int kEach = kSampleBins / kScanThreads;
  const uint32_t* mine = p.sample + threadIdx.x * kEach;
  Count total = 0;
  for (int i = 0; i < kEach; ++i) total += mine[i];
  sums[threadIdx.x] = total;
  suffix_sums(sums, kScanThreads);
  Control& control = *p.control;
  const auto target = static_cast<Count>(p.target);
  Count reached = sums[threadIdx.x] - total;
  if (p.target > 0 && reached < target && reached + total >= target) {  // true in at most one thread
    int bin = kEach;
    while (reached < target) reached += mine[--bin];
    const uint32_t edge = static_cast<uint32_t>(threadIdx.x * kEach + bin) << kSampleShift;
    control.threshold = edge < kInfKey ? edge : kInfKey;
  }
  if (threadIdx.x == 0) control.remaining = static_cast<Count>(p.k);
}

__global__ void __launch_bounds__(kThreads) pass_kernel(Problem p) {
  __shared__ Count reserved;
  const int64_t base = static_cast<int64_t>(blockIdx.x) * kTile;
  const uint32_t threshold = p.control->threshold;
  float acc[kRounds];
  unsigned ballots[kRounds];
  int count = 0;
#pragma unroll
  for (int j = 0; j < kRounds; ++j) {
    const int64_t i = base + place(j);
    acc[j] = i < p.source.numel ? acc_at(p.source, i) : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < kRounds; ++j) {
    const int64_t i = base + place(j);
    const bool inside = i < p.source.numel;
    if (inside && p.source.store) p.source.store[i] = acc[j];
    ballots[j] = __ballot_sync(0xFFFFFFFFu, inside && key_of(acc[j]) >= threshold);
    count += __popc(ballots[j]);
  }
  int total;
  int before = before_this_warp(count, total);
  if (threadIdx.x == 0) {
    reserved = atomicAdd(&p.control->cursor, static_cast<Count>(total));
    p.start[blockIdx.x] = static_cast<int64_t>(reserved);
    p.count[blockIdx.x] = static_cast<uint32_t>(total);
  }
  __syncthreads();
  if (reserved + total > static_cast<Count>(p.capacity)) return;  // too many: the candidates are not used
#pragma unroll
  for (int j = 0; j < kRounds; ++j) {
    if (ballots[j] >> (threadIdx.x % 32) & 1u) {
      const int64_t to = static_cast<int64_t>(reserved) + before + below_this_lane(ballots[j]);
      p.values[to] = acc[j];
      p.offsets[to] = static_cast<uint16_t>(place(j));
    }
    before += __popc(ballots[j]);
  }
}

__device__ constexpr int shift_of(int digit) { return digit == 0 ? 20 : digit == 1 ? 10 : 0; }
__device__ constexpr int width_of(int digit) { return digit == 0 ? 11 : 10; }

__global__ void __launch_bounds__(kThreads) digit_kernel(Problem p, int digit) {
  __shared__ uint32_t bins[kBins];
  for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
  __syncthreads();
  const bool whole = candidates_fail(p);
  const uint32_t prefix = p.control->prefix;
  const int shift = shift_of(digit), width = width_of(digit);
  const int64_t size = whole ? p.source.numel : static_cast<int64_t>(p.control->cursor);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < size; i += stride) {
    const uint32_t key = key_of(whole ? stored_at(p.source, i) : p.values[i]);
    if (key >> (shift + width) == prefix) atomicAdd(&bins[key >> shift & ((1u << width) - 1u)], 1u);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kThreads) {
    if (bins[i]) atomicAdd(&p.bins[digit * kBins + i], static_cast<Count>(bins[i]));
  }
}

// One block: the digit of the remaining-th largest key. The last digit completes the key.
__global__ void __launch_bounds__(kScanThreads) choose_kernel(Problem p, int digit) {
  __shared__ Count sums[kBins];
  Control& control = *p.control;
  const int size = 1 << width_of(digit);
  for (int i = threadIdx.x; i < size; i += kScanThreads) sums[i] = p.bins[digit * kBins + i];
  const Count remaining = control.remaining;
  const uint32_t prefix = control.prefix;
  suffix_sums(sums, size);
  for (int i = threadIdx.x; i < size; i += kScanThreads) {
    const Count above = i + 1 < size ? sums[i + 1] : 0;
    if (above >= remaining || sums[i] < remaining) continue;  // exactly one i passes
    control.prefix = prefix << width_of(digit) | static_cast<uint32_t>(i);
    control.remaining = remaining - above;
  }
}

// By shuffles: __reduce_max_sync needs sm_80, and this runs once a tile.
__device__ uint32_t max_of_warp(uint32_t value) {
  for (int apart = 16; apart > 0; apart /= 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, value, apart);
    value = other > value ? other : value;
  }
  return value;
}

__global__ void __launch_bounds__(kThreads) tally_kernel(Problem p) {
  const uint32_t kth = p.control->prefix;
  const Tile tile(p, blockIdx.x, candidates_fail(p));
  int above = 0, ties = 0, nonfinite = 0;
  uint32_t largest = 0;
  for (int j = 0; j < kRounds; ++j) {
    const int i = place(j);
    const bool inside = i < tile.size;
    const uint32_t key = inside ? key_of(tile.value(i)) : 0;
    above += __popc(__ballot_sync(0xFFFFFFFFu, inside && key > kth));
    ties += __popc(__ballot_sync(0xFFFFFFFFu, inside && key == kth));
    nonfinite += __popc(__ballot_sync(0xFFFFFFFFu, key >= kInfKey));
    largest = key < kInfKey && key > largest ? key : largest;
  }
  largest = max_of_warp(largest);
  int all_above, all_ties, all_nonfinite;
  before_this_warp(above, all_above);
  before_this_warp(ties, all_ties);
  before_this_warp(nonfinite, all_nonfinite);
  if (threadIdx.x % 32 == 0 && largest) atomicMax(&p.control->largest, largest);
  if (threadIdx.x != 0) return;
  p.above[blockIdx.x] = static_cast<uint32_t>(all_above);
  p.ties[blockIdx.x] = static_cast<uint32_t>(all_ties);
  if (all_nonfinite) atomicAdd(&p.control->nonfinite, static_cast<Count>(all_nonfinite));
}

// One block; each thread takes a range of tiles. The first ties fill the slots that the keys above leave.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(Problem p, Dtype value_dtype, uint8_t* message) {
  __shared__ Count above_sums[kScanThreads], tie_sums[kScanThreads];
  const int64_t begin = p.num_tiles * threadIdx.x / kScanThreads, end = p.num_tiles * (threadIdx.x + 1) / kScanThreads;
  Count above = 0, ties = 0;
  for (int64_t tile = begin; tile < end; ++tile) above += p.above[tile], ties += p.ties[tile];
  above_sums[threadIdx.x] = above;
  tie_sums[threadIdx.x] = ties;
  suffix_sums(above_sums, kScanThreads);
  suffix_sums(tie_sums, kScanThreads);
  Control& control = *p.control;
  const Count left = control.remaining;
  Count above_before = above_sums[0] - above_sums[threadIdx.x], ties_before = tie_sums[0] - tie_sums[threadIdx.x];
  for (int64_t tile = begin; tile < end; ++tile) {
    const Count used = ties_before < left ? ties_before : left;
    ties_before += p.ties[tile];
    p.slot[tile] = static_cast<int64_t>(above_before + used);
    p.quota[tile] = static_cast<uint32_t>((ties_before < left ? ties_before : left) - used);
    above_before += p.above[tile];
  }
  if (threadIdx.x != 0 || message == nullptr) return;
  const bool any_finite = control.nonfinite < static_cast<Count>(p.k);
  control.exponent = message_exponent(any_finite ? control.largest : 0, value_dtype);
  const Count most = 0x7FFFFFFF;
  *reinterpret_cast<Header*>(message) = {
      kMagic,           static_cast<int32_t>(control.nonfinite < most ? control.nonfinite : most),
      control.exponent, static_cast<int32_t>(value_dtype),
      p.source.numel,   p.k};
}

template <typename Sink>
__global__ void __launch_bounds__(kThreads) emit_kernel(Problem p, Sink sink) {
  const uint32_t kth = p.control->prefix;
  const Tile tile(p, blockIdx.x, candidates_fail(p));
  float values[kRounds];
  unsigned tied[kRounds];
  int ties = 0, kept = 0, total;
#pragma unroll
  for (int j = 0; j < kRounds; ++j) {
    const int i = place(j);
    values[j] = i < tile.size ? tile.value(i) : 0.0f;
    tied[j] = __ballot_sync(0xFFFFFFFFu, i < tile.size && key_of(values[j]) == kth);
    ties += __popc(tied[j]);
  }
  int ties_before = before_this_warp(ties, total);
  const int quota = static_cast<int>(p.quota[blockIdx.x]);
  unsigned keep[kRounds];
#pragma unroll
  for (int j = 0; j < kRounds; ++j) {
    const bool first = tied[j] >> (threadIdx.x % 32) & 1u && ties_before + below_this_lane(tied[j]) < quota;
    const bool above = place(j) < tile.size && key_of(values[j]) > kth;
    keep[j] = __ballot_sync(0xFFFFFFFFu, above || first);
    ties_before += __popc(tied[j]);
    kept += __popc(keep[j]);
  }
  int64_t slot = p.slot[blockIdx.x] + before_this_warp(kept, total);
#pragma unroll
  for (int j = 0; j < kRounds; ++j) {
    const int i = place(j);
    if (keep[j] >> (threadIdx.x % 32) & 1u) {
      sink.keep(p, slot + below_this_lane(keep[j]), tile.index(i), values[j]);
    } else if (i < tile.size && key_of(values[j]) >= kInfKey) {
      sink.drop(p, tile.index(i));
    }
    slot += __popc(keep[j]);
  }
  if (threadIdx.x == 0) sink.finish(blockIdx.x, total);
}

// ------------------------------------------------------------------------------------------------------- launch lists

std::atomic<bool> forced{false};

Problem describe(const Source& source, int64_t k) {
  Problem p{};
  p.source = source;
  p.k = k;
  p.num_tiles = (source.numel + kTile - 1) / kTile;
  const SamplePlan plan = plan_sample(source.numel, k);
  p.target = plan.target, p.capacity = plan.capacity, p.forced = forced;
  return p;
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

template <typename Sink>
void launch(Problem p, void* scratch, cudaStream_t stream, Dtype value_dtype, uint8_t* message, Sink sink) {
  const auto tiles = static_cast<unsigned>(p.num_tiles);
  const int64_t zeroed = lay_out(p, static_cast<char*>(scratch)).second;
  check(cudaMemsetAsync(scratch, 0, static_cast<size_t>(zeroed), stream));
  sample_kernel<<<kSampleAll / kThreads, kThreads, 0, stream>>>(p);
  threshold_kernel<<<1, kScanThreads, 0, stream>>>(p);
  pass_kernel<<<tiles, kThreads, 0, stream>>>(p);
  const unsigned blocks = std::min<unsigned>(tiles, kHistogramBlocks);
  for (int digit = 0; digit < kDigits; ++digit) {
    digit_kernel<<<blocks, kThreads, 0, stream>>>(p, digit);
    choose_kernel<<<1, kScanThreads, 0, stream>>>(p, digit);
  }
  tally_kernel<<<tiles, kThreads, 0, stream>>>(p);
  scan_kernel<<<1, kScanThreads, 0, stream>>>(p, value_dtype, message);
  emit_kernel<<<tiles, kThreads, 0, stream>>>(p, sink);
  check(cudaGetLastError());
}

template <typename Index>
void launch_mstopk(const Problem& p, void* values, void* indices, void* scratch, cudaStream_t stream) {
  auto* to = static_cast<Index*>(indices);
  if (p.source.dtype == Dtype::fp32) {
    launch(p, scratch, stream, Dtype::fp32, nullptr, TensorSink<Index, uint32_t>{static_cast<uint32_t*>(values), to});
  } else {
    launch(p, scratch, stream, Dtype::fp32, nullptr, TensorSink<Index, uint16_t>{static_cast<uint16_t*>(values), to});
  }
}

}  // namespace

void force_fallback(bool on) { forced = on; }

int64_t select_scratch_bytes(int64_t numel, int64_t k) {
  Problem p = describe({nullptr, Dtype::fp32, numel}, k);
  alignas(256) static char origin[256];  // only distances are taken
  return lay_out(p, origin).first;
}

void mstopk(const Source& source, int64_t k, void* values, void* indices, void* scratch, void* stream) {
  const Problem p = describe(source, k);
  if (source.numel < (int64_t{1} << 31)) {
    launch_mstopk<int32_t>(p, values, indices, scratch, static_cast<cudaStream_t>(stream));
  } else {
    launch_mstopk<int64_t>(p, values, indices, scratch, static_cast<cudaStream_t>(stream));
  }
}

void compress(const Source& source, int64_t k, Dtype value_dtype, uint8_t* message, void* scratch, void* stream) {
  const MessageLayout layout(source.numel, k, value_dtype);
  const auto on = static_cast<cudaStream_t>(stream);
  check(cudaMemsetAsync(message, 0, static_cast<size_t>(layout.nbytes), on));
  launch(describe(source, k), scratch, on, value_dtype, message, MessageSink{message, layout, value_dtype});
}

}  // namespace lightning_sparse::cuda
