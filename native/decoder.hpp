// One forward of a dense decoder over packed tokens, its products and its attention over pages.
#pragma once

#include <cstdint>

namespace gulliver::decoder {

using Index = std::int64_t;

// INT8_ROUNDED: as INT8, and the rows that it is multiplied with are rounded to bytes.
enum Kind : Index { FLOAT32, FLOAT16, BFLOAT16, INT8, INT4, INT8_ROUNDED };

// A linear layer, rows as torch has them, [outputs, inputs].
struct Matrix {
  const void* data;
  // INT8: a float32 for each output; INT4: a scale and a minimum in float16 for each 32 values.
  const void* scale;
  const float* bias;   // or null
  Index outputs, inputs, kind;
};

// Attention of new tokens of many sequences over keys and values in blocks, read in place.
struct Attention {
  const float* query;  // [tokens, heads, dim]
  float* out;          // [tokens, heads, dim]
  const void* keys;    // [blocks, kv_heads, size, dim]
  const void* values;
  Index kept;  // kind of keys and values: a float kind
  Index heads, kv_heads, dim, size;
  Index sequences;
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
  // [chunks, 2]: sequence and first row of each piece of work for one head of keys.
  const Index* chunks;
  Index chunk_count;
  float scale;
  Index window;  // positions that a token sees; 0 for all
};

// Rows (tokens x query heads of a key head) that one piece of work has.
constexpr Index chunk_rows = 48;

struct Layer {
  Matrix query, key, value, out, gate, up, down;
  const float *before_attention, *before_feed_forward;
  // Of what attention and the feed-forward add (Gemma 3), of the heads (Qwen 3); or null.
  const float *after_attention, *after_feed_forward, *query_norm, *key_norm;
  Index window;  // as in Attention
  Index rotary;  // which frequencies; -1 for none
  void *keys, *values;
};

struct Model {
  const Layer* layers;
  Index layer_count, hidden, heads, kv_heads, dim, inner, vocabulary;
  Index rotated;  // numbers of a head that are rotated
  Index size;     // tokens of a block
  Index kept;     // kind of keys and values
  Index gelu;     // whether the feed-forward has tanh's GELU instead of SiLU
  float epsilon, scale, embedding_scale;
  Matrix embedding, head;
  const float* norm;
};

// What the threads of a step share; a thread that waits spins.
struct Team {
  alignas(64) Index arrived;
  alignas(64) Index phase;
};

struct Step {
  Index tokens, wanted;
  const Index *token, *row;  // tokens, and rows of which logits are wanted
  Attention attention;       // all but query, out, keys, values and window
  const float *cosines, *sines;  // [frequencies, tokens, rotated / 2]
  // [tokens, ...]: residuals, normalised ones, heads, what heads attend to, feed-forward, sums.
  float *x, *normed, *query, *key, *value, *attended, *inner, *gated, *sum;
  float* tiles;  // rows of a product, transposed: those of the widest matrix, in steps of 32
  float* logits;   // [wanted, vocabulary]
  Index* counters;  // one for each layer, 0
  Index threads;
};

// A product of rows [rows, inputs] with a matrix, to `out` [rows, outputs].
struct Product {
  const float* x;
  float* out;
  Index rows, threads;
  Matrix matrix;
};

struct Kernels {
  const char* name;  // null where this build has not got the instructions
  bool rounds;       // whether it multiplies INT8_ROUNDED
  void (*run)(const Model&, const Step&);
  void (*multiply)(const Product&);
};

extern const Kernels avx512_bf16;
extern const Kernels avx512_vnni;
extern const Kernels avx512;
extern const Kernels avx2;

}  // namespace gulliver::decoder
