// The optimizer steps weights that lie between the global weights, `global`, and the node's weights, `local`
// (common.h). One pass over memory adds the optimizer's change to `local`. Another pass writes the interpolated
// weights.
#include <algorithm>

#include "mstopk_cpu.h"
#include "source_cpu.h"

namespace lightning_sparse::cpu {
namespace {

constexpr int64_t kPerTask = 1 << 16;  // elements that a worker takes at a time

// `local`, `global` and `model` point to n elements of one piece.
template <Dtype dtype>
inline void add_each(float* __restrict local, const float* __restrict global, const void* model, int64_t n,
                     float local_fraction) {
  for (int64_t i = 0; i < n; ++i) {
    const float before = rounded_to<dtype>(interpolate(global[i], local[i], local_fraction));
    local[i] = with_change<dtype>(local[i], before, load_as<dtype>(model, i), local_fraction);
  }
}

template <Dtype dtype>
inline void write_each(const float* __restrict local, const float* __restrict global, void* model, int64_t n,
                       float local_fraction) {
  for (int64_t i = 0; i < n; ++i) store_as<dtype>(model, i, interpolate(global[i], local[i], local_fraction));
}

// The same loops, compiled for AVX2: the compiler inlines and vectorizes them.
#if LS_HAVE_AVX2
template <Dtype dtype>
LS_AVX2 void add_avx2(float* local, const float* global, const void* model, int64_t n, float local_fraction) {
  add_each<dtype>(local, global, model, n, local_fraction);
}

template <Dtype dtype>
LS_AVX2 void write_avx2(const float* local, const float* global, void* model, int64_t n, float local_fraction) {
  write_each<dtype>(local, global, model, n, local_fraction);
}
#endif

struct AddChange {
  float* local;
  const float* global;
  float local_fraction;

  template <Dtype dtype>
  void run(int64_t at, void* model, int64_t n) const {
#if LS_HAVE_AVX2
    if (vectorized()) return add_avx2<dtype>(local + at, global + at, model, n, local_fraction);
#endif
    add_each<dtype>(local + at, global + at, model, n, local_fraction);
  }
};

struct WriteBetween {
  const float *local, *global;
  float local_fraction;

  template <Dtype dtype>
  void run(int64_t at, void* model, int64_t n) const {
#if LS_HAVE_AVX2
    if (vectorized()) return write_avx2<dtype>(local + at, global + at, model, n, local_fraction);
#endif
    write_each<dtype>(local + at, global + at, model, n, local_fraction);
  }
};

// Runs an operation on elements [begin, end) of the flat weights, piece by piece.
template <typename Op>
void apply_range(const Op& op, const Model& model, int64_t begin, int64_t end) {
  auto piece = std::upper_bound(model.begin(), model.end(), begin,
                                [](int64_t at, const Piece& each) { return at < each.begin + each.numel; });
  for (int64_t at = begin; at < end; ++piece) {
    const int64_t n = std::min(end, piece->begin + piece->numel) - at, from = at - piece->begin;
    char* data = static_cast<char*>(piece->data) + from * value_bytes(piece->dtype);
    if (piece->dtype == Dtype::fp32) op.template run<Dtype::fp32>(at, data, n);
    if (piece->dtype == Dtype::bf16) op.template run<Dtype::bf16>(at, data, n);
    if (piece->dtype == Dtype::fp16) op.template run<Dtype::fp16>(at, data, n);
    at += n;
  }
}

int64_t numel_of(const Model& model) { return model.end()[-1].begin + model.end()[-1].numel; }

template <typename Op>
void apply(const Op& op, const Model& model, const Parallel& parallel) {
  const int64_t numel = numel_of(model);
  parallel.run((numel + kPerTask - 1) / kPerTask, [&](int64_t span, int64_t) {
    apply_range(op, model, span * kPerTask, std::min(numel, (span + 1) * kPerTask));
  });
}

}  // namespace

void accumulate_delta(float* local, const float* global, const Model& model, float local_fraction,
                      const Parallel& parallel) {
  apply(AddChange{local, global, local_fraction}, model, parallel);
}

void lerp_into(const float* local, const float* global, const Model& model, float local_fraction,
               const Parallel& parallel) {
  apply(WriteBetween{local, global, local_fraction}, model, parallel);
}

}  // namespace lightning_sparse::cpu
