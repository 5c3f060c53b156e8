// Attention over a cache: what is done by whom.
#include "attention.h"

namespace inlay {
namespace {

thread_local Scratch query_rows, accumulated, known, turned_values, finite_values, tile_rooms;

void finish(const Attention& a, int64_t b, int64_t head, int64_t row, const float* acc, Sofar s) {
  if (a.sinks) {
    float sink = element(a.sinks, a.sinks_type, head), most = std::max(s.most, sink);
    s.sum = s.sum * std::exp(s.most - most) + std::exp(sink - most);
    s.sum *= std::exp(most - s.most);  // acc is still relative to the old one
  }
  float over = 1.0f / s.sum;
  for (int64_t d = 0; d < a.width; ++d) put(a.out, a.q_type, a.out_at(b, head, row) + d, acc[d] * over);
}

void read_query(const Attention& a, int64_t b, int64_t head, int64_t row, float* out) {
  for (int64_t d = 0; d < a.depth; ++d) out[d] = element(a.query, a.q_type, a.query_at(b, head, row) + d);
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
  float* queries = query_rows.get<float>(threads * per * a.depth);
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t item = 0; item < whole * parts; ++item) {
      const int64_t part = item % parts, place = item / parts;
      const int64_t kv = place % a.kv_heads, row = place / a.kv_heads % a.length, b = place / a.kv_heads / a.length;
      const int64_t position = a.lengths[b] + row, first = a.first(position), count = position + 1 - first;
      float* mine = queries + omp_get_thread_num() * per * a.depth;
      for (int64_t h = 0; h < per; ++h) read_query(a, b, kv * per + h, row, mine + h * a.depth);
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

// The rows of a tile one by one. A tile multiplies values that a row does not see by 0, which is NaN where they are not
// finite: then only this is right.
void attend_singly(const Attention& a, int64_t b, int64_t head, int64_t row, TileRoom& t) {
  float *query = t.scores[0], *acc = t.acc[0];
  const int64_t kv = head / a.per_key();
  for (const int64_t end = std::min(row + kQueries, a.length); row < end; ++row) {
    const int64_t position = a.lengths[b] + row;
    Sofar sofar;
    read_query(a, b, head, row, query);
    attend<1>(a, query, head, a.key_at(b, kv), a.value_at(b, kv), a.first(position), position + 1, acc, &sofar);
    finish(a, b, head, row, acc, sofar);
  }
}

void tiles(const Attention& a) {
  int64_t longest = 0;
  for (int64_t b = 0; b < a.batch; ++b) longest = std::max(longest, a.lengths[b] + a.length);
  const int64_t padded = up(longest, kKeys), heads = a.batch * a.kv_heads, blocks = up(a.length, kQueries) / kQueries;
  uint16_t* turned = turned_values.get<uint16_t>(heads * a.width * padded);
  uint8_t* finite = finite_values.get<uint8_t>(heads);
  TileRoom* rooms = tile_rooms.get<TileRoom>(omp_get_max_threads());
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t at = 0; at < heads; ++at) {
      int64_t b = at / a.kv_heads, filled = a.lengths[b] + a.length;
      const uint16_t* values = static_cast<const uint16_t*>(a.values) + a.value_at(b, at % a.kv_heads);
      finite[at] = turn(values, a.width, filled, padded, turned + at * a.width * padded);
    }
    TileConfig().use();
    TileRoom& room = rooms[omp_get_thread_num()];
    // Later blocks see more keys: they are dealt out singly, the longest first.
#pragma omp for schedule(dynamic, 1)
    for (int64_t at = a.batch * a.heads * blocks - 1; at >= 0; --at) {
      const int64_t block = at / (a.batch * a.heads), head = at % a.heads, b = at / a.heads % a.batch;
      const int64_t kv = b * a.kv_heads + head / a.per_key();
      if (finite[kv])
        attend_tiles(a, b, head, block * kQueries, turned + kv * a.width * padded, padded, room);
      else
        attend_singly(a, b, head, block * kQueries, room);
    }
    _tile_release();
  }
}
#endif

}  // namespace
}  // namespace inlay

// 0, or 1 where the arguments are refused or memory is short; inlay_last_error says why.
INLAY_EXPORT int32_t inlay_cached_attention(const inlay::Attention* a) {
  return inlay::guarded([&] {
    inlay::check(*a);
    if (a->batch * a->heads * a->length * a->width == 0) return;
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
    if (inlay::fits_tiles(*a)) return inlay::tiles(*a);
#endif
    inlay::rows(*a);
  });
}
