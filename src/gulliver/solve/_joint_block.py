"""What can be made of one block: its undominated plans, by dynamic programming over operators.

States hold the picks so far. What follows depends on the strategies of operators that are still to
be read (the frontier), on where the open run ends, and on these measures, of which less is better:
seconds, state, state and the peak, state and what is left, what is moved, the bytes and the largest
forward of the open run. A state is dropped if another of the same frontier and run is at least as
good in all of them; that is exact. With more than `most` states of a frontier it is not: those stay
that are best at one of several prices of memory, and `Plans.exact` says so.

O(operators x frontiers x states^2), with as many frontiers as combinations of strategies that are
open at once: the width of the block's graph is what makes it dear, not its length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gulliver.solve._activations import Choice
from gulliver.solve._joint import ENTRY, Block, Operator, Pick, Strategy
from gulliver.solve._joint_bound import Guide, GuidedStates
from gulliver.solve._pareto import Floats, Ints, front, groups_of, rounded

FORWARD, BACKWARD, STATE, LEFT, MOVED, PEAK, RUN, REPLAYED = range(8)
CHOICES: tuple[Choice, ...] = ("keep", "recompute", "offload")
Bytes = NDArray[np.int16]


@dataclass(frozen=True)
class Rules:
    """What a search may choose.

    Attributes:
        allowed: choices for what is saved.
        most: number of states that are kept of one frontier.
        timed: whether seconds matter; without, memory alone is looked at.
        price: seconds that a byte is worth, about; 0: unknown.
    """

    allowed: tuple[Choice, ...]
    most: int
    timed: bool = True
    price: float = 0.0

    def measures(self, values: Floats) -> Floats:
        """What states are compared by.

        Args:
            values: columns of the states, as named at the top of this module.
        """
        columns = [
            values[:, STATE],
            values[:, STATE] + values[:, PEAK],
            values[:, STATE] + values[:, LEFT],
        ]
        moves = "offload" in self.allowed
        if moves:
            columns.append(values[:, MOVED])
        if self.timed and moves:
            # The link hides behind forward and backward apart.
            columns += [rounded(values[:, FORWARD]), rounded(values[:, BACKWARD])]
        elif self.timed:
            columns.append(rounded(values[:, FORWARD] + values[:, BACKWARD]))
        if values.shape[1] > RUN:
            columns += [values[:, RUN], values[:, REPLAYED]]
        return np.stack(columns, axis=1)

    def best(self, values: Floats, keys: NDArray[Any]) -> tuple[Ints, bool]:
        """Numbers of the states to go on with, and whether that is exact.

        Args:
            values: columns of the states.
            keys: what makes states of one kind [states, parts].
        """
        kept, exact = list[Ints](), True
        measures = self.measures(values)
        for group in groups_of(keys):
            seconds = values[group, FORWARD] + values[group, BACKWARD]
            memory = measures[group, 1:3]
            found, whole = front(measures[group], seconds, memory, self.most, self.price)
            kept.append(group[found])
            exact = exact and whole
        return np.concatenate(kept) if kept else np.zeros(0, np.intp), exact


@dataclass(frozen=True)
class Plans:
    """Plans of a block, by the strategy of what comes before it and of its last operator.

    Attributes:
        values: columns `FORWARD` to `PEAK` of each plan.
        strategies: strategy of the entry and of each operator [plans, 1 + operators].
        choices: choice of each operator, by its number in `CHOICES` [plans, operators].
        exact: whether no undominated plan is missing.
    """

    values: Floats
    strategies: Bytes
    choices: Bytes
    exact: bool

    @property
    def entry(self) -> Bytes:
        """Strategy of what comes before, of each plan."""
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
    """Finds the undominated plans of a block.

    Args:
        block: block.
        entries: number of strategies of the operator before it; 0: nothing comes before.
        rules: what may be chosen.
        guide: tells the least priced seconds of the whole network with given picks in this block.
        known: seconds of picks that are known; what cannot be below them is dropped.
    """
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
        kept, whole = rules.best(values, keys)
        values, until, exact = values[kept], until[kept], exact and whole
        strategies, choices = strategies[kept], choices[kept]
    return Plans(values[:, :RUN], strategies, choices, exact)


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
    """All states after one more operator with a given pick."""
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
