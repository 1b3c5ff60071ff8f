// Ways to the same number, chosen at run time: carry-less multiplication, of one, two or four lanes
// in an instruction (Gopal et al., "Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ Instruction", Intel 2009), and tables, sixteen bytes at a time (Kounavis and Berry, "A
// Systematic Approach to Building High Performance, Software-based, CRC Generators", 2005).
#include "crc32.hpp"

#include <array>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define GULLIVER_PCLMUL 1
#include <immintrin.h>
#endif

namespace gulliver {
namespace {

constexpr std::uint32_t kPolynomial = 0xEDB88320u;
using Tables = std::array<std::array<std::uint32_t, 256>, 16>;

// tables[k][b] is the remainder of byte b followed by k zero bytes.
Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ ((rest & 1) ? kPolynomial : 0);
    tables[0][byte] = rest;
  }
  for (std::size_t k = 1; k < tables.size(); ++k)
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  return tables;
}

const Tables& tables() {
  static const Tables made = make_tables();
  return made;
}

// On the inverted remainder.
std::uint32_t by_tables(std::uint32_t rest, const unsigned char* data, std::size_t nbytes) {
  const Tables& t = tables();
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; nbytes >= 16; data += 16, nbytes -= 16) {
    std::uint32_t words[4];
    std::memcpy(words, data, 16);
    words[0] ^= rest;
    rest = 0;
    for (int w = 0; w < 4; ++w)
      for (int b = 0; b < 4; ++b) rest ^= t[15 - 4 * w - b][(words[w] >> (8 * b)) & 0xFF];
  }
#endif
  for (; nbytes; ++data, --nbytes) rest = (rest >> 8) ^ t[0][(rest ^ *data) & 0xFF];
  return rest;
}

#ifdef GULLIVER_PCLMUL
// At least 64 bytes, in multiples of 16; on the inverted remainder. Copies them on the way to a
// target that is a multiple of 16, if there is one: with stores that neither read what they replace
// nor drive from the caches what the program around us computes with.
template <bool kCopies>
__attribute__((target("sse4.1,pclmul"))) std::uint32_t by_pclmul(std::uint32_t rest,
                                                                 const unsigned char* data,
                                                                 std::size_t nbytes,
                                                                 unsigned char* target = nullptr) {
  const auto load = [&target](const unsigned char* p) __attribute__((target("sse4.1,pclmul"))) {
    const __m128i found = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if (kCopies) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target), found);
      target += 16;
    }
    return found;
  };
  // x^(4*128+32), x^(4*128-32), x^(128+32), x^(128-32), x^64 modulo the polynomial, reflected.
  const __m128i by_four = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_one = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i by_half = _mm_set_epi64x(0, 0x0163cd6124);
  // The polynomial and its inverse for Barrett's reduction.
  const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);

  __m128i lane[4];
  for (int k = 0; k < 4; ++k) lane[k] = load(data + 16 * k);
  lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128(static_cast<int>(rest)));
  for (data += 64, nbytes -= 64; nbytes >= 64; data += 64, nbytes -= 64)
    for (int k = 0; k < 4; ++k) {
      const __m128i low = _mm_clmulepi64_si128(lane[k], by_four, 0x00);
      const __m128i high = _mm_clmulepi64_si128(lane[k], by_four, 0x11);
      lane[k] = _mm_xor_si128(_mm_xor_si128(low, high), load(data + 16 * k));
    }

  __m128i x = lane[0];
  for (int k = 1; k < 4; ++k) {
    const __m128i low = _mm_clmulepi64_si128(x, by_one, 0x00);
    const __m128i high = _mm_clmulepi64_si128(x, by_one, 0x11);
    x = _mm_xor_si128(_mm_xor_si128(low, high), lane[k]);
  }
  for (; nbytes >= 16; data += 16, nbytes -= 16) {
    const __m128i low = _mm_clmulepi64_si128(x, by_one, 0x00);
    const __m128i high = _mm_clmulepi64_si128(x, by_one, 0x11);
    x = _mm_xor_si128(_mm_xor_si128(low, high), load(data));
  }

  __m128i folded = _mm_clmulepi64_si128(x, by_one, 0x10);
  x = _mm_xor_si128(_mm_srli_si128(x, 8), folded);
  folded = _mm_srli_si128(x, 4);
  x = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(x, low_words), by_half, 0x00), folded);

  folded = _mm_clmulepi64_si128(_mm_and_si128(x, low_words), barrett, 0x10);
  folded = _mm_clmulepi64_si128(_mm_and_si128(folded, low_words), barrett, 0x00);
  return static_cast<std::uint32_t>(_mm_extract_epi32(_mm_xor_si128(x, folded), 1));
}

// At least 512 bytes, in multiples of 256; sixteen lanes at once. A target is a multiple of 64.
template <bool kCopies>
__attribute__((target("avx512f,avx512vl,vpclmulqdq,sse4.1,pclmul"))) std::uint32_t by_vpclmul(
    std::uint32_t rest, const unsigned char* data, std::size_t nbytes,
    unsigned char* target = nullptr) {
  // x^(16*128+32) and x^(16*128-32) modulo the polynomial, reflected.
  const __m512i by_sixteen = _mm512_set_epi64(0x1322d1430, 0x11542778a, 0x1322d1430, 0x11542778a, 0x1322d1430, 0x11542778a, 0x1322d1430, 0x11542778a);
  __m512i lane[4];
  for (int k = 0; k < 4; ++k) lane[k] = _mm512_loadu_si512(data + 64 * k);
  if (kCopies)
    for (int k = 0; k < 4; ++k)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target + 64 * k), lane[k]);
  lane[0] = _mm512_xor_si512(
      lane[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(rest))));
  for (data += 256, nbytes -= 256; nbytes; data += 256, nbytes -= 256) {
    target += kCopies ? 256 : 0;
    for (int k = 0; k < 4; ++k) {
      const __m512i found = _mm512_loadu_si512(data + 64 * k);
      if (kCopies) _mm512_stream_si512(reinterpret_cast<__m512i*>(target + 64 * k), found);
      const __m512i low = _mm512_clmulepi64_epi128(lane[k], by_sixteen, 0x00);
      const __m512i high = _mm512_clmulepi64_epi128(lane[k], by_sixteen, 0x11);
      lane[k] = _mm512_ternarylogic_epi64(low, high, found, 0x96);
    }
  }
  // What is left has the remainder of all that was.
  unsigned char folded[256];
  for (int k = 0; k < 4; ++k) _mm512_storeu_si512(folded + 64 * k, lane[k]);
  return by_pclmul<false>(0, folded, sizeof folded);
}

// The same where registers have 256 bits.
template <bool kCopies>
__attribute__((target("avx2,vpclmulqdq,sse4.1,pclmul"))) std::uint32_t by_vpclmul_avx2(
    std::uint32_t rest, const unsigned char* data, std::size_t nbytes,
    unsigned char* target = nullptr) {
  const __m256i by_sixteen =
      _mm256_set_epi64x(0x1322d1430, 0x11542778a, 0x1322d1430, 0x11542778a);
  __m256i lane[8];
  for (int k = 0; k < 8; ++k) {
    lane[k] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 32 * k));
    if (kCopies) _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 32 * k), lane[k]);
  }
  lane[0] = _mm256_xor_si256(
      lane[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(rest))));
  for (data += 256, nbytes -= 256; nbytes; data += 256, nbytes -= 256) {
    target += kCopies ? 256 : 0;
    for (int k = 0; k < 8; ++k) {
      const auto found = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 32 * k));
      if (kCopies) _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 32 * k), found);
      const __m256i low = _mm256_clmulepi64_epi128(lane[k], by_sixteen, 0x00);
      const __m256i high = _mm256_clmulepi64_epi128(lane[k], by_sixteen, 0x11);
      lane[k] = _mm256_xor_si256(_mm256_xor_si256(low, high), found);
    }
  }
  unsigned char folded[256];
  for (int k = 0; k < 8; ++k)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(folded + 32 * k), lane[k]);
  return by_pclmul<false>(0, folded, sizeof folded);
}

using Sum = std::uint32_t (*)(std::uint32_t, const unsigned char*, std::size_t, unsigned char*);

// The widest of this processor, for 512 bytes or more in multiples of 256; null for none.
template <bool kCopies>
Sum widest() {
  static const Sum found = [] {
    const bool has = __builtin_cpu_supports("vpclmulqdq");
    if (has && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"))
      return Sum{by_vpclmul<kCopies>};
    return has && __builtin_cpu_supports("avx2") ? Sum{by_vpclmul_avx2<kCopies>} : Sum{nullptr};
  }();
  return found;
}

bool has_pclmul() {
  static const bool has = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return has;
}
#endif

}  // namespace

std::uint32_t crc32_tables(std::uint32_t crc, const void* data, std::size_t nbytes) {
  return ~by_tables(~crc, static_cast<const unsigned char*>(data), nbytes);
}

std::uint32_t crc32(std::uint32_t crc, const void* data, std::size_t nbytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::uint32_t rest = ~crc;
#ifdef GULLIVER_PCLMUL
  if (const Sum sum = widest<false>(); sum && nbytes >= 512) {
    const std::size_t whole = nbytes & ~static_cast<std::size_t>(255);
    rest = sum(rest, bytes, whole, nullptr);
    bytes += whole;
    nbytes -= whole;
  }
  if (nbytes >= 64 && has_pclmul()) {
    const std::size_t whole = nbytes & ~static_cast<std::size_t>(15);
    rest = by_pclmul<false>(rest, bytes, whole);
    bytes += whole;
    nbytes -= whole;
  }
#endif
  return ~by_tables(rest, bytes, nbytes);
}

std::uint32_t crc32_copy(std::uint32_t crc, char* target, const char* source, std::size_t nbytes) {
#ifdef GULLIVER_PCLMUL
  constexpr std::size_t kStreamed = 4096;
  const std::size_t ahead = (64 - reinterpret_cast<std::uintptr_t>(target) % 64) % 64;
  if (nbytes >= kStreamed && has_pclmul()) {
    std::memcpy(target, source, ahead);
    crc = crc32(crc, target, ahead);
    const std::size_t whole = (nbytes - ahead) & ~static_cast<std::size_t>(255);
    const Sum wide = widest<true>();
    const Sum copy = wide ? wide : by_pclmul<true>;
    crc = ~copy(~crc, reinterpret_cast<const unsigned char*>(source) + ahead, whole,
                reinterpret_cast<unsigned char*>(target) + ahead);
    // Before anybody is told that the bytes are there.
    _mm_sfence();
    target += ahead + whole;
    source += ahead + whole;
    nbytes -= ahead + whole;
  }
#endif
  std::memcpy(target, source, nbytes);
  return crc32(crc, target, nbytes);
}

}  // namespace gulliver
