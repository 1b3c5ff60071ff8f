#include "ring.hpp"

#include <algorithm>
#include <cerrno>

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

// Since Linux 5.6, which has all calls used here.
#ifdef IORING_FEAT_RW_CUR_POS
#include <cstring>

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace gulliver {
namespace {

constexpr std::uint64_t kEvent = ~std::uint64_t{0};

unsigned load(const unsigned* value) { return __atomic_load_n(value, __ATOMIC_ACQUIRE); }
void store(unsigned* place, unsigned value) { __atomic_store_n(place, value, __ATOMIC_RELEASE); }

}  // namespace

// The queues that we share with the kernel.
struct Ring::Maps {
  int handle = -1;
  io_uring_params params{};
  void* rings = MAP_FAILED;
  std::size_t ring_bytes = 0;
  void* table = MAP_FAILED;
  std::size_t table_bytes = 0;

  unsigned* at(unsigned offset) const {
    return reinterpret_cast<unsigned*>(static_cast<char*>(rings) + offset);
  }

  ~Maps() {
    if (table != MAP_FAILED) munmap(table, table_bytes);
    if (rings != MAP_FAILED) munmap(rings, ring_bytes);
    if (handle >= 0) ::close(handle);
  }

  int open(unsigned entries) {
    handle = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
    if (handle < 0) return errno;
    const unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;
    if ((params.features & needed) != needed) return ENOSYS;
    const std::size_t submissions = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t completions =
        params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    ring_bytes = submissions > completions ? submissions : completions;
    table_bytes = params.sq_entries * sizeof(io_uring_sqe);
    rings = map(ring_bytes, IORING_OFF_SQ_RING);
    if (rings == MAP_FAILED) return errno;
    table = map(table_bytes, IORING_OFF_SQES);
    return table == MAP_FAILED ? errno : 0;
  }

  void* map(std::size_t nbytes, off_t what) const {
    void* start = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, handle,
                       what);
    // A forked child has no business here.
    if (start != MAP_FAILED) madvise(start, nbytes, MADV_DONTFORK);
    return start;
  }
};

std::unique_ptr<Ring> Ring::make(unsigned depth, int& number) {
  std::unique_ptr<Ring> ring(new Ring);
  ring->maps_ = std::make_unique<Maps>();
  number = ring->maps_->open(2 * depth);  // depth, and the one that listens
  if (number) return nullptr;
  ring->event_ = eventfd(0, EFD_CLOEXEC);
  if (ring->event_ < 0) {
    number = errno;
    return nullptr;
  }
  ring->depth_ = depth;
  ring->flights_.resize(depth);
  for (unsigned slot = 0; slot < depth; ++slot) ring->idle_.push_back(slot);
  return ring;
}

Ring::~Ring() {
  // The kernel first: it may still listen to the event.
  maps_.reset();
  if (event_ >= 0) ::close(event_);
}

void Ring::wake() {
  if (!asleep_) return;
  asleep_ = false;
  const std::uint64_t one = 1;
  while (::write(event_, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void Ring::run(Engine& engine) {
  Engine::Lock lock(engine.mutex_);
  for (;;) {
    while (!engine.held_ && !engine.moves_.empty() && !idle_.empty()) {
      const unsigned slot = idle_.back();
      idle_.pop_back();
      flights_[slot].reset(new Flight{engine.next_slice(), {}});
      lock.unlock();
      start(engine, slot);
      lock.lock();
    }
    if (idle_.size() == depth_) {
      // Nothing in the kernel: a thread that waited there would be counted as waiting for a disk.
      engine.to_move_.wait(lock, [&engine] {
        return (engine.closed_ || !engine.moves_.empty()) && !engine.held_;
      });
      if (engine.moves_.empty()) return;
      continue;
    }
    // From here on, whoever adds to the line writes to the event, which ends the waiting.
    asleep_ = true;
    lock.unlock();
    listen();
    enter(1);
    reap(engine);
    lock.lock();
    asleep_ = false;
  }
}

void Ring::listen() {
  if (listening_) return;
  auto* sqe = static_cast<io_uring_sqe*>(entry(IORING_OP_READ, event_, kEvent));
  sqe->addr = reinterpret_cast<std::uintptr_t>(&event_value_);
  sqe->len = sizeof event_value_;
  listening_ = true;
}

void* Ring::entry(unsigned char code, int handle, std::uint64_t user) {
  const auto& params = maps_->params;
  unsigned* tail = maps_->at(params.sq_off.tail);
  // Only this thread writes the tail, and never more than there are places.
  const unsigned index = *tail & *maps_->at(params.sq_off.ring_mask);
  auto* sqe = static_cast<io_uring_sqe*>(maps_->table) + index;
  std::memset(sqe, 0, sizeof *sqe);
  sqe->opcode = code;
  sqe->fd = handle;
  sqe->user_data = user;
  maps_->at(params.sq_off.array)[index] = index;
  store(tail, *tail + 1);
  ++unsubmitted_;
  return sqe;
}

// Hands a slice's next call to the kernel, which sees it at the next enter().
void Ring::start(Engine& engine, unsigned slot) {
  Flight& flight = *flights_[slot];
  Transfer& transfer = flight.transfer;
  bool through = transfer.skip;
  while (!through) {
    flight.attempt = engine.plan(transfer);
    if (!flight.attempt.injected) break;
    through = engine.settle(transfer, flight.attempt, -flight.attempt.injected) ==
              Engine::Next::finished;
  }
  if (through) {
    Engine::Lock lock(engine.mutex_);
    engine.slice_done(transfer.request);
    flights_[slot].reset();
    idle_.push_back(slot);
    return;
  }
  const Attempt& attempt = flight.attempt;
  static constexpr unsigned char codes[] = {IORING_OP_WRITE, IORING_OP_READ, IORING_OP_FSYNC,
                                            IORING_OP_FADVISE};
  const Kind kind = transfer.request->kind;
  auto* sqe = static_cast<io_uring_sqe*>(
      entry(codes[static_cast<int>(kind)], attempt.handle, slot));
  if (kind == Kind::fsync) return;
  sqe->off = transfer.offset;
  sqe->addr = reinterpret_cast<std::uintptr_t>(transfer.address);
  sqe->len = static_cast<std::uint32_t>(attempt.size);
  if (kind == Kind::prefetch) {
    sqe->addr = 0;
    // The field has 32 bits, and it is a hint.
    sqe->len = static_cast<std::uint32_t>(std::min<std::uint64_t>(attempt.size, 1u << 30));
    sqe->fadvise_advice = POSIX_FADV_WILLNEED;
  }
}

void Ring::enter(unsigned at_least) {
  for (;;) {
    const long taken = syscall(__NR_io_uring_enter, maps_->handle, unsubmitted_, at_least,
                               IORING_ENTER_GETEVENTS, nullptr, 0);
    if (taken >= 0) {
      unsubmitted_ -= static_cast<unsigned>(taken);
      return;
    }
    // EAGAIN and EBUSY: the kernel is short of something until completions are taken.
    if (errno != EINTR) return;
  }
}

void Ring::reap(Engine& engine) {
  const auto& params = maps_->params;
  unsigned* head = maps_->at(params.cq_off.head);
  const unsigned mask = *maps_->at(params.cq_off.ring_mask);
  const auto* cqes = reinterpret_cast<io_uring_cqe*>(maps_->at(params.cq_off.cqes));
  while (*head != load(maps_->at(params.cq_off.tail))) {
    const io_uring_cqe done = cqes[*head & mask];
    store(head, *head + 1);
    if (done.user_data == kEvent) {
      listening_ = false;
      continue;
    }
    const auto slot = static_cast<unsigned>(done.user_data);
    Flight& flight = *flights_[slot];
    if (engine.settle(flight.transfer, flight.attempt, done.res) == Engine::Next::again) {
      start(engine, slot);
      continue;
    }
    Engine::Lock lock(engine.mutex_);
    engine.slice_done(flight.transfer.request);
    lock.unlock();
    flights_[slot].reset();
    idle_.push_back(slot);
  }
}

}  // namespace gulliver

#else

namespace gulliver {

struct Ring::Maps {};

std::unique_ptr<Ring> Ring::make(unsigned, int& number) {
  number = ENOSYS;
  return nullptr;
}

Ring::~Ring() = default;
void Ring::run(Engine&) {}
void Ring::wake() {}

}  // namespace gulliver

#endif
