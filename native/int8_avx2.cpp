// Products with AVX2: bytes are widened to 16 bits, so that no pair of products saturates.
#include "int8.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

#include "int8_product.inl"

namespace gulliver::int8 {
namespace {

struct Avx2 {
  using Int = __m256i;
  static constexpr std::int64_t BYTES = 32;
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
};

}  // namespace

const Kernels avx2{"avx2", multiply<Avx2>};

}  // namespace gulliver::int8
#else
const gulliver::int8::Kernels gulliver::int8::avx2{};
#endif
