"""What guesses are worth: seconds of a forward by its tokens, and how often guesses are right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Mean:
    """Moving mean of what is measured; the first values count in full."""

    value: float = 0.0
    count: int = field(default=0, repr=False)
    memory: int = 20

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, self.memory)
        self.value += (value - self.value) / self.count


class StepCost:
    """Seconds of a forward by its number of tokens."""

    # Means at sizes that are half a power of two apart, and straight lines between them. Seconds
    # never fall with tokens.

    def __init__(self) -> None:
        self._points: dict[int, tuple[Mean, Mean]] = {}
        self._scale = 1.0

    def note(self, tokens: int, seconds: float) -> None:
        """Learns what a forward took."""
        # While nothing is drafted only small batches are seen. Longer contexts or another process
        # slow all sizes down, so each measurement moves a scale that all of them share.
        if self._points:
            self._scale *= min(max(seconds / float(self.seconds(tokens)), 0.1), 10.0) ** 0.1
        size, mean = self._points.setdefault(round(2 * math.log2(tokens)), (Mean(), Mean()))
        seconds /= self._scale
        # What took three times as long was disturbed by something else.
        mean.add(min(seconds, 3 * mean.value) if mean.count else seconds)
        size.add(tokens)

    def seconds(self, tokens: Any) -> Any:
        """Seconds of a forward of so many tokens, a number or an array; 0 if nothing is known."""
        if not self._points:
            return 0.0 * np.asarray(tokens)
        points = sorted((size.value, mean.value) for size, mean in self._points.values())
        sizes, seconds = zip(*points, strict=True)
        return np.interp(tokens, sizes, np.maximum.accumulate(seconds)) * self._scale


class AcceptanceRate:
    """How often guesses were right, of those that the proposer was as sure of."""

    # Guesses are counted by kind and by tenths of how sure the proposer was. Its own word counts as
    # four guesses.

    REMEMBERED = 400

    def __init__(self) -> None:
        self._counts: dict[tuple[object, int], tuple[float, float]] = {}

    def learn(self, kind: object, sure: float, right: bool) -> None:
        """Counts a guess whose parent was right."""
        seen, rights = self._counts.get((kind, int(sure * 10)), (0.0, 0.0))
        if seen >= self.REMEMBERED:  # older ones count half, a quarter ...
            seen, rights = seen / 2, rights / 2
        self._counts[kind, int(sure * 10)] = seen + 1, rights + right

    def chance(self, kind: object, sure: float) -> float:
        """How likely a guess is to be right if its parent is."""
        seen, rights = self._counts.get((kind, int(sure * 10)), (0.0, 0.0))
        return (rights + 4 * sure) / (seen + 4)


@dataclass(frozen=True)
class GuessChoice:
    """Guesses that are worth verifying, and what is expected of them."""

    # Number of guesses, the likeliest first.
    taken: int = 0
    # Expected number of them that are right.
    accepted: float = 0.0
    # Predicted tokens per second over those without drafts.
    gain: float = 1.0
    # Predicted seconds of the forward over those of one without drafts.
    step: float = 1.0


def best(chances: Sequence[float], sequences: int, cost: StepCost, drafting: float) -> GuessChoice:
    """Chooses how many guesses to verify: those with the most tokens per second."""
    # With s sequences and n guesses, whose chances of being accepted are p, tokens per second are
    # (s + p_1 + ... + p_n) / (t(s + n) + d); without drafts s / t(s).
    if not len(chances):
        return GuessChoice()
    accepted, plain = np.cumsum(chances), float(cost.seconds(sequences))
    gains = 1 + accepted / sequences
    if plain <= 0:  # nothing has been measured yet
        return GuessChoice(len(chances), float(accepted[-1]), float(gains[-1]))
    steps = cost.seconds(sequences + 1 + np.arange(len(chances))) / plain
    gains /= steps + drafting / plain
    found = int(gains.argmax())
    return GuessChoice(found + 1, float(accepted[found]), float(gains[found]), float(steps[found]))
