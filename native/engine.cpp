#include "engine.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <system_error>

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "crc32.hpp"
#include "ring.hpp"

namespace gulliver {
namespace {

constexpr std::uint64_t kBlock = 4096;
constexpr std::uint64_t kSlice = 8u << 20;  // far below the 2 GiB that Linux moves in one call
constexpr std::uint64_t kChunk = 128u << 10;  // is copied and summed while it is in the cache
constexpr unsigned kRingDepth = 16;

#ifndef O_DIRECT
constexpr int kDirect = -1;
#else
constexpr int kDirect = O_DIRECT;
#endif

const char* action_of(Kind kind) {
  switch (kind) {
    case Kind::write: return "write";
    case Kind::fsync: return "force to the disk";
    default: return "read";
  }
}

std::pair<std::int64_t, std::uint64_t> key(const Request& request) {
  return {-request.priority, request.number};
}

bool wait_until(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                double seconds, const std::function<bool()>& happened) {
  const auto span = std::chrono::duration<double>(seconds);
  return changed.wait_for(lock, std::chrono::duration_cast<std::chrono::nanoseconds>(span),
                          happened);
}

// Python's signal handlers belong to Python's threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

// Tickets

bool Ticket::copied() const { return copied_; }

bool Ticket::done() const { return done_; }

std::optional<std::uint32_t> Ticket::checksum() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return checksum_;
}

std::optional<Failure> Ticket::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

bool Ticket::wait_copied(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return wait_until(changed_, lock, seconds, [this] { return copied_.load(); });
}

bool Ticket::wait(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return wait_until(changed_, lock, seconds, [this] { return done_.load(); });
}

void Ticket::set_copied(std::uint32_t checksum) {
  std::lock_guard<std::mutex> lock(mutex_);
  checksum_ = checksum;
  copied_ = true;
  changed_.notify_all();
}

void Ticket::finish(std::optional<Failure> failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  failure_ = failure;
  copied_ = true;
  done_ = true;
  changed_.notify_all();
}

// Beginning and end

Engine::Engine(std::uint64_t page_bytes, int pages, int copiers, int writers, int queue,
               bool direct, bool io_uring, int nice)
    : page_bytes_(page_bytes),
      queue_(static_cast<std::uint64_t>(queue)),
      direct_(direct),
      nice_(nice) {
  add_pages(map_pages(pages));
  if (io_uring) ring_ = Ring::make(kRingDepth, ring_errno_);
  const SignalsBlocked blocked;
  try {
    for (int k = 0; k < copiers; ++k) threads_.emplace_back([this] { copy_loop(); });
    if (ring_) {
      threads_.emplace_back([this] { ring_->run(*this); });
    } else {
      for (int k = 0; k < writers; ++k) threads_.emplace_back([this] { move_loop(); });
    }
  } catch (const std::system_error& error) {
    stop();
    throw Refusal(std::string("no more threads: ") + error.what());
  } catch (...) {
    stop();
    throw;
  }
}

Engine::~Engine() {
  begin_close();
  while (!idle(1.0)) {
  }
  stop();
}

void Engine::begin_close() {
  Lock lock(mutex_);
  closing_ = true;
  held_ = false;
  for (auto place = waiting_.begin(); place != waiting_.end();) {
    if (place->second->kind == Kind::page) {
      place->second->ticket->finish(std::nullopt);
      place = waiting_.erase(place);
    } else {
      ++place;
    }
  }
  wake_movers();
  room_.notify_all();
}

bool Engine::idle(double seconds) {
  Lock lock(mutex_);
  return wait_until(quiet_, lock, seconds, [this] { return pending_ == 0; });
}

void Engine::stop() {
  {
    Lock lock(mutex_);
    if (stopped_) return;
    closing_ = closed_ = stopped_ = true;
    held_ = false;
    to_copy_.notify_all();
    wake_movers();
  }
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  decltype(files_) left;
  {
    // Somebody may be closing one of them at this moment: each is closed by whoever takes it out.
    Lock lock(mutex_);
    left.swap(files_);
    for (const auto& file : left) file->closed = true;
  }
  for (const auto& file : left) close_handles(*file);
  ring_.reset();
  for (const auto& [start, nbytes] : regions_) munmap(start, nbytes);
  regions_.clear();
}

const char* Engine::kind() const { return ring_errno_ == 0 ? "native io_uring" : "native threads"; }

// The pool

std::pair<char*, std::uint64_t> Engine::map_pages(int count) const {
  const std::uint64_t nbytes = static_cast<std::uint64_t>(count) * page_bytes_;
  void* start = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED)
    throw Refusal("no memory for " + std::to_string(count) + " pages of " +
                  std::to_string(page_bytes_) + " bytes: " + std::strerror(errno));
#ifdef MADV_HUGEPAGE
  madvise(start, nbytes, MADV_HUGEPAGE);
#endif
  // Touched now: the first use of fresh memory is several times slower than the next.
  std::memset(start, 0, nbytes);
  return {static_cast<char*>(start), nbytes};
}

void Engine::add_pages(std::pair<char*, std::uint64_t> region) {
  regions_.push_back(region);
  for (std::uint64_t from = 0; from < region.second; from += page_bytes_) {
    free_.push_back(static_cast<int>(pages_.size()));
    pages_.push_back(region.first + from);
  }
}

void Engine::grow(int pages) {
  const auto region = map_pages(pages);
  Lock lock(mutex_);
  if (closing_) munmap(region.first, region.second);
  check_open(nullptr);
  add_pages(region);
  grant();
}

int Engine::pages() const {
  Lock lock(mutex_);
  return static_cast<int>(pages_.size());
}

std::vector<std::pair<std::uintptr_t, std::uint64_t>> Engine::regions() const {
  Lock lock(mutex_);
  std::vector<std::pair<std::uintptr_t, std::uint64_t>> found;
  for (const auto& [start, nbytes] : regions_)
    found.emplace_back(reinterpret_cast<std::uintptr_t>(start), nbytes);
  return found;
}

Counters Engine::counters() const {
  Lock lock(mutex_);
  return {written_, read_, past_cache_, pending_, free_.size()};
}

// Hands free pages to who waits for them, in order.
void Engine::grant() {
  while (!free_.empty() && !waiting_.empty()) {
    const auto request = pop(waiting_);
    request->page = free_.back();
    free_.pop_back();
    if (request->kind == Kind::page) {
      lent_.insert(request->page);
      request->ticket->finish(std::nullopt);
    } else {
      push(copies_, request);
    }
  }
}

std::shared_ptr<Request> Engine::want(std::int64_t priority) {
  Lock lock(mutex_);
  check_open(nullptr);
  auto wanted = make(Kind::page, nullptr, 0, nullptr, 0, priority);
  wanted->number = numbers_++;
  push(waiting_, wanted);
  return wanted;
}

int Engine::give_up(const std::shared_ptr<Request>& wanted) {
  Lock lock(mutex_);
  waiting_.erase(key(*wanted));
  return wanted->page;
}

int Engine::granted(const std::shared_ptr<Request>& wanted) const {
  Lock lock(mutex_);
  return wanted->page;
}

std::uintptr_t Engine::address(int page) const {
  Lock lock(mutex_);
  return reinterpret_cast<std::uintptr_t>(pages_.at(static_cast<std::size_t>(page)));
}

void Engine::release(int page) {
  Lock lock(mutex_);
  take_back(page);
  free_.push_back(page);
  grant();
}

void Engine::take_back(int page) {
  if (!lent_.erase(page))
    throw Refusal("page " + std::to_string(page) + " is not lent to anybody");
}

// Files

int Engine::open_handle(const std::string& path, int flags, std::optional<Failure>& failure,
                        const char* action) {
  for (;;) {
    const Hit hit = injected(Call::open);
    const int handle = hit.number ? -1 : ::open(path.c_str(), flags | O_CLOEXEC, 0666);
    if (handle >= 0) return handle;
    const int number = hit.number ? hit.number : errno;
    if (number == EINTR) continue;
    failure = Failure{action, -1, number};
    return -1;
  }
}

// A full disk is found before hours of writing, not after.
std::optional<Failure> Engine::allocate(int handle, std::uint64_t nbytes) {
  if (!nbytes) return std::nullopt;
  const auto size = static_cast<off_t>(nbytes);
  int number = EOPNOTSUPP;
#ifdef __linux__
  do {
    const Hit hit = injected(Call::fallocate);
    number = hit.number ? hit.number : (::fallocate(handle, 0, 0, size) ? errno : 0);
  } while (number == EINTR);
  if (number == 0) return std::nullopt;
#endif
  if (number != EOPNOTSUPP && number != ENOSYS) return Failure{"reserve space for", -1, number};
  do {
    const Hit hit = injected(Call::truncate);
    number = hit.number ? hit.number : (::ftruncate(handle, size) ? errno : 0);
  } while (number == EINTR);
  if (number == 0) return std::nullopt;
  return Failure{"set the size of", -1, number};
}

Opened Engine::create(const std::string& path, std::uint64_t nbytes) {
  {
    Lock lock(mutex_);
    check_open(nullptr);
  }
  Opened opened;
  auto file = std::make_shared<File>();
  file->path = path;
  file->nbytes = nbytes;
  file->buffered = open_handle(path, O_RDWR | O_CREAT | O_EXCL, opened.failure, "create");
  if (opened.failure) return opened;
  opened.failure = allocate(file->buffered, nbytes);
  if (opened.failure) {
    ::close(file->buffered);
    ::unlink(path.c_str());
    return opened;
  }
  if (direct_ && kDirect >= 0) file->direct = ::open(path.c_str(), O_RDWR | kDirect | O_CLOEXEC);
  return adopt(std::move(file));
}

Opened Engine::open(const std::string& path) {
  {
    Lock lock(mutex_);
    check_open(nullptr);
  }
  Opened opened;
  auto file = std::make_shared<File>();
  file->path = path;
  file->buffered = open_handle(path, O_RDONLY, opened.failure, "open");
  if (opened.failure) return opened;
  struct stat status {};
  int number = ::fstat(file->buffered, &status) ? errno : 0;
  if (!number && S_ISDIR(status.st_mode)) number = EISDIR;
  if (number) {
    ::close(file->buffered);
    opened.failure = Failure{"open", -1, number};
    return opened;
  }
  file->nbytes = static_cast<std::uint64_t>(status.st_size);
  if (direct_ && kDirect >= 0) file->direct = ::open(path.c_str(), O_RDONLY | kDirect | O_CLOEXEC);
  return adopt(std::move(file));
}

Opened Engine::adopt(std::shared_ptr<File> file) {
  file->owner = this;
  Lock lock(mutex_);
  files_.insert(file);
  return {std::move(file), std::nullopt};
}

bool Engine::quiet(const std::shared_ptr<File>& file, double seconds) {
  Lock lock(mutex_);
  file->closed = true;
  return wait_until(quiet_, lock, seconds, [&] { return file->pending == 0; });
}

int Engine::close_file(const std::shared_ptr<File>& file) {
  {
    Lock lock(mutex_);
    if (!files_.erase(file)) return 0;
  }
  return close_handles(*file);
}

int Engine::close_handles(File& file) {
  int late = 0;
  for (int handle : {file.direct.exchange(-1), file.retired, file.buffered})
    // Linux has closed it even when it says EINTR.
    if (handle >= 0 && ::close(handle) && errno != EINTR) late = errno;
  file.retired = file.buffered = -1;
  return late;
}

// Submitting

void Engine::check_open(const File* file) const {
  if (closing_) throw Refusal("this I/O engine is closed");
  if (file && file->closed) throw Refusal(file->path + " is closed");
}

std::shared_ptr<Request> Engine::make(Kind kind, const std::shared_ptr<File>& file,
                                      std::uint64_t offset, char* address, std::uint64_t nbytes,
                                      std::int64_t priority) {
  auto request = std::make_shared<Request>();
  request->kind = kind;
  request->file = file;
  request->offset = offset;
  request->address = address;
  request->nbytes = nbytes;
  request->priority = priority;
  return request;
}

std::shared_ptr<Ticket> Engine::stage(const std::shared_ptr<File>& file, std::uint64_t offset,
                                      std::vector<Segment> segments, std::int64_t priority) {
  std::uint64_t total = 0;
  for (const auto& segment : segments) total += segment.nbytes;
  auto request = make(Kind::write, file, offset, nullptr, total, priority);
  request->segments = std::move(segments);
  Lock lock(mutex_);
  if (!total) request->ticket->set_copied(0);
  return submit(request, &waiting_, total == 0);
}

std::shared_ptr<Ticket> Engine::write_page(const std::shared_ptr<File>& file, std::uint64_t offset,
                                           int page, std::uint64_t nbytes, std::int64_t priority) {
  Lock lock(mutex_);
  check_open(file.get());
  take_back(page);
  auto request = make(Kind::write, file, offset, pages_[static_cast<std::size_t>(page)], nbytes,
                      priority);
  request->page = page;
  // Never waits: those in the queue may wait for this very page.
  request->counted = false;
  return submit(request, &copies_, false);
}

std::shared_ptr<Ticket> Engine::read(const std::shared_ptr<File>& file, std::uint64_t offset,
                                     char* address, std::uint64_t nbytes, std::int64_t priority,
                                     bool checked) {
  auto request = make(Kind::read, file, offset, address, nbytes, priority);
  request->checked = checked;
  Lock lock(mutex_);
  if (!nbytes && checked) request->ticket->set_copied(0);
  return submit(request, &moves_, nbytes == 0);
}

std::shared_ptr<Ticket> Engine::write(const std::shared_ptr<File>& file, std::uint64_t offset,
                                      char* address, std::uint64_t nbytes, std::int64_t priority) {
  auto request = make(Kind::write, file, offset, address, nbytes, priority);
  Lock lock(mutex_);
  return submit(request, &moves_, nbytes == 0);
}

std::shared_ptr<Ticket> Engine::sync(const std::shared_ptr<File>& file) {
  auto request = make(Kind::fsync, file, 0, nullptr, 0, 0);
  Lock lock(mutex_);
  return submit(request, &moves_, false);
}

void Engine::prefetch(const std::shared_ptr<File>& file, std::uint64_t offset,
                      std::uint64_t nbytes) {
  auto request = make(Kind::prefetch, file, offset, nullptr, nbytes, 0);
  Lock lock(mutex_);
  check_open(file.get());
  file->prefetched = true;
  // A hint: where there is no room, it is dropped.
  submit(request, &moves_, false);
}

// Puts a request into a line; null where the queue is full. `nothing`: it is done already.
std::shared_ptr<Ticket> Engine::submit(const std::shared_ptr<Request>& request, Line* line,
                                       bool nothing) {
  File& file = *request->file;
  check_open(&file);
  if (request->counted && counted_ >= queue_) return nullptr;
  if (nothing) {
    request->ticket->finish(std::nullopt);
    return request->ticket;
  }
  request->number = numbers_++;
  request->ticket->key_ = key(*request);
  ++pending_;
  ++file.pending;
  if (request->counted) ++counted_;
  if (request->kind == Kind::fsync && !file.writes.empty()) {
    file.syncs.push_back(request);
    return request->ticket;
  }
  if (request->kind == Kind::write) file.writes.insert(request->number);
  push(*line, request);
  return request->ticket;
}

void Engine::wait_room(double seconds) {
  Lock lock(mutex_);
  wait_until(room_, lock, seconds, [this] { return closing_ || counted_ < queue_; });
}

void Engine::push(Line& line, const std::shared_ptr<Request>& request) {
  line.emplace(key(*request), request);
  if (&line == &moves_) {
    to_move_.notify_one();
    if (ring_) ring_->wake();
  } else if (&line == &copies_) {
    to_copy_.notify_one();
  } else {
    grant();
  }
}

std::shared_ptr<Request> Engine::pop(Line& line) {
  auto first = line.begin();
  auto request = std::move(first->second);
  line.erase(first);
  return request;
}

void Engine::wake_movers() {
  to_move_.notify_all();
  if (ring_) ring_->wake();
}

// Copiers

void Engine::copy_loop() {
#ifdef __linux__
  // Linux has a priority per thread. Where it is refused, copiers run like all others.
  if (nice_) static_cast<void>(setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), nice_));
#endif
  Lock lock(mutex_);
  for (;;) {
    to_copy_.wait(lock, [this] { return closed_ || !copies_.empty(); });
    if (copies_.empty()) return;
    copy(lock, pop(copies_));
  }
}

void Engine::copy(Lock& lock, const std::shared_ptr<Request>& request) {
  lock.unlock();
  fill(*request);
  lock.lock();
  if (request->kind == Kind::write && request->nbytes) {
    // A page is aligned whatever was gathered into it.
    push(moves_, request);
  } else {
    finish(request);
  }
}

void Engine::copy_now(const Ticket& ticket) {
  Lock lock(mutex_);
  const auto place = copies_.find(ticket.key_);
  if (place == copies_.end() || place->second->ticket.get() != &ticket) return;
  const auto request = std::move(place->second);
  copies_.erase(place);
  copy(lock, request);
}

// Gathers what is to be gathered, and sums.
void Engine::fill(Request& request) {
  std::uint32_t crc = 0;
  if (request.kind == Kind::write && !request.segments.empty()) {
    char* target;
    {
      Lock lock(mutex_);
      target = pages_[static_cast<std::size_t>(request.page)];
    }
    request.address = target;
    for (const auto& segment : request.segments)
      for (std::uint64_t from = 0; from < segment.nbytes; from += kChunk) {
        const auto count = std::min(kChunk, segment.nbytes - from);
        if (segment.view) {
          copy_view(target, *segment.view, segment.begin + from, count);
          crc = crc32(crc, target, count);
        } else {
          crc = crc32_copy(crc, target, segment.address + from, count);
        }
        target += count;
      }
    std::vector<Segment>().swap(request.segments);
  } else {
    crc = crc32(0, request.address, request.nbytes);
  }
  request.ticket->set_copied(crc);
}

// Disk

void Engine::move_loop() {
  Lock lock(mutex_);
  for (;;) {
    to_move_.wait(lock, [this] { return (closed_ || !moves_.empty()) && !held_; });
    if (moves_.empty()) return;
    Transfer transfer = next_slice();
    lock.unlock();
    while (!transfer.skip) {
      const Attempt attempt = plan(transfer);
      const std::int64_t result = attempt.injected ? -attempt.injected : execute(transfer, attempt);
      if (settle(transfer, attempt, result) == Next::finished) break;
    }
    lock.lock();
    slice_done(transfer.request);
  }
}

// The next part of the first in line; the rest of a large one is for the next thread.
Transfer Engine::next_slice() {
  const auto first = moves_.begin();
  auto request = first->second;
  const bool whole = request->kind == Kind::fsync || request->kind == Kind::prefetch;
  const std::uint64_t begin = request->cursor;
  const std::uint64_t size = whole ? request->nbytes : std::min(kSlice, request->nbytes - begin);
  if (request->kind == Kind::fsync) request->error = request->file->error;
  request->cursor += size;
  ++request->active;
  if (request->cursor >= request->nbytes) {
    moves_.erase(first);
  } else {
    to_move_.notify_one();
  }
  return {request, request->offset + begin, request->address ? request->address + begin : nullptr,
          size, request->error.has_value()};
}

Attempt Engine::plan(Transfer& transfer) {
  File& file = *transfer.request->file;
  const Kind kind = transfer.request->kind;
  if (kind == Kind::prefetch) return {file.buffered, transfer.left, false, 0};
  if (kind == Kind::fsync) return {file.buffered, 0, false, injected(Call::fsync).number};
  const bool aligned = transfer.offset % kBlock == 0 && transfer.left >= kBlock &&
                       reinterpret_cast<std::uintptr_t>(transfer.address) % kBlock == 0;
  int handle = aligned ? file.direct.load() : -1;
  if (kind == Kind::read && file.prefetched) handle = -1;
  std::uint64_t size = handle >= 0 ? transfer.left / kBlock * kBlock : transfer.left;
  const Hit hit = injected(kind == Kind::write ? Call::write : Call::read);
  if (hit.limit >= 0) {
    handle = -1;
    size = std::min(size, static_cast<std::uint64_t>(hit.limit));
  }
  return {handle >= 0 ? handle : file.buffered, size, handle >= 0, hit.number};
}

std::int64_t Engine::execute(const Transfer& transfer, const Attempt& attempt) {
  const auto offset = static_cast<off_t>(transfer.offset);
  std::int64_t result = 0;
  switch (transfer.request->kind) {
    case Kind::write:
      result = ::pwrite(attempt.handle, transfer.address, attempt.size, offset);
      break;
    case Kind::read:
      result = ::pread(attempt.handle, transfer.address, attempt.size, offset);
      break;
    case Kind::fsync:
      result = ::fsync(attempt.handle);
      break;
    default:
#ifdef POSIX_FADV_WILLNEED
      posix_fadvise(attempt.handle, offset, static_cast<off_t>(attempt.size), POSIX_FADV_WILLNEED);
#endif
      break;
  }
  return result < 0 ? -errno : result;
}

// What a call returned: bytes, or minus errno.
Engine::Next Engine::settle(Transfer& transfer, const Attempt& attempt, std::int64_t result) {
  const Kind kind = transfer.request->kind;
  const int number = result < 0 ? static_cast<int>(-result) : 0;
  if (kind == Kind::prefetch) return Next::finished;
  if (number == EINTR || number == EAGAIN) return Next::again;
  if (number == EINVAL && attempt.direct) {
    // This file system wants other alignments: from now on through the page cache.
    give_up_direct(*transfer.request->file);
    return Next::again;
  }
  const bool moves = kind != Kind::fsync;
  if (number) {
    const auto offset = static_cast<std::int64_t>(transfer.offset);
    fail(transfer, action_of(kind), moves ? offset : -1, number);
    return Next::finished;
  }
  if (!moves) return Next::finished;
  if (result == 0) {
    fail(transfer, action_of(kind), static_cast<std::int64_t>(transfer.offset),
         kind == Kind::write ? EIO : ENODATA);
    return Next::finished;
  }
  const auto moved = static_cast<std::uint64_t>(result);
  (kind == Kind::write ? written_ : read_) += moved;
  if (attempt.direct) past_cache_ += moved;
  transfer.offset += moved;
  transfer.address += moved;
  transfer.left -= moved;
  return transfer.left ? Next::again : Next::finished;
}

void Engine::give_up_direct(File& file) {
  Lock lock(mutex_);
  const int handle = file.direct.exchange(-1);
  if (handle >= 0) file.retired = handle;
}

void Engine::fail(Transfer& transfer, const char* action, std::int64_t offset, int number) {
  Lock lock(mutex_);
  if (!transfer.request->error) transfer.request->error = Failure{action, offset, number};
}

// A slice is through; with the mutex.
void Engine::slice_done(const std::shared_ptr<Request>& request) {
  --request->active;
  if (request->active || request->cursor < request->nbytes) return;
  if (request->kind == Kind::read && request->checked && !request->error) {
    push(copies_, request);
  } else {
    finish(request);
  }
}

// Ends a request, and starts what waited for it; with the mutex.
void Engine::finish(const std::shared_ptr<Request>& request) {
  File& file = *request->file;
  if (request->kind == Kind::write) {
    file.writes.erase(request->number);
    if (request->error && !file.error) file.error = request->error;
  }
  if (request->page >= 0) {
    free_.push_back(request->page);
    request->page = -1;
    grant();
  }
  while (!file.syncs.empty() &&
         (file.writes.empty() || file.syncs.front()->number < *file.writes.begin())) {
    push(moves_, file.syncs.front());
    file.syncs.pop_front();
  }
  request->ticket->finish(request->error);
  --pending_;
  --file.pending;
  if (request->counted) --counted_;
  room_.notify_all();
  if (pending_ == 0 || (file.closed && file.pending == 0)) quiet_.notify_all();
}

// For tests

void Engine::inject(Call call, std::uint64_t nth, int number, std::int64_t limit,
                    std::uint64_t times) {
  Lock lock(mutex_);
  injections_[call].push_back({nth - 1, times, number, limit});
  injecting_ = true;
}

Engine::Hit Engine::injected(Call call) {
  Hit hit;
  if (!injecting_) return hit;
  Lock lock(mutex_);
  bool found = false;
  for (auto& injection : injections_[call]) {
    if (injection.skip) {
      --injection.skip;
    } else if (injection.times && !found) {
      --injection.times;
      hit = {injection.number, injection.limit};
      found = true;
    }
  }
  return hit;
}

void Engine::hold(bool held) {
  Lock lock(mutex_);
  held_ = held;
  wake_movers();
}

}  // namespace gulliver
