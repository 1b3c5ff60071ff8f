// The products, for any set of vector instructions `V`; included by a file for each of them.
//
// [Note: one pass over the weights] With few rows the time is that of reading the weights, so each
// thread takes a run of outputs, four at a time, and reads their weights once from memory and for
// further rows from the L1 cache. `ROWS x 4` sums stay in registers. The next four are prefetched:
// their rows are short, and the hardware's prefetcher begins anew with each.
//
// [Note: signs] `dpbusd` multiplies unsigned by signed bytes: activations are stored plus 128, and
// 128 times the sum of a weight's row is taken off again. Both are exact.

#include <cstring>

#include "scratch.hpp"

namespace gulliver::int8 {
namespace {

constexpr std::int64_t OUTPUTS = 4;
constexpr std::int64_t GROUP = 128;
constexpr std::int64_t PAD = 128;
constexpr float TINY = 1e-36f;
// Multiplications below which a second thread costs more than it does.
constexpr std::int64_t ALONE = 1 << 16;

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void store(const Product& p, std::int64_t index, float value) {
  if (!p.half) {
    static_cast<float*>(p.out)[index] = value;
    return;
  }
  const std::uint32_t bits = bits_of(value);
  // To the nearest, ties to even; a NaN stays one.
  const std::uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  static_cast<std::uint16_t*>(p.out)[index] =
      value != value ? 0x7fc0 : static_cast<std::uint16_t>(rounded >> 16);
}

// A row's elements that are multiplied as they are.
struct Outliers {
  std::int64_t count;
  std::int32_t* index;
  float* value;
};

struct Rows {
  std::int64_t width;          // inputs, padded
  Scratch<float> values;       // [rows, width]
  Scratch<std::uint8_t> bytes;
  Scratch<float> scale;
  Scratch<Outliers> outliers;
  Scratch<std::int32_t> outlier_index;  // [rows, width]; touched where there are outliers
  Scratch<float> outlier_value;
  Scratch<std::int32_t> offsets;  // int4: a vector for each group of a row
};

void read_rows(const Product& p, Rows& r) {
  r.width = (p.inputs + PAD - 1) / PAD * PAD;
  r.values.resize(r.width * p.rows);
  for (std::int64_t m = 0; m < p.rows; ++m) {
    float* to = &r.values[m * r.width];
    if (p.half) {
      const auto* from = static_cast<const std::uint16_t*>(p.x) + m * p.inputs;
      for (std::int64_t k = 0; k < p.inputs; ++k) {
        to[k] = float_of(static_cast<std::uint32_t>(from[k]) << 16);
      }
    } else {
      std::memcpy(to, static_cast<const float*>(p.x) + m * p.inputs, p.inputs * 4);
    }
    for (std::int64_t k = p.inputs; k < r.width; ++k) to[k] = 0.0f;
  }
}

// Quantises rows to bytes plus `zero`; what is not below the threshold, NaN too, is an outlier.
void quantise_row(const Product& p, Rows& r, std::int64_t m, std::int32_t zero) {
  float* x = &r.values[m * r.width];
  std::uint8_t* q = &r.bytes[m * r.width];
  // As integers the magnitudes have the order of the floats, and NaN is the largest.
  const auto limit = static_cast<std::int32_t>(bits_of(p.threshold));
  std::int32_t largest = 0, most = 0;
  for (std::int64_t k = 0; k < r.width; ++k) {
    std::int32_t magnitude;
    std::memcpy(&magnitude, x + k, 4);
    magnitude &= 0x7fffffff;
    most = larger(most, magnitude);
    largest = larger(largest, magnitude < limit ? magnitude : 0);
  }
  Outliers& out = r.outliers[m];
  out = {0, &r.outlier_index[m * r.width], &r.outlier_value[m * r.width]};
  if (most >= limit) {
    for (std::int64_t k = 0; k < p.inputs; ++k) {
      if (!(__builtin_fabsf(x[k]) < p.threshold)) {
        out.index[out.count] = static_cast<std::int32_t>(k);
        out.value[out.count++] = x[k];
        x[k] = 0.0f;
      }
    }
  }
  const float above = p.largest ? p.largest[m] : float_of(static_cast<std::uint32_t>(largest));
  const float inverse = above > TINY ? 127.0f / above : 0.0f;
  r.scale[m] = above / 127.0f;
  constexpr float MAGIC = 12582912.0f;  // adding it rounds to a whole number, ties to even
  for (std::int64_t k = 0; k < r.width; ++k) {
    const float shifted = x[k] * inverse + MAGIC;
    std::int32_t whole;
    std::memcpy(&whole, &shifted, 4);
    q[k] = static_cast<std::uint8_t>(whole - 0x4b400000 + zero);
  }
}

void quantise(const Product& p, Rows& r, std::int32_t zero) {
  r.bytes.resize(r.width * p.rows);
  r.scale.resize(p.rows);
  r.outliers.resize(p.rows);
  r.outlier_index.resize(r.width * p.rows);
  r.outlier_value.resize(r.width * p.rows);
#pragma omp parallel for schedule(static) if (p.rows * p.inputs > ALONE)
  for (std::int64_t m = 0; m < p.rows; ++m) quantise_row(p, r, m, zero);
}

// Four outputs' weights; past the last one its own again, not stored.
struct Four {
  std::int64_t first, count, row[OUTPUTS];
};

inline Four four_at(const Product& p, std::int64_t first) {
  Four f{first, smaller(OUTPUTS, p.outputs - first), {}};
  for (std::int64_t j = 0; j < OUTPUTS; ++j) f.row[j] = smaller(first + j, p.outputs - 1);
  return f;
}

// Sums of [M rows] x [4 outputs], of which row m is at x + m * width.
template <class V, int M>
inline void integer_tile(const Product& p, const Four& f, const std::uint8_t* x,
                         std::int64_t width, std::int32_t sums[M][OUTPUTS]) {
  const std::int8_t* w[OUTPUTS];
  for (int j = 0; j < OUTPUTS; ++j) w[j] = p.weight + f.row[j] * p.inputs;
  const std::int64_t ahead = OUTPUTS * p.inputs;
  typename V::Int acc[M][OUTPUTS];
  for (int m = 0; m < M; ++m) {
    for (int j = 0; j < OUTPUTS; ++j) acc[m][j] = V::zero();
  }
  std::int64_t k = 0;
  for (; k + V::BYTES <= p.inputs; k += V::BYTES) {
    typename V::Int v[OUTPUTS];
    for (int j = 0; j < OUTPUTS; ++j) {
      v[j] = V::load(w[j] + k);
      __builtin_prefetch(w[j] + k + ahead);
    }
    for (int m = 0; m < M; ++m) {
      const auto own = V::load(x + m * width + k);
      for (int j = 0; j < OUTPUTS; ++j) acc[m][j] = V::dot(acc[m][j], own, v[j]);
    }
  }
  if (k < p.inputs) {
    for (int j = 0; j < OUTPUTS; ++j) {
      const auto v = V::load_some(w[j] + k, p.inputs - k);
      for (int m = 0; m < M; ++m) acc[m][j] = V::dot(acc[m][j], V::load(x + m * width + k), v);
    }
  }
  for (int m = 0; m < M; ++m) V::totals(acc[m], sums[m]);
}

template <class V, int M>
inline void float_tile(const Product& p, const Four& f, const float* x, std::int64_t width,
                       float sums[M][OUTPUTS]) {
  const std::int8_t* w[OUTPUTS];
  for (int j = 0; j < OUTPUTS; ++j) w[j] = p.weight + f.row[j] * p.inputs;
  const std::int64_t ahead = OUTPUTS * p.inputs;
  typename V::Float acc[M][OUTPUTS];
  for (int m = 0; m < M; ++m) {
    for (int j = 0; j < OUTPUTS; ++j) acc[m][j] = V::float_zero();
  }
  std::int64_t k = 0;
  for (; k + V::FLOATS <= p.inputs; k += V::FLOATS) {
    for (int j = 0; j < OUTPUTS; ++j) {
      const auto v = V::widened(w[j] + k);
      __builtin_prefetch(w[j] + k + ahead);
      for (int m = 0; m < M; ++m) {
        acc[m][j] = V::add_product(acc[m][j], V::float_load(x + m * width + k), v);
      }
    }
  }
  if (k < p.inputs) {
    std::int8_t rest[OUTPUTS][64] = {};
    for (int j = 0; j < OUTPUTS; ++j) {
      std::memcpy(rest[j], w[j] + k, p.inputs - k);
      for (int m = 0; m < M; ++m) {
        const auto own = V::float_load(x + m * width + k);
        acc[m][j] = V::add_product(acc[m][j], own, V::widened(rest[j]));
      }
    }
  }
  for (int m = 0; m < M; ++m) V::float_totals(acc[m], sums[m]);
}

inline float outlier_sum(const Outliers& out, const std::int8_t* weight) {
  float sum = 0.0f;
  for (std::int64_t o = 0; o < out.count; ++o) {
    sum += out.value[o] * static_cast<float>(weight[out.index[o]]);
  }
  return sum;
}

template <class V, int M>
inline void dynamic_block(const Product& p, const Four& f, const Rows& r, std::int64_t first) {
  std::int32_t sums[M][OUTPUTS];
  integer_tile<V, M>(p, f, &r.bytes[first * r.width], r.width, sums);
  for (int m = 0; m < M; ++m) {
    const Outliers& out = r.outliers[first + m];
    for (std::int64_t j = 0; j < f.count; ++j) {
      const std::int64_t n = f.first + j;
      const float whole = static_cast<float>(sums[m][j] - 128 * p.sums[n]);
      float y = whole * (r.scale[first + m] * p.scale[n]);
      if (out.count > 0) y += outlier_sum(out, p.weight + n * p.inputs) * p.scale[n];
      store(p, (first + m) * p.outputs + n, p.bias ? y + p.bias[n] : y);
    }
  }
}

template <class V, int M>
inline void weights_block(const Product& p, const Four& f, const Rows& r, std::int64_t first) {
  float sums[M][OUTPUTS];
  float_tile<V, M>(p, f, &r.values[first * r.width], r.width, sums);
  for (int m = 0; m < M; ++m) {
    for (std::int64_t j = 0; j < f.count; ++j) {
      const std::int64_t n = f.first + j;
      const float y = sums[m][j] * p.scale[n];
      store(p, (first + m) * p.outputs + n, p.bias ? y + p.bias[n] : y);
    }
  }
}

// Runs `block<M>` over all rows for each four outputs, in the threads that torch has.
#define GULLIVER_OVER_OUTPUTS(BLOCK)                                                            \
  _Pragma("omp parallel for schedule(static) if (p.outputs * p.inputs > ALONE)") for (          \
      std::int64_t first = 0; first < p.outputs; first += OUTPUTS) {                            \
    const Four f = four_at(p, first);                                                           \
    std::int64_t m = 0;                                                                         \
    for (; m + V::ROWS <= p.rows; m += V::ROWS) BLOCK<V, V::ROWS>(p, f, r, m);                  \
    for (; m + 2 <= p.rows; m += 2) BLOCK<V, 2>(p, f, r, m);                                    \
    if (m < p.rows) BLOCK<V, 1>(p, f, r, m);                                                    \
  }

template <class V>
void dynamic(const Product& p) {
  static thread_local Rows scratch;
  Rows& r = scratch;
  read_rows(p, r);
  quantise(p, r, 128);
  GULLIVER_OVER_OUTPUTS(dynamic_block)
}

template <class V>
void weights(const Product& p) {
  static thread_local Rows scratch;
  Rows& r = scratch;
  read_rows(p, r);
  GULLIVER_OVER_OUTPUTS(weights_block)
}

// [Note: int4] 128 values of a row lie in 64 bytes: byte i has value i below and value 64 + i
// above, each plus 8. As they are unsigned the activations may stay signed, and what the 8 adds,
// 8 times the sum of the group's activations, is where the group's sum begins.
template <class V>
void group_offsets(const Product& p, Rows& r) {
  const std::int64_t groups = r.width / GROUP;
  r.offsets.resize(p.rows * groups * V::FLOATS);
  for (std::int64_t g = 0; g < p.rows * groups; ++g) {
    V::store(V::minus_eights(&r.bytes[g * GROUP]), &r.offsets[g * V::FLOATS]);
  }
}

inline float nibble(const std::int8_t* row, std::int64_t k) {
  const auto byte = static_cast<std::uint8_t>(row[k / GROUP * 64 + k % 64]);
  return static_cast<float>((k % GROUP < 64 ? byte & 15 : byte >> 4) - 8);
}

inline float outlier_nibbles(const Product& p, const Outliers& out, std::int64_t n) {
  const std::int64_t groups = p.inputs / GROUP;
  float sum = 0.0f;
  for (std::int64_t o = 0; o < out.count; ++o) {
    const std::int64_t k = out.index[o];
    sum += out.value[o] * (nibble(p.weight + n * groups * 64, k) * p.scale[n * groups + k / GROUP]);
  }
  return sum;
}

template <class V, int M>
inline void nibbles_block(const Product& p, const Four& f, const Rows& r, std::int64_t first) {
  const std::int64_t groups = p.inputs / GROUP;
  typename V::Float acc[M][OUTPUTS];
  for (int m = 0; m < M; ++m) {
    for (int j = 0; j < OUTPUTS; ++j) acc[m][j] = V::float_zero();
  }
  for (std::int64_t g = 0; g < groups; ++g) {
    for (int j = 0; j < OUTPUTS; ++j) {
      const std::int8_t* at = p.weight + (f.row[j] * groups + g) * 64;
      __builtin_prefetch(at + OUTPUTS * groups * 64);
      const auto scale = V::all(p.scale[f.row[j] * groups + g]);
      for (int m = 0; m < M; ++m) {
        const std::int64_t at_x = (first + m) * groups + g;
        const auto begun = V::load(&r.offsets[at_x * V::FLOATS]);
        const auto sum = V::nibbles(begun, at, &r.bytes[at_x * GROUP]);
        acc[m][j] = V::add_product(acc[m][j], V::floats(sum), scale);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    float sums[OUTPUTS];
    V::float_totals(acc[m], sums);
    const Outliers& out = r.outliers[first + m];
    for (std::int64_t j = 0; j < f.count; ++j) {
      const std::int64_t n = f.first + j;
      float y = sums[j] * r.scale[first + m];
      if (out.count > 0) y += outlier_nibbles(p, out, n);
      store(p, (first + m) * p.outputs + n, p.bias ? y + p.bias[n] : y);
    }
  }
}

template <class V>
void nibbles(const Product& p) {
  static thread_local Rows scratch;
  Rows& r = scratch;
  read_rows(p, r);
  quantise(p, r, 0);
  group_offsets<V>(p, r);
  GULLIVER_OVER_OUTPUTS(nibbles_block)
}

}  // namespace
}  // namespace gulliver::int8
