"""Computes a lower bound on the time, and the price of memory, by Lagrangian relaxation.

Only the memory constraints of one block are kept: during each of its operators, state, bytes left
by earlier operators and the operator's own bytes must fit the budget. Exceeding the budget costs
`price` seconds per byte, distributed over these moments, instead of being forbidden:

    bound(prices) = min over picks of (seconds + sum of price_t x bytes at t) - price x budget

The minimum is a shortest path through the operators, and any prices give a valid bound. States are
the strategies of operators still to be read and, in the constrained block, the end of the current
recomputation. The best price approximates the seconds that one more byte would save. Source:
Everett 1963, "Generalized Lagrange multiplier method".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gulliver.solve.activations import Choice, Floats
from gulliver.solve.joint import ENTRY, Block

STEPS = 40  # number of prices to try with the same shares
SHARES = 16  # number of updates of the shares
BUMP = 1e-3
GOLDEN = (5**0.5 - 1) / 2
NOTHING = 1e-6  # relative gain below which no higher price is tried, because sums become inexact


@dataclass(frozen=True)
class Bound:
    """A lower bound and its multipliers."""

    # Lower bound of the seconds over all picks.
    seconds: float
    # Approximate seconds saved per additional byte.
    price: float
    # Least priced seconds from each block on, by the strategy of the previous block.
    rest: tuple[Floats, ...]
    # Shares of the price, by operator of the block whose passes count.
    moments: tuple[float, ...]


class Relaxation:
    """Lower bounds for one network."""

    def __init__(self, blocks: Sequence[Block], budget: int, choices: Sequence[Choice]) -> None:
        self.blocks, self.budget, self.choices = blocks, budget, choices
        self._known: dict[tuple[object, ...], Floats] = {}
        self._known_for: float | None = None

    def bound(self, at: int | None = None) -> Bound:
        """Returns the best bound under the memory constraints of block `at`."""
        at = len(self.blocks) - 1 if at is None else at
        # The price, the moments' shares, and the price again.
        shares = np.zeros(len(self.blocks[at].operators))
        shares[-1] = 1.0
        top = self._best_price(partial(self._priced, at, shares))
        if not top.price:
            return top
        top, shares = self._best_shares(top, partial(self._priced, at), shares)
        for factor in (0.9, 0.96, 1.04, 1.1):
            again = self._priced(at, shares, factor * top.price)
            top = max((top, again), key=lambda bound: bound.seconds)
        return top

    def _best_shares(
        self, top: Bound, priced: Callable[[Floats, float], Bound], shares: Floats
    ) -> tuple[Bound, Floats]:
        """Improves the shares of the price with subgradient steps of decreasing size."""
        size, price, best = 0.5, top.price, shares
        for _ in range(SHARES):
            bumped = [priced((1 - BUMP) * best + BUMP * one, price) for one in np.eye(len(best))]
            gains = np.array([bound.seconds for bound in bumped]) - top.seconds
            if gains.max() <= 0:
                break
            aim = np.maximum(gains, 0.0) / np.maximum(gains, 0.0).sum()
            while size > BUMP:
                moved = (1 - size) * best + size * aim
                tried = priced(moved, price)
                if tried.seconds > top.seconds:
                    top, best = tried, moved
                    break
                size /= 2
        return top, best

    def _best_price(self, priced: Callable[[float], Bound]) -> Bound:
        """Golden-section search for the price with the highest bound."""
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

    def _priced(self, at: int, shares: Floats, price: float) -> Bound:
        rest = [np.zeros(len(self.blocks[-1].operators[-1].strategies))]
        moments = tuple(float(share) for share in price * shares)
        for number in range(len(self.blocks) - 1, -1, -1):
            entries = self._entries(number)
            cost = self._cost(number, at, price, moments)
            rest.append((self._matrix(cost, entries) + rest[-1]).min(axis=1))
        seconds = float(rest[-1].min()) - price * self.budget
        return Bound(seconds, price, tuple(reversed(rest)), moments)

    def _matrix(self, cost: _Cost, entries: int) -> Floats:
        key = (id(cost.block), entries, cost.last, cost.later, cost.moments)
        if cost.price != self._known_for:
            self._known, self._known_for = {}, cost.price
        if key not in self._known:
            self._known[key] = cost.matrix(entries)
        return self._known[key]

    def _entries(self, number: int) -> int:
        return len(self.blocks[number - 1].operators[-1].strategies) if number else 0

    def _cost(self, number: int, at: int, price: float, moments: tuple[float, ...]) -> _Cost:
        block, last = self.blocks[number], number == len(self.blocks) - 1
        here = moments if number == at else (0.0,) * len(block.operators)
        later = price if number < at else 0.0
        return _Cost(block, here, later, last, price, self.choices)

    def guides(self, bound: Bound) -> dict[tuple[Block, int, bool], Guide]:
        """Returns a `Guide` per block: minimum priced seconds of the network, given its prefix."""
        at = len(self.blocks) - 1
        around: dict[tuple[Block, int, bool], tuple[_Cost, Floats]] = {}
        known: dict[tuple[Block, int, bool], Floats] = {}
        before = np.zeros(1)
        for number in range(len(self.blocks)):
            cost = self._cost(number, at, bound.price, bound.moments)
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
    """Minimum priced seconds of all picks with a given prefix, for one block."""

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

    def seconds(self, number: int, states: GuidedStates, strategies: NDArray[np.int16]) -> Floats:
        # [Note: a peak for each moment] In the last block all moments have a price. Each past
        # moment may be as high as the peak so far, which has to be within the budget as well, so
        # the peak replaces them all. Future moments include the bytes left by now, and the next one
        # an open run.
        ahead = self._tables[number][tuple(strategies[:, 1 + a] for a in self._after[number])]
        cost = self._cost
        spent = states.passes + cost.price * states.state + ahead
        if not cost.last:
            return spent + cost.later * states.left
        here, there = sum(cost.moments[: number + 1]), sum(cost.moments[number + 1 :])
        run = cost.moments[number + 1] * states.run if there else 0.0
        return spent + here * states.peak + there * states.left + run


class GuidedStates(NamedTuple):
    """Columns of search states that a guide reads."""

    passes: Floats
    state: Floats
    left: Floats
    peak: Floats
    run: Floats


@dataclass(frozen=True)
class _Cost:
    block: Block
    # Price of a byte in the passes of each operator.
    moments: tuple[float, ...]
    # Price of a byte in all passes of later blocks.
    later: float
    # Whether it is the last block of all.
    last: bool
    # Price of a byte of state.
    price: float
    # Choices for saved tensors.
    choices: Sequence[Choice]

    def matrix(self, entries: int) -> Floats:
        """Minimum priced seconds by strategy of the entry (rows) and the last operator."""
        operators, runs = self.block.operators, any(self.moments)
        axes, tables = [ENTRY], [np.zeros(max(1, entries))]
        # The first table is of states without an open run, the others of those with one, by its
        # end.
        tables += [np.full(max(1, entries), np.inf) for _ in operators] if runs else []
        for number in range(len(operators)):
            axes.append(number)
            parts = self._parts(number, axes, entries)
            tables = [table[..., None] for table in tables]
            grown = [table + parts.stays for table in tables]
            for end, again in enumerate(parts.again[: len(grown) - 1], number):
                begun = np.minimum(tables[0], tables[1 + end]) + again
                grown[1 + end] = np.minimum(grown[1 + end], begun)
            if runs:
                grown[0] = np.minimum(grown[0], grown[1 + number])
                grown[1 + number] = np.full_like(grown[0], np.inf)
            else:
                grown[0] = np.minimum(grown[0], tables[0] + parts.least)
            left = self.frontier(number, axes)
            gone = tuple(n for n, a in enumerate(axes) if a not in left)
            tables, axes = [table.min(axis=gone) for table in grown], left
        return tables[0]

    def frontier(self, number: int, axes: Sequence[int]) -> list[int]:
        """Operators that later operators read, always including the entry and the last one."""
        operators = self.block.operators
        ahead = {s for o in operators[number + 1 :] for s in o.inputs}
        end = {len(operators) - 1} if number == len(operators) - 1 else set[int]()
        return [axis for axis in axes if axis in ahead | end | {ENTRY}]

    def operator(self, number: int, axes: list[int], entries: int) -> Floats:
        return self._parts(number, axes, entries).least

    def _parts(self, number: int, axes: list[int], entries: int) -> _Parts:
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
        ahead = self.later + sum(self.moments[number:])
        output, state = (
            np.array([float(getattr(s, name)) for s in taken]) for name in ("output", "state")
        )
        working = np.array([float(max(s.forward_bytes, s.backward_bytes)) for s in taken])
        seconds = forward + backward + self.price * state + ahead * output
        seconds = seconds + self.moments[number] * working
        stays = seconds + ahead * saved
        return self._with_runs(number, stays, seconds + forward, saved)

    def _with_runs(self, number: int, stays: Floats, again: Floats, saved: Floats) -> _Parts:
        """Adds the cost of recomputation, by the operator at which it ends."""
        operator, count = self.block.operators[number], len(self.block.operators)
        if "recompute" not in self.choices or not operator.recomputable:
            return _Parts(stays, stays, [])
        until = np.array(
            [self.block.used_until(number, s) for s in range(len(operator.strategies))]
        )
        ends = list[Floats]()
        for end in range(number, count):
            while_open = again + sum(self.moments[number : end + 1]) * saved
            ends.append(np.where(until <= end, while_open, np.inf))
        return _Parts(stays, np.minimum.reduce([stays, *ends]), ends)


class _Parts(NamedTuple):
    # Seconds if its saved tensors are kept.
    stays: Floats
    # Least seconds over all choices, with the shortest possible run.
    least: Floats
    # Seconds if it is recomputed, by the end of the run, starting with its own index.
    again: list[Floats]
