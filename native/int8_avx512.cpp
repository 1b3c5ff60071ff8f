// Products with AVX512-VNNI: 64 bytes an instruction; and with int4 weights.
#include "int8.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include <immintrin.h>

#include "int8_product.inl"

namespace gulliver::int8 {
namespace {

// Four sums, one of each vector's lanes.
inline __m128i four_totals(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  return _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

inline __m128 four_totals(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

struct Vnni {
  using Int = __m512i;
  using Float = __m512;
  static constexpr std::int64_t BYTES = 64, FLOATS = 16;
  static constexpr int ROWS = 4;
  static Int zero() { return _mm512_setzero_si512(); }
  static Int load(const void* at) { return _mm512_loadu_si512(at); }
  static Int load_some(const void* at, std::int64_t count) {
    return _mm512_maskz_loadu_epi8((__mmask64{1} << count) - 1, at);
  }
  static Int dot(Int acc, Int x, Int w) { return _mm512_dpbusd_epi32(acc, x, w); }
  static __m256i folded(Int a) {
    return _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  }
  static void totals(const Int a[4], std::int32_t* to) {
    const __m128i sums = four_totals(folded(a[0]), folded(a[1]), folded(a[2]), folded(a[3]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), sums);
  }
  static Float float_zero() { return _mm512_setzero_ps(); }
  static Float float_load(const float* at) { return _mm512_loadu_ps(at); }
  static Float widened(const std::int8_t* at) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  }
  static Float add_product(Float acc, Float x, Float w) { return _mm512_fmadd_ps(x, w, acc); }
  static __m256 folded(Float a) {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
    return _mm256_add_ps(_mm512_castps512_ps256(a), high);
  }
  static void float_totals(const Float a[4], float* to) {
    _mm_storeu_ps(to, four_totals(folded(a[0]), folded(a[1]), folded(a[2]), folded(a[3])));
  }
};

// [Note: int4] 128 values of a row lie in 64 bytes: byte i has value i below and value 64 + i
// above, each plus 8. As they are unsigned the activations may stay signed, and what the 8 adds,
// 8 times the sum of the group's activations, is where the group's sum begins.
void group_offsets(const Product& p, Rows& r) {
  const std::int64_t groups = r.width / GROUP;
  r.offsets.resize(p.rows * groups * 16);
  const __m512i eight = _mm512_set1_epi8(8);
  for (std::int64_t g = 0; g < p.rows * groups; ++g) {
    const std::uint8_t* q = &r.bytes[g * GROUP];
    __m512i sum = _mm512_dpbusd_epi32(Vnni::zero(), eight, Vnni::load(q));
    sum = _mm512_dpbusd_epi32(sum, eight, Vnni::load(q + 64));
    _mm512_storeu_si512(&r.offsets[g * 16], _mm512_sub_epi32(Vnni::zero(), sum));
  }
}

inline float nibble(const std::int8_t* row, std::int64_t k) {
  const auto byte = static_cast<std::uint8_t>(row[k / GROUP * 64 + k % 64]);
  return static_cast<float>((k % GROUP < 64 ? byte & 15 : byte >> 4) - 8);
}

template <class V, int M>
inline void nibbles_block(const Product& p, const Four& f, const Rows& r, std::int64_t first) {
  const std::int64_t groups = p.inputs / GROUP;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 acc[M][OUTPUTS];
  for (int m = 0; m < M; ++m) {
    for (int j = 0; j < OUTPUTS; ++j) acc[m][j] = V::float_zero();
  }
  for (std::int64_t g = 0; g < groups; ++g) {
    for (int j = 0; j < OUTPUTS; ++j) {
      const std::int8_t* at = p.weight + (f.row[j] * groups + g) * 64;
      const __m512i both = V::load(at);
      __builtin_prefetch(at + OUTPUTS * groups * 64);
      const __m512i below = _mm512_and_si512(both, low);
      const __m512i above = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      const __m512 scale = _mm512_set1_ps(p.scale[f.row[j] * groups + g]);
      for (int m = 0; m < M; ++m) {
        const std::int64_t at_x = (first + m) * groups + g;
        const std::uint8_t* q = &r.bytes[at_x * GROUP];
        __m512i sum = V::load(&r.offsets[at_x * 16]);
        sum = V::dot(V::dot(sum, below, V::load(q)), above, V::load(q + 64));
        acc[m][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, acc[m][j]);
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
      for (std::size_t o = 0; o < out.index.size(); ++o) {
        const std::int64_t k = out.index[o];
        const float weight = nibble(p.weight + n * groups * 64, k) * p.scale[n * groups + k / GROUP];
        y += out.value[o] * weight;
      }
      store(p, (first + m) * p.outputs + n, p.bias ? y + p.bias[n] : y);
    }
  }
}

void nibbles(const Product& p) {
  using V = Vnni;
  static thread_local Rows scratch;
  Rows& r = scratch;
  read_rows(p, r);
  quantise(p, r, 0);
  group_offsets(p, r);
  GULLIVER_OVER_OUTPUTS(nibbles_block)
}

const Kernels ALL{"avx512-vnni", dynamic<Vnni>, weights<Vnni>, nibbles};

}  // namespace

const Kernels* avx512() {
  const bool has = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw");
  return has ? &ALL : nullptr;
}

}  // namespace gulliver::int8
#else
const gulliver::int8::Kernels* gulliver::int8::avx512() { return nullptr; }
#endif
