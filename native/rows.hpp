// Products of few rows with float weights as they lie, [outputs, inputs], each read once.
#pragma once

#include <cstdint>

namespace gulliver::rows {

using Index = std::int64_t;

struct Product {
  const float* x;       // [rows, inputs]
  const float* weight;  // [outputs, inputs]
  const float* bias;    // [outputs], or null
  float* out;           // [rows, outputs]
  Index rows, inputs, outputs;
};

// Null where this build has not got the instructions; whether the processor has, the caller asks.
using Multiply = void (*)(const Product&);
extern const Multiply avx512;
extern const Multiply avx2;

}  // namespace gulliver::rows
