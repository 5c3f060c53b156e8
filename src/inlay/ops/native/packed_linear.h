// y = x W^T + bias over packed weights (see ops/weight_layout.py for their layout).
//
// There are three variants, which read the same packed bytes. `dot` quantizes x to int8 with one scale per 32 columns
// and multiplies bytes (few rows). `tiles8` does the same for 16 rows at once with AMX. `tiles16` converts weights to
// bfloat16 and multiplies those with AMX (many rows). `Way` names them, and a portable variant.
#pragma once

#include "common.h"

namespace inlay {

enum Way : int32_t { kAny = 0, kDot = 1, kTiles8 = 2, kTiles16 = 3, kPortable = 4 };

struct Linear {
  const void* x;
  const uint8_t* weight;
  const void* bias;
  void* y;
  int32_t x_type, y_type;
  int64_t rows, features, depth, group;
  int32_t bits, zero;

  int64_t groups() const { return depth / group; }
  int64_t blocks() const { return up(features, kLanes) / kLanes; }
  int64_t numbers() const { return group * kLanes * bits / 8; }
  int64_t group_bytes() const { return bits >= 16 ? numbers() : numbers() + 2 * kLanes * (zero < 0 ? 2 : 1); }
  int64_t block_bytes() const { return groups() * group_bytes(); }
};

inline void check(const Linear& l, const char* what) {
  const auto holds = [&](bool right, const char* wanted) {
    if (!right) throw std::invalid_argument(std::string(what) + " wants " + wanted);
  };
  holds(l.bits == 4 || l.bits == 8 || l.bits == 16 || l.bits == 32, "4, 8, 16 or 32 bits");
  holds(l.rows >= 0 && l.features >= 0 && l.depth >= 0, "sizes that are not negative");
  holds(l.group > 0 && l.group % kStep == 0 && l.depth % l.group == 0, "whole groups of columns, of 32 or a multiple");
}

// x as int8: one scale per 32 columns, and the sum of the dequantized values. If a value is not finite, the scale is
// NaN. Then all features of the row are NaN; those of the reference are NaN or infinite.
struct Bytes {
  int8_t* q;     // [rows, depth]
  float* scale;  // [depth / 32, rows]
  float* sum;    // [depth / 32, rows]
};

// The factor that turns a value into int8. It would overflow below 127 / FLT_MAX, so such values become 0.
inline float inverse_of(float most) { return most > 127.0f / std::numeric_limits<float>::max() ? 127.0f / most : 0.0f; }

inline void to_bytes_portable(const Linear& l, int64_t row, int64_t step, int64_t stride, const Bytes& out) {
  float values[kStep], most = 0;
  bool finite = true;
  for (int64_t k = 0; k < kStep; ++k) {
    values[k] = element(l.x, l.x_type, row * l.depth + step * kStep + k);
    most = std::max(most, std::fabs(values[k]));
    finite &= std::isfinite(values[k]);
  }
  if (!finite) {
    std::memset(out.q + row * l.depth + step * kStep, 0, kStep);
    out.scale[step * stride + row] = out.sum[step * stride + row] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const float inverse = inverse_of(most);
  int32_t sum = 0;
  for (int64_t k = 0; k < kStep; ++k) {
    int32_t q = static_cast<int32_t>(std::nearbyint(values[k] * inverse));
    out.q[row * l.depth + step * kStep + k] = static_cast<int8_t>(q);
    sum += q;
  }
  out.scale[step * stride + row] = most / 127.0f;
  out.sum[step * stride + row] = most / 127.0f * static_cast<float>(sum);
}

inline void to_bytes(const Linear& l, int64_t row, int64_t step, int64_t stride, const Bytes& out) {
#ifdef __AVX512F__
  int64_t at = row * l.depth + step * kStep;
  __m512 low = load16(l.x, l.x_type, at), high = load16(l.x, l.x_type, at + 16);
  const __m512 size = _mm512_abs_ps(low), other = _mm512_abs_ps(high), infinite = _mm512_set1_ps(INFINITY);
  float most = _mm512_reduce_max_ps(_mm512_max_ps(size, other));
  if (_mm512_cmp_ps_mask(size, infinite, _CMP_NLT_UQ) | _mm512_cmp_ps_mask(other, infinite, _CMP_NLT_UQ))
    most = std::numeric_limits<float>::quiet_NaN();  // the bytes are then 0, the scale and the sum NaN
  __m512 inverse = _mm512_set1_ps(inverse_of(most));
  __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)), b = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out.q + at), _mm512_cvtepi32_epi8(a));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out.q + at + 16), _mm512_cvtepi32_epi8(b));
  out.scale[step * stride + row] = most / 127.0f;
  out.sum[step * stride + row] = most / 127.0f * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(a, b)));
#else
  to_bytes_portable(l, row, step, stride, out);
#endif
}

inline float half(const uint8_t* data) {
  uint16_t bits;
  std::memcpy(&bits, data, 2);
  return from_half(bits);
}

// The portable variant, which tests compare the others with. It uses AVX2 where available.
#ifdef __AVX2__
inline __m256i four_by_eight(__m256i w, __m256i x, int32_t bits) {  // 4 columns of 8 features times 4 values
  if (bits == 4) return _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
  // Sums of two products of 8-bit values do not fit in 16 bits.
  const __m256i even = _mm256_set1_epi16(0xff);
  __m256i low = _mm256_madd_epi16(_mm256_and_si256(w, even), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  __m256i high = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
  return _mm256_add_epi32(low, high);
}
#endif

inline void step_dots(const uint8_t* w, const int8_t* q, int32_t bits, int32_t* dots) {
#ifdef __AVX2__
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t quad = 0; quad < 8; ++quad) {
    int32_t four;
    std::memcpy(&four, q + quad * 4, 4);
    for (int64_t side = 0; side < 2; ++side) {
      const uint8_t* at = w + (bits == 4 ? quad % 4 : quad) * 64 + side * 32;
      __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
      if (bits == 4) value = _mm256_and_si256(quad < 4 ? value : _mm256_srli_epi16(value, 4), _mm256_set1_epi8(15));
      sums[side] = _mm256_add_epi32(sums[side], four_by_eight(value, _mm256_set1_epi32(four), bits));
    }
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dots), sums[0]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dots + 8), sums[1]);
#else
  for (int64_t n = 0; n < kLanes; ++n) dots[n] = 0;
  for (int64_t quad = 0; quad < 8; ++quad)
    for (int64_t n = 0; n < kLanes; ++n)
      for (int64_t b = 0; b < 4; ++b) {
        uint8_t byte = w[(bits == 4 ? quad % 4 : quad) * 64 + n * 4 + b];
        dots[n] += (bits == 8 ? byte : quad < 4 ? byte & 15 : byte >> 4) * q[quad * 4 + b];
      }
#endif
}

inline void rows_portable(const Linear& l, const Bytes& x, int64_t stride, int64_t block, int64_t row, float* y) {
  float total[kLanes] = {};
  const uint8_t* at = l.weight + block * l.block_bytes();
  for (int64_t g = 0; g < l.groups(); ++g, at += l.group_bytes()) {
    float part[kLanes] = {}, sum = 0;
    for (int64_t s = 0; s < l.group / kStep; ++s) {
      int64_t step = g * (l.group / kStep) + s;
      int32_t dots[kLanes];
      step_dots(at + s * kStep * kLanes * l.bits / 8, x.q + row * l.depth + step * kStep, l.bits, dots);
      float scale = x.scale[step * stride + row];
      for (int64_t n = 0; n < kLanes; ++n) part[n] += scale * static_cast<float>(dots[n]);
      sum += x.sum[step * stride + row];
    }
    const uint8_t* scales = at + l.numbers();
    for (int64_t n = 0; n < kLanes; ++n) {
      float d = half(scales + 2 * n);
      total[n] += l.zero < 0 ? part[n] * d + sum * half(scales + 2 * (kLanes + n))
                             : (part[n] - static_cast<float>(l.zero) * sum) * d;
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
  if constexpr (kBits == 4)
    return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
  // Sums of two products of 8-bit values do not fit in 16 bits.
  __m512i even =
      _mm512_madd_epi16(_mm512_and_si512(w, _mm512_set1_epi16(0xff)), _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
  __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(x, 8));
  return _mm512_add_epi32(sums, _mm512_add_epi32(even, odd));
#endif
}

template <int kBits>
inline __m512i quad(const uint8_t* at, int index) {  // 4 columns of 16 features, as bytes
  if constexpr (kBits == 8) return _mm512_loadu_si512(at + index * 64);
  __m512i both = _mm512_loadu_si512(at + index % 4 * 64);
  return _mm512_and_si512(index < 4 ? both : _mm512_srli_epi16(both, 4), _mm512_set1_epi8(15));
}

inline __m512 halves(const uint8_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

// Adds one step of 32 columns: the scaled products of bytes, and the zero point or minimum times the sum of x.
inline __m512 scaled(__m512 total, __m512i products, __m512 d, __m512 low, float scale, float sum) {
  total = _mm512_fmadd_ps(_mm512_set1_ps(sum), low, total);
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), _mm512_mul_ps(d, _mm512_set1_ps(scale)), total);
}

// kRows rows of x over one block of 16 features. Products are scaled and added step by step as in `tiles8`, so that
// both variants give bitwise the same results and the choice between them affects only speed.
template <int kBits, bool kMinimum, int kRows>
inline void block_dot(const Linear& l, const Bytes& x, int64_t stride, const uint8_t* at, int64_t row, __m512* total) {
  const int64_t steps = l.group / kStep, step_bytes = kStep * kLanes * kBits / 8, numbers = l.numbers();
  const int64_t group_bytes = l.group_bytes();
  const __m512 zero = _mm512_set1_ps(static_cast<float>(-l.zero));
  for (int r = 0; r < kRows; ++r) total[r] = _mm512_setzero_ps();
  const int8_t* q = x.q + row * l.depth;
  const float *scale = x.scale + row, *sum = x.sum + row;
  for (int64_t g = 0; g < l.depth; g += l.group, at += group_bytes) {
    const __m512 d = halves(at + numbers), low = kMinimum ? halves(at + numbers + 2 * kLanes) : _mm512_mul_ps(zero, d);
    for (int64_t s = 0; s < steps; ++s, q += kStep, scale += stride, sum += stride) {
      __m512i some[kRows], others[kRows];
      for (int r = 0; r < kRows; ++r) some[r] = others[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        __m512i a = quad<kBits>(at + s * step_bytes, i), b = quad<kBits>(at + s * step_bytes, i + 4);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          int32_t four, next;
          std::memcpy(&four, q + r * l.depth + i * 4, 4);
          std::memcpy(&next, q + r * l.depth + i * 4 + 16, 4);
          some[r] = add_products<kBits>(some[r], a, _mm512_set1_epi32(four));
          others[r] = add_products<kBits>(others[r], b, _mm512_set1_epi32(next));
        }
      }
      for (int r = 0; r < kRows; ++r)
        total[r] = scaled(total[r], _mm512_add_epi32(some[r], others[r]), d, low, scale[r], sum[r]);
    }
  }
}

inline void finish(const Linear& l, int64_t row, int64_t block, __m512 total) {
  int64_t left = l.features - block * kLanes;
  __mmask16 mask = left >= kLanes ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
  if (l.bias) total = _mm512_add_ps(total, load16(l.bias, l.x_type, block * kLanes, mask));
  store16(l.y, l.y_type, row * l.features + block * kLanes, total, mask);
}

template <int kBits, bool kMinimum>
void dot(const Linear& l, const Bytes& x, int64_t stride, const Part& part) {
  const int64_t block_bytes = l.block_bytes();
  for (int64_t block = part.begin; block < part.end; ++block) {
    const uint8_t* at = l.weight + block * block_bytes;
    int64_t row = 0;
    __m512 total[4];
    for (; row + 4 <= l.rows; row += 4) {
      block_dot<kBits, kMinimum, 4>(l, x, stride, at, row, total);
      for (int r = 0; r < 4; ++r) finish(l, row + r, block, total[r]);
    }
    for (; row + 2 <= l.rows; row += 2) {
      block_dot<kBits, kMinimum, 2>(l, x, stride, at, row, total);
      for (int r = 0; r < 2; ++r) finish(l, row + r, block, total[r]);
    }
    if (row < l.rows) {
      block_dot<kBits, kMinimum, 1>(l, x, stride, at, row, total);
      finish(l, row, block, total[0]);
    }
  }
}
#endif

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
// 16 rows at a time: bytes times bytes in tiles of 32 columns. One tile is scaled while the next is multiplied.
template <int kBits, bool kMinimum>
void tiles8(const Linear& l, const Bytes& x, int64_t stride, const Part& part) {
  TileConfig config;
  config.set(2, 16, 32);  // x: 16 rows of 32 bytes
  config.set(3, 16, 32);
  config.set(4, 8, 64);  // weight: 8 lines of 4 columns
  config.set(5, 8, 64);
  config.use();
  const int64_t per = l.group / kStep, steps = l.depth / kStep, step_bytes = kStep * kLanes * kBits / 8;
  const int64_t numbers = l.numbers(), group_bytes = l.group_bytes(), block_bytes = l.block_bytes();
  const __m512 zero = _mm512_set1_ps(static_cast<float>(-l.zero));
  alignas(64) uint8_t lines[2][8 * 64];
  alignas(64) int32_t sums[2][16 * 16];
  for (int64_t block = part.begin; block < part.end; ++block) {
    for (int64_t row = 0; row < l.rows; row += 16) {
      const uint8_t* at = l.weight + block * block_bytes;
      const int8_t* q = x.q + row * l.depth;
      __m512 total[16];
      for (int r = 0; r < 16; ++r) total[r] = _mm512_setzero_ps();
      auto multiply = [&](int64_t step) {
        const uint8_t* w = at + step / per * group_bytes + step % per * step_bytes;
        uint8_t* mine = lines[step & 1];
        if constexpr (kBits == 4) {
#pragma GCC unroll 8
          for (int i = 0; i < 8; ++i) _mm512_store_si512(mine + i * 64, quad<4>(w, i));
          written();
        }
        const uint8_t* from = kBits == 4 ? mine : w;
        if (step & 1) {
          _tile_zero(1);
          _tile_loadd(3, q + step * kStep, l.depth);
          _tile_loadd(5, from, 64);
          _tile_dpbsud(1, 3, 5);
          _tile_stored(1, sums[1], 64);
        } else {
          _tile_zero(0);
          _tile_loadd(2, q + step * kStep, l.depth);
          _tile_loadd(4, from, 64);
          _tile_dpbsud(0, 2, 4);
          _tile_stored(0, sums[0], 64);
        }
      };
      auto scale = [&](int64_t step) {
        const uint8_t* scales = at + step / per * group_bytes + numbers;
        const __m512 d = halves(scales), low = kMinimum ? halves(scales + 2 * kLanes) : _mm512_mul_ps(zero, d);
        const float *scale = x.scale + step * stride + row, *sum = x.sum + step * stride + row;
        const int32_t* mine = sums[step & 1];
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r)
          total[r] = scaled(total[r], _mm512_load_si512(mine + r * 16), d, low, scale[r], sum[r]);
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

// Converts 32 columns of 16 features to bfloat16, two columns per line.
template <int kBits, bool kMinimum>
inline void widen(const uint8_t* w, __m512 d, __m512 low, uint8_t* out) {
  if constexpr (kBits == 16) {
    (void)d, (void)low;
    std::memcpy(out, w, kStep * kLanes * 2);
    return;
  }
  const __m512i mask = _mm512_set1_epi32(kBits == 4 ? 15 : 255);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    __m512i v = kBits == 8 ? _mm512_loadu_si512(w + i * 64) : _mm512_loadu_si512(w + i % 4 * 64);
    if (kBits == 4 && i >= 4) v = _mm512_srli_epi32(v, 4);
    __m512 f[4];
    for (int b = 0; b < 4; ++b) {
      __m512i q = _mm512_and_si512(b ? _mm512_srli_epi32(v, 8 * b) : v, mask);
      f[b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(q), d, low);
    }
    for (int p = 0; p < 2; ++p) {
      __m512i pair = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(f[2 * p + 1], f[2 * p]));
      _mm512_store_si512(out + (2 * i + p) * 64, _mm512_permutexvar_epi16(order, pair));
    }
  }
}

template <int kBits, bool kMinimum>
inline void widen_block(const Linear& l, const uint8_t* at, uint8_t* out) {
  const __m512 zero = _mm512_set1_ps(static_cast<float>(l.zero));
  const int64_t step_bytes = kStep * kLanes * kBits / 8, numbers = l.numbers(), group_bytes = l.group_bytes();
  for (int64_t g = 0; g < l.depth; g += l.group, at += group_bytes) {
    __m512 d = _mm512_setzero_ps(), low = d;
    if constexpr (kBits != 16) {
      d = halves(at + numbers);
      low = kMinimum ? halves(at + numbers + 2 * kLanes) : _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(zero, d));
    }
    for (int64_t s = 0; s < l.group / kStep; ++s, out += 1024) widen<kBits, kMinimum>(at + s * step_bytes, d, low, out);
  }
}

// 32 rows times 32 features at a time, in bfloat16.
template <int kBits, bool kMinimum>
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
      if constexpr (kBits == 16) {
        b[j] = l.weight + which * block_bytes;
      } else {
        b[j] = wide + j * lines * 1024;
        if (j < many) widen_block<kBits, kMinimum>(l, l.weight + which * block_bytes, wide + j * lines * 1024);
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
        float* y = static_cast<float*>(l.y) + row * l.features + block * kLanes;
        _tile_stored(0, y, l.features * 4);
        _tile_stored(1, y + 16, l.features * 4);
        _tile_stored(2, y + 16 * l.features, l.features * 4);
        _tile_stored(3, y + 16 * l.features + 16, l.features * 4);
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
