// All calls of the engine from many threads at once, without Python: to be run under a sanitizer.
//
//   stress FOLDER ROUNDS      prints "ok" and ends with 0 when every file holds what it should
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include "crc32.hpp"
#include "engine.hpp"

using namespace gulliver;

namespace {

constexpr std::uint64_t kPage = 16384;
constexpr int kPieces = 24;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

char byte_at(unsigned seed, std::uint64_t place) {
  return static_cast<char>((place * 2654435761u + seed * 97u) >> 7);
}

template <typename Submit>
std::shared_ptr<Ticket> admitted(Engine& engine, Submit submit) {
  for (;;) {
    if (auto ticket = submit()) return ticket;
    engine.wait_room(0.1);
  }
}

void finish(Ticket& ticket) {
  while (!ticket.wait(1.0)) {
  }
  if (const auto failure = ticket.failure())
    std::fprintf(stderr, "%s at %lld: %s\n", failure->action,
                 static_cast<long long>(failure->offset), std::strerror(failure->number));
  require(!ticket.failure(), "no failure was expected");
}

// One writer of one file, by all three ways; sources change as soon as they may.
void write_file(Engine& engine, const std::string& path, unsigned seed, bool priorities) {
  const std::uint64_t nbytes = kPieces * kPage + 100 + seed;
  auto opened = engine.create(path, seed % 2 ? nbytes : 0);
  require(!opened.failure, "created");
  const auto file = opened.file;
  std::vector<std::shared_ptr<Ticket>> tickets;
  std::vector<char> source(kPage);
  std::vector<char> rest(nbytes - kPieces * kPage);
  for (std::uint64_t piece = 0; piece < kPieces; ++piece) {
    const std::uint64_t offset = piece * kPage;
    const std::int64_t priority = priorities ? static_cast<std::int64_t>(piece % 3) : 0;
    for (std::uint64_t k = 0; k < kPage; ++k) source[k] = byte_at(seed, offset + k);
    if (piece % 4 == 3) {
      const auto wanted = engine.want(priority);
      while (!wanted->ticket->wait(1.0)) {
      }
      const int page = engine.granted(wanted);
      std::memcpy(reinterpret_cast<char*>(engine.address(page)), source.data(), kPage);
      tickets.push_back(engine.write_page(file, offset, page, kPage, priority));
    } else {
      const std::uint64_t cut = 1 + (seed * 31 + piece * 977) % (kPage - 2);
      tickets.push_back(admitted(engine, [&] {
        return engine.stage(file, offset,
                            {{source.data(), cut}, {source.data() + cut, kPage - cut}}, priority);
      }));
      if (piece % 2) engine.copy_now(*tickets.back());
      while (!tickets.back()->wait_copied(1.0)) {
      }
      std::vector<char> expected(source);
      std::memset(source.data(), 0, kPage);
      require(tickets.back()->checksum() == crc32(0, expected.data(), kPage), "the checksum");
    }
    if (piece % 8 == 5) tickets.push_back(admitted(engine, [&] { return engine.sync(file); }));
  }
  for (std::uint64_t k = 0; k < rest.size(); ++k) rest[k] = byte_at(seed, kPieces * kPage + k);
  tickets.push_back(admitted(engine, [&] {
    return engine.write(file, kPieces * kPage, rest.data(), rest.size(), 1);
  }));
  finish(*admitted(engine, [&] { return engine.sync(file); }));
  for (const auto& ticket : tickets) finish(*ticket);
  while (!engine.quiet(file, 1.0)) {
  }
  require(engine.close_file(file) == 0, "closed");
}

void read_file(Engine& engine, const std::string& path, unsigned seed) {
  auto opened = engine.open(path);
  require(!opened.failure, "opened");
  const std::uint64_t nbytes = opened.file->nbytes;
  std::vector<char> target(nbytes);
  if (seed % 3 == 0) engine.prefetch(opened.file, 0, nbytes);
  std::vector<std::shared_ptr<Ticket>> tickets;
  for (std::uint64_t at = 0; at < nbytes; at += 3 * kPage)
    tickets.push_back(admitted(engine, [&] {
      return engine.read(opened.file, at, target.data() + at, std::min(3 * kPage, nbytes - at),
                         static_cast<std::int64_t>(at % 5), true);
    }));
  for (const auto& ticket : tickets) finish(*ticket);
  for (std::uint64_t k = 0; k < nbytes; ++k)
    require(target[k] == byte_at(seed, k), "what was read");
  engine.quiet(opened.file, 10.0);
  engine.close_file(opened.file);
}

void round_of(const std::string& folder, bool direct, bool io_uring, bool faults) {
  Engine engine(kPage, 3, 2, 2, 6, direct, io_uring, 10);
  if (faults) {
    // What is continued or made again: results stay right.
    engine.inject(Call::write, 3, EINTR, -1, 5);
    engine.inject(Call::write, 20, 0, 511, 9);
    engine.inject(Call::read, 2, 0, 700, 5);
    // Whole pages come first: a refusal of their alignment.
    if (direct) engine.inject(Call::write, 1, EINVAL, -1, 1);
    engine.inject(Call::fsync, 1, EINTR, -1, 2);
  }
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed)
    threads.emplace_back([&, seed] {
      const std::string path = folder + "/" + std::to_string(seed);
      write_file(engine, path, seed, true);
      read_file(engine, path, seed);
      ::unlink(path.c_str());
    });
  std::atomic<bool> over{false};
  std::thread watcher([&] {
    for (int k = 0; !over; ++k) {
      const Counters counters = engine.counters();
      require(counters.free_pages <= static_cast<std::uint64_t>(engine.pages()), "pages");
      if (k < 2) engine.grow(1);
      engine.hold(k % 2 == 0);
      const auto wanted = engine.want(-5);
      wanted->ticket->wait(0.001);
      const int page = engine.give_up(wanted);
      if (page >= 0) engine.release(page);
      engine.hold(false);
    }
  });
  for (auto& thread : threads) thread.join();
  over = true;
  watcher.join();
}

// Closed with everything still under way.
void close_in_flight(const std::string& folder, bool io_uring) {
  const std::string path = folder + "/flight";
  std::vector<char> source(64 * kPage);
  for (std::uint64_t k = 0; k < source.size(); ++k) source[k] = byte_at(7, k);
  {
    Engine engine(kPage, 2, 2, 2, 4096, true, io_uring, 0);
    const auto file = engine.create(path, source.size()).file;
    for (std::uint64_t at = 0; at < source.size(); at += kPage)
      engine.stage(file, at, {{source.data() + at, kPage}}, 0);
  }
  std::ifstream stream(path, std::ios::binary);
  const std::vector<char> found{std::istreambuf_iterator<char>(stream), {}};
  require(found == source, "the file closed in flight");
  ::unlink(path.c_str());
}

}  // namespace

int main(int count, char** arguments) {
  require(count == 3, "two arguments");
  for (int round = 0; round < std::atoi(arguments[2]); ++round)
    for (const bool io_uring : {false, true}) {
      round_of(arguments[1], round % 2 == 0, io_uring, round % 3 == 1);
      close_in_flight(arguments[1], io_uring);
    }
  std::puts("ok");
  return 0;
}
