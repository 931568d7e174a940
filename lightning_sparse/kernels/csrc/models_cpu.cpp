// The optimizer steps weights that lie between the global weights, `shared`, and the node's weights, `own` (common.h).
// One pass over memory adds the optimizer's change to `own`. Another pass writes the interpolated weights.
#include <algorithm>

#include "mstopk_cpu.h"
#include "source_cpu.h"

namespace lightning_sparse::cpu {
namespace {

constexpr int64_t kPerTask = 1 << 16;  // elements that a worker takes at a time

// `own`, `shared` and `model` point to n elements of one piece.
template <Dtype dtype>
inline void add_each(float* __restrict own, const float* __restrict shared, const void* model, int64_t n, float ahead) {
  for (int64_t i = 0; i < n; ++i) {
    const float before = rounded_to<dtype>(interpolate(shared[i], own[i], ahead));
    own[i] = with_change<dtype>(own[i], before, load_as<dtype>(model, i), ahead);
  }
}

template <Dtype dtype>
inline void write_each(const float* __restrict own, const float* __restrict shared, void* model, int64_t n,
                       float ahead) {
  for (int64_t i = 0; i < n; ++i) store_as<dtype>(model, i, interpolate(shared[i], own[i], ahead));
}

// The same loops, compiled for AVX2: the compiler inlines and vectorizes them.
#if LS_HAVE_AVX2
template <Dtype dtype>
LS_AVX2 void add_avx2(float* own, const float* shared, const void* model, int64_t n, float ahead) {
  add_each<dtype>(own, shared, model, n, ahead);
}

template <Dtype dtype>
LS_AVX2 void write_avx2(const float* own, const float* shared, void* model, int64_t n, float ahead) {
  write_each<dtype>(own, shared, model, n, ahead);
}
#endif

struct AddChange {
  float* own;
  const float* shared;
  float ahead;

  template <Dtype dtype>
  void run(int64_t at, void* model, int64_t n) const {
#if LS_HAVE_AVX2
    if (vectorized()) return add_avx2<dtype>(own + at, shared + at, model, n, ahead);
#endif
    add_each<dtype>(own + at, shared + at, model, n, ahead);
  }
};

struct WriteBetween {
  const float *own, *shared;
  float ahead;

  template <Dtype dtype>
  void run(int64_t at, void* model, int64_t n) const {
#if LS_HAVE_AVX2
    if (vectorized()) return write_avx2<dtype>(own + at, shared + at, model, n, ahead);
#endif
    write_each<dtype>(own + at, shared + at, model, n, ahead);
  }
};

// Runs a move on elements [begin, end) of the flat weights, piece by piece.
template <typename Move>
void move_range(const Move& move, const Model& model, int64_t begin, int64_t end) {
  auto piece = std::upper_bound(model.begin(), model.end(), begin,
                                [](int64_t at, const Piece& each) { return at < each.begin + each.numel; });
  for (int64_t at = begin; at < end; ++piece) {
    const int64_t n = std::min(end, piece->begin + piece->numel) - at, from = at - piece->begin;
    char* data = static_cast<char*>(piece->data) + from * value_bytes(piece->dtype);
    if (piece->dtype == Dtype::fp32) move.template run<Dtype::fp32>(at, data, n);
    if (piece->dtype == Dtype::bf16) move.template run<Dtype::bf16>(at, data, n);
    if (piece->dtype == Dtype::fp16) move.template run<Dtype::fp16>(at, data, n);
    at += n;
  }
}

int64_t numel_of(const Model& model) { return model.end()[-1].begin + model.end()[-1].numel; }

template <typename Move>
void move_all(const Move& move, const Model& model, const Parallel& parallel) {
  const int64_t numel = numel_of(model);
  parallel.run((numel + kPerTask - 1) / kPerTask, [&](int64_t span, int64_t) {
    move_range(move, model, span * kPerTask, std::min(numel, (span + 1) * kPerTask));
  });
}

}  // namespace

void accumulate_delta(float* own, const float* shared, const Model& model, float ahead, const Parallel& parallel) {
  move_all(AddChange{own, shared, ahead}, model, parallel);
}

void lerp_into(const float* own, const float* shared, const Model& model, float ahead, const Parallel& parallel) {
  move_all(WriteBetween{own, shared, ahead}, model, parallel);
}

}  // namespace lightning_sparse::cpu
