"""Grids that offload state to host memory or disk.

Traffic and waiting times come from replaying the memory manager on the plan of the grid's plugin;
this module only computes a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gulliver.errors import GulliverError
from gulliver.hardware.offload import TierRates, host_rates
from gulliver.memory.budget import smallest_limit
from gulliver.memory.buffers import KINDS
from gulliver.options import size_text
from gulliver.plan.plan import Plan
from gulliver.plan.results import MemoryPlan
from gulliver.plan.tree import Tiers
from gulliver.planner.predict import tiered_step
from gulliver.planner.ranks import (
    ResolvedPlan,
    largest_residency,
    rank_state,
    rank_states,
    rank_work,
)
from gulliver.planner.residency import chunk_sizes, least_bytes, other_bytes, tier_rates
from gulliver.planner.resolve import cut_model, recomputable, resolve
from gulliver.planner.search.facts import Axes, Grid, grids_of
from gulliver.planner.search.score import Scored, Scorer
from gulliver.planner.state_bytes import BACKWARD, FORWARD
from gulliver.planner.tiers import OffloadTiers

ENDLESS = 1 << 60
REPLAYED = 96  # maximum number of replayed micro-batches (summed over ranks and grids) in a search
ASKED = 32  # the same limit when searching for the minimum memory
MICRO_BATCHES = 16  # pipelines with more micro-batches are not replayed


# [Note: few replays] A replay takes from 10 ms to some seconds, and there are thousands of grids.
# State that does not fit must be read in every step, and written if it is trained, and moving it
# never makes a step faster. That gives a cheap lower bound of each grid's seconds; grids are
# replayed in its order until it is no better than the best result.
@dataclass(frozen=True)
class MinimumOffload:
    """Minimum memory with offloading."""

    # Bytes on the device of a rank.
    bytes: int
    # Grid that needs these bytes.
    grid: Grid
    # Bytes of slower tiers that a rank needs.
    leaves: int

    def __str__(self) -> str:
        return f"{self.grid}, {size_text(self.leaves)} behind it"


def offloaded_grids(scorer: Scorer, axes: Axes, behind: OffloadTiers) -> Iterator[Grid]:
    """Yields every offloading grid of a mesh, with all or none of its blocks recomputed."""
    # State is offloaded in chunks of ZeRO stage 3. Gradient accumulation is not replayed, so it is
    # left out, as are pipelines with more than `MICRO_BATCHES` micro-batches.
    facts = scorer.facts
    again = {0, len(facts.recomputable)}
    for grid in grids_of(axes, scorer.batch, len(facts.blocks)):
        # With one rank all stages are the same.
        if grid.stage != (3 if axes.data * axes.sequence > 1 else 0):
            continue
        if grid.micro_batches > (MICRO_BATCHES if axes.pipeline > 1 else 1):
            continue
        for number in sorted(again):
            yield replace(grid, stage=3, recomputed=number, offload=str(behind))


class Offloader:
    """Prices grids that offload."""

    def __init__(self, scorer: Scorer, behind: OffloadTiers, limit: int) -> None:
        self.scorer, self.behind, self.limit = scorer, behind, limit
        self.looked = self.replayed = 0

    def needs_offload(self, grid: Grid) -> bool:
        if smallest_limit(0, self.scorer.other_bytes(grid)) > self.limit:
            return False
        return self.scorer.bytes_of(replace(grid, offload="")) > self.limit

    def bound(self, grid: Grid) -> float:
        scorer = self.scorer
        seconds = scorer.score(grid).seconds
        held, learned = scorer.resting(grid)
        rates = self._rates()
        if rates is None:
            return seconds.step
        most = self.limit - scorer.other_bytes(grid)
        reads, writes = (max(0.0, n - most) for n in (held, learned))
        busy = rates.busy(reads / rates.read_rate, writes / rates.write_rate)
        compute = seconds.compute + seconds.recompute + seconds.update
        return max(seconds.step, seconds.step - compute + busy)

    def score(self, grid: Grid) -> Scored | None:
        """Replays a grid; None if the limit or the slower tiers are too small."""
        self._count(grid, grid.axes.pipeline * grid.axes.tensor)
        facts, cluster = self.scorer.facts, self.scorer.cluster
        try:
            resolved = resolve(self.plan(grid), facts.model, facts.optimizer, cluster)
            known = self.scorer.score(grid)
            found = tiered_step(resolved, cluster, known.seconds)
        except GulliverError:
            return None
        moved, seconds, other = found
        memory = replace(resolved.plan.predicted.bytes, activations=other)
        if grid.axes.pipeline == 1:
            memory = self._fullest(grid, resolved)
        return Scored(known.grid, seconds, memory, 0, known.samples, moved)

    def _fullest(self, grid: Grid, resolved: ResolvedPlan) -> MemoryPlan:
        facts, plan = self.scorer.facts, resolved.plan
        assert plan.tiers is not None, "what off-loads has a limit"
        # Cached: `tiered_step` has computed the same.
        states, work = rank_states(resolved), rank_work(resolved)
        found = largest_residency(states, plan.tiers, work)
        moments, come, most = self.scorer.moments(grid), 0.0, MemoryPlan()
        for seen in found.visits:
            if seen.phase == FORWARD:
                continue
            # Activations shrink through the backward: take the largest of the moments to come.
            others = moments[-1][1]
            if seen.phase == BACKWARD:
                others = max((held for after, held in moments if after >= come), default=others)
                come += found.state.chunks[seen.chunk].whole / facts.item
            here = MemoryPlan(**{kind: seen.held.get(kind, 0) for kind in KINDS})
            if here.total + others > most.total + most.activations:
                most = replace(here, activations=others)
        return most

    def plan(self, grid: Grid) -> Plan:
        facts, cluster = self.scorer.facts, self.scorer.cluster
        plugin, plan = self._choices(grid)
        return plugin.for_model(plan, facts.model, facts.optimizer, cluster)

    def least(self, grid: Grid) -> MinimumOffload | None:
        """Minimum memory with which a grid can run; None if it cannot run at all."""
        facts, model = self.scorer.facts, self.scorer.facts.model
        self._count(grid, 1)
        try:
            _, plan = self._choices(grid)
            found = cut_model(plan, model, facts.optimizer)
            again = recomputable(plan, model, found.stages) if grid.recomputed else ()
            plan = replace(plan, recompute=again)
            tiers = plan.tiers
            assert tiers is not None, "what off-loads has a limit"
            smallest = chunk_sizes(sum(t.numel * t.dtype.itemsize for t in found.sizes()))[0]
            found = found.with_plan(plan.with_zero(chunk_bytes=smallest))
            # The first and the last rank have the largest modules, embedding and head.
            ends = sorted({0, grid.axes.pipeline - 1})
            states = [rank_state(found, (place, 0)) for place in ends]
        except GulliverError:
            return None
        other = other_bytes(tiers, rank_work(found))
        held = max(least_bytes(state, tiers) for state in states)
        leaves = max(state.reserved for state in states)
        return MinimumOffload(smallest_limit(held, other), replace(grid, offload=""), leaves)

    def _count(self, grid: Grid, ranks: int) -> None:
        self.looked, self.replayed = self.looked + 1, self.replayed + ranks * grid.micro_batches

    def _choices(self, grid: Grid) -> tuple[Any, Plan]:
        scorer, facts = self.scorer, self.scorer.facts
        # Plugins are a layer above; imported here to get exactly the plan that would run.
        from gulliver.booster.auto import plugin_of

        plugin = plugin_of(grid, "bf16" if facts.copied else "fp32", self.limit)
        plan = plugin.choices(scorer.cluster.size)
        assert plan.tiers is not None, "what off-loads has a limit"
        # The cluster need not be the one at hand.
        behind = self.behind
        tiers = replace(
            plan.tiers, host=behind.host, disk=behind.disk, disk_bytes=behind.disk_bytes
        )
        mesh = replace(plan.mesh, device=scorer.device)
        plan = replace(plan.with_zero(tiers=tiers), mesh=mesh, work=scorer.work(grid))
        return plugin, plan

    def _rates(self) -> TierRates | None:
        behind = self.behind
        tiers = Tiers(self.limit, behind.host, behind.disk, behind.disk_bytes)
        return tier_rates(tiers, self.scorer.cluster)


def with_offload(
    offloader: Offloader, meshes: Sequence[Axes], found: Sequence[Scored], best: int
) -> tuple[tuple[Scored, ...], int]:
    """Returns the fastest grid per mesh, including offloading ones, and how many were skipped."""
    scorer, fastest = offloader.scorer, {scored.grid.axes: scored for scored in found}
    grids = [g for axes in meshes for g in offloaded_grids(scorer, axes, offloader.behind)]
    bounds = sorted(
        (offloader.bound(grid), grid) for grid in filter(offloader.needs_offload, grids)
    )
    for number, (bound, grid) in enumerate(bounds):
        steps = sorted(scored.seconds.step for scored in fastest.values())
        if len(steps) >= best and bound >= steps[best - 1]:
            break
        if offloader.replayed >= REPLAYED:
            return _fastest(fastest.values(), best), len(bounds) - number
        known = fastest.get(grid.axes)
        if known is not None and bound >= known.seconds.step:
            continue
        scored = offloader.score(grid)
        if scored is not None and (known is None or scored.seconds.step < known.seconds.step):
            fastest[grid.axes] = scored
    return _fastest(fastest.values(), best), 0


def _fastest(found: Iterable[Scored], best: int) -> tuple[Scored, ...]:
    return tuple(sorted(found, key=lambda scored: scored.seconds.step)[:best])


def least_offloaded(scorer: Scorer, meshes: list[Axes]) -> MinimumOffload | None:
    """Minimum memory per rank if the slower tiers are unlimited."""
    # Grids are tried in the order of their bytes that are not state. The search ends when these
    # alone exceed the best total, or after `ASKED` micro-batches.
    on_host = host_rates(scorer.cluster.device) is not None
    behind = (
        OffloadTiers(host=ENDLESS) if on_host else OffloadTiers(disk="a disk", disk_bytes=ENDLESS)
    )
    asked = Offloader(scorer, behind, ENDLESS)
    grids = [grid for axes in meshes for grid in offloaded_grids(scorer, axes, behind)]
    best: MinimumOffload | None = None
    for grid in sorted(grids, key=scorer.other_bytes):
        if asked.replayed >= ASKED or (best is not None and scorer.other_bytes(grid) >= best.bytes):
            break
        found = asked.least(grid)
        if found is not None and (best is None or found.bytes < best.bytes):
            best = found
    return best
