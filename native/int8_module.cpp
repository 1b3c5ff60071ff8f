// Products with quantised weights for Python: gulliver.precision.int8._kernels. Memory is given by
// its address, and the GIL is released: nothing here looks at a Python object.
//
// Threads are those of torch: this calls the OpenMP that torch has loaded, and is linked with none
// of its own, whose threads would compete with torch's for the cores. Where torch has none that it
// shows, this is not loaded, and the kernels of torch do the work.
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "int8.hpp"
#include "processor.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace gulliver::int8 {
namespace {

using Address = std::uint64_t;

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> all;
  if (avx512.name && has_avx512_vnni()) all.push_back(&avx512);
  if (avx2.name && has_avx2()) all.push_back(&avx2);
  return all;
}

const Kernels* named(const std::string& instructions) {
  for (const Kernels* kernels : available()) {
    if (instructions == kernels->name) return kernels;
  }
  throw std::invalid_argument("this processor has no " + instructions);
}

std::vector<std::string> instructions() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available()) names.emplace_back(kernels->name);
  return names;
}

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

class Table {
 public:
  explicit Table(const std::string& instructions) : kernels_(*named(instructions)) {}

  void run(Address x, Address out, std::int64_t rows, std::int64_t inputs, std::int64_t outputs,
           Address weight, Address scale, Address sums, Address bias, Address largest,
           float threshold) const {
    const Product product{at<const float>(x),
                          at<float>(out),
                          rows,
                          inputs,
                          outputs,
                          at<const std::int8_t>(weight),
                          at<const float>(scale),
                          at<const std::int32_t>(sums),
                          at<const float>(bias),
                          at<const float>(largest),
                          threshold};
    if (rows > 0 && outputs > 0) kernels_.multiply(product);
  }

 private:
  const Kernels& kernels_;
};

}  // namespace

NB_MODULE(_kernels, module) {
  module.attr("INTERFACE") = 2;
  module.def("instructions", &instructions);
  nb::class_<Table>(module, "Table")
      .def(nb::init<const std::string&>())
      .def("run", &Table::run, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace gulliver::int8
