// Attention of a few new tokens of many sequences over keys and values in blocks, read in place.
#pragma once

#include <cstdint>

namespace gulliver::pages {

using Index = std::int64_t;

struct Attention {
  const void* query;  // [heads, tokens, dim] by the strides below, float or bfloat16
  void* out;          // [tokens, heads, dim], as query
  const void* keys;   // [blocks, kv_heads, size, dim]
  const void* values;
  bool half;       // whether query and out are bfloat16
  bool half_kept;  // whether keys and values are
  Index head_stride, token_stride;
  Index heads, kv_heads, dim, size;
  Index sequences;
  const Index* order;   // sequences, those that take longest first
  const Index* first;   // of each sequence: index of its first token
  const Index* count;   // ... number of its new tokens
  const Index* start;   // ... number of keys before them
  const Index* table;   // ... where its blocks begin in `blocks`
  const Index* blocks;  // all block tables, one after another
  const Index* places;  // position of each token
  // Which new tokens a new token of a tree sees, [count, count] bytes, and where they begin in
  // `trees`; -1 for a chain.
  const Index* tree;
  const std::uint8_t* trees;
  float scale;
  Index window;         // positions that a token sees; 0 for all
  const float* slopes;  // [heads] of ALiBi, or null
};

// Null where this build has not got the instructions; whether the processor has, the caller asks.
using Attend = void (*)(const Attention&);
extern const Attend avx512;
extern const Attend avx2;

}  // namespace gulliver::pages
