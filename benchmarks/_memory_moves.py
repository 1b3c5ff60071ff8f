"""Moves of the memory manager, counted, beside its simulation and the least that there can be.

Small cases: a few objects of unequal sizes, used one after another, round after round as in
training; a use reads, changes or overwrites. The manager runs them on a disk and counts what it
moves; the simulation says what it would move; the optimum is found by going through every choice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations
from pathlib import Path

import torch

from benchmarks._harness import Report, at_most

READ, CHANGE, OVERWRITE = "read", "change", "overwrite"
ROUNDS, SETTLED = 34, 10
"""Rounds of a case, and those after which its moves repeat."""
READ_AHEAD: dict[str, int | None] = {"nothing read ahead": 0, "read ahead": None}
PAGE = 4096
"""Bytes of a size of one."""


@dataclass(frozen=True)
class Case:
    """Objects and the accesses of a round.

    Attributes:
        sizes: size of each object.
        accesses: number of the object that is used, and how.
        budget: sizes that fit at once.
    """

    sizes: tuple[int, ...]
    accesses: tuple[tuple[int, str], ...]
    budget: int


def random_case(seed: int) -> Case:
    """Draws a case: through all objects, there and back as in training, or in any order."""
    draw = random.Random(seed)
    sizes = tuple(draw.randint(1, 4) for _ in range(draw.randint(3, 5)))
    order = list(range(len(sizes)))
    kind = draw.choice(("through", "there and back", "any"))
    if kind == "there and back":
        order += order[::-1]
    elif kind == "any":
        order = [draw.choice(order) for _ in range(2 * len(sizes))]
    kinds = (READ, READ, CHANGE, OVERWRITE)
    accesses = tuple((number, draw.choice(kinds)) for number in order)
    return Case(sizes, accesses, draw.randint(max(sizes), max(max(sizes), sum(sizes) - 1)))


Here = frozenset[tuple[int, bool]]
"""Which objects are here, and whether each was changed since it came."""


def least_moves(case: Case, rounds: int) -> int:
    """Sizes that must be moved in so many rounds, with all choices tried; at first nothing is here.

    What is loaded counts, and what was changed counts again when it leaves. Nothing is gained by
    leaving before room is needed, so that is where choices are: which of the others leave.
    """
    costs: dict[Here, int] = {frozenset(): 0}
    for _ in range(rounds):
        for number, kind in case.accesses:
            following: dict[Here, int] = {}
            for here, cost in costs.items():
                for after, moved in _after(case, here, number, kind):
                    following[after] = min(cost + moved, following.get(after, cost + moved))
            costs = following
    return min(costs.values())


def _after(case: Case, here: Here, number: int, kind: str) -> Iterator[tuple[Here, int]]:
    """Sets of objects that can be here after an access, with the bytes moved for each."""
    changes = kind != READ
    changed = dict(here)
    if number in changed:
        yield (here - {(number, changed[number])}) | {(number, changed[number] or changes)}, 0
        return
    loaded = 0 if kind == OVERWRITE else case.sizes[number]
    for count in range(len(here) + 1):
        for leaving in combinations(sorted(here), count):
            kept = here - set(leaving)
            if sum(case.sizes[n] for n, _ in kept) + case.sizes[number] <= case.budget:
                written = sum(case.sizes[n] for n, dirty in leaving if dirty)
                yield kept | {(number, changes)}, loaded + written


def simulated_moves(case: Case, rounds: int, ahead: int | None = None) -> list[int]:
    """Sizes that the solver's simulation has moved after each round, reading so far ahead."""
    from gulliver.solve import Event, simulate

    sizes = {number: PAGE * size for number, size in enumerate(case.sizes)}
    events = [
        event
        for number, kind in case.accesses
        for event in (
            Event("use", number, kind == CHANGE, kind == OVERWRITE),
            Event("done", number),
        )
    ]
    steps = simulate([events] * rounds, sizes, PAGE * case.budget, ahead=ahead)
    return list(accumulate((moved.bytes_in + moved.bytes_out) // PAGE for moved in steps))


def counted_moves(case: Case, rounds: int, folder: Path, ahead: int | None = None) -> int:
    """Sizes that the manager has moved to and from a file."""
    from gulliver.memory.buffers import PARAMETERS
    from gulliver.memory.manager import Manager
    from gulliver.memory.stores import DiskStore

    store = DiskStore(folder, 2 * PAGE * sum(case.sizes))
    manager = Manager(PAGE * case.budget, "cpu", store, ahead=ahead)
    values = [torch.zeros(PAGE * size, dtype=torch.uint8) for size in case.sizes]
    placed = [
        manager.add(str(number), PARAMETERS, len(value), value.dtype, value)
        for number, value in enumerate(values)
    ]
    for _ in range(rounds):
        for number, kind in case.accesses:
            tensor = manager.use(placed[number], kind == CHANGE, kind == OVERWRITE)
            assert kind == OVERWRITE or torch.equal(tensor, values[number])
            if kind != READ:
                values[number] = torch.full_like(values[number], random.randrange(256))
                tensor.copy_(values[number])
            manager.done(placed[number])
        manager.end_step()
    stats = manager.stats()
    manager.close()
    return (stats["bytes_in"] + stats["bytes_out"]) // PAGE


def report(cases: int, folder: Path) -> Report:
    """Moves of random cases."""
    made = Report(
        "memory-moves",
        f"Moves of {cases} random cases of 3 to 5 objects",
        ("", "", "equal", "worst", "mean"),
    )
    drawn = [random_case(seed) for seed in range(cases)]
    least = [least_moves(case, ROUNDS) - least_moves(case, SETTLED) for case in drawn]
    for name, ahead in READ_AHEAD.items():
        simulated = [simulated_moves(case, ROUNDS, ahead) for case in drawn]
        counted = [counted_moves(case, ROUNDS, folder, ahead) for case in drawn]
        off = [abs(a[-1] - b) for a, b in zip(simulated, counted, strict=True)]
        settled = [totals[-1] - totals[SETTLED - 1] for totals in simulated]
        pairs = zip(settled, least, strict=True)
        over = [moved / optimum if optimum else float(1 + moved) for moved, optimum in pairs]
        for what, values in (("counted - simulated", off), ("simulated / optimum", over)):
            mean = sum(values) / len(values)
            equal = str(sum(value == (what[0] != "c") for value in values))
            made.rows.append([name, what, equal, f"{max(values):.3g}", f"{mean:.4g}"])
            made.figures[f"{name}: {what}"] = {"worst": max(values), "mean": mean}
        made.bars.append(at_most(f"{name}: moves counted, off the simulation", max(off), 0))
        if ahead == 0:
            made.bars.append(at_most(f"{name}: moves / exact optimum, worst", max(over), 1.0))
    made.notes.append(
        f"Optimum: every choice tried, rounds {SETTLED + 1} to {ROUNDS}, in which moves repeat. "
        "Sizes are unequal; what was changed is written when it leaves, what is overwritten is not "
        "read. The optimum waits for every move: with loads ahead of use there is room for an "
        "object less, which is much of so few."
    )
    return made
