"""The joint search as a mixed-integer linear programme, solved by HiGHS: the independent reference.

The costs are those of `joint_cost` (`joint.py`; read that first), written as rows. x is 1 for the
pick of each operator, and y splits it by the strategy of each producer that a conversion comes
from. All else is continuous, and pressed down by what it costs:

    seconds of a pass   >= those of the block;  >= those of what the block before has offloaded
    open_t              >= x of every recomputed operator below t that is still to be used at t
    run_t               >= run_(t-1) + what t - 1 brings back - most x (1 - open_t)
    replayed_t          >= the same with the largest forward of the run in place of the sum
    state + held + run_t + own bytes of t (with replayed_t, and without)  <=  budget

It knows nothing of equal blocks, so some ten operators are within reach, where brute force ends at
six. Bytes are in thousandths of the budget and seconds in those of the dearest picks: HiGHS takes
rows and gaps as closed at 1e-6. Source:
Huangfu and Hall 2018, "Parallelizing the dual revised simplex method" (HiGHS), by `scipy`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gulliver.errors import GulliverError
from gulliver.solve.activations import Choice
from gulliver.solve.joint import ENTRY, Block, OffloadLink, Pick

FINE = 1e3
"""Parts that the budget and the seconds are counted in."""

Terms = dict[int, float]
"""A linear expression: factors by column."""


class MilpAnswer(NamedTuple):
    """Answer of HiGHS.

    Attributes:
        picks: picks of each block's operators; None if it found none in time.
        lower: seconds that no picks can be below.
    """

    picks: tuple[tuple[Pick, ...], ...] | None
    lower: float


def joint_by_milp(
    blocks: Sequence[Block],
    budget: int,
    link: OffloadLink | None = None,
    allowed: Sequence[Choice] = ("keep", "recompute", "offload"),
    seconds: float = 60.0,
) -> MilpAnswer:
    """Finds the picks with the least seconds that keep within a budget, by HiGHS.

    Args:
        blocks: blocks in the order of forward.
        budget: bytes of a device.
        link: link to the slower tier; None: nothing is offloaded.
        allowed: choices for what is saved.
        seconds: seconds that HiGHS may take.

    Raises:
        GulliverError: scipy is missing, or the budget is below what any picks need.
    """
    choices: list[Choice] = [c for c in allowed if c != "offload" or link is not None]
    model = _Network(blocks, max(1, budget) / FINE, link or OffloadLink(), choices)
    solution, lower = model.rows.solved(seconds)
    return MilpAnswer(None if solution is None else model.picks(solution), lower * model.second)


class _Rows:
    """Columns and rows of a programme, as they are added."""

    def __init__(self) -> None:
        self._costs, self._most, self._whole = list[float](), list[float](), list[int]()
        self._terms: list[tuple[int, int, float]] = []
        self._low, self._high = list[float](), list[float]()

    def column(self, cost: float = 0.0, most: float = math.inf, whole: bool = False) -> int:
        """Adds a column from 0 to `most`."""
        self._costs.append(cost)
        self._most.append(most)
        self._whole.append(int(whole))
        return len(self._costs) - 1

    def pay(self, terms: Terms, price: float) -> None:
        """Adds an expression to the costs."""
        for column, factor in terms.items():
            self._costs[column] += price * factor

    def row(self, terms: Terms, low: float = 0.0, high: float = math.inf) -> None:
        """Adds a row: the expression lies between two numbers."""
        number = len(self._low)
        self._terms += [(number, column, factor) for column, factor in terms.items()]
        self._low.append(low)
        self._high.append(high)

    def equals(self, terms: Terms, cost: float = 0.0) -> Terms:
        """Adds a column that is equal to an expression which is never negative."""
        column = self.column(cost)
        self.row(_sum([terms, {column: -1.0}]), 0.0, 0.0)
        return {column: 1.0}

    def solved(self, seconds: float) -> tuple[np.ndarray | None, float]:
        """The best solution that was found in time, and the lower bound."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        rows, columns, factors = (np.array(part) for part in zip(*self._terms, strict=True))
        matrix = csr_array((factors, (rows, columns)), shape=(len(self._low), len(self._costs)))
        found = milp(
            np.array(self._costs),
            integrality=np.array(self._whole),
            # scipy's annotations know of numbers only, and its documentation of arrays.
            bounds=Bounds(0.0, np.array(self._most)),  # type: ignore[arg-type]
            constraints=LinearConstraint(matrix, self._low, self._high),  # type: ignore[arg-type]
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        if found.status == 2:
            raise GulliverError("the budget is below what any picks need")
        bound = found.mip_dual_bound
        return found.x, 0.0 if bound is None or not math.isfinite(bound) else float(bound)


def _sum(parts: Iterable[Terms]) -> Terms:
    total: Terms = {}
    for terms in parts:
        for column, factor in terms.items():
            total[column] = total.get(column, 0.0) + factor
    return total


def _times(terms: Terms, factor: float) -> Terms:
    return {column: factor * value for column, value in terms.items()}


class _Passes(NamedTuple):
    """Expressions of an operator; bytes in units."""

    picks: dict[Pick, int]
    forward: Terms
    backward: Terms
    saved: Terms
    back: Terms
    """Bytes that come back as it is recomputed."""
    most: float
    """Most bytes that it saves."""


class _Network:
    """The rows of a network.

    Args:
        blocks: blocks in the order of forward.
        unit: bytes that memory is counted in.
        link: link to the slower tier.
        choices: choices for what is saved.
    """

    def __init__(
        self, blocks: Sequence[Block], unit: float, link: OffloadLink, choices: Sequence[Choice]
    ) -> None:
        self.rows, self._unit, self._choices = _Rows(), unit, choices
        dearest = (
            max(s.forward_s + s.forward_comm_s + s.backward_s + s.backward_comm_s for s in some)
            for some in (o.strategies for block in blocks for o in block.operators)
        )
        self.second = sum(dearest) / FINE or 1.0
        write, read = (unit * price / self.second for price in (link.write_s, link.read_s))
        self._state = self.rows.column()
        self._columns: list[list[dict[Pick, int]]] = []
        state: list[Terms] = [{self._state: -1.0}]
        below, waiting, entry = Terms(), Terms(), dict[Pick, int]()
        for block in blocks:
            made = self._passes(block, entry)
            for name, price in (("forward", write), ("backward", read)):
                spent = {self.rows.column(1.0): 1.0}
                mine = _times(_sum(getattr(one, name) for one in made), -1.0)
                self.rows.row(_sum([spent, mine]))
                self.rows.row(_sum([spent, _times(waiting, -price)]))
            held = self._memory(block, made, _sum([below, waiting]))
            below = self.rows.equals(_sum([held, _times(waiting, -1.0)]))
            pairs = list(zip(block.operators, made, strict=True))
            waiting = _sum(
                _of(one.picks, [s.movable / unit for s in o.strategies], ["offload"])
                for o, one in pairs
            )
            # `below` has what waits already taken off, and the next block counts it once more.
            below = _sum([below, _times(waiting, -1.0)])
            state += [_of(one.picks, [s.state / unit for s in o.strategies]) for o, one in pairs]
            entry = made[-1].picks
            self._columns.append([one.picks for one in made])
        self.rows.row(_sum(state), 0.0, 0.0)
        self.rows.pay(waiting, write + read)

    def picks(self, solution: np.ndarray) -> tuple[tuple[Pick, ...], ...]:
        """The picks that a solution stands for."""
        return tuple(
            tuple(max(picks, key=lambda pick: solution[picks[pick]]) for picks in block)
            for block in self._columns
        )

    def _passes(self, block: Block, entry: dict[Pick, int]) -> list[_Passes]:
        found = list[_Passes]()
        for number, operator in enumerate(block.operators):
            picks = {
                Pick(place, choice): self.rows.column(most=1.0, whole=True)
                for place in range(len(operator.strategies))
                for choice in self._choices
                if choice != "recompute"
                or (
                    operator.recomputable and block.used_until(number, place) < len(block.operators)
                )
            }
            self.rows.row(dict.fromkeys(picks.values(), 1.0), 1.0, 1.0)
            taken, unit = operator.strategies, self._unit
            sizes = [s.saved / unit for s in taken]
            second, saved = self.second, sizes
            forward = [(s.forward_s + s.forward_comm_s) / second for s in taken]
            backward = [(s.backward_s + s.backward_comm_s) / second for s in taken]
            parts = {
                "forward": [_of(picks, forward)],
                "again": [_of(picks, forward, ["recompute"])],
                "backward": [_of(picks, backward)],
                "saved": [_of(picks, saved)],
                "back": [_of(picks, saved, ["recompute"])],
            }
            most = max(sizes)
            for source, costs in zip(operator.inputs, operator.conversions, strict=False):
                theirs = entry if source == ENTRY else found[source].picks
                if costs is None or not theirs:
                    continue
                split = list(self._split(theirs, picks))
                again = [part for part in split if part[1].choice == "recompute"]
                parts["forward"].append(_times(_at(split, costs.forward_s), 1 / second))
                parts["again"].append(_times(_at(again, costs.forward_s), 1 / second))
                parts["backward"].append(_times(_at(split, costs.backward_s), 1 / second))
                if costs.saved is not None:
                    copies = [[size / unit for size in row] for row in costs.saved]
                    parts["saved"].append(_at(split, copies))
                    parts["back"].append(_at(again, copies))
                    most += max(map(max, copies))
            done = {name: _sum(some) for name, some in parts.items()}
            done["backward"] = _sum([done["backward"], done.pop("again")])
            found.append(_Passes(picks, **done, most=most))
        return found

    def _split(
        self, theirs: dict[Pick, int], mine: dict[Pick, int]
    ) -> Iterator[tuple[int, Pick, int]]:
        """Splits the picks of a consumer by the strategy of a producer: strategy, pick, column."""
        by: dict[int, Terms] = {}
        for pick, column in theirs.items():
            by.setdefault(pick.strategy, {})[column] = -1.0
        split = {(s, pick): self.rows.column(most=1.0) for s in by for pick in mine}
        for s, terms in by.items():
            self.rows.row(_sum([terms, {split[s, pick]: 1.0 for pick in mine}]), 0.0, 0.0)
        for pick, column in mine.items():
            self.rows.row({column: -1.0, **{split[s, pick]: 1.0 for s in by}}, 0.0, 0.0)
        return ((s, pick, column) for (s, pick), column in split.items())

    def _memory(self, block: Block, made: Sequence[_Passes], held: Terms) -> Terms:
        """Adds the needs of each operator's passes; what is held after the block."""
        rows, unit, operators = self.rows, self._unit, block.operators
        largest = [max(s.forward_bytes for s in o.strategies) / unit for o in operators]
        run, replayed = Terms(), Terms()
        for number, (operator, one) in enumerate(zip(operators, made, strict=True)):
            taken = operator.strategies
            if number:
                shut = _times(self._open(block, made, number), -1.0)
                most = sum(other.most for other in made[:number])
                run = self._while_open(run, shut, most)
                replayed = self._while_open(replayed, shut, max(largest[:number]))
            output = _of(one.picks, [s.output / unit for s in taken])
            here = [{self._state: 1.0}, held, run, one.saved, output]
            working = [max(s.forward_bytes, s.backward_bytes) / unit for s in taken]
            rows.row(_sum([*here, _of(one.picks, working)]), -math.inf, FINE)
            rows.row(_sum([*here, replayed]), -math.inf, FINE)
            held = rows.equals(_sum([held, output, one.saved, _times(one.back, -1.0)]))
            run = _sum([run, one.back])
            again = _of(one.picks, [s.forward_bytes / unit for s in taken], ["recompute"])
            replayed = self._larger(replayed, again)
        return held

    def _open(self, block: Block, made: Sequence[_Passes], number: int) -> Terms:
        """A column that is 1 where a run is open at an operator."""
        open_ = {self.rows.column(most=1.0): 1.0}
        for before in range(number):
            still = {
                column: -1.0
                for pick, column in made[before].picks.items()
                if pick.choice == "recompute" and block.used_until(before, pick.strategy) >= number
            }
            self.rows.row(_sum([open_, still]))
        return open_

    def _while_open(self, terms: Terms, shut: Terms, most: float) -> Terms:
        """A column that is at least an expression where a run is open."""
        column = {self.rows.column(): 1.0}
        self.rows.row(_sum([column, _times(terms, -1.0), _times(shut, most)]), -most)
        return column

    def _larger(self, one: Terms, other: Terms) -> Terms:
        column = {self.rows.column(): 1.0}
        for terms in (one, other):
            self.rows.row(_sum([column, _times(terms, -1.0)]))
        return column


def _of(picks: dict[Pick, int], values: Sequence[float], choices: Sequence[Choice] = ()) -> Terms:
    """Costs of picks, by their strategy, of all choices or of some."""
    return {
        column: values[pick.strategy]
        for pick, column in picks.items()
        if not choices or pick.choice in choices
    }


def _at(split: Iterable[tuple[int, Pick, int]], values: Sequence[Sequence[float]]) -> Terms:
    """Costs of conversions, by the strategies of producer and consumer."""
    return {column: values[s][pick.strategy] for s, pick, column in split}
