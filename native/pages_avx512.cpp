// Attention over blocks with AVX512: 16 floats an instruction.
#include "pages.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define BYTES 64
#include "pages_attention.inl"

namespace gulliver::pages {
Attend avx512() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return has ? &attend : nullptr;
}
}  // namespace gulliver::pages
#else
namespace gulliver::pages {
Attend avx512() { return nullptr; }
}  // namespace gulliver::pages
#endif
