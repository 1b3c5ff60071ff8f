"""Answers besides the best grid: the price of memory, and what would be enough.

[Note: few searches] A grid that is the fastest under a limit is the fastest under every limit
between its own bytes and that one. So most limits need no search of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gulliver.booster.search._facts import Facts
from gulliver.booster.search._grids import Grid, axes_of, grids_of
from gulliver.booster.search._score import Scored, Scorer
from gulliver.booster.search._search import Found, modes_of, search_grids
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster
from gulliver.options import LARGEST

GIB = 1 << 30
SHARES = (0.5, 0.75, 1.0, 1.5)
"""Limits that memory is priced at, as parts of the one that was given."""
DOUBLINGS = 4
"""Times that a cluster that is too small is doubled."""


@dataclass(frozen=True)
class Price:
    """The fastest grid under a limit.

    Attributes:
        limit: bytes that a rank may hold.
        scored: the grid; None where none fits.
    """

    limit: int
    scored: Scored | None


@dataclass(frozen=True)
class Enough:
    """Memory and ranks that would be enough.

    Attributes:
        bytes: least bytes of a rank that a grid on this cluster holds.
        grid: grid that holds so few.
        ranks: fewest ranks that the model fits, of halves and doubles of the cluster; 0: none.
    """

    bytes: int
    grid: Grid
    ranks: int


def searched_again(
    found: Found, samples: int, cluster: Cluster | None = None, **others: int | None
) -> Found:
    """Searches once more for what a search was of, for the fastest grid alone.

    Args:
        found: what was found.
        samples: samples of a step.
        cluster: other machines; None for the same.
        others: other arguments of `search_grids`.
    """
    machines = cluster or found.cluster
    facts = (
        found.facts if machines.device == found.facts.device else found.facts.on(machines.device)
    )
    arguments = {"best": 1, "facts": facts, **others}
    return search_grids(facts.model, None, None, machines, samples, **arguments)  # type: ignore[arg-type]


def prices_of_memory(found: Found, samples: int) -> tuple[Price, ...]:
    """Finds what a step takes under smaller and larger limits, and with one GiB more."""
    if not found.best:
        return ()
    limit, best = found.limit, found.best[0]
    search = partial(searched_again, found, samples)
    free = search(memory=LARGEST).best[0]
    if free.seconds.step >= best.seconds.step:
        free = best
    limits = sorted({*(int(limit * share) for share in SHARES), limit + GIB})
    return tuple(Price(at, _under(at, limit, best, free, search)) for at in limits)


def _under(
    at: int, limit: int, best: Scored, free: Scored, search: Callable[..., Found]
) -> Scored | None:
    """The fastest grid under a limit, searched for only where it cannot be one of those known."""
    if at >= free.bytes:
        return free
    if best.bytes <= at <= limit:
        return best
    again = search(memory=at).best
    return again[0] if again else None


def saved_by_a_gib(prices: Sequence[Price], limit: int) -> float:
    """Seconds of a step that one GiB more saves."""
    steps = {p.limit: p.scored.seconds.step for p in prices if p.scored is not None}
    return steps[limit] - steps[limit + GIB]


def enough(found: Found, samples: int) -> Enough:
    """The least memory that would do on this cluster, and the fewest ranks that would."""
    least, grid = least_bytes(found.facts, found.cluster, samples)
    ranks = found.cluster.size
    if least <= found.limit:
        while ranks % 2 == 0 and _fits(found, samples, ranks // 2):
            ranks //= 2
        return Enough(least, grid, ranks)
    for _ in range(DOUBLINGS):
        ranks *= 2
        if _fits(found, samples, ranks):
            return Enough(least, grid, ranks)
    return Enough(least, grid, 0)


def _fits(found: Found, samples: int, ranks: int) -> bool:
    try:
        cluster = found.cluster.resized(ranks)
        return least_bytes(found.facts, cluster, samples, found.limit)[0] <= found.limit
    except GulliverError:
        return False


def least_bytes(facts: Facts, cluster: Cluster, samples: int, limit: int = 0) -> tuple[int, Grid]:
    """The grid that holds the least on its fullest rank, every block recomputed.

    Args:
        facts: model and batch in numbers.
        cluster: machines.
        samples: samples of a step.
        limit: bytes that are little enough: the first such grid ends the search.

    Raises:
        GulliverError: no mesh of so many ranks can run the model.
    """
    on_cpu = cluster.device.to_device_rate is None
    scorer = Scorer(facts, cluster, samples, "cpu" if on_cpu else "cuda", 0.0)
    again = len(facts.recomputable)
    best: tuple[int, Grid] | None = None
    for axes in axes_of(
        cluster.size, samples, len(facts.blocks) * facts.has_stack, modes_of(facts)
    ):
        if scorer.refuses(axes):
            continue
        for grid in grids_of(axes, samples, len(facts.blocks)):
            held = scorer.bytes_of(replace(grid, recomputed=again))
            if best is None or held < best[0]:
                best = held, replace(grid, recomputed=again)
            if held <= limit:
                return best
    if best is None:
        raise GulliverError(f"no mesh of {cluster.size} ranks can run this model")
    return best
