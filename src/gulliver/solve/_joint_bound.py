"""Seconds that no picks can be below, and the price of memory: Lagrangian relaxation.

Of all that has to fit, one moment is kept: the passes of one operator, at which state, what is left
below and the operator's own bytes have to be within the budget. Bytes then have a price, `price`
seconds each, and what is over the budget is paid for instead of forbidden:

    bound(price) = min over picks of (seconds + price x bytes at that moment) - price x budget

That is a shortest path through the operators (states are the strategies that are still to be read,
no memory among them), so it is exact and quick, and every price gives a bound. The best price is
what a byte more would save, about. Source: Everett 1963, "Generalized Lagrange multiplier method".

The longer of two times is at least any mean of both: `hidden` is the share of the link in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gulliver.solve._activations import Choice
from gulliver.solve._joint import ENTRY, Block, OffloadLink
from gulliver.solve._pareto import Floats

STEPS = 40
"""Prices that are tried for one moment."""
GOLDEN = (5**0.5 - 1) / 2
NOTHING = 1e-6
"""Relative gain for which no higher price is tried: the sums of higher ones are inexact."""
BELOW, AT, ABOVE = "below", "at", "above"


@dataclass(frozen=True)
class Bound:
    """A lower bound and where it comes from.

    Attributes:
        seconds: seconds that no picks can be below.
        price: seconds that a byte more would save, about.
        hidden: share of the link in the longer of compute and moves.
        rest: least priced seconds from each block on, by the strategy of what comes before it.
    """

    seconds: float
    price: float
    hidden: float
    rest: tuple[Floats, ...]


class Relaxation:
    """Bounds of one network.

    Args:
        blocks: blocks in the order of forward.
        budget: bytes of a device.
        link: link to the slower tier; None: nothing is offloaded.
        allowed: choices for what is saved.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        budget: int,
        link: OffloadLink | None,
        allowed: Sequence[Choice],
    ) -> None:
        self.blocks, self.budget, self.link = blocks, budget, link
        self.choices: list[Choice] = [c for c in allowed if c != "offload" or link is not None]

    def bound(self, at: tuple[int, int] | None = None) -> Bound:
        """The best bound for a moment.

        Args:
            at: block and operator whose passes have to fit; None: the last of the last block.
        """
        at = at or (len(self.blocks) - 1, len(self.blocks[-1].operators) - 1)
        shares = (0.0, 0.5, 1.0) if "offload" in self.choices else (0.0,)
        found = [self._best(partial(self._priced, at, hidden)) for hidden in shares]
        return max(found, key=lambda bound: bound.seconds)

    def _best(self, priced: partial[Bound]) -> Bound:
        """Looks for the price with the highest bound; it rises up to there and falls beyond."""
        free = priced(0.0)
        high = free.seconds / self.budget if self.budget and free.seconds else 1.0
        best = top = max((free, priced(high)), key=lambda b: b.seconds)
        for _ in range(STEPS):
            top = priced(2 * high)
            if top.seconds <= best.seconds + NOTHING * abs(best.seconds):
                break
            best, high = top, 2 * high
        low, high = 0.0, 2 * high
        left, right = (priced(low + (high - low) * s) for s in (1 - GOLDEN, GOLDEN))
        for _ in range(STEPS):
            best = max((best, left, right), key=lambda b: b.seconds)
            if left.seconds >= right.seconds:
                high, right = right.price, left
                left = priced(low + (high - low) * (1 - GOLDEN))
            else:
                low, left = left.price, right
                right = priced(low + (high - low) * GOLDEN)
            if high - low < 1e-4 * high:
                break
        return best

    def _priced(self, at: tuple[int, int], hidden: float, price: float) -> Bound:
        rest = [np.zeros(len(self.blocks[-1].operators[-1].strategies))]
        known: dict[tuple[Block, int, int, bool], Floats] = {}
        for number in range(len(self.blocks) - 1, -1, -1):
            cost, entries = self._cost(number, at, hidden, price), self._entries(number)
            key = (cost.block, cost.place, entries, cost.last)
            if key not in known:
                known[key] = cost.matrix(entries)
            rest.append((known[key] + rest[-1]).min(axis=1))
        seconds = float(rest[-1].min()) - price * self.budget
        return Bound(seconds, price, hidden, tuple(reversed(rest)))

    def _entries(self, number: int) -> int:
        return len(self.blocks[number - 1].operators[-1].strategies) if number else 0

    def _cost(self, number: int, at: tuple[int, int], hidden: float, price: float) -> _Cost:
        block, last = self.blocks[number], number == len(self.blocks) - 1
        place = at[1] if number == at[0] else len(block.operators) if number < at[0] else -1
        return _Cost(block, place, last, hidden, price, self.link, self.choices)

    def guides(self, bound: Bound) -> dict[tuple[Block, int, bool], Guide]:
        """Least priced seconds of the whole network, by block, with any beginning of it.

        Args:
            bound: bound for the last moment.
        """
        at = (len(self.blocks) - 1, len(self.blocks[-1].operators) - 1)
        around: dict[tuple[Block, int, bool], tuple[_Cost, Floats]] = {}
        known: dict[tuple[Block, int, bool], Floats] = {}
        before = np.zeros(1)
        for number in range(len(self.blocks)):
            cost = self._cost(number, at, bound.hidden, bound.price)
            entries = self._entries(number)
            key = (cost.block, entries, cost.last)
            if key not in known:
                known[key] = cost.matrix(entries)
            outside = before[:, None] + bound.rest[number + 1] - bound.price * self.budget
            if key in around:
                outside = np.minimum(outside, around[key][1])
            around[key] = (cost, outside)
            before = (before[:, None] + known[key]).min(axis=0)
        return {key: Guide(*found, key[1]) for key, found in around.items()}


class Guide:
    """Least priced seconds of all picks that begin with given ones, for each kind of block.

    Args:
        cost: priced seconds of the block.
        outside: those of all other blocks, by the strategy of the entry and of the last operator.
        entries: number of strategies of the entry.
    """

    def __init__(self, cost: _Cost, outside: Floats, entries: int) -> None:
        self._cost = cost
        count, shapes = len(cost.block.operators), list[list[int]]()
        axes = [ENTRY]
        for number in range(count):
            shapes.append(axes)
            axes = cost.frontier(number, [*axes, number])
        self._after = [*shapes[1:], axes]
        sizes = {n: len(o.strategies) for n, o in enumerate(cost.block.operators)}
        sizes[ENTRY] = max(1, entries)
        tables = [outside]
        for number in range(count - 1, 0, -1):
            whole = [*shapes[number], number]
            holes = tuple(place for place, axis in enumerate(whole) if axis not in axes)
            table = np.expand_dims(tables[-1], holes) + cost.operator(number, whole, entries)
            axes = shapes[number]
            tables.append(np.broadcast_to(table.min(axis=-1), [sizes[a] for a in axes]))
        self._tables = tables[::-1]

    def seconds(self, number: int, values: Floats, strategies: NDArray[np.int16]) -> Floats:
        """Least priced seconds of states after an operator.

        Args:
            number: number of the operator.
            values: seconds, bytes left with those of state, and bytes moved [states, 3].
            strategies: strategies of the entry and of each operator so far.
        """
        ahead = self._tables[number][tuple(strategies[:, 1 + a] for a in self._after[number])]
        passes, held, moved = values.T
        cost = self._cost
        link = cost.link or OffloadLink()
        share = 1.0 if cost.last else cost.hidden
        held = held + moved if cost.last else held
        moves = share * (link.write_s + link.read_s) * moved
        return (1 - cost.hidden) * passes + moves + cost.price * held + ahead


@dataclass(frozen=True)
class _Cost:
    """Priced seconds of a block.

    Attributes:
        block: block.
        place: number of the operator whose passes have to fit; the count for those of a later
            block, -1 for those of an earlier one.
        last: whether it is the last of all.
        hidden: share of the link in the longer of compute and moves.
        price: seconds for a byte.
        link: link to the slower tier.
        choices: choices for what is saved.
    """

    block: Block
    place: int
    last: bool
    hidden: float
    price: float
    link: OffloadLink | None
    choices: Sequence[Choice]

    def matrix(self, entries: int) -> Floats:
        """Least priced seconds by the strategy of the entry (rows) and of the last operator."""
        operators = self.block.operators
        axes, table = [ENTRY], np.zeros(max(1, entries))
        for number in range(len(operators)):
            axes.append(number)
            table = table[..., None] + self.operator(number, axes, entries)
            left = self.frontier(number, axes)
            table = table.min(axis=tuple(n for n, a in enumerate(axes) if a not in left))
            axes = left
        return table

    def frontier(self, number: int, axes: Sequence[int]) -> list[int]:
        """Operators up to one that later ones read, and the entry and the last one in any case."""
        operators = self.block.operators
        ahead = {s for o in operators[number + 1 :] for s in o.inputs}
        end = {len(operators) - 1} if number == len(operators) - 1 else set[int]()
        return [axis for axis in axes if axis in ahead | end | {ENTRY}]

    def operator(self, number: int, axes: list[int], entries: int) -> Floats:
        """Priced seconds of an operator, by the strategies of its inputs and its own."""
        operator = self.block.operators[number]
        taken = operator.strategies
        forward = np.array([s.forward_s + s.forward_comm_s for s in taken])
        backward = np.array([s.backward_s + s.backward_comm_s for s in taken])
        saved = np.array([float(s.saved) for s in taken])
        for source, conversion in zip(operator.inputs, operator.conversions, strict=False):
            if conversion is None or (source == ENTRY and not entries):
                continue
            shape = [1] * len(axes)
            shape[-1] = len(taken)
            shape[axes.index(source)] = len(conversion.forward_s)
            forward = forward + np.reshape(conversion.forward_s, shape)
            backward = backward + np.reshape(conversion.backward_s, shape)
            if conversion.saved is not None:
                saved = saved + np.reshape(conversion.saved, shape)
        found = [self._choice(number, c, forward, backward, saved) for c in self.choices]
        return np.minimum.reduce([f for f in found if f is not None])

    def _choice(
        self, number: int, choice: Choice, forward: Floats, backward: Floats, saved: Floats
    ) -> Floats | None:
        operator, count = self.block.operators[number], len(self.block.operators)
        if choice == "recompute" and not operator.recomputable:
            return None
        until = [self.block.used_until(number, s) for s in range(len(operator.strategies))]
        shown = 1 - self.hidden
        seconds = shown * forward + shown * backward
        if choice == "recompute":
            seconds = seconds + shown * forward
            seconds = seconds + np.where(np.array(until) < count, 0.0, np.inf)
        moved = np.array([s.movable for s in operator.strategies]) * (choice == "offload")
        if choice == "offload":
            assert self.link is not None, "what is offloaded has a link"
            share = 1.0 if self.last else self.hidden
            seconds = seconds + share * moved * (self.link.write_s + self.link.read_s)
        nbytes = np.array([float(s.state) for s in operator.strategies])
        if number <= self.place:
            nbytes = nbytes + np.array([s.output for s in operator.strategies])
            there = saved
            if choice == "recompute" and number < self.place:
                # It is there while its run is open, and that is at least until its last use.
                opened = np.array([self.place < count and u >= self.place for u in until])
                there = saved * opened
            nbytes = nbytes + there - (moved if self.place == count else 0)
        if number == self.place:
            working = [max(s.forward_bytes, s.backward_bytes) for s in operator.strategies]
            nbytes = nbytes + np.array(working)
        return seconds + self.price * nbytes
