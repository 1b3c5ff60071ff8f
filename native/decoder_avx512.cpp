// A decoder's forward with AVX-512: 16 floats an instruction.
#include "decoder.hpp"

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__FMA__)
#define BYTES 64
#include "decoder.inl"

namespace gulliver::decoder {
const Kernels avx512{"avx512", false, run, multiply};
}  // namespace gulliver::decoder
#else
const gulliver::decoder::Kernels gulliver::decoder::avx512{};
#endif
