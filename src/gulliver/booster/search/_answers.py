"""The price of memory, and the least memory and ranks that suffice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gulliver.booster.search._bytes import WIDE
from gulliver.booster.search._facts import Facts
from gulliver.booster.search._grids import Axes, Grid, axes_of, grids_of
from gulliver.booster.search._offload import Least, least_offloaded
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
COUNTS = 24
"""Numbers of ranks that are looked at one by one: each is a search of its own."""


# [Note: few searches] The fastest grid under a limit is also the fastest under every limit between
# its own bytes and that one, so most limits need no search.
@dataclass(frozen=True)
class Price:
    """The fastest grid under a limit."""

    # Bytes that a rank may hold.
    limit: int
    # The grid; None where none fits.
    scored: Scored | None


@dataclass(frozen=True)
class MinimumResources:
    """Least memory and fewest ranks that suffice."""

    # Least bytes of a rank that a grid on this cluster holds.
    bytes: int
    # Grid that holds so few.
    grid: Grid
    # Fewest ranks that the model fits on; 0 if none of those tried.
    ranks: int
    # Least memory that suffices with offloading; None if that is not less.
    offloaded: Least | None = None
    # First and last number of ranks below `ranks` that were not tried.
    unlooked: tuple[int, int] | None = None


def searched_again(
    found: Found, samples: int, cluster: Cluster | None = None, **others: int | None
) -> Found:
    """Repeats a search with other machines or limits, for the fastest grid only."""
    machines = cluster or found.cluster
    facts = (
        found.facts if machines.device == found.facts.device else found.facts.on(machines.device)
    )
    arguments = {"best": 1, "facts": facts, "behind": found.behind, "explain": False, **others}
    return search_grids(facts.model, None, None, machines, samples, **arguments)  # type: ignore[arg-type]


def prices_of_memory(found: Found, samples: int) -> tuple[Price, ...]:
    """Step times under smaller and larger limits, and with one GiB more."""
    if not found.best:
        return ()
    limit, best = found.limit, found.best[0]
    search = partial(searched_again, found, samples)
    free = search(memory=LARGEST).best[0]
    if best.moved is not None:
        return _priced_one_by_one(_limits(limit), search)
    if free.seconds.step >= best.seconds.step:
        free = best
    return tuple(Price(at, _under(at, limit, best, free, search)) for at in _limits(limit))


def _priced_one_by_one(limits: Sequence[int], search: Callable[..., Found]) -> tuple[Price, ...]:
    """Prices of limits with offloading, where every byte changes what moves."""
    # What runs under a limit also runs under a larger one, whose chunk size may be chosen worse.
    found, best = list[Price](), None
    for at in limits:
        now = _first(search(memory=at))
        if best is None or (now is not None and now.seconds.step < best.seconds.step):
            best = now
        found.append(Price(at, best))
    return tuple(found)


def _limits(limit: int) -> list[int]:
    """Limits to price, including the given one."""
    return sorted({*(int(limit * share) for share in SHARES), limit + GIB})


def _first(found: Found) -> Scored | None:
    return found.best[0] if found.best else None


def _under(
    at: int, limit: int, best: Scored, free: Scored, search: Callable[..., Found]
) -> Scored | None:
    """The fastest grid under a limit; searches only if no known one applies."""
    if at >= free.bytes:
        return free
    if best.bytes <= at <= limit:
        return best
    return _first(search(memory=at))


def saved_by_a_gib(prices: Sequence[Price], limit: int) -> float:
    """Seconds of a step that one GiB more saves."""
    steps = {p.limit: p.scored.seconds.step for p in prices if p.scored is not None}
    return steps[limit] - steps[limit + GIB]


def enough(found: Found, samples: int) -> MinimumResources:
    """The least memory on this cluster and the fewest ranks that suffice."""
    least, grid = least_bytes(found.facts, found.cluster, samples)
    offloaded = _offloaded(found, samples)
    if offloaded is not None and offloaded.bytes >= least:
        offloaded = None
    return replace(_enough(found, samples, least, grid), offloaded=offloaded)


def _offloaded(found: Found, samples: int) -> Least | None:
    """The least memory that suffices with offloading."""
    if found.offloaded is not None or found.facts.optimizer is None:
        return found.offloaded
    scorer, meshes = _scorer(found.facts, found.cluster, samples)
    return least_offloaded(scorer, meshes)


def _scorer(facts: Facts, cluster: Cluster, samples: int) -> tuple[Scorer, list[Axes]]:
    """A scorer for a model on a cluster, and the possible meshes."""
    on_cpu = cluster.device.to_device_rate is None
    scorer = Scorer(facts, cluster, samples, "cpu" if on_cpu else "cuda", 0.0)
    blocks = len(facts.blocks) * facts.has_stack
    meshes = axes_of(cluster.size, samples, blocks, modes_of(facts))
    return scorer, [axes for axes in meshes if not scorer.refuses(axes)]


def _enough(found: Found, samples: int, least: int, grid: Grid) -> MinimumResources:
    ranks, most = found.cluster.size, found.cluster.size
    if least <= found.limit:
        while most % 2 == 0 and _fits(found, samples, most // 2):
            most //= 2
        first = _fewest(found)
    else:
        first = max(ranks + 1, _fewest(found))
        doubles = [ranks << n for n in range(1, DOUBLINGS + 1)]
        most = next((n for n in doubles if n >= first and _fits(found, samples, n)), 0)
    # Fewer ranks may fit where more do not (5 samples divide over 5 ranks, not 6), so each is
    # tried.
    last = min(most or ranks << DOUBLINGS, first + COUNTS)
    for number in range(first, last):
        if _fits(found, samples, number):
            return MinimumResources(least, grid, number)
    return MinimumResources(least, grid, most, unlooked=(last, most - 1) if last < most else None)


def _fewest(found: Found) -> int:
    """A lower bound of the ranks that can hold the state."""
    facts = found.facts
    master = WIDE if facts.copied else facts.item
    # What the optimizer works with: its numbers, what it steps, and the gradients of that.
    learned = facts.trained * (WIDE * facts.states + 2 * master)
    state = learned + facts.item * (facts.parameters - facts.trained)
    return max(1, -(-state // max(1, found.limit)))


def _fits(found: Found, samples: int, ranks: int) -> bool:
    try:
        cluster = found.cluster.resized(ranks)
        return least_bytes(found.facts, cluster, samples, found.limit)[0] <= found.limit
    except GulliverError:
        return False


def least_bytes(facts: Facts, cluster: Cluster, samples: int, limit: int = 0) -> tuple[int, Grid]:
    """The grid with the smallest fullest rank, every block recomputed."""
    scorer, meshes = _scorer(facts, cluster, samples)
    again, trains = len(facts.recomputable), facts.optimizer is not None
    best: tuple[int, Grid] | None = None
    for axes in meshes:
        for grid in grids_of(axes, samples, len(facts.blocks), trains):
            held = scorer.bytes_of(replace(grid, recomputed=again))
            if best is None or held < best[0]:
                best = held, replace(grid, recomputed=again)
            if held <= limit:
                return best
    if best is None:
        raise GulliverError(f"no mesh of {cluster.size} ranks can run this model")
    return best
