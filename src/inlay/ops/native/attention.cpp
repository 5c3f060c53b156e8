// Attention over a cache: how work is divided among threads.
#include "attention.h"

#include <tuple>

namespace inlay {
namespace {

thread_local Scratch query_rows, accumulated, known, turned_values, finite_values, tile_rooms, tile_states;

void finish(const Attention& a, int64_t b, int64_t head, int64_t row, const float* acc, Sofar s) {
  if (a.sinks) {
    float sink = element(a.sinks, a.sinks_type, head), most = std::max(s.most, sink);
    s.sum = s.sum * std::exp(s.most - most) + std::exp(sink - most);
    s.sum *= std::exp(most - s.most);  // acc is still relative to the old maximum
  }
  float over = 1.0f / s.sum;
  for (int64_t d = 0; d < a.width; ++d) put(a.out, a.q_type, a.out_at(b, head, row) + d, acc[d] * over);
}

void read_query(const Attention& a, int64_t b, int64_t head, int64_t row, float* out) {
  for (int64_t d = 0; d < a.depth; ++d) out[d] = element(a.query, a.q_type, a.query_at(b, head, row) + d);
}

// How the keys of a row are split into parts, each of neighboring rows of the cache: the keys before the start of the
// slot, and those after it. It depends only on the position of the row, not on the rows of a call, other sequences or
// threads. So the result of a row is bitwise the same in every batch.
constexpr int64_t kPart = 128, kMostParts = 65;
struct Cut {
  int64_t first, middle, end, lap, room, size;
  Cut(const Attention& a, int64_t b, int64_t row)
      : first(a.first(a.lengths[b] + row)),
        end(a.lengths[b] + row + 1),
        lap(first / a.room * a.room),
        room(a.room),
        size(kPart) {
    middle = std::min(end, lap + room);
    while (end - first > (kMostParts - 1) * size) size *= 2;
  }
  int64_t parts_before() const { return (middle - first + size - 1) / size; }
  int64_t parts() const { return parts_before() + (end - middle + size - 1) / size; }
};

// One part of one row, for all heads that share its keys.
__attribute__((noinline)) void part_of_row(const Attention& a, int64_t b, int64_t kv, int64_t row, const Cut& cut,
                                           int64_t part, float* query, float* acc, Sofar* sofar) {
  const int64_t per = a.per_key(), before = cut.parts_before();
  const bool after = part >= before;
  const int64_t from = after ? cut.middle + (part - before) * cut.size : cut.first + part * cut.size;
  const int64_t to = std::min(from + cut.size, after ? cut.end : cut.middle), lap = cut.lap + (after ? cut.room : 0);
  for (int64_t h = 0; h < per; ++h) read_query(a, b, kv * per + h, row, query + h * a.depth);
  attend_heads(a, query, kv * per, per, a.key_at(b, kv, lap), a.value_at(b, kv, lap), from, to, acc, sofar);
}

// Merge the next part of a row into its partial result.
__attribute__((noinline)) void add_part(int64_t width, float* sum, Sofar& s, const float* more, const Sofar& other) {
  const float most = std::max(s.most, other.most), mine = std::exp(s.most - most), theirs = std::exp(other.most - most);
  for (int64_t d = 0; d < width; ++d) sum[d] = sum[d] * mine + more[d] * theirs;
  s = {most, s.sum * mine + other.sum * theirs};
}

// Rows one by one; each reads its keys once for all heads that share them. If rows are few, threads share the parts of
// a row; otherwise each row is computed by one thread. In both cases parts are added in order.
void rows(const Attention& a) {
  const int64_t per = a.per_key(), whole = a.batch * a.kv_heads * a.length, threads = omp_get_max_threads();
  const bool shared = whole < 2 * threads;
  const int64_t kept = shared ? kMostParts : 2;  // parts of one row that are in memory
  // Enough for any number of rows, so that it is allocated once.
  float* acc = accumulated.get<float>(2 * threads * kMostParts * per * a.width);
  Sofar* sofar = known.get<Sofar>(2 * threads * kMostParts * per);
  float* queries = query_rows.get<float>(threads * per * a.depth);
  const auto place_of = [&](int64_t at) {
    return std::tuple(at / a.kv_heads / a.length, at % a.kv_heads, at / a.kv_heads % a.length);  // sequence, head, row
  };
  int64_t most = 0;
  for (int64_t b = 0; shared && b < a.batch; ++b)
    for (int64_t row = 0; row < a.length; ++row) most = std::max(most, Cut(a, b, row).parts());
#pragma omp parallel
  {
    float* query = queries + omp_get_thread_num() * per * a.depth;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < whole * most; ++item) {
      const int64_t at = item / most, part = item % most, mine = at * kMostParts + part;
      const auto [b, kv, row] = place_of(at);
      const Cut cut(a, b, row);
      if (part < cut.parts())
        part_of_row(a, b, kv, row, cut, part, query, acc + mine * per * a.width, sofar + mine * per);
    }
#pragma omp for schedule(static)
    for (int64_t at = 0; at < whole; ++at) {
      const auto [b, kv, row] = place_of(at);
      const Cut cut(a, b, row);
      const int64_t base = (shared ? at : omp_get_thread_num()) * kept;
      for (int64_t part = 0; part < cut.parts(); ++part) {
        const int64_t mine = base + (shared ? part : part > 0);
        if (!shared) part_of_row(a, b, kv, row, cut, part, query, acc + mine * per * a.width, sofar + mine * per);
        for (int64_t h = 0; part > 0 && h < per; ++h)
          add_part(a.width, acc + (base * per + h) * a.width, sofar[base * per + h], acc + (mine * per + h) * a.width,
                   sofar[mine * per + h]);
      }
      for (int64_t h = 0; h < per; ++h)
        finish(a, b, kv * per + h, row, acc + (base * per + h) * a.width, sofar[base * per + h]);
    }
  }
}

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
bool fits_tiles(const Attention& a) {
  return a.tiled && a.kv_type == kBFloat16 && a.softcap == 0 && !a.slopes && !a.sinks && a.depth % 32 == 0 &&
         a.width % 16 == 0 && a.depth <= 256 && a.width <= 256;
}

// The rows of a tile one by one, for values that are not finite. A tile multiplies masked values by 0, which would give
// NaN for them.
void attend_singly(const Attention& a, int64_t b, int64_t head, int64_t row, TileRoom& t) {
  float *query = t.scores[0], *acc = t.line, *more = t.part[0];
  const int64_t kv = head / a.per_key();
  for (const int64_t end = std::min(row + kQueries, a.length); row < end; ++row) {
    const Cut cut(a, b, row);
    const int64_t next = cut.lap + cut.room;
    Sofar sofar, other;
    read_query(a, b, head, row, query);
    attend<1>(a, query, head, a.key_at(b, kv, cut.lap), a.value_at(b, kv, cut.lap), cut.first, cut.middle, acc, &sofar);
    if (cut.middle < cut.end) {
      attend<1>(a, query, head, a.key_at(b, kv, next), a.value_at(b, kv, next), cut.middle, cut.end, more, &other);
      add_part(a.width, acc, sofar, more, other);
    }
    finish(a, b, head, row, acc, sofar);
  }
}

void tiles(const Attention& a) {
  int64_t longest = 0, lowest = std::numeric_limits<int64_t>::max();
  for (int64_t b = 0; b < a.batch; ++b) {
    longest = std::max(longest, a.lengths[b] + a.length);
    lowest = std::min(lowest, a.first(a.lengths[b]));
  }
  const int64_t heads = a.batch * a.kv_heads, blocks = up(a.length, kQueries) / kQueries;
  uint16_t* turned = turned_values.get<uint16_t>(heads * a.width * kSegment);
  float* states = tile_states.get<float>(a.batch * a.heads * blocks * TileState::size(a));
  uint8_t* finite = finite_values.get<uint8_t>(heads);
  TileRoom* rooms = tile_rooms.get<TileRoom>(omp_get_max_threads());
  std::fill(finite, finite + heads, uint8_t{1});
#pragma omp parallel
  {
    TileConfig().use();
    TileRoom& room = rooms[omp_get_thread_num()];
    for (int64_t segment = lowest / kSegment * kSegment; segment < longest; segment += kSegment) {
#pragma omp for schedule(static)
      for (int64_t at = 0; at < heads; ++at) {
        const int64_t b = at / a.kv_heads, from = std::max(segment, a.first(a.lengths[b]) / kKeys * kKeys);
        const int64_t to = std::min(a.lengths[b] + a.length, segment + kSegment);
        if (from < to) finite[at] &= turn(a, b, at % a.kv_heads, segment, from, to, turned + at * a.width * kSegment);
      }
      // Later blocks have more keys, so blocks are scheduled one by one, the longest first.
#pragma omp for schedule(dynamic, 1)
      for (int64_t at = a.batch * a.heads * blocks - 1; at >= 0; --at) {
        const int64_t row = at / (a.batch * a.heads) * kQueries, head = at % a.heads, b = at / a.heads % a.batch;
        const int64_t kv = b * a.kv_heads + head / a.per_key();
        const int64_t last = a.lengths[b] + std::min(row + kQueries, a.length);
        if (a.first(a.lengths[b] + row) >= segment + kSegment || last <= segment) continue;
        const TileState state(a, states + at * TileState::size(a));
        if (finite[kv]) attend_tiles(a, b, head, row, segment, turned + kv * a.width * kSegment, state, room);
        if (last > segment + kSegment) continue;
        finite[kv] ? finish_tiles(a, b, head, row, state) : attend_singly(a, b, head, row, room);
      }
    }
    _tile_release();
  }
}
#endif

}  // namespace
}  // namespace inlay

// Returns 0, or 1 if the arguments are invalid or memory is exhausted; inlay_last_error returns the reason.
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
