// Products of few rows with AVX512: 16 floats an instruction.
#include "rows.hpp"

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include <immintrin.h>

#include "rows_product.inl"

namespace gulliver::rows {
namespace {

struct Avx512 {
  using Float = __m512;
  static constexpr Index FLOATS = 16;
  static constexpr int ROWS = 6;  // 24 sums, 4 weights and a value in 32 registers
  static Float zero() { return _mm512_setzero_ps(); }
  static Float load(const float* at) { return _mm512_loadu_ps(at); }
  static Float add_product(Float sum, Float x, Float w) { return _mm512_fmadd_ps(x, w, sum); }
  static __m256 folded(Float a) {
    return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  }
  static void totals(const Float a[4], float* to) {
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(folded(a[0]), folded(a[1])),
                                      _mm256_hadd_ps(folded(a[2]), folded(a[3])));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
  }
};

}  // namespace

const Multiply avx512 = &multiply<Avx512>;

}  // namespace gulliver::rows
#else
namespace gulliver::rows {
const Multiply avx512 = nullptr;
}  // namespace gulliver::rows
#endif
