"""Searches for the fastest grid on which a model fits a cluster's memory.

    found = search_grids(model, optimizer, batch, cluster, samples=512, memory="70GiB")
    print(found)

Meshes are visited by increasing lower bound. The search ends when the next bound is no better than
the worst grid kept, so the result is optimal under the cost formulas.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from gulliver.errors import GulliverError
from gulliver.families.lookup import family_of, is_hugging_face
from gulliver.hardware.cluster import Cluster
from gulliver.hardware.offload import rate_text, seconds_text
from gulliver.options import byte_size, size_at_least, size_text
from gulliver.planner.predict import free_share
from gulliver.planner.search.facts import Axes, Facts, Grid, axes_of, facts_of, grids_of
from gulliver.planner.search.offload import MinimumOffload, Offloader, least_offloaded, with_offload
from gulliver.planner.search.rank_bytes import WIDE
from gulliver.planner.search.score import Scored, Scorer
from gulliver.planner.tiers import NOTHING, OffloadTiers

BEST = 10
RESERVED = 0.06  # share of a GPU's memory reserved for its context, allocator and libraries


@dataclass(frozen=True)
class Found:
    """Result of a search over grids."""

    # The fastest grid that fits of each mesh, fastest first.
    best: tuple[Scored, ...]
    # Grid that needs the least memory of those that were priced.
    least: Scored
    # Bytes that a rank may hold; 0 for no limit.
    limit: int
    # Number of grids that were priced.
    looked: int
    # Number of meshes, and of those skipped by their bound.
    meshes: tuple[int, int]
    # Why the model cannot run on some meshes, by mesh.
    refused: dict[str, str]
    # Seconds that analysis and search took.
    seconds: tuple[float, float]
    # Costs of the model and its batch.
    facts: Facts
    # Machines that the search assumes.
    cluster: Cluster
    # Slower tiers that state may be offloaded to.
    behind: OffloadTiers = NOTHING
    # Minimum memory with offloading, if no grid was found.
    offloaded: MinimumOffload | None = None
    # Offloading grids that were not replayed, to save time.
    unlooked: int = 0

    def __str__(self) -> str:
        if not self.best:
            return self.why_none()
        lines = []
        for number, scored in enumerate(self.best, 1):
            step = scored.seconds.step
            rate = rate_text(scored.samples / step)
            lines.append(
                f"{number:>2}  {seconds_text(step):>9}  {rate:>9} samples/s  "
                f"{size_text(scored.bytes):>10}  {scored.grid}"
            )
        return "\n".join(lines)

    def why_none(self) -> str:
        least = self.least
        kinds = {**vars(least.memory), "working memory": least.working}
        largest = max(kinds, key=lambda kind: kinds[kind])
        return (
            f"nothing fits {size_at_least(self.limit)} per rank: the minimum is "
            f"{size_at_least(least.bytes)} ({least.grid}), of which {largest.replace('_', ' ')} "
            f"are {size_text(kinds[largest])}; use more memory, more ranks or a smaller batch"
            + self._off_load()
        )

    def _off_load(self) -> str:
        if self.offloaded is None or self.offloaded.bytes >= self.least.bytes:
            return f"; off-load to {self.behind} does not help" if self.behind else ""
        where = "the host" if self.cluster.device.to_device_rate is not None else "a disk"
        least = self.offloaded
        told = f"; off-load to {where} needs at least {size_at_least(least.bytes)} ({least})"
        if self.behind and least.bytes <= self.limit:
            told += f", and the {self.behind} has {size_text(self.behind.bytes)}"
        return told


def search_grids(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Any,
    cluster: Cluster,
    samples: int,
    memory: int | str | None = None,
    precision: str = "bf16",
    best: int = BEST,
    facts: Facts | None = None,
    behind: OffloadTiers = NOTHING,
    explain: bool = True,
) -> Found:
    """Searches all grids that a plugin can run.

    Args:
        model: full model, possibly on the meta device; it is not changed.
        optimizer: optimizer of its parameters; None if it is not trained.
        batch: one sample or a few, as passed to the model; real or on the meta device.
        cluster: machines, with one rank per device.
        samples: samples per step over all ranks.
        memory: limit per rank; None for the device's memory minus a reserve.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        best: number of grids to return.
        facts: results of `facts_of` for the same model.
        behind: slower tiers of each rank, for offloading state that does not fit.
        explain: whether to compute the minimum memory with offloading if nothing fits.

    Raises:
        GulliverError: the model does not run on this batch, there are too few samples, no mesh is
            possible, or the machines lack the tiers.
    """
    behind.check(cluster)
    on_cpu = cluster.device.to_device_rate is None
    begun = time.perf_counter()
    facts = facts or facts_of(model, optimizer, batch, cluster.device, precision, on_cpu)
    analysed = time.perf_counter()
    limit = _limit(memory, cluster, on_cpu)
    scorer = _scorer(facts, cluster, samples)
    possible, refused = _possible(scorer)
    looked = _view_of(scorer, possible, limit, best)
    offloader = Offloader(scorer, behind, limit)
    ranked, unlooked, offloaded = _with_offloaded(offloader, possible, looked.ranked, best, explain)
    return Found(
        ranked,
        scorer.score(looked.least),
        limit or 0,
        looked.priced + offloader.looked * bool(behind),
        (len(possible), len(possible) - looked.meshes),
        refused,
        (analysed - begun, time.perf_counter() - analysed),
        facts,
        cluster,
        behind,
        offloaded,
        unlooked,
    )


def scorer_of(found: Found, samples: int) -> Scorer:
    return _scorer(found.facts, found.cluster, samples)


def _scorer(facts: Facts, cluster: Cluster, samples: int) -> Scorer:
    device = "cpu" if cluster.device.to_device_rate is None else "cuda"
    return Scorer(facts, cluster, samples, device, free_share(cluster.device, cluster.size))


def _possible(scorer: Scorer) -> tuple[list[Axes], dict[str, str]]:
    facts, ranks = scorer.facts, scorer.cluster.size
    blocks = len(facts.blocks) if facts.has_stack else 0
    meshes = axes_of(ranks, scorer.batch, blocks, modes_of(facts))
    refusals = {axes: scorer.why_unsupported(axes) for axes in meshes}
    possible = [axes for axes, why in refusals.items() if not why]
    refused = {str(Grid(axes)): why for axes, why in refusals.items() if why}
    if not possible:
        why = next(iter(refused.values()), f"{scorer.batch} samples cannot be divided over them")
        raise GulliverError(f"no mesh of {ranks} ranks can run this model: {why}")
    return possible, refused


class _Looked(NamedTuple):
    ranked: tuple[Scored, ...]
    least: Grid
    priced: int
    meshes: int


def _view_of(scorer: Scorer, possible: Sequence[Axes], limit: int, best: int) -> _Looked:
    """Prices grids mesh by mesh, in the order of their bounds; keeps the fastest of each mesh."""
    facts, tie = scorer.facts, itertools.count()
    chosen: list[tuple[float, int, Scored]] = []
    least: tuple[int, Grid] | None = None
    count = meshes = 0
    for bound, axes in sorted((scorer.bound(axes), axes) for axes in possible):
        # No grid of this mesh, nor of those that follow, is faster than the slowest one kept.
        if len(chosen) == best and bound >= -chosen[0][0]:
            break
        meshes += 1
        fastest: Scored | None = None
        for grid in grids_of(axes, scorer.batch, len(facts.blocks), facts.optimizer is not None):
            count += 1
            scored = scorer.least(grid, limit)
            small = scored.grid if scored else replace(grid, recomputed=len(facts.recomputable))
            held = scorer.bytes_of(small)
            if least is None or held < least[0]:
                least = held, small
            if scored is not None and (fastest is None or _order(scored) < _order(fastest)):
                fastest = scored
        if fastest is None:
            continue
        entry = (-fastest.seconds.step, next(tie), fastest)
        if len(chosen) < best:
            heapq.heappush(chosen, entry)
        elif entry[0] > chosen[0][0]:
            heapq.heapreplace(chosen, entry)
    assert least is not None, "some mesh was looked at"
    ranked = tuple(scored for _, _, scored in sorted(chosen, key=lambda e: (-e[0], e[1])))
    return _Looked(ranked, least[1], count, meshes)


def _with_offloaded(
    offloader: Offloader,
    possible: list[Axes],
    ranked: tuple[Scored, ...],
    best: int,
    explain: bool,
) -> tuple[tuple[Scored, ...], int, MinimumOffload | None]:
    """Adds offloading grids; also returns how many were skipped, and the least memory needed."""
    behind, unlooked, offloaded = offloader.behind, 0, None
    if behind:
        ranked, unlooked = with_offload(offloader, possible, ranked, best)
    if not ranked and (explain or behind):
        offloaded = least_offloaded(offloader.scorer, possible)
    if behind and offloaded is not None and offloaded.bytes <= offloader.limit:
        # This grid may not have been replayed.
        last = offloader.score(replace(offloaded.grid, offload=str(behind)))
        ranked = () if last is None else (last,)
    return ranked, unlooked, offloaded


def _order(scored: Scored) -> tuple[float, int, int]:
    """Sort key: step time (four digits), then micro-batches, then bytes."""
    step = float(f"{scored.seconds.step:.4g}")
    return step, scored.grid.micro_batches, scored.bytes


def modes_of(facts: Facts) -> Sequence[str]:
    """Returns the sequence modes to search: those that the model supports."""
    family = family_of(facts.model)
    if family.sequences is None or not (family.classes or is_hugging_face(facts.model)):
        return ()
    return [
        mode
        for mode in family.sequences.modes
        if mode in ("split_gather", "all_to_all", "ring_attn")
    ]


def _limit(memory: int | str | None, cluster: Cluster, on_cpu: bool) -> int:
    if memory is not None:
        return byte_size("memory", memory)
    whole = cluster.device.memory_bytes
    return whole if on_cpu else int(whole * (1 - RESERVED))


# Minimum memory and number of ranks.


DOUBLINGS = 4  # maximum number of times that a cluster is doubled if the model does not fit
COUNTS = 24  # numbers of ranks up to this one are searched individually


@dataclass(frozen=True)
class MinimumResources:
    """Minimum memory and minimum number of ranks."""

    # Minimum bytes per rank over all grids on this cluster.
    bytes: int
    # Grid that needs these bytes.
    grid: Grid
    # Minimum number of ranks on which the model fits; 0 if it fits on none of those tried.
    ranks: int
    # Minimum memory with offloading; None if that is not less.
    offloaded: MinimumOffload | None = None
    # First and last number of ranks below `ranks` that were not tried.
    unlooked: tuple[int, int] | None = None


def searched_again(
    found: Found, samples: int, cluster: Cluster | None = None, **others: int | None
) -> Found:
    """Repeats a search with other machines or limits; returns only the fastest grid."""
    machines = cluster or found.cluster
    facts = (
        found.facts if machines.device == found.facts.device else found.facts.on(machines.device)
    )
    arguments = {"best": 1, "facts": facts, "behind": found.behind, "explain": False, **others}
    return search_grids(facts.model, None, None, machines, samples, **arguments)  # type: ignore[arg-type]


def minimum_resources(found: Found, samples: int) -> MinimumResources:
    least, grid = least_bytes(found.facts, found.cluster, samples)
    offloaded = _offloaded(found, samples)
    if offloaded is not None and offloaded.bytes >= least:
        offloaded = None
    return replace(_enough(found, samples, least, grid), offloaded=offloaded)


def _offloaded(found: Found, samples: int) -> MinimumOffload | None:
    if found.offloaded is not None or found.facts.optimizer is None:
        return found.offloaded
    scorer, meshes = _runnable(found.facts, found.cluster, samples)
    return least_offloaded(scorer, meshes)


def _runnable(facts: Facts, cluster: Cluster, samples: int) -> tuple[Scorer, list[Axes]]:
    scorer = _scorer(facts, cluster, samples)
    blocks = len(facts.blocks) * facts.has_stack
    meshes = axes_of(cluster.size, samples, blocks, modes_of(facts))
    return scorer, [axes for axes in meshes if not scorer.why_unsupported(axes)]


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
    """A lower bound on the number of ranks whose memory holds the state."""
    facts = found.facts
    master = WIDE if facts.copied else facts.item
    # Optimizer state, the weights that it updates, and their gradients.
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
    """Returns the minimum memory per rank over grids that recompute every block, and its grid."""
    scorer, meshes = _runnable(facts, cluster, samples)
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
