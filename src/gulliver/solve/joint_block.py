"""Undominated plans of one block, by dynamic programming over operators.

States are partial picks. What follows depends on the strategies of operators that are still to be
read (the frontier), on the end of the open run, and on these measures, where less is better:
seconds, state, state and the peak, state and what is left, what is moved, the bytes and the largest
forward of the open run. A state is dropped if another one with the same frontier and run is at
least as good in all of them; that is exact. With more than `most` states of a frontier, or too many
in all to compare, states stay that are best at one of several prices of memory below one of several
peaks, and `Plans.exact` is False.

O(operators x frontiers x most x picks), with as many frontiers as combinations of open strategies:
the width of the block's graph is expensive, not its length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gulliver.solve.activations import (
    Choice,
    Floats,
    Ints,
    boxed,
    groups_of,
    kinds_of,
    rounded,
    undominated,
)
from gulliver.solve.joint import ENTRY, Block, Operator, Pick, Strategy
from gulliver.solve.joint_bound import Guide, GuidedStates

FORWARD, BACKWARD, STATE, LEFT, MOVED, PEAK, RUN, REPLAYED = range(8)
CHOICES: tuple[Choice, ...] = ("keep", "recompute", "offload")
Bytes = NDArray[np.int16]
COMPARED = 16
"""States in all that are compared, for each one kept of a frontier: of more, the best are taken."""
PRICES = np.array(
    sorted(
        product((0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0), (0.0, 0.3, 0.7)),
        key=lambda p: abs(math.log(p[0])) + p[1],
    )
)
"""Prices of memory: multiples of the one that is about right, and the peak's share of them."""


class StateSizes(NamedTuple):
    """What states are priced by: seconds, peak bytes, resident bytes, moved bytes."""

    seconds: Floats
    peak: Floats
    held: Floats
    moved: Floats


@dataclass(frozen=True)
class Rules:
    """What a search may choose."""

    # Choices for what is saved.
    allowed: tuple[Choice, ...]
    # Number of states that are kept of one frontier.
    most: int
    # Whether seconds matter; without, memory alone is looked at.
    timed: bool = True
    # Seconds that a byte is worth, about.
    price: float = 0.0
    # About the exposed seconds of moving a byte.
    moved_s: float = 0.0

    def measures(self, values: Floats) -> Floats:
        """What states are compared by."""
        columns = [
            values[:, STATE],
            values[:, STATE] + values[:, PEAK],
            values[:, STATE] + values[:, LEFT],
        ]
        moves = "offload" in self.allowed
        if moves:
            columns.append(values[:, MOVED])
        if self.timed and moves:
            # Transfers overlap with forward and backward separately.
            columns += [rounded(values[:, FORWARD]), rounded(values[:, BACKWARD])]
        elif self.timed:
            columns.append(rounded(values[:, FORWARD] + values[:, BACKWARD]))
        if values.shape[1] > RUN:
            columns += [values[:, RUN], values[:, REPLAYED]]
        return np.stack(columns, axis=1)

    def best(self, kinds: Ints, measures: Floats, sizes: StateSizes) -> tuple[Ints, bool]:
        """Indices of the states to keep, and whether nothing better was dropped."""
        if self.timed and len(kinds) > COMPARED * self.most:
            some = self._boxed(kinds, sizes)
            return some, len(some) == len(kinds)
        kept, exact = [np.zeros(0, np.intp)], True
        for group in groups_of(kinds):
            some = group[undominated(measures[group])]
            if len(some) > self.most:
                one = StateSizes(*(column[some] for column in sizes))
                some, exact = some[self._boxed(np.zeros(len(some), np.int64), one)], False
            kept.append(some)
        return np.concatenate(kept), exact

    def _boxed(self, kinds: Ints, sizes: StateSizes) -> Ints:
        count = min(len(PRICES), max(2, int(1.5 * math.sqrt(self.most))))
        price, share = (PRICES[:count, n, None] for n in (0, 1))
        bytes_ = (1 - share) * sizes.held + share * sizes.peak
        spent = sizes.seconds + self.moved_s * sizes.moved if self.timed else 0.0
        priced = spent + (self.price if self.timed else 1.0) * price * bytes_
        return boxed(kinds, sizes.peak, priced, max(1, self.most // count))


@dataclass(frozen=True)
class Plans:
    """Plans of a block, by the strategies of its input and its last operator."""

    # Columns `FORWARD` to `PEAK` of each plan.
    values: Floats
    # Strategy of the entry and of each operator [plans, 1 + operators].
    strategies: Bytes
    # Choice of each operator, by its number in `CHOICES` [plans, operators].
    choices: Bytes
    # Whether no undominated plan is missing.
    exact: bool

    @property
    def entry(self) -> Bytes:
        """Strategy of the input, of each plan."""
        return self.strategies[:, 0]

    @property
    def exit(self) -> Bytes:
        """Strategy of the last operator, of each plan."""
        return self.strategies[:, -1]

    def picks(self, plan: int) -> tuple[Pick, ...]:
        """The picks of a plan."""
        pairs = zip(self.strategies[plan, 1:], self.choices[plan], strict=True)
        return tuple(Pick(int(s), CHOICES[c]) for s, c in pairs)


def block_plans(
    block: Block,
    entries: int,
    rules: Rules,
    guide: Guide | None = None,
    known: float = math.inf,
) -> Plans:
    """Finds the undominated plans of a block."""
    starts = max(1, entries)
    values = np.zeros((starts, 8))
    until = np.full(starts, -1)
    strategies = np.arange(starts, dtype=np.int16)[:, None]
    choices, exact = np.zeros((starts, 0), dtype=np.int16), True
    for number in range(len(block.operators)):
        grown = [
            _placed(block, number, pick, values, until, strategies, choices, entries)
            for pick in _picks(block, number, rules.allowed)
        ]
        values, until, strategies, choices = (np.concatenate(p) for p in zip(*grown, strict=True))
        if guide is not None:
            hopes = guide.seconds(number, _guided(values), strategies)
            hopeful = np.flatnonzero(hopes <= known)
            values, until = values[hopeful], until[hopeful]
            strategies, choices = strategies[hopeful], choices[hopeful]
        open_ = [0, *(1 + n for n in _frontier(block, number))]
        keys = np.concatenate([strategies[:, open_], until[:, None]], axis=1)
        kinds = kinds_of(keys)
        kept, whole = rules.best(kinds, rules.measures(values), _sizes(values))
        if number == len(block.operators) - 1 and not whole:
            groups = groups_of(kinds[kept])
            measures = rules.measures(values[kept])
            kept = kept[np.concatenate([g[undominated(measures[g])] for g in groups])]
        values, until, exact = values[kept], until[kept], exact and whole
        strategies, choices = strategies[kept], choices[kept]
    return Plans(values[:, :RUN], strategies, choices, exact)


def _sizes(values: Floats) -> StateSizes:
    """Sizes of a block's states; open runs count as if they continued."""
    state, under = values[:, STATE], values[:, LEFT] + values[:, MOVED]
    ahead = under + values[:, RUN] + values[:, REPLAYED]
    seconds = values[:, FORWARD] + values[:, BACKWARD]
    peak = state + np.maximum(values[:, PEAK], ahead)
    return StateSizes(seconds, peak, state + values[:, LEFT], values[:, MOVED])


def _guided(values: Floats) -> GuidedStates:
    columns = (STATE, LEFT, MOVED, PEAK, RUN)
    passes = values[:, FORWARD] + values[:, BACKWARD]
    return GuidedStates(passes, *(values[:, column] for column in columns))


def _picks(block: Block, number: int, allowed: Sequence[Choice]) -> list[tuple[int, Choice]]:
    """The picks of an operator that make a difference."""
    operator, found = block.operators[number], list[tuple[int, Choice]]()
    for (place, taken), choice in product(enumerate(operator.strategies), allowed):
        again = operator.recomputable and block.used_until(number, place) < len(block.operators)
        if {"keep": True, "recompute": again, "offload": taken.movable > 0}[choice]:
            found.append((place, choice))
    return found


def _frontier(block: Block, number: int) -> list[int]:
    """Operators up to one that later ones read; the last one always."""
    rest = block.operators[number + 1 :]
    read = {source for operator in rest for source in operator.inputs}
    if number == len(block.operators) - 1:
        read = {number}
    return sorted(source for source in read if ENTRY < source <= number)


def _placed(
    block: Block,
    number: int,
    pick: tuple[int, Choice],
    values: Floats,
    until: Ints,
    strategies: Bytes,
    choices: Bytes,
    entries: int,
) -> tuple[Floats, Ints, Bytes, Bytes]:
    """States after one more operator with a given pick."""
    (place, choice), operator = pick, block.operators[number]
    taken = operator.strategies[place]
    forward, backward, saved = _passes(operator, taken, place, strategies, entries)
    values, under = values.copy(), values[:, LEFT] + values[:, MOVED] + values[:, RUN]
    working = np.maximum(max(taken.forward_bytes, taken.backward_bytes), values[:, REPLAYED])
    values[:, PEAK] = np.maximum(values[:, PEAK], under + saved + taken.output + working)
    values[:, FORWARD] += forward
    values[:, BACKWARD] += backward
    values[:, STATE] += taken.state
    values[:, LEFT] += taken.output
    if choice == "recompute":
        values[:, BACKWARD] += forward
        values[:, RUN] += saved
        values[:, REPLAYED] = np.maximum(values[:, REPLAYED], taken.forward_bytes)
        until = np.maximum(until, block.used_until(number, place))
    else:
        away = taken.movable if choice == "offload" else 0
        values[:, LEFT] += saved - away
        values[:, MOVED] += away
    closed = until <= number
    values[closed, RUN:] = 0.0
    until = np.where(closed, -1, until)
    column = np.full((len(values), 1), place, dtype=np.int16)
    kind = np.full((len(values), 1), CHOICES.index(choice), dtype=np.int16)
    return values, until, np.hstack([strategies, column]), np.hstack([choices, kind])


def _passes(
    operator: Operator, taken: Strategy, place: int, strategies: Bytes, entries: int
) -> tuple[Floats, Floats, Floats]:
    """Seconds of forward and backward, and bytes saved, of an operator after each state."""
    count = len(strategies)
    forward = np.full(count, taken.forward_s + taken.forward_comm_s)
    backward = np.full(count, taken.backward_s + taken.backward_comm_s)
    saved = np.full(count, float(taken.saved))
    for source, conversion in zip(operator.inputs, operator.conversions, strict=False):
        if conversion is None or (source == ENTRY and not entries):
            continue
        theirs = strategies[:, 1 + source]
        forward += np.array([row[place] for row in conversion.forward_s])[theirs]
        backward += np.array([row[place] for row in conversion.backward_s])[theirs]
        if conversion.saved is not None:
            saved += np.array([row[place] for row in conversion.saved])[theirs]
    return forward, backward, saved
