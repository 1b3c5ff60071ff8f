"""What drafting is worth: seconds of a forward by its tokens, and chances of guesses.

`StepCost` and `Calibration` are measured while they are used; `best` chooses. None of it knows
models: these are plain numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of tokens at which seconds are kept; between them they are interpolated."""
_BETWEEN = [math.sqrt(one * other) for one, other in pairwise(KNOTS)]


class StepCost:
    """Seconds of a forward by its number of tokens.

    [Note: shape and scale] While nothing is drafted only small batches are seen. What slows the
    machine down, such as longer contexts or another process, slows all batches down: so each
    measurement moves a common scale at once and the seconds at its own size slowly. Seconds never
    fall with tokens: what is measured is made monotone by averaging neighbours that violate it.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._weights: dict[int, float] = {}
        self._scale = 1.0
        self._curve: tuple[list[int], list[float]] | None = None

    @property
    def known(self) -> bool:
        """Whether two sizes at least have been measured."""
        return len(self._seconds) > 1

    def note(self, tokens: int, seconds: float) -> None:
        """Learns a measurement.

        Args:
            tokens: number of tokens of a forward.
            seconds: what it took.
        """
        knot = KNOTS[bisect_left(_BETWEEN, tokens)]
        if self._seconds:
            ratio = min(max(seconds / self.seconds(tokens), 0.1), 10.0)
            self._scale *= ratio**0.1
        # As if it had been measured at the knot: nearly all of a step is in proportion or constant.
        here = seconds / self._scale
        if knot in self._seconds:
            rate = max(0.05, 1 / (self._weights[knot] + 1))
            # One that took three times as long was disturbed by something else.
            here = min(here, 3 * self._seconds[knot])
            self._seconds[knot] += rate * (here - self._seconds[knot])
        else:
            self._seconds[knot] = here
        self._weights[knot] = self._weights.get(knot, 0.0) + 1
        self._curve = None

    def seconds(self, tokens: float) -> float:
        """Seconds of a forward of so many tokens; 0 where nothing is known."""
        if not self._seconds:
            return 0.0
        if self._curve is None:
            self._curve = _monotone(self._seconds, self._weights)
        knots, values = self._curve
        if tokens <= knots[0] or len(knots) == 1:
            return values[0] * self._scale
        right = min(bisect_left(knots, tokens), len(knots) - 1)
        left = right - 1
        slope = (values[right] - values[left]) / (knots[right] - knots[left])
        return (values[left] + slope * (tokens - knots[left])) * self._scale


def _monotone(
    seconds: dict[int, float], weights: dict[int, float]
) -> tuple[list[int], list[float]]:
    """Pools neighbours until nothing falls (isotonic regression)."""
    knots = sorted(seconds)
    pools: list[tuple[float, float, int]] = []
    for knot in knots:
        pools.append((seconds[knot], min(weights[knot], 20.0), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, one, m), (b, other, n) = pools[-2:]
            pools[-2:] = [((a * one + b * other) / (one + other), one + other, m + n)]
    return knots, [value for value, _, count in pools for _ in range(count)]


@dataclass
class _Count:
    seen: float = 0.0
    right: float = 0.0

    def add(self, right: bool) -> None:
        if self.seen >= REMEMBERED:
            self.seen, self.right = self.seen / 2, self.right / 2
        self.seen += 1
        self.right += right


REMEMBERED = 400
"""Guesses of a kind that are remembered; older ones count half, a quarter ..."""
BINS = 10


class Calibration:
    """How often guesses were right, by how sure the proposer was, by depth and by kind.

    A chance is that of its bin, drawn to that of the bin at all depths, and this to what the
    proposer said, as long as little has been seen.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[object, int, int], _Count] = {}

    def learn(self, kind: object, depth: int, sure: float, right: bool) -> None:
        """Learns what became of a guess whose parent was right.

        Args:
            kind: guesses that are alike, such as those of greedy requests.
            depth: depth of the guess, from 1.
            sure: what the proposer said.
            right: whether the token came.
        """
        for level in (0, min(depth, DEEPEST)):
            key = kind, level, _bin(sure)
            self._counts.setdefault(key, _Count()).add(right)

    def chance(self, kind: object, depth: int, sure: float) -> float:
        """How likely a guess is to be right, where its parent is."""
        everywhere = self._counts.get((kind, 0, _bin(sure))) or _NONE
        here = self._counts.get((kind, min(depth, DEEPEST), _bin(sure))) or _NONE
        prior = (everywhere.right + 4 * sure) / (everywhere.seen + 4)
        return (here.right + 8 * prior) / (here.seen + 8)


DEEPEST = 12
"""Guesses that lie deeper count as those of this depth."""
_NONE = _Count()


def _bin(sure: float) -> int:
    return min(int(sure * BINS), BINS - 1)


@dataclass(frozen=True)
class Choice:
    """Guesses that are worth verifying, and what is expected of them.

    Attributes:
        taken: number of guesses, the likeliest first.
        accepted: expected number of them that are right.
        gain: predicted tokens per second over those without drafts.
        step: predicted seconds of the forward over those of one without drafts.
    """

    taken: int = 0
    accepted: float = 0.0
    gain: float = 1.0
    step: float = 1.0


def best(chances: Sequence[float], sequences: int, cost: StepCost, drafting: float) -> Choice:
    """Chooses how many guesses to verify: those with the most tokens per second.

    With s sequences and n guesses, whose chances of being accepted are p, tokens per second are
    (s + p_1 + ... + p_n) / (t(s + n) + d); without drafts s / t(s).

    Args:
        chances: chances of being accepted of all guesses of a batch, the highest first.
        sequences: sequences of the batch.
        cost: seconds t of a forward.
        drafting: seconds d of making the guesses.
    """
    plain = cost.seconds(sequences)
    if plain <= 0:
        return Choice(len(chances), sum(chances))
    found, accepted, ahead = Choice(gain=0.0), 0.0, Choice()
    for count, chance in enumerate(chances, 1):
        accepted += chance
        step = cost.seconds(sequences + count)
        gain = (1 + accepted / sequences) / ((step + drafting) / plain)
        if gain > found.gain:
            found = Choice(count, accepted, gain, step / plain)
    return found if found.taken else ahead


@dataclass
class Mean:
    """Moving mean of what is measured; the first values count in full."""

    value: float = 0.0
    count: int = field(default=0, repr=False)
    memory: int = 20

    def add(self, value: float) -> None:
        """Learns a value."""
        self.count = min(self.count + 1, self.memory)
        self.value += (value - self.value) / self.count
