// Products with AVX2: bytes are widened to 16 bits, so that no pair of products saturates.
#include "int8.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

#include "int8_product.inl"

namespace gulliver::int8 {
namespace {

struct Avx2 {
  using Int = __m256i;
  using Float = __m256;
  static constexpr std::int64_t BYTES = 32, FLOATS = 8;
  static constexpr int ROWS = 2;
  static Int zero() { return _mm256_setzero_si256(); }
  static Int load(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
  static Int load_some(const void* at, std::int64_t count) {
    std::int8_t bytes[BYTES] = {};
    std::memcpy(bytes, at, count);
    return load(bytes);
  }
  static Int dot(Int acc, Int x, Int w) {
    const __m256i below = _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm256_castsi256_si128(x)),
                                            _mm256_cvtepi8_epi16(_mm256_castsi256_si128(w)));
    const __m256i above = _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm256_extracti128_si256(x, 1)),
                                            _mm256_cvtepi8_epi16(_mm256_extracti128_si256(w, 1)));
    return _mm256_add_epi32(acc, _mm256_add_epi32(below, above));
  }
  static void totals(const Int a[4], std::int32_t* to) {
    const Int all = _mm256_hadd_epi32(_mm256_hadd_epi32(a[0], a[1]), _mm256_hadd_epi32(a[2], a[3]));
    const __m128i sums =
        _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), sums);
  }
  // Adds the products of a group's 128 values, each plus 8, and activations: four of at most
  // 2 x 15 x 127 do not saturate 16 bits.
  static Int nibbles(Int acc, const std::int8_t* at, const std::uint8_t* x) {
    const Int low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    Int sum = zero();
    for (int half = 0; half < 64; half += 32) {
      const Int both = load(at + half);
      const Int above = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
      sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(_mm256_and_si256(both, low), load(x + half)));
      sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(above, load(x + 64 + half)));
    }
    return _mm256_add_epi32(acc, _mm256_madd_epi16(sum, ones));
  }
  static Int minus_eights(const std::uint8_t* x) {
    const Int eight = _mm256_set1_epi8(8), ones = _mm256_set1_epi16(1);
    Int sum = zero();
    for (int part = 0; part < 128; part += 32) {
      sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(eight, load(x + part)));
    }
    return _mm256_sub_epi32(zero(), _mm256_madd_epi16(sum, ones));
  }
  static void store(Int a, std::int32_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a);
  }
  static Float floats(Int a) { return _mm256_cvtepi32_ps(a); }
  static Float all(float value) { return _mm256_set1_ps(value); }
  static Float float_zero() { return _mm256_setzero_ps(); }
  static Float float_load(const float* at) { return _mm256_loadu_ps(at); }
  static Float widened(const std::int8_t* at) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
  static Float add_product(Float acc, Float x, Float w) { return _mm256_fmadd_ps(x, w, acc); }
  static void float_totals(const Float a[4], float* to) {
    const Float all = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
  }
};

}  // namespace

const Kernels avx2{"avx2", dynamic<Avx2>, weights<Avx2>, nibbles<Avx2>};

}  // namespace gulliver::int8
#else
const gulliver::int8::Kernels gulliver::int8::avx2{};
#endif
