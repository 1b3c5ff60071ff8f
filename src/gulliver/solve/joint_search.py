"""Searches shardings and recomputation together for the shortest time within a budget.

The undominated plans of each distinct block are computed once. Then the search goes through the
chain of blocks; for each strategy of the last operator, its states consist of:

    seconds so far; state plus bytes left; state plus the peak so far

Exact pruning drops states that are dominated in all of these, that exceed the budget, or whose
lower bound is above a known solution. If more than `states` per strategy remain, the search becomes
heuristic and the bound shows how far from optimal the result can be.

Complexity: O(blocks x strategies x states x plans of a block), after one `block_plans` for each
distinct block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gulliver.errors import GulliverError
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
from gulliver.solve.joint import (
    ENTRY,
    Block,
    JointCost,
    Operator,
    Pick,
    Strategy,
    joint_cost,
)
from gulliver.solve.joint_bound import Bound, Guide, GuidedStates, Relaxation

# Undominated plans of one block, by dynamic programming over operators.
#
# States are partial picks. The future depends on the strategies of operators that are still to be
# read (the frontier), on the end of the open run, and on these measures, where less is better:
# seconds, state, state plus the peak, state plus bytes left, the bytes and the largest forward of
# the open run. A state is dropped if another one with the same frontier and run is at least as good
# in all of them; that is exact. With more than `most` states per frontier, or too many in total to
# compare, the best at several prices of memory below several peaks stay, and `Plans.exact` is
# False.
#
# O(operators x frontiers x most x picks), with as many frontiers as combinations of open
# strategies: cost grows with the width of the block's graph, not its length.


FORWARD, BACKWARD, STATE, LEFT, PEAK, RUN, REPLAYED = range(7)
CHOICES: tuple[Choice, ...] = ("keep", "recompute")
Bytes = NDArray[np.int16]
COMPARED = 16  # maximum states to compare per state kept; beyond it, the best are compared
PRICES = np.array(
    sorted(
        product((0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0), (0.0, 0.3, 0.7)),
        key=lambda p: abs(math.log(p[0])) + p[1],
    )
)
"""Prices of memory: multiples of the estimate, and the peak's share of the price."""


class StateSizes(NamedTuple):
    """Seconds, peak bytes and resident bytes of states."""

    seconds: Floats
    peak: Floats
    held: Floats


@dataclass(frozen=True)
class Rules:
    """Options of a search."""

    # Choices for saved tensors.
    allowed: tuple[Choice, ...]
    # Number of states kept per frontier.
    most: int
    # Whether seconds matter; otherwise only memory is minimized.
    timed: bool = True
    # Approximate value of a byte in seconds.
    price: float = 0.0

    def measures(self, values: Floats) -> Floats:
        columns = [
            values[:, STATE],
            values[:, STATE] + values[:, PEAK],
            values[:, STATE] + values[:, LEFT],
        ]
        if self.timed:
            columns.append(rounded(values[:, FORWARD] + values[:, BACKWARD]))
        if values.shape[1] > RUN:
            columns += [values[:, RUN], values[:, REPLAYED]]
        return np.stack(columns, axis=1)

    def best(self, kinds: Ints, measures: Floats, sizes: StateSizes) -> tuple[Ints, bool]:
        """Indices of the states to keep, and whether they include all undominated states."""
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
        spent = sizes.seconds if self.timed else 0.0
        priced = spent + (self.price if self.timed else 1.0) * price * bytes_
        return boxed(kinds, sizes.peak, priced, max(1, self.most // count))


@dataclass(frozen=True)
class Plans:
    """Plans of a block, by the strategies of its input and its last operator."""

    # Columns `FORWARD` to `PEAK` of each plan.
    values: Floats
    # Strategy of the entry and of each operator, [plans, 1 + operators].
    strategies: Bytes
    # Choice of each operator, as an index into `CHOICES`, [plans, operators].
    choices: Bytes
    # Whether no undominated plan is missing.
    exact: bool

    @property
    def entry(self) -> Bytes:
        return self.strategies[:, 0]

    @property
    def exit(self) -> Bytes:
        return self.strategies[:, -1]

    def picks(self, plan: int) -> tuple[Pick, ...]:
        pairs = zip(self.strategies[plan, 1:], self.choices[plan], strict=True)
        return tuple(Pick(int(s), CHOICES[c]) for s, c in pairs)


def block_plans(
    block: Block,
    entries: int,
    rules: Rules,
    guide: Guide | None = None,
    known: float = math.inf,
) -> Plans:
    starts = max(1, entries)
    values = np.zeros((starts, 7))
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
    """Sizes of a block's states; unfinished recomputations count as if they continued."""
    state = values[:, STATE]
    ahead = values[:, LEFT] + values[:, RUN] + values[:, REPLAYED]
    seconds = values[:, FORWARD] + values[:, BACKWARD]
    peak = state + np.maximum(values[:, PEAK], ahead)
    return StateSizes(seconds, peak, state + values[:, LEFT])


def _guided(values: Floats) -> GuidedStates:
    columns = (STATE, LEFT, PEAK, RUN)
    passes = values[:, FORWARD] + values[:, BACKWARD]
    return GuidedStates(passes, *(values[:, column] for column in columns))


def _picks(block: Block, number: int, allowed: Sequence[Choice]) -> list[tuple[int, Choice]]:
    operator, found = block.operators[number], list[tuple[int, Choice]]()
    for place, choice in product(range(len(operator.strategies)), allowed):
        again = operator.recomputable and block.used_until(number, place) < len(block.operators)
        if choice == "keep" or again:
            found.append((place, choice))
    return found


def _frontier(block: Block, number: int) -> list[int]:
    """Operators up to `number` that later operators read, always including `number`."""
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
    (place, choice), operator = pick, block.operators[number]
    taken = operator.strategies[place]
    forward, backward, saved = _passes(operator, taken, place, strategies, entries)
    values, under = values.copy(), values[:, LEFT] + values[:, RUN]
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
        values[:, LEFT] += saved
    closed = until <= number
    values[closed, RUN:] = 0.0
    until = np.where(closed, -1, until)
    column = np.full((len(values), 1), place, dtype=np.int16)
    kind = np.full((len(values), 1), CHOICES.index(choice), dtype=np.int16)
    return values, until, np.hstack([strategies, column]), np.hstack([choices, kind])


def _passes(
    operator: Operator, taken: Strategy, place: int, strategies: Bytes, entries: int
) -> tuple[Floats, Floats, Floats]:
    """Forward and backward seconds, and saved bytes, of an operator after each state."""
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


LEVELS, STATES, LAST = (16, 64), 256, 2
"""States kept per kind in the first rounds and in the last, and a factor for the last block."""
HOPES = (1e-3, 2e-3, 4e-3, 8e-3, 0.016, 0.032, 0.064, math.inf)
"""Relative distances from the bound to try; smaller ones prune more."""
SCARCE = 0.1  # price of the whole budget if memory is not scarce, as a fraction of the seconds
SAME = 1e-9  # relative difference below which seconds are treated as equal


@dataclass(frozen=True)
class JointPlan:
    """Result of the search: picks, their cost and a lower bound."""

    # Picks of each block's operators.
    picks: tuple[tuple[Pick, ...], ...]
    # Their costs.
    cost: JointCost
    # Lower bound of the seconds over all picks.
    lower: float
    # Whether the picks are optimal.
    exact: bool
    # Approximate seconds saved per additional byte.
    price: float

    @property
    def gap(self) -> float:
        """Maximum relative improvement that better picks could bring."""
        return 0.0 if self.exact else max(0.0, 1 - self.lower / self.cost.seconds)


def solve_joint(
    blocks: Sequence[Block],
    budget: int,
    allowed: Sequence[Choice] = CHOICES,
    states: int = STATES,
    tolerance: float = 1e-3,
) -> JointPlan:
    """Finds the fastest choice per operator within a memory budget.

    Successive rounds keep more states per kind, up to `states`, until the gap is at most
    `tolerance`; the first round starts from a solution close to the lower bound.

    Raises:
        GulliverError: no picks fit into the budget; the error names the smallest feasible budget
            and the operator that needs it.
    """
    chosen = _in_order(allowed)
    lean, _ = _BlockChain(blocks, Rules(chosen, max(states, STATES), timed=False)).best(math.inf)
    least = joint_cost(blocks, lean)
    if least.peak > budget:
        raise GulliverError(_too_little(blocks, budget, least))
    relaxation = Relaxation(blocks, budget, chosen)
    bound = relaxation.bound()
    guides, lower = relaxation.guides(bound), bound.seconds
    picks, cost = lean, least
    exact = False
    # Bytes have a price even if memory is ample, so that the smaller of two equally fast states
    # stays.
    price = bound.price or SCARCE * bound.seconds / max(1, budget)
    for most in (*(level for level in LEVELS if level < states), states):
        # States far above the bound are not explored while a better result is likely.
        for above in HOPES:
            if exact or cost.seconds <= lower * (1 + max(SAME, tolerance)):
                break
            hope = min(cost.seconds, bound.seconds * (1 + above))
            rules = Rules(chosen, most, price=price)
            found, whole = _BlockChain(blocks, rules, guides, hope).best(budget, bound, hope)
            if whole and not found:
                lower = max(lower, hope)
            last = bool(found) or hope == cost.seconds
            exact = whole and last
            if found:
                picks, cost = found, joint_cost(blocks, found)
            if last:
                break
    if cost.at[0] < len(blocks) - 1 and not exact and cost.seconds > lower * (1 + tolerance):
        lower = max(lower, relaxation.bound(cost.at[0]).seconds)
    exact = exact or cost.seconds <= lower * (1 + SAME)
    seconds = cost.seconds if exact else min(lower, cost.seconds)
    return JointPlan(picks, cost, seconds, exact, bound.price)


def least_memory(blocks: Sequence[Block], allowed: Sequence[Choice] = CHOICES) -> JointCost:
    """Finds the smallest feasible budget, and the operator that needs it."""
    rules = Rules(_in_order(allowed), STATES, timed=False)
    picks, _ = _BlockChain(blocks, rules).best(math.inf)
    return joint_cost(blocks, picks)


def _in_order(allowed: Sequence[Choice]) -> tuple[Choice, ...]:
    return tuple(choice for choice in CHOICES if choice in allowed)


def _too_little(blocks: Sequence[Block], budget: int, least: JointCost) -> str:
    number, place = least.at
    name = blocks[number].operators[place].name
    passes = least.peak - least.state - least.below
    return (
        f"a budget of {budget} bytes is too small; use at least {least.peak}. Operator {name!r} "
        f"of block {number} needs it: {least.state} bytes of state, {least.below} left below it, "
        f"and {passes} for its own passes"
    )


@dataclass(frozen=True)
class _States:
    seconds: Floats
    held: Floats
    """Bytes of state plus bytes left by earlier operators."""
    peak: Floats
    """Bytes of state so far plus the peak of everything else."""
    hope: Floats
    strategy: Bytes
    parent: Ints
    plan: Ints

    def at(self, rows: Ints) -> _States:
        return _States(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


class _BlockChain:
    def __init__(
        self,
        blocks: Sequence[Block],
        rules: Rules,
        guides: Mapping[tuple[Block, int, bool], Guide] | None = None,
        known: float = math.inf,
    ) -> None:
        self._rules = rules
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
        """Returns the best picks within a budget (empty if none), and whether they are exact."""
        zeros = np.zeros(1)
        start, none = np.zeros(1, np.int16), np.zeros(1, np.intp)
        state = _States(zeros, zeros, zeros, zeros, start, none, none)
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
        """Returns the states after one more block that may still improve on the best solution."""
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
        plans = self._plans[number]
        values = plans.values[some][None]
        seconds, held, peak = (
            column[rows][:, None] for column in (state.seconds, state.held, state.peak)
        )
        spent = values[..., FORWARD] + values[..., BACKWARD]
        here = held + values[..., STATE] + values[..., PEAK]
        shape = (len(rows), len(some))
        return _States(
            (seconds + spent).ravel(),
            (held + values[..., STATE] + values[..., LEFT]).ravel(),
            np.maximum(peak + values[..., STATE], here).ravel(),
            (seconds + spent).ravel(),
            np.broadcast_to(plans.exit[some], shape).ravel(),
            np.broadcast_to(rows[:, None], shape).ravel(),
            np.broadcast_to(some, shape).ravel(),
        )

    def _raise_peaks(self, number: int, part: _States, budget: float) -> None:
        """Raises peaks where this has no effect on results, so that more states are dominated."""
        # Later blocks need at least this much above the bytes held, which hides any lower peak; and
        # a peak that fits even with all state still to be added never matters.
        hidden = part.held + self._least_need[number]
        if self._rules.timed:
            hidden = np.maximum(hidden, budget - self._most_state[number])
        np.maximum(part.peak, hidden, out=part.peak)

    def _hopes(self, number: int, part: _States, budget: float, bound: Bound) -> Floats:
        if number == len(self._plans) - 1:
            return part.seconds
        rest = bound.rest[number + 1]
        ahead = rest[part.strategy] if len(rest) > 1 else rest[0]
        return part.seconds + ahead + bound.price * (part.held - budget)

    def _kept(self, state: _States) -> tuple[Ints, bool]:
        measures = [state.peak, state.held]
        if self._rules.timed:
            measures.append(rounded(state.seconds))
        sizes = StateSizes(state.seconds, state.peak, state.held)
        kinds = state.strategy.astype(np.int64)
        return self._rules.best(kinds, np.stack(measures, axis=1), sizes)
