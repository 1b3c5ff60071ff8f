#include "gather.hpp"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>

namespace gulliver {
namespace {

constexpr std::uint64_t kShare = 8u << 20;  // less is not worth a thread
constexpr std::uint64_t kThreads = 4;

template <typename Element>
void copy_row(char* target, const char* from, std::int64_t stride, std::int64_t count) {
  for (std::int64_t k = 0; k < count; ++k, from += stride, target += sizeof(Element))
    std::memcpy(target, from, sizeof(Element));
}

void copy_row(char* target, const char* from, std::int64_t stride, std::int64_t count,
              std::uint64_t itemsize) {
  if (stride == static_cast<std::int64_t>(itemsize)) {
    std::memcpy(target, from, static_cast<std::size_t>(count) * itemsize);
    return;
  }
  switch (itemsize) {
    case 1: return copy_row<std::uint8_t>(target, from, stride, count);
    case 2: return copy_row<std::uint16_t>(target, from, stride, count);
    case 4: return copy_row<std::uint32_t>(target, from, stride, count);
    case 8: return copy_row<std::uint64_t>(target, from, stride, count);
    default:
      for (std::int64_t k = 0; k < count; ++k, from += stride, target += itemsize)
        std::memcpy(target, from, itemsize);
  }
}

void copy_all(char* target, const Segment* first, const Segment* last) {
  for (; first != last; ++first) {
    std::memcpy(target, first->address, first->nbytes);
    target += first->nbytes;
  }
}

}  // namespace

View::View(const char* address, std::uint64_t itemsize, const std::vector<std::int64_t>& all,
           const std::vector<std::int64_t>& steps)
    : address(address), itemsize(itemsize), nbytes(itemsize) {
  for (std::size_t dim = 0; dim < all.size(); ++dim) {
    nbytes *= static_cast<std::uint64_t>(all[dim]);
    if (all[dim] == 1) continue;
    if (!sizes.empty() && strides.back() == steps[dim] * all[dim]) {
      sizes.back() *= all[dim];
      strides.back() = steps[dim];
    } else {
      sizes.push_back(all[dim]);
      strides.push_back(steps[dim]);
    }
  }
  if (sizes.empty()) {
    sizes.push_back(1);
    strides.push_back(static_cast<std::int64_t>(itemsize));
  }
}

void copy_view(char* target, const View& view, std::uint64_t begin, std::uint64_t nbytes) {
  const auto dims = view.sizes.size();
  std::vector<std::int64_t> index(dims);
  const char* from = view.address;
  auto left = static_cast<std::int64_t>(nbytes / view.itemsize);
  auto rest = static_cast<std::int64_t>(begin / view.itemsize);
  for (std::size_t dim = dims; dim-- > 0;) {
    index[dim] = rest % view.sizes[dim];
    rest /= view.sizes[dim];
    from += index[dim] * view.strides[dim];
  }
  const std::size_t inner = dims - 1;
  while (left > 0) {
    const auto count = std::min(left, view.sizes[inner] - index[inner]);
    copy_row(target, from, view.strides[inner], count, view.itemsize);
    target += static_cast<std::uint64_t>(count) * view.itemsize;
    left -= count;
    // To the beginning of the next row.
    from -= index[inner] * view.strides[inner];
    index[inner] = 0;
    for (std::size_t dim = inner; dim-- > 0;) {
      from += view.strides[dim];
      if (++index[dim] < view.sizes[dim]) break;
      from -= index[dim] * view.strides[dim];
      index[dim] = 0;
    }
  }
}

void gather(char* target, const std::vector<Segment>& segments) {
  std::uint64_t total = 0;
  for (const auto& segment : segments) total += segment.nbytes;
  const auto cores = std::max(1u, std::thread::hardware_concurrency());
  const auto count = std::min<std::uint64_t>({kThreads, cores, total / kShare + 1});
  const Segment* first = segments.data();
  const Segment* const last = first + segments.size();
  std::vector<std::thread> threads;
  for (std::uint64_t k = 0; k + 1 < count; ++k) {
    const Segment* stop = first;
    std::uint64_t nbytes = 0;
    while (stop != last && nbytes < total / count) nbytes += (stop++)->nbytes;
    try {
      threads.emplace_back(copy_all, target, first, stop);
    } catch (const std::system_error&) {
      copy_all(target, first, stop);
    }
    first = stop;
    target += nbytes;
  }
  copy_all(target, first, last);
  for (auto& thread : threads) thread.join();
}

}  // namespace gulliver
