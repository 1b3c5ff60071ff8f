// Products with AVX512-VNNI: 64 bytes an instruction.
#include "int8.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include <immintrin.h>

#include "int8_product.inl"

namespace gulliver::int8 {
namespace {

struct Vnni {
  using Int = __m512i;
  static constexpr std::int64_t BYTES = 64;
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
    const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(folded(a[0]), folded(a[1])),
                                          _mm256_hadd_epi32(folded(a[2]), folded(a[3])));
    const __m128i sums =
        _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), sums);
  }
};

}  // namespace

const Kernels avx512{"avx512-vnni", multiply<Vnni>};

}  // namespace gulliver::int8
#else
const gulliver::int8::Kernels gulliver::int8::avx512{};
#endif
