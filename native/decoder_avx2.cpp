// A decoder's forward with AVX2: 8 floats an instruction.
#include "decoder.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define BYTES 32
#include "decoder.inl"

namespace gulliver::decoder {
const Kernels avx2{"avx2", false, run, multiply};
}  // namespace gulliver::decoder
#else
const gulliver::decoder::Kernels gulliver::decoder::avx2{};
#endif
