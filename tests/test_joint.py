"""Shardings, recomputation and off-load are picked jointly: no picks of brute force are better."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.errors import GulliverError
from gulliver.solve import (
    ENTRY,
    Block,
    Choice,
    EdgeSeconds,
    OffloadLink,
    Operator,
    Pick,
    Strategy,
    joint_cost,
    least_memory,
    solve_joint,
)

ALL: tuple[Choice, ...] = ("keep", "recompute", "offload")


def _conversion(draw: random.Random, rows: int, columns: int) -> EdgeSeconds | None:
    if draw.random() < 0.4:
        return None

    def matrix(most: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(draw.randint(0, most) for _ in range(columns)) for _ in range(rows))

    return EdgeSeconds(matrix(3), matrix(3), matrix(2) if draw.random() < 0.5 else None)


def _strategy(draw: random.Random) -> Strategy:
    n, saved = draw.randint, draw.randint(0, 6)
    seconds = [n(0, 5), n(0, 5), n(0, 2), n(0, 2)]
    output = draw.choice([0, 0, n(1, 3)])
    return Strategy("", *seconds, n(0, 4), saved, output, n(0, 3), n(0, 3), n(0, saved))


def _network(draw: random.Random, blocks: int, operators: int, strategies: int) -> list[Block]:
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


def _compared(seed: int, operators: int, largest: int) -> bool:
    """Compares with brute force; whether the case was small enough for that."""
    draw = random.Random(seed)
    blocks = _network(draw, draw.randint(1, 3), operators, 2)
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


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_no_picks_are_better(seed: int) -> None:
    _compared(seed, 2, 600)


@pytest.mark.full
@pytest.mark.deadline(600)
def test_no_picks_are_better_in_larger_cases() -> None:
    assert sum(_compared(seed, 3, 6000) for seed in range(3000)) > 1500


def _layer(name: str, wide: float) -> Operator:
    """Two ways: whole on each device, or sharded, which communicates."""
    whole = Strategy("whole", 2.0, 4.0, state=8, saved=8, backward_bytes=2, movable=8)
    parts = Strategy("parts", 1.0, 2.0, wide, wide, state=4, saved=4, backward_bytes=2, movable=4)
    dear = EdgeSeconds(((0.0, 0.1), (0.5, 0.0)), ((0.0, 0.5), (0.1, 0.0)))
    return Operator(name, (whole, parts), conversions=(dear,))


def _chain(count: int) -> list[Block]:
    stays = (Strategy("", 0.1, 0.1, output=2), Strategy("", 0.1, 0.1, output=1))
    layers = [_layer("up", 0.4), _layer("down", 0.7)]
    up, down = layers[0], Operator("down", layers[1].strategies, (0,), layers[1].conversions)
    add = Operator("add", stays, (ENTRY, 1), (None, layers[0].conversions[0]))
    return [Block((up, down, add))] * count


def test_recomputation_repeats_communication_so_that_the_shardings_depend_on_the_budget() -> None:
    blocks = _chain(6)
    free = solve_joint(blocks, 10**6)
    tight = solve_joint(blocks, least_memory(blocks).peak + 12)
    assert {p.choice for b in free.picks for p in b} == {"keep"}
    assert "recompute" in {p.choice for b in tight.picks for p in b}
    assert free.price == 0 < tight.price
    # In two stages: the shardings that are best without a limit, then what to recompute.
    chosen = [
        Block(
            tuple(
                Operator(o.name, (o.strategies[p.strategy],), o.inputs, last_use=o.last_use)
                for o, p in zip(block.operators, picks, strict=True)
            )
        )
        for block, picks in zip(blocks, free.picks, strict=True)
    ]
    assert least_memory(chosen).peak >= least_memory(blocks).peak


def test_many_blocks_end_within_a_small_gap() -> None:
    blocks = _chain(96)
    least, free = least_memory(blocks), solve_joint(blocks, 10**9)
    middle = (least.peak + free.cost.peak) // 2
    found = solve_joint(blocks, middle)
    assert found.cost.peak <= middle
    assert found.lower <= found.cost.seconds
    assert found.gap < 0.01


def test_too_little_is_refused_with_what_binds() -> None:
    blocks = _chain(2)
    least = least_memory(blocks)
    with pytest.raises(GulliverError, match=rf"{least.peak} would do. Operator '(up|down|add)'"):
        solve_joint(blocks, least.peak - 1)
    assert solve_joint(blocks, least.peak).cost.peak == least.peak


def test_what_contradicts_itself_is_refused() -> None:
    one = Operator("one", (Strategy(),))
    with pytest.raises(GulliverError, match="has no strategy"):
        solve_joint([Block((Operator("none", ()),))], 1)
    with pytest.raises(GulliverError, match="do not come before"):
        solve_joint([Block((one, Operator("two", (Strategy(),), (1,))))], 1)
    wrong = Operator("two", (Strategy(),), (0,), (EdgeSeconds(((1.0, 2.0),), ((1.0, 2.0),)),))
    with pytest.raises(GulliverError, match=r"has conversions \(1, 2\), and needs \(1, 1\)"):
        solve_joint([Block((one, wrong))], 1)
    with pytest.raises(GulliverError, match="allow 'keep'"):
        solve_joint([Block((one,))], 1, allowed=("recompute",))
