"""Steps simulated event by event: one rank of each kind beside all ranks, and known answers."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from benchmarks._every_rank import simulate_every_rank
from benchmarks._models import llama

from gulliver.hardware.cluster import Axis, Link
from gulliver.hardware.costs import collective_seconds
from gulliver.hardware.probe import named_cluster
from gulliver.planner.search.facts import Axes, Facts, Grid, facts_of
from gulliver.planner.search.score import Scorer
from gulliver.planner.search.simulate import simulate_step, weak_scaling
from gulliver.solve.timeline import Act, Action, RankProgram, simulate

MIB = 1 << 20


@cache
def facts() -> Facts:
    with torch.device("meta"):
        model = llama(4096, 512, 1408, 8, 8, 8, 64, use_cache=False)
        ids = torch.zeros(1, 64, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = {"input_ids": ids, "labels": ids}
    return facts_of(model, optimizer, batch, named_cluster("h100x8").device)


def scorer(ranks: int, links: tuple[Axis, ...] = (), samples: int = 16) -> Scorer:
    cluster = named_cluster(f"h100x{ranks}")
    return Scorer(facts(), replace(cluster, axes=links or cluster.axes), samples, "cuda", 1.0)


GRIDS = (
    *(Grid(Axes(data=8), stage, micro, chunk_mb=4) for stage in range(4) for micro in (1, 2)),
    Grid(Axes(data=4, tensor=2), 1, chunk_mb=4),
    Grid(Axes(data=2, sequence=2, mode="all_to_all"), 3, chunk_mb=4),
    Grid(Axes(data=2, sequence=4, mode="ring_attn"), 2, chunk_mb=4),
    Grid(Axes(data=2, tensor=2, pipeline=2), 1, 4, "1f1b", chunk_mb=4),
    Grid(Axes(data=2, pipeline=4), 3, 4, "zero_bubble", recomputed=8, chunk_mb=4),
    Grid(Axes(data=2, pipeline=2), 3, 4, "interleaved", 2, chunk_mb=4),
    Grid(Axes(data=2, pipeline=2), 2, 4, "zbv", 2, chunk_mb=4),
)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_one_rank_of_each_kind_stands_for_all(grid: Grid) -> None:
    priced = scorer(grid.axes.size)
    alone = simulate_step(priced, grid)
    assert simulate_every_rank(priced, grid) == pytest.approx(alone, rel=1e-12)


def test_torus_of_all_ranks_equals_one_rank() -> None:
    grid = Grid(Axes(data=16), 3, chunk_mb=4)
    alone = simulate_step(scorer(16), grid, (2, 8))
    assert simulate_every_rank(scorer(16), grid, (2, 8)) == pytest.approx(alone)
    assert alone != simulate_step(scorer(16), grid)


def slow(ranks: int, bandwidth: float) -> tuple[Axis, ...]:
    return (Axis("local", ranks, Link(1e-5, bandwidth)),)


@pytest.mark.parametrize("stage", [1, 3])
def test_step_tends_to_its_messages_on_slow_links_and_to_its_compute_on_fast_ones(
    stage: int,
) -> None:
    grid = Grid(Axes(data=4), stage, chunk_mb=4)
    fast, slowest = scorer(4, slow(4, 1e14)), scorer(4, slow(4, 1e7))
    compute = sum(fast.passes(grid)) + fast.update(grid)
    assert compute <= simulate_step(fast, grid) < 1.1 * compute  # launches of messages
    whole = facts().item * facts().trained
    line = slowest.links(grid.axes)["replicas"]
    once = collective_seconds(line, "all_gather", whole)
    assert simulate_step(slowest, grid) == pytest.approx((2 if stage == 1 else 3) * once, rel=0.15)


def test_closed_form_is_no_slower_than_the_simulation_by_more_than_its_window() -> None:
    """The search assumes that all but one message of a pass may overlap."""
    for stage in (1, 2, 3):
        grid = Grid(Axes(data=8), stage, chunk_mb=4)
        closed = scorer(8).score(grid).seconds.step
        assert closed <= 1.02 * simulate_step(scorer(8), grid)


def test_jitter_slows_down_more_ranks_more() -> None:
    def slowdown(ranks: int) -> float:
        grid, priced = Grid(Axes(data=ranks), 1, chunk_mb=32), scorer(ranks, samples=8 * ranks)
        each = [simulate_every_rank(priced, grid, (), 0.2, seed) for seed in range(4)]
        return statistics.mean(each) / simulate_step(priced, grid)

    assert 1 < slowdown(2) < slowdown(16)


def test_weak_scaling_keeps_the_work_of_a_replica() -> None:
    points = weak_scaling(scorer(8), Grid(Axes(data=4, tensor=2), 1))
    assert [point.grid.axes.data for point in points] == [1, 2, 4]
    assert points[0].efficiency == 1.0
    slowest = weak_scaling(scorer(8, slow(8, 1e8)), Grid(Axes(data=8), 1))
    assert slowest[-1].efficiency < 0.5
    assert all(a.efficiency >= b.efficiency for a, b in itertools.pairwise(slowest))


def ranks_of(*programs: list[Action], groups: Any = None) -> list[RankProgram]:
    return [RankProgram(program, groups or {"all": (0, len(programs))}) for program in programs]


def test_message_begins_when_its_last_rank_starts_it_and_its_lane_is_free() -> None:
    first = [
        Action(Act.START, 5.0, "a", "all", "lane"),
        Action(Act.START, 2.0, "b", "all", "lane"),
        Action(Act.COMPUTE, 1.0),
        Action(Act.WAIT, 0.0, "b", "all"),
        Action(Act.MARK),
    ]
    second = [Action(Act.COMPUTE, 3.0), *first]
    found = simulate(ranks_of(first, second))
    assert found.marks == (3.0 + 5.0 + 2.0,)
    assert found.busy == (1.0, 4.0)
    apart = [a._replace(lane=str(a.key)) if a.act is Act.START else a for a in second]
    other = [a._replace(lane=str(a.key)) if a.act is Act.START else a for a in first]
    assert simulate(ranks_of(other, apart)).marks == (3.0 + 2.0,)
