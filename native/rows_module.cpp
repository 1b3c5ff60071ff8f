// Products of few rows for Python: gulliver.serve._rows. Memory is given by its address, and the
// GIL is released; threads are those of torch, as in int8_module.cpp.
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "processor.hpp"
#include "rows.hpp"

namespace nb = nanobind;

namespace gulliver::rows {
namespace {

using Address = std::uint64_t;

std::vector<std::string> instructions() {
  std::vector<std::string> names;
  if (avx512 && has_avx512()) names.emplace_back("avx512");
  if (avx2 && has_avx2()) names.emplace_back("avx2");
  return names;
}

Multiply named(const std::string& name) {
  for (const std::string& found : instructions()) {
    if (found == name) return name == "avx512" ? avx512 : avx2;
  }
  throw std::invalid_argument("this processor has no " + name);
}

class Kernel {
 public:
  explicit Kernel(const std::string& instructions) : multiply_(named(instructions)) {}

  void run(Address x, Address weight, Address bias, Address out, Index rows, Index inputs,
           Index outputs) const {
    if (inputs % 16 != 0) throw std::invalid_argument("inputs are a multiple of 16");
    if (rows <= 0 || outputs <= 0) return;
    multiply_({reinterpret_cast<const float*>(x), reinterpret_cast<const float*>(weight),
               reinterpret_cast<const float*>(bias), reinterpret_cast<float*>(out), rows, inputs,
               outputs});
  }

 private:
  Multiply multiply_;
};

}  // namespace

NB_MODULE(_rows, module) {
  module.attr("INTERFACE") = 1;
  module.def("instructions", &instructions);
  nb::class_<Kernel>(module, "Kernel")
      .def(nb::init<const std::string&>())
      .def("run", &Kernel::run, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace gulliver::rows
