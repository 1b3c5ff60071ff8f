// io_uring without liburing: one thread keeps several system calls under way in the kernel.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine.hpp"

namespace gulliver {

class Ring {
 public:
  // Null, and errno in `number`, where the kernel has no io_uring or forbids it.
  static std::unique_ptr<Ring> make(unsigned depth, int& number);
  ~Ring();
  // Moves what is in the engine's line until the engine is closed.
  void run(Engine& engine);
  // Called with the engine's mutex: there is something new to see, also while in the kernel.
  void wake();

 private:
  struct Flight {
    Transfer transfer;
    Attempt attempt;
  };
  struct Maps;

  Ring() = default;
  void listen();
  void start(Engine& engine, unsigned slot);
  void reap(Engine& engine);
  void enter(unsigned at_least);
  void* entry(unsigned char code, int handle, std::uint64_t user);

  std::unique_ptr<Maps> maps_;
  unsigned depth_ = 0;
  unsigned unsubmitted_ = 0;
  int event_ = -1;
  std::uint64_t event_value_ = 0;
  bool listening_ = false;
  bool asleep_ = false;  // under the engine's mutex
  std::vector<std::unique_ptr<Flight>> flights_;
  std::vector<unsigned> idle_;
};

}  // namespace gulliver
