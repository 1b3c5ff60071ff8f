// The attention, for vectors of `BYTES` bytes; included by a file for each set of instructions.
//
// [Note: one pass] With few new tokens the time is that of reading keys and values once. A thread
// takes one sequence and one head of its keys, and goes over its blocks: scores of a block for all
// rows (new tokens x the query heads that share the keys), then the running maximum, sum and output
// of each row are brought up to date (online softmax). All but the block stays in the L1 cache.
#include <cstring>

#include "scratch.hpp"

namespace gulliver::pages {
namespace {

constexpr Index LANES = BYTES / 4;
typedef float Floats __attribute__((vector_size(BYTES)));
typedef std::int32_t Ints __attribute__((vector_size(BYTES)));
typedef std::uint16_t Halves __attribute__((vector_size(BYTES / 2)));
typedef std::uint32_t Words __attribute__((vector_size(BYTES)));
constexpr float LOWEST = -__builtin_inff();

inline Floats load(const float* at) {
  Floats made;
  std::memcpy(&made, at, BYTES);
  return made;
}

inline Floats load(const std::uint16_t* at) {
  Halves half;
  std::memcpy(&half, at, BYTES / 2);
  const Words wide = __builtin_convertvector(half, Words) << 16;
  return reinterpret_cast<Floats>(wide);
}

inline void store(float* at, Floats value) { std::memcpy(at, &value, BYTES); }

inline float number(float value) { return value; }

inline float number(std::uint16_t half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void put(float* at, float value) { *at = value; }

inline void put(std::uint16_t* at, float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  // To the nearest, ties to even; a NaN stays one.
  *at = value != value ? 0x7fc0 : static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float total(Floats v) {
  float sums[LANES];
  store(sums, v);
  for (Index width = LANES / 2; width > 0; width /= 2)
    for (Index i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

// e^x for x <= 0, to 1e-7 of the value: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
inline Floats exponential(Floats x) {
  const Floats low = Floats{} - 87.0f;
  const auto under = x < low;
  x = under ? low : x;
  const Floats magic = Floats{} + 12582912.0f;  // rounds to the nearest whole number
  const Floats n = (x * 1.44269504f + magic) - magic;
  const Floats r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  Floats p = Floats{} + 1.98756915e-4f;
  p = p * r + 1.39819995e-3f;
  p = p * r + 8.33345190e-3f;
  p = p * r + 4.16657960e-2f;
  p = p * r + 1.66666655e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  const Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
  const Floats value = p * reinterpret_cast<Floats>(bits);
  return under ? Floats{} : value;
}

// What a thread works in: queries and outputs of its rows, and scores of a block.
struct Work {
  Scratch<float> query, out, scores, highest, sums;
};

// One sequence and one head of its keys.
struct Task {
  Index sequence, head;
};

// Scores of a block's first `keys` keys for one row; `padded` of them are written.
template <class K>
inline void score(const float* query, const K* keys, Index dim, Index count, float* scores) {
  for (Index j = 0; j < count; ++j) {
    Floats sum = {};
    const K* key = keys + j * dim;
    for (Index d = 0; d < dim; d += LANES) sum += load(query + d) * load(key + d);
    scores[j] = total(sum);
  }
}

// Brings a row's maximum, sum and output up to date with a block of scores.
template <class K>
inline void gather(float* scores, const K* values, Index dim, Index count, Index padded,
                   float& highest, float& sum, float* out) {
  float top = highest;
  for (Index j = 0; j < count; ++j) top = larger(top, scores[j]);
  if (top == LOWEST) return;  // nothing of the block is seen
  if (top > highest) {
    float factor = 0;
    if (highest != LOWEST) factor = exponential(Floats{} + (highest - top))[0];
    sum *= factor;
    for (Index d = 0; d < dim; d += LANES) store(out + d, load(out + d) * factor);
    highest = top;
  }
  for (Index j = count; j < padded; ++j) scores[j] = LOWEST;
  Floats sums = {};
  for (Index j = 0; j < padded; j += LANES) {
    const Floats weight = exponential(load(scores + j) - top);
    store(scores + j, weight);
    sums += weight;
  }
  sum += total(sums);
  for (Index j = 0; j < count; ++j) {
    const float weight = scores[j];
    const K* value = values + j * dim;
    for (Index d = 0; d < dim; d += LANES) store(out + d, load(out + d) + load(value + d) * weight);
  }
}

template <class Q, class K>
void run(const Attention& a, Task task, Work& s) {
  const Index group = a.heads / a.kv_heads, tokens = a.count[task.sequence];
  const Index rows = group * tokens, first = a.first[task.sequence], start = a.start[task.sequence];
  const Index padded = (a.size + LANES - 1) / LANES * LANES;
  s.query.resize(rows * a.dim);
  s.out.assign(rows * a.dim, 0.0f);
  s.scores.resize(padded);
  s.highest.assign(rows, LOWEST);
  s.sums.assign(rows, 0.0f);
  const Q* query = static_cast<const Q*>(a.query);
  for (Index r = 0; r < rows; ++r) {
    const Index head = task.head * group + r % group, token = first + r / group;
    const Q* from = query + head * a.head_stride + token * a.token_stride;
    for (Index d = 0; d < a.dim; ++d) s.query[r * a.dim + d] = number(from[d]) * a.scale;
  }
  const Index* places = a.places + first;
  const Index* table = a.blocks + a.table[task.sequence];
  const std::uint8_t* tree =
      a.tree[task.sequence] < 0 ? nullptr : a.trees + a.tree[task.sequence];
  Index from = 0;
  // Positions grow along a span or a path: the first token sees the furthest back.
  if (a.window > 0) from = larger<Index>(0, places[0] - a.window + 1);
  const Index stride = a.kv_heads * a.size * a.dim, length = start + tokens;
  for (Index begin = from / a.size * a.size; begin < length; begin += a.size) {
    const Index offset = table[begin / a.size] * stride + task.head * a.size * a.dim;
    const K* keys = static_cast<const K*>(a.keys) + offset;
    const K* values = static_cast<const K*>(a.values) + offset;
    for (Index r = 0; r < rows; ++r) {
      const Index token = r / group, place = places[token];
      // A chain sees up to itself; a tree all that is kept, and of the new ones what its mask says.
      const Index end = tree ? length : start + token + 1;
      const Index count = smaller(a.size, end - begin);
      if (count <= 0) continue;
      score(&s.query[r * a.dim], keys, a.dim, count, s.scores.data());
      const float slope = a.slopes ? a.slopes[task.head * group + r % group] : 0;
      const bool edge = begin + count > start || a.window > 0;
      if (slope != 0 || edge) {
        for (Index j = 0; j < count; ++j) {
          const Index kept = begin + j, fresh = kept - start;
          const Index theirs = fresh < 0 ? kept : places[fresh];
          s.scores[j] += slope * static_cast<float>(theirs - place);
          const bool hidden = (a.window > 0 && place - theirs >= a.window) ||
                              (tree && fresh >= 0 && !tree[token * tokens + fresh]);
          if (hidden) s.scores[j] = LOWEST;
        }
      }
      gather(s.scores.data(), values, a.dim, count, padded, s.highest[r], s.sums[r],
             &s.out[r * a.dim]);
    }
  }
  Q* out = static_cast<Q*>(a.out);
  for (Index r = 0; r < rows; ++r) {
    Q* to = out + ((first + r / group) * a.heads + task.head * group + r % group) * a.dim;
    for (Index d = 0; d < a.dim; ++d) put(to + d, s.out[r * a.dim + d] / s.sums[r]);
  }
}

void attend(const Attention& a) {
  const Index count = a.sequences * a.kv_heads;
#pragma omp parallel for schedule(dynamic, 4) if (count > 4)
  for (Index i = 0; i < count; ++i) {
    static thread_local Work work;
    const Task task{a.order[i / a.kv_heads], i % a.kv_heads};
    if (a.half_kept) {
      a.half ? run<std::uint16_t, std::uint16_t>(a, task, work)
             : run<float, std::uint16_t>(a, task, work);
    } else {
      a.half ? run<std::uint16_t, float>(a, task, work)
             : run<float, float>(a, task, work);
    }
  }
}

}  // namespace
}  // namespace gulliver::pages
