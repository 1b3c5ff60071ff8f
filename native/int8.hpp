// Products of a few rows of activations with int8 weights, for inference.
//
// Integer dot products are exact, and what is rounded around them is rounded in the order that
// `gulliver.precision.int8` has, so that its kernels give the same bits whichever is taken.
#pragma once

#include <cstdint>

namespace gulliver::int8 {

// A linear layer, and the rows that it is applied to.
struct Product {
  const float* x;  // [rows, inputs]
  float* out;      // [rows, outputs]
  std::int64_t rows, inputs, outputs;
  const std::int8_t* weight;  // [outputs, inputs]
  const float* scale;         // [outputs]
  const std::int32_t* sums;   // sum of each row of the weight
  const float* bias;          // [outputs] or null
  const float* largest;       // of each row of x, where others have a part of the row; or null
  float threshold;            // |x| from which on x is not quantised
};

// A set of instructions; its members are null where this build has not got it. Whether the
// processor has, the caller asks.
struct Kernels {
  const char* name;
  void (*multiply)(const Product&);  // activations are rounded to int8, with a scale for each row
};

extern const Kernels avx512;
extern const Kernels avx2;

}  // namespace gulliver::int8
