// Attention over blocks with AVX2: 8 floats an instruction.
#include "pages.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#define BYTES 32
#include "pages_attention.inl"

namespace gulliver::pages {
const Attend avx2 = &attend;
}  // namespace gulliver::pages
#else
namespace gulliver::pages {
const Attend avx2 = nullptr;
}  // namespace gulliver::pages
#endif
