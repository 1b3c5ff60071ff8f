// Products with AVX512-VNNI: 64 bytes an instruction.
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
  // Adds the products of a group's 128 values, each plus 8, and activations.
  static Int nibbles(Int acc, const std::int8_t* at, const std::uint8_t* x) {
    const Int low = _mm512_set1_epi8(15), both = load(at);
    const Int above = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    return dot(dot(acc, _mm512_and_si512(both, low), load(x)), above, load(x + 64));
  }
  static Int minus_eights(const std::uint8_t* x) {
    const Int eight = _mm512_set1_epi8(8);
    return _mm512_sub_epi32(zero(), dot(dot(zero(), eight, load(x)), eight, load(x + 64)));
  }
  static void store(Int a, std::int32_t* to) { _mm512_storeu_si512(to, a); }
  static Float floats(Int a) { return _mm512_cvtepi32_ps(a); }
  static Float all(float value) { return _mm512_set1_ps(value); }
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

}  // namespace

const Kernels avx512{"avx512-vnni", dynamic<Vnni>, weights<Vnni>, nibbles<Vnni>};

}  // namespace gulliver::int8
#else
const gulliver::int8::Kernels gulliver::int8::avx512{};
#endif
