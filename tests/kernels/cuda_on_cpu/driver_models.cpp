// The entry points of a node's models.
#include <vector>

#include "driver.h"

namespace {

using Call = void (*)(float*, const float*, const Model&, float, void*);

const char* interpolate_model(const Call& call, float* local, const float* global, void* const* data, const int* dtypes,
                              const int64_t* numels, int64_t count, float local_fraction, bool adds) {
  return run([&] {
    std::vector<Piece> pieces;
    int64_t begin = 0;
    for (int64_t p = 0; p < count; ++p) {
      pieces.push_back({data[p], static_cast<Dtype>(dtypes[p]), begin, numels[p]});
      begin += numels[p];
      adds ? reads(data[p], bytes_of(dtypes[p], numels[p]), "a piece")
           : writes(data[p], bytes_of(dtypes[p], numels[p]), "a piece");
    }
    reads(local, 4 * begin, "local");
    reads(global, 4 * begin, "global");
    call(local, global, {pieces.data(), count}, local_fraction, nullptr);
  });
}

}  // namespace

extern "C" {

const char* emulate_accumulate_delta(float* local, const float* global, void* const* data, const int* dtypes,
                                     const int64_t* numels, int64_t count, float local_fraction) {
  return interpolate_model(cuda::accumulate_delta, local, global, data, dtypes, numels, count, local_fraction, true);
}

const char* emulate_lerp_into(float* local, const float* global, void* const* data, const int* dtypes,
                              const int64_t* numels, int64_t count, float local_fraction) {
  const auto write = [](float* mine, const float* theirs, const Model& model, float share, void* stream) {
    cuda::lerp_into(mine, theirs, model, share, stream);
  };
  return interpolate_model(write, local, global, data, dtypes, numels, count, local_fraction, false);
}
}
