"""Moves of the memory manager, counted, beside its simulation and the least that there can be.

Small cases: a few objects of unequal sizes, some changed when they are used, one access after
another, round after round as in training. The manager runs them on a disk and counts what it moves;
the simulation says what it would move; the optimum is found by going through every choice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

ROUNDS, SETTLED = 10, 4
"""Rounds of a case, and those after which its moves repeat."""


@dataclass(frozen=True)
class Case:
    """Objects and the accesses of a round.

    Attributes:
        sizes: size of each object.
        accesses: number of the object that is used, and whether that changes it.
        budget: sizes that fit at once.
    """

    sizes: tuple[int, ...]
    accesses: tuple[tuple[int, bool], ...]
    budget: int


def random_case(seed: int) -> Case:
    """A case like a training step: forward through all, backward through all, some twice."""
    draw = random.Random(seed)
    sizes = tuple(draw.randint(1, 4) for _ in range(draw.randint(3, 5)))
    order = list(range(len(sizes)))
    kind = draw.choice(("forward", "there and back", "any"))
    if kind == "there and back":
        order += order[::-1]
    elif kind == "any":
        order = [draw.choice(order) for _ in range(2 * len(sizes))]
    accesses = tuple((number, draw.random() < 0.4) for number in order)
    budget = draw.randint(max(sizes), max(max(sizes), sum(sizes) - 1))
    return Case(sizes, accesses, budget)


def least_moves(case: Case, rounds: int) -> int:
    """Sizes that must be moved in so many rounds, all choices tried; at first nothing is here.

    What is loaded counts, and what was changed counts again when it leaves. Nothing is gained by
    leaving before room is needed, so that is where choices are: which of the others leave.
    """
    costs: dict[frozenset[tuple[int, bool]], int] = {frozenset(): 0}
    for _ in range(rounds):
        for number, changes in case.accesses:
            following: dict[frozenset[tuple[int, bool]], int] = {}
            for state, cost in costs.items():
                for after, added in _after(case, state, number, changes):
                    known = following.get(after)
                    if known is None or cost + added < known:
                        following[after] = cost + added
            costs = following
    return min(costs.values())


def least_moves_of_a_round(case: Case) -> float:
    """What a round must move once it repeats."""
    settled, all_of_them = least_moves(case, SETTLED), least_moves(case, ROUNDS)
    return (all_of_them - settled) / (ROUNDS - SETTLED)


State = frozenset[tuple[int, bool]]
"""What is here: number of the object, and whether it was changed since it came."""


def _after(case: Case, state: State, number: int, changes: bool) -> Sequence[tuple[State, int]]:
    """States after an access, each with what was moved."""
    here = dict(state)
    if number in here:
        return [((state - {(number, here[number])}) | {(number, here[number] or changes)}, 0)]
    found = []
    for count in range(len(state) + 1):
        for leaving in combinations(sorted(state), count):
            kept = state - set(leaving)
            used = sum(case.sizes[n] for n, _ in kept) + case.sizes[number]
            if used <= case.budget:
                written = sum(case.sizes[n] for n, changed in leaving if changed)
                found.append((kept | {(number, changes)}, case.sizes[number] + written))
    return found
