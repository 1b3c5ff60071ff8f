// Products of a few rows of activations with quantised weights, for inference.
//
// Integer dot products are exact, and what is rounded around them is rounded in the order that
// `gulliver.precision.int8` has, so that its kernels give the same bits whichever is taken.
#pragma once

#include <cstdint>

namespace gulliver::int8 {

// A linear layer, and the rows that it is applied to.
struct Product {
  const void* x;  // [rows, inputs], float or bfloat16
  void* out;      // [rows, outputs], as x
  bool half;      // whether x and out are bfloat16
  std::int64_t rows, inputs, outputs;
  const std::int8_t* weight;  // [outputs, inputs]; int4: [outputs, inputs / 2]
  const float* scale;         // [outputs]; int4: [outputs, inputs / 128]
  const std::int32_t* sums;   // sum of each row of the weight; not for int4
  const float* bias;          // [outputs] or null
  const float* largest;       // of each row of x, where others have a part of the row; or null
  float threshold;            // |x| from which on x is not quantised
};

// A set of instructions; its members are null where this build has not got it. Whether the
// processor has, the caller asks.
struct Kernels {
  const char* name;
  void (*dynamic)(const Product&);   // int8 activations, a scale for each row
  void (*weights)(const Product&);   // activations as they are
  void (*nibbles)(const Product&);   // int4 weights in groups of 128, int8 activations
};

extern const Kernels avx512;
extern const Kernels avx2;

}  // namespace gulliver::int8
