// Products of few rows with AVX2: 8 floats an instruction.
#include "rows.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

#include "rows_product.inl"

namespace gulliver::rows {
namespace {

struct Avx2 {
  using Float = __m256;
  static constexpr Index FLOATS = 8;
  static constexpr int ROWS = 2;  // 8 sums, 4 weights and a value in 16 registers
  static Float zero() { return _mm256_setzero_ps(); }
  static Float load(const float* at) { return _mm256_loadu_ps(at); }
  static Float add_product(Float sum, Float x, Float w) { return _mm256_fmadd_ps(x, w, sum); }
  static void totals(const Float a[4], float* to) {
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
  }
};

}  // namespace

const Multiply avx2 = &multiply<Avx2>;

}  // namespace gulliver::rows
#else
namespace gulliver::rows {
const Multiply avx2 = nullptr;
}  // namespace gulliver::rows
#endif
