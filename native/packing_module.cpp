// The packer of data-centric steps for Python: gulliver.solve._packer. Step times are found by
// bisection between the lower bound and the best time so far; where the answer stays far above the
// bound, other degrees are tried at shorter and shorter times. Calls take microseconds and keep the
// GIL, which guards what packings remember.
//
// [Note: pruning] Most of a group's visits to shapes would find that one more sample does not fit.
// So the least first end up to each place of the order is kept: the first place where it is within
// the remaining room is found by bisection, and nothing before it can fit. A time is given up as
// soon as the free ranks cannot hold the rest even at its best rate. Neither changes an answer.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace gulliver::packing {
namespace {

using Count = std::int64_t;
using Row = std::vector<double>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kRounded = 1e-12;
constexpr Count kMostCount = Count{1} << 53;
constexpr std::size_t kFew = 16;
const Row kNever{0.0, kInfinity};

// Python's own bisection: the same answers for any rows.
std::size_t bisect_left(const Row& row, double x) {
  std::size_t low = 0, high = row.size();
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (row[middle] < x) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

std::size_t bisect_right(const Row& row, double x, std::size_t low, std::size_t high) {
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (x < row[middle]) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// How many of `count` samples end within `room`, where the first one does.
Count fitting(const Row& ends, Count count, double room) {
  const std::size_t most = std::min(ends.size(), static_cast<std::size_t>(count) + 1);
  return static_cast<Count>(bisect_right(ends, room, 1, most)) - 1;
}

struct Shape {
  std::vector<int> degrees;  // growing
  std::vector<Row> ends;     // of each degree; of two numbers at least, and never falling
  double rate;

  const Row* at(int degree) const {
    for (std::size_t n = 0; n < degrees.size(); ++n) {
      if (degrees[n] == degree) return &ends[n];
    }
    return nullptr;
  }
};

using Shapes = std::vector<std::shared_ptr<const Shape>>;
using Taken = std::vector<std::pair<int, Count>>;

struct Group {
  int degree;
  double seconds;
  Taken taken;
};

struct Packed {
  std::vector<Group> groups;
  std::vector<Count> left;

  bool whole() const {
    return std::all_of(left.begin(), left.end(), [](Count count) { return count == 0; });
  }
  double longest() const {
    double found = 0.0;
    for (const Group& group : groups) found = std::max(found, group.seconds);
    return found;
  }
};

using Told = std::tuple<std::vector<std::tuple<int, double, Taken>>, std::vector<Count>>;

Told told(const Packed& packed) {
  std::vector<std::tuple<int, double, Taken>> groups;
  groups.reserve(packed.groups.size());
  for (const Group& group : packed.groups) {
    groups.emplace_back(group.degree, group.seconds, group.taken);
  }
  return {std::move(groups), packed.left};
}

// What a search has found. Thousands are kept, so it becomes objects of Python only when asked for.
struct Answer {
  Packed packed;
  double seconds;
};

// Shapes in the order in which groups take them.
class Order {
 public:
  Order(std::vector<int> members, const Shapes& shapes)
      : members_(std::move(members)), shapes_(&shapes) {}

  const std::vector<int>& members() const { return members_; }

  double fill(const std::vector<Count>& left, std::size_t head, int degree, double limit,
              bool repeat, Taken& taken) {
    const Places& at = places(degree);
    const double slack = kRounded * limit;
    const std::size_t size = members_.size();
    const bool many = size > kFew;
    double spent = 0.0;
    std::size_t place = many ? std::max(head, bisect_left(at.lows, -limit - slack)) : head;
    for (; place < size; ++place) {
      Count count = left[static_cast<std::size_t>(members_[place])];
      if (!count || !(spent + at.firsts[place] <= limit)) continue;
      const Row& ends = *at.ends[place];
      if (count >= static_cast<Count>(ends.size()) ||
          spent + ends[static_cast<std::size_t>(count)] > limit) {
        count = fitting(ends, count, limit - spent);
      }
      if (!count) continue;
      spent += ends[static_cast<std::size_t>(count)];
      taken.emplace_back(members_[place], count);
      if (!repeat) break;
      if (many) {
        // One less may lie before the beginning; the loop adds one.
        const std::size_t next = bisect_left(at.lows, spent - limit - slack);
        if (next > place + 1) place = next - 1;
      }
    }
    return spent;
  }

 private:
  struct Places {
    int degree;
    std::vector<const Row*> ends;
    Row firsts, lows;
  };

  const Places& places(int degree) {
    for (const auto& known : places_) {
      if (known->degree == degree) return *known;
    }
    auto made = std::make_unique<Places>();
    made->degree = degree;
    double low = 0.0;
    for (std::size_t n = 0; n < members_.size(); ++n) {
      const Row* ends = (*shapes_)[static_cast<std::size_t>(members_[n])]->at(degree);
      made->ends.push_back(ends ? ends : &kNever);
      const double first = (*made->ends.back())[1];
      low = n == 0 || first < low ? first : low;
      made->firsts.push_back(first);
      made->lows.push_back(-low);
    }
    places_.push_back(std::move(made));
    return *places_.back();
  }

  std::vector<int> members_;
  const Shapes* shapes_;
  std::vector<std::unique_ptr<Places>> places_;
};

// What a search tries.
constexpr int kTries = 10;        // number of times
constexpr double kClose = 0.004;  // ratio to the bound below which bisection stops
constexpr double kFirst = 1.05;   // first time, relative to the bound
// Failure n, counted from 0, multiplies the time by kWidened ** (2 ** min(n, kMostWidened)).
constexpr double kWidened = 1.06;
constexpr int kMostWidened = 6;
constexpr double kShorter = 0.01;  // relative improvement that a second attempt must reach

// A second attempt: the weight of the time that a shape's samples leave unused in a group; the number
// by which the ranks are divided for the widest group, as one wide group makes all samples pay for
// its messages; and the gap to the bound above which the attempt is made.
struct Attempt {
  double lost;
  int part;
  double gap;
};
constexpr Attempt kOtherwise[] = {{0.5, 1, 0.02}, {2.0, 1, 0.06}, {0.0, 2, 0.06}, {0.0, 4, 0.06}};

class Packing {
 public:
  Packing(Shapes shapes, std::vector<Count> counts, int ranks, bool repeat)
      : shapes_(std::move(shapes)), counts_(std::move(counts)), ranks_(ranks), repeat_(repeat) {
    if (shapes_.size() != counts_.size()) throw std::invalid_argument("a count for each shape");
    for (const Count count : counts_) {
      if (count < 1 || count > kMostCount) throw std::invalid_argument("counts of at least 1");
    }
    for (std::size_t n = 0; n < shapes_.size(); ++n) {
      needed_ += static_cast<double>(counts_[n]) * shapes_[n]->rate;
    }
  }

  // Fills groups up to a time, the shapes of the widest groups and the largest first.
  std::optional<Packed> packed(double limit, std::vector<int>& degrees, double lost, bool partly,
                               int most) {
    if (!choose(limit, degrees, lost, partly, most)) return std::nullopt;
    Order& order = ordered(degrees);
    const std::vector<int>& members = order.members();
    Packed found{{}, counts_};
    std::vector<Count>& left = found.left;
    int free = ranks_;
    double needed = needed_;
    std::size_t head = 0, waiting = members.size();
    while (waiting) {
      const auto first = static_cast<std::size_t>(members[head]);
      if (!left[first]) {
        ++head;
        continue;
      }
      int degree = degrees[first];
      if (degree > free) {
        degree = free ? chosen(first, left[first], limit, free, 0.0) : 0;
        if (!degree && partly) {
          ++head;
          --waiting;
          continue;
        }
      }
      if (!degree || (!partly && needed > free * limit * (1 + 1e-9))) return std::nullopt;
      Group group{degree, 0.0, {}};
      group.seconds = order.fill(left, head, degree, limit, repeat_, group.taken);
      for (const auto& [shape, count] : group.taken) {
        const auto number = static_cast<std::size_t>(shape);
        left[number] -= count;
        waiting -= !left[number];
        needed -= static_cast<double>(count) * shapes_[number]->rate;
      }
      found.groups.push_back(std::move(group));
      free -= degree;
      if (!free && waiting) {
        if (!partly) return std::nullopt;
        break;
      }
    }
    return found;
  }

  std::optional<Answer> search(double bound) {
    std::optional<Packed> best;
    double longest = bisected(bound, best);
    if (!best && repeat_) {
      best = together();
      if (!best) return std::nullopt;
      longest = best->groups[0].seconds;
    }
    for (const auto& [lost, part, gap] : kOtherwise) {
      if (best && longest > (1 + gap) * bound) {
        const int most = std::max(1, ranks_ / part);
        longest = shortened(bound, *best, longest, lost, most);
      }
    }
    if (!best) {
      std::vector<int> degrees(counts_.size());
      best = packed(kInfinity, degrees, 0.0, true, ranks_);
      if (!best) return std::nullopt;
      longest = best->longest();
    }
    return Answer{std::move(*best), longest};
  }

 private:
  // Chooses the degree of every shape; returns whether all have one.
  bool choose(double limit, std::vector<int>& degrees, double lost, bool partly, int most) const {
    for (std::size_t shape = 0; shape < counts_.size(); ++shape) {
      if (degrees[shape] && (*shapes_[shape]->at(degrees[shape]))[1] <= limit) continue;
      const Count count = counts_[shape];
      int degree = chosen(shape, count, limit, most, lost);
      if (!degree) degree = chosen(shape, count, limit, ranks_, lost);
      if (!degree && !partly) return false;
      degrees[shape] = degree;
    }
    return true;
  }

  // Degree of the fewest rank seconds, 0 for none; idle time of groups counts by `lost`.
  int chosen(std::size_t shape, Count count, double limit, int ranks, double lost) const {
    const Shape& known = *shapes_[shape];
    double least = kInfinity;
    int found = 0;
    for (std::size_t n = 0; n < known.degrees.size(); ++n) {
      const int degree = known.degrees[n];
      const Row& ends = known.ends[n];
      if (degree > ranks || !(ends[1] <= limit)) continue;
      Count fits = count;
      if (count >= static_cast<Count>(ends.size()) ||
          ends[static_cast<std::size_t>(count)] > limit) {
        fits = fitting(ends, count, limit);
      }
      const double end = ends[static_cast<std::size_t>(fits)];
      const double left = lost != 0.0 && fits < count ? limit - end : 0.0;
      const double each = degree * (end + lost * left) / static_cast<double>(fits);
      if (each < least) {
        least = each;
        found = degree;
      }
    }
    return found;
  }

  Order& ordered(const std::vector<int>& degrees) {
    // The last one is kept: times that are tried one after the other mostly choose alike.
    if (!order_ || degrees != ordered_by_) {
      std::vector<int> members;
      for (std::size_t shape = 0; shape < degrees.size(); ++shape) {
        if (degrees[shape]) members.push_back(static_cast<int>(shape));
      }
      std::vector<double> firsts(degrees.size());
      for (const int shape : members) {
        const auto number = static_cast<std::size_t>(shape);
        firsts[number] = (*shapes_[number]->at(degrees[number]))[1];
      }
      std::stable_sort(members.begin(), members.end(), [&](int one, int other) {
        const auto a = static_cast<std::size_t>(one), b = static_cast<std::size_t>(other);
        if (degrees[a] != degrees[b]) return degrees[a] > degrees[b];
        return firsts[a] > firsts[b];
      });
      order_ = std::make_unique<Order>(std::move(members), shapes_);
      ordered_by_ = degrees;
    }
    return *order_;
  }

  // Bisects for the least time for which the ranks suffice.
  double bisected(double bound, std::optional<Packed>& best) {
    double low = bound, high = 0.0, limit = kFirst * bound, longest = kInfinity;
    std::vector<int> degrees(counts_.size());
    for (int number = 0; number < kTries; ++number) {
      std::vector<int> chosen = degrees;
      std::optional<Packed> found = packed(limit, chosen, 0.0, false, ranks_);
      if (!found || !found->whole()) {
        low = limit;
        const int squared = std::min(number, kMostWidened);
        limit = high != 0.0 ? (low + high) / 2 : limit * std::pow(kWidened, 1 << squared);
        continue;
      }
      degrees = std::move(chosen);
      const double seconds = found->longest();
      if (seconds < longest) {
        best = std::move(found);
        longest = seconds;
      }
      high = std::min(seconds, limit);
      if (high - low < kClose * bound) break;
      limit = (low + high) / 2;
    }
    return longest;
  }

  // Tries shorter and shorter times with other degrees, until the ranks do not suffice.
  double shortened(double bound, Packed& best, double longest, double lost, int most) {
    std::vector<int> degrees(counts_.size());
    double shorter = kShorter;
    for (int number = 0; number < kTries; ++number) {
      const double limit = std::max(bound, (1 - shorter) * longest);
      std::vector<int> chosen = degrees;
      std::optional<Packed> found = packed(limit, chosen, lost, false, most);
      if (found && found->whole()) {
        degrees = std::move(chosen);
        best = std::move(*found);
        longest = best.longest();
        shorter *= 2;
      } else {
        shorter /= 2;
        if (shorter < kShorter) break;
      }
    }
    return longest;
  }

  // All samples in one group of the degree that ends soonest, if a degree is common to all.
  std::optional<Packed> together() const {
    std::optional<std::pair<double, int>> least;
    for (const int degree : shapes_.empty() ? std::vector<int>{} : shapes_[0]->degrees) {
      double seconds = 0.0;
      bool possible = true;
      for (std::size_t n = 0; n < shapes_.size() && possible; ++n) {
        const Row* ends = shapes_[n]->at(degree);
        possible = ends && counts_[n] < static_cast<Count>(ends->size());
        if (possible) seconds += (*ends)[static_cast<std::size_t>(counts_[n])];
      }
      if (possible && (!least || std::pair{seconds, degree} < *least)) least = {seconds, degree};
    }
    if (!least) return std::nullopt;
    Taken taken;
    for (std::size_t n = 0; n < counts_.size(); ++n) {
      taken.emplace_back(static_cast<int>(n), counts_[n]);
    }
    return Packed{{{least->second, least->first, std::move(taken)}},
                  std::vector<Count>(counts_.size())};
  }

  Shapes shapes_;
  std::vector<Count> counts_;
  int ranks_;
  bool repeat_;
  double needed_ = 0.0;
  std::unique_ptr<Order> order_;
  std::vector<int> ordered_by_;
};

// Seconds of all shapes, by their numbers.
class Tables {
 public:
  Tables(int ranks, bool repeat) : ranks_(ranks), repeat_(repeat) {
    if (ranks < 1) throw std::invalid_argument("at least one rank");
  }

  void learn(std::size_t number, std::vector<int> degrees, std::vector<Row> ends, double rate) {
    if (degrees.size() != ends.size() || number > shapes_.size() || std::isnan(rate)) {
      throw std::invalid_argument("ends of each degree, and shapes in a row");
    }
    for (std::size_t n = 0; n < degrees.size(); ++n) {
      // Not a number would make orders of shapes undefined.
      const Row& row = ends[n];
      const bool is_number = std::none_of(row.begin(), row.end(), [](double x) { return x != x; });
      if (row.size() < 2 || degrees[n] < 1 || (n && degrees[n] <= degrees[n - 1]) || !is_number ||
          !std::is_sorted(row.begin(), row.end())) {
        throw std::invalid_argument("ends never fall, and degrees grow");
      }
    }
    if (number == shapes_.size()) shapes_.emplace_back();
    shapes_[number] = std::make_shared<const Shape>(
        Shape{std::move(degrees), std::move(ends), rate});
  }

  // A packing keeps its shapes, whatever is learnt later.
  std::unique_ptr<Packing> packing(const std::vector<std::size_t>& numbers,
                                   std::vector<Count> counts) const {
    Shapes chosen;
    for (const std::size_t number : numbers) chosen.push_back(shapes_.at(number));
    return std::make_unique<Packing>(std::move(chosen), std::move(counts), ranks_, repeat_);
  }

 private:
  int ranks_;
  bool repeat_;
  Shapes shapes_;
};

}  // namespace

NB_MODULE(_packer, module) {
  module.attr("INTERFACE") = 2;
  nb::class_<Answer>(module, "Answer")
      .def_ro("seconds", &Answer::seconds)
      .def("packed", [](const Answer& answer) { return told(answer.packed); });
  nb::class_<Packing>(module, "Packing").def("search", &Packing::search);
  nb::class_<Tables>(module, "Tables")
      .def(nb::init<int, bool>())
      .def("learn", &Tables::learn)
      .def("packing", &Tables::packing);
}

}  // namespace gulliver::packing
