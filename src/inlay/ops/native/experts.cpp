// Linear layers whose weight is that of an expert, chosen for each row.
#include <vector>

#include "common.h"

namespace inlay {
namespace {

thread_local Scratch wide_x, wide_weight;

float dot(const float* x, const float* weight, int64_t depth) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t k = 0; k < depth; ++k) sum += x[k] * weight[k];
  return sum;
}

// The rows of each expert, in order: those of expert e are rows[ends[e - 1]] to rows[ends[e] - 1].
struct Grouped {
  std::vector<int64_t> rows, ends;
  Grouped(const int64_t* experts, int64_t count, int64_t held) : rows(count), ends(held) {
    for (int64_t row = 0; row < count; ++row) {
      require_range("expert_linear: expert", row, experts[row], 0, held - 1);
      ++ends[experts[row]];
    }
    for (int64_t expert = 1; expert < held; ++expert) ends[expert] += ends[expert - 1];
    for (int64_t row = count - 1; row >= 0; --row) rows[--ends[experts[row]]] = row;
    // Each end is the begin now, which is the end of the expert before.
    for (int64_t expert = 0; expert + 1 < held; ++expert) ends[expert] = ends[expert + 1];
    if (held) ends[held - 1] = count;
  }
};

}  // namespace
}  // namespace inlay

// Row r of y is row r / shared of x times the weight of expert experts[r]. The result of a row does not depend on
// others. `strides` are those of the weight, [expert, feature, column]. Returns 0, or 1 if an expert does not exist or
// memory is exhausted.
INLAY_EXPORT int32_t inlay_expert_linear(const void* x, const int64_t* experts, const void* weight, void* y,
                                         int32_t x_type, int32_t weight_type, int64_t rows, int64_t shared,
                                         int64_t held, int64_t features, int64_t depth, const int64_t* strides) {
  using namespace inlay;
  return guarded([&] {
    const Grouped grouped(experts, rows, held);
    if (rows * features == 0) return;
    const int64_t sources = rows / shared;
    const float* wide = static_cast<const float*>(x);
    if (x_type != kFloat32) {
      float* out = wide_x.get<float>(sources * depth);
      for (int64_t at = 0; at < sources * depth; ++at) out[at] = element(x, x_type, at);
      wide = out;
    }
    float* lines = wide_weight.get<float>(omp_get_max_threads() * depth);
#pragma omp parallel
    {
      float* line = lines + omp_get_thread_num() * depth;
      for (int64_t expert = 0, begin = 0; expert < held; begin = grouped.ends[expert++]) {
        const int64_t end = grouped.ends[expert];
        if (begin == end) continue;
#pragma omp for schedule(static) nowait
        for (int64_t feature = 0; feature < features; ++feature) {
          const int64_t from = expert * strides[0] + feature * strides[1];
          const float* values = static_cast<const float*>(weight) + from;
          if (weight_type != kFloat32 || (depth > 1 && strides[2] != 1)) {
            for (int64_t k = 0; k < depth; ++k) line[k] = element(weight, weight_type, from + k * strides[2]);
            values = line;
          }
          for (int64_t place = begin; place < end; ++place) {
            const int64_t row = grouped.rows[place];
            put(y, x_type, row * features + feature, dot(wide + row / shared * depth, values, depth));
          }
        }
      }
    }
  });
}
