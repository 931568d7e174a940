// The algorithm of mstopk_cpu.cpp as four or five launches. Nothing is read back, so a CUDA graph can capture them.
//
//   sample    choose a threshold with one block per region, so that slightly more than k elements should reach it
//   pass      read all elements once; compact elements that reach it (candidates); store acc if needed
//   refine    find the k-th largest key, with histograms of 11, 10 and 10 bits of the candidates' keys
//   emit      count elements above and equal to the k-th key per tile; write the output, with ascending indices
//   two_bits  for two-bit messages only: write the levels of each wire block, its codes and residuals
//
// A tile is 4,096 elements. An atomic operation reserves the memory of a tile's candidates, so their order differs
// between runs. The results do not differ, because each tile records its start. All other atomic operations add
// integers, set bits, or assign work, so their order does not matter. With too few or too many candidates, the kernels
// after the pass read all elements, with the same launches and the same results. Each region of a shard has its own row
// of CUDA blocks (blockIdx.y) and its own part of the scratch memory. Nothing is kept between calls.
#include <atomic>

#include "emit.cuh"
#include "pass.cuh"
#include "refine.cuh"
#include "two_bits.cuh"

namespace lightning_sparse::cuda {
namespace {

// ------------------------------------------------------------------------------------------------------- launch lists

std::atomic<bool> forced{false};

Problems describe(const Source& source, int64_t k, const Regions& regions, Dtype value_dtype) {
  Problems problems{{}, regions, 0};
  Problem& p = problems.first;
  p.source = source;
  p.k = k, p.value_dtype = value_dtype;
  p.num_tiles = (regions.most() + kTile - 1) / kTile;
  const SamplePlan plan = plan_sample(regions.most(), k, kSample);
  p.target = plan.target, p.capacity = plan.capacity, p.forced = forced;
  return problems;
}

template <Dtype dtype>
void launch_pass(const Problems& problems, cudaStream_t stream) {
  const unsigned tiles = static_cast<unsigned>(problems.first.num_tiles), regions = problems.regions.count;
  sample_kernel<dtype><<<dim3(1, regions), kSampleThreads, 0, stream>>>(problems);
  pass_kernel<dtype><<<dim3(tiles, regions), kThreads, 0, stream>>>(problems);
}

template <typename Sink>
void launch(Problems problems, void* scratch, cudaStream_t stream) {
  lay_out(problems, static_cast<char*>(scratch));
  const Dtype dtype = problems.first.source.dtype;
  if (dtype == Dtype::fp32) launch_pass<Dtype::fp32>(problems, stream);
  if (dtype == Dtype::bf16) launch_pass<Dtype::bf16>(problems, stream);
  if (dtype == Dtype::fp16) launch_pass<Dtype::fp16>(problems, stream);
  const unsigned regions = problems.regions.count, groups = static_cast<unsigned>(groups_of(problems.first));
  refine_kernel<<<dim3(blocks_of_region(problems.regions, kItem), regions), kThreads, 0, stream>>>(problems);
  emit_kernel<Sink><<<dim3(groups, regions), kThreads, 0, stream>>>(problems);
  if (problems.first.message && problems.first.value_dtype == Dtype::two_bit) {
    two_bits_kernel<<<dim3(blocks_of_region(problems.regions, kBlock), regions), kThreads, 0, stream>>>(problems);
  }
  check(cudaGetLastError());
}

template <typename Index>
void launch_mstopk(const Problems& problems, void* scratch, cudaStream_t stream) {
  if (problems.first.source.dtype == Dtype::fp32) {
    launch<TensorSink<Index, uint32_t>>(problems, scratch, stream);
  } else {
    launch<TensorSink<Index, uint16_t>>(problems, scratch, stream);
  }
}

}  // namespace

void force_fallback(bool on) { forced = on; }

int64_t mstopk_scratch_bytes(int64_t numel, int64_t k) {
  return compress_scratch_bytes(Regions(numel, 1), k, Dtype::fp32);
}

int64_t compress_scratch_bytes(const Regions& regions, int64_t k, Dtype value_dtype) {
  Problems problems = describe({}, k, regions, value_dtype);
  alignas(256) static char origin[256];  // only offsets from it are used
  return lay_out(problems, origin);
}

void mstopk(const Source& source, int64_t k, void* values, void* indices, void* scratch, void* stream) {
  Problems problems = describe(source, k, Regions(source.numel, 1), Dtype::fp32);
  problems.first.kept_values = values, problems.first.kept_indices = indices;
  if (source.numel < (int64_t{1} << 31)) {
    launch_mstopk<int32_t>(problems, scratch, static_cast<cudaStream_t>(stream));
  } else {
    launch_mstopk<int64_t>(problems, scratch, static_cast<cudaStream_t>(stream));
  }
}

void compress(const Source& source, int64_t k, const Regions& regions, Dtype value_dtype, uint8_t* messages,
              void* scratch, void* stream) {
  Problems problems = describe(source, k, regions, value_dtype);
  problems.first.message = messages;
  problems.row_nbytes = row_nbytes(regions, k, value_dtype);
  launch<MessageSink>(problems, scratch, static_cast<cudaStream_t>(stream));
}

}  // namespace lightning_sparse::cuda
