"""`solve_joint`, and the two-stage search that it is never worse than.

Two stages are what most planners do: shardings first, with everything kept, then recomputation for
these shardings. The memory that the first stage may use is not known, so several amounts are tried
(`ROOMS`). Where the joint search does not end exactly, `solve_joint` asks the two stages as well,
for shardings whose seconds with everything kept are below its answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gulliver.errors import GulliverError
from gulliver.solve._activations import Choice
from gulliver.solve._joint import Block, EdgeSeconds, OffloadLink, Operator, Pick, joint_cost
from gulliver.solve._joint_block import CHOICES
from gulliver.solve._joint_search import STATES, JointPlan, check, least_memory, possible, searched

ROOMS = (1.0, 1.2, 1.5, 2.0, 3.0, math.inf)
"""Memory of the first stage, in budgets; the least that works is tried, too."""
NEAR = 1e-3
"""Gap that is good enough in each stage."""
ENDLESS = 1 << 60
"""Bytes that are never too few."""


def solve_joint(
    blocks: Sequence[Block],
    budget: int,
    link: OffloadLink | None = None,
    allowed: Sequence[Choice] = CHOICES,
    states: int = STATES,
    tolerance: float = 1e-3,
) -> JointPlan:
    """Finds the picks with the least seconds that keep within a budget.

    With any `states` and `tolerance` they take no more seconds than those of `solve_in_stages`.

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
    check(blocks, chosen)
    plan = searched(blocks, budget, link, chosen, states, tolerance)
    if not plan.exact:
        staged = _staged(blocks, budget, link, chosen, plan.cost.seconds)
        plan = plan if staged is None else replace(staged, lower=plan.lower, price=plan.price)
    return plan


def solve_in_stages(
    blocks: Sequence[Block],
    budget: int,
    link: OffloadLink | None = None,
    allowed: Sequence[Choice] = CHOICES,
) -> JointPlan:
    """Finds shardings first and recomputation afterwards, for comparison.

    Args:
        blocks: blocks in the order of forward.
        budget: bytes of a device.
        link: link to the slower tier; None: nothing is offloaded.
        allowed: choices for what is saved.

    Returns:
        The best of several first stages; `lower` is 0, as nothing is known of other shardings.

    Raises:
        GulliverError: no first stage has shardings that fit the budget.
    """
    chosen = possible(allowed, link)
    check(blocks, chosen)
    found = _staged(blocks, budget, link, chosen)
    if found is None:
        raise GulliverError(
            f"no shardings of a first stage fit {budget} bytes, whatever is recomputed: choose "
            "both jointly, solve_joint"
        )
    return found


def _staged(
    blocks: Sequence[Block],
    budget: int,
    link: OffloadLink | None,
    chosen: tuple[Choice, ...],
    known: float = math.inf,
) -> JointPlan | None:
    """The best two-stage answer; None if none improves on `known`."""
    best, tried = None, set[tuple[int, ...]]()
    lean = least_memory(blocks, link, ("keep",)).peak
    rooms = (ENDLESS if math.isinf(room) else int(room * budget) for room in ROOMS)
    for room in (lean, *rooms):
        if room < lean:
            continue
        first = searched(blocks, room, link, ("keep",), STATES, NEAR)
        shardings = tuple(pick.strategy for row in first.picks for pick in row)
        if shardings in tried or first.cost.seconds >= known:
            continue
        tried.add(shardings)
        picks = _second(blocks, first.picks, budget, link, chosen)
        cost = joint_cost(blocks, picks, link) if picks else None
        if cost is not None and cost.seconds < known:
            best, known = JointPlan(picks, cost, 0.0, False, 0.0), cost.seconds
    return best


def _second(
    blocks: Sequence[Block],
    first: Sequence[Sequence[Pick]],
    budget: int,
    link: OffloadLink | None,
    chosen: tuple[Choice, ...],
) -> tuple[tuple[Pick, ...], ...]:
    """Picks with given shardings; empty if they do not fit."""
    before = [None, *(row[-1].strategy for row in first)]
    alone = [fixed(*parts) for parts in zip(blocks, first, before, strict=False)]
    if least_memory(alone, link, chosen).peak > budget:
        return ()
    found = searched(alone, budget, link, chosen, STATES, NEAR)
    return tuple(
        tuple(Pick(a.strategy, b.choice) for a, b in zip(*rows, strict=True))
        for rows in zip(first, found.picks, strict=True)
    )


def fixed(block: Block, picks: Sequence[Pick], entry: int | None) -> Block:
    """A block whose operators have one strategy each."""
    operators = list[Operator]()
    for operator, pick in zip(block.operators, picks, strict=True):
        edges = list[EdgeSeconds | None]()
        for source, edge in zip(operator.inputs, operator.conversions, strict=False):
            row = entry if source < 0 else picks[source].strategy
            if edge is None or row is None:
                edges.append(None)
                continue
            forward, backward = (
                ((rows[row][pick.strategy],),) for rows in (edge.forward_s, edge.backward_s)
            )
            saved = edge.saved and ((edge.saved[row][pick.strategy],),)
            edges.append(EdgeSeconds(forward, backward, saved))
        only = (operator.strategies[pick.strategy],)
        operators.append(replace(operator, strategies=only, conversions=tuple(edges)))
    return Block(tuple(operators))
