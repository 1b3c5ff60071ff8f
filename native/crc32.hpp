// CRC-32 as zlib computes it (reflected polynomial 0xEDB88320), at memory speed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gulliver {

// The checksum of what gave `crc` followed by these bytes; begin with 0.
std::uint32_t crc32(std::uint32_t crc, const void* data, std::size_t nbytes);

// The same without instructions that not every processor has.
std::uint32_t crc32_tables(std::uint32_t crc, const void* data, std::size_t nbytes);

// The same of bytes that are copied on the way, past the caches where that pays.
std::uint32_t crc32_copy(std::uint32_t crc, char* target, const char* source, std::size_t nbytes);

}  // namespace gulliver
