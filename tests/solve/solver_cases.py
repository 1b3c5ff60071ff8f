"""Small random cases of every solver, each held against brute force by an independent definition.

A case takes a seed, asserts, and says whether it was small enough, or possible, to be compared. The
tests run some of them, `--full` thousands.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from gulliver.errors import GulliverError
from gulliver.solve import (
    Block,
    Choice,
    Operator,
    Strategy,
    least_memory,
    solve_joint,
)
from gulliver.solve.conversion import ConversionStep, Sharding, convert_least, moves_from
from gulliver.solve.joint import ENTRY, EdgeSeconds, Pick, joint_cost

ALL: tuple[Choice, ...] = ("keep", "recompute")
COUNTS = (1, 4, 16, math.inf)


def _conversion(draw: random.Random, rows: int, columns: int) -> EdgeSeconds | None:
    if draw.random() < 0.4:
        return None

    def matrix(most: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(draw.randint(0, most) for _ in range(columns)) for _ in range(rows))

    return EdgeSeconds(matrix(3), matrix(3), matrix(2) if draw.random() < 0.5 else None)


def _strategy(draw: random.Random) -> Strategy:
    n, saved = draw.randint, draw.randint(0, 6)
    seconds = n(0, 5), n(0, 5), n(0, 2), n(0, 2)
    output = draw.choice([0, 0, n(1, 3)])
    return Strategy("", *seconds, n(0, 4), saved, output, n(0, 3), n(0, 3))


def small_network(draw: random.Random, blocks: int, operators: int, strategies: int) -> list[Block]:
    made, before = list[Block](), 1
    for _ in range(blocks):
        counts = [draw.randint(1, strategies) for _ in range(draw.randint(1, operators))]
        found = list[Operator]()
        for number, count in enumerate(counts):
            more = [draw.randint(ENTRY, number - 1) for _ in range(draw.randint(0, 1))]
            inputs = tuple(sorted({number - 1, *more}))
            rows = [before if source == ENTRY else counts[source] for source in inputs]
            conversions = tuple(_conversion(draw, r, count) for r in rows)
            last = draw.choice([None, draw.randint(number, len(counts) - 1)])
            options = tuple(_strategy(draw) for _ in range(count))
            again = draw.random() < 0.9
            found.append(Operator("", options, inputs, conversions, last, again))
        made.append(Block(tuple(found)))
        before = counts[-1]
    return made


def _passes(
    block: Block, picks: Sequence[Pick], number: int, entry: int | None
) -> tuple[float, float, int]:
    operator, pick = block.operators[number], picks[number]
    s = operator.strategies[pick.strategy]
    total = [s.forward_s + s.forward_comm_s, s.backward_s + s.backward_comm_s, s.saved]
    for source, c in zip(operator.inputs, operator.conversions, strict=False):
        row = entry if source == ENTRY else picks[source].strategy
        if c is not None and row is not None:
            total[0] += c.forward_s[row][pick.strategy]
            total[1] += c.backward_s[row][pick.strategy]
            total[2] += c.saved[row][pick.strategy] if c.saved else 0
    return total[0], total[1], int(total[2])


def _by_hand(blocks: Sequence[Block], picks: Sequence[Sequence[Pick]]) -> tuple[float, int] | None:
    """Seconds and peak from the definition: who is there while each operator is in backward."""
    entry, below, peak, seconds, state = None, 0, 0, 0.0, 0
    for block, chosen in zip(blocks, picks, strict=True):
        size = range(len(block.operators))
        cost = [_passes(block, chosen, n, entry) for n in size]
        taken = [o.strategies[p.strategy] for o, p in zip(block.operators, chosen, strict=True)]
        again = [n for n in size if chosen[n].choice == "recompute"]
        # The run that each recomputed operator is in ends where the last of its values is used.
        runs = list[list[int]]()
        ends = list[int]()
        for n in again:
            users = [m for m in size if n in block.operators[m].inputs]
            users += [len(block.operators)] if n == size[-1] else []
            end = max(
                [n, block.operators[n].last_use or 0, *(users if not taken[n].output else ())]
            )
            if runs and ends[-1] >= n:
                runs[-1].append(n)
                ends[-1] = max(ends[-1], end)
            else:
                runs.append([n])
                ends.append(end)
        if ends and ends[-1] >= len(block.operators):
            return None
        for t in size:
            there = sum(taken[n].output + (cost[n][2] if n not in again else 0) for n in range(t))
            run = [n for r, end in zip(runs, ends, strict=True) if end >= t for n in r if n < t]
            needs = [taken[t].forward_bytes, taken[t].backward_bytes]
            needs += [taken[n].forward_bytes for n in run]
            own = cost[t][2] + taken[t].output + max(needs)
            peak = max(peak, below + there + sum(cost[n][2] for n in run) + own)
        forward = sum(f for f, _, _ in cost)
        backward = sum(b for _, b, _ in cost) + sum(cost[n][0] for n in again)
        seconds += forward + backward
        below += sum(taken[n].output + (cost[n][2] if n not in again else 0) for n in size)
        state += sum(s.state for s in taken)
        entry = chosen[-1].strategy
    return seconds, peak + state


def _picks(blocks: Sequence[Block], allowed: Sequence[Choice]) -> list[list[tuple[Pick, ...]]]:
    return [
        list(
            itertools.product(
                *(
                    [
                        Pick(s, c)
                        for s in range(len(o.strategies))
                        for c in allowed
                        if c != "recompute" or o.recomputable
                    ]
                    for o in block.operators
                )
            )
        )
        for block in blocks
    ]


def joint_case(seed: int, operators: int = 3, largest: int = 6000) -> bool:
    """Compares picks with brute force; whether the case was small enough for that."""
    draw = random.Random(seed)
    blocks = small_network(draw, draw.randint(1, 3), operators, 2)
    allowed = ALL if draw.random() < 0.9 else ALL[:1]
    spaces, budget = _picks(blocks, allowed), draw.randint(5, 40)
    count = 1
    for space in spaces:
        count *= len(space)
    if count > largest:
        return False
    everything = [(p, _by_hand(blocks, p)) for p in itertools.product(*spaces)]
    known = [(picks, cost) for picks, cost in everything if cost is not None]
    for picks, (seconds, peak) in random.Random(seed).sample(known, min(20, len(known))):
        found = joint_cost(blocks, picks)
        assert (found.seconds, found.peak) == (pytest.approx(seconds), peak)
    least = min(peak for _, (_, peak) in known)
    assert least_memory(blocks, allowed).peak == least
    best = min((seconds for _, (seconds, peak) in known if peak <= budget), default=None)
    if best is None:
        with pytest.raises(GulliverError, match=rf"\b{least}\b"):
            solve_joint(blocks, budget, allowed, tolerance=0)
        return True
    found = solve_joint(blocks, budget, allowed, tolerance=0)
    assert found.exact
    assert found.cost.seconds == pytest.approx(best)
    assert found.cost.peak <= budget
    rough = solve_joint(blocks, budget, allowed, states=2, tolerance=0.1)
    assert rough.lower <= best * (1 + 1e-9) <= rough.cost.seconds * (1 + 2e-9)
    assert rough.cost.peak <= budget
    return True


def conversion_case(seed: int, axes: int = 3) -> bool:
    """Compares with Bellman-Ford over every layout that can be reached, with random prices."""
    rng, prices = random.Random(seed), dict[object, float]()

    def seconds(move: ConversionStep) -> float:
        return prices.setdefault((move.kind, move.axes, move.before, move.after), rng.random())

    def layout() -> Sharding:
        cuts, terms = [tuple[int, ...]()] * 3, list[int]()
        for axis in range(axes):
            dim = rng.randint(0, 4)
            if dim < 3:
                cuts[dim] = (*cuts[dim], axis)
            elif dim == 3:
                terms.append(axis)
        return Sharding(tuple(cuts), tuple(terms))

    shape, mesh = (4, 6, 5), (2, 2, rng.choice([2, 3]))[:axes]
    before, after = layout(), layout()
    edges, reached, new = [], {before}, [before]
    while new:
        state = new.pop()
        for move in moves_from(shape, mesh, state):
            edges.append((state, move.after, seconds(move)))
            if move.after not in reached:
                reached.add(move.after)
                new.append(move.after)
    best = dict.fromkeys(reached, math.inf) | {before: 0.0}
    changed = True
    while changed:
        changed = False
        for one, other, price in edges:
            if best[one] + price < best[other] - 1e-15:
                best[other], changed = best[one] + price, True
    found = convert_least(shape, mesh, before, after, seconds)
    assert found is not None
    assert found.seconds == pytest.approx(best[after])
    return True
