"""The search for the least time in which the samples of a step can be packed.

Times are found by bisection between the bound and the best so far; where the answer is far over the
bound, other degrees are tried at shorter and shorter times. `native/packing_module.cpp` does the
same, line for line: change both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gulliver.solve._step_packing import Packed, Packing

TRIES, CLOSE = 10, 0.004
"""Times that are tried, and the share of the bound at which trying more does not pay."""
FIRST = 1.05
"""The first time that is tried, over the bound."""
WIDENED = tuple(1.06 ** (2**number) for number in range(7))
"""How much longer the next time is, while none is found: by its number."""
OTHERWISE = ((0.5, 1, 0.02), (2.0, 1, 0.06), (0.0, 2, 0.06), (0.0, 4, 0.06))
"""Second tries: how much of the time that a shape's samples leave in a group counts as lost, what
part of the ranks a group may have (one wide group makes all samples pay for its messages), and the
gap to the bound from which on it is tried."""
SHORTER = 0.01
"""Share by which each of those is shorter than the best so far."""


class PythonAnswer:
    """What a search has found: seconds of the longest group, and the groups."""

    def __init__(self, seconds: float, packed: Packed) -> None:
        self.seconds, self._packed = seconds, packed

    def packed(self) -> Packed:
        """Groups, and what is left."""
        return self._packed


class PythonTables:
    """Ends and rates of all shapes, by number, in plain Python."""

    def __init__(self, ranks: int, repeat: bool) -> None:
        self._ranks, self._repeat = ranks, repeat
        self._known: list[tuple[dict[int, list[float]], float]] = []

    def learn(self, number: int, ends: Mapping[int, list[float]], rate: float) -> None:
        """Takes the ends of a shape by degree, and its least rank seconds of a sample."""
        self._known[number : number + 1] = [(dict(ends), rate)]

    def packing(self, numbers: Sequence[int], counts: Sequence[int]) -> SearchedPacking:
        """The packing of so many samples of shapes."""
        known = [self._known[number] for number in numbers]
        ends, rates = [ends for ends, _ in known], [rate for _, rate in known]
        return SearchedPacking(ends, counts, rates, self._ranks, self._repeat)


class SearchedPacking(Packing):
    """A packing for which the time is searched."""

    def search(self, bound: float) -> PythonAnswer | None:
        """Packs all samples in as little time as is found; or what finds a place, without repeats.

        Args:
            bound: seconds that no packing can be under.

        Returns:
            What was found; None where no degree is common to all shapes, so that not even one group
            can run them.
        """
        best, longest = self._bisected(bound)
        if best is None and self.repeat:
            best = self._together()
            if best is None:
                return None
            longest = best[0][0][1]
        for lost, part, gap in OTHERWISE:
            if best is not None and longest > (1 + gap) * bound:
                most = max(1, self.ranks // part)
                best, longest = self._shortened(bound, best, longest, lost, most)
        if best is None:
            best = self.pack(float("inf"), [0] * len(self.counts), partly=True)
            assert best is not None, "what does not fit is left"
            longest = max((seconds for _, seconds, _ in best[0]), default=0.0)
        return PythonAnswer(longest, best)

    def _bisected(self, bound: float) -> tuple[Packed | None, float]:
        """Bisects for the least time that the ranks suffice for."""
        low, high, limit = bound, 0.0, FIRST * bound
        best, longest = None, float("inf")
        degrees = [0] * len(self.counts)
        for number in range(TRIES):
            chosen = list(degrees)
            packed = self.pack(limit, chosen)
            if packed is None or any(packed[1]):
                low = limit
                limit = (low + high) / 2 if high else limit * WIDENED[min(number, 6)]
                continue
            # What a time has chosen that is too short would be too wide for longer ones.
            degrees = chosen
            seconds = max(group[1] for group in packed[0])
            if seconds < longest:
                best, longest = packed, seconds
            high = min(seconds, limit)
            if high - low < CLOSE * bound:
                break
            limit = (low + high) / 2
        return best, longest

    def _shortened(
        self, bound: float, best: Packed, longest: float, lost: float, most: int
    ) -> tuple[Packed, float]:
        """Tries shorter and shorter times with other degrees, until the ranks do not suffice."""
        degrees = [0] * len(self.counts)
        shorter = SHORTER
        for _ in range(TRIES):
            limit = max(bound, (1 - shorter) * longest)
            chosen = list(degrees)
            packed = self.pack(limit, chosen, lost, most=most)
            if packed is not None and not any(packed[1]):
                degrees = chosen
                best, longest = packed, max(group[1] for group in packed[0])
                shorter *= 2
            else:
                shorter /= 2
                if shorter < SHORTER:
                    break
        return best, longest

    def _together(self) -> Packed | None:
        """All samples in one group of the degree that ends soonest; None where none is common."""
        found = []
        for degree in self.ends[0] if self.ends else ():
            if all(degree in ends for ends in self.ends):
                seconds = 0.0
                for ends, count in zip(self.ends, self.counts, strict=True):
                    seconds += ends[degree][count]
                found.append((seconds, degree))
        if not found:
            return None
        seconds, degree = min(found)
        return [(degree, seconds, list(enumerate(self.counts)))], [0] * len(self.counts)
