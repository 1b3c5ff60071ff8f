"""`Guard`: whether drafting is on at a load, and when it is tried while it is off.

[Note: the guard] Four things keep speculation from costing. Guesses are chosen by seconds that were
measured on this machine, at this load. What a guess is worth is what became of guesses like it: all
proposals are compared with the tokens that came, verified or not. At a load that it has not seen it
is tried on a few sequences (`few`), and only where a gain is promised. And where it has not paid
lately it is off: a step then costs a few comparisons, and it is tried when a share `TRIAL` of the
time since the last trial pays for one, the reading of texts that the draft has not seen included.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gulliver.serve.speculative._cost import Mean

TRIAL = 0.01
"""Share of the time that is spent on finding out whether drafting has begun to pay."""
FEW, SHARE = 4, 8
"""Most sequences that drafting is tried on while it does not pay, or is not known to; and of how
many sequences one is: a trial reads their texts, and is to be short beside the steps of a batch."""
MARGIN = 0.02
"""Gain that must be predicted before anything is drafted: predictions are that uncertain."""
MEMORY = 8
"""Rounds whose gains are remembered."""


class Guard:
    """Gains by load, and the time that trials may take."""

    def __init__(self) -> None:
        # By the power of two of the sequences: loads of one level cost about the same.
        self._gains: dict[int, Mean] = {}
        self._credit = self._cost = 0.0

    def gain(self, sequences: int) -> float | None:
        """Gain of the last rounds with about so many sequences; None where there were none."""
        known = self._gains.get(_level(sequences))
        return None if known is None else known.value

    def is_off(self, sequences: int) -> bool:
        """Whether drafting has not paid lately, with about so many sequences."""
        gain = self.gain(sequences)
        return gain is not None and gain < 1 + MARGIN

    def learn(self, sequences: int, gain: float) -> None:
        """Learns what a round was worth, or is promised to be."""
        self._gains.setdefault(_level(sequences), Mean(memory=MEMORY)).add(gain)

    def earn(self, seconds: float) -> None:
        """Counts a step: a share of its time is there for trials."""
        self._credit += TRIAL * seconds

    def is_due(self, least: float) -> bool:
        """Whether a trial as dear as the last one that was looked at, or this much, is paid for."""
        return self._credit >= max(least, self._cost)

    def may_try(self, seconds: float) -> bool:
        """Whether a trial that takes so long is paid for."""
        self._cost = seconds
        return self._credit >= seconds

    def pay(self, seconds: float) -> None:
        """Counts a trial; what was left over beside it is lost, so that none follows at once."""
        self._credit = min(0.0, self._credit - seconds)


def few(sequences: int) -> int:
    """Number of sequences that drafting is tried on."""
    return max(1, min(FEW, sequences // SHARE))


def highest_gain(
    step: Callable[[float], float], drafting: Callable[[int], float], sequences: int, depth: int
) -> float:
    """Gain if every guess were right: where this is too small nothing need be tried.

    Args:
        step: seconds of a forward of so many tokens.
        drafting: seconds of making guesses of so many depths, for all sequences.
        sequences: number of sequences.
        depth: deepest guess.
    """
    plain, most, guesses = step(sequences), 0.0, 1
    while guesses <= sequences * depth:
        seconds = step(sequences + guesses) + drafting(-(-guesses // sequences))
        most = max(most, (1 + guesses / sequences) * plain / seconds)
        guesses *= 2
    return most


def _level(sequences: int) -> int:
    return int(math.log2(sequences))
