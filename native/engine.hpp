// The I/O engine without Python: see src/gulliver/io/engine.py for what each call promises, and
// python_engine.py for the same logic in fewer words.
//
// One mutex guards what is shared. Copiers sleep on `to_copy_`; the threads that call the system,
// or the one that drives io_uring, on `to_move_`. System calls, copies and checksums run without
// it. Nothing here throws in a thread of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gather.hpp"

namespace gulliver {

// What the caller did wrong, in his words.
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A system call that failed: what was tried, where (-1: no place) and errno.
struct Failure {
  const char* action;
  std::int64_t offset;
  int number;
};

class Ticket {
 public:
  bool copied() const;
  bool done() const;
  std::optional<std::uint32_t> checksum() const;
  std::optional<Failure> failure() const;
  // Whether it happened within so many seconds.
  bool wait_copied(double seconds);
  bool wait(double seconds);

 private:
  friend class Engine;
  void set_copied(std::uint32_t checksum);
  void finish(std::optional<Failure> failure);

  // Place in the line; under the engine's mutex.
  std::pair<std::int64_t, std::uint64_t> key_{};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> copied_{false};
  std::atomic<bool> done_{false};
  std::optional<std::uint32_t> checksum_;
  std::optional<Failure> failure_;
};

enum class Kind { write, read, fsync, prefetch, page };
enum class Call { open, fallocate, write, read, fsync, truncate };

struct Request;

struct File {
  const void* owner = nullptr;
  std::string path;
  std::uint64_t nbytes = 0;
  int buffered = -1;
  // Past the page cache; -1 where the file system does not want it. A descriptor given up stays
  // open as `retired`, since another thread may be using it.
  std::atomic<int> direct{-1};
  int retired = -1;
  std::atomic<bool> prefetched{false};
  // From here on under the engine's mutex.
  bool closed = false;
  std::optional<Failure> error;
  std::uint64_t pending = 0;
  std::set<std::uint64_t> writes;
  std::deque<std::shared_ptr<Request>> syncs;
};

struct Request {
  Kind kind;
  std::shared_ptr<File> file;
  std::uint64_t offset = 0;
  char* address = nullptr;
  std::uint64_t nbytes = 0;
  std::int64_t priority = 0;
  std::uint64_t number = 0;
  std::vector<Segment> segments;
  int page = -1;
  bool checked = false;
  bool counted = true;
  std::shared_ptr<Ticket> ticket = std::make_shared<Ticket>();
  std::uint64_t cursor = 0;  // what has been handed out
  int active = 0;            // who works on it
  std::optional<Failure> error;
};

// Part of a request on its way through one or more system calls.
struct Transfer {
  std::shared_ptr<Request> request;
  std::uint64_t offset;
  char* address;
  std::uint64_t left;
  bool skip;  // the request, or the file to be forced, has failed already
};

// One system call of it.
struct Attempt {
  int handle;
  std::uint64_t size;
  bool direct;
  int injected;  // errno to fail with, or 0
};

struct Counters {
  std::uint64_t written, read, direct, pending, free_pages;
};

struct Opened {
  std::shared_ptr<File> file;
  std::optional<Failure> failure;
};

class Ring;

class Engine {
 public:
  Engine(std::uint64_t page_bytes, int pages, int copiers, int writers, int queue, bool direct,
         bool io_uring, int nice);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const char* kind() const;
  // Why there is no ring: errno, or -1 where none was asked for, or 0.
  int ring_errno() const { return ring_errno_; }
  int pages() const;
  std::vector<std::pair<std::uintptr_t, std::uint64_t>> regions() const;
  Counters counters() const;
  void grow(int pages);

  Opened create(const std::string& path, std::uint64_t nbytes);
  Opened open(const std::string& path);
  bool owns(const File& file) const { return file.owner == this; }
  // Closes a file to submissions; whether nothing is under way on it.
  bool quiet(const std::shared_ptr<File>& file, double seconds);
  int close_file(const std::shared_ptr<File>& file);

  // Submitting; a null ticket says that the queue is full.
  std::shared_ptr<Ticket> stage(const std::shared_ptr<File>& file, std::uint64_t offset,
                                std::vector<Segment> segments, std::int64_t priority);
  std::shared_ptr<Ticket> write_page(const std::shared_ptr<File>& file, std::uint64_t offset,
                                     int page, std::uint64_t nbytes, std::int64_t priority);
  std::shared_ptr<Ticket> read(const std::shared_ptr<File>& file, std::uint64_t offset,
                               char* address, std::uint64_t nbytes, std::int64_t priority,
                               bool checked);
  std::shared_ptr<Ticket> write(const std::shared_ptr<File>& file, std::uint64_t offset,
                                char* address, std::uint64_t nbytes, std::int64_t priority);
  std::shared_ptr<Ticket> sync(const std::shared_ptr<File>& file);
  void prefetch(const std::shared_ptr<File>& file, std::uint64_t offset, std::uint64_t nbytes);
  void wait_room(double seconds);
  // Copies in the calling thread what no copier has begun.
  void copy_now(const Ticket& ticket);

  // A page for somebody who fills it himself: granted when the ticket is done.
  std::shared_ptr<Request> want(std::int64_t priority);
  // The page that was granted meanwhile, or -1.
  int give_up(const std::shared_ptr<Request>& wanted);
  int granted(const std::shared_ptr<Request>& wanted) const;
  std::uintptr_t address(int page) const;
  void release(int page);

  void begin_close();
  bool idle(double seconds);
  void stop();

  void inject(Call call, std::uint64_t nth, int number, std::int64_t limit, std::uint64_t times);
  void hold(bool held);

 private:
  friend class Ring;
  using Lock = std::unique_lock<std::mutex>;
  using Line = std::map<std::pair<std::int64_t, std::uint64_t>, std::shared_ptr<Request>>;
  struct Injection {
    std::uint64_t skip, times;
    int number;
    std::int64_t limit;
  };
  struct Hit {
    int number = 0;
    std::int64_t limit = -1;
  };
  enum class Next { again, finished };

  std::pair<char*, std::uint64_t> map_pages(int count) const;
  void add_pages(std::pair<char*, std::uint64_t> region);
  void grant();
  void take_back(int page);
  Hit injected(Call call);
  int open_handle(const std::string& path, int flags, std::optional<Failure>& failure,
                  const char* action);
  std::optional<Failure> allocate(int handle, std::uint64_t nbytes);
  Opened adopt(std::shared_ptr<File> file);
  int close_handles(File& file);
  void check_open(const File* file) const;
  std::shared_ptr<Request> make(Kind kind, const std::shared_ptr<File>& file, std::uint64_t offset,
                                char* address, std::uint64_t nbytes, std::int64_t priority);
  std::shared_ptr<Ticket> submit(const std::shared_ptr<Request>& request, Line* line,
                                 bool nothing);
  void push(Line& line, const std::shared_ptr<Request>& request);
  std::shared_ptr<Request> pop(Line& line);
  void wake_movers();

  void copy_loop();
  void copy(Lock& lock, const std::shared_ptr<Request>& request);
  void fill(Request& request);
  void move_loop();
  Transfer next_slice();
  Attempt plan(Transfer& transfer);
  Next settle(Transfer& transfer, const Attempt& attempt, std::int64_t result);
  std::int64_t execute(const Transfer& transfer, const Attempt& attempt);
  void give_up_direct(File& file);
  void fail(Transfer& transfer, const char* action, std::int64_t offset, int number);
  void slice_done(const std::shared_ptr<Request>& request);
  void finish(const std::shared_ptr<Request>& request);

  const std::uint64_t page_bytes_;
  const std::uint64_t queue_;
  const bool direct_;
  const int nice_;  // of the copiers
  int ring_errno_ = -1;

  mutable std::mutex mutex_;
  std::condition_variable to_copy_, to_move_, room_, quiet_;
  std::uint64_t numbers_ = 0;
  std::vector<std::pair<char*, std::uint64_t>> regions_;
  std::vector<char*> pages_;
  std::vector<int> free_;
  std::set<int> lent_;
  Line waiting_, copies_, moves_;
  std::set<std::shared_ptr<File>> files_;
  std::uint64_t pending_ = 0, counted_ = 0;
  bool held_ = false, closing_ = false, closed_ = false, stopped_ = false;
  std::map<Call, std::vector<Injection>> injections_;
  std::atomic<bool> injecting_{false};
  std::atomic<std::uint64_t> written_{0}, read_{0}, past_cache_{0};
  std::unique_ptr<Ring> ring_;
  std::vector<std::thread> threads_;
};

}  // namespace gulliver
