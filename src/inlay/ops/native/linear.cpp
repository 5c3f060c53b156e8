// Linear layers over packed weights: selection of the variant, and threads.
#include "packed_linear.h"

namespace inlay {
namespace {

thread_local Scratch bytes_of_x, scales_of_x, sums_of_x, offsets_of_x, narrow_x, wide_x;
thread_local Scratch wide_weight, bytes_of_weight;

// Converts a row to bfloat16; for tiles, 16 rows of 32 columns are contiguous.
void narrow(const Linear& l, int64_t row, bool tiles, uint16_t* out) {
  for (int64_t k = 0; k < l.depth; k += 16) {
    const int64_t tile = (row / 16 * (l.depth / kStep) + k / kStep) * 512 + row % 16 * kStep + k % kStep;
    uint16_t* to = out + (tiles ? tile : row * l.depth + k);
#ifdef __AVX512F__
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bf16_of(load16(l.x, l.x_type, row * l.depth + k)));
#else
    for (int64_t i = 0; i < 16; ++i) to[i] = to_bf16(element(l.x, l.x_type, row * l.depth + k + i));
#endif
  }
}

// The requested variant, or the nearest one that the instruction set supports.
int32_t possible(int32_t way, int32_t bits) {
  if (way == kTiles8 && bits == 16) way = kDot;
#if !defined(__AMX_BF16__) || !defined(__AMX_INT8__)
  if (way != kPortable) way = kDot;
#endif
#ifndef __AVX512BW__
  if (bits != 16) way = kPortable;
#endif
#ifndef __AVX512BF16__
  if (bits == 16) way = kPortable;
#endif
  return way;
}

void put_row(const Linear& l, int64_t block, int64_t row, const float* y) {
  for (int64_t n = 0; n < kLanes && block * kLanes + n < l.features; ++n) {
    float bias = l.bias ? element(l.bias, l.x_type, block * kLanes + n) : 0.0f;
    put(l.y, l.y_type, row * l.stride() + block * kLanes + n, y[n] + bias);
  }
}

void multiply_bytes(const Linear& l, const Bytes& x, Way way, uint8_t* bytes) {
  const Part part(l.blocks());
  if (way == kPortable)
    for (int64_t block = part.begin; block < part.end; ++block)
      for (int64_t row = 0; row < l.rows; ++row) {
        float y[kLanes];
        rows_portable(l, x, block, row, y);
        put_row(l, block, row, y);
      }
#ifdef __AVX512BW__
  if (way == kDot) by_format(l, [&](auto format) { dot<decltype(format)>(l, x, part, bytes); });
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
  if (way == kTiles8) by_format(l, [&](auto format) { tiles8<decltype(format)>(l, x, part); });
#endif
}

// All parts of a weight have the same x, which is converted once.
void with_bytes(const std::vector<Linear>& parts, Way way) {
  const Linear& l = parts[0];
  const bool six = std::any_of(parts.begin(), parts.end(), [](const Linear& each) { return each.bits == 6; });
  // Tiles read whole groups of 16 rows.
  const int64_t lanes = way == kTiles8 ? kLanes : std::min<int64_t>(l.rows, kLanes), steps = l.depth / kStep;
  const int64_t rows = lanes ? up(l.rows, lanes) : 0;
  Bytes x{steps,
          lanes,
          bytes_of_x.get<int8_t>(rows * l.depth),
          scales_of_x.get<float>(rows * steps),
          sums_of_x.get<float>(rows * steps),
          six ? offsets_of_x.get<int32_t>(2 * rows * steps) : nullptr};
  for (int64_t row = l.rows; row < rows; ++row)
    for (int64_t step = 0; step < steps; ++step) x.put(x.place(row, step), 0.0f, 0, 0);
  uint8_t* bytes = bytes_of_weight.get<uint8_t>(omp_get_max_threads() * l.depth * kLanes);
  bool shared = l.rows > 4;  // with few rows, synchronization costs more than the work
  if (!shared)
    for (int64_t at = 0; at < l.rows * steps; ++at) to_bytes(l, at / steps, at % steps, x);
#pragma omp parallel
  {
    if (shared) {
      Part part(l.rows * steps);
      for (int64_t at = part.begin; at < part.end; ++at) to_bytes(l, at / steps, at % steps, x);
#pragma omp barrier
    }
    for (const Linear& each : parts) multiply_bytes(each, x, way, bytes + omp_get_thread_num() * l.depth * kLanes);
  }
}

void multiply_bfloat16(const Linear& l, const uint16_t* x, uint8_t* wide, Way way) {
  const Part part(l.blocks());
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
  if (way == kTiles16 && l.bits == 16)
    tiles16<Format<16, false, false>>(l, x, part, wide);
  else if (way == kTiles16)
    by_format(l, [&](auto format) { tiles16<decltype(format)>(l, x, part, wide); });
#endif
#ifdef __AVX512BF16__
  if (way == kDot) dot16(l, x, part);
#endif
  (void)x, (void)wide;
  if (way == kPortable)
    for (int64_t block = part.begin; block < part.end; ++block)
      for (int64_t row = 0; row < l.rows; ++row) {
        float y[kLanes];
        rows_portable16(l, block, row, y);
        put_row(l, block, row, y);
      }
}

void with_bfloat16(const std::vector<Linear>& parts, Way way) {
  const Linear& l = parts[0];
  int64_t rows = way == kTiles16 ? up(l.rows, 16) : l.rows;
  uint16_t* x = narrow_x.get<uint16_t>(rows * l.depth);
  const bool widens = way == kTiles16 && l.bits != 16;
  const int64_t room = widens ? 2 * l.depth * kLanes * 2 : 0;  // two blocks of weights per thread
  uint8_t* wide = wide_weight.get<uint8_t>(omp_get_max_threads() * room);
#pragma omp parallel
  {
    {
      Part part(l.rows);
      for (int64_t row = part.begin; row < part.end; ++row) narrow(l, row, way == kTiles16, x);
    }
#pragma omp barrier
    for (const Linear& each : parts) multiply_bfloat16(each, x, wide + omp_get_thread_num() * room, way);
  }
}

void with_floats(const Linear& l) {
  const float* x = static_cast<const float*>(l.x);
  if (l.x_type != kFloat32) {
    float* wide = wide_x.get<float>(l.rows * l.depth);
    for (int64_t at = 0; at < l.rows * l.depth; ++at) wide[at] = element(l.x, l.x_type, at);
    x = wide;
  }
#pragma omp parallel
  floats(l, x, Part(l.blocks()), [&](int64_t block, int64_t row, const float* y) { put_row(l, block, row, y); });
}

// Unpacks one row of a packed weight.
void embed(const Linear& l, int64_t token, int64_t at) {
  const int64_t lane = token % kLanes;
  const uint8_t* block = l.weight + token / kLanes * l.block_bytes();
  for (int64_t k = 0; k < l.depth; ++k) {
    const uint8_t* numbers = block + k / l.group * l.group_bytes();
    const int64_t column = k % l.group % kStep, quad = column / 4;
    const uint8_t* step = numbers + k % l.group / kStep * (kStep * kLanes * l.bits / 8);
    float value;
    if (l.bits == 32) {
      std::memcpy(&value, block + (k * kLanes + lane) * 4, 4);
    } else if (l.bits == 16) {
      uint16_t stored;
      std::memcpy(&stored, step + (column / 2 * kLanes + lane) * 4 + column % 2 * 2, 2);
      value = from_bf16(stored);
    } else {
      const int64_t part = k % l.group / l.span();
      const float q = static_cast<float>(number(step, l.bits, quad, lane * 4 + column % 4));
      const float d = scale_of(l, numbers, part, lane);
      value = l.zero < 0 ? q * d + scale_of(l, numbers, part, lane, true) : (q - static_cast<float>(l.zero)) * d;
    }
    put(l.y, l.y_type, at * l.depth + k, value);
  }
}

void multiply(const std::vector<Linear>& parts, int32_t way) {
  const Way taken = static_cast<Way>(possible(way, parts[0].bits));
  if (taken == kTiles16 || parts[0].bits == 16)
    with_bfloat16(parts, taken);
  else
    with_bytes(parts, taken);
}

}  // namespace
}  // namespace inlay

// These return 0, or 1 if the arguments are invalid or memory is exhausted; inlay_last_error returns the reason.
INLAY_EXPORT int32_t inlay_packed_linear(const void* x, const uint8_t* weight, const void* bias, void* y,
                                         int32_t x_type, int32_t y_type, int64_t rows, int64_t features, int64_t depth,
                                         int64_t group, int32_t bits, int32_t zero, int32_t way) {
  using namespace inlay;
  return guarded([&] {
    const Linear l{x, weight, bias, y, x_type, y_type, rows, features, depth, group, bits, zero};
    check(l, "packed_linear");
    if (rows * features == 0) return;
    if (bits == 32) return with_floats(l);
    multiply({l}, way);
  });
}

// The same with a mixed weight of this many bytes.
INLAY_EXPORT int32_t inlay_mixed_linear(const void* x, const uint8_t* weight, int64_t bytes, const void* bias, void* y,
                                        int32_t x_type, int32_t y_type, int64_t rows, int64_t features, int64_t depth,
                                        int32_t way) {
  using namespace inlay;
  return guarded([&] {
    const Linear whole{x, weight, bias, y, x_type, y_type, rows, features, depth, kStep, 0, 0};
    const std::vector<Linear> parts = mixed_parts(whole, bytes);
    if (rows * features > 0) multiply(parts, way);
  });
}

INLAY_EXPORT int32_t inlay_packed_embedding(const uint8_t* weight, const int64_t* tokens, void* out, int32_t type,
                                            int64_t count, int64_t features, int64_t depth, int64_t group, int32_t bits,
                                            int32_t zero) {
  using namespace inlay;
  return guarded([&] {
    const Linear l{nullptr, weight, nullptr, out, type, type, count, features, depth, group, bits, zero};
    check(l, "packed_embedding");
    for (int64_t at = 0; at < count; ++at) require_range("packed_embedding: token", at, tokens[at], 0, features - 1);
#pragma omp parallel for if (count > 8)
    for (int64_t at = 0; at < count; ++at) embed(l, tokens[at], at);
  });
}
