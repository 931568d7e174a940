// Registers the CPU and CUDA implementations of the operators through torch's stable ABI. ops.py defines the schemas. A
// second definition here would abort the process in dlopen. The dispatcher does not compare these signatures with the
// schemas.
//
// Python checks arguments first and raises ValueError. The checks here (RuntimeError) cover direct calls of
// torch.ops.lightning_sparse.*, so that no argument can crash the process.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>
#include <vector>

#include "mstopk_cpu.h"
#ifdef LS_WITH_CUDA
#include "mstopk_cuda.h"
// Weak, because a CPU-only torch lacks this function but must be able to load this library.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#endif

namespace lightning_sparse {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

// ------------------------------------------------------------------------------------------------------------- checks

void check_flat(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.is_contiguous() && tensor.numel() >= 1, name,
                  " must be flat, contiguous and not empty");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % tensor.element_size() == 0, name, " is misaligned");
}

void check_fp32(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float, name, " must be float32");
}

void check_device(const Tensor& tensor, const Tensor& like, const char* name) {
  STD_TORCH_CHECK(tensor.device() == like.device(), name, " is on another device");
}

void check_apart(const Tensor& a, const Tensor& b) {
  const auto* first = static_cast<const char*>(a.data_ptr());
  const auto* second = static_cast<const char*>(b.data_ptr());
  STD_TORCH_CHECK(first >= second + b.numel() * static_cast<int64_t>(b.element_size()) ||
                      second >= first + a.numel() * static_cast<int64_t>(a.element_size()),
                  "an output shares memory with an input");
}

void check_k(int64_t k, int64_t numel) {
  STD_TORCH_CHECK(k >= 1 && k <= numel, "k=", k, " of ", numel, " elements: 1 <= k <= numel");
}

Dtype source_dtype(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
                  "the input must be float32, bfloat16 or float16");
  return type == ScalarType::Float ? Dtype::fp32 : type == ScalarType::BFloat16 ? Dtype::bf16 : Dtype::fp16;
}

Dtype value_dtype(int64_t code) {
  STD_TORCH_CHECK(code == 0 || code == 1 || code == 3, "value_code=", code, ": 0 is fp32, 1 bf16, 3 two bits");
  return static_cast<Dtype>(code);
}

// cpu::Source and cuda::Source have the same fields.
template <typename Source>
Source source_of(const Tensor& grad, const Optional& residual, const Optional& next_residual, const Optional& scale) {
  check_flat(grad, "grad");
  Source source{grad.data_ptr(), source_dtype(grad), grad.numel()};
  const auto check = [&](const Tensor& tensor, const char* name) {
    check_fp32(tensor, name);
    check_device(tensor, grad, name);
  };
  if (residual) {
    check(*residual, "residual");
    check_flat(*residual, "residual");
    STD_TORCH_CHECK(residual->numel() == source.numel, "residual and grad differ in length");
    source.residual = static_cast<const float*>(residual->data_ptr());
  }
  if (next_residual) {
    check(*next_residual, "next_residual");
    check_flat(*next_residual, "next_residual");
    STD_TORCH_CHECK(next_residual->numel() == source.numel, "next_residual and grad differ in length");
    check_apart(*next_residual, grad);
    if (residual) check_apart(*next_residual, *residual);
    source.next_residual = static_cast<float*>(next_residual->data_ptr());
  }
  if (scale) {
    check(*scale, "scale");
    STD_TORCH_CHECK(scale->dim() == 0, "scale must have no dimensions");
    if (next_residual) check_apart(*next_residual, *scale);
    source.scale = static_cast<const float*>(scale->data_ptr());
  }
  return source;
}

// With several regions, k may exceed the number of elements of a region. Its message then holds all elements.
Regions regions_of(int64_t numel, int64_t k, int64_t num_regions) {
  STD_TORCH_CHECK(num_regions >= 1 && num_regions <= std::min(numel, kMostRegions), "num_regions=", num_regions, " of ",
                  numel, " elements: 1 <= num_regions <= min(numel, ", kMostRegions, ")");
  check_k(k, numel);
  return Regions(numel, num_regions);
}

Regions check_accumulate(const Tensor& messages, const Tensor& shard, int64_t k, int64_t num_regions, Dtype dtype) {
  check_flat(shard, "shard");
  check_fp32(shard, "shard");
  const Regions regions = regions_of(shard.numel(), k, num_regions);
  check_device(messages, shard, "messages");
  STD_TORCH_CHECK(messages.scalar_type() == ScalarType::Byte && messages.dim() == 2 && messages.size(0) >= 1 &&
                      messages.is_contiguous() && messages.size(1) == row_nbytes(regions, k, dtype),
                  "messages must be contiguous uint8[M >= 1, message_bytes]");
  STD_TORCH_CHECK(num_regions == 1 || num_regions == messages.size(0), "there must be one message per region");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(messages.data_ptr()) % 16 == 0, "messages must be aligned to 16 bytes");
  check_apart(messages, shard);
  return regions;
}

void check_rows(const Tensor& rows, const Optional& residual) {
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::BFloat16 && rows.dim() == 2 && rows.size(0) >= 1 &&
                      rows.size(1) >= 1 && rows.is_contiguous(),
                  "rows must be contiguous bfloat16[M >= 1, R >= 1]");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(rows.data_ptr()) % 2 == 0, "rows are misaligned");
  if (!residual) return;
  check_fp32(*residual, "residual");
  check_flat(*residual, "residual");
  check_device(*residual, rows, "residual");
  STD_TORCH_CHECK(residual->numel() <= rows.size(1), "residual is longer than a row");
  check_apart(*residual, rows);
}

// Pieces are contiguous in the flat weights.
std::vector<Piece> pieces_of(const std::vector<Tensor>& model, const Tensor& local, const Tensor& global) {
  for (const Tensor* flat : {&local, &global}) {
    check_flat(*flat, "a model");
    check_fp32(*flat, "a model");
    check_device(*flat, local, "a model");
    STD_TORCH_CHECK(flat->numel() == local.numel(), "local and global differ in length");
  }
  check_apart(local, global);
  std::vector<Piece> pieces;
  int64_t begin = 0;
  for (const Tensor& piece : model) {
    check_flat(piece, "a piece of the model");
    check_device(piece, local, "a piece of the model");
    check_apart(piece, local);
    check_apart(piece, global);
    pieces.push_back({piece.data_ptr(), source_dtype(piece), begin, piece.numel()});
    begin += piece.numel();
  }
  STD_TORCH_CHECK(begin == local.numel(), "pieces of ", begin, " elements, and models of ", local.numel());
  return pieces;
}

float check_local_fraction(double local_fraction) {
  STD_TORCH_CHECK(local_fraction > 0.0 && local_fraction <= 1.0, "local_fraction=", local_fraction,
                  ": 0 < local_fraction <= 1");
  return static_cast<float>(local_fraction);
}

Model model_of(const std::vector<Piece>& pieces) { return {pieces.data(), static_cast<int64_t>(pieces.size())}; }

ScalarType index_type(int64_t numel) { return numel < (int64_t{1} << 31) ? ScalarType::Int : ScalarType::Long; }

// ------------------------------------------------------------------------------------------------------------ outputs

Tensor new_messages(const Tensor& like, const Regions& regions, int64_t k, Dtype dtype) {
  return torch::stable::new_empty(like, {regions.count, row_nbytes(regions, k, dtype)}, ScalarType::Byte);
}

Tensor new_rows(const Tensor& grad, int64_t num_rows) {
  STD_TORCH_CHECK(num_rows >= 1, "num_rows=", num_rows, " must be at least 1");
  return torch::stable::new_empty(grad, {num_rows, row_numel(grad.numel(), num_rows)}, ScalarType::BFloat16);
}

uint16_t* halves(const Tensor& tensor) { return static_cast<uint16_t*>(tensor.data_ptr()); }
const float* floats(const Tensor& tensor) { return static_cast<const float*>(tensor.data_ptr()); }
float* mutable_floats(const Tensor& tensor) { return static_cast<float*>(tensor.data_ptr()); }
float* mutable_floats(const Optional& tensor) { return tensor ? mutable_floats(*tensor) : nullptr; }
int64_t length(const Optional& tensor) { return tensor ? tensor->numel() : 0; }

// ---------------------------------------------------------------------------------------------------------------- CPU

cpu::Parallel parallel() {
  const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
  return {threads, [threads](int64_t n, const std::function<void(int64_t, int64_t)>& body) {
            std::atomic<int64_t> next{0};
            const auto work = [&](int64_t worker, int64_t) {
              for (int64_t i; (i = next++) < n;) body(i, worker);
            };
            const int64_t workers = std::min(n, threads);
            if (workers == 1) return work(0, 1);
            torch::stable::parallel_for(0, workers, 1, work);
          }};
}

std::tuple<Tensor, Tensor> mstopk_cpu(Tensor x, int64_t k) {
  const auto source = source_of<cpu::Source>(x, {}, {}, {});
  check_k(k, source.numel);
  Tensor values = torch::stable::new_empty(x, {k});
  Tensor indices = torch::stable::new_empty(x, {k}, index_type(source.numel));
  cpu::mstopk(source, k, values.data_ptr(), indices.data_ptr(), parallel());
  return {values, indices};
}

Tensor compress_cpu(Tensor grad, Optional residual, Optional next_residual, int64_t k, int64_t num_regions,
                    int64_t value_code, Optional scale) {
  const Dtype dtype = value_dtype(value_code);
  const auto source = source_of<cpu::Source>(grad, residual, next_residual, scale);
  const Regions regions = regions_of(source.numel, k, num_regions);
  Tensor messages = new_messages(grad, regions, k, dtype);
  cpu::compress(source, k, regions, dtype, static_cast<uint8_t*>(messages.data_ptr()), parallel());
  return messages;
}

void add_on_cpu(const Tensor& messages, const Tensor& shard, int64_t k, int64_t num_regions, int64_t value_code,
                const float* alpha) {
  const Dtype dtype = value_dtype(value_code);
  const Regions regions = check_accumulate(messages, shard, k, num_regions, dtype);
  cpu::accumulate(static_cast<const uint8_t*>(messages.data_ptr()), messages.size(0) / num_regions, regions,
                  static_cast<float*>(shard.data_ptr()), k, dtype, alpha, parallel());
}

void accumulate_cpu(Tensor messages, Tensor shard, int64_t k, int64_t num_regions, int64_t value_code) {
  add_on_cpu(messages, shard, k, num_regions, value_code, nullptr);
}

void add_messages_cpu(Tensor messages, Tensor shard, int64_t k, int64_t value_code, double alpha) {
  const auto factor = static_cast<float>(alpha);
  add_on_cpu(messages, shard, k, 1, value_code, &factor);
}

Tensor round_rows_cpu(Tensor grad, Optional residual, Optional next_residual, int64_t num_rows, Optional scale) {
  const auto source = source_of<cpu::Source>(grad, residual, next_residual, scale);
  Tensor rows = new_rows(grad, num_rows);
  cpu::round_rows(source, num_rows, halves(rows), parallel());
  return rows;
}

Tensor sum_rows_cpu(Tensor rows, Optional residual) {
  check_rows(rows, residual);
  Tensor row = torch::stable::new_empty(rows, {rows.size(1)});
  cpu::sum_rows(halves(rows), rows.size(0), rows.size(1), halves(row), mutable_floats(residual), length(residual),
                parallel());
  return row;
}

void accumulate_delta_cpu(Tensor local, Tensor global, std::vector<Tensor> model, double local_fraction) {
  const auto pieces = pieces_of(model, local, global);
  cpu::accumulate_delta(mutable_floats(local), floats(global), model_of(pieces), check_local_fraction(local_fraction),
                        parallel());
}

void lerp_into_cpu(Tensor local, Tensor global, std::vector<Tensor> model, double local_fraction) {
  const auto pieces = pieces_of(model, local, global);
  cpu::lerp_into(floats(local), floats(global), model_of(pieces), check_local_fraction(local_fraction), parallel());
}

// --------------------------------------------------------------------------------------------------------------- CUDA

#ifdef LS_WITH_CUDA
void* stream_of(const Tensor& tensor) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch was built without CUDA");
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device(), &stream) == 0, "no current CUDA stream");
  return stream;
}

Tensor scratch_on(const Tensor& like, int64_t nbytes) {
  return torch::stable::new_empty(like, {nbytes}, ScalarType::Byte);
}

std::tuple<Tensor, Tensor> mstopk_cuda(Tensor x, int64_t k) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const auto source = source_of<cuda::Source>(x, {}, {}, {});
  check_k(k, source.numel);
  Tensor values = torch::stable::new_empty(x, {k});
  Tensor indices = torch::stable::new_empty(x, {k}, index_type(source.numel));
  Tensor scratch = scratch_on(x, cuda::mstopk_scratch_bytes(source.numel, k));
  cuda::mstopk(source, k, values.data_ptr(), indices.data_ptr(), scratch.data_ptr(), stream_of(x));
  return {values, indices};
}

Tensor compress_cuda(Tensor grad, Optional residual, Optional next_residual, int64_t k, int64_t num_regions,
                     int64_t value_code, Optional scale) {
  const torch::stable::accelerator::DeviceGuard guard(grad.get_device());
  const Dtype dtype = value_dtype(value_code);
  const auto source = source_of<cuda::Source>(grad, residual, next_residual, scale);
  const Regions regions = regions_of(source.numel, k, num_regions);
  Tensor messages = new_messages(grad, regions, k, dtype);
  Tensor scratch = scratch_on(grad, cuda::compress_scratch_bytes(regions, k, dtype));
  cuda::compress(source, k, regions, dtype, static_cast<uint8_t*>(messages.data_ptr()), scratch.data_ptr(),
                 stream_of(grad));
  return messages;
}

void add_on_cuda(const Tensor& messages, const Tensor& shard, int64_t k, int64_t num_regions, int64_t value_code,
                 const float* alpha) {
  const torch::stable::accelerator::DeviceGuard guard(shard.get_device());
  const Dtype dtype = value_dtype(value_code);
  const Regions regions = check_accumulate(messages, shard, k, num_regions, dtype);
  Tensor scratch = scratch_on(shard, num_regions * cuda::kAccumulateScratchBytes);
  cuda::accumulate(static_cast<const uint8_t*>(messages.data_ptr()), messages.size(0) / num_regions, regions,
                   static_cast<float*>(shard.data_ptr()), k, dtype, alpha, scratch.data_ptr(), stream_of(shard));
}

void accumulate_cuda(Tensor messages, Tensor shard, int64_t k, int64_t num_regions, int64_t value_code) {
  add_on_cuda(messages, shard, k, num_regions, value_code, nullptr);
}

void add_messages_cuda(Tensor messages, Tensor shard, int64_t k, int64_t value_code, double alpha) {
  const auto factor = static_cast<float>(alpha);
  add_on_cuda(messages, shard, k, 1, value_code, &factor);
}

Tensor round_rows_cuda(Tensor grad, Optional residual, Optional next_residual, int64_t num_rows, Optional scale) {
  const torch::stable::accelerator::DeviceGuard guard(grad.get_device());
  const auto source = source_of<cuda::Source>(grad, residual, next_residual, scale);
  Tensor rows = new_rows(grad, num_rows);
  cuda::round_rows(source, num_rows, halves(rows), stream_of(grad));
  return rows;
}

Tensor sum_rows_cuda(Tensor rows, Optional residual) {
  const torch::stable::accelerator::DeviceGuard guard(rows.get_device());
  check_rows(rows, residual);
  Tensor row = torch::stable::new_empty(rows, {rows.size(1)});
  cuda::sum_rows(halves(rows), rows.size(0), rows.size(1), halves(row), mutable_floats(residual), length(residual),
                 stream_of(rows));
  return row;
}

void accumulate_delta_cuda(Tensor local, Tensor global, std::vector<Tensor> model, double local_fraction) {
  const torch::stable::accelerator::DeviceGuard guard(local.get_device());
  const auto pieces = pieces_of(model, local, global);
  cuda::accumulate_delta(mutable_floats(local), floats(global), model_of(pieces), check_local_fraction(local_fraction),
                         stream_of(local));
}

void lerp_into_cuda(Tensor local, Tensor global, std::vector<Tensor> model, double local_fraction) {
  const torch::stable::accelerator::DeviceGuard guard(local.get_device());
  const auto pieces = pieces_of(model, local, global);
  cuda::lerp_into(floats(local), floats(global), model_of(pieces), check_local_fraction(local_fraction),
                  stream_of(local));
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(lightning_sparse, CPU, library) {
  library.impl("mstopk", TORCH_BOX(&mstopk_cpu));
  library.impl("compress", TORCH_BOX(&compress_cpu));
  library.impl("accumulate", TORCH_BOX(&accumulate_cpu));
  library.impl("add_messages", TORCH_BOX(&add_messages_cpu));
  library.impl("round_rows", TORCH_BOX(&round_rows_cpu));
  library.impl("sum_rows", TORCH_BOX(&sum_rows_cpu));
  library.impl("accumulate_delta", TORCH_BOX(&accumulate_delta_cpu));
  library.impl("lerp_into", TORCH_BOX(&lerp_into_cpu));
}

#ifdef LS_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(lightning_sparse, CUDA, library) {
  library.impl("mstopk", TORCH_BOX(&mstopk_cuda));
  library.impl("compress", TORCH_BOX(&compress_cuda));
  library.impl("accumulate", TORCH_BOX(&accumulate_cuda));
  library.impl("add_messages", TORCH_BOX(&add_messages_cuda));
  library.impl("round_rows", TORCH_BOX(&round_rows_cuda));
  library.impl("sum_rows", TORCH_BOX(&sum_rows_cuda));
  library.impl("accumulate_delta", TORCH_BOX(&accumulate_delta_cuda));
  library.impl("lerp_into", TORCH_BOX(&lerp_into_cuda));
}
#endif

}  // namespace lightning_sparse

// kernel_report() and tests call these functions through ctypes.
extern "C" __attribute__((visibility("default"))) int lightning_sparse_has_cuda() {
#ifdef LS_WITH_CUDA
  return 1;
#else
  return 0;
#endif
}

extern "C" __attribute__((visibility("default"))) void lightning_sparse_force(int flags) {
  lightning_sparse::cpu::force(flags);
#ifdef LS_WITH_CUDA
  lightning_sparse::cuda::force_fallback((flags & lightning_sparse::cpu::kForceFallback) != 0);
#endif
}
