// y = x W^T + bias over packed weights (see ops/weight_layout.py for their layout).
//
// There are three variants, which read the same packed bytes. `dot` quantizes x to int8 with one scale per 32 columns
// and multiplies bytes (few rows). `tiles8` does the same for 16 rows at once with AMX. `tiles16` converts weights to
// bfloat16 and multiplies those with AMX (many rows). `Way` names them, and a portable variant.
#pragma once

#include <vector>

#include "common.h"

namespace inlay {

enum Way : int32_t { kAny = 0, kDot = 1, kTiles8 = 2, kTiles16 = 3, kPortable = 4 };

constexpr int32_t kZero6 = 32;  // the zero point of all 6-bit weights

struct Linear {
  const void* x;
  const uint8_t* weight;
  const void* bias;
  void* y;
  int32_t x_type, y_type;
  int64_t rows, features, depth, group;
  int32_t bits, zero;
  int64_t y_stride = 0;  // between rows of y; 0 if they are adjacent

  int64_t stride() const { return y_stride ? y_stride : features; }
  int64_t groups() const { return depth / group; }
  int64_t blocks() const { return up(features, kLanes) / kLanes; }
  int64_t numbers() const { return group * kLanes * bits / 8; }
  int64_t scales() const { return bits >= 16 ? 0 : zero < 0 ? 2 : 1; }
  // Columns that share a scale: a group, or the part of a group that has a factor of its own.
  int64_t span() const { return group != kSuperGroup ? group : bits == 6 ? kStep / 2 : kStep; }
  int64_t factor_bytes() const { return group != kSuperGroup ? 0 : group / span() * kLanes * scales(); }
  int64_t group_bytes() const { return numbers() + factor_bytes() + 2 * kLanes * scales(); }
  int64_t block_bytes() const { return groups() * group_bytes(); }
};

inline void check(const Linear& l, const char* what) {
  const auto holds = [&](bool right, const char* wanted) {
    if (!right) throw std::invalid_argument(std::string(what) + " wants " + wanted);
  };
  holds(l.bits == 4 || l.bits == 5 || l.bits == 6 || l.bits == 8 || l.bits == 16 || l.bits == 32,
        "4, 5, 6, 8, 16 or 32 bits");
  if (l.group == kSuperGroup)
    holds(l.bits == 6 ? l.zero == kZero6 : l.bits < 6 && l.zero < 0,
          "minima with 4 or 5 bits, or a zero point of 32 with 6 bits, in groups of 256");
  else
    holds(l.bits != 6, "groups of 256 with 6 bits");
  holds(l.rows >= 0 && l.features >= 0 && l.depth >= 0, "sizes that are not negative");
  holds(l.group > 0 && l.group % kStep == 0 && l.depth % l.group == 0, "whole groups of columns, of 32 or a multiple");
}

// The parts of a mixed weight: linear layers that compute adjacent features (see ops/weight_layout.py).
inline std::vector<Linear> mixed_parts(const Linear& whole, int64_t bytes) {
  constexpr int64_t kRow = 16, kAlign = 64;
  int32_t head[4];
  require(bytes >= kRow, "a mixed weight of no bytes");
  std::memcpy(head, whole.weight, kRow);
  const int64_t count = head[0];
  require(count > 0 && count < bytes / kRow && head[1] == whole.depth && whole.depth > 0,
          "the weight does not have these columns");
  std::vector<Linear> parts;
  int64_t start = kRow * (count + 1), first = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t row[4];
    std::memcpy(row, whole.weight + kRow * (i + 1), kRow);
    Linear l = whole;
    l.features = row[0], l.bits = row[1], l.zero = row[2], l.group = row[3], l.y_stride = whole.features;
    check(l, "packed_linear");
    require(l.bits < 16, "a part of a mixed weight has 4 to 8 bits");
    start = up(start, kAlign);
    const int64_t size = l.blocks() * l.block_bytes();
    require(start + size <= bytes, "the weight has fewer bytes than its parts");
    const auto moved = [&](const void* at, int32_t type) {
      return at ? static_cast<const char*>(at) + first * (type == kFloat32 ? 4 : 2) : nullptr;
    };
    l.weight = whole.weight + start;
    l.bias = moved(whole.bias, whole.x_type);
    l.y = const_cast<char*>(moved(whole.y, whole.y_type));
    parts.push_back(l);
    start += size, first += l.features;
  }
  require(first == whole.features, "the weight does not have these features");
  return parts;
}

// A number format at compile time. With `kFactors`, groups have integer factors of their scales and minima.
template <int kBits_, bool kMinimum_, bool kFactors_>
struct Format {
  static constexpr int kBits = kBits_;
  static constexpr bool kMinimum = kMinimum_, kFactors = kFactors_, kHalves = kBits == 6;
};

// Calls a function with the format of bytes of a weight.
template <typename Call>
inline void by_format(const Linear& l, const Call& call) {
  const bool minimum = l.zero < 0, factors = l.group == kSuperGroup;
  if (l.bits == 8)
    minimum ? call(Format<8, true, false>{}) : call(Format<8, false, false>{});
  else if (l.bits == 6)
    call(Format<6, false, true>{});
  else if (l.bits == 5)
    factors   ? call(Format<5, true, true>{})
    : minimum ? call(Format<5, true, false>{})
              : call(Format<5, false, false>{});
  else
    factors   ? call(Format<4, true, true>{})
    : minimum ? call(Format<4, true, false>{})
              : call(Format<4, false, false>{});
}

// x as int8: one scale per 32 columns, and the sums of the dequantized values. If a value is not finite, the scale is
// NaN. Then all features of the row are NaN; those of the reference are NaN or infinite. A step of 32 columns of up to
// 16 rows is contiguous, so that a kernel that goes through the steps of some rows reads adjacent memory.
struct Bytes {
  int64_t steps, lanes;  // steps of a row, and rows that are stored together
  int8_t* q;             // 32 per place
  float* scale;          // one per place
  float* sum;            // one per place
  int32_t* offset;       // two per place, -32 times the sums of 16 values in q; null if no weight has 6 bits

  int64_t place(int64_t row, int64_t step) const { return (row / lanes * steps + step) * lanes + row % lanes; }
  void put(int64_t at, float factor, int32_t low, int32_t high) const {
    scale[at] = factor;
    sum[at] = factor * (static_cast<float>(low) + static_cast<float>(high));  // exact
    if (offset) offset[2 * at] = -kZero6 * low, offset[2 * at + 1] = -kZero6 * high;
  }
};

// The factor that turns a value into int8. It would overflow below 127 / FLT_MAX, so such values become 0.
inline float inverse_of(float most) { return most > 127.0f / std::numeric_limits<float>::max() ? 127.0f / most : 0.0f; }

inline void to_bytes_portable(const Linear& l, int64_t row, int64_t step, const Bytes& out) {
  const int64_t at = out.place(row, step);
  float values[kStep], most = 0;
  bool finite = true;
  for (int64_t k = 0; k < kStep; ++k) {
    values[k] = element(l.x, l.x_type, row * l.depth + step * kStep + k);
    most = std::max(most, std::fabs(values[k]));
    finite &= std::isfinite(values[k]);
  }
  if (!finite) {
    std::memset(out.q + at * kStep, 0, kStep);
    out.put(at, std::numeric_limits<float>::quiet_NaN(), 0, 0);
    return;
  }
  const float inverse = inverse_of(most);
  int32_t sums[2] = {0, 0};
  for (int64_t k = 0; k < kStep; ++k) {
    int32_t q = static_cast<int32_t>(std::nearbyint(values[k] * inverse));
    out.q[at * kStep + k] = static_cast<int8_t>(q);
    sums[k / 16] += q;
  }
  out.put(at, most / 127.0f, sums[0], sums[1]);
}

inline void to_bytes(const Linear& l, int64_t row, int64_t step, const Bytes& out) {
#ifdef __AVX512F__
  const int64_t from = row * l.depth + step * kStep, at = out.place(row, step);
  __m512 low = load16(l.x, l.x_type, from), high = load16(l.x, l.x_type, from + 16);
  const __m512 size = _mm512_abs_ps(low), other = _mm512_abs_ps(high), infinite = _mm512_set1_ps(INFINITY);
  float most = _mm512_reduce_max_ps(_mm512_max_ps(size, other));
  if (_mm512_cmp_ps_mask(size, infinite, _CMP_NLT_UQ) | _mm512_cmp_ps_mask(other, infinite, _CMP_NLT_UQ))
    return to_bytes_portable(l, row, step, out);
  __m512 inverse = _mm512_set1_ps(inverse_of(most));
  __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)), b = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out.q + at * kStep), _mm512_cvtepi32_epi8(a));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out.q + at * kStep + 16), _mm512_cvtepi32_epi8(b));
  if (out.offset)
    out.put(at, most / 127.0f, _mm512_reduce_add_epi32(a), _mm512_reduce_add_epi32(b));
  else
    out.put(at, most / 127.0f, _mm512_reduce_add_epi32(_mm512_add_epi32(a, b)), 0);
#else
  to_bytes_portable(l, row, step, out);
#endif
}

inline float half(const uint8_t* data) {
  uint16_t bits;
  std::memcpy(&bits, data, 2);
  return from_half(bits);
}

// An integer of a step of 32 columns: byte `at` of the 64 bytes of four columns.
inline int32_t number(const uint8_t* step, int32_t bits, int64_t quad, int64_t at) {
  if (bits == 8) return step[quad * 64 + at];
  const int32_t both = step[quad % 4 * 64 + at], low = quad < 4 ? both & 15 : both >> 4;
  if (bits == 4) return low;
  const int64_t more = bits - 4, per = 8 / more;
  return low | ((step[256 + quad / per * 64 + at] >> more * (quad % per)) & ((1 << more) - 1)) << 4;
}

// The scale of one feature in a part of a group, and its minimum if the format has minima.
inline float scale_of(const Linear& l, const uint8_t* group, int64_t part, int64_t lane, bool minimum = false) {
  const uint8_t* factors = group + l.numbers();
  const float scale = half(factors + l.factor_bytes() + 2 * (minimum * kLanes + lane));
  if (l.group != kSuperGroup) return scale;
  return scale *
         static_cast<float>(static_cast<int8_t>(factors[(minimum * l.group / l.span() + part) * kLanes + lane]));
}

// The portable variant, which tests compare the others with. It uses AVX2 where available.
#ifdef __AVX2__
inline __m256i four_by_eight(__m256i w, __m256i x, int32_t bits) {  // 4 columns of 8 features times 4 values
  if (bits < 8) return _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
  // Sums of two products of 8-bit values do not fit in 16 bits.
  const __m256i even = _mm256_set1_epi16(0xff);
  __m256i low = _mm256_madd_epi16(_mm256_and_si256(w, even), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  __m256i high = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
  return _mm256_add_epi32(low, high);
}

inline __m256i numbers_of(const uint8_t* step, int32_t bits, int64_t quad, int64_t at) {  // 32 of them
  const auto load = [&](int64_t line) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step + line * 64 + at));
  };
  if (bits == 8) return load(quad);
  const __m256i both = load(quad % 4);
  const __m256i low = _mm256_and_si256(quad < 4 ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
  if (bits == 4) return low;
  const int more = bits - 4, per = 8 / more;
  const __m128i shift = _mm_cvtsi32_si128(more * static_cast<int>(quad % per));
  const __m256i mask = _mm256_set1_epi8(static_cast<char>((1 << more) - 1));
  const __m256i high = _mm256_and_si256(_mm256_srl_epi16(load(4 + quad / per), shift), mask);
  return _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
}
#endif

// The products of 32 columns: of the first 16 of them, and of the others.
inline void step_dots(const uint8_t* w, const int8_t* q, int32_t bits, int32_t (*dots)[kLanes]) {
#ifdef __AVX2__
  __m256i sums[2][2] = {};
  for (int64_t quad = 0; quad < 8; ++quad) {
    int32_t four;
    std::memcpy(&four, q + quad * 4, 4);
    for (int64_t side = 0; side < 2; ++side) {
      const __m256i value = numbers_of(w, bits, quad, side * 32);
      __m256i& sum = sums[quad / 4][side];
      sum = _mm256_add_epi32(sum, four_by_eight(value, _mm256_set1_epi32(four), bits));
    }
  }
  std::memcpy(dots, sums, sizeof(sums));
#else
  std::memset(dots, 0, 2 * kLanes * sizeof(int32_t));
  for (int64_t quad = 0; quad < 8; ++quad)
    for (int64_t n = 0; n < kLanes; ++n)
      for (int64_t b = 0; b < 4; ++b) dots[quad / 4][n] += number(w, bits, quad, n * 4 + b) * q[quad * 4 + b];
#endif
}

inline void rows_portable(const Linear& l, const Bytes& x, int64_t block, int64_t row, float* y) {
  float total[kLanes] = {};
  const uint8_t* at = l.weight + block * l.block_bytes();
  const bool halves = l.span() < kStep;
  for (int64_t g = 0; g < l.groups(); ++g, at += l.group_bytes()) {
    float part[kLanes] = {}, sum = 0;
    const auto add = [&](int64_t index) {  // the products of all columns that share a scale
      for (int64_t n = 0; n < kLanes; ++n) {
        const float d = scale_of(l, at, index, n);
        total[n] += l.zero < 0 ? part[n] * d + sum * scale_of(l, at, index, n, true)
                               : (part[n] - static_cast<float>(l.zero) * sum) * d;
        part[n] = 0;
      }
      sum = 0;
    };
    for (int64_t s = 0; s < l.group / kStep; ++s) {
      const int64_t place = x.place(row, g * (l.group / kStep) + s);
      int32_t dots[2][kLanes];
      step_dots(at + s * kStep * kLanes * l.bits / 8, x.q + place * kStep, l.bits, dots);
      const float scale = x.scale[place];
      for (int64_t h = 0; halves && h < 2; ++h)
        for (int64_t n = 0; n < kLanes; ++n)
          total[n] += scale * static_cast<float>(dots[h][n] + x.offset[2 * place + h]) * scale_of(l, at, 2 * s + h, n);
      if (halves) continue;
      for (int64_t n = 0; n < kLanes; ++n) part[n] += scale * static_cast<float>(dots[0][n] + dots[1][n]);
      sum += x.sum[place];
      if ((s + 1) * kStep % l.span() == 0) add(s * kStep / l.span());
    }
  }
  std::memcpy(y, total, sizeof(total));
}

// Weights in bfloat16, on any processor.
inline void rows_portable16(const Linear& l, int64_t block, int64_t row, float* y) {
  const uint16_t* at = reinterpret_cast<const uint16_t*>(l.weight + block * l.block_bytes());
  std::fill(y, y + kLanes, 0.0f);
  for (int64_t k = 0; k < l.depth; ++k) {
    float x = element(l.x, l.x_type, row * l.depth + k);
    for (int64_t n = 0; n < kLanes; ++n) y[n] += x * from_bf16(at[(k / 2 * kLanes + n) * 2 + k % 2]);
  }
}

#ifdef __AVX512BW__
// sums += 4 columns of 16 features times 4 values. Exact, so results are bitwise the same with and without VNNI.
template <int kBits>
inline __m512i add_products(__m512i sums, __m512i w, __m512i x) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sums, w, x);
#else
  if constexpr (kBits < 8)
    return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
  // Sums of two products of 8-bit values do not fit in 16 bits.
  __m512i even =
      _mm512_madd_epi16(_mm512_and_si512(w, _mm512_set1_epi16(0xff)), _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
  __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(x, 8));
  return _mm512_add_epi32(sums, _mm512_add_epi32(even, odd));
#endif
}

// Shifts 16-bit numbers to the left, or to the right by -places. Instructions want constants.
inline __m512i shifted(__m512i value, int places) {
  switch (places) {
    case 4:
      return _mm512_slli_epi16(value, 4);
    case 3:
      return _mm512_slli_epi16(value, 3);
    case 2:
      return _mm512_slli_epi16(value, 2);
    case 1:
      return _mm512_slli_epi16(value, 1);
    case -1:
      return _mm512_srli_epi16(value, 1);
    case -2:
      return _mm512_srli_epi16(value, 2);
    case -3:
      return _mm512_srli_epi16(value, 3);
    default:
      return value;
  }
}

template <int kBits>
inline __m512i quad(const uint8_t* at, int index) {  // 4 columns of 16 features, as bytes
  if constexpr (kBits == 8) return _mm512_loadu_si512(at + index * 64);
  __m512i both = _mm512_loadu_si512(at + index % 4 * 64);
  const __m512i low = _mm512_and_si512(index < 4 ? both : _mm512_srli_epi16(both, 4), _mm512_set1_epi8(15));
  if constexpr (kBits == 4) return low;
  constexpr int kMore = kBits == 6 ? 2 : 1, kPer = 8 / kMore;
  const __m512i rest = _mm512_loadu_si512(at + 256 + index / kPer * 64);
  const __m512i mask = _mm512_set1_epi8(static_cast<char>(((1 << kMore) - 1) << 4));
  return _mm512_ternarylogic_epi32(low, shifted(rest, 4 - kMore * (index % kPer)), mask, 0xf8);  // a | (b & c)
}

inline __m512 halves(const uint8_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

// The scales of a group, and its minima, or its zero point times the scales.
template <typename F>
class Scales {
 public:
  Scales(const Linear& l, const uint8_t* group) : factors_(group + l.numbers()) {
    const uint8_t* at = factors_ + l.factor_bytes();
    d_ = halves(at);
    low_ = F::kMinimum ? halves(at + 2 * kLanes) : _mm512_mul_ps(_mm512_set1_ps(static_cast<float>(-l.zero)), d_);
  }
  // Of a part of the group that has factors.
  __m512 d(int64_t part) const { return F::kFactors ? _mm512_mul_ps(d_, factor(part)) : d_; }
  __m512 low(int64_t part) const {
    return F::kFactors ? _mm512_mul_ps(low_, factor(F::kMinimum ? kSuperGroup / kStep + part : part)) : low_;
  }

 private:
  __m512 factor(int64_t index) const {
    const void* at = factors_ + index * kLanes;
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at))));
  }
  const uint8_t* factors_;
  __m512 d_, low_;
};

// Adds one step of 32 columns: the scaled products of bytes, and the zero point or minimum times the sum of x.
inline __m512 scaled(__m512 total, __m512i products, __m512 d, __m512 low, float scale, float sum) {
  total = _mm512_fmadd_ps(_mm512_set1_ps(sum), low, total);
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), _mm512_mul_ps(d, _mm512_set1_ps(scale)), total);
}

// The same for 16 and 16 columns with scales of their own, whose products already include the zero point.
inline __m512 scaled_halves(__m512 total, __m512i first, __m512i second, __m512 d, __m512 other, float scale) {
  const __m512 both = _mm512_fmadd_ps(_mm512_cvtepi32_ps(second), other, _mm512_mul_ps(_mm512_cvtepi32_ps(first), d));
  return _mm512_fmadd_ps(both, _mm512_set1_ps(scale), total);
}

inline void finish(const Linear& l, int64_t row, int64_t block, __m512 total) {
  int64_t left = l.features - block * kLanes;
  __mmask16 mask = left >= kLanes ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
  if (l.bias) total = _mm512_add_ps(total, load16(l.bias, l.x_type, block * kLanes, mask));
  store16(l.y, l.y_type, row * l.stride() + block * kLanes, total, mask);
}

// How many bytes ahead weights are prefetched. Converting them takes so many instructions that the processor would not
// request the next ones early enough by itself, and its own prefetcher stops at the end of a page.
constexpr int64_t kAhead = 6144;
inline void prefetch(const uint8_t* at, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(at + kAhead + line), _MM_HINT_T0);
}

// Where block_dot finds the integers of a block: in memory, in the processor's cache, or unpacked to bytes.
enum class From { kMemory, kCache, kBytes };

// kRows rows of x over one block of 16 features. Products are scaled and added step by step as in `tiles8`, so that
// both variants give bitwise the same results and the choice between them affects only speed.
template <typename F, int kRows, From kFrom>
inline void block_dot(const Linear& l, const Bytes& x, int64_t block, int64_t row, const uint8_t* bytes) {
  constexpr int kBits = kFrom == From::kBytes ? 8 : F::kBits;
  constexpr int kSums = !F::kHalves && kRows > 4 ? 1 : 2;  // two that do not wait for each other, if registers suffice
  const int64_t steps = l.group / kStep, step_bytes = kStep * kLanes * kBits / 8, group_bytes = l.group_bytes();
  const uint8_t *at = l.weight + block * l.block_bytes(), *numbers = bytes;
  int64_t place = x.place(row, 0);
  __m512 total[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = _mm512_setzero_ps();
  for (int64_t g = 0; g < l.depth; g += l.group, at += group_bytes) {
    const Scales<F> scales(l, at);
    if (kFrom != From::kBytes) numbers = at;
    for (int64_t s = 0; s < steps; ++s, place += x.lanes, numbers += step_bytes) {
      const int8_t* q = x.q + place * kStep;
      const float *scale = x.scale + place, *sum = x.sum + place;
      if constexpr (kFrom == From::kMemory) prefetch(numbers, step_bytes);
      __m512i sums[2][kRows];
      for (int r = 0; r < kRows; ++r)
        for (int k = 0; k < kSums; ++k)
          sums[k][r] = F::kHalves ? _mm512_set1_epi32(x.offset[2 * (place + r) + k]) : _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i, q += 4) {
        const __m512i w = quad<kBits>(numbers, i);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          int32_t four;
          std::memcpy(&four, q + r * kStep, 4);
          __m512i& mine = sums[kSums > 1 ? i / 4 : 0][r];
          mine = add_products<kBits>(mine, w, _mm512_set1_epi32(four));
        }
      }
      if constexpr (F::kHalves) {
        const __m512 d = scales.d(2 * s), other = scales.d(2 * s + 1);
        for (int r = 0; r < kRows; ++r) total[r] = scaled_halves(total[r], sums[0][r], sums[1][r], d, other, scale[r]);
      } else {
        const __m512 d = scales.d(s), low = scales.low(s);
        for (int r = 0; r < kRows; ++r) {
          const __m512i products = kSums > 1 ? _mm512_add_epi32(sums[0][r], sums[1][r]) : sums[0][r];
          total[r] = scaled(total[r], products, d, low, scale[r], sum[r]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) finish(l, row + r, block, total[r]);
}

template <typename F, int kRows, From kFrom>
inline void rows_dot(const Linear& l, const Bytes& x, int64_t block, int64_t row, int64_t end, const uint8_t* bytes) {
  for (; row + kRows <= end; row += kRows) block_dot<F, kRows, kFrom>(l, x, block, row, bytes);
  if constexpr (kRows > 1) rows_dot<F, kRows / 2, kFrom>(l, x, block, row, end, bytes);
}

// The integers of a block as bytes. For many rows this is faster than unpacking 5 or 6 bits again and again; for 4 bits
// it is not.
template <typename F>
inline void unpack(const Linear& l, int64_t block, uint8_t* out) {
  const int64_t step_bytes = kStep * kLanes * F::kBits / 8;
  const uint8_t* at = l.weight + block * l.block_bytes();
  for (int64_t g = 0; g < l.depth; g += l.group, at += l.group_bytes())
    for (int64_t s = 0; s < l.group / kStep; ++s, out += kStep * kLanes) {
      prefetch(at + s * step_bytes, step_bytes);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) _mm512_storeu_si512(out + i * 64, quad<F::kBits>(at + s * step_bytes, i));
    }
}

// So many rows at a time that they stay in the processor's cache while all blocks are multiplied with them. `bytes`
// has room for a block.
template <typename F>
void dot(const Linear& l, const Bytes& x, const Part& part, uint8_t* bytes) {
  constexpr int64_t kCached = 1 << 18, kFew = 16;
  const int64_t many = std::max<int64_t>(kCached / std::max<int64_t>(l.depth, 1) / 8, 1) * 8;
  for (int64_t row = 0; row < l.rows; row += many) {
    const int64_t end = std::min(row + many, l.rows), first = std::min<int64_t>(row + 8, end);
    for (int64_t block = part.begin; block < part.end; ++block) {
      if constexpr (F::kBits == 5 || F::kBits == 6)
        if (end - row > kFew) {
          unpack<F>(l, block, bytes);
          rows_dot<F, 8, From::kBytes>(l, x, block, row, end, bytes);
          continue;
        }
      rows_dot<F, 8, From::kMemory>(l, x, block, row, first, nullptr);
      rows_dot<F, 8, From::kCache>(l, x, block, first, end, nullptr);
    }
  }
}
#endif

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
// 16 rows at a time: bytes times bytes in tiles of 32 columns. One tile is scaled while the next is multiplied.
template <typename F>
void tiles8(const Linear& l, const Bytes& x, const Part& part) {
  constexpr int kBits = F::kBits, kTurns = F::kHalves ? 2 : 1, kColumns = kStep / kTurns;
  TileConfig config;
  config.set(2, 16, kColumns);  // x: 16 rows of 32 or 16 bytes
  config.set(3, 16, kColumns);
  config.set(4, kColumns / 4, 64);  // weight: lines of 4 columns
  config.set(5, kColumns / 4, 64);
  config.use();
  const int64_t per = l.group / kStep, steps = l.depth / kStep, step_bytes = kStep * kLanes * kBits / 8;
  const int64_t group_bytes = l.group_bytes(), block_bytes = l.block_bytes();
  alignas(64) uint8_t lines[2][8 * 64];
  alignas(64) int32_t sums[2][kTurns][16 * 16];
  for (int64_t block = part.begin; block < part.end; ++block) {
    for (int64_t row = 0; row < l.rows; row += 16) {
      const uint8_t* at = l.weight + block * block_bytes;
      const int64_t place = x.place(row, 0);
      __m512 total[16];
      for (int r = 0; r < 16; ++r) total[r] = _mm512_setzero_ps();
      auto multiply = [&](int64_t step) {
        const uint8_t* w = at + step / per * group_bytes + step % per * step_bytes;
        uint8_t* mine = lines[step & 1];
        if constexpr (kBits < 8) {
#pragma GCC unroll 8
          for (int i = 0; i < 8; ++i) _mm512_store_si512(mine + i * 64, quad<kBits>(w, i));
          written();
        }
        const uint8_t* from = kBits < 8 ? mine : w;
        for (int turn = 0; turn < kTurns; ++turn, from += kColumns * kLanes) {
          const int8_t* bytes = x.q + (place + step * kLanes) * kStep + turn * kColumns;
          if (step & 1) {
            _tile_zero(1);
            _tile_loadd(3, bytes, kStep);
            _tile_loadd(5, from, 64);
            _tile_dpbsud(1, 3, 5);
            _tile_stored(1, sums[1][turn], 64);
          } else {
            _tile_zero(0);
            _tile_loadd(2, bytes, kStep);
            _tile_loadd(4, from, 64);
            _tile_dpbsud(0, 2, 4);
            _tile_stored(0, sums[0][turn], 64);
          }
        }
      };
      auto scale = [&](int64_t step) {
        const Scales<F> scales(l, at + step / per * group_bytes);
        const int64_t first = place + step * kLanes, part = step % per;
        const float *factors = x.scale + first, *sum = x.sum + first;
        const auto products = [&](int turn, int r) { return _mm512_load_si512(sums[step & 1][turn] + r * 16); };
        if constexpr (F::kHalves) {
          const __m512 d = scales.d(2 * part), other = scales.d(2 * part + 1);
          const auto half = [&](int turn, int r) {
            return _mm512_add_epi32(products(turn, r), _mm512_set1_epi32(x.offset[2 * (first + r) + turn]));
          };
#pragma GCC unroll 16
          for (int r = 0; r < 16; ++r) total[r] = scaled_halves(total[r], half(0, r), half(1, r), d, other, factors[r]);
        } else {
          const __m512 d = scales.d(part), low = scales.low(part);
#pragma GCC unroll 16
          for (int r = 0; r < 16; ++r) total[r] = scaled(total[r], products(0, r), d, low, factors[r], sum[r]);
        }
      };
      multiply(0);
      for (int64_t step = 1; step < steps; ++step) {
        multiply(step);
        scale(step - 1);
      }
      scale(steps - 1);
      for (int r = 0; r < 16 && row + r < l.rows; ++r) finish(l, row + r, block, total[r]);
    }
  }
  _tile_release();
}

// Converts 32 columns of 16 features to bfloat16, two columns per line. The first 16 columns and the others may have
// different scales.
template <typename F>
inline void widen(const uint8_t* w, const __m512* d, const __m512* low, uint8_t* out) {
  const __m512i mask = _mm512_set1_epi32(255);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512i v = quad<F::kBits>(w, i);
    __m512 f[4];
    for (int b = 0; b < 4; ++b) {
      __m512i q = _mm512_and_si512(b ? _mm512_srli_epi32(v, 8 * b) : v, mask);
      f[b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(q), d[i / 4], low[i / 4]);
    }
    for (int p = 0; p < 2; ++p) {
      __m512i pair = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(f[2 * p + 1], f[2 * p]));
      _mm512_store_si512(out + (2 * i + p) * 64, _mm512_permutexvar_epi16(order, pair));
    }
  }
}

template <typename F>
inline void widen_block(const Linear& l, const uint8_t* at, uint8_t* out) {
  const int64_t step_bytes = kStep * kLanes * F::kBits / 8, group_bytes = l.group_bytes();
  for (int64_t g = 0; g < l.depth; g += l.group, at += group_bytes) {
    const Scales<F> scales(l, at);
    for (int64_t s = 0; s < l.group / kStep; ++s, out += 1024) {
      const int64_t first = F::kHalves ? 2 * s : s, second = F::kHalves ? 2 * s + 1 : s;
      const __m512 d[2] = {scales.d(first), scales.d(second)}, low[2] = {scales.low(first), scales.low(second)};
      widen<F>(at + s * step_bytes, d, low, out);
    }
  }
}

// 32 rows times 32 features at a time, in bfloat16.
template <typename F>
void tiles16(const Linear& l, const uint16_t* x, const Part& part, uint8_t* wide) {
  TileConfig().use();
  const int64_t lines = l.depth / kStep, block_bytes = l.block_bytes();
  const bool plain = l.y_type == kFloat32 && !l.bias;
  alignas(64) float sums[4][16 * 16];
  for (int64_t block = part.begin; block < part.end; block += 2) {
    const int64_t many = std::min<int64_t>(2, part.end - block);
    const uint8_t* b[2];
    for (int64_t j = 0; j < 2; ++j) {
      int64_t which = block + (j < many ? j : 0);
      if constexpr (F::kBits == 16) {
        b[j] = l.weight + which * block_bytes;
      } else {
        b[j] = wide + j * lines * 1024;
        if (j < many) widen_block<F>(l, l.weight + which * block_bytes, wide + j * lines * 1024);
      }
    }
    written();
    for (int64_t row = 0; row < l.rows; row += 32) {
      const bool second = row + 16 < l.rows;
      const uint16_t* a0 = x + row / 16 * lines * 512;  // tile after tile
      const uint16_t* a1 = second ? a0 + lines * 512 : a0;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t k = 0; k < lines; ++k) {
        _tile_loadd(4, a0 + k * 512, 64);
        _tile_loadd(6, b[0] + k * 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (many == 2) {
          _tile_loadd(7, b[1] + k * 1024, 64);
          _tile_dpbf16ps(1, 4, 7);
        }
        if (second) {
          _tile_loadd(5, a1 + k * 512, 64);
          _tile_dpbf16ps(2, 5, 6);
          if (many == 2) _tile_dpbf16ps(3, 5, 7);
        }
      }
      if (plain && many == 2 && row + 32 <= l.rows && (block + 2) * kLanes <= l.features) {
        float* y = static_cast<float*>(l.y) + row * l.stride() + block * kLanes;
        _tile_stored(0, y, l.stride() * 4);
        _tile_stored(1, y + 16, l.stride() * 4);
        _tile_stored(2, y + 16 * l.stride(), l.stride() * 4);
        _tile_stored(3, y + 16 * l.stride() + 16, l.stride() * 4);
        continue;
      }
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[1], 64);
      if (second) {
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
      }
      for (int64_t half_ = 0; half_ < (second ? 2 : 1); ++half_)
        for (int64_t r = 0; r < 16 && row + half_ * 16 + r < l.rows; ++r)
          for (int64_t j = 0; j < many; ++j)
            finish(l, row + half_ * 16 + r, block + j, _mm512_load_ps(sums[half_ * 2 + j] + r * 16));
    }
  }
  _tile_release();
}
#endif

#ifdef __AVX512BF16__
// kRows rows of bfloat16 over one block of 16 features in bfloat16.
template <int kRows>
inline void block_dot16(const Linear& l, const uint16_t* x, const uint8_t* at, __m512* total) {
  __m512 odd[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = odd[r] = _mm512_setzero_ps();
  for (int64_t k = 0; k < l.depth; k += 4, at += 128) {
    __m512bh a = reinterpret_cast<__m512bh>(_mm512_loadu_si512(at));
    __m512bh b = reinterpret_cast<__m512bh>(_mm512_loadu_si512(at + 64));
    for (int r = 0; r < kRows; ++r) {
      int32_t two, next;
      std::memcpy(&two, x + r * l.depth + k, 4);
      std::memcpy(&next, x + r * l.depth + k + 2, 4);
      total[r] = _mm512_dpbf16_ps(total[r], a, reinterpret_cast<__m512bh>(_mm512_set1_epi32(two)));
      odd[r] = _mm512_dpbf16_ps(odd[r], b, reinterpret_cast<__m512bh>(_mm512_set1_epi32(next)));
    }
  }
  for (int r = 0; r < kRows; ++r) total[r] = _mm512_add_ps(total[r], odd[r]);
}

inline void dot16(const Linear& l, const uint16_t* x, const Part& part) {
  for (int64_t block = part.begin; block < part.end; ++block) {
    const uint8_t* at = l.weight + block * l.block_bytes();
    __m512 total[4];
    int64_t row = 0;
    for (; row + 4 <= l.rows; row += 4) {
      block_dot16<4>(l, x + row * l.depth, at, total);
      for (int r = 0; r < 4; ++r) finish(l, row + r, block, total[r]);
    }
    for (; row < l.rows; ++row) {
      block_dot16<1>(l, x + row * l.depth, at, total);
      finish(l, row, block, total[0]);
    }
  }
}
#endif

// float32 weights. Every feature of every row is one sum over the columns in order, so the result of a row is bitwise
// the same for any number of rows. The number of rows and blocks that are summed at once affects only speed.
typedef float Lanes __attribute__((vector_size(kLanes * 4), aligned(4)));

template <int kRows, int kBlocks>
inline void block_floats(const Linear& l, const float* x, const uint8_t* at, Lanes (*total)[kBlocks]) {
  Lanes sums[kRows][kBlocks] = {};
  for (int64_t k = 0; k < l.depth; ++k) {
    Lanes weight[kBlocks];
#pragma GCC unroll 8
    for (int b = 0; b < kBlocks; ++b)
      weight[b] = *reinterpret_cast<const Lanes*>(at + b * l.block_bytes() + k * kLanes * 4);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int b = 0; b < kBlocks; ++b) sums[r][b] += x[r * l.depth + k] * weight[b];
  }
  std::memcpy(total, sums, sizeof(sums));
}

template <int kRows, int kBlocks, typename Put>
inline void some_floats(const Linear& l, const float* x, int64_t row, int64_t block, const Put& put) {
  Lanes total[kRows][kBlocks];
  block_floats<kRows, kBlocks>(l, x + row * l.depth, l.weight + block * l.block_bytes(), total);
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b) put(block + b, row + r, reinterpret_cast<const float*>(&total[r][b]));
}

// All rows over some blocks, which stay in the processor's cache.
template <int kRows, int kBlocks, typename Put>
inline void rows_floats(const Linear& l, const float* x, int64_t row, int64_t block, const Put& put) {
  for (; row + kRows <= l.rows; row += kRows) some_floats<kRows, kBlocks>(l, x, row, block, put);
  if constexpr (kRows > 1) rows_floats<kRows / 2, kBlocks>(l, x, row, block, put);
}

template <typename Put>
inline void floats(const Linear& l, const float* x, const Part& part, const Put& put) {
#ifdef __AVX512F__
  constexpr int kRows = 8, kBlocks = 3;
#else
  constexpr int kRows = 4, kBlocks = 1;
#endif
  constexpr int kAlone = 4 * kBlocks;  // independent sums of one row
  int64_t block = part.begin;
  if (l.rows == 1)
    for (; block + kAlone <= part.end; block += kAlone) rows_floats<1, kAlone>(l, x, 0, block, put);
  for (; block + kBlocks <= part.end; block += kBlocks) rows_floats<kRows, kBlocks>(l, x, 0, block, put);
  for (; block < part.end; ++block) rows_floats<kRows, 1>(l, x, 0, block, put);
}

}  // namespace inlay
