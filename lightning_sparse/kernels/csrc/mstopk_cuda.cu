// The algorithm of mstopk_cpu.cpp as four launches without read-back, which a CUDA graph can capture.
//
//   sample   one block: choose a threshold that slightly more than k of the elements should reach
//   pass     read all elements once, compact those that reach it (candidates), store acc if needed
//   refine   the k-th largest key: histograms of 11, 10 and 10 bits of the candidates' keys
//   emit     count per tile what is above the k-th key or equal to it, and write the output, indices ascending
//
// A tile is 4,096 elements. An atomic reserves the memory of a tile's candidates, so their order differs between runs;
// the results do not, since each tile records its start. All other atomics add or take the maximum of integers, or hand
// out work. With too few or too many candidates, the kernels after the pass read all elements: same launches, same
// result. Nothing is kept between calls.
#include <algorithm>
#include <atomic>

#include "emit.cuh"
#include "pass.cuh"
#include "refine.cuh"

namespace lightning_sparse::cuda {
namespace {

// ------------------------------------------------------------------------------------------------------- launch lists

std::atomic<bool> forced{false};

Problem describe(const Source& source, int64_t k) {
  Problem p{};
  p.source = source;
  p.k = k;
  p.num_tiles = (source.numel + kTile - 1) / kTile;
  p.aligned = is_aligned(source.grad) && is_aligned(source.residual) && is_aligned(source.store);
  const SamplePlan plan = plan_sample(source.numel, k, kSample);
  p.target = plan.target, p.capacity = plan.capacity, p.forced = forced;
  return p;
}

template <Dtype dtype>
void launch_pass(const Problem& p, cudaStream_t stream) {
  sample_kernel<dtype><<<1, kSampleThreads, 0, stream>>>(p);
  pass_kernel<dtype><<<static_cast<unsigned>(p.num_tiles), kThreads, 0, stream>>>(p);
}

template <typename Sink>
void launch(Problem p, void* scratch, cudaStream_t stream, Sink sink) {
  lay_out(p, static_cast<char*>(scratch));
  const Dtype dtype = p.source.dtype;
  if (dtype == Dtype::fp32) launch_pass<Dtype::fp32>(p, stream);
  if (dtype == Dtype::bf16) launch_pass<Dtype::bf16>(p, stream);
  if (dtype == Dtype::fp16) launch_pass<Dtype::fp16>(p, stream);
  const auto blocks = static_cast<unsigned>(std::min(kMostBlocks, (p.source.numel + kItem - 1) / kItem));
  const auto groups = static_cast<unsigned>((p.num_tiles + kWarps - 1) / kWarps);
  refine_kernel<<<blocks, kThreads, 0, stream>>>(p);
  emit_kernel<Sink><<<groups, kThreads, 0, stream>>>(p, sink);
  check(cudaGetLastError());
}

template <typename Index>
void launch_mstopk(const Problem& p, void* values, void* indices, void* scratch, cudaStream_t stream) {
  auto* to = static_cast<Index*>(indices);
  if (p.source.dtype == Dtype::fp32) {
    launch(p, scratch, stream, TensorSink<Index, uint32_t>{static_cast<uint32_t*>(values), to});
  } else {
    launch(p, scratch, stream, TensorSink<Index, uint16_t>{static_cast<uint16_t*>(values), to});
  }
}

}  // namespace

void force_fallback(bool on) { forced = on; }

int64_t select_scratch_bytes(int64_t numel, int64_t k) {
  Problem p = describe({nullptr, Dtype::fp32, numel}, k);
  alignas(256) static char origin[256];  // only distances are taken
  return lay_out(p, origin);
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
  Problem p = describe(source, k);
  p.message = message, p.value_dtype = value_dtype;
  const MessageSink sink{message, MessageLayout(source.numel, k, value_dtype), value_dtype};
  launch(p, scratch, static_cast<cudaStream_t>(stream), sink);
}

}  // namespace lightning_sparse::cuda
