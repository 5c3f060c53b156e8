// Shared by all kernels: number formats, scratch memory that is kept between calls, errors, tiles.
//
// Kernels are thread-safe: a call uses only its arguments and scratch memory of its thread. Non-finite values
// propagate: a result is not finite where the reference's is not.
#pragma once

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#else
inline int omp_get_max_threads() { return 1; }
inline int omp_get_num_threads() { return 1; }
inline int omp_get_thread_num() { return 0; }
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

// Several versions of these kernels may be in one process, so the symbols that compiled pieces call contain the
// version.
#ifndef INLAY_ABI
#define INLAY_ABI 0
#endif
#ifndef INLAY_TAG
#define INLAY_TAG untagged
#endif
#define INLAY_JOIN_(a, b, c) a##b##_##c
#define INLAY_JOIN(a, b, c) INLAY_JOIN_(a, b, c)
#define INLAY_SHIM(name) INLAY_JOIN(inlay_, INLAY_TAG, name)
#define INLAY_EXPORT extern "C" __attribute__((visibility("default")))

namespace inlay {

constexpr int64_t kLanes = 16;        // features that are adjacent in a packed weight
constexpr int64_t kStep = 32;         // columns that are packed together
constexpr int64_t kSuperGroup = 256;  // columns of groups whose scales have integer factors

enum Type : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

inline int64_t up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

inline float from_bf16(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// float16 conversion without hardware instructions. Rounds to nearest, ties to even.
inline float from_half_portable(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = (bits >> 10) & 31,
                 fraction = bits & 1023;
  float value;
  if (exponent == 0) {
    value = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return sign ? -value : value;
  }
  const uint32_t wide = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (fraction << 13);
  std::memcpy(&value, &wide, 4);
  return value;
}

inline uint16_t to_half_portable(float value) {
  constexpr uint32_t kInfinite = 0x7f800000, kTooLarge = 0x477ff000, kNormal = 0x38800000, kOneHalf = 0x3f000000;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > kInfinite) return static_cast<uint16_t>(sign | 0x7e00);
  if (bits >= kTooLarge) return static_cast<uint16_t>(sign | 0x7c00);
  if (bits < kNormal) {  // next to 0.5, floats have the spacing of subnormal float16 numbers
    float near_half = std::fabs(value) + 0.5f;
    std::memcpy(&bits, &near_half, 4);
    return static_cast<uint16_t>(sign | (bits - kOneHalf));
  }
  bits += 0xfff + ((bits >> 13) & 1);
  return static_cast<uint16_t>(sign | ((bits - 0x38000000) >> 13));
}

inline float from_half(uint16_t bits) {
#ifdef __F16C__
  return _cvtsh_ss(bits);
#else
  return from_half_portable(bits);
#endif
}

inline uint16_t to_half(float value) {
#ifdef __F16C__
  return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
  return to_half_portable(value);
#endif
}

inline float element(const void* data, int32_t type, int64_t index) {
  if (type == kFloat32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return type == kBFloat16 ? from_bf16(bits) : from_half(bits);
}

inline void put(void* data, int32_t type, int64_t index, float value) {
  if (type == kFloat32)
    static_cast<float*>(data)[index] = value;
  else
    static_cast<uint16_t*>(data)[index] = type == kBFloat16 ? to_bf16(value) : to_half(value);
}

// Memory that grows and is kept until its thread ends. There is one per thread and purpose, so no two calls share it.
// Calls allocate it for all their threads before they start them, where a failure can still be reported.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }
  template <typename T>
  T* get(int64_t count) {
    const int64_t bytes = up(std::max<int64_t>(count, 1) * static_cast<int64_t>(sizeof(T)), 64);
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(64, static_cast<size_t>(bytes));
      if (!data_) throw std::bad_alloc();
      size_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

// The reason why the last call of this thread failed; empty if it succeeded.
constexpr size_t kErrorBytes = 256;
inline char* last_error() {
  static thread_local char text[kErrorBytes] = {};
  return text;
}

inline void note_error(const char* text) {
  std::strncpy(last_error(), text, kErrorBytes - 1);
  last_error()[kErrorBytes - 1] = 0;
}

// Returns 0, or notes the reason and returns 1, because exceptions must not leave a C interface.
template <typename Work>
int32_t guarded(Work work) noexcept {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    note_error("out of memory");
  } catch (const std::exception& error) {
    note_error(error.what());
  }
  return 1;
}

inline void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// Throws an error that names `value` unless it is in [low, high].
inline void require_range(const char* what, int64_t at, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  throw std::out_of_range(
      std::string(what) + " " + std::to_string(value) + " at " + std::to_string(at) +
      (high < low ? " has no valid range" : " is not from " + std::to_string(low) + " to " + std::to_string(high)));
}

// The part of `count` that the current thread computes.
struct Part {
  int64_t begin, end;
  explicit Part(int64_t count) {
    int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    begin = count * me / threads;
    end = count * (me + 1) / threads;
  }
};

#ifdef __AVX512F__
inline __m512 load16(const void* data, int32_t type, int64_t index, __mmask16 mask = 0xffff) {
  if (type == kFloat32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(data) + index);
  __m256i half = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(data) + index);
  if (type == kFloat16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline __m256i bf16_of(__m512 value) {
#ifdef __AVX512BF16__
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value));
#else
  __m512i bits = _mm512_castps_si512(value);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  bits = _mm512_srli_epi32(bits, 16);
  // Rounding must not turn a NaN into a number.
  bits = _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(bits);
#endif
}

inline void store16(void* data, int32_t type, int64_t index, __m512 value, __mmask16 mask = 0xffff) {
  if (type == kFloat32)
    _mm512_mask_storeu_ps(static_cast<float*>(data) + index, mask, value);
  else
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(data) + index, mask,
                             type == kBFloat16 ? bf16_of(value) : _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
#endif

#ifdef __AMX_BF16__
// The compiler does not know that tile loads read memory: keep earlier stores before them.
inline void written() { asm volatile("" ::: "memory"); }

struct alignas(64) TileConfig {  // eight tiles of 16 rows by 64 bytes by default
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t colsb[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  void set(int tile, int rows_, int colsb_) {
    rows[tile] = static_cast<uint8_t>(rows_);
    colsb[tile] = static_cast<uint16_t>(colsb_);
  }
  void use() const {
    asm volatile("" ::"r"(this) : "memory");  // the intrinsic declares a read of the first eight bytes only
    _tile_loadconfig(this);
  }
};
#endif

}  // namespace inlay
