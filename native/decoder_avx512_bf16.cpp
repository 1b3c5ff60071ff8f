// A decoder's forward with AVX512-BF16 and VNNI, which also multiplies pairs of bfloat16.
#include "decoder.hpp"

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && \
    defined(__AVX512VNNI__) && defined(__AVX512BF16__) && defined(__FMA__)
#define BYTES 64
#define ROUNDS 1
#define PAIRS 1
#include "decoder.inl"

namespace gulliver::decoder {
const Kernels avx512_bf16{"avx512-bf16", true, run, multiply};
}  // namespace gulliver::decoder
#else
const gulliver::decoder::Kernels gulliver::decoder::avx512_bf16{};
#endif
