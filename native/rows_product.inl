// The product, for vector instructions `V`; included by a file for each of them.
//
// [Note: one pass over the weights] With few rows the time is that of reading the weights. Rows of
// weights lie as torch has them, along the inputs, so that a sum runs along both operands and its
// lanes are added at the end: nothing is packed before, and no second copy of the weights is kept.
// A thread takes four outputs at a time, reads their weights from memory once, and from the cache
// for further rows. `V::ROWS x 4` sums stay in registers. The next four are prefetched: their rows
// are short, and the hardware's prefetcher begins anew with each.

#include "scratch.hpp"

namespace gulliver::rows {
namespace {

constexpr Index OUTPUTS = 4;
// Multiplications below which a second thread costs more than it does.
constexpr Index ALONE = 1 << 16;

// Sums of [M rows] x [4 outputs]; past the last output its own again, not stored.
template <class V, int M, bool AHEAD>
inline void tile(const Product& p, Index row, Index first) {
  const float* x = p.x + row * p.inputs;
  const float* w[OUTPUTS];
  for (Index j = 0; j < OUTPUTS; ++j) w[j] = p.weight + smaller(first + j, p.outputs - 1) * p.inputs;
  typename V::Float sums[M][OUTPUTS];
  for (int m = 0; m < M; ++m) {
    for (int j = 0; j < OUTPUTS; ++j) sums[m][j] = V::zero();
  }
  for (Index k = 0; k < p.inputs; k += V::FLOATS) {
    typename V::Float weights[OUTPUTS];
    for (int j = 0; j < OUTPUTS; ++j) {
      weights[j] = V::load(w[j] + k);
      if (AHEAD) __builtin_prefetch(w[j] + k + OUTPUTS * p.inputs);
    }
    for (int m = 0; m < M; ++m) {
      const typename V::Float value = V::load(x + m * p.inputs + k);
      for (int j = 0; j < OUTPUTS; ++j) sums[m][j] = V::add_product(sums[m][j], value, weights[j]);
    }
  }
  const Index count = smaller(OUTPUTS, p.outputs - first);
  for (int m = 0; m < M; ++m) {
    float totals[OUTPUTS];
    V::totals(sums[m], totals);
    float* out = p.out + (row + m) * p.outputs + first;
    for (Index j = 0; j < count; ++j) out[j] = totals[j] + (p.bias ? p.bias[first + j] : 0.0f);
  }
}

template <class V, int M>
inline void some(const Product& p, Index count, Index row, Index first) {
  if constexpr (M > 0) {
    if (count == M) {
      row == 0 ? tile<V, M, true>(p, row, first) : tile<V, M, false>(p, row, first);
    } else {
      some<V, M - 1>(p, count, row, first);
    }
  }
}

template <class V>
void multiply(const Product& p) {
  const Index groups = (p.outputs + OUTPUTS - 1) / OUTPUTS;
#pragma omp parallel for schedule(static) if (p.rows * p.inputs * p.outputs > ALONE)
  for (Index group = 0; group < groups; ++group) {
    for (Index row = 0; row < p.rows; row += V::ROWS) {
      some<V, V::ROWS>(p, smaller<Index>(V::ROWS, p.rows - row), row, group * OUTPUTS);
    }
  }
}

}  // namespace
}  // namespace gulliver::rows
