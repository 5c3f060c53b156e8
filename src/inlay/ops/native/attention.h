// Attention over a cache with one slot per sequence; only filled rows are read.
//
// The row of a position is the position modulo the rows of a slot (`room`). With a window, a slot may be a ring: it has
// fewer rows than the sequence has positions, and new rows replace those that have left the window.
//
// Scores are computed for a run of keys at a time, with a running maximum and sum (online softmax), so memory does not
// grow with the length. One new row reads its keys once for all query heads that share them, and long rows are split
// among threads. Many new rows over a bfloat16 cache use AMX, 32 queries by 64 keys.
#pragma once

#include "common.h"

namespace inlay {

struct Attention {
  const void* query;
  int64_t q_batch, q_head, q_row;  // strides
  const void *keys, *values;
  const int64_t *slots, *lengths;
  void* out;  // [batch, length, heads, width]
  int32_t q_type, kv_type;
  int64_t batch, heads, kv_heads, length, depth, width, room, held;  // held: number of slots
  float scale;
  int64_t window;
  float softcap;
  const void *slopes, *sinks;
  int32_t slopes_type, sinks_type;
  int32_t tiled;  // use AMX tiles if available: the caller's choice, independent of the number of rows

  int64_t per_key() const { return heads / kv_heads; }
  // Where position 0 would be if the rows of a slot began with position `lap`, a multiple of `room`.
  int64_t key_at(int64_t b, int64_t kv, int64_t lap) const { return ((slots[b] * kv_heads + kv) * room - lap) * depth; }
  int64_t value_at(int64_t b, int64_t kv, int64_t lap) const {
    return ((slots[b] * kv_heads + kv) * room - lap) * width;
  }
  int64_t query_at(int64_t b, int64_t head, int64_t row) const { return b * q_batch + head * q_head + row * q_row; }
  int64_t out_at(int64_t b, int64_t head, int64_t row) const { return ((b * length + row) * heads + head) * width; }
  int64_t first(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
  // The most rows of earlier calls. All rows of a call are written before one is read: a ring needs room for them and
  // for the window before the first. Positions and a window past them fit in 32 bits.
  int64_t longest() const {
    const bool is_ring = window > 0 && length > 0 && window <= room && length - 1 <= room - window;
    return std::max(room - length, is_ring ? std::numeric_limits<int32_t>::max() - room - length : 0);
  }
};

// Ensures that no arguments can cause a read outside of the caches.
inline void check(const Attention& a) {
  require(a.batch >= 0 && a.length >= 0 && a.depth >= 0 && a.width >= 0 && a.room >= 0 && a.window >= 0 &&
              a.room <= std::numeric_limits<int32_t>::max(),
          "cached_attention: a size is negative or too large");
  require(a.heads == 0 || (a.kv_heads > 0 && a.heads % a.kv_heads == 0),
          "cached_attention: the number of query heads is no multiple of the number of key heads");
  for (int64_t b = 0; b < a.batch; ++b) {
    require_range("cached_attention: slot", b, a.slots[b], 0, a.held - 1);
    require_range("cached_attention: length", b, a.lengths[b], 0, a.longest());
  }
}

constexpr int64_t kRun = 128;  // keys whose scores are computed at a time

// State of the online softmax for one row of one head: the largest score and the sum of exponentials. The maximum
// starts at the lowest finite number, not at -inf. If all scores are -inf the sum stays 0, and 0 / 0 is NaN as in the
// reference.
constexpr float kLowest = std::numeric_limits<float>::lowest();
struct Sofar {
  float most, sum;
};

inline float score_of(const Attention& a, float dot, int64_t head, int64_t key) {
  float score = dot * a.scale;
  if (a.softcap > 0) score = a.softcap * std::tanh(score / a.softcap);
  if (a.slopes) score += element(a.slopes, a.slopes_type, head) * static_cast<float>(key);
  return score;
}

#ifdef __AVX512F__
// Returns 0 below -87, and NaN for NaN, so that a NaN score reaches the sum.
inline __m512 exp16(__m512 x) {
  const __mmask16 above = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  x = _mm512_maskz_mov_ps(above, x);
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_maskz_scalef_ps(above, p, n);
}

// Dot products of kHeads queries with a run of keys.
template <int kHeads>
inline void dots(const float* query, int64_t depth, const void* keys, int32_t type, int64_t count, float* scores) {
  for (int64_t key = 0; key < count; ++key) {
    __m512 sums[kHeads];
    for (int h = 0; h < kHeads; ++h) sums[h] = _mm512_setzero_ps();
    for (int64_t d = 0; d < depth; d += 16) {
      __m512 k = load16(keys, type, key * depth + d);
      for (int h = 0; h < kHeads; ++h) sums[h] = _mm512_fmadd_ps(k, _mm512_loadu_ps(query + h * depth + d), sums[h]);
    }
    for (int h = 0; h < kHeads; ++h) scores[h * kRun + key] = _mm512_reduce_add_ps(sums[h]);
  }
}

#ifdef __AVX512BF16__
// Lane i of the result is the sum of vector i.
inline __m512 sums16(const __m512* v) {
  __m512 pairs[8], fours[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  auto halves_of = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  __m512 low = halves_of(fours[0], fours[1]), high = halves_of(fours[2], fours[3]);
  return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

// The same for keys in bfloat16, 16 at a time, with queries rounded to bfloat16. Returns the number of keys done.
template <int kHeads>
inline int64_t dots16(const uint16_t* query, int64_t depth, const uint16_t* keys, int64_t count, float* scores,
                      const uint16_t* values, int64_t width) {
  int64_t key = 0;
  for (; key + 16 <= count; key += 16) {
    // Prefetch the values of these keys.
    for (int64_t at = 0; at < 16 * width; at += 32) _mm_prefetch(values + key * width + at, _MM_HINT_T0);
    for (int h = 0; h < kHeads; ++h) {
      __m512 sums[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
      for (int64_t d = 0; d < depth; d += 32) {
        const __m512bh q = reinterpret_cast<__m512bh>(_mm512_loadu_si512(query + h * depth + d));
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
          sums[i] = _mm512_dpbf16_ps(sums[i],
                                     reinterpret_cast<__m512bh>(_mm512_loadu_si512(keys + (key + i) * depth + d)), q);
      }
      _mm512_storeu_ps(scores + h * kRun + key, sums16(sums));
    }
  }
  return key;
}

// Like `weigh` for values in bfloat16: 64 columns, even and odd ones separately.
template <int kHeads>
inline void weigh16(const float* weights, const uint16_t* values, int64_t width, int64_t from, int64_t count,
                    const float* fade, float* acc, const uint16_t* next) {
  const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  __m512 sums[kHeads][4];
  for (int h = 0; h < kHeads; ++h)
    for (int v = 0; v < 2; ++v) {
      float* at = acc + h * width + from + v * 32;
      __m512 a = _mm512_loadu_ps(at), b = _mm512_loadu_ps(at + 16), f = _mm512_set1_ps(fade[h]);
      sums[h][2 * v] = _mm512_mul_ps(_mm512_permutex2var_ps(a, even, b), f);
      sums[h][2 * v + 1] = _mm512_mul_ps(_mm512_permutex2var_ps(a, odd, b), f);
    }
  for (int64_t key = 0; key < count; ++key) {
    _mm_prefetch(next + key * 64, _MM_HINT_T0);
    _mm_prefetch(next + key * 64 + 32, _MM_HINT_T0);
    __m512 value[4];
    for (int v = 0; v < 2; ++v) {
      __m512i both = _mm512_loadu_si512(values + key * width + from + v * 32);
      value[2 * v] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      value[2 * v + 1] = _mm512_castsi512_ps(_mm512_and_si512(both, high));
    }
    for (int h = 0; h < kHeads; ++h) {
      __m512 weight = _mm512_set1_ps(weights[h * kRun + key]);
      for (int v = 0; v < 4; ++v) sums[h][v] = _mm512_fmadd_ps(weight, value[v], sums[h][v]);
    }
  }
  for (int h = 0; h < kHeads; ++h)
    for (int v = 0; v < 2; ++v) {
      float* at = acc + h * width + from + v * 32;
      _mm512_storeu_ps(at, _mm512_permutex2var_ps(sums[h][2 * v], first, sums[h][2 * v + 1]));
      _mm512_storeu_ps(at + 16, _mm512_permutex2var_ps(sums[h][2 * v], second, sums[h][2 * v + 1]));
    }
}
#endif

// Adds a run of weighted values to kHeads rows, kVectors vectors at a time.
template <int kHeads, int kVectors>
inline void weigh(const float* weights, const void* values, int32_t type, int64_t width, int64_t from, int64_t count,
                  const float* fade, float* acc) {
  __m512 sums[kHeads][kVectors];
  for (int h = 0; h < kHeads; ++h)
    for (int v = 0; v < kVectors; ++v)
      sums[h][v] = _mm512_mul_ps(_mm512_loadu_ps(acc + h * width + from + v * 16), _mm512_set1_ps(fade[h]));
  for (int64_t key = 0; key < count; ++key) {
    __m512 value[kVectors];
    for (int v = 0; v < kVectors; ++v) value[v] = load16(values, type, key * width + from + v * 16);
    for (int h = 0; h < kHeads; ++h) {
      __m512 weight = _mm512_set1_ps(weights[h * kRun + key]);
      for (int v = 0; v < kVectors; ++v) sums[h][v] = _mm512_fmadd_ps(weight, value[v], sums[h][v]);
    }
  }
  for (int h = 0; h < kHeads; ++h)
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(acc + h * width + from + v * 16, sums[h][v]);
}
#endif

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
inline float wide(float value) { return value; }
inline float wide(BFloat16 value) { return from_bf16(value.bits); }
inline float wide(Float16 value) { return from_half(value.bits); }

// Any width, on any processor; also the columns from `from` on that vectors leave over.
template <typename T>
void dots_portable(const float* query, int64_t depth, const T* keys, int64_t heads, int64_t count, float* scores) {
  for (int64_t key = 0; key < count; ++key)
    for (int64_t h = 0; h < heads; ++h) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t d = 0; d < depth; ++d) sum += query[h * depth + d] * wide(keys[key * depth + d]);
      scores[h * kRun + key] = sum;
    }
}

template <typename T>
void weigh_portable(const float* weights, const T* values, int64_t heads, int64_t width, int64_t from, int64_t count,
                    const float* fade, float* acc) {
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t d = from; d < width; ++d) acc[h * width + d] *= fade[h];
    for (int64_t key = 0; key < count; ++key) {
      const float weight = weights[h * kRun + key];
#pragma omp simd
      for (int64_t d = from; d < width; ++d) acc[h * width + d] += weight * wide(values[key * width + d]);
    }
  }
}

// Turns scores of one head over a run of keys into weights. Returns the factor for what was accumulated before.
inline float soften(const Attention& a, float* row, int64_t count, int64_t head, int64_t start, Sofar& sofar) {
  float most = sofar.most, sum = 0;
  const bool plain = a.softcap == 0 && !a.slopes;
  if (!plain)
    for (int64_t key = 0; key < count; ++key) row[key] = score_of(a, row[key], head, start + key);
#ifdef __AVX512F__
  const __m512 by = _mm512_set1_ps(plain ? a.scale : 1.0f), least = _mm512_set1_ps(kLowest);
  auto lanes = [&](int64_t key) {
    return static_cast<__mmask16>(count - key >= 16 ? 0xffff : (1u << (count - key)) - 1);
  };
  __m512 largest = _mm512_set1_ps(most), sums = _mm512_setzero_ps();
  for (int64_t key = 0; key < count; key += 16)
    largest =
        _mm512_max_ps(largest, _mm512_mask_mul_ps(least, lanes(key), by, _mm512_maskz_loadu_ps(lanes(key), row + key)));
  most = _mm512_reduce_max_ps(largest);
  for (int64_t key = 0; key < count; key += 16) {
    __m512 score = _mm512_maskz_loadu_ps(lanes(key), row + key);
    __m512 value = _mm512_maskz_mov_ps(lanes(key), exp16(_mm512_fmsub_ps(score, by, _mm512_set1_ps(most))));
    sums = _mm512_add_ps(sums, value);
    _mm512_mask_storeu_ps(row + key, lanes(key), value);
  }
  sum = _mm512_reduce_add_ps(sums);
#else
  for (int64_t key = 0; plain && key < count; ++key) row[key] *= a.scale;
#pragma omp simd reduction(max : most)
  for (int64_t key = 0; key < count; ++key) most = std::max(most, row[key]);
  for (int64_t key = 0; key < count; ++key) sum += row[key] = std::exp(row[key] - most);
#endif
  const float fade = std::exp(sofar.most - most);
  sofar = {most, sofar.sum * fade + sum};
  return fade;
}

// kHeads rows over keys [from, to); initializes `acc` and `sofar`.
template <int kHeads>
void attend(const Attention& a, const float* query, int64_t head, int64_t key_at, int64_t value_at, int64_t from,
            int64_t to, float* acc, Sofar* sofar) {
  float scores[kHeads * kRun], fade[kHeads];
  const int64_t size = a.kv_type == kFloat32 ? 4 : 2;
#ifdef __AVX512BF16__
  const bool narrow = a.kv_type == kBFloat16 && a.depth % 32 == 0 && a.depth <= 256 && to - from >= 16;
  alignas(64) uint16_t rounded[kHeads * 256];
  if (narrow)
    for (int64_t i = 0; i < kHeads * a.depth; i += 16)
      _mm256_store_si256(reinterpret_cast<__m256i*>(rounded + i), bf16_of(_mm512_loadu_ps(query + i)));
#endif
  for (int h = 0; h < kHeads; ++h) sofar[h] = {kLowest, 0};
  std::fill(acc, acc + kHeads * a.width, 0.0f);
  for (int64_t start = from; start < to; start += kRun) {
    const int64_t count = std::min(kRun, to - start);
    const char* keys = static_cast<const char*>(a.keys) + (key_at + start * a.depth) * size;
    const char* values = static_cast<const char*>(a.values) + (value_at + start * a.width) * size;
#ifdef __AVX512F__
    if (a.depth % 16 == 0) {
      int64_t done = 0;
#ifdef __AVX512BF16__
      if (narrow)
        done = dots16<kHeads>(rounded, a.depth, reinterpret_cast<const uint16_t*>(keys), count, scores,
                              reinterpret_cast<const uint16_t*>(values), a.width);
#endif
      dots<kHeads>(query, a.depth, keys + done * a.depth * size, a.kv_type, count - done, scores + done);
    } else
#endif
        if (a.kv_type == kFloat32)
      dots_portable(query, a.depth, reinterpret_cast<const float*>(keys), kHeads, count, scores);
    else if (a.kv_type == kBFloat16)
      dots_portable(query, a.depth, reinterpret_cast<const BFloat16*>(keys), kHeads, count, scores);
    else
      dots_portable(query, a.depth, reinterpret_cast<const Float16*>(keys), kHeads, count, scores);
    for (int h = 0; h < kHeads; ++h) fade[h] = soften(a, scores + h * kRun, count, head + h, start, sofar[h]);
    int64_t done = 0;
#ifdef __AVX512F__
#ifdef __AVX512BF16__
    for (; a.kv_type == kBFloat16 && done + 64 <= a.width; done += 64)
      weigh16<kHeads>(scores, reinterpret_cast<const uint16_t*>(values), a.width, done, count, fade, acc,
                      reinterpret_cast<const uint16_t*>(keys) + count * a.depth);
#endif
    for (; done + 64 <= a.width; done += 64)
      weigh<kHeads, 4>(scores, values, a.kv_type, a.width, done, count, fade, acc);
    for (; done + 16 <= a.width; done += 16)
      weigh<kHeads, 1>(scores, values, a.kv_type, a.width, done, count, fade, acc);
#endif
    if (done < a.width) {
      if (a.kv_type == kFloat32)
        weigh_portable(scores, reinterpret_cast<const float*>(values), kHeads, a.width, done, count, fade, acc);
      else if (a.kv_type == kBFloat16)
        weigh_portable(scores, reinterpret_cast<const BFloat16*>(values), kHeads, a.width, done, count, fade, acc);
      else
        weigh_portable(scores, reinterpret_cast<const Float16*>(values), kHeads, a.width, done, count, fade, acc);
    }
  }
}

inline void attend_heads(const Attention& a, const float* query, int64_t head, int64_t count, int64_t key_at,
                         int64_t value_at, int64_t from, int64_t to, float* acc, Sofar* sofar) {
  while (count > 0) {
    int64_t taken = count >= 4 ? 4 : count;
#define INLAY_HEADS(n) attend<n>(a, query, head, key_at, value_at, from, to, acc, sofar)
    taken == 4 ? INLAY_HEADS(4) : taken == 3 ? INLAY_HEADS(3) : taken == 2 ? INLAY_HEADS(2) : INLAY_HEADS(1);
#undef INLAY_HEADS
    query += taken * a.depth, acc += taken * a.width, sofar += taken, head += taken, count -= taken;
  }
}

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
constexpr int64_t kQueries = 32, kKeys = 64;
#ifndef INLAY_SEGMENT
#define INLAY_SEGMENT 1024
#endif
constexpr int64_t kSegment = INLAY_SEGMENT;  // keys whose values are transposed at a time, which bounds memory

// Transposes the values of positions [from, to) of a segment to [width, kSegment], the rows of a tile; `from` is a
// multiple of kKeys. Returns whether all are finite.
inline bool turn(const Attention& a, int64_t b, int64_t kv, int64_t segment, int64_t from, int64_t to, uint16_t* out) {
  constexpr uint16_t kExponent = 0x7f80;
  const uint16_t* values = static_cast<const uint16_t*>(a.values) + a.value_at(b, kv, 0);
  bool finite = true;
  for (int64_t key = from; key < up(to, kKeys); key += 16) {
    const uint16_t* rows[16];
    for (int64_t i = 0; i < 16; ++i) rows[i] = values + (key + i) % a.room * a.width;
    for (int64_t d = 0; d < a.width; ++d)
      for (int64_t i = 0; i < 16; ++i) {
        const uint16_t value = key + i < to ? rows[i][d] : uint16_t{0};
        out[d * kSegment + key - segment + i] = value;
        finite &= (value & kExponent) != kExponent;
      }
  }
  return finite;
}

// State of the online softmax for 32 queries of one head between two segments.
struct TileState {
  float *acc, *most, *sum;  // [width][kQueries], [kQueries], [kQueries]
  static int64_t size(const Attention& a) { return (a.width + 2) * kQueries; }
  TileState(const Attention& a, float* at) : acc(at), most(at + a.width * kQueries), sum(most + kQueries) {}
};

struct TileRoom {                                    // scratch memory of one thread
  alignas(64) uint16_t query[256 / 32][2][16 * 32];  // [step of 32 columns][half]: 16 pairs of columns, 16 queries
  alignas(64) float scores[kKeys][kQueries];
  alignas(64) uint16_t weights[kKeys / 32][2][16 * 32];  // [step of 32 keys][half]: 16 pairs of keys, 16 queries
  alignas(64) float line[256];
  alignas(64) float part[2][16 * 16];
  alignas(64) uint16_t keys[16 * 256];  // 16 keys that are not next to each other in the cache
};

// 32 queries of one head over the keys of a segment; `turned` are its transposed values.
inline void attend_tiles(const Attention& a, int64_t b, int64_t head, int64_t row, int64_t segment,
                         const uint16_t* turned, const TileState& state, TileRoom& t) {
  const int64_t before = a.lengths[b], rows = std::min(kQueries, a.length - row), steps = a.depth / 32;
  const int64_t kv = head / a.per_key();
  const uint16_t* keys = static_cast<const uint16_t*>(a.keys) + a.key_at(b, kv, 0);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  std::memset(t.query, 0, sizeof(t.query[0]) * steps);
  const __m512 by = _mm512_set1_ps(a.scale);
  for (int64_t r = 0; r < rows; ++r) {
    alignas(64) uint32_t pairs[128];
    for (int64_t d = 0; d < a.depth; d += 16)
      _mm256_store_si256(reinterpret_cast<__m256i*>(pairs + d / 2),
                         bf16_of(_mm512_mul_ps(by, load16(a.query, a.q_type, a.query_at(b, head, row + r) + d))));
    for (int64_t s = 0; s < steps; ++s) {
      uint32_t* out = reinterpret_cast<uint32_t*>(t.query[s][r / 16]) + r % 16;
      for (int64_t i = 0; i < 16; ++i) out[i * 16] = pairs[s * 16 + i];
    }
  }
  const int64_t first = a.first(before + row) / kKeys * kKeys;
  __m512 most[2] = {_mm512_set1_ps(kLowest), _mm512_set1_ps(kLowest)};
  __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  if (first >= segment)
    std::memset(state.acc, 0, a.width * kQueries * 4);
  else
    for (int half_ = 0; half_ < 2; ++half_)
      most[half_] = _mm512_loadu_ps(state.most + half_ * 16), sum[half_] = _mm512_loadu_ps(state.sum + half_ * 16);
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const int64_t last = before + row + rows;  // keys below this are visible to some query
  written();
  for (int64_t start = std::max(first, segment); start < std::min(last, segment + kSegment); start += kKeys) {
    // The last tiles may read rows that no query uses; those are masked.
    for (int64_t k = 0; k < kKeys; k += 16) {
      if (start + k >= last) break;
      const int64_t at = (start + k) % a.room;
      const uint16_t* some = at + 16 <= a.room ? keys + at * a.depth : t.keys;
      for (int64_t i = 0; some == t.keys && i < 16; ++i)
        std::memcpy(t.keys + i * a.depth, keys + (at + i) % a.room * a.depth, a.depth * 2);
      written();
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t s = 0; s < steps; ++s) {
        _tile_loadd(4, some + s * 32, a.depth * 2);
        _tile_loadd(6, t.query[s][0], 64);
        _tile_loadd(7, t.query[s][1], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
      _tile_stored(0, t.scores[k], kQueries * 4);
      _tile_stored(1, t.scores[k] + 16, kQueries * 4);
    }
    const int64_t count = std::min(kKeys, last - start);
    const bool whole = start + kKeys <= before + row + 1 && (!a.window || start >= a.first(before + row + rows - 1));
    __m512 fade[2];
    for (int64_t half_ = 0; half_ < 2; ++half_) {
      __m512i position = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(before + row + half_ * 16)));
      auto seen = [&](int64_t key) -> __mmask16 {
        if (key >= count) return 0;
        if (whole) return 0xffff;
        __m512i at = _mm512_set1_epi32(static_cast<int32_t>(start + key));
        __mmask16 mask = _mm512_cmple_epi32_mask(at, position);
        if (a.window)
          mask &= _mm512_cmpgt_epi32_mask(_mm512_add_epi32(at, _mm512_set1_epi32(static_cast<int32_t>(a.window))),
                                          position);
        return mask;
      };
      __m512 largest = most[half_];
      for (int64_t key = 0; key < count; ++key)
        largest = _mm512_mask_max_ps(largest, seen(key), largest, _mm512_load_ps(t.scores[key] + half_ * 16));
      fade[half_] = exp16(_mm512_sub_ps(most[half_], largest));
      most[half_] = largest;
      __m512 total = _mm512_setzero_ps();
      for (int64_t key = 0; key < kKeys; key += 2) {
        __m512 weight[2];
        for (int64_t i = 0; i < 2; ++i) {
          __mmask16 mask = seen(key + i);
          weight[i] = _mm512_maskz_mov_ps(
              mask, exp16(_mm512_sub_ps(_mm512_maskz_load_ps(mask, t.scores[key + i] + half_ * 16), largest)));
          total = _mm512_add_ps(total, weight[i]);
        }
        __m512i pair = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(weight[1], weight[0]));
        _mm512_store_si512(t.weights[key / 32][half_] + (key % 32 / 2) * 32, _mm512_permutexvar_epi16(order, pair));
      }
      sum[half_] = _mm512_fmadd_ps(sum[half_], fade[half_], total);
    }
    written();
    for (int64_t d = 0; d < a.width; d += 16) {
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t k = 0; k < kKeys / 32 && k * 32 < count; ++k) {
        _tile_loadd(4, turned + d * kSegment + start - segment + k * 32, kSegment * 2);
        _tile_loadd(6, t.weights[k][0], 64);
        _tile_loadd(7, t.weights[k][1], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
      _tile_stored(0, t.part[0], 64);
      _tile_stored(1, t.part[1], 64);
      for (int64_t i = 0; i < 16; ++i)
        for (int64_t half_ = 0; half_ < 2; ++half_) {
          float* at = state.acc + (d + i) * kQueries + half_ * 16;
          _mm512_storeu_ps(at,
                           _mm512_fmadd_ps(_mm512_loadu_ps(at), fade[half_], _mm512_load_ps(t.part[half_] + i * 16)));
        }
    }
  }
  for (int half_ = 0; half_ < 2; ++half_)
    _mm512_storeu_ps(state.most + half_ * 16, most[half_]), _mm512_storeu_ps(state.sum + half_ * 16, sum[half_]);
}

// Writes the results of 32 queries of one head after all their keys.
inline void finish_tiles(const Attention& a, int64_t b, int64_t head, int64_t row, const TileState& state) {
  for (int64_t r = 0; r < std::min(kQueries, a.length - row); ++r)
    for (int64_t d = 0; d < a.width; d += 16) {
      alignas(64) float line[16];
      for (int64_t i = 0; i < 16; ++i) line[i] = state.acc[(d + i) * kQueries + r];
      store16(a.out, a.q_type, a.out_at(b, head, row + r) + d,
              _mm512_mul_ps(_mm512_load_ps(line), _mm512_set1_ps(1.0f / state.sum[r])));
    }
}
#endif

}  // namespace inlay
