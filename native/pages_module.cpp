// Attention over blocks for Python: gulliver.serve._paged. Memory is given by its address, and
// the GIL is released; threads are those of torch, as in int8_module.cpp.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "pages.hpp"
#include "processor.hpp"

namespace nb = nanobind;

namespace gulliver::pages {
namespace {

using Address = std::uint64_t;

std::vector<std::string> instructions() {
  std::vector<std::string> names;
  if (avx512 && has_avx512()) names.emplace_back("avx512");
  if (avx2 && has_avx2()) names.emplace_back("avx2");
  return names;
}

Attend named(const std::string& name) {
  for (const std::string& found : instructions()) {
    if (found == name) return name == "avx512" ? avx512 : avx2;
  }
  throw std::invalid_argument("this processor has no " + name);
}

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

class Kernel {
 public:
  explicit Kernel(const std::string& instructions) : attend_(named(instructions)) {}

  // `where`: first, count, start, table, blocks, places, tree, trees.
  void run(Address query, Address out, Address keys, Address values, bool half, bool half_kept,
           const std::vector<Index>& sizes, const std::vector<Address>& where, float scale,
           Index window, Address slopes) const {
    if (sizes.size() != 7 || where.size() != 8) throw std::invalid_argument("7 sizes, 8 addresses");
    nb::gil_scoped_release released;
    const auto* start = at<const Index>(where[2]);
    std::vector<Index> order(sizes[6]);
    std::iota(order.begin(), order.end(), 0);
    // The longest first: at the end no thread is left alone with one.
    std::sort(order.begin(), order.end(), [&](Index x, Index y) { return start[x] > start[y]; });
    const Attention a{at<const void>(query), at<void>(out),
                      at<const void>(keys),  at<const void>(values),
                      half,                  half_kept,
                      sizes[0],              sizes[1],
                      sizes[2],              sizes[3],
                      sizes[4],              sizes[5],
                      sizes[6],              order.data(),
                      at<const Index>(where[0]), at<const Index>(where[1]),
                      start,
                      at<const Index>(where[3]), at<const Index>(where[4]),
                      at<const Index>(where[5]), at<const Index>(where[6]),
                      at<const std::uint8_t>(where[7]), scale,
                      window,                at<const float>(slopes)};
    attend_(a);
  }

 private:
  Attend attend_;
};

}  // namespace

NB_MODULE(_paged, module) {
  module.attr("INTERFACE") = 1;
  module.def("instructions", &instructions);
  nb::class_<Kernel>(module, "Kernel")
      .def(nb::init<const std::string&>())
      .def("run", &Kernel::run);
}

}  // namespace gulliver::pages
