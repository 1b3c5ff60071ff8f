// The forward, for vectors of `BYTES` bytes; included by a file for each set of instructions.
//
// [Note: one team for a step] A step has eight phases in each layer, and between two of them the
// threads wait for each other. A parallel region for each phase costs some 5 us, more than many of
// them take; a barrier that spins costs 0.3. So a step is one parallel region of torch's threads.
//
// [Note: products] Up to `ROWS` rows take as long as reading the weights: outputs are dot products,
// four at a time, and lanes are added at the end. The four lie far apart, so that each is one of four
// sequential streams: the processor prefetches those well, but not four neighbouring rows of which
// each goes on behind the next. With AVX-512 twice as many take narrow weights again from the L1
// cache; with float32 that is no faster. With more rows products take the time.
// Rows are then transposed into tiles, so that a vector has one input of several rows, and is
// multiplied with a number of each weight row in turn: sums stay in registers and no lanes are added.
// Weights lie as torch has them. A panel of them is widened (or copied, if they are float32) into the
// L2 cache for all tiles, while products prefetch the next panel.
#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <cstring>

#include "scratch.hpp"

namespace gulliver::decoder {
namespace {

constexpr Index LANES = BYTES / 4;
constexpr Index OUTPUTS = 4;
constexpr Index UNIT = 16;   // outputs that threads are given at a time
constexpr Index GROUP = 32;  // values of INT4 that have a scale and a minimum
constexpr Index ROWS = BYTES == 64 ? 6 : 3;
constexpr Index WIDE = 2 * LANES;  // rows of a tile
constexpr Index TALL = 12;         // outputs that one vector of rows is multiplied with at a time
constexpr Index SHORT = BYTES == 64 ? 12 : 6;  // ... two vectors
constexpr Index PANEL = 48, DEPTH = 256;  // outputs and inputs that are taken at a time
constexpr Index PITCH = DEPTH + 16;       // of widened ones: rows do not share sets of the cache
constexpr float LOWEST = -__builtin_inff();
constexpr Index ALONE = 1 << 16;  // multiplications below which a second thread costs more

struct Half { std::uint16_t bits; };
struct Brain { std::uint16_t bits; };

#if BYTES == 64
using Floats = __m512;
inline Floats all(float v) { return _mm512_set1_ps(v); }
inline Floats load(const float* at) { return _mm512_loadu_ps(at); }
inline Floats load(const Half* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
inline Floats load(const Brain* at) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Floats load(const std::int8_t* at) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
inline void store(float* at, Floats v) { _mm512_storeu_ps(at, v); }
inline void store(Half* at, Floats v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtps_ph(v, 0));
}
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats power_of_two(Floats n) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline Floats unless_below(Floats x, float least, Floats value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(least), _CMP_NLT_UQ), value);
}
inline __m256 folded(Floats v) {
  return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}
inline __m256 folded_maximum(Floats v) {
  return _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}
#else
using Floats = __m256;
inline Floats all(float v) { return _mm256_set1_ps(v); }
inline Floats load(const float* at) { return _mm256_loadu_ps(at); }
inline Floats load(const Half* at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
inline Floats load(const Brain* at) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Floats load(const std::int8_t* at) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
inline void store(float* at, Floats v) { _mm256_storeu_ps(at, v); }
inline void store(Half* at, Floats v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_cvtps_ph(v, 0));
}
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats minimum(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats power_of_two(Floats n) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Floats unless_below(Floats x, float least, Floats value) {
  return _mm256_and_ps(_mm256_cmp_ps(x, all(least), _CMP_NLT_UQ), value);
}
inline __m256 folded(Floats v) { return v; }
inline __m256 folded_maximum(Floats v) { return v; }
#endif

inline void store(Brain* at, Floats v) {
  float values[LANES];
  store(values, v);
  for (Index i = 0; i < LANES; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, values + i, 4);
    // To the nearest, ties to even; a NaN stays one.
    const bool nan = values[i] != values[i];
    at[i].bits = nan ? 0x7fc0 : static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

inline void totals(const Floats a[4], float* to) {
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(folded(a[0]), folded(a[1])),
                                     _mm256_hadd_ps(folded(a[2]), folded(a[3])));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}

inline float greatest(Floats v) {
  const __m256 eight = folded_maximum(v);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

inline float total(Floats v) {
  const __m256 eight = folded(v);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// e^x to 1e-7 of the value: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; 0 below -87.
inline Floats exponential(Floats x) {
  // In this order a NaN stays one.
  const Floats kept = minimum(all(88.0f), maximum(all(-87.33f), x));
  const Floats magic = all(12582912.0f);  // rounds to the nearest whole number
  const Floats n = fma(kept, all(1.44269504f), magic) - magic;
  const Floats r = fma(n, all(-1.42860677e-6f), fma(n, all(-0.693145752f), kept));
  Floats p = all(1.98756915e-4f);
  p = fma(p, r, all(1.39819995e-3f));
  p = fma(p, r, all(8.33345190e-3f));
  p = fma(p, r, all(4.16657960e-2f));
  p = fma(p, r, all(1.66666655e-1f));
  p = fma(p, r, all(0.5f));
  p = fma(p * r, r, r + all(1.0f));
  return unless_below(x, -87.33f, p * power_of_two(n));
}

// Threads.

struct Member {
  Index rank, threads;
  Team& team;
  float* panel;  // widened weights of this thread

  // [begin, end) of `count` that is this thread's, in whole units.
  void share(Index count, Index unit, Index& begin, Index& end) const {
    const Index units = (count + unit - 1) / unit;
    begin = smaller(count, units * rank / threads * unit);
    end = smaller(count, units * (rank + 1) / threads * unit);
  }

  void wait() const {
    if (threads == 1) return;
    const Index phase = __atomic_load_n(&team.phase, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team.arrived, 1, __ATOMIC_ACQ_REL) == threads) {
      __atomic_store_n(&team.arrived, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&team.phase, phase + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int spins = 0; __atomic_load_n(&team.phase, __ATOMIC_ACQUIRE) == phase; ++spins) {
      _mm_pause();
      // Another program may have the core that is waited for.
      if (spins > 2000) sched_yield();
    }
  }
};

// Products.

// Sums of [M rows] x [4 outputs].
template <int M, class W>
inline void tile(const float* x, Index stride, const W* const w[OUTPUTS], Index inputs,
                 float sums[M][OUTPUTS]) {
  constexpr Index STEP = 4 * LANES;
  Floats acc[M][OUTPUTS];
  for (int m = 0; m < M; ++m) {
    for (int j = 0; j < OUTPUTS; ++j) acc[m][j] = all(0.0f);
  }
  const auto part = [&](Index k) __attribute__((always_inline)) {
    Floats values[M];
    for (int m = 0; m < M; ++m) values[m] = load(x + m * stride + k);
    for (int j = 0; j < OUTPUTS; ++j) {
      const Floats weight = load(w[j] + k);
      for (int m = 0; m < M; ++m) acc[m][j] = fma(values[m], weight, acc[m][j]);
    }
  };
  Index k = 0;
  for (; k + STEP <= inputs; k += STEP) {
#pragma GCC unroll 4
    for (Index i = 0; i < STEP; i += LANES) part(k + i);
  }
  for (; k < inputs; k += LANES) part(k);
  for (int m = 0; m < M; ++m) totals(acc[m], sums[m]);
}

template <int M, class W>
inline void some(Index rows, const float* x, Index stride, const W* const w[OUTPUTS], Index inputs,
                 float sums[ROWS][OUTPUTS]) {
  if constexpr (M > 0) {
    if (rows == M) {
      tile<M, W>(x, stride, w, inputs, sums);
    } else {
      some<M - 1, W>(rows, x, stride, w, inputs, sums);
    }
  }
}

template <class W>
inline void widen(const W* from, Index count, float* to) {
  for (Index k = 0; k < count; k += LANES) store(to + k, load(from + k));
}

// [Note: int4] 32 values of a row lie in 16 bytes: byte i has value i below and value 16 + i above.
// A value v stands for v * scale + minimum of its group, a pair of float16.
constexpr Index PARTS = GROUP / LANES;

#if BYTES == 64
inline void split(const std::uint8_t* from, Floats to[PARTS]) {
  const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  to[0] = _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15)));
  to[1] = _mm512_cvtepi32_ps(_mm512_srli_epi32(both, 4));
}
#else
inline void split(const std::uint8_t* from, Floats to[PARTS]) {
  for (Index i = 0; i < 2; ++i) {
    const auto* at = reinterpret_cast<const __m128i*>(from + i * LANES);
    const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64(at));
    to[i] = _mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(15)));
    to[i + 2] = _mm256_cvtepi32_ps(_mm256_srli_epi32(both, 4));
  }
}
#endif

inline void widen_groups(const std::uint8_t* from, const Half* pairs, Index count, float* to) {
  for (Index k = 0; k < count; k += GROUP, from += GROUP / 2, pairs += 2, to += GROUP) {
    std::int32_t bits;
    std::memcpy(&bits, pairs, 4);
    const __m128 pair = _mm_cvtph_ps(_mm_cvtsi32_si128(bits));
    const Floats scale = all(pair[0]), least = all(pair[1]);
    Floats values[PARTS];
    split(from, values);
    for (Index i = 0; i < PARTS; ++i) store(to + i * LANES, fma(values[i], scale, least));
  }
}

inline const Half* pairs_of(const Matrix& w, Index row) {
  return static_cast<const Half*>(w.scale) + row * w.inputs / GROUP * 2;
}

inline Index row_bytes(const Matrix& w) {
  return w.kind == FLOAT32 ? w.inputs * 4 : w.kind <= BFLOAT16 ? w.inputs * 2
         : w.kind == INT4 ? w.inputs / 2 : w.inputs;
}

// Inputs [first, first + count) of a row as floats; INT8 without its scale.
inline void widen_row(const Matrix& w, Index row, Index first, Index count, float* to) {
  const auto* at = static_cast<const std::uint8_t*>(w.data) + row * row_bytes(w);
  switch (w.kind) {
    case FLOAT32: return widen(reinterpret_cast<const float*>(at) + first, count, to);
    case FLOAT16: return widen(reinterpret_cast<const Half*>(at) + first, count, to);
    case BFLOAT16: return widen(reinterpret_cast<const Brain*>(at) + first, count, to);
    case INT8: return widen(reinterpret_cast<const std::int8_t*>(at) + first, count, to);
    default:
      widen_groups(at + first / 2, pairs_of(w, row) + first / GROUP * 2, count, to);
  }
}

#if PAIRS
inline bool takes_pairs(const Matrix& w) { return w.kind == BFLOAT16 && w.outputs >= TALL; }
#else
inline bool takes_pairs(const Matrix&) { return false; }
#endif

// Rows that are taken in tiles; outputs of the others are dot products. These are all rows if they
// are few, or a few after the last full vector, which would take as long as another vector. With
// more than so many, dot products are no faster; fewer where rows are rounded or groups scaled.
inline Index tiled_rows(const Matrix& w, Index rows) {
  const bool rounds = w.kind == INT8_ROUNDED || takes_pairs(w);
  const bool twice = BYTES == 64 && w.kind != FLOAT32 && !rounds;
  if (rows <= (twice ? 2 * ROWS : ROWS)) return 0;
  const Index rest = rows % LANES, most = rounds || w.kind == INT4 ? ROWS * 2 / 3 : ROWS;
  return rows > LANES && rest <= most ? rows - rest : rows;
}

inline float scale_of(const Matrix& w, Index output) {
  const bool scaled = w.kind == INT8 || w.kind == INT8_ROUNDED;
  return scaled ? static_cast<const float*>(w.scale)[output] : 1.0f;
}

// Where sums go: stored to, or added to, rows of [rows, width].
struct Into {
  float* out;
  Index width;
  bool add;
};

// Few rows of INT4, an output at a time: values are multiplied as they are, and a group's sum by its
// scale. Minima are multiplied with the sums of x in each group, [rows, pitch]: sum, 0, sum, 0, ...
template <int M>
inline void group_products(const Matrix& w, const float* x, Index begin, Index end, float* panel,
                           const Into& into) {
  const Index count = w.inputs / GROUP * 2, pitch = (count + LANES - 1) / LANES * LANES;
  float *pairs = panel, *sums = panel + pitch;
  for (Index i = 0; i < M * pitch; ++i) sums[i] = 0.0f;
  for (Index m = 0; m < M; ++m) {
    for (Index k = 0; k < w.inputs; ++k) sums[m * pitch + k / GROUP * 2 + 1] += x[m * w.inputs + k];
  }
  for (Index n = begin; n < end; ++n) {
    const auto* own = static_cast<const std::uint8_t*>(w.data) + n * w.inputs / 2;
    const Half* given = pairs_of(w, n);
    Floats acc[M];
    for (int m = 0; m < M; ++m) acc[m] = all(0.0f);
    for (Index i = 0; i < pitch; i += LANES) {
      Half rest[LANES] = {};
      if (count - i < LANES) std::memcpy(rest, given + i, (count - i) * sizeof(Half));
      const Floats both = load(count - i < LANES ? rest : given + i);
      store(pairs + i, both);
      for (int m = 0; m < M; ++m) acc[m] = fma(both, load(sums + m * pitch + i), acc[m]);
    }
    for (Index k = 0; k < w.inputs; k += GROUP) {
      Floats values[PARTS];
      split(own + k / 2, values);
      const Floats scale = all(pairs[k / GROUP * 2]);
      for (int m = 0; m < M; ++m) {
        const float* row = x + m * w.inputs + k;
        Floats sum = values[0] * load(row);
        for (Index i = 1; i < PARTS; ++i) sum = fma(values[i], load(row + i * LANES), sum);
        acc[m] = fma(sum, scale, acc[m]);
      }
    }
    for (int m = 0; m < M; ++m) {
      float* to = into.out + m * into.width + n;
      *to = (into.add ? *to : 0.0f) + total(acc[m]) + (w.bias ? w.bias[n] : 0.0f);
    }
  }
}

template <int M>
inline void some_groups(Index rows, const Matrix& w, const float* x, Index begin, Index end,
                        float* panel, const Into& into) {
  if constexpr (M > 0) {
    if (rows == M) {
      group_products<M>(w, x, begin, end, panel, into);
    } else {
      some_groups<M - 1>(rows, w, x, begin, end, panel, into);
    }
  }
}

// Few rows: each output is a dot product.
template <class W>
inline void dot_products(const Matrix& w, const float* x, Index rows, Index begin, Index end,
                         const Into& into) {
  const Index part = (end - begin + OUTPUTS - 1) / OUTPUTS;
  for (Index n = begin; n < begin + part; ++n) {
    const W* own[OUTPUTS];
    float sums[ROWS][OUTPUTS];
    for (Index j = 0; j < OUTPUTS; ++j) {
      own[j] = static_cast<const W*>(w.data) + smaller(n + j * part, end - 1) * w.inputs;
    }
    for (Index first = 0; first < rows; first += ROWS) {
      const Index count = smaller(ROWS, rows - first);
      some<ROWS, W>(count, x + first * w.inputs, w.inputs, own, w.inputs, sums);
      for (Index j = 0; j < OUTPUTS && n + j * part < end; ++j) {
        const Index output = n + j * part;
        const float scale = scale_of(w, output);
        const float bias = w.bias ? w.bias[output] : 0.0f;
        for (Index r = 0; r < count; ++r) {
          float* to = into.out + (first + r) * into.width + output;
          *to = (into.add ? *to : 0.0f) + sums[r][j] * scale + bias;
        }
      }
    }
  }
}

inline void transpose(__m256 a[8]) {
  __m256 b[8], c[8];
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int h = 0; h < 2; ++h) {
      c[i + 2 * h] = _mm256_shuffle_ps(b[i + h], b[i + h + 2], 0x44);
      c[i + 2 * h + 1] = _mm256_shuffle_ps(b[i + h], b[i + h + 2], 0xee);
    }
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm256_permute2f128_ps(c[i], c[i + 4], 0x20);
    a[i + 4] = _mm256_permute2f128_ps(c[i], c[i + 4], 0x31);
  }
}

// Rows that the tile at `row` has: two vectors, or one at the end.
inline Index tile_rows(Index rows, Index row) { return rows - row > LANES ? WIDE : LANES; }

// Writes rows as tiles [inputs, rows of a tile], padded with zeros; threads share the inputs.
inline void make_tiles(const float* x, Index rows, Index inputs, float* tiles, const Member& me) {
  Index begin, end;
  me.share(inputs, UNIT, begin, end);
  for (Index row = 0; row < rows; row += WIDE) {
    const Index height = tile_rows(rows, row);
    float* tile = tiles + row * inputs;
    for (Index k = begin; k < end; k += 8) {
      for (Index r = 0; r < height; r += 8) {
        __m256 part[8];
        for (Index i = 0; i < 8; ++i) {
          const Index from = row + r + i;
          part[i] = from < rows ? _mm256_loadu_ps(x + from * inputs + k) : _mm256_setzero_ps();
        }
        transpose(part);
        for (Index i = 0; i < 8; ++i) _mm256_storeu_ps(tile + (k + i) * height + r, part[i]);
      }
    }
  }
}

// What `outer` prefetches: N rows, one line for every so many inputs; null for nothing.
struct Ahead {
  const char* at;
  Index pitch, every;
};

// Sums [N outputs, V vectors of rows] of weights [N, pitch] and a tile.
template <int V, int N>
inline void outer(const float* x, const float* w, Index pitch, Index inputs, Ahead ahead,
                  float* sums) {
  const float* third[N / 3];
  for (int j = 0; j < N / 3; ++j) third[j] = w + 3 * j * pitch;
  Floats acc[N][V];
  for (int j = 0; j < N; ++j) {
    for (int v = 0; v < V; ++v) acc[j][v] = all(0.0f);
  }
  for (Index k = 0; k < inputs; k += 16) {
    if (ahead.at && k % ahead.every == 0) {
      for (int j = 0; j < N; ++j) __builtin_prefetch(ahead.at + j * ahead.pitch, 0, 2);
      ahead.at += 64;
    }
#pragma GCC unroll 4
    for (Index i = k; i < k + 16; ++i) {
      Floats values[V];
      for (int v = 0; v < V; ++v) values[v] = load(x + (i * V + v) * LANES);
      for (int j = 0; j < N; ++j) {
        const Floats weight = all(third[j / 3][j % 3 * pitch + i]);
        for (int v = 0; v < V; ++v) acc[j][v] = fma(values[v], weight, acc[j][v]);
      }
    }
  }
  for (int j = 0; j < N; ++j) {
    for (int v = 0; v < V; ++v) store(sums + (j * V + v) * LANES, acc[j][v]);
  }
}

// Takes sums [count outputs, height] of some rows to their place, in rows.
inline void put(const Matrix& w, const float* sums, Index height, Index first, Index rows, Index n,
                Index count, bool bias, const Into& into) {
  for (Index j = 0; j < count; j += 8) {
    const Index wide = smaller<Index>(8, count - j);
    float scales[8], biases[8];
    for (Index i = 0; i < wide; ++i) {
      scales[i] = scale_of(w, n + j + i);
      biases[i] = bias && w.bias ? w.bias[n + j + i] : 0.0f;
    }
    for (Index r = 0; r < rows; r += 8) {
      __m256 part[8];
      for (Index i = 0; i < 8; ++i) part[i] = _mm256_loadu_ps(sums + (j + i) * height + r);
      transpose(part);
      for (Index i = 0; i < smaller<Index>(8, rows - r); ++i) {
        const __m256 sum = _mm256_fmadd_ps(part[i], _mm256_loadu_ps(scales), _mm256_loadu_ps(biases));
        float* to = into.out + (first + r + i) * into.width + n + j;
        if (wide == 8) {
          _mm256_storeu_ps(to, into.add ? sum + _mm256_loadu_ps(to) : sum);
        } else {
          for (Index l = 0; l < wide; ++l) to[l] = into.add ? to[l] + sum[l] : sum[l];
        }
      }
    }
  }
}

// Many rows, in tiles. `rest` is called for the outputs whose weights are in the cache.
template <class Rest>
inline void outer_products(const Matrix& w, const float* tiles, Index rows, Index begin, Index end,
                           float* panel, const Rest& rest, Into into) {
  const Index bytes = row_bytes(w), every = 64 * w.inputs / bytes;
  const Index unit = w.kind == INT4 ? GROUP : 16, parts = (w.inputs + DEPTH - 1) / DEPTH;
  const bool add = into.add, one = rows <= LANES;
  for (Index n = begin, k = 0; n < end;) {
    const Index count = smaller(PANEL, end - n);
    // Float32 weights are read where they are, unless their rows would share sets of the cache; for
    // one narrow tile whole rows, one after another.
    const bool direct = w.kind == FLOAT32 && count % TALL == 0 && w.inputs % 1024 != 0;
    const bool whole = direct && one;
    const Index most = whole ? w.inputs : (w.inputs / unit + parts - 1) / parts * unit;
    const Index depth = smaller(most, w.inputs - k);
    const Index pitch = direct ? w.inputs : PITCH;
    const float* weights = direct ? static_cast<const float*>(w.data) + n * pitch + k : panel;
    for (Index j = 0; !direct && j < PANEL && j < count + TALL - 1; ++j) {
      widen_row(w, smaller(n + j, end - 1), k, depth, panel + j * PITCH);
    }
    const Index next_k = k + depth < w.inputs ? k + depth : 0, next_n = next_k ? n : n + PANEL;
    const char* next = static_cast<const char*>(w.data) + next_n * bytes + next_k * bytes / w.inputs;
    into.add = add || k > 0;
    // The reads are spread over the tiles.
    const Index spread = smaller<Index>(PANEL / TALL, (rows + WIDE - 1) / WIDE);
    for (Index row = 0; row < rows; row += WIDE) {
      const Index height = tile_rows(rows, row);
      const float* x = tiles + row * w.inputs + k * height;
      float sums[PANEL * WIDE];
      for (Index j = 0; j < count; j += TALL) {
        const bool reads = next_n < end && row / WIDE == j / TALL % spread;
        const char* from = whole ? next - (PANEL - TALL) * bytes : next;
        const auto ahead = [&](Index of) {
          return Ahead{reads ? from + of * bytes : nullptr, bytes, every};
        };
        if (height == LANES) {
          outer<1, TALL>(x, weights + j * pitch, pitch, depth, ahead(j), sums + j * LANES);
        } else {
          for (Index i = j; i < j + TALL; i += SHORT) {
            outer<2, SHORT>(x, weights + i * pitch, pitch, depth, ahead(i), sums + i * WIDE);
          }
        }
      }
      put(w, sums, height, row, smaller(height, rows - row), n, count, k == 0, into);
    }
    if (next_n != n) rest(n, n + count);
    n = next_n;
    k = next_k;
  }
}

#if ROUNDS
// [Note: rounded rows] 32 inputs of a row have a scale and are rounded to signed bytes. `vpdpbusd`
// multiplies unsigned with signed bytes, so weights are taken plus 128 (a flipped sign bit), and 128
// times the sum of the group's bytes is taken off again; all of that is exact. A group's sum becomes
// a float and is multiplied with its scale.
//
// Few rows lie one after another, and outputs are dot products. Many lie in tiles of 16: a vector has
// 4 inputs of each row, and is multiplied with 4 weights of an output. Both are in `tiles`.
constexpr Index BYTE_GROUP = 32;
using Bytes = __m512i;

inline Bytes load_bytes(const void* at) { return _mm512_loadu_si512(at); }
inline Bytes flipped(Bytes v) { return _mm512_xor_si512(v, _mm512_set1_epi8(-128)); }

struct RoundedRows {
  std::int8_t* bytes;     // [rows, inputs], or [tiles, inputs / 4, 16, 4]
  float* scales;          // [rows, groups], or [tiles, groups, 16]
  std::int32_t* offsets;  // -128 times a group's sum; as scales

  RoundedRows(float* memory, Index rows, Index inputs)
      : bytes(reinterpret_cast<std::int8_t*>(memory)) {
    const Index padded = (rows + LANES - 1) / LANES * LANES;
    scales = memory + padded * inputs / 4;
    offsets = reinterpret_cast<std::int32_t*>(scales + padded * inputs / BYTE_GROUP);
  }
};

// Rounds a group to `to`; returns its scale, which is NaN if a value is not finite.
inline float round_group(const float* x, std::int8_t* to, std::int32_t& offset) {
  Floats most = all(0.0f), nothing = all(0.0f);
  for (Index i = 0; i < BYTE_GROUP; i += LANES) {
    most = maximum(most, _mm512_abs_ps(load(x + i)));
    nothing = fma(load(x + i), all(0.0f), nothing);
  }
  const float largest = greatest(most);
  const Floats inverse = all(largest > 1e-36f ? 127.0f / largest : 0.0f);
  Bytes sum = _mm512_setzero_si512();
  for (Index i = 0; i < BYTE_GROUP; i += LANES) {
    const Bytes whole = _mm512_cvtps_epi32(load(x + i) * inverse);
    sum = _mm512_add_epi32(sum, whole);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(whole));
  }
  offset = -128 * _mm512_reduce_add_epi32(sum);
  return largest / 127.0f + total(nothing);
}

// The rows after those in tiles.
inline RoundedRows rest_of(float* memory, Index tiled, Index rows, Index inputs) {
  return {memory + tiled * inputs / 4 + tiled * inputs / BYTE_GROUP * 2, rows - tiled, inputs};
}

inline void round_rows(const Matrix& w, const float* x, Index rows, float* memory, const Member& me) {
  const Index inputs = w.inputs, groups = inputs / BYTE_GROUP, tiled = tiled_rows(w, rows);
  const RoundedRows to(memory, tiled, inputs), rest = rest_of(memory, tiled, rows, inputs);
  Index begin, end;
  me.share(groups, 1, begin, end);
  for (Index r = 0; r < rows - tiled; ++r) {
    for (Index g = begin; g < end; ++g) {
      const Index at = r * inputs + g * BYTE_GROUP, own = r * groups + g;
      rest.scales[own] = round_group(x + tiled * inputs + at, rest.bytes + at, rest.offsets[own]);
    }
  }
  for (Index row = 0; row < tiled; row += LANES) {
    for (Index g = begin; g < end; ++g) {
      const Index own = row * groups + g * LANES;
      std::int8_t* tile = to.bytes + row * inputs + g * BYTE_GROUP * LANES;
      for (Index r = 0; r < LANES; ++r) {
        std::int8_t bytes[BYTE_GROUP] = {};
        to.scales[own + r] = 0.0f;
        to.offsets[own + r] = 0;
        if (row + r < tiled) {
          const float* from = x + (row + r) * inputs + g * BYTE_GROUP;
          to.scales[own + r] = round_group(from, bytes, to.offsets[own + r]);
        }
        for (Index i = 0; i < BYTE_GROUP; i += 4) {
          std::memcpy(tile + i * LANES + r * 4, bytes + i, 4);
        }
      }
    }
  }
}

template <int M>
inline void rounded_dots(const Matrix& w, const RoundedRows& x, Index begin, Index end,
                         const Into& into) {
  const Index groups = w.inputs / BYTE_GROUP;
  const auto* weights = static_cast<const std::int8_t*>(w.data);
  float offsets[M] = {};
  for (Index m = 0; m < M; ++m) {
    for (Index g = m * groups; g < (m + 1) * groups; ++g) {
      offsets[m] += static_cast<float>(x.offsets[g]) * x.scales[g];
    }
  }
  const Index part = (end - begin + OUTPUTS - 1) / OUTPUTS;
  for (Index n = begin; n < begin + part; ++n) {
    const std::int8_t* own[OUTPUTS];
    for (Index j = 0; j < OUTPUTS; ++j) own[j] = weights + smaller(n + j * part, end - 1) * w.inputs;
    Floats acc[M][OUTPUTS];
    for (int m = 0; m < M; ++m) {
      for (int j = 0; j < OUTPUTS; ++j) acc[m][j] = all(0.0f);
    }
    for (Index k = 0; k < w.inputs; k += 64) {
      Bytes weight[OUTPUTS];
      for (int j = 0; j < OUTPUTS; ++j) {
        weight[j] = flipped(load_bytes(own[j] + k));
      }
      for (int m = 0; m < M; ++m) {
        const Bytes values = load_bytes(x.bytes + m * w.inputs + k);
        const float* two = x.scales + m * groups + k / BYTE_GROUP;
        const Floats scale = _mm512_insertf32x8(all(two[0]), _mm256_set1_ps(two[1]), 1);
        for (int j = 0; j < OUTPUTS; ++j) {
          const Bytes sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), weight[j], values);
          acc[m][j] = fma(_mm512_cvtepi32_ps(sum), scale, acc[m][j]);
        }
      }
    }
    for (int m = 0; m < M; ++m) {
      float sums[OUTPUTS];
      totals(acc[m], sums);
      for (Index j = 0; j < OUTPUTS && n + j * part < end; ++j) {
        const Index output = n + j * part;
        float* to = into.out + m * into.width + output;
        const float bias = w.bias ? w.bias[output] : 0.0f;
        *to = (into.add ? *to : 0.0f) + (sums[j] + offsets[m]) * scale_of(w, output) + bias;
      }
    }
  }
}

template <int M>
inline void some_rounded(Index rows, const Matrix& w, const RoundedRows& x, Index begin, Index end,
                         const Into& into) {
  if constexpr (M > 0) {
    if (rows == M) {
      rounded_dots<M>(w, x, begin, end, into);
    } else {
      some_rounded<M - 1>(rows, w, x, begin, end, into);
    }
  }
}

// Sums [N outputs, V tiles of 16 rows], of which the first is at `row`.
template <int V, int N>
inline void rounded_outer(const RoundedRows& x, Index row, const std::int8_t* w, Index inputs,
                          const std::int8_t* next, float* sums) {
  const Index groups = inputs / BYTE_GROUP;
  const std::int8_t* third[N / 3];
  for (int j = 0; j < N / 3; ++j) third[j] = w + 3 * j * inputs;
  Floats all_groups[N][V];
  for (int j = 0; j < N; ++j) {
    for (int v = 0; v < V; ++v) all_groups[j][v] = all(0.0f);
  }
  for (Index g = 0; g < groups; ++g) {
    Bytes acc[N][V];
    for (int v = 0; v < V; ++v) {
      const Bytes offsets = load_bytes(x.offsets + (row + v * LANES) * groups + g * LANES);
      for (int j = 0; j < N; ++j) acc[j][v] = offsets;
    }
    for (int j = 0; next && g % 2 == 0 && j < N; ++j) {
      __builtin_prefetch(next + j * inputs + g * BYTE_GROUP, 0, 2);
    }
#pragma GCC unroll 4
    for (Index i = g * BYTE_GROUP; i < (g + 1) * BYTE_GROUP; i += 4) {
      Bytes values[V];
      for (int v = 0; v < V; ++v) {
        values[v] = load_bytes(x.bytes + (row + v * LANES) * inputs + i * LANES);
      }
      for (int j = 0; j < N; ++j) {
        std::int32_t four;
        std::memcpy(&four, third[j / 3] + j % 3 * inputs + i, 4);
        const Bytes weight = flipped(_mm512_set1_epi32(four));
        for (int v = 0; v < V; ++v) {
          acc[j][v] = _mm512_dpbusd_epi32(acc[j][v], weight, values[v]);
        }
      }
    }
    for (int v = 0; v < V; ++v) {
      const Floats scale = load(x.scales + (row + v * LANES) * groups + g * LANES);
      for (int j = 0; j < N; ++j) {
        all_groups[j][v] = fma(_mm512_cvtepi32_ps(acc[j][v]), scale, all_groups[j][v]);
      }
    }
  }
  for (int j = 0; j < N; ++j) {
    for (int v = 0; v < V; ++v) store(sums + (j * V + v) * LANES, all_groups[j][v]);
  }
}

struct RoundedOuter {
  const Matrix& w;
  RoundedRows x;

  template <int V, int N>
  void sum(Index row, Index first, bool ahead, float* sums) const {
    const std::int8_t* own = static_cast<const std::int8_t*>(w.data) + first * w.inputs;
    rounded_outer<V, N>(x, row, own, w.inputs, ahead ? own + PANEL * w.inputs : nullptr, sums);
  }
};

// Many rows, whose tiles `outer` has. Outputs [begin, end) of at least `TALL`; `rest` as above.
template <class Outer, class Rest>
inline void tiled_products(const Outer& outer, Index rows, Index begin, Index end,
                           const Rest& rest, const Into& into) {
  const Matrix& w = outer.w;
  for (Index panel = begin; panel < end; panel += PANEL) {
    for (Index row = 0; row < rows; row += WIDE) {
      const Index height = tile_rows(rows, row);
      for (Index n = panel; n < smaller(panel + PANEL, end); n += TALL) {
        // The last ones are computed with some before them, which are not stored.
        const Index first = smaller(n, w.outputs - TALL), skipped = n - first;
        const bool ahead = row == 0 && first + PANEL + TALL <= end;
        float sums[(2 * TALL + 8) * WIDE];
        if (height == LANES) {
          outer.template sum<1, TALL>(row, first, ahead, sums);
        } else {
          for (Index i = 0; i < TALL; i += SHORT / 2) {
            outer.template sum<2, SHORT / 2>(row, first + i, ahead, sums + i * WIDE);
          }
        }
        const Index count = smaller(smaller(TALL, end - n), panel + PANEL - n);
        put(w, sums + skipped * height, height, row, smaller(height, rows - row), n, count, true,
            into);
      }
    }
    rest(panel, smaller(panel + PANEL, end));
  }
}
#endif

#if PAIRS
// [Note: pairs] Rows for bfloat16 weights are rounded to bfloat16, as in torch, because `vdpbf16ps`
// multiplies twice as many of those. Tiles have 2 inputs of 16 rows in a vector. Few rows take as
// long as reading the weights, so they are multiplied in float32 after rounding.
using Brains = std::uint16_t;

inline __m256i rounded_brains(const float* from) {
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(load(from)));
}

inline void pair_rows(const Matrix& w, const float* x, Index rows, float* memory, const Member& me) {
  const Index inputs = w.inputs, tiled = tiled_rows(w, rows);
  float* rest = memory + tiled * inputs / 2;
  Index begin, end;
  me.share(inputs, UNIT, begin, end);
  for (Index k = begin; k < end; k += LANES) {
    for (Index r = 0; r < rows; ++r) {
      alignas(32) std::int32_t pairs[LANES / 2];
      _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), rounded_brains(x + r * inputs + k));
      if (r >= tiled) {
        store(rest + (r - tiled) * inputs + k, load(reinterpret_cast<const Brain*>(pairs)));
        continue;
      }
      std::int32_t* tile = reinterpret_cast<std::int32_t*>(memory) + r / LANES * LANES * inputs / 2;
      for (Index i = 0; i < LANES / 2; ++i) tile[(k / 2 + i) * LANES + r % LANES] = pairs[i];
    }
  }
}

struct PairedOuter {
  const Matrix& w;
  const std::int32_t* x;  // [tiles, inputs / 2, 16], also of rows that nobody has written

  // Sums [N outputs from `first` on, V tiles of 16 rows].
  template <int V, int N>
  void sum(Index row, Index first, bool ahead, float* sums) const {
    const Index inputs = w.inputs;
    const Brains* third[N / 3];
    for (int j = 0; j < N / 3; ++j) {
      third[j] = static_cast<const Brains*>(w.data) + (first + 3 * j) * inputs;
    }
    Floats acc[N][V];
    for (int j = 0; j < N; ++j) {
      for (int v = 0; v < V; ++v) acc[j][v] = all(0.0f);
    }
    for (Index k = 0; k < inputs; k += 16) {
      for (int j = 0; ahead && k % 32 == 0 && j < N; ++j) {
        __builtin_prefetch(third[j / 3] + (j % 3 + PANEL) * inputs + k, 0, 2);
      }
#pragma GCC unroll 8
      for (Index i = k; i < k + 16; i += 2) {
        __m512i values[V];
        for (int v = 0; v < V; ++v) {
          values[v] = _mm512_loadu_si512(x + (row + v * LANES) * inputs / 2 + i / 2 * LANES);
        }
        for (int j = 0; j < N; ++j) {
          std::int32_t two;
          std::memcpy(&two, third[j / 3] + j % 3 * inputs + i, 4);
          const auto weight = reinterpret_cast<__m512bh>(_mm512_set1_epi32(two));
          for (int v = 0; v < V; ++v) {
            acc[j][v] = _mm512_dpbf16_ps(acc[j][v], reinterpret_cast<__m512bh>(values[v]), weight);
          }
        }
      }
    }
    for (int j = 0; j < N; ++j) {
      for (int v = 0; v < V; ++v) store(sums + (j * V + v) * LANES, acc[j][v]);
    }
  }
};
#endif

// Makes `tiles` of rows that every thread has, for products with `w` and those of its kind; threads
// wait for each other if there is something to make.
inline void prepare(const Matrix& w, const float* x, Index rows, float* tiles, const Member& me) {
#if ROUNDS
  if (w.kind == INT8_ROUNDED) {
    round_rows(w, x, rows, tiles, me);
    me.wait();
    return;
  }
#endif
#if PAIRS
  if (takes_pairs(w)) {
    pair_rows(w, x, rows, tiles, me);
    me.wait();
    return;
  }
#endif
  const Index tiled = tiled_rows(w, rows);
  if (!tiled) return;
  make_tiles(x, tiled, w.inputs, tiles, me);
  me.wait();
}

// Outputs [begin, end) of the rows after those in tiles.
inline void rest_products(const Matrix& w, const float* x, float* tiles, Index tiled, Index rows,
                          Index begin, Index end, float* panel, const Into& into) {
  if (tiled == rows) return;
  const Index rest = rows - tiled;
  const Into to{into.out + tiled * into.width, into.width, into.add};
#if ROUNDS
  if (w.kind == INT8_ROUNDED) {
    const RoundedRows rounded = rest_of(tiles, tiled, rows, w.inputs);
    return some_rounded<ROWS>(rest, w, rounded, begin, end, to);
  }
#endif
  x = takes_pairs(w) ? tiles + tiled * w.inputs / 2 : x + tiled * w.inputs;
  switch (w.kind) {
    case FLOAT32: return dot_products<float>(w, x, rest, begin, end, to);
    case FLOAT16: return dot_products<Half>(w, x, rest, begin, end, to);
    case BFLOAT16: return dot_products<Brain>(w, x, rest, begin, end, to);
    case INT8: return dot_products<std::int8_t>(w, x, rest, begin, end, to);
    default: break;
  }
  for (Index first = 0; first < rest; first += ROWS) {
    const Into part{to.out + first * to.width, to.width, to.add};
    some_groups<ROWS>(smaller(ROWS, rest - first), w, x + first * w.inputs, begin, end, panel, part);
  }
}

// This thread's outputs for rows that were prepared.
inline void product_into(const Matrix& w, const float* x, float* tiles, Index rows, float* out,
                         bool add, const Member& me) {
  const Index tiled = tiled_rows(w, rows);
  Index begin, end;
  me.share(w.outputs, UNIT, begin, end);
  const Into into{out, w.outputs, add};
  const auto rest = [&](Index from, Index to) {
    rest_products(w, x, tiles, tiled, rows, from, to, me.panel, into);
  };
  if (!tiled) return rest(begin, end);
#if ROUNDS
  if (w.kind == INT8_ROUNDED) {
    const RoundedRows rounded(tiles, tiled, w.inputs);
    return tiled_products(RoundedOuter{w, rounded}, tiled, begin, end, rest, into);
  }
#endif
#if PAIRS
  if (takes_pairs(w)) {
    const auto* pairs = reinterpret_cast<const std::int32_t*>(tiles);
    return tiled_products(PairedOuter{w, pairs}, tiled, begin, end, rest, into);
  }
#endif
  outer_products(w, tiles, tiled, begin, end, me.panel, rest, into);
}

// Norms and positions.

inline void normalise(const float* x, const float* weight, Index count, float epsilon, float* to) {
  Floats squares = all(0.0f);
  for (Index k = 0; k < count; k += LANES) squares = fma(load(x + k), load(x + k), squares);
  const float mean = total(squares) / static_cast<float>(count);
  const Floats factor = all(1.0f / __builtin_sqrtf(mean + epsilon));
  for (Index k = 0; k < count; k += LANES) store(to + k, load(x + k) * factor * load(weight + k));
}

// Turns the first `rotated` numbers of a head.
inline void rotate(float* head, const float* cosines, const float* sines, Index rotated) {
  const Index half = rotated / 2;
  for (Index d = 0; d < half; ++d) {
    const float a = head[d], b = head[half + d];
    head[d] = a * cosines[d] - b * sines[d];
    head[half + d] = b * cosines[d] + a * sines[d];
  }
}

template <class K>
inline void narrow(const float* from, Index count, void* to, Index offset) {
  K* at = static_cast<K*>(to) + offset;
  for (Index d = 0; d < count; d += LANES) store(at + d, load(from + d));
}

inline void keep(Index kind, const float* from, Index count, void* to, Index offset) {
  switch (kind) {
    case FLOAT32: return narrow<float>(from, count, to, offset);
    case FLOAT16: return narrow<Half>(from, count, to, offset);
    default: return narrow<Brain>(from, count, to, offset);
  }
}

// Norms and positions of the heads of some sequences' tokens; keys and values go to their blocks.
inline void place_heads(const Model& m, const Layer& l, const Step& s, const Member& me) {
  const Attention& a = s.attention;
  Index begin, end;
  me.share(s.tokens, 1, begin, end);
  const auto turned = [&](float* head, const float* norm, Index token) {
    if (norm) normalise(head, norm, m.dim, m.epsilon, head);
    if (l.rotary < 0) return;
    const Index at = (l.rotary * s.tokens + token) * (m.rotated / 2);
    rotate(head, s.cosines + at, s.sines + at, m.rotated);
  };
  for (Index q = 0; q < a.sequences; ++q) {
    const Index last = smaller(end, a.first[q] + a.count[q]);
    for (Index t = larger(begin, a.first[q]); t < last; ++t) {
      const Index place = a.start[q] + t - a.first[q];
      const Index block = a.blocks[a.table[q] + place / m.size];
      for (Index h = 0; h < m.heads; ++h) {
        turned(s.query + (t * m.heads + h) * m.dim, l.query_norm, t);
      }
      for (Index h = 0; h < m.kv_heads; ++h) {
        float* key = s.key + (t * m.kv_heads + h) * m.dim;
        turned(key, l.key_norm, t);
        const Index to = ((block * m.kv_heads + h) * m.size + place % m.size) * m.dim;
        keep(m.kept, key, m.dim, l.keys, to);
        keep(m.kept, s.value + (t * m.kv_heads + h) * m.dim, m.dim, l.values, to);
      }
    }
  }
}

// Attention.
//
// [Note: one pass] A piece of work is a head of keys and up to `chunk_rows` rows (new tokens x the
// query heads that share the keys). It goes over the blocks: scores of a block for all rows, then
// the running maximum, sum and output of each row are brought up to date (online softmax).

struct Work {
  Scratch<float> query, out, scores, highest, sums, keys, values;
};

// Brings `rows` outputs up to date with a block of weights [rows, padded] and values.
template <int M>
inline void gather(const float* weights, Index padded, const float* values, Index dim, Index count,
                   float* out) {
  constexpr Index WIDE = 16 / LANES;
  for (Index d = 0; d < dim; d += 16) {
    Floats acc[M][WIDE];
    for (int m = 0; m < M; ++m) {
      for (Index i = 0; i < WIDE; ++i) acc[m][i] = load(out + m * dim + d + i * LANES);
    }
    for (Index j = 0; j < count; ++j) {
      Floats value[WIDE];
      for (Index i = 0; i < WIDE; ++i) value[i] = load(values + j * dim + d + i * LANES);
      for (int m = 0; m < M; ++m) {
        const Floats weight = all(weights[m * padded + j]);
        for (Index i = 0; i < WIDE; ++i) acc[m][i] = fma(weight, value[i], acc[m][i]);
      }
    }
    for (int m = 0; m < M; ++m) {
      for (Index i = 0; i < WIDE; ++i) store(out + m * dim + d + i * LANES, acc[m][i]);
    }
  }
}

// A row's scores become weights relative to its new maximum; its sum and output are scaled to it.
inline void soften(float* scores, Index count, Index padded, Index dim, float& highest, float& sum,
                   float* out) {
  for (Index j = count; j < padded; ++j) scores[j] = LOWEST;
  Floats most = all(highest);
  for (Index j = 0; j < padded; j += LANES) most = maximum(most, load(scores + j));
  const float top = greatest(most);
  if (top > highest) {
    const float factor = highest == LOWEST ? 0.0f : exponential(all(highest - top))[0];
    sum *= factor;
    for (Index d = 0; d < dim; d += LANES) store(out + d, load(out + d) * all(factor));
    highest = top;
  }
  Floats sums = all(0.0f);
  for (Index j = 0; j < padded; j += LANES) {
    const Floats weight = exponential(load(scores + j) - all(top == LOWEST ? 0.0f : top));
    store(scores + j, weight);
    sums = sums + weight;
  }
  sum += total(sums);
}

template <int M>
inline void gather_some(Index rows, const float* weights, Index padded, const float* values,
                        Index dim, Index count, float* out) {
  if constexpr (M > 0) {
    if (rows == M) {
      gather<M>(weights, padded, values, dim, count, out);
    } else {
      gather_some<M - 1>(rows, weights, padded, values, dim, count, out);
    }
  }
}

// A block of keys or values as floats.
inline const float* block_of(const Attention& a, const void* kept, Index offset, Index count,
                             Scratch<float>& wide) {
  if (a.kept == FLOAT32) return static_cast<const float*>(kept) + offset;
  wide.resize(a.size * a.dim);
  if (a.kept == FLOAT16) {
    widen(static_cast<const Half*>(kept) + offset, count, wide.data());
  } else {
    widen(static_cast<const Brain*>(kept) + offset, count, wide.data());
  }
  return wide.data();
}

inline void prefetch(const void* from, Index bytes) {
  for (Index i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// Rows [first_row, ...) of one sequence and one head of its keys.
void attend_rows(const Attention& a, Index sequence, Index first_row, Index head, Work& s) {
  const Index group = a.heads / a.kv_heads, tokens = a.count[sequence], dim = a.dim;
  const Index rows = smaller(chunk_rows, group * tokens - first_row), start = a.start[sequence];
  const Index padded = (a.size + LANES - 1) / LANES * LANES;
  s.query.resize(rows * dim);
  s.out.assign(rows * dim, 0.0f);
  s.scores.resize(ROWS * padded);
  s.highest.assign(rows, LOWEST);
  s.sums.assign(rows, 0.0f);
  const auto token_of = [&](Index r) { return (first_row + r) / group; };
  const auto head_of = [&](Index r) { return head * group + (first_row + r) % group; };
  for (Index r = 0; r < rows; ++r) {
    const float* from =
        a.query + ((a.first[sequence] + token_of(r)) * a.heads + head_of(r)) * dim;
    for (Index d = 0; d < dim; ++d) s.query[r * dim + d] = from[d] * a.scale;
  }
  const Index* places = a.places + a.first[sequence];
  const Index* table = a.blocks + a.table[sequence];
  const std::uint8_t* tree = a.tree[sequence] < 0 ? nullptr : a.trees + a.tree[sequence];
  // A chain sees up to itself; a tree all that is kept, and of the new ones what its mask says.
  const Index length = start + (tree ? tokens : token_of(rows - 1) + 1);
  const Index furthest = tree ? start : places[token_of(0)];
  const Index from = a.window > 0 ? larger<Index>(0, furthest - a.window + 1) : 0;
  // Blocks lie anywhere, so the processor does not foresee the next one.
  const Index width = a.kept == FLOAT32 ? 4 : 2;
  const auto offset_of = [&](Index at) {
    return (table[at / a.size] * a.kv_heads + head) * a.size * dim;
  };
  const auto fetch = [&](const void* kept, Index at) {
    if (at >= length) return;
    const Index bytes = smaller(a.size, length - at) * dim * width;
    prefetch(static_cast<const char*>(kept) + offset_of(at) * width, bytes);
  };
  const Index first = from / a.size * a.size;
  fetch(a.values, first);
  for (Index begin = first; begin < length; begin += a.size) {
    const Index count = smaller(a.size, length - begin);
    const Index offset = offset_of(begin);
    const Index ahead = begin + a.size < length ? offset_of(begin + a.size) : -1;
    const float *keys = block_of(a, a.keys, offset, count * dim, s.keys),
                *values = block_of(a, a.values, offset, count * dim, s.values);
    const bool plain = begin + count <= start && a.window <= 0;
    for (Index r = 0; r < rows; r += ROWS) {
      const Index taken = smaller(ROWS, rows - r);
      for (Index j = 0; j < count; j += OUTPUTS) {
        const float* own[OUTPUTS];
        for (Index i = 0; i < OUTPUTS; ++i) own[i] = keys + smaller(j + i, count - 1) * dim;
        if (r == 0 && ahead >= 0) {
          // In small portions: the processor has few buffers for lines under way.
          const Index at = (ahead + j * dim) * width, bytes = OUTPUTS * dim * width;
          prefetch(static_cast<const char*>(a.keys) + at, bytes);
          prefetch(static_cast<const char*>(a.values) + at, bytes);
        }
        float sums[ROWS][OUTPUTS];
        some<ROWS, float>(taken, &s.query[r * dim], dim, own, dim, sums);
        for (Index m = 0; m < taken; ++m) {
          // Past the last key: the padding is a multiple of 4, and overwritten.
          for (Index i = 0; i < OUTPUTS; ++i) s.scores[m * padded + j + i] = sums[m][i];
        }
      }
      for (Index m = 0; m < taken; ++m) {
        float* scores = &s.scores[m * padded];
        if (!plain) {
          const Index token = token_of(r + m), place = places[token];
          for (Index j = 0; j < count; ++j) {
            const Index fresh = begin + j - start;
            const Index theirs = fresh < 0 ? begin + j : places[fresh];
            const bool hidden = (a.window > 0 && place - theirs >= a.window) ||
                                (fresh >= 0 && (tree ? !tree[token * tokens + fresh] : fresh > token));
            if (hidden) scores[j] = LOWEST;
          }
        }
        float* out = &s.out[(r + m) * dim];
        soften(scores, count, padded, dim, s.highest[r + m], s.sums[r + m], out);
      }
      gather_some<ROWS>(taken, s.scores.data(), padded, values, dim, count, &s.out[r * dim]);
    }
  }
  for (Index r = 0; r < rows; ++r) {
    float* to = a.out + ((a.first[sequence] + token_of(r)) * a.heads + head_of(r)) * dim;
    const float factor = 1.0f / s.sums[r];
    for (Index d = 0; d < dim; ++d) to[d] = s.out[r * dim + d] * factor;
  }
}

// Threads take the next piece when they are done with one; `counter` is theirs together.
void attend_pieces(const Attention& a, Index* counter, Work& work) {
  const Index pieces = a.chunk_count * a.kv_heads;
  while (true) {
    const Index piece = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
    if (piece >= pieces) return;
    const Index* chunk = a.chunks + piece / a.kv_heads * 2;
    attend_rows(a, chunk[0], chunk[1], piece % a.kv_heads, work);
  }
}

// The forward.

inline void activate(const Model& m, const Step& s, const Member& me) {
  Index begin, end;
  me.share(m.inner, UNIT, begin, end);
  for (Index t = 0; t < s.tokens; ++t) {
    for (Index n = t * m.inner + begin; n < t * m.inner + end; n += LANES) {
      const Floats x = load(s.inner + n);
      // GELU: (1 + tanh u) / 2 is the sigmoid of 2 u.
      const Floats u = m.gelu ? x * fma(x * x, all(0.0713548162726f), all(1.5957691216057f)) : x;
      const Floats one = all(1.0f);
      store(s.inner + n, x / (one + exponential(all(0.0f) - u)) * load(s.gated + n));
    }
  }
}

// Adds what a layer has made, normalised if it is to be, and normalises the sum for the next one.
inline void join(const Model& m, const Step& s, const float* after, const float* before,
                 const Member& me) {
  Index begin, end;
  me.share(s.tokens, 1, begin, end);
  for (Index t = begin; t < end; ++t) {
    float *x = s.x + t * m.hidden, *sum = s.sum + t * m.hidden;
    if (after) {
      normalise(sum, after, m.hidden, m.epsilon, sum);
      for (Index k = 0; k < m.hidden; k += LANES) store(x + k, load(x + k) + load(sum + k));
    }
    if (before) normalise(x, before, m.hidden, m.epsilon, s.normed + t * m.hidden);
  }
}

inline void embed(const Model& m, const Step& s, const Member& me) {
  Index begin, end;
  me.share(s.tokens, 1, begin, end);
  for (Index t = begin; t < end; ++t) {
    float* x = s.x + t * m.hidden;
    widen_row(m.embedding, s.token[t], 0, m.hidden, x);
    const Floats factor = all(m.embedding_scale * scale_of(m.embedding, s.token[t]));
    for (Index k = 0; k < m.hidden; k += LANES) store(x + k, load(x + k) * factor);
  }
}

// If `w` takes other tiles of the same rows than the matrix before it.
inline void prepare_again(const Matrix& w, const Matrix& before, const Step& s, const Member& me) {
  if (w.kind == before.kind) return;
  me.wait();
  prepare(w, s.normed, s.tokens, s.tiles, me);
}

// Keeps only the rows of which logits are wanted, for what follows the last attention.
inline void keep_wanted(const Model& m, Step& s, const Member& me) {
  const Index width = m.heads * m.dim;
  Index begin, end;
  me.share(s.wanted, 1, begin, end);
  for (Index r = begin; r < end; ++r) {
    std::memcpy(s.query + r * width, s.attended + s.row[r] * width, width * sizeof(float));
    std::memcpy(s.normed + r * m.hidden, s.x + s.row[r] * m.hidden, m.hidden * sizeof(float));
  }
  me.wait();
  float *const query = s.query, *const normed = s.normed;
  s.query = s.attended;
  s.attended = query;
  s.normed = s.x;
  s.x = normed;
  s.tokens = s.wanted;
}

void forward(const Model& m, Step s, const Member& me, Work& work) {
  const bool fewer = s.wanted < s.tokens;
  embed(m, s, me);
  const float* after = nullptr;  // the norm of what the layer before has made
  for (Index n = 0; n < m.layer_count; ++n) {
    const Layer& l = m.layers[n];
    join(m, s, after, l.before_attention, me);
    me.wait();
    prepare(l.query, s.normed, s.tokens, s.tiles, me);
    product_into(l.query, s.normed, s.tiles, s.tokens, s.query, false, me);
    prepare_again(l.key, l.query, s, me);
    product_into(l.key, s.normed, s.tiles, s.tokens, s.key, false, me);
    prepare_again(l.value, l.key, s, me);
    product_into(l.value, s.normed, s.tiles, s.tokens, s.value, false, me);
    me.wait();
    place_heads(m, l, s, me);
    me.wait();
    Attention a = s.attention;
    a.query = s.query;
    a.out = s.attended;
    a.keys = l.keys;
    a.values = l.values;
    a.window = l.window;
    attend_pieces(a, s.counters + n, work);
    me.wait();
    if (fewer && n == m.layer_count - 1) keep_wanted(m, s, me);
    prepare(l.out, s.attended, s.tokens, s.tiles, me);
    product_into(l.out, s.attended, s.tiles, s.tokens, l.after_attention ? s.sum : s.x,
                 !l.after_attention, me);
    me.wait();
    join(m, s, l.after_attention, l.before_feed_forward, me);
    me.wait();
    prepare(l.gate, s.normed, s.tokens, s.tiles, me);
    product_into(l.gate, s.normed, s.tiles, s.tokens, s.inner, false, me);
    prepare_again(l.up, l.gate, s, me);
    product_into(l.up, s.normed, s.tiles, s.tokens, s.gated, false, me);
    activate(m, s, me);
    me.wait();
    after = l.after_feed_forward;
    prepare(l.down, s.inner, s.tokens, s.tiles, me);
    product_into(l.down, s.inner, s.tiles, s.tokens, after ? s.sum : s.x, !after, me);
    me.wait();
  }
  join(m, s, after, nullptr, me);
  me.wait();
  Index begin, end;
  me.share(s.wanted, 1, begin, end);
  for (Index r = begin; r < end; ++r) {
    const float* x = s.x + (fewer ? r : s.row[r]) * m.hidden;
    normalise(x, m.norm, m.hidden, m.epsilon, s.normed + r * m.hidden);
  }
  me.wait();
  prepare(m.head, s.normed, s.wanted, s.tiles, me);
  product_into(m.head, s.normed, s.tiles, s.wanted, s.logits, false, me);
}

// Runs `body` in threads of torch, each with memory of its own.
template <class Body>
inline void in_threads(Index threads, Index widest, const Body& body) {
  Team team{};
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    static thread_local Scratch<float> panel;
    panel.resize(larger(widest, PANEL * PITCH));
    body(Member{omp_get_thread_num(), omp_get_num_threads(), team, panel.data()});
  }
}

void run(const Model& m, const Step& s) {
  const Index widest = larger(larger(m.hidden, m.inner), m.heads * m.dim);
  in_threads(s.threads, widest, [&](const Member& me) {
    static thread_local Work work;
    forward(m, s, me, work);
  });
}

void multiply(const Product& p) {
  const Matrix& w = p.matrix;
  const bool few = p.rows * w.inputs * w.outputs <= ALONE;
  static thread_local Scratch<float> tiles;
  if (tiled_rows(w, p.rows) || w.kind == INT8_ROUNDED || takes_pairs(w)) {
    tiles.resize((p.rows + WIDE - 1) / WIDE * WIDE * w.inputs);
  }
  float* const at = tiles.data();
  in_threads(few ? 1 : p.threads, w.inputs, [&](const Member& me) {
    prepare(w, p.x, p.rows, at, me);
    product_into(w, p.x, at, p.rows, p.out, false, me);
  });
}

}  // namespace
}  // namespace gulliver::decoder
