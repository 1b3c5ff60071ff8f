// A decoder's forward with AVX512-VNNI, which also multiplies bytes: 64 an instruction.
#include "decoder.hpp"

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && \
    defined(__AVX512VNNI__) && defined(__FMA__)
#define BYTES 64
#define ROUNDS 1
#include "decoder.inl"

namespace gulliver::decoder {
const Kernels avx512_vnni{"avx512-vnni", true, run, multiply};
}  // namespace gulliver::decoder
#else
const gulliver::decoder::Kernels gulliver::decoder::avx512_vnni{};
#endif
