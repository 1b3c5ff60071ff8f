// Attention over blocks with AVX512: 16 floats an instruction.
#include "pages.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define BYTES 64
#include "pages_attention.inl"

namespace gulliver::pages {
const Attend avx512 = &attend;
}  // namespace gulliver::pages
#else
namespace gulliver::pages {
const Attend avx512 = nullptr;
}  // namespace gulliver::pages
#endif
