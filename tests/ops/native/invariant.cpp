// What a row gives is the same bits whatever rows are in the call, whichever sequences are beside it and however many
// threads there are. `invariant SEED ROUNDS` prints how many comparisons were made.
#include <omp.h>

#include "cases.h"

using namespace cases;

namespace {

int64_t size_of(const Numbers& numbers) { return numbers.bytes.size / numbers.count; }

void same(const Numbers& one, int64_t from, const Numbers& two, int64_t at, int64_t count, const std::string& what) {
  if (std::memcmp(one.bytes.data + from * size_of(one), two.bytes.data + at * size_of(two), count * size_of(one)))
    fail(what);
}

// Rows of a linear layer, all at once and in calls of fewer, by ways that must agree.
int64_t linear(Random& random, const Format& format, std::initializer_list<int32_t> ways) {
  int64_t count = 0;
  const LinearCase one(random, format, 37, *ways.begin());
  if (one.content == kNaN) return 0;  // equal, and not to itself
  Numbers whole(one.rows * one.features, one.x.type);
  one.run(whole);
  for (int32_t way : ways)
    for (int64_t rows : {1, 2, 3, 5, 8, 16, 17, 37})
      for (int64_t first = 0; first + rows <= one.rows; first += rows) {
        Numbers part(rows * one.features, one.x.type);
        omp_set_num_threads(static_cast<int>(1 + random() % 4));
        const int32_t failed =
            inlay_packed_linear(one.x.bytes.data + first * one.depth * size_of(one.x), one.weight.bytes.data,
                                one.biased ? one.bias.bytes.data : nullptr, part.bytes.data, one.x.type, one.x.type,
                                rows, one.features, one.depth, format.group, format.bits, format.zero, way);
        if (failed) fail(one.text() + ": " + inlay::last_error());
        same(whole, first * one.features, part, 0, rows * one.features,
             one.text() + ": " + std::to_string(rows) + " rows by way " + std::to_string(way) + " give other bits");
        ++count;
      }
  return count;
}

// Rows of attention, all at once and in chunks, with other sequences and alone.
int64_t attention(Random& random, bool tiled) {
  const AttentionCase one(random, 1 + static_cast<int64_t>(random() % 3), pick(random, {1, 16, 21, 40}), random() % 2);
  if (one.content == kNaN || one.content == kInf || one.content == kMinusInf) return 0;
  const int64_t row_size = one.heads * one.width;
  Numbers whole(one.batch * one.length * row_size, one.query.type);
  inlay::Attention all = one.arguments(whole);
  all.tiled = tiled;
  omp_set_num_threads(2);
  if (inlay_cached_attention(&all)) fail(one.text() + ": " + inlay::last_error());
  int64_t count = 0;
  for (int threads : {1, 2, 5})
    for (int64_t rows : {int64_t{1}, int64_t{3}, int64_t{16}, one.length})
      for (int64_t b = 0; b < one.batch; ++b)
        for (int64_t first = 0; first < one.length; first += rows) {
          const int64_t taken = std::min(rows, one.length - first), before = one.lengths[b] + first;
          Numbers part(taken * row_size, one.query.type);
          inlay::Attention some = one.arguments(part);
          some.query = one.query.bytes.data + (b * one.length + first) * one.heads * one.depth * size_of(one.query);
          some.batch = 1, some.length = taken, some.slots = one.slots.data + b, some.lengths = &before,
          some.tiled = tiled;
          omp_set_num_threads(threads);
          if (inlay_cached_attention(&some)) fail(one.text() + ": " + inlay::last_error());
          same(whole, (b * one.length + first) * row_size, part, 0, taken * row_size,
               one.text() + (tiled ? ", tiled" : "") + ": " + std::to_string(taken) + " rows from " +
                   std::to_string(first) + " on, by " + std::to_string(threads) + " threads, give other bits");
          ++count;
        }
  return count;
}

}  // namespace

int main(int, char** given) {
  Random random(static_cast<uint32_t>(std::atol(given[1])));
  int64_t count = 0;
  for (int round = std::atoi(given[2]); round > 0; --round) {
    for (const Format& format : kFormats) {
      if (format.bits == 32)
        count += linear(random, format, {inlay::kDot, inlay::kTiles8, inlay::kTiles16, inlay::kPortable});
      else if (format.bits == 16)
        count += linear(random, format, {inlay::kDot}) + linear(random, format, {inlay::kTiles16});
      else
        count += linear(random, format, {inlay::kDot, inlay::kTiles8}) + linear(random, format, {inlay::kTiles16});
      if (format.bits != 32) count += linear(random, format, {inlay::kPortable});
    }
    for (int at = 0; at < 8; ++at) count += attention(random, false) + attention(random, true);
  }
  std::printf("%ld cases\n", static_cast<long>(count));
}
