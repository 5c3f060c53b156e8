// Cases of the kernels: arguments in memory of exactly their size, so that an address sanitizer sees the first byte
// beyond; the exact result, in double; what a kernel found. Everything is drawn from one seed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "packed_linear.h"

extern "C" {
int32_t inlay_packed_linear(const void*, const uint8_t*, const void*, void*, int32_t, int32_t, int64_t, int64_t,
                            int64_t, int64_t, int32_t, int32_t, int32_t);
int32_t inlay_mixed_linear(const void*, const uint8_t*, int64_t, const void*, void*, int32_t, int32_t, int64_t, int64_t,
                           int64_t, int32_t);
int32_t inlay_packed_embedding(const uint8_t*, const int64_t*, void*, int32_t, int64_t, int64_t, int64_t, int64_t,
                               int32_t, int32_t);
int32_t inlay_cached_attention(const inlay::Attention*);
}

namespace cases {

using Random = std::mt19937;

inline int64_t pick(Random& random, std::initializer_list<int64_t> from) {
  return from.begin()[random() % from.size()];
}

inline void fail(const std::string& what) {
  std::printf("failed: %s\n", what.c_str());
  std::exit(1);
}

// Memory of exactly this size.
template <typename T>
struct Exactly {
  explicit Exactly(int64_t count) : size(count), data(static_cast<T*>(std::malloc(count * sizeof(T)))) {}
  Exactly(const Exactly&) = delete;
  ~Exactly() { std::free(data); }
  T& operator[](int64_t at) { return data[at]; }
  const T& operator[](int64_t at) const { return data[at]; }
  const int64_t size;
  T* const data;
};

// Numbers of one of the three formats.
struct Numbers {
  Numbers(int64_t count_, int32_t type_)
      : count(count_), type(type_), bytes(count_ * (type_ == inlay::kFloat32 ? 4 : 2)) {}
  double get(int64_t at) const { return inlay::element(bytes.data, type, at); }
  void set(int64_t at, double value) { inlay::put(bytes.data, type, at, static_cast<float>(value)); }
  void fill(Random& random, double scale = 1) {
    std::normal_distribution<double> normal;
    for (int64_t at = 0; at < count; ++at) set(at, normal(random) * scale);
  }
  void fill(double value) {
    for (int64_t at = 0; at < count; ++at) set(at, value);
  }
  std::vector<double> plain() const {
    std::vector<double> made(count);
    for (int64_t at = 0; at < count; ++at) made[at] = get(at);
    return made;
  }
  bool equal(const Numbers& other) const { return std::memcmp(bytes.data, other.bytes.data, bytes.size) == 0; }
  const int64_t count;
  const int32_t type;
  Exactly<uint8_t> bytes;
};

// A result, and how large the numbers are that it was made of: how near it can be computed.
struct Exact {
  double value, size;
};

// Where the exact result is not finite, what was found is not; everywhere else they are near.
inline void compare(const std::vector<Exact>& wanted, const Numbers& found, double bound, const std::string& what) {
  const double least = found.type == inlay::kFloat16 ? 1e-7 : 1e-35;  // below this, numbers count as 0
  for (int64_t at = 0; at < found.count; ++at) {
    const double value = found.get(at), exact = wanted[at].value;
    if (std::isfinite(value) == std::isfinite(exact) &&
        (!std::isfinite(value) || std::fabs(value - exact) <= bound * wanted[at].size + least))
      continue;
    fail(what + ": result " + std::to_string(at) + " is " + std::to_string(value) + " and must be " +
         std::to_string(exact) + " within " + std::to_string(bound * wanted[at].size));
  }
}

struct Format {
  int32_t bits, zero;
  int64_t group;
  std::string text() const {
    return std::to_string(bits) + " bits, zero " + std::to_string(zero) + ", groups of " + std::to_string(group);
  }
};
constexpr Format kFormats[] = {{4, 8, 32},  {4, -1, 32},  {4, -1, 64},  {5, 16, 32},  {5, -1, 32}, {8, 128, 32},
                               {8, -1, 64}, {4, -1, 256}, {5, -1, 256}, {6, 32, 256}, {16, 0, 32}, {32, 0, 32}};
constexpr int32_t kWays[] = {inlay::kDot, inlay::kTiles8, inlay::kTiles16, inlay::kPortable};

// A packed weight, and what it stands for.
struct Weight {
  Weight(Random& random, const Format& format, int64_t features, int64_t depth)
      : l{nullptr, nullptr, nullptr, nullptr, 0, 0, 0, features, depth, format.group, format.bits, format.zero},
        bytes(l.blocks() * l.block_bytes()) {
    if (format.bits == 16) {
      std::normal_distribution<float> normal;
      for (int64_t at = 0; at < bytes.size / 2; ++at) put16(2 * at, inlay::to_bf16(normal(random)));
    } else if (format.bits == 32) {
      std::normal_distribution<float> normal;
      for (int64_t at = 0; at < bytes.size / 4; ++at) {
        const float value = normal(random);
        std::memcpy(bytes.data + 4 * at, &value, 4);
      }
    } else {
      for (int64_t at = 0; at < bytes.size; ++at) bytes[at] = static_cast<uint8_t>(random());
      const float scale = l.factor_bytes() ? 1e-4f / 64 : 1e-4f;  // factors have up to eight bits
      for (int64_t group = 0; group < l.blocks() * l.groups(); ++group)
        for (int64_t at = l.numbers() + l.factor_bytes(); at < l.group_bytes(); at += 2)
          put16(group * l.group_bytes() + at, inlay::to_half((static_cast<float>(random() % 1000) - 500) * scale));
    }
  }
  void put16(int64_t at, uint16_t value) { std::memcpy(bytes.data + at, &value, 2); }
  std::vector<float> whole() const {
    Exactly<float> rows(l.features * l.depth);
    std::vector<int64_t> tokens(l.features);
    for (int64_t at = 0; at < l.features; ++at) tokens[at] = at;
    if (inlay_packed_embedding(bytes.data, tokens.data(), rows.data, inlay::kFloat32, l.features, l.features, l.depth,
                               l.group, l.bits, l.zero))
      fail(std::string("packed_embedding: ") + inlay::last_error());
    return std::vector<float>(rows.data, rows.data + rows.size);
  }
  const inlay::Linear l;
  Exactly<uint8_t> bytes;
};

// Weights of several formats in one, as ops/weight_layout.py joins them.
struct Mixed {
  Mixed(Random& random, int64_t depth_) : depth(depth_) {
    for (int64_t count = 1 + static_cast<int64_t>(random() % 4); count > 0; --count) {
      const Format& format = kFormats[random() % 10];
      parts.push_back(std::make_unique<Weight>(random, format, pick(random, {1, 15, 16, 33}), depth));
      features += parts.back()->l.features;
    }
    std::vector<uint8_t> made;
    const auto put = [&](int64_t value) {
      const int32_t number = static_cast<int32_t>(value);
      const uint8_t* from = reinterpret_cast<const uint8_t*>(&number);
      made.insert(made.end(), from, from + 4);
    };
    for (int64_t value : {static_cast<int64_t>(parts.size()), depth, int64_t{0}, int64_t{0}}) put(value);
    for (const auto& each : parts)
      for (int64_t value : {each->l.features, int64_t{each->l.bits}, int64_t{each->l.zero}, each->l.group}) put(value);
    for (const auto& each : parts) {
      made.resize(inlay::up(static_cast<int64_t>(made.size()), 64));
      made.insert(made.end(), each->bytes.data, each->bytes.data + each->bytes.size);
    }
    bytes = std::make_unique<Exactly<uint8_t>>(static_cast<int64_t>(made.size()));
    std::copy(made.begin(), made.end(), bytes->data);
  }
  const int64_t depth;
  int64_t features = 0;
  std::vector<std::unique_ptr<Weight>> parts;
  std::unique_ptr<Exactly<uint8_t>> bytes;
};

// What one of the rows of x holds, or one of the keys and values.
enum Content { kPlain, kNaN, kInf, kMinusInf, kTiny, kHuge, kContents };

inline double strange(int content) {
  return content == kNaN   ? std::numeric_limits<double>::quiet_NaN()
         : content == kInf ? std::numeric_limits<double>::infinity()
                           : -std::numeric_limits<double>::infinity();
}

struct LinearCase {
  LinearCase(Random& random, const Format& format_, int64_t rows_, int32_t way_)
      : format(format_),
        rows(rows_),
        features(pick(random, {1, 15, 16, 17, 33, 40})),
        depth(format.group * pick(random, {1, 2, 5})),
        way(way_),
        content(static_cast<int>(random() % kContents)),
        weight(random, format, features, depth),
        x(rows * depth, static_cast<int32_t>(random() % 3)),
        bias(features, x.type),
        biased(random() % 2) {
    const bool half = x.type == inlay::kFloat16;
    x.fill(random, content == kTiny ? (half ? 1e-7 : 1e-38) : content == kHuge ? (half ? 10 : 1e28) : 1);
    if (rows && (content == kNaN || content == kInf || content == kMinusInf))
      x.set(static_cast<int64_t>(random() % (rows * depth)), strange(content));
    bias.fill(random);
  }
  std::string text() const {
    return "linear of " + format.text() + ", way " + std::to_string(way) + ", " + std::to_string(rows) + "x" +
           std::to_string(features) + "x" + std::to_string(depth) + ", content " + std::to_string(content) + ", type " +
           std::to_string(x.type);
  }
  void run(Numbers& y) const {
    if (inlay_packed_linear(x.bytes.data, weight.bytes.data, biased ? bias.bytes.data : nullptr, y.bytes.data, x.type,
                            x.type, rows, features, depth, format.group, format.bits, format.zero, way))
      fail(text() + ": " + inlay::last_error());
  }
  void check() const {
    const std::vector<float> whole = weight.whole();
    const std::vector<double> plain = x.plain();
    std::vector<Exact> wanted(rows * features);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t n = 0; n < features; ++n) {
        const double* values = plain.data() + row * depth;
        const float* w = whole.data() + n * depth;
        const double added = biased ? bias.get(n) : 0;
        double sum = added, squares = 0, most = 0;
        for (int64_t k = 0; k < depth; ++k)
          sum += values[k] * w[k], squares += w[k] * w[k], most = std::max(most, std::fabs(values[k]));
        wanted[row * features + n] = {sum, std::sqrt(squares) * most + std::fabs(sum) + std::fabs(added)};
      }
    Numbers y(rows * features, x.type);
    y.fill(std::numeric_limits<double>::quiet_NaN());
    run(y);
    compare(wanted, y, 2e-2, text());  // x as bytes: half a 127th of the largest, and such errors add up like noise
  }
  const Format format;
  const int64_t rows, features, depth;
  const int32_t way;
  const int content;
  const Weight weight;
  Numbers x, bias;
  const bool biased;
};

struct AttentionCase {
  AttentionCase(Random& random, int64_t batch_, int64_t length_, bool at_end)
      : batch(batch_),
        length(length_),
        kv_heads(pick(random, {1, 2})),
        heads(kv_heads * pick(random, {1, 2, 3, 5})),
        depth(pick(random, {16, 24, 32, 64})),
        width(pick(random, {16, 40, 64, 80})),
        window(pick(random, {0, 0, 7, 40})),
        room(std::max<int64_t>(length + 1, pick(random, {window + length - 1, 17, 40, 64, 133, 300}))),
        held(batch + 1),
        content(static_cast<int>(random() % 4)),
        query(batch * length * heads * depth, static_cast<int32_t>(random() % 3)),
        keys(held * kv_heads * room * depth, static_cast<int32_t>(random() % 3)),
        values(held * kv_heads * room * width, keys.type),
        slopes(heads, static_cast<int32_t>(random() % 3)),
        sinks(heads, static_cast<int32_t>(random() % 3)),
        slots(batch),
        lengths(batch) {
    const double nobodys = std::numeric_limits<double>::quiet_NaN();
    query.fill(random), keys.fill(nobodys), values.fill(nobodys), slopes.fill(random, 0.1), sinks.fill(random);
    softcap = pick(random, {0, 0, 5});
    sloping = random() % 4 == 0, sinking = random() % 4 == 0, tiled = length >= 16 || random() % 4 == 0;
    const bool is_ring = window && length && window + length - 1 <= room && random() % 4;
    for (int64_t b = 0; b < batch; ++b) {
      slots[b] = held - 1 - b;
      lengths[b] = at_end ? room - length : static_cast<int64_t>(random() % (room - length + 1));
      if (is_ring) lengths[b] += static_cast<int64_t>(random() % (4 * room));
      // A ring that was read from its start on is full; what is no longer in a window may also be as it was.
      const bool is_full = !is_ring || random() % 2;
      fill(random, b, is_full ? 0 : std::max<int64_t>(0, lengths[b] - window + 1), lengths[b] + length);
    }
    if (batch && length && (content == kNaN || content == kInf || content == kMinusInf)) {
      const int64_t b = static_cast<int64_t>(random() % batch), kv = static_cast<int64_t>(random() % kv_heads);
      const int64_t row =
          lengths[b] + length - 1 - static_cast<int64_t>(random() % std::min(room, lengths[b] + length));
      switch (random() % 3) {
        case 0:
          keys.set(key_at(b, kv, row) + depth / 2, strange(content));
          break;
        case 1:
          values.set(value_at(b, kv, row) + width / 2, strange(content));
          break;
        default:
          query.set(static_cast<int64_t>(random() % query.count), strange(content));
      }
    }
  }
  void fill(Random& random, int64_t b, int64_t first, int64_t filled) {
    std::normal_distribution<double> normal;
    for (int64_t kv = 0; kv < kv_heads; ++kv)
      for (int64_t row = std::max(first, filled - room); row < filled; ++row) {
        for (int64_t d = 0; d < depth; ++d) keys.set(key_at(b, kv, row) + d, normal(random));
        for (int64_t d = 0; d < width; ++d) values.set(value_at(b, kv, row) + d, normal(random));
      }
  }
  int64_t key_at(int64_t b, int64_t kv, int64_t position) const {
    return ((slots[b] * kv_heads + kv) * room + position % room) * depth;
  }
  int64_t value_at(int64_t b, int64_t kv, int64_t position) const {
    return ((slots[b] * kv_heads + kv) * room + position % room) * width;
  }
  std::string text() const {
    std::string lies = "lengths";
    for (int64_t b = 0; b < batch; ++b) lies += " " + std::to_string(lengths[b]);
    return "attention " + std::to_string(batch) + "x" + std::to_string(heads) + "/" + std::to_string(kv_heads) + "x" +
           std::to_string(length) + ", " + std::to_string(depth) + "/" + std::to_string(width) + ", room " +
           std::to_string(room) + ", window " + std::to_string(window) + ", softcap " + std::to_string(softcap) +
           ", content " + std::to_string(content) + ", types " + std::to_string(query.type) +
           std::to_string(keys.type) + (sloping ? ", slopes" : "") + (sinking ? ", sinks" : "") + ", " + lies;
  }
  inlay::Attention arguments(Numbers& out) const {
    inlay::Attention a{};
    a.query = query.bytes.data, a.keys = keys.bytes.data, a.values = values.bytes.data, a.out = out.bytes.data;
    a.q_row = heads * depth, a.q_head = depth, a.q_batch = length * heads * depth;
    a.slots = slots.data, a.lengths = lengths.data;
    a.q_type = query.type, a.kv_type = keys.type;
    a.batch = batch, a.heads = heads, a.kv_heads = kv_heads, a.length = length, a.depth = depth, a.width = width;
    a.room = room, a.held = held, a.scale = scale(), a.window = window, a.softcap = static_cast<float>(softcap);
    a.slopes = sloping ? slopes.bytes.data : nullptr, a.sinks = sinking ? sinks.bytes.data : nullptr;
    a.slopes_type = slopes.type, a.sinks_type = sinks.type, a.tiled = tiled;
    return a;
  }
  float scale() const { return 1 / std::sqrt(static_cast<float>(depth)); }
  void run(Numbers& out) const {
    const inlay::Attention a = arguments(out);
    if (inlay_cached_attention(&a)) fail(text() + ": " + inlay::last_error());
  }
  struct Plain {
    std::vector<double> query, keys, values;
  };
  void exact_row(const Plain& plain, int64_t b, int64_t head, int64_t row, Exact* out) const {
    const int64_t position = lengths[b] + row, kv = head / (heads / kv_heads);
    const int64_t first = window ? std::max<int64_t>(0, position - window + 1) : 0;
    const double* mine = plain.query.data() + ((b * length + row) * heads + head) * depth;
    std::vector<double> scores;
    double most = sinking ? sinks.get(head) : -HUGE_VAL;
    for (int64_t key = first; key <= position; ++key) {
      const double* theirs = plain.keys.data() + key_at(b, kv, key);
      double score = 0;
      for (int64_t d = 0; d < depth; ++d) score += mine[d] * theirs[d];
      score *= scale();
      if (softcap) score = static_cast<double>(softcap) * std::tanh(score / static_cast<double>(softcap));
      if (sloping) score += slopes.get(head) * static_cast<double>(key);
      scores.push_back(score);
      most = std::max(most, score);
    }
    double sum = sinking ? std::exp(sinks.get(head) - most) : 0;
    for (double& each : scores) sum += each = std::exp(each - most);
    for (int64_t d = 0; d < width; ++d) out[d] = {0, 0};
    for (int64_t key = first; key <= position; ++key) {
      const double *theirs = plain.values.data() + value_at(b, kv, key), weight = scores[key - first] / sum;
      for (int64_t d = 0; d < width; ++d)
        out[d] = {out[d].value + weight * theirs[d], std::max(out[d].size, std::fabs(theirs[d]))};
    }
  }
  void check() const {
    std::vector<Exact> wanted(batch * length * heads * width);
    const Plain plain{query.plain(), keys.plain(), values.plain()};
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t row = 0; row < length; ++row)
        for (int64_t head = 0; head < heads; ++head)
          exact_row(plain, b, head, row, wanted.data() + ((b * length + row) * heads + head) * width);
    Numbers out(batch * length * heads * width, query.type);
    out.fill(std::numeric_limits<double>::quiet_NaN());
    run(out);
    compare(wanted, out, 3e-2, text());  // queries and weights may become bfloat16
  }
  const int64_t batch, length, kv_heads, heads, depth, width, window, room, held;
  const int content;
  int64_t softcap;
  bool sloping, sinking, tiled;
  Numbers query, keys, values, slopes, sinks;
  Exactly<int64_t> slots, lengths;
};

}  // namespace cases
