// What files for one set of instructions use instead of the standard library. All of it has
// internal linkage: see [Note: files for one set of instructions] in processor.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace gulliver {
namespace {

template <class T>
constexpr T smaller(T a, T b) {
  return b < a ? b : a;
}

template <class T>
constexpr T larger(T a, T b) {
  return a < b ? b : a;
}

// Memory of a thread that grows to what it was last asked for; contents are not kept.
template <class T>
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { ::operator delete(data_); }

  void resize(std::int64_t count) {
    if (count <= capacity_) return;
    ::operator delete(data_);
    data_ = nullptr;
    capacity_ = 0;
    data_ = static_cast<T*>(::operator new(static_cast<std::size_t>(count) * sizeof(T)));
    capacity_ = count;
  }

  void assign(std::int64_t count, T value) {
    resize(count);
    for (std::int64_t i = 0; i < count; ++i) data_[i] = value;
  }

  T* data() { return data_; }
  T& operator[](std::int64_t index) { return data_[index]; }
  const T& operator[](std::int64_t index) const { return data_[index]; }

 private:
  T* data_ = nullptr;
  std::int64_t capacity_ = 0;
};

}  // namespace
}  // namespace gulliver
