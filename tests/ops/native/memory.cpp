// Every way, format, number of rows and end of the cache under the address and undefined-behaviour sanitizers, each
// compared with the exact result; then what must be refused. `memory SEED ROUNDS` prints how many cases ran.
#include "cases.h"

using namespace cases;

namespace {

int64_t linear(Random& random) {
  int64_t count = 0;
  for (const Format& format : kFormats)
    for (int32_t way : kWays)
      for (int64_t rows : {0, 1, 2, 3, 5, 8, 16, 17, 33}) {
        LinearCase(random, format, rows, way).check();
        ++count;
      }
  return count;
}

// A mixed weight gives bit for bit what its parts give.
int64_t mixed(Random& random) {
  int64_t count = 0;
  for (int32_t way : kWays)
    for (int64_t rows : {0, 1, 3, 17, 33})
      for (int again = 0; again < 3; ++again) {
        const Mixed one(random, 256 * pick(random, {1, 2}));
        Numbers x(rows * one.depth, static_cast<int32_t>(random() % 3)), bias(one.features, x.type);
        x.fill(random), bias.fill(random);
        const bool biased = random() % 2;
        Numbers all(rows * one.features, x.type);
        if (inlay_mixed_linear(x.bytes.data, one.bytes->data, one.bytes->size, biased ? bias.bytes.data : nullptr,
                               all.bytes.data, x.type, x.type, rows, one.features, one.depth, way))
          fail(std::string("mixed: ") + inlay::last_error());
        const int64_t size = x.type == inlay::kFloat32 ? 4 : 2;
        int64_t first = 0;
        for (const auto& each : one.parts) {
          const inlay::Linear& l = each->l;
          Numbers part(rows * l.features, x.type);
          if (inlay_packed_linear(x.bytes.data, each->bytes.data, biased ? bias.bytes.data + first * size : nullptr,
                                  part.bytes.data, x.type, x.type, rows, l.features, l.depth, l.group, l.bits, l.zero,
                                  way))
            fail(std::string("a part: ") + inlay::last_error());
          for (int64_t row = 0; row < rows; ++row)
            if (std::memcmp(all.bytes.data + (row * one.features + first) * size,
                            part.bytes.data + row * l.features * size, l.features * size))
              fail("a mixed weight gives other bits than a part of " + std::to_string(l.bits) + " bits");
          first += l.features;
        }
        ++count;
      }
  return count;
}

// A mixed weight whose bytes state other sizes than the call, or more bytes than there are, is refused.
int64_t refused_mixed(Random& random) {
  int64_t count = 0;
  for (int again = 0; again < 20; ++again) {
    const Mixed one(random, 256);
    const Numbers x(one.depth, inlay::kFloat32);
    Numbers y(2 * one.features, inlay::kFloat32);
    const auto run = [&](int64_t bytes, int64_t features, int64_t depth) {
      ++count;
      Exactly<uint8_t> less(bytes);
      std::memcpy(less.data, one.bytes->data, bytes);
      return inlay_mixed_linear(x.bytes.data, less.data, bytes, nullptr, y.bytes.data, 0, 0, 1, features, depth, 4);
    };
    const int64_t all = one.bytes->size;
    for (int64_t bytes : {int64_t{1}, int64_t{15}, int64_t{16}, int64_t{31}, all / 2, all - 1})
      if (!run(bytes, one.features, one.depth)) fail("a mixed weight with missing bytes was accepted");
    if (!run(all, one.features + 1, one.depth) || !run(all, one.features, 128)) fail("other sizes were accepted");
    for (int64_t at = 0; at < 4 * static_cast<int64_t>(1 + one.parts.size()); ++at) {
      int32_t& number = reinterpret_cast<int32_t*>(one.bytes->data)[at];
      const int32_t before = number;
      for (int32_t value : {0, -1, 1, 7, 1 << 30, static_cast<int32_t>(random())}) {
        number = value;
        const int32_t failed = run(all, one.features, one.depth);  // nothing outside is read, whatever it says
        if (failed && !*inlay::last_error()) fail("a refusal without a reason");
      }
      number = before;
    }
  }
  return count;
}

int64_t attention(Random& random) {
  int64_t count = 0;
  for (int64_t batch : {0, 1, 2})
    for (int64_t length : {0, 1, 3, 16, 17, 33})
      for (int at_end = 0; at_end < 2; ++at_end)
        for (int again = 0; again < 3; ++again) {
          AttentionCase(random, batch, length, at_end).check();
          ++count;
        }
  return count;
}

int64_t tiled_attention(Random& random) {  // where tiles can be taken they are, up to the last row of the cache
  int64_t count = 0;
  while (count < 30) {
    AttentionCase one(random, 1 + static_cast<int64_t>(random() % 2), pick(random, {16, 17, 32, 40}), random() % 2);
    if (one.keys.type != inlay::kBFloat16 || one.softcap || one.sloping || one.sinking || one.depth % 32 ||
        one.width % 16)
      continue;
    one.check();
    ++count;
  }
  return count;
}

// Half precision without instructions is what it is with them: every half, what lies between two of them, and around.
int64_t halves(Random& random) {
  const auto same = [](float value) {
    const uint16_t found = inlay::to_half_portable(value), wanted = inlay::to_half(value);
    if (std::isnan(value) ? (found & 0x7fff) <= 0x7c00 : found != wanted) fail("half of " + std::to_string(value));
  };
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = inlay::from_half(static_cast<uint16_t>(bits));
    const float next = inlay::from_half(static_cast<uint16_t>(bits + 1)), middle = value / 2 + next / 2;
    if (inlay::from_half_portable(static_cast<uint16_t>(bits)) != value && !std::isnan(value))
      fail("a half is read wrongly");
    if (!std::isnan(value) && inlay::to_half_portable(value) != bits) fail("a half does not stay what it is");
    for (float each : {value, middle, std::nextafter(middle, value), std::nextafter(middle, next)}) same(each);
  }
  std::uniform_real_distribution<float> exponent(-60, 40);
  for (int at = 0; at < 10000; ++at) same((random() % 2 ? 1.0f : -1.0f) * std::exp2(exponent(random)));
  return 1;
}

void expect_refusal(int32_t failed, int64_t value, const char* what) {
  const std::string said = inlay::last_error();
  if (!failed || said.find(std::to_string(value)) == std::string::npos || said.find(what) == std::string::npos)
    fail("a " + std::string(what) + " of " + std::to_string(value) + " is not refused: " + said);
}

int64_t refusals(Random& random) {
  int64_t count = 0;
  constexpr int64_t kFar = std::numeric_limits<int64_t>::max();
  for (const Format& format : kFormats) {
    const Weight weight(random, format, 17, format.group);
    Numbers row(format.group, inlay::kFloat32);
    for (int64_t token : {int64_t{-1}, int64_t{17}, int64_t{31}, int64_t{1000000}, kFar, -kFar - 1}) {
      expect_refusal(inlay_packed_embedding(weight.bytes.data, &token, row.bytes.data, inlay::kFloat32, 1, 17,
                                            format.group, format.group, format.bits, format.zero),
                     token, "token");
      ++count;
    }
  }
  for (int64_t length : {1, 20}) {
    AttentionCase one(random, 2, length, false);
    Numbers out(one.batch * one.length * one.heads * one.width, one.query.type);
    inlay::Attention a = one.arguments(out);
    const int64_t good[2] = {0, 0};
    for (int64_t slot : {int64_t{-1}, one.held, kFar, -kFar - 1}) {
      const int64_t bad[2] = {0, slot};
      a.slots = bad, a.lengths = good;
      expect_refusal(inlay_cached_attention(&a), slot, "slot");
      ++count;
    }
    // Without a window, and where the window and the rows of the call are one row more than a slot, nothing may wrap.
    for (int64_t window : {int64_t{0}, one.room - length + 2, kFar, one.window})
      for (int64_t before : {int64_t{-1}, int64_t{-3}, one.room - length + 1, kFar, -kFar - 1}) {
        const int64_t bad[2] = {0, before};
        a.slots = good, a.lengths = bad, a.window = window;
        const bool is_ring = window == one.window && window && window + length - 1 <= one.room;
        if (before == one.room - length + 1 && is_ring) continue;
        expect_refusal(inlay_cached_attention(&a), before, "length");
        ++count;
      }
  }
  // More than there is memory for; nothing of x is read before that is known.
  const Weight weight(random, kFormats[0], 16, 32);
  float x[32] = {}, y[16];
  for (int32_t way : kWays) {
    if (!inlay_packed_linear(x, weight.bytes.data, nullptr, y, 0, 0, int64_t{1} << 44, 16, 32, 32, 4, 8, way) ||
        std::string(inlay::last_error()) != "out of memory")
      fail("memory for too many rows was found");
    LinearCase(random, kFormats[0], 5, way).check();  // and the next call works
    ++count;
  }
  return count;
}

}  // namespace

int main(int count, char** given) {
  Random random(count > 1 ? std::atoi(given[1]) : 0);
  int64_t ran = 0;
  for (int round = 0; round < (count > 2 ? std::atoi(given[2]) : 1); ++round)
    ran += linear(random) + mixed(random) + refused_mixed(random) + attention(random) + tiled_attention(random) +
           refusals(random) + halves(random);
  std::printf("%lld cases\n", static_cast<long long>(ran));
}
