"""Joint search for shardings, recomputation and offload with the least time.

The undominated plans of each different block are made once. Then the search goes through the chain
of blocks; its states are, by the last operator's strategy:

    seconds so far; state and what is left; state and the peak so far; bytes that are moving

Dropped are states that another one beats in all of these, that end beyond the budget, or that a
lower bound shows to end above known picks; all of that is exact. Where more than `states` of a
strategy are left the search is not exact; the bound says how far off the answer can be.

Complexity: O(blocks x strategies x states x plans of a block), after one `block_plans` for each
different block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gulliver.errors import GulliverError
from gulliver.solve.activations import Choice, Floats, Ints, rounded
from gulliver.solve.joint import (
    Block,
    JointCost,
    OffloadLink,
    Pick,
    joint_cost,
)
from gulliver.solve.joint_block import (
    BACKWARD,
    CHOICES,
    FORWARD,
    LEFT,
    MOVED,
    PEAK,
    STATE,
    Bytes,
    Plans,
    Rules,
    StateSizes,
    block_plans,
)
from gulliver.solve.joint_bound import Bound, Guide, Relaxation

LEVELS, STATES, LAST = (16, 64), 256, 2
"""States kept of one kind: in first rounds and in the last; times more in the last block."""
HOPES = (1e-3, 2e-3, 4e-3, 8e-3, 0.016, 0.032, 0.064, math.inf)
"""Shares above the bound that are tried, the least first: with less there is less to look at."""
SCARCE = 0.1
"""Price of all of the budget where none of it is scarce, as a share of the seconds."""
SAME = 1e-9
"""Relative difference of seconds that counts as none."""


@dataclass(frozen=True)
class JointPlan:
    """The picks that were found."""

    # Picks of each block's operators.
    picks: tuple[tuple[Pick, ...], ...]
    # Seconds and bytes that they take.
    cost: JointCost
    # Seconds that no picks can be below.
    lower: float
    # Whether no picks take less.
    exact: bool
    # Seconds that a byte more would save, about.
    price: float

    @property
    def gap(self) -> float:
        """Largest relative improvement that better picks could bring."""
        return 0.0 if self.exact else max(0.0, 1 - self.lower / self.cost.seconds)


def solve_joint(
    blocks: Sequence[Block],
    budget: int,
    link: OffloadLink | None = None,
    allowed: Sequence[Choice] = CHOICES,
    states: int = STATES,
    tolerance: float = 1e-3,
) -> JointPlan:
    """Finds the picks with the least seconds that keep within a budget.

    Rounds keep more and more states, and look first at what lies close to the lower bound.

    Args:
        blocks: blocks in the order of forward; equal ones are solved once.
        budget: bytes of a device.
        link: link to the slower tier; None: nothing is offloaded.
        allowed: choices for what is saved.
        states: number of states that are kept of one kind; more is closer to exact, and slower.
        tolerance: gap that is good enough; with 0 all rounds are made.

    Raises:
        GulliverError: the budget is below what any picks need; names the least that would do, and
            the operator that needs it.
    """
    chosen = possible(allowed, link)
    lean, _ = _BlockChain(blocks, Rules(chosen, max(states, STATES), timed=False), link).best(
        math.inf
    )
    least = joint_cost(blocks, lean, link)
    if least.peak > budget:
        raise GulliverError(_too_little(blocks, budget, least))
    relaxation = Relaxation(blocks, budget, link, chosen)
    bound = relaxation.bound()
    guides, lower = relaxation.guides(bound), bound.seconds
    picks, cost = lean, least
    exact, moves = False, link or OffloadLink()
    # Bytes have a price even if memory is ample: of two equal states the smaller one stays.
    price = bound.price or SCARCE * bound.seconds / max(1, budget)
    moved_s = bound.hidden * (moves.write_s + moves.read_s)
    for most in (*(level for level in LEVELS if level < states), states):
        # States far above the bound are not explored while a better answer is likely.
        for above in HOPES:
            if exact or cost.seconds <= lower * (1 + max(SAME, tolerance)):
                break
            hope = min(cost.seconds, bound.seconds * (1 + above))
            rules = Rules(chosen, most, price=price, moved_s=moved_s)
            found, whole = _BlockChain(blocks, rules, link, guides, hope).best(budget, bound, hope)
            if whole and not found:
                lower = max(lower, hope)
            last = bool(found) or hope == cost.seconds
            exact = whole and last
            if found:
                picks, cost = found, joint_cost(blocks, found, link)
            if last:
                break
    if cost.at[0] < len(blocks) - 1 and not exact and cost.seconds > lower * (1 + tolerance):
        lower = max(lower, relaxation.bound(cost.at[0]).seconds)
    exact = exact or cost.seconds <= lower * (1 + SAME)
    seconds = cost.seconds if exact else min(lower, cost.seconds)
    return JointPlan(picks, cost, seconds, exact, bound.price)


def least_memory(
    blocks: Sequence[Block],
    link: OffloadLink | None = None,
    allowed: Sequence[Choice] = CHOICES,
) -> JointCost:
    """Finds the least feasible budget, and the operator that needs it.

    Args:
        blocks: blocks in the order of forward.
        link: link to the slower tier; None: nothing is offloaded.
        allowed: choices for what is saved.
    """
    chosen = possible(allowed, link)
    picks, _ = _BlockChain(blocks, Rules(chosen, STATES, timed=False), link).best(math.inf)
    return joint_cost(blocks, picks, link)


def possible(allowed: Sequence[Choice], link: OffloadLink | None) -> tuple[Choice, ...]:
    """Allowed choices that are possible with the link."""
    some: list[Choice] = [c for c in CHOICES if c in allowed]
    return tuple(some) if link is not None else tuple(c for c in some if c != "offload")


def _too_little(blocks: Sequence[Block], budget: int, least: JointCost) -> str:
    number, place = least.at
    name = blocks[number].operators[place].name
    passes = least.peak - least.state - least.below
    return (
        f"a budget of {budget} bytes is too small: {least.peak} would do. Operator {name!r} of "
        f"block {number} needs them: {least.state} bytes of state, {least.below} that are left "
        f"below it, and {passes} for its own passes"
    )


@dataclass(frozen=True)
class _States:
    """States after a block, as columns."""

    seconds: Floats
    held: Floats
    """Bytes of state and of what is left."""
    peak: Floats
    """Bytes of state so far, and the most of all else."""
    moving: Floats
    hope: Floats
    """Least seconds with which it may end."""
    strategy: Bytes
    parent: Ints
    plan: Ints

    def at(self, rows: Ints) -> _States:
        """A subset of the states."""
        return _States(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


class _BlockChain:
    """The search through the blocks."""

    def __init__(
        self,
        blocks: Sequence[Block],
        rules: Rules,
        link: OffloadLink | None,
        guides: Mapping[tuple[Block, int, bool], Guide] | None = None,
        known: float = math.inf,
    ) -> None:
        self._rules, self._link = rules, link or OffloadLink()
        self._plans: list[Plans] = []
        made: dict[tuple[Block, int, bool], Plans] = {}
        for number, block in enumerate(blocks):
            entries = len(blocks[number - 1].operators[-1].strategies) if number else 0
            kind = (block, entries, guides is not None and number == len(blocks) - 1)
            if kind not in made:
                guide = guides[kind] if guides is not None else None
                wide = replace(rules, most=LAST * rules.most) if kind[2] else rules
                made[kind] = block_plans(block, entries, wide, guide, known * (1 + SAME))
            self._plans.append(made[kind])
        least = [float(p.values[:, STATE].min(initial=math.inf)) for p in self._plans]
        self._rest = [sum(least[number + 1 :]) for number in range(len(least))]
        self._least_need, self._most_state = [-math.inf], [0.0]
        for plans in reversed(self._plans[1:]):
            need = np.maximum(plans.values[:, PEAK], plans.values[:, LEFT] + self._least_need[0])
            self._least_need.insert(0, float(need.min(initial=math.inf)))
            most = float(plans.values[:, STATE].max(initial=0.0))
            self._most_state.insert(0, self._most_state[0] + most)

    def best(
        self, budget: float, bound: Bound | None = None, known: float = math.inf
    ) -> tuple[tuple[tuple[Pick, ...], ...], bool]:
        """The best picks within a budget, empty if none improve, and whether that is exact."""
        zeros = np.zeros(1)
        start, none = np.zeros(1, np.int16), np.zeros(1, np.intp)
        state = _States(zeros, zeros, zeros, zeros, zeros, start, none, none)
        history, exact = list[_States](), all(plans.exact for plans in self._plans)
        for number in range(len(self._plans)):
            state = self._grown(number, state, budget, bound, known)
            if not len(state.seconds):
                return (), exact
            kept, whole = self._kept(state)
            state, exact = state.at(kept), exact and whole
            history.append(state)
        row = int(np.lexsort((state.peak, state.seconds))[0])
        if not self._rules.timed:
            row = int(np.argmin(state.peak))
        picks = list[tuple[Pick, ...]]()
        for plans, states in zip(reversed(self._plans), reversed(history), strict=True):
            picks.append(plans.picks(int(states.plan[row])))
            row = int(states.parent[row])
        return tuple(reversed(picks)), exact

    def _grown(
        self, number: int, state: _States, budget: float, bound: Bound | None, known: float
    ) -> _States:
        """States after one more block that may still improve the best."""
        plans, parts = self._plans[number], list[_States]()
        slack = 1.0 if number == len(self._plans) - 1 else 1 + SAME
        for entry in np.unique(plans.entry):
            rows = np.flatnonzero(state.strategy == entry)
            some = np.flatnonzero(plans.entry == entry)
            if len(rows) and len(some):
                part = self._joined(number, state, rows, some)
                fits = np.maximum(part.peak, part.held) + self._rest[number] <= budget
                if bound is not None:
                    part.hope[:] = self._hopes(number, part, budget, bound)
                    fits &= part.hope < known * slack
                self._raise_peaks(number, part, budget)
                parts.append(part.at(np.flatnonzero(fits)))
        if not parts:
            return state.at(np.zeros(0, np.intp))
        columns = ([getattr(p, n) for p in parts] for n in _States.__dataclass_fields__)
        return _States(*(np.concatenate(column) for column in columns))

    def _joined(self, number: int, state: _States, rows: Ints, some: Ints) -> _States:
        plans, link = self._plans[number], self._link
        values = plans.values[some][None]
        seconds, held, peak, moving = (
            column[rows][:, None]
            for column in (state.seconds, state.held, state.peak, state.moving)
        )
        spent = np.maximum(values[..., FORWARD], moving * link.write_s)
        spent = spent + np.maximum(values[..., BACKWARD], moving * link.read_s)
        if number == len(self._plans) - 1:
            spent = spent + values[..., MOVED] * (link.write_s + link.read_s)
        here = held + values[..., STATE] + moving + values[..., PEAK]
        shape = (len(rows), len(some))
        return _States(
            (seconds + spent).ravel(),
            (held + values[..., STATE] + values[..., LEFT]).ravel(),
            np.maximum(peak + values[..., STATE], here).ravel(),
            np.broadcast_to(values[..., MOVED], shape).ravel(),
            (seconds + spent).ravel(),
            np.broadcast_to(plans.exit[some], shape).ravel(),
            np.broadcast_to(rows[:, None], shape).ravel(),
            np.broadcast_to(some, shape).ravel(),
        )

    def _raise_peaks(self, number: int, part: _States, budget: float) -> None:
        """Raises peaks that make no difference, so that more states are dominated."""
        # Later blocks need at least this much above what is held, which hides any lower peak; and a
        # peak that fits with the most state they can add never matters.
        hidden = part.held + self._least_need[number]
        if self._rules.timed:
            hidden = np.maximum(hidden, budget - self._most_state[number])
        np.maximum(part.peak, hidden, out=part.peak)

    def _hopes(self, number: int, part: _States, budget: float, bound: Bound) -> Floats:
        """Lower bounds of the final seconds of states."""
        if number == len(self._plans) - 1:
            return part.seconds
        rest = bound.rest[number + 1]
        ahead = rest[part.strategy] if len(rest) > 1 else rest[0]
        link = bound.hidden * (self._link.write_s + self._link.read_s) * part.moving
        return part.seconds + ahead + link + bound.price * (part.held - budget)

    def _kept(self, state: _States) -> tuple[Ints, bool]:
        measures = [state.peak, state.held]
        if "offload" in self._rules.allowed:
            measures.append(state.moving)
        if self._rules.timed:
            measures.append(rounded(state.seconds))
        sizes = StateSizes(state.seconds, state.peak, state.held, state.moving)
        kinds = state.strategy.astype(np.int64)
        return self._rules.best(kinds, np.stack(measures, axis=1), sizes)
