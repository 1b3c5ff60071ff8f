"""Counts the moves of a run without running it: the decisions of a run, fed with its events."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gulliver.solve import Event, Policy
from gulliver.solve.replacement import Action, Move, Replacement


@dataclass(frozen=True)
class Moved:
    """Moves of one step: objects and bytes read and written."""

    loads: int = 0
    writes: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


def replay(core: Replacement, events: Iterable[Event]) -> list[Action]:
    """Tells a `Replacement` the events of a step, which then ends, and returns its moves."""
    actions: list[Action] = []
    for what, key, write, fresh in events:
        match what:
            case "use":
                actions += core.use(key, write, fresh)
            case "done":
                actions += core.done(key)
            case "discard":
                actions += core.discard(key)
            case "lend":
                actions += core.allocate_buffer(_bytes(key), "a buffer")
            case "give":
                actions += core.free_buffer(_bytes(key))
            case "budget":
                actions += core.set_budget(_bytes(key))
    core.end_step()
    return actions


def simulate(
    steps: Iterable[Sequence[Event]],
    sizes: Mapping[Any, int],
    budget: int,
    ahead: int | None = None,
    policy: Policy = "planned",
) -> list[Moved]:
    """Counts the moves of every step; those of adding the objects count for the first."""
    core = Replacement(budget, ahead=ahead, policy=policy)
    first = [a for key, size in sizes.items() for a in core.add(key, str(key), size, True)]
    counts = []
    for events in steps:
        counts.append(count_moves([*first, *replay(core, events)], sizes))
        first = []
    return counts


def count_moves(actions: Iterable[Action], sizes: Mapping[Any, int]) -> Moved:
    """Counts moves and their bytes."""
    moved = {Move.LOAD: [0, 0], Move.WRITE: [0, 0]}
    for action in actions:
        if action.move in moved:
            moved[action.move][0] += 1
            moved[action.move][1] += sizes[action.key]
    (loads, bytes_in), (writes, bytes_out) = moved[Move.LOAD], moved[Move.WRITE]
    return Moved(loads, writes, bytes_in, bytes_out)


def _bytes(key: Hashable) -> int:
    assert isinstance(key, int)
    return key
