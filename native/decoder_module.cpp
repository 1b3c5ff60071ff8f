// Decoders for Python: gulliver.serve._decoder. Memory is given by its address, and the GIL is
// released; threads are those of torch, as in int8_module.cpp.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "decoder.hpp"
#include "processor.hpp"

namespace nb = nanobind;

namespace gulliver::decoder {
namespace {

using Address = std::uint64_t;
using Indices = std::vector<Index>;

// Fastest first.
std::vector<const Kernels*> available() {
  std::vector<const Kernels*> all;
  if (avx512_vnni.name && has_avx512_vnni()) all.push_back(&avx512_vnni);
  if (avx512_bf16.name && has_avx512_bf16()) {
    all.insert(fast_bf16() ? all.begin() : all.end(), &avx512_bf16);
  }
  if (avx512.name && has_avx512()) all.push_back(&avx512);
  if (avx2.name && has_avx2_f16c()) all.push_back(&avx2);
  return all;
}

std::vector<std::string> instructions() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available()) names.emplace_back(kernels->name);
  return names;
}

const Kernels& named(const std::string& instructions) {
  for (const Kernels* kernels : available()) {
    if (instructions == kernels->name) return *kernels;
  }
  throw std::invalid_argument("this processor has no " + instructions);
}

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void expect(bool right, const char* what) {
  if (!right) throw std::invalid_argument(what);
}

// Address of values, of scales and of the bias; outputs, inputs, kind.
Matrix matrix(const std::vector<Address>& of, const Kernels& kernels) {
  expect(of.size() == 6, "a matrix has 6 numbers");
  Matrix made{at<const void>(of[0]), at<const void>(of[1]), at<const float>(of[2]),
                    static_cast<Index>(of[3]), static_cast<Index>(of[4]),
                    static_cast<Index>(of[5])};
  expect(made.inputs % (made.kind == INT4 ? 32 : 16) == 0, "inputs are a multiple of 16 or 32");
  // A vector has two groups of inputs, and 12 outputs are multiplied at a time.
  const bool rounds = kernels.rounds && made.inputs % 64 == 0 && made.outputs >= 12;
  if (made.kind == INT8_ROUNDED && !rounds) made.kind = INT8;
  return made;
}

void multiply(const std::string& instructions, Address x, Address out, Index rows,
              const std::vector<Address>& weight, Index threads) {
  const Kernels& kernels = named(instructions);
  const Product product{at<const float>(x), at<float>(out), rows, threads, matrix(weight, kernels)};
  nb::gil_scoped_release released;
  if (rows > 0 && product.matrix.outputs > 0) kernels.multiply(product);
}

// The new tokens of some sequences, laid out once for all layers.
class Sequences {
 public:
  // `places` are of all packed tokens. `trees` have a byte for each pair of a sequence's new tokens
  // where it is a tree, and are empty for chains.
  Sequences(Indices first, Indices count, Indices start, const std::vector<Indices>& tables,
            Indices places, const std::vector<Indices>& trees)
      : first_(std::move(first)),
        count_(std::move(count)),
        start_(std::move(start)),
        places_(std::move(places)) {
    for (std::size_t i = 0; i < count_.size(); ++i) {
      table_.push_back(static_cast<Index>(blocks_.size()));
      blocks_.insert(blocks_.end(), tables[i].begin(), tables[i].end());
      tree_.push_back(trees[i].empty() ? -1 : static_cast<Index>(trees_.size()));
      trees_.insert(trees_.end(), trees[i].begin(), trees[i].end());
    }
  }

  // Writes what `a` has of sequences; its heads must be known.
  void lay_out(Attention& a) {
    divide(a.heads / a.kv_heads);
    a.sequences = static_cast<Index>(count_.size());
    a.first = first_.data();
    a.count = count_.data();
    a.start = start_.data();
    a.table = table_.data();
    a.blocks = blocks_.data();
    a.places = places_.data();
    a.tree = tree_.data();
    a.trees = trees_.data();
    a.chunks = chunks_.data();
    a.chunk_count = static_cast<Index>(chunks_.size()) / 2;
  }

  const Indices& places() const { return places_; }

 private:
  // Pieces of work, the longest first: at the end no thread is left alone with one.
  void divide(Index group) {
    if (group == group_) return;
    group_ = group;
    std::vector<std::pair<Index, std::pair<Index, Index>>> chunks;
    for (std::size_t i = 0; i < count_.size(); ++i) {
      for (Index row = 0; row < count_[i] * group; row += chunk_rows) {
        const Index rows = std::min(chunk_rows, count_[i] * group - row);
        chunks.push_back({-rows * (start_[i] + row / group + 1), {static_cast<Index>(i), row}});
      }
    }
    std::sort(chunks.begin(), chunks.end());
    chunks_.clear();
    for (const auto& chunk : chunks) {
      chunks_.insert(chunks_.end(), {chunk.second.first, chunk.second.second});
    }
  }

  Indices first_, count_, start_, places_, table_, blocks_, tree_, chunks_;
  std::vector<std::uint8_t> trees_;
  Index group_ = 0;
};

class Decoder {
 public:
  // `sizes`: hidden, heads, heads of keys, their size, inner, vocabulary, rotated, tokens of a
  // block, kind of keys and values, whether GELU; `numbers`: epsilon, scale, that of embeddings;
  // `rotary`: inverse frequencies and a factor, for each kind of layer.
  Decoder(const std::string& instructions, const Indices& sizes, const std::vector<float>& numbers,
          const std::vector<Address>& embedding, const std::vector<Address>& head, Address norm,
          std::vector<std::pair<std::vector<float>, float>> rotary)
      : kernels_(named(instructions)), rotary_(std::move(rotary)) {
    expect(sizes.size() == 10 && numbers.size() == 3, "10 sizes and 3 numbers");
    model_.hidden = sizes[0];
    model_.heads = sizes[1];
    model_.kv_heads = sizes[2];
    model_.dim = sizes[3];
    model_.inner = sizes[4];
    model_.vocabulary = sizes[5];
    model_.rotated = sizes[6];
    model_.size = sizes[7];
    model_.kept = sizes[8];
    model_.gelu = sizes[9];
    model_.epsilon = numbers[0];
    model_.scale = numbers[1];
    model_.embedding_scale = numbers[2];
    model_.embedding = matrix(embedding, kernels_);
    model_.head = matrix(head, kernels_);
    model_.norm = at<const float>(norm);
    floats_ = model_.embedding.kind == FLOAT32 && model_.head.kind == FLOAT32;
    expect(model_.dim % 16 == 0, "the size of a head is a multiple of 16");
  }

  // Query, key, value, out, gate, up, down; norms in the order of Layer; keys and values.
  void add_layer(const std::vector<std::vector<Address>>& of, const std::vector<Address>& norms,
                 Index window, Index rotary, Address keys, Address values) {
    expect(of.size() == 7 && norms.size() == 6, "a layer has 7 matrices and 6 norms");
    Matrix m[7];
    for (int i = 0; i < 7; ++i) m[i] = matrix(of[i], kernels_);
    for (const Matrix& one : m) floats_ = floats_ && one.kind == FLOAT32;
    layers_.push_back({m[0], m[1], m[2], m[3], m[4], m[5], m[6], at<const float>(norms[0]),
                       at<const float>(norms[1]), at<const float>(norms[2]),
                       at<const float>(norms[3]), at<const float>(norms[4]),
                       at<const float>(norms[5]), window, rotary, at<void>(keys),
                       at<void>(values)});
  }

  // Runs tokens; logits of the `wanted` rows go to an address.
  void run(Sequences& sequences, const Indices& tokens, const Indices& wanted, Address logits,
           Index threads) {
    nb::gil_scoped_release released;
    const Index count = static_cast<Index>(tokens.size());
    model_.layers = layers_.data();
    model_.layer_count = static_cast<Index>(layers_.size());
    turn(sequences.places());
    Indices counters(layers_.size(), 0);
    Step s{};
    s.tokens = count;
    s.wanted = static_cast<Index>(wanted.size());
    s.token = tokens.data();
    s.row = wanted.data();
    const Index widths[] = {model_.hidden,                 model_.hidden,
                            model_.heads * model_.dim,     model_.kv_heads * model_.dim,
                            model_.kv_heads * model_.dim,  model_.heads * model_.dim,
                            model_.inner,                  model_.inner,
                            model_.hidden};
    float** parts[] = {&s.x,        &s.normed, &s.query, &s.key, &s.value,
                       &s.attended, &s.inner,  &s.gated, &s.sum};
    Index total = 0;
    for (Index width : widths) total += width * count;
    const Index widest = std::max({model_.hidden, model_.inner, model_.heads * model_.dim});
    const Index padded = (std::max(count, s.wanted) + 31) / 32 * 32;
    if (static_cast<Index>(memory_.size()) < total + widest * padded) {
      memory_.resize(total + widest * padded);
    }
    float* next = memory_.data();
    for (int i = 0; i < 9; next += widths[i++] * count) *parts[i] = next;
    s.tiles = next;
    s.cosines = cosines_.data();
    s.sines = sines_.data();
    Attention& a = s.attention;
    a.kept = model_.kept;
    a.heads = model_.heads;
    a.kv_heads = model_.kv_heads;
    a.dim = model_.dim;
    a.size = model_.size;
    a.scale = model_.scale;
    sequences.lay_out(a);
    s.logits = at<float>(logits);
    s.counters = counters.data();
    s.threads = threads;
    // Tiles of 16 rows would be half empty, so 8 rows are faster in vectors of 8.
    const bool narrow = floats_ && (count == 7 || count == 8) && avx2.name;
    if (count > 0) (narrow ? avx2 : kernels_).run(model_, s);
  }

 private:
  // Cosines and sines of positions, in float32 as transformers has them.
  void turn(const Indices& places) {
    cosines_.clear();
    sines_.clear();
    for (const auto& [frequencies, factor] : rotary_) {
      for (Index place : places) {
        for (float frequency : frequencies) {
          const float angle = static_cast<float>(place) * frequency;
          cosines_.push_back(std::cos(angle) * factor);
          sines_.push_back(std::sin(angle) * factor);
        }
      }
    }
  }

  const Kernels& kernels_;
  bool floats_;  // whether all matrices are FLOAT32
  Model model_{};
  std::vector<Layer> layers_;
  std::vector<std::pair<std::vector<float>, float>> rotary_;
  std::vector<float> memory_, cosines_, sines_;
};

}  // namespace

NB_MODULE(_decoder, module) {
  nb::set_leak_warnings(false);  // the kernel is kept until the interpreter ends
  module.attr("INTERFACE") = 4;
  module.def("instructions", &instructions);
  module.def("multiply", &multiply);
  nb::class_<Sequences>(module, "Sequences")
      .def(nb::init<Indices, Indices, Indices, const std::vector<Indices>&, Indices,
                    const std::vector<Indices>&>());
  nb::class_<Decoder>(module, "Decoder")
      .def(nb::init<const std::string&, const Indices&, const std::vector<float>&,
                    const std::vector<Address>&, const std::vector<Address>&, Address,
                    std::vector<std::pair<std::vector<float>, float>>>())
      .def("add_layer", &Decoder::add_layer)
      .def("run", &Decoder::run);
}

}  // namespace gulliver::decoder
