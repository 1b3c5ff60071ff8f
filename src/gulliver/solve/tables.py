"""Assigns embedding tables to ranks: one option per table, minimizing the slowest rank's time.

Places slow tables first (Graham 1969), once with all options and once with the cheapest, then
improves by local search: changes one table's option, or swaps those of two. The bound assumes
divisible work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from gulliver.errors import GulliverError


@dataclass(frozen=True)
class TableOption:
    """A possible placement of a table."""

    # Name of the placement.
    name: str
    # Seconds on each rank.
    seconds: tuple[float, ...]
    # Bytes on each rank.
    nbytes: tuple[int, ...]


@dataclass(frozen=True)
class TableChoice:
    """The chosen placements of all tables."""

    # Chosen options, in the order of the tables.
    options: tuple[TableOption, ...]
    # Seconds of each rank.
    seconds: tuple[float, ...]
    # Lower bound over all choices.
    bound: float

    @property
    def slowest(self) -> float:
        return max(self.seconds)


def place_tables(tables: Sequence[Sequence[TableOption]], room: int) -> TableChoice:
    if not tables or not all(tables):
        raise GulliverError(
            "place_tables needs at least one table, and at least one option per table"
        )
    starts = [
        _improved(tables, _longest_first(tables, room, least), room) for least in (True, False)
    ]
    chosen = min(starts, key=lambda start: _score(tables, dict(enumerate(start)), room))
    options = tuple(tables[t][n] for t, n in enumerate(chosen))
    most = max(map(sum, zip(*(o.nbytes for o in options), strict=True)))
    if most > room:
        raise GulliverError(
            f"the tables need {most} bytes on one rank, which only has {room}; use more ranks or a "
            "disk"
        )
    ranks = len(options[0].seconds)
    seconds = tuple(map(sum, zip(*(o.seconds for o in options), strict=True)))
    total = sum(min(sum(o.seconds) for o in table) for table in tables)
    bound = max(total / ranks, max(min(max(o.seconds) for o in table) for table in tables))
    return TableChoice(options, seconds, bound)


def _longest_first(tables: Sequence[Sequence[TableOption]], room: int, least: bool) -> list[int]:
    """Places the slowest tables first; with `least`, each with its cheapest option."""
    order = sorted(range(len(tables)), key=lambda t: -min(sum(o.seconds) for o in tables[t]))
    chosen: dict[int, int] = {}
    for table in order:
        totals = [sum(option.seconds) for option in tables[table]]
        allowed = [n for n, total in enumerate(totals) if not least or total <= min(totals)]
        chosen[table] = min(allowed, key=lambda n: _score(tables, {**chosen, table: n}, room))
    return [chosen[table] for table in range(len(tables))]


def _score(
    tables: Sequence[Sequence[TableOption]], chosen: dict[int, int], room: int
) -> tuple[int, float, float]:
    """Sort key of a choice: excess bytes, seconds of the slowest rank, total seconds."""
    options = [tables[t][n] for t, n in chosen.items()]
    taken = map(sum, zip(*(o.nbytes for o in options), strict=True))
    seconds = list(map(sum, zip(*(o.seconds for o in options), strict=True)))
    return sum(max(count - room, 0) for count in taken), max(seconds), sum(seconds)


def _improved(tables: Sequence[Sequence[TableOption]], chosen: list[int], room: int) -> list[int]:
    best = _score(tables, dict(enumerate(chosen)), room)
    while True:
        found, better = best, chosen
        for changed in _neighbours(tables, chosen):
            score = _score(tables, dict(enumerate(changed)), room)
            if score[:2] < found[:2]:
                found, better = score, changed
        if found is best:
            return chosen
        best, chosen = found, better


def _neighbours(tables: Sequence[Sequence[TableOption]], chosen: list[int]) -> list[list[int]]:
    """Lists choices that differ in one table, or swap the options of two."""
    made = [
        [*chosen[:t], n, *chosen[t + 1 :]]
        for t, options in enumerate(tables)
        for n in range(len(options))
        if n != chosen[t]
    ]
    for one, other in combinations(range(len(tables)), 2):
        if chosen[one] != chosen[other]:
            swapped = list(chosen)
            swapped[one], swapped[other] = chosen[other], chosen[one]
            if swapped[one] < len(tables[one]) and swapped[other] < len(tables[other]):
                made.append(swapped)
    return made
