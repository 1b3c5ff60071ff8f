// Attention over blocks with AVX2: 8 floats an instruction.
#include "pages.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#define BYTES 32
#include "pages_attention.inl"

namespace gulliver::pages {
Attend avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has ? &attend : nullptr;
}
}  // namespace gulliver::pages
#else
namespace gulliver::pages {
Attend avx2() { return nullptr; }
}  // namespace gulliver::pages
#endif
