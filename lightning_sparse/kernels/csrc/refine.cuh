// Finds the key of the k-th largest element, one digit after the other (11, 10 and 10 bits). It reads the candidates,
// or all elements if the candidates are not usable. One launch does everything. Blocks take work items. An item counts
// one digit of kItem elements in a histogram. The block that completes the last item of a digit chooses the digit.
// Items of the next digit wait for this choice.
#pragma once

#include "tile.cuh"

namespace lightning_sparse::cuda {
namespace {

constexpr int64_t kItem = 8192;  // elements

__device__ constexpr int shift_of(int digit) { return digit == 0 ? 20 : digit == 1 ? 10 : 0; }
__device__ constexpr int width_of(int digit) { return digit == 0 ? 11 : 10; }

// All lanes call it. If all lanes have the same bin, one lane adds 32. Otherwise many equal elements, such as zeros,
// would serialize the atomic operations on this bin.
__device__ void add_to_bin(uint32_t* bins, bool counts, uint32_t bin) {
  const bool uniform = __all_sync(kAllLanes, counts) && __all_sync(kAllLanes, bin == __shfl_sync(kAllLanes, bin, 0));
  if (uniform) {
    if (lane() == 0) atomicAdd(&bins[bin], 32u);
  } else if (counts) {
    atomicAdd(&bins[bin], 1u);
  }
}

__device__ void count_item(const Problem& p, bool whole, int64_t begin, int64_t end, int digit) {
  __shared__ uint32_t bins[kBins];
  for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
  __syncthreads();
  const uint32_t prefix = p.control->prefix;
  const int shift = shift_of(digit), width = width_of(digit);
#pragma unroll 4
  for (int64_t first = begin; first < end; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    const uint32_t key = i < end ? key_of(whole ? stored_at(p.source, i) : p.values[i]) : 0;
    add_to_bin(bins, i < end && key >> (shift + width) == prefix, key >> shift & ((1u << width) - 1u));
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kThreads) {
    if (bins[i]) atomicAdd(&p.bins[digit * kBins + i], static_cast<Count>(bins[i]));
  }
}

// Replaces sums[i] by the sum of sums[i] ... sums[kThreads - 1].
__device__ void suffix_sums(Count* sums) {
  for (int step = 1; step < kThreads; step *= 2) {
    __syncthreads();
    const Count more = threadIdx.x + step < kThreads ? sums[threadIdx.x + step] : 0;
    __syncthreads();
    sums[threadIdx.x] += more;
  }
  __syncthreads();
}

// Chooses the next digit of the key: the digit of the remaining-th largest key with this prefix.
__device__ void choose_digit(const Problem& p, int digit) {
  __shared__ Count sums[kThreads];
  Control& control = *p.control;
  const int each = (1 << width_of(digit)) / kThreads;
  const Count* mine = p.bins + digit * kBins + threadIdx.x * each;
  const Count remaining = control.remaining;
  const uint32_t prefix = control.prefix;
  Count total = 0;
  for (int i = 0; i < each; ++i) total += mine[i];
  sums[threadIdx.x] = total;
  suffix_sums(sums);
  Count above = sums[threadIdx.x] - total;
  if (above >= remaining || above + total < remaining) return;  // true for all threads but one
  int i = each - 1;
  for (; above + mine[i] < remaining; --i) above += mine[i];
  control.prefix = prefix << width_of(digit) | static_cast<uint32_t>(threadIdx.x * each + i);
  control.remaining = remaining - above;
}

__device__ void clear(uint8_t* begin, uint8_t* end) {
  for (; begin < end; ++begin) *begin = 0;
}

// Writes the parts of a message that do not depend on the selection: the header and all padding.
__device__ void begin_message(const Problem& p, int64_t row_nbytes) {
  const Count nonfinite = p.control->nonfinite, most = 0x7FFFFFFF;
  *reinterpret_cast<Header*>(p.message) = {kMagic,
                                           static_cast<int32_t>(nonfinite < most ? nonfinite : most),
                                           0,
                                           static_cast<int32_t>(p.value_dtype),
                                           p.source.numel,
                                           p.k};
  const MessageLayout layout(p.source.numel, p.k, p.value_dtype);
  clear(p.message + sizeof(Header), p.message + kHeaderBytes);
  clear(p.message + layout.counts + 4 * layout.num_blocks, p.message + layout.levels);
  if (p.value_dtype == Dtype::two_bit) {
    clear(p.message + layout.levels + 8 * layout.num_blocks, p.message + layout.cells);
  }
  clear(p.message + layout.cells + layout.num_cells, p.message + layout.indices);
  clear(p.message + layout.indices + layout.index_bytes() * p.k, p.message + layout.values);
  clear(p.message + layout.values + layout.values_nbytes, p.message + row_nbytes);
}

__global__ void __launch_bounds__(kThreads) refine_kernel(Problems problems) {
  __shared__ Problem p;  // too large for registers
  const Problem mine = problem_of_block(problems);
  if (threadIdx.x == 0) p = mine;
  __syncthreads();
  Control& control = *p.control;
  const bool whole = candidates_fail(p);
  const int64_t size = whole ? p.source.numel : static_cast<int64_t>(control.cursor);
  const int64_t items = (size + kItem - 1) / kItem;
  for (;;) {
    const auto item = static_cast<int64_t>(take(&control.items));
    if (item >= kDigits * items) return;
    const int digit = item < items ? 0 : item < 2 * items ? 1 : 2;
    wait_for(&control.digits, static_cast<uint32_t>(digit));
    const int64_t begin = (item - digit * items) * kItem;
    count_item(p, whole, begin, begin + kItem < size ? begin + kItem : size, digit);
    if (!arrives_last(&control.done[digit], static_cast<Count>(items))) continue;
    choose_digit(p, digit);
    if (digit == kDigits - 1 && p.message && threadIdx.x == 0) begin_message(p, problems.row_nbytes);
    announce(&control.digits, static_cast<uint32_t>(digit) + 1);
  }
}

}  // namespace
}  // namespace lightning_sparse::cuda
