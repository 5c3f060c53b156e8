// Attention over a cache: what is done by whom.
#include "attention.h"

namespace inlay {
namespace {

thread_local Scratch query_rows, accumulated, known, turned_values;

void finish(const Attention& a, int64_t b, int64_t head, int64_t row, const float* acc, Sofar s) {
  if (a.sinks) {
    float sink = element(a.sinks, a.extra_type, head), most = std::max(s.most, sink);
    s.sum = s.sum * std::exp(s.most - most) + std::exp(sink - most);
    s.sum *= std::exp(most - s.most);  // acc is still relative to the old one
  }
  float over = 1.0f / s.sum;
  for (int64_t d = 0; d < a.width; ++d) put(a.out, a.q_type, a.out_at(b, head, row) + d, acc[d] * over);
}

// Rows one by one; each reads its keys once for all heads that share them. Long ones are cut into parts.
void rows(const Attention& a) {
  const int64_t per = a.per_key(), whole = a.batch * a.kv_heads * a.length;
  int64_t longest = 0;
  for (int64_t b = 0; b < a.batch; ++b) longest = std::max(longest, a.lengths[b] + a.length);
  if (a.window) longest = std::min(longest, a.window + a.length);
  const int64_t threads = omp_get_max_threads();
  const int64_t parts = std::max<int64_t>(1, std::min((2 * threads + whole - 1) / whole, longest / 32));
  float* acc = accumulated.get<float>(whole * parts * per * a.width);
  Sofar* sofar = known.get<Sofar>(whole * parts * per);
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t item = 0; item < whole * parts; ++item) {
      const int64_t part = item % parts, place = item / parts;
      const int64_t kv = place % a.kv_heads, row = place / a.kv_heads % a.length, b = place / a.kv_heads / a.length;
      const int64_t position = a.lengths[b] + row, first = a.first(position), count = position + 1 - first;
      float* mine = query_rows.get<float>(per * a.depth);
      for (int64_t h = 0; h < per; ++h)
        for (int64_t d = 0; d < a.depth; ++d)
          mine[h * a.depth + d] = element(a.query, a.q_type, a.query_at(b, kv * per + h, row) + d);
      attend_heads(a, mine, kv * per, per, a.key_at(b, kv), a.value_at(b, kv), first + count * part / parts,
                   first + count * (part + 1) / parts, acc + item * per * a.width, sofar + item * per);
    }
#pragma omp for schedule(static)
    for (int64_t at = 0; at < whole * per; ++at) {
      const int64_t place = at / per, h = at % per;
      const int64_t kv = place % a.kv_heads, row = place / a.kv_heads % a.length, b = place / a.kv_heads / a.length;
      float* sum = acc + (place * parts * per + h) * a.width;
      Sofar s = sofar[place * parts * per + h];
      for (int64_t part = 1; part < parts; ++part) {
        const Sofar other = sofar[(place * parts + part) * per + h];
        const float* more = acc + ((place * parts + part) * per + h) * a.width;
        if (other.sum == 0) continue;
        float most = std::max(s.most, other.most), mine = std::exp(s.most - most), theirs = std::exp(other.most - most);
        for (int64_t d = 0; d < a.width; ++d) sum[d] = sum[d] * mine + more[d] * theirs;
        s = {most, s.sum * mine + other.sum * theirs};
      }
      finish(a, b, kv * per + h, row, sum, s);
    }
  }
}

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
bool fits_tiles(const Attention& a) {
  return a.length >= 16 && a.kv_type == kBFloat16 && a.softcap == 0 && !a.slopes && !a.sinks && a.depth % 32 == 0 &&
         a.width % 16 == 0 && a.depth <= 256 && a.width <= 256 && a.room >= 16;
}

void tiles(const Attention& a) {
  int64_t longest = 0;
  for (int64_t b = 0; b < a.batch; ++b) longest = std::max(longest, a.lengths[b] + a.length);
  const int64_t padded = up(longest, kKeys), heads = a.batch * a.kv_heads, blocks = up(a.length, kQueries) / kQueries;
  uint16_t* turned = turned_values.get<uint16_t>(heads * a.width * padded);
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t at = 0; at < heads; ++at) {
      int64_t b = at / a.kv_heads, filled = a.lengths[b] + a.length;
      const uint16_t* values = static_cast<const uint16_t*>(a.values) + a.value_at(b, at % a.kv_heads);
      turn(values, a.width, filled, padded, turned + at * a.width * padded);
    }
    TileConfig().use();
    static thread_local TileRoom* room = new TileRoom;  // kept by its thread
    // Later blocks see more keys: they are dealt out singly, the longest first.
#pragma omp for schedule(dynamic, 1)
    for (int64_t at = a.batch * a.heads * blocks - 1; at >= 0; --at) {
      int64_t block = at / (a.batch * a.heads), head = at % a.heads, b = at / a.heads % a.batch;
      const uint16_t* mine = turned + (b * a.kv_heads + head / a.per_key()) * a.width * padded;
      attend_tiles(a, b, head, block * kQueries, mine, padded, *room);
    }
    _tile_release();
  }
}
#endif

}  // namespace
}  // namespace inlay

INLAY_EXPORT void inlay_cached_attention(const inlay::Attention* a) {
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  if (inlay::fits_tiles(*a)) return inlay::tiles(*a);
#endif
  inlay::rows(*a);
}
