// Bytes that lie apart, one behind the other.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace gulliver {

// Elements in the row-major order of `sizes`; strides in bytes.
struct View {
  View(const char* address, std::uint64_t itemsize, const std::vector<std::int64_t>& sizes,
       const std::vector<std::int64_t>& strides);

  const char* address;
  std::uint64_t itemsize;
  std::uint64_t nbytes;
  // Without dims of one element; dims that could be one are.
  std::vector<std::int64_t> sizes, strides;
};

struct Segment {
  const char* address;
  std::uint64_t nbytes;
  // Where there is one, `address` is null and `begin` its first byte.
  std::shared_ptr<const View> view = nullptr;
  std::uint64_t begin = 0;
};

// Copies bytes of a view from its byte `begin` on; both multiples of an element.
void copy_view(char* target, const View& view, std::uint64_t begin, std::uint64_t nbytes);

// Copies plain segments one behind the other, with several threads where that pays.
void gather(char* target, const std::vector<Segment>& segments);

}  // namespace gulliver
