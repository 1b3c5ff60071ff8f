// Collectives of ranks on one host: gulliver.comm._host. Each rank reads what it needs straight out
// of the memory of the others (process_vm_readv), so an element is copied once and added while it is
// in the cache; a page of shared memory says what may be read, and when.
//
// [Note: one order] Operations of a team are numbered as they are handed in, which is in one order
// on all ranks. `posted` counts those whose memory may be read, `done` those that a rank has taken
// all it needs for. An operation is complete when every rank is done with it: only then may what was
// read be written again. Whoever waits runs what is left itself; without a waiter the team's thread
// does. Nothing here needs the GIL.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#if defined(__linux__)
#include <cerrno>

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#endif

namespace nb = nanobind;

namespace gulliver::host {
namespace {

#if defined(__linux__) && defined(SYS_pidfd_open)

using Address = std::uint64_t;
using Clock = std::chrono::steady_clock;
using Counter = std::atomic<std::uint32_t>;
static_assert(sizeof(Counter) == 4 && Counter::is_always_lock_free, "futexes are such words");

constexpr std::uint32_t kSlots = 256;       // Operations that a rank may be ahead of another
constexpr std::size_t kBlock = 128 << 10;   // Bytes that are read at once: they stay in a cache
constexpr auto kSlice = std::chrono::milliseconds(200);  // Between two looks whether others live

// Bytes of an operand that lies in several places, up to `end`; without an address they are zeros.
struct Run {
  Address address;
  std::uint64_t end;
};
using Runs = std::vector<Run>;

// What may be read of a rank: with which tag, and where. An operand of several runs is at that many
// `Run`s.
struct Slot {
  Address address;
  std::uint64_t tag;
  std::uint64_t runs;
};

// A rank's part of the shared memory; its own rank alone writes it, except for `sleepers`.
struct alignas(64) Board {
  Counter posted;
  Counter done;
  Counter bell;  // Moves whenever one of them does
  Counter sleepers;
  Slot slots[kSlots];
};

bool reached(const Counter& counter, std::uint32_t number) {
  return static_cast<std::int32_t>(counter.load() - number) > 0;
}

void sleep_on(Counter& word, std::uint32_t seen, Clock::duration longest) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(longest).count();
  const timespec limit{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void ring(Board& board) {
  board.bell.fetch_add(1);
  if (board.sleepers.load() > 0) syscall(SYS_futex, &board.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Elements are added as `Sum`; what travels may be narrower.
struct BFloat16 {
  std::uint16_t bits;
  operator float() const {
    const std::uint32_t wide = std::uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};

enum class Kind { gather, sum };

struct Work {
  Kind kind;
  int dtype;  // 0 float32, 1 float64, 2 bfloat16 to float32
  bool mean;
  bool follows;  // Reads what the operation before it has written
  Address in, out;
  std::size_t nbytes;  // Of a part of `in`
  std::uint64_t tag;
  Runs runs;  // Where the terms of a sum are, if not all at `in`
};

class Team {
 public:
  Team(const std::string& name, int rank, const std::vector<int>& pids)
      : rank_(rank), size_(static_cast<int>(pids.size())), process_(getpid()), pids_(pids) {
    const int file = ::open(name.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) throw std::runtime_error("the shared page cannot be opened");
    bytes_ = sizeof(Board) * pids.size();
    void* start = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ::close(file);
    if (start == MAP_FAILED) throw std::runtime_error("the shared page cannot be mapped");
    boards_ = static_cast<Board*>(start);
    for (int pid : pids) alive_.push_back(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    scratch_.resize(3 * kBlock / sizeof(std::uint64_t));
    tables_.resize(pids.size());
    thread_ = std::thread([this] { serve(); });
  }

  ~Team() {
    if (getpid() != process_) {  // a forked child has no thread
      thread_.detach();
      return;
    }
    nb::gil_scoped_release release;
    closed_ = true;
    queued_.fetch_add(1);
    syscall(SYS_futex, &queued_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    for (int peer = 0; peer < size_; ++peer) ring(boards_[peer]);
    thread_.join();
    for (int handle : alive_) {
      if (handle >= 0) ::close(handle);
    }
    munmap(boards_, bytes_);
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Hands an operation in; returns its number. `runs` are pairs of an address and an end.
  std::uint32_t post(int kind, int dtype, bool mean, bool follows, Address in, Address out,
                     std::size_t nbytes, std::uint64_t tag, bool now,
                     const std::vector<std::uint64_t>& runs) {
    const std::uint32_t number = boards_[rank_].posted.load();
    // The place in the ring must have been read by all.
    if (number >= kSlots && !complete(number - kSlots)) {
      nb::gil_scoped_release release;
      while (!wait_on(number - kSlots, Clock::now() + kSlice)) {
      }
    }
    Work& work = works_[number % kSlots];
    work = {static_cast<Kind>(kind), dtype, mean, follows, in, out, nbytes, tag, {}};
    for (std::size_t k = 0; k + 1 < runs.size(); k += 2) work.runs.push_back({runs[k], runs[k + 1]});
    const Address where = runs.empty() ? in : reinterpret_cast<Address>(work.runs.data());
    boards_[rank_].slots[number % kSlots] = {where, tag, work.runs.size()};
    boards_[rank_].posted.store(number + 1);
    ring(boards_[rank_]);
    queued_.fetch_add(1);
    if (!now && idle_.load()) syscall(SYS_futex, &queued_, FUTEX_WAKE, 1, nullptr, nullptr, 0);
    return number;
  }

  // Whether all ranks are done with an operation.
  bool complete(std::uint32_t number) const {
    for (int peer = 0; peer < size_; ++peer) {
      if (!reached(boards_[peer].done, number)) return false;
    }
    return true;
  }

  // Waits for an operation, and runs what it waits for in this thread; false after `seconds`.
  bool wait(std::uint32_t number, double seconds) {
    if (complete(number)) return true;
    nb::gil_scoped_release release;
    const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                          std::chrono::duration<double>(seconds));
    return wait_on(number, until);
  }

  // Reads eight bytes of another rank, to see whether that is allowed; 0 or the error's number.
  int probe(int peer, Address address, std::uint64_t expected) const {
    std::uint64_t found = 0;
    const int error = read(peer, address, &found, sizeof found);
    return error ? error : (found == expected ? 0 : EFAULT);
  }

 private:
  bool wait_on(std::uint32_t number, Clock::time_point until) {
    if (!run_until(number, until)) return false;
    for (int peer = 0; peer < size_; ++peer) {
      if (!await(boards_[peer].done, peer, number, until)) return false;
    }
    return true;
  }

  // Waits until a counter of a rank has passed a number.
  bool await(const Counter& counter, int peer, std::uint32_t number, Clock::time_point until) {
    Board& board = boards_[peer];
    while (!reached(counter, number)) {
      check(peer);
      const auto left = until - Clock::now();
      if (left <= Clock::duration::zero() || closed_) return false;
      const std::uint32_t seen = board.bell.load();
      board.sleepers.fetch_add(1);
      if (!reached(counter, number)) {
        sleep_on(board.bell, seen, std::min<Clock::duration>(left, kSlice));
      }
      board.sleepers.fetch_sub(1);
    }
    return true;
  }

  void check(int peer) const {
    if (failed_.load()) throw std::runtime_error(error_);
    pollfd handle{alive_[peer], POLLIN, 0};
    if (alive_[peer] >= 0 && poll(&handle, 1, 0) > 0) {
      throw std::runtime_error("the connection to rank " + std::to_string(peer) +
                               " of its group is closed: the peer has ended");
    }
  }

  // Runs operations in turn, the one of this number included.
  bool run_until(std::uint32_t number, Clock::time_point until) {
    while (!reached(boards_[rank_].done, number)) {
      std::unique_lock<std::timed_mutex> lock(turn_, until);
      if (!lock.owns_lock()) return false;
      const std::uint32_t next = boards_[rank_].done.load();
      if (static_cast<std::int32_t>(next - number) > 0) break;
      if (!run(next, until)) return false;
      boards_[rank_].done.store(next + 1);
      ring(boards_[rank_]);
    }
    return true;
  }

  bool run(std::uint32_t number, Clock::time_point until) {
    const Work& work = works_[number % kSlots];
    for (int step = 1; step < size_; ++step) {
      const int peer = (rank_ + step) % size_;
      // What follows an operation reads, and writes, what that one has left: see `post`.
      const Board& board = boards_[peer];
      if (!await(board.posted, peer, number, until)) return false;
      if (work.follows && !await(board.done, peer, number - 1, until)) return false;
      // Another tag is another operation: it never comes, which the watchdog explains.
      while (board.slots[number % kSlots].tag != work.tag) {
        check(peer);
        if (Clock::now() >= until || closed_) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    }
    if (work.kind == Kind::gather) {
      gather(number, work);
    } else if (work.dtype == 0) {
      add<float, float>(number, work);
    } else if (work.dtype == 1) {
      add<double, double>(number, work);
    } else {
      add<BFloat16, float>(number, work);
    }
    return true;
  }

  void gather(std::uint32_t number, const Work& work) {
    char* out = reinterpret_cast<char*>(work.out);
    char* own = out + rank_ * work.nbytes;
    if (reinterpret_cast<Address>(own) != work.in) {
      std::memcpy(own, reinterpret_cast<const char*>(work.in), work.nbytes);
    }
    for (int step = 1; step < size_; ++step) {
      const int peer = (rank_ + step) % size_;
      take(peer, boards_[peer].slots[number % kSlots].address, out + peer * work.nbytes,
           work.nbytes);
    }
  }

  // Without `restrict`: what is added to may be where the first terms lie.
  template <class First, class Element, class Sum>
  void add_up(Sum* into, const First* first, const Element* terms, std::size_t length,
              bool mean) const {
    const Sum ranks = static_cast<Sum>(size_);
    if (mean) {
      for (std::size_t k = 0; k < length; ++k) {
        into[k] = (static_cast<Sum>(first[k]) + static_cast<Sum>(terms[k])) / ranks;
      }
    } else {
      for (std::size_t k = 0; k < length; ++k) {
        into[k] = static_cast<Sum>(first[k]) + static_cast<Sum>(terms[k]);
      }
    }
  }

  // In the order of the ranks, so that the bits depend on nothing else.
  template <class Element, class Sum>
  void add(std::uint32_t number, const Work& work) {
    const std::size_t count = work.nbytes / sizeof(Element);
    const std::size_t longest = kBlock / sizeof(Sum);
    char* scratch = reinterpret_cast<char*>(scratch_.data());
    Element* arrived[] = {reinterpret_cast<Element*>(scratch),
                          reinterpret_cast<Element*>(scratch + kBlock)};
    Sum* sums = reinterpret_cast<Sum*>(scratch + 2 * kBlock);
    Sum* out = reinterpret_cast<Sum*>(work.out);
    for (int peer = 0; peer < size_; ++peer) {
      const Slot& slot = boards_[peer].slots[number % kSlots];
      if (peer == rank_) continue;
      tables_[peer].resize(slot.runs);
      take(peer, slot.address, tables_[peer].data(), slot.runs * sizeof(Run));
    }
    for (std::size_t begin = 0; begin < count; begin += longest) {
      const std::size_t length = std::min(longest, count - begin);
      const std::size_t offset = (rank_ * count + begin) * sizeof(Element);
      const Element* first = nullptr;
      for (int peer = 0; peer < size_; ++peer) {
        // The first two terms lie apart, then the second place is free for each of the others.
        Element* place = peer == 0 ? arrived[0] : arrived[1];
        const Element* terms = place;
        if (peer == rank_) {
          terms = reinterpret_cast<const Element*>(own(work, offset, length * sizeof(Element), place));
        } else if (tables_[peer].empty()) {
          take(peer, boards_[peer].slots[number % kSlots].address + offset, place,
               length * sizeof(Element));
        } else {
          collect(tables_[peer], offset, length * sizeof(Element), place,
                  [&](Address from, void* to, std::size_t nbytes) { take(peer, from, to, nbytes); });
        }
        const bool last = peer + 1 == size_;
        Sum* into = last ? out + begin : sums;
        if (peer == 0) {
          first = terms;
        } else if (peer == 1) {
          add_up(into, first, terms, length, last && work.mean);
        } else {
          add_up(into, sums, terms, length, last && work.mean);
        }
      }
    }
  }

  // Bytes of this rank's operand: where they are, or collected in `place` where they are in runs.
  static Address own(const Work& work, std::size_t begin, std::size_t nbytes, void* place) {
    if (work.runs.empty()) return work.in + begin;
    const auto run = run_at(work.runs, begin);
    if (run->address && begin + nbytes <= run->end) return run->address + begin - start_of(work.runs, run);
    collect(work.runs, begin, nbytes, place, [](Address from, void* to, std::size_t count) {
      std::memcpy(to, reinterpret_cast<const void*>(from), count);
    });
    return reinterpret_cast<Address>(place);
  }

  static Runs::const_iterator run_at(const Runs& runs, std::size_t begin) {
    return std::upper_bound(runs.begin(), runs.end(), begin,
                            [](std::size_t at, const Run& run) { return at < run.end; });
  }

  static std::size_t start_of(const Runs& runs, Runs::const_iterator run) {
    return run == runs.begin() ? 0 : (run - 1)->end;
  }

  template <class Copy>
  static void collect(const Runs& runs, std::size_t begin, std::size_t nbytes, void* target,
                      const Copy& copy) {
    auto run = run_at(runs, begin);
    for (std::size_t at = begin, last = begin + nbytes; at < last; ++run) {
      const std::size_t count = std::min<std::size_t>(run->end, last) - at;
      char* to = static_cast<char*>(target) + (at - begin);
      if (run->address) {
        copy(run->address + at - start_of(runs, run), to, count);
      } else {
        std::memset(to, 0, count);
      }
      at += count;
    }
  }

  int read(int peer, Address address, void* target, std::size_t nbytes) const {
    std::size_t taken = 0;
    while (taken < nbytes) {
      const iovec to{static_cast<char*>(target) + taken, nbytes - taken};
      const iovec from{reinterpret_cast<void*>(address + taken), nbytes - taken};
      const ssize_t count = process_vm_readv(pids_[peer], &to, 1, &from, 1, 0);
      if (count <= 0) {
        if (count < 0 && errno == EINTR) continue;
        return count < 0 ? errno : EFAULT;
      }
      taken += static_cast<std::size_t>(count);
    }
    return 0;
  }

  void take(int peer, Address address, void* target, std::size_t nbytes) {
    if (const int error = read(peer, address, target, nbytes)) {
      throw std::runtime_error("the connection to rank " + std::to_string(peer) +
                               " of its group failed: reading the peer's memory: " +
                               std::strerror(error));
    }
  }

  void serve() {
    for (;;) {
      const std::uint32_t seen = queued_.load();
      if (closed_) return;
      const std::uint32_t posted = boards_[rank_].posted.load();
      if (boards_[rank_].done.load() == posted) {
        idle_ = true;
        if (boards_[rank_].done.load() == boards_[rank_].posted.load() && !closed_) {
          sleep_on(queued_, seen, std::chrono::seconds(5));
        }
        idle_ = false;
        continue;
      }
      try {
        run_until(posted - 1, Clock::now() + std::chrono::seconds(1));
      } catch (const std::exception& error) {
        if (!failed_) {
          error_ = error.what();
          failed_ = true;
        }
        return;
      }
    }
  }

  const int rank_, size_;
  const pid_t process_;
  const std::vector<int> pids_;
  std::vector<int> alive_;
  Board* boards_ = nullptr;
  std::size_t bytes_ = 0;
  std::vector<std::uint64_t> scratch_;
  std::vector<Runs> tables_;  // Of the other ranks, in the present operation
  Work works_[kSlots];
  std::timed_mutex turn_;
  std::string error_;  // Written once, before `failed_`
  std::atomic<bool> failed_{false}, closed_{false}, idle_{false};
  Counter queued_{0};
  std::thread thread_;
};

std::size_t page_bytes(int ranks) { return sizeof(Board) * static_cast<std::size_t>(ranks); }

// Lets other processes of this user read this one's memory, where only its parents might (yama).
void allow_reading() { prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); }

}  // namespace

NB_MODULE(_host, module) {
  module.attr("INTERFACE") = 2;
  module.def("page_bytes", &page_bytes);
  module.def("allow_reading", &allow_reading);
  nb::class_<Team>(module, "Team")
      .def(nb::init<const std::string&, int, const std::vector<int>&>())
      .def("post", &Team::post)
      .def("complete", &Team::complete)
      .def("wait", &Team::wait)
      .def("probe", &Team::probe, nb::call_guard<nb::gil_scoped_release>());
}

#else

}  // namespace

NB_MODULE(_host, module) { module.attr("INTERFACE") = 0; }  // other systems: over the network

#endif

}  // namespace gulliver::host
