"""Small random cases of every solver, each held against brute force by an independent definition.

A case takes a seed, asserts, and says whether it was small enough, or possible, to be compared. The
tests run some of them, `--full` and `python -m benchmarks.solvers` thousands.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from gulliver.errors import GulliverError
from gulliver.solve import (
    ENTRY,
    Block,
    Choice,
    ConversionStep,
    EdgeSeconds,
    Fleet,
    OffloadLink,
    Operator,
    Pick,
    Sharding,
    Stage,
    Step,
    Strategy,
    convert_least,
    joint_by_milp,
    joint_cost,
    least_budget,
    least_memory,
    makespan,
    moves_from,
    place_layers,
    recomputed_seconds,
    rematerialize,
    schedule_peak,
    solve_in_stages,
    solve_joint,
)

ALL: tuple[Choice, ...] = ("keep", "recompute", "offload")
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
    return Strategy("", *seconds, n(0, 4), saved, output, n(0, 3), n(0, 3), n(0, saved))


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


def _by_hand(
    blocks: Sequence[Block], picks: Sequence[Sequence[Pick]], link: OffloadLink
) -> tuple[float, int] | None:
    """Seconds and peak from the definition: who is there while each operator is in backward."""
    entry, below, coming, peak, seconds, state = None, 0, 0, 0, 0.0, 0
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
            peak = max(peak, below + coming + there + sum(cost[n][2] for n in run) + own)
        forward = sum(f for f, _, _ in cost)
        backward = sum(b for _, b, _ in cost) + sum(cost[n][0] for n in again)
        seconds += max(forward, coming * link.write_s) + max(backward, coming * link.read_s)
        below += sum(taken[n].output + (cost[n][2] if n not in again else 0) for n in size)
        coming = sum(taken[n].movable for n in size if chosen[n].choice == "offload")
        below -= coming
        state += sum(s.state for s in taken)
        entry = chosen[-1].strategy
    return seconds + coming * (link.write_s + link.read_s), peak + state


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
    link = OffloadLink(draw.choice([0.2, 1.0]), draw.choice([0.2, 1.0]))
    allowed = ALL if draw.random() < 0.5 else ALL[:2]
    spaces, budget = _picks(blocks, allowed), draw.randint(5, 40)
    count = 1
    for space in spaces:
        count *= len(space)
    if count > largest:
        return False
    everything = [(p, _by_hand(blocks, p, link)) for p in itertools.product(*spaces)]
    known = [(picks, cost) for picks, cost in everything if cost is not None]
    for picks, (seconds, peak) in random.Random(seed).sample(known, min(20, len(known))):
        found = joint_cost(blocks, picks, link)
        assert (found.seconds, found.peak) == (pytest.approx(seconds), peak)
    least = min(peak for _, (_, peak) in known)
    assert least_memory(blocks, link, allowed).peak == least
    best = min((seconds for _, (seconds, peak) in known if peak <= budget), default=None)
    if best is None:
        with pytest.raises(GulliverError, match=f"{least} would do"):
            solve_joint(blocks, budget, link, allowed, tolerance=0)
        return True
    found = solve_joint(blocks, budget, link, allowed, tolerance=0)
    assert found.exact
    assert found.cost.seconds == pytest.approx(best)
    assert found.cost.peak <= budget
    rough = solve_joint(blocks, budget, link, allowed, states=2, tolerance=0.1)
    assert rough.lower <= best * (1 + 1e-9) <= rough.cost.seconds * (1 + 2e-9)
    assert rough.cost.peak <= budget
    return True


def staged_case(seed: int, largest: int = 6000) -> bool:
    """Compares the second stage with all choices of brute force for the same shardings."""
    draw = random.Random(seed)
    blocks = small_network(draw, draw.randint(1, 3), 3, 2)
    budget = least_memory(blocks).peak + draw.randint(0, 8)
    try:
        found = solve_in_stages(blocks, budget)
    except GulliverError:
        return False
    same = [
        [
            row
            for row in rows
            if all(a.strategy == b.strategy for a, b in zip(row, own, strict=True))
        ]
        for rows, own in zip(_picks(blocks, ALL[:2]), found.picks, strict=True)
    ]
    if math.prod(len(rows) for rows in same) > largest:
        return False
    costs = (_by_hand(blocks, picks, OffloadLink()) for picks in itertools.product(*same))
    best = min(cost[0] for cost in costs if cost is not None and cost[1] <= budget)
    # Each stage ends within a thousandth of its bound.
    assert best <= found.cost.seconds * (1 + 1e-9) <= best * (1 + 1.1e-3)
    assert solve_joint(blocks, budget).cost.seconds <= found.cost.seconds * (1 + 1e-9)
    return True


def milp_case(seed: int) -> bool:
    """Compares picks with those of HiGHS, in cases that are too large for brute force."""
    draw = random.Random(seed)
    blocks = small_network(draw, draw.randint(2, 3), 4, 3)
    link = OffloadLink(draw.choice([0.2, 1.0]), 1.0) if draw.random() < 0.5 else None
    least = least_memory(blocks, link).peak
    budget = least + draw.randint(0, 12)
    found = solve_joint(blocks, budget, link, tolerance=0, states=2000)
    other = joint_by_milp(blocks, budget, link)
    assert other.picks is not None
    cost = joint_cost(blocks, other.picks, link)
    assert cost.peak <= budget
    assert found.exact
    assert found.cost.seconds == pytest.approx(cost.seconds)
    return True


def every_placement(fleet: Fleet) -> list[list[float]]:
    """Seconds of the servers of every placement that fits."""
    found = []
    most = min(fleet.devices, fleet.layers)
    for count in range(fleet.devices if fleet.every else 1, most + 1):
        for devices in itertools.permutations(range(fleet.devices), count):
            for inner in itertools.combinations(range(1, fleet.layers), count - 1):
                bounds = (0, *inner, fleet.layers)
                parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
                pairs = list(zip(devices, parts, strict=True))
                if all(fleet.memory[p].sum() <= fleet.limits[d] for d, p in pairs):
                    servers = [float(fleet.seconds[d, p].sum()) for d, p in pairs]
                    steps = zip(itertools.pairwise(devices), inner, strict=True)
                    found.append(servers + [float(fleet.links[a, b, at]) for (a, b), at in steps])
    return found


def compare_placements(fleet: Fleet) -> bool:
    """Compares with every placement; whether there is one."""
    everything = every_placement(fleet)
    for count in COUNTS:
        if not everything:
            with pytest.raises(GulliverError, match="holds them"):
                place_layers(fleet, count)
            continue
        found = place_layers(fleet, count)
        best = min(
            max(servers) if count == math.inf else sum(servers) + (count - 1) * max(servers)
            for servers in everything
        )
        assert found.exact
        assert found.seconds == pytest.approx(best) == makespan(found.servers, count)
        assert found.servers == fleet.servers(found.devices, found.bounds)
        assert len(set(found.devices)) == len(found.devices)
    return bool(everything)


def partition_case(seed: int) -> bool:
    """Compares one with links or without, with limits of memory or without."""
    draw = np.random.default_rng(seed)
    devices, layers = int(draw.integers(1, 5)), int(draw.integers(1, 7))
    links = draw.integers(0, 7, (devices, devices, layers)).astype(float) if seed % 2 else None
    memory = draw.integers(0, 5, layers).astype(float)
    limits = draw.integers(2, 14, devices).astype(float)
    limited = seed % 4 > 1
    fleet = Fleet(
        draw.integers(0, 10, (devices, layers)).astype(float),
        links,
        memory if limited else None,
        limits if limited else None,
        every=bool(layers >= devices and draw.random() < 0.3),
    )
    return compare_placements(fleet)


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


def schedules(first: int, last: int) -> Iterator[tuple[Step, ...]]:
    """All persistent schedules of a part."""
    if first == last:
        yield Step("save", first), Step("backward", first)
        return
    for inner in schedules(first + 1, last):
        yield Step("save", first), *inner, Step("backward", first)
    for j in range(first + 1, last + 1):
        swept = (Step("check", first), *(Step("forward", n) for n in range(first + 1, j)))
        for above in schedules(j, last):
            for below in schedules(first, j - 1):
                yield *swept, *above, *below


def small_chain(draw: random.Random, most: int) -> tuple[list[Stage], int]:
    """Some stages with small numbers, and bytes of their input."""
    n = draw.randint
    chain = [
        Stage(float(n(0, 5)), float(n(0, 5)), n(0, 5), n(0, 5), n(0, 3), n(0, 3))
        for _ in range(n(2, most))
    ]
    return chain, n(0, 3)


def recompute_case(seed: int) -> bool:
    """Compares with every persistent schedule."""
    draw = random.Random(seed)
    chain, source = small_chain(draw, 6)
    budget = least_budget(chain, source) + draw.randint(-1, 8)
    known = [
        (schedule_peak(chain, steps, source), recomputed_seconds(chain, steps))
        for steps in schedules(0, len(chain) - 1)
    ]
    best = min((seconds for peak, seconds in known if peak <= budget), default=math.inf)
    if best == math.inf:
        with pytest.raises(GulliverError, match="too small"):
            rematerialize(chain, budget, source)
        return False
    found = rematerialize(chain, budget, source)
    assert found.exact
    assert found.seconds == best
    assert found.peak <= budget
    return True


def free_case(seed: int, most: int = 4) -> bool:
    """Compares with the least seconds of all schedules, checkpoints dropped wherever one likes."""
    draw = random.Random(seed)
    chain, source = small_chain(draw, most)
    budget = least_budget(chain, source) + draw.randint(-1, 6)
    best = least_of_all_schedules(chain, budget, source)
    if best == math.inf:
        with pytest.raises(GulliverError, match="too small"):
            rematerialize(chain, budget, source, free=True)
        return False
    found = rematerialize(chain, budget, source, free=True)
    assert found.exact
    assert found.seconds == pytest.approx(best) == recomputed_seconds(chain, found.steps)
    assert found.peak == schedule_peak(chain, found.steps, source) <= budget
    return True


def least_of_all_schedules(chain: Sequence[Stage], budget: int, source: int) -> float:
    """Shortest path over all that can be in memory, from the definition.

    Anything may be dropped at any time, what a stage saved, too, with its output or without.
    """
    count = len(chain)
    start = (count - 1, frozenset[int](), frozenset[int]())
    best, heap, tie = {start: 0.0}, [(0.0, 0, start)], itertools.count(1)

    def size(number: int) -> int:
        return chain[number].output if number >= 0 else source

    def live(gradient: int, outputs: frozenset[int], saved: frozenset[int]) -> int:
        held = sum(size(n) for n in outputs | saved) + sum(chain[n].saved for n in saved)
        return source + held + size(gradient)

    while heap:
        seconds, _, state = heapq.heappop(heap)
        gradient, outputs, saved = state
        if gradient < 0:
            return seconds
        if seconds > best[state]:
            continue
        there, found = outputs | saved | {-1}, []
        found += [(0, 0.0, (gradient, outputs - {n}, saved)) for n in outputs]
        found += [(0, 0.0, (gradient, outputs, saved - {n})) for n in saved]
        found += [(0, 0.0, (gradient, outputs | {n}, saved - {n})) for n in saved]
        for n, stage in enumerate(chain):
            if n - 1 in there:
                for after in ((outputs | {n}, saved), (outputs - {n}, saved | {n})):
                    need = live(gradient, *after) + stage.forward_bytes
                    found.append((need, stage.forward_s, (gradient, *after)))
        if gradient in saved and gradient - 1 in there:
            stage = chain[gradient]
            need = live(*state) + stage.backward_bytes + size(gradient - 1)
            left = frozenset(range(gradient - 1))
            after = (gradient - 1, outputs & left, saved - {gradient})
            found.append((need, stage.backward_s, after))
        for need, more, after in found:
            if need <= budget and seconds + more < best.get(after, math.inf):
                best[after] = seconds + more
                heapq.heappush(heap, (seconds + more, next(tie), after))
    return math.inf
