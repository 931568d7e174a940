// The entry points of a node's models.
#include <vector>

#include "driver.h"

namespace {

using Call = void (*)(float*, const float*, const Model&, float, void*);

const char* move(const Call& call, float* own, const float* shared, void* const* data, const int* dtypes,
                 const int64_t* numels, int64_t count, float ahead, bool adds) {
  return run([&] {
    std::vector<Piece> pieces;
    int64_t begin = 0;
    for (int64_t p = 0; p < count; ++p) {
      pieces.push_back({data[p], static_cast<Dtype>(dtypes[p]), begin, numels[p]});
      begin += numels[p];
      adds ? reads(data[p], bytes_of(dtypes[p], numels[p]), "a piece")
           : writes(data[p], bytes_of(dtypes[p], numels[p]), "a piece");
    }
    reads(own, 4 * begin, "own");
    reads(shared, 4 * begin, "shared");
    call(own, shared, {pieces.data(), count}, ahead, nullptr);
  });
}

}  // namespace

extern "C" {

const char* emulate_accumulate_delta(float* own, const float* shared, void* const* data, const int* dtypes,
                               const int64_t* numels, int64_t count, float ahead) {
  return move(cuda::accumulate_delta, own, shared, data, dtypes, numels, count, ahead, true);
}

const char* emulate_lerp_into(float* own, const float* shared, void* const* data, const int* dtypes,
                                  const int64_t* numels, int64_t count, float ahead) {
  const auto write = [](float* mine, const float* theirs, const Model& model, float share, void* stream) {
    cuda::lerp_into(mine, theirs, model, share, stream);
  };
  return move(write, own, shared, data, dtypes, numels, count, ahead, false);
}
}
