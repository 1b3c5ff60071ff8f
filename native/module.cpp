// The engine for Python: gulliver.io._core. Calls that wait, copy or open release the GIL. Those
// that submit keep it: they take a mutex that is never held for long, and to get the GIL back from
// a busy thread takes 5 ms each time.
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include "crc32.hpp"
#include "engine.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace gulliver {
namespace {

using Address = std::uint64_t;
using FailureTuple = std::tuple<std::string, std::int64_t, int>;
using TicketRef = std::shared_ptr<Ticket>;
using Table = nb::ndarray<const std::int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using Release = nb::call_guard<nb::gil_scoped_release>;

// By reference: a shared_ptr made from a Python object would need the GIL where it is dropped, and
// that may be a thread of the engine, which holds the engine's mutex.
struct Handle {
  std::shared_ptr<File> file;
};

struct ViewHandle {
  std::shared_ptr<const View> view;
};
using Views = std::vector<std::pair<std::uint64_t, ViewHandle>>;

char* pointer(Address address) { return reinterpret_cast<char*>(address); }

std::optional<FailureTuple> tuple_of(const std::optional<Failure>& failure) {
  if (!failure) return std::nullopt;
  return FailureTuple{failure->action, failure->offset, failure->number};
}

// Ends the engine with its last reference; in a forked child, whose threads are gone, it is left.
class Owner {
 public:
  Owner(std::uint64_t page_bytes, int pages, int copiers, int writers, int queue, bool direct,
        bool io_uring, int nice)
      : process_(getpid()),
        engine_(std::make_unique<Engine>(page_bytes, pages, copiers, writers, queue, direct,
                                         io_uring, nice)) {}
  ~Owner() {
    if (getpid() != process_) {
      static_cast<void>(engine_.release());
      return;
    }
    nb::gil_scoped_release release;
    engine_.reset();
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  Engine* operator->() const { return engine_.get(); }

 private:
  pid_t process_;
  std::unique_ptr<Engine> engine_;
};

// A place in the line for a page.
struct Wanted {
  Owner* owner;
  std::shared_ptr<Request> request;

  std::pair<int, std::uintptr_t> page(int index) const {
    return {index, index < 0 ? 0 : (*owner)->address(index)};
  }
};

using OpenedTuple = std::tuple<std::optional<Handle>, std::uint64_t, std::optional<FailureTuple>>;

OpenedTuple tuple_of(Opened opened) {
  if (!opened.file) return {std::nullopt, 0, tuple_of(opened.failure)};
  const std::uint64_t nbytes = opened.file->nbytes;
  return {Handle{std::move(opened.file)}, nbytes, std::nullopt};
}

std::string path_of(const nb::bytes& path) { return {path.c_str(), path.size()}; }

std::vector<Segment> segments_of(const Table& table) {
  std::vector<Segment> segments(table.shape(0));
  for (std::size_t k = 0; k < segments.size(); ++k) {
    segments[k].address = pointer(static_cast<Address>(table(k, 0)));
    segments[k].nbytes = static_cast<std::uint64_t>(table(k, 1));
  }
  return segments;
}

ViewHandle view_of(Address address, std::uint64_t itemsize, const std::vector<std::int64_t>& sizes,
                   const std::vector<std::int64_t>& strides) {
  return {std::make_shared<const View>(pointer(address), itemsize, sizes, strides)};
}

void gather_all(Address target, Table table) {
  const auto segments = segments_of(table);
  nb::gil_scoped_release release;
  gather(pointer(target), segments);
}

TicketRef stage(Owner& owner, const Handle& handle, std::uint64_t offset, Table table,
                std::int64_t priority, const Views& views) {
  auto segments = segments_of(table);
  // Of a view the table has the first byte in place of an address.
  for (const auto& [k, found] : views) {
    Segment& segment = segments.at(k);
    segment.begin = reinterpret_cast<std::uintptr_t>(segment.address);
    segment.address = nullptr;
    segment.view = found.view;
  }
  return owner->stage(handle.file, offset, std::move(segments), priority);
}

void inject(Owner& owner, const std::string& call, std::uint64_t nth, int number,
            std::int64_t limit, std::uint64_t times) {
  static const char* const names[] = {"open", "fallocate", "write", "read", "fsync", "truncate"};
  for (int k = 0; k < 6; ++k)
    if (call == names[k]) return owner->inject(static_cast<Call>(k), nth, number, limit, times);
  throw Refusal("unknown call " + call);
}

}  // namespace
}  // namespace gulliver

NB_MODULE(_core, m) {
  using namespace gulliver;
  // Engines live until the interpreter's end: that is no leak worth a message.
  nb::set_leak_warnings(false);
  m.attr("INTERFACE") = 3;

  nb::class_<Handle>(m, "File");
  nb::class_<ViewHandle>(m, "View");
  m.def("view", &view_of);
  m.def("gather", &gather_all);

  nb::class_<Ticket>(m, "Ticket")
      .def_prop_ro("copied", &Ticket::copied)
      .def_prop_ro("done", &Ticket::done)
      .def_prop_ro("checksum", &Ticket::checksum)
      .def_prop_ro("failure", [](const Ticket& ticket) { return tuple_of(ticket.failure()); })
      .def("wait_copied",
           [](Ticket& ticket, double seconds) {
             if (ticket.copied()) return true;
             nb::gil_scoped_release release;
             return ticket.wait_copied(seconds);
           })
      .def("wait", [](Ticket& ticket, double seconds) {
        if (ticket.done()) return true;
        nb::gil_scoped_release release;
        return ticket.wait(seconds);
      });

  nb::class_<Wanted>(m, "Wanted")
      .def("wait", [](Wanted& w, double seconds) { return w.request->ticket->wait(seconds); },
           Release())
      .def_prop_ro("page", [](Wanted& w) { return w.page((*w.owner)->granted(w.request)); });

  nb::class_<Owner>(m, "Engine")
      .def(nb::init<std::uint64_t, int, int, int, int, bool, bool, int>(), Release())
      .def_prop_ro("kind", [](Owner& e) { return e->kind(); })
      .def_prop_ro("ring_errno", [](Owner& e) { return e->ring_errno(); })
      .def_prop_ro("pages", [](Owner& e) { return e->pages(); })
      .def_prop_ro("regions", [](Owner& e) { return e->regions(); })
      .def_prop_ro("counters",
                   [](Owner& e) {
                     const Counters c = e->counters();
                     return std::make_tuple(c.written, c.read, c.direct, c.pending, c.free_pages);
                   })
      .def("grow", [](Owner& e, int pages) { e->grow(pages); }, Release())
      .def("create",
           [](Owner& e, const nb::bytes& name, std::uint64_t nbytes) {
             const std::string path = path_of(name);
             nb::gil_scoped_release release;
             return tuple_of(e->create(path, nbytes));
           })
      .def("open",
           [](Owner& e, const nb::bytes& name) {
             const std::string path = path_of(name);
             nb::gil_scoped_release release;
             return tuple_of(e->open(path));
           })
      .def("owns", [](Owner& e, const Handle& handle) { return e->owns(*handle.file); })
      .def("quiet",
           [](Owner& e, const Handle& handle, double seconds) {
             return e->quiet(handle.file, seconds);
           },
           Release())
      .def("close_file",
           [](Owner& e, const Handle& handle) { return e->close_file(handle.file); }, Release())
      .def("stage", &stage)
      .def("write_page",
           [](Owner& e, const Handle& handle, std::uint64_t offset, int page, std::uint64_t nbytes,
              std::int64_t priority) {
             return e->write_page(handle.file, offset, page, nbytes, priority);
           })
      .def("read",
           [](Owner& e, const Handle& handle, std::uint64_t offset, Address address,
              std::uint64_t nbytes, std::int64_t priority, bool checked) {
             return e->read(handle.file, offset, pointer(address), nbytes, priority, checked);
           })
      .def("write",
           [](Owner& e, const Handle& handle, std::uint64_t offset, Address address,
              std::uint64_t nbytes, std::int64_t priority) {
             return e->write(handle.file, offset, pointer(address), nbytes, priority);
           })
      .def("sync", [](Owner& e, const Handle& handle) { return e->sync(handle.file); })
      .def("prefetch",
           [](Owner& e, const Handle& handle, std::uint64_t offset, std::uint64_t nbytes) {
             e->prefetch(handle.file, offset, nbytes);
           })
      .def("copy_now", [](Owner& e, const Ticket& ticket) { e->copy_now(ticket); }, Release())
      .def("wait_room", [](Owner& e, double seconds) { e->wait_room(seconds); }, Release())
      .def("want",
           [](Owner& e, std::int64_t priority) { return Wanted{&e, e->want(priority)}; },
           nb::keep_alive<0, 1>())
      .def("give_up",
           [](Owner& e, const Wanted& w) { return w.page(e->give_up(w.request)); })
      .def("release", [](Owner& e, int page) { e->release(page); })
      .def("begin_close", [](Owner& e) { e->begin_close(); })
      .def("idle", [](Owner& e, double seconds) { return e->idle(seconds); }, Release())
      .def("stop", [](Owner& e) { e->stop(); }, Release())
      .def("inject", &inject)
      .def("hold", [](Owner& e, bool held) { e->hold(held); });

  m.def("crc32",
        [](Address address, std::uint64_t nbytes, std::uint32_t crc, bool tables) {
          const auto call = tables ? crc32_tables : crc32;
          return call(crc, pointer(address), nbytes);
        },
        "address"_a, "nbytes"_a, "crc"_a = 0, "tables"_a = false, Release());
}
