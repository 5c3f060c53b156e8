// Instructions that the machine may not have, in plain C++ on AVX-512: with `-include emulated.h` the kernels are
// compiled for them and run anywhere with AVX-512. EMULATE_VNNI stands for AVX-512 VNNI and BF16, EMULATE_AMX for those
// and AMX.
//
// Sanitizers see nothing of what real tile instructions read and write. Here they see every row of every tile.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#pragma GCC push_options
#pragma GCC optimize("O2")  // also where the kernels are not optimised
namespace emulated {

template <typename To, typename From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float widened(uint16_t value) { return bits<float>(static_cast<uint32_t>(value) << 16); }

inline uint16_t narrowed(float value) {
  const uint32_t whole = bits<uint32_t>(value);
  if ((whole & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(whole >> 16 | 0x40);
  if ((whole & 0x7f800000) == 0) return static_cast<uint16_t>(whole >> 16 & 0x8000);  // subnormals become 0
  return static_cast<uint16_t>((whole + 0x7fff + (whole >> 16 & 1)) >> 16);
}

template <typename T, int kCount>
struct Lanes {
  T at[kCount];
  template <typename V>
  static Lanes of(V vector) {
    return bits<Lanes>(vector);
  }
};

inline __m512i dpbusd(__m512i sums, __m512i a, __m512i b) {
  auto total = Lanes<int32_t, 16>::of(sums);
  const auto x = Lanes<uint8_t, 64>::of(a);
  const auto y = Lanes<int8_t, 64>::of(b);
  for (int i = 0; i < 64; ++i) total.at[i / 4] += int32_t{x.at[i]} * int32_t{y.at[i]};
  return bits<__m512i>(total);
}

inline __m512 dpbf16(__m512 sums, __m512bh a, __m512bh b) {
  auto total = Lanes<float, 16>::of(sums);
  const auto x = Lanes<uint16_t, 32>::of(a), y = Lanes<uint16_t, 32>::of(b);
  for (int i = 0; i < 16; ++i) {
    total.at[i] += widened(x.at[2 * i + 1]) * widened(y.at[2 * i + 1]);
    total.at[i] += widened(x.at[2 * i]) * widened(y.at[2 * i]);
  }
  return bits<__m512>(total);
}

inline __m256bh cvtneps(__m512 a) {
  const auto x = Lanes<float, 16>::of(a);
  Lanes<uint16_t, 16> made;
  for (int i = 0; i < 16; ++i) made.at[i] = narrowed(x.at[i]);
  return bits<__m256bh>(made);
}

inline __m512bh cvtne2ps(__m512 high, __m512 low) {
  const __m256bh halves[2] = {cvtneps(low), cvtneps(high)};
  __m512bh made;
  std::memcpy(&made, halves, 64);
  return made;
}

struct Tile {
  int rows = 0, bytes = 0;
  uint8_t at[16][64];
};

struct Tiles {
  Tile tile[8];
  Tile& get(int index) {
    if (tile[index].rows) return tile[index];
    std::fprintf(stderr, "tile %d is used without a configuration\n", index);
    std::abort();
  }
};

inline Tiles& tiles() {
  static thread_local Tiles mine;
  return mine;
}

inline void load_config(const void* from) {
  uint8_t config[64];
  std::memcpy(config, from, 64);
  for (int index = 0; index < 8; ++index) {
    uint16_t bytes;
    std::memcpy(&bytes, config + 16 + 2 * index, 2);
    tiles().tile[index].rows = config[48 + index], tiles().tile[index].bytes = bytes;
    std::memset(tiles().tile[index].at, 0, sizeof(Tile::at));
  }
}

inline void release() {
  for (Tile& each : tiles().tile) each.rows = each.bytes = 0;
}

inline void zero(int index) { std::memset(tiles().get(index).at, 0, sizeof(Tile::at)); }

inline void load(int index, const void* from, int64_t stride) {
  Tile& t = tiles().get(index);
  for (int row = 0; row < t.rows; ++row) std::memcpy(t.at[row], static_cast<const char*>(from) + row * stride, t.bytes);
}

inline void store(int index, void* to, int64_t stride) {
  const Tile& t = tiles().get(index);
  for (int row = 0; row < t.rows; ++row) std::memcpy(static_cast<char*>(to) + row * stride, t.at[row], t.bytes);
}

// c += a b, where b holds `kPer` rows of the matrix in one of its own.
template <typename Sum, int kPer, typename Product>
inline void multiply(int c, int a, int b, Product product) {
  Tile &sums = tiles().get(c), &left = tiles().get(a), &right = tiles().get(b);
  for (int m = 0; m < sums.rows; ++m)
    for (int n = 0; n < sums.bytes / 4; ++n) {
      Sum total;
      std::memcpy(&total, sums.at[m] + 4 * n, 4);
      for (int k = 0; k < left.bytes / 4; ++k)
        for (int i = 0; i < kPer; ++i)
          total += product(left.at[m] + 4 * k + i * (4 / kPer), right.at[k] + 4 * n + i * (4 / kPer));
      std::memcpy(sums.at[m] + 4 * n, &total, 4);
    }
}

inline void dpbf16ps(int c, int a, int b) {
  multiply<float, 2>(c, a, b, [](const uint8_t* x, const uint8_t* y) {
    uint16_t left, right;
    std::memcpy(&left, x, 2);
    std::memcpy(&right, y, 2);
    return widened(left) * widened(right);
  });
}

inline void dpbsud(int c, int a, int b) {
  multiply<int32_t, 4>(
      c, a, b, [](const uint8_t* x, const uint8_t* y) { return int32_t{static_cast<int8_t>(*x)} * int32_t{*y}; });
}

}  // namespace emulated
#pragma GCC pop_options

#if defined(EMULATE_VNNI) || defined(EMULATE_AMX)
#undef __AVX512VNNI__
#undef __AVX512BF16__
#define __AVX512VNNI__ 1
#define __AVX512BF16__ 1
#define _mm512_dpbusd_epi32 emulated::dpbusd
#define _mm512_dpbf16_ps emulated::dpbf16
#define _mm512_cvtneps_pbh emulated::cvtneps
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps
#endif

#ifdef EMULATE_AMX
#undef __AMX_BF16__
#undef __AMX_INT8__
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::dpbf16ps
#define _tile_dpbsud emulated::dpbsud
#endif
