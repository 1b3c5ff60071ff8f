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
};

void read_rows(const Product& p, Rows& r) {
  r.width = (p.inputs + PAD - 1) / PAD * PAD;
  r.values.resize(r.width * p.rows);
  for (std::int64_t m = 0; m < p.rows; ++m) {
    float* to = &r.values[m * r.width];
    std::memcpy(to, p.x + m * p.inputs, p.inputs * 4);
    for (std::int64_t k = p.inputs; k < r.width; ++k) to[k] = 0.0f;
  }
}

// Quantises rows to bytes plus 128; what is not below the threshold, NaN too, is an outlier.
void quantise_row(const Product& p, Rows& r, std::int64_t m) {
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
    q[k] = static_cast<std::uint8_t>(whole - 0x4b400000 + 128);
  }
}

void quantise(const Product& p, Rows& r) {
  r.bytes.resize(r.width * p.rows);
  r.scale.resize(p.rows);
  r.outliers.resize(p.rows);
  r.outlier_index.resize(r.width * p.rows);
  r.outlier_value.resize(r.width * p.rows);
#pragma omp parallel for schedule(static) if (p.rows * p.inputs > ALONE)
  for (std::int64_t m = 0; m < p.rows; ++m) quantise_row(p, r, m);
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

inline float outlier_sum(const Outliers& out, const std::int8_t* weight) {
  float sum = 0.0f;
  for (std::int64_t o = 0; o < out.count; ++o) {
    sum += out.value[o] * static_cast<float>(weight[out.index[o]]);
  }
  return sum;
}

template <class V, int M>
inline void block(const Product& p, const Four& f, const Rows& r, std::int64_t first) {
  std::int32_t sums[M][OUTPUTS];
  integer_tile<V, M>(p, f, &r.bytes[first * r.width], r.width, sums);
  for (int m = 0; m < M; ++m) {
    const Outliers& out = r.outliers[first + m];
    for (std::int64_t j = 0; j < f.count; ++j) {
      const std::int64_t n = f.first + j;
      const float whole = static_cast<float>(sums[m][j] - 128 * p.sums[n]);
      float y = whole * (r.scale[first + m] * p.scale[n]);
      if (out.count > 0) y += outlier_sum(out, p.weight + n * p.inputs) * p.scale[n];
      p.out[(first + m) * p.outputs + n] = p.bias ? y + p.bias[n] : y;
    }
  }
}

// Runs `block` over all rows for each four outputs, in the threads that torch has.
template <class V>
void multiply(const Product& p) {
  static thread_local Rows scratch;
  Rows& r = scratch;
  read_rows(p, r);
  quantise(p, r);
#pragma omp parallel for schedule(static) if (p.outputs * p.inputs > ALONE)
  for (std::int64_t first = 0; first < p.outputs; first += OUTPUTS) {
    const Four f = four_at(p, first);
    std::int64_t m = 0;
    for (; m + V::ROWS <= p.rows; m += V::ROWS) block<V, V::ROWS>(p, f, r, m);
    for (; m + 2 <= p.rows; m += 2) block<V, 2>(p, f, r, m);
    if (m < p.rows) block<V, 1>(p, f, r, m);
  }
}

}  // namespace
}  // namespace gulliver::int8
