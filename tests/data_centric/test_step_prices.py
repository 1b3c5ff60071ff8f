"""Prices of a step that are counted, held against what runs: launches, queues, what is put off."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gulliver._compat import DispatchMode
from gulliver.comm import World
from gulliver.hardware.attention import exchange_launches, hop_launches
from gulliver.hardware.cluster import Link
from gulliver.hardware.step import Message, exposed_seconds, predict_step
from gulliver.parallel.pipeline import STYLES, stages_by_rank
from gulliver.parallel.pipeline.schedules import computations
from gulliver.parallel.sequence import Mask, SequencePlan, attention, make_groups
from gulliver.planner.search.facts import Axes, Grid
from gulliver.planner.search.rank_bytes import put_off, under_way
from gulliver.solve.timeline import BACKWARD, FORWARD, INPUTS, WEIGHTS
from tests.pool import Pool

LENGTH = 32


class Launched(DispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and counts it."""
        aliases = (argument.alias_info for argument in func._schema.arguments)
        self.count += not any(found is not None and not found.is_write for found in aliases)
        return func(*args, **(kwargs or {}))


def _launched(world: World, ulysses: int) -> tuple[int, int]:
    """Operations of an attention on the ranks, forward and backward, and of one on one rank."""
    ring = world.size // ulysses
    groups = make_groups(SequencePlan(ulysses=ulysses, inner=ring, layout="zigzag"))

    def given(length: int) -> list[torch.Tensor]:
        return [torch.randn(2, heads, length, 16, requires_grad=True) for heads in (8, 4, 4)]

    q, k, v = given(LENGTH // world.size)
    attention(q, k, v, groups, mask=Mask(causal=True), length=LENGTH).sum().backward()
    with Launched() as several:
        attention(q, k, v, groups, mask=Mask(causal=True), length=LENGTH).sum().backward()
    q, k, v = given(LENGTH)
    with Launched() as one:
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()
    return several.count, one.count


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["exchange", "ring"])
def test_launches_of_an_attention_over_ranks_are_those_that_run(
    pool: Pool, ranks: int, mode: str
) -> None:
    several, one = pool.run(_launched, ranks, ranks if mode == "exchange" else 1)[0]
    told = 4 * exchange_launches(ranks)  # to heads and back, forward and backward
    if mode == "ring":
        told = 2 * (ranks - 1) * hop_launches(ranks)
    assert several - one == pytest.approx(told, rel=0.25)


def test_queued_messages_overlap_compute_between_waits() -> None:
    link = Link(0.0, 1e9)
    hidden = Message("reduce_scatter", 2 * 10**6, [(2, link)], 4, hidden=True)  # 1 ms each
    passing = replace(link, bandwidth=2e9)
    stop = Message("all_to_all", 4 * 10**6, [(2, passing)], 10)  # 1 ms each
    # Of each of three messages 0.3 ms are computed beside, the last never hides.
    assert exposed_seconds([hidden], 10.0, 0.3e-3) == pytest.approx(4e-3 - 3 * 0.3e-3)
    assert exposed_seconds([hidden], 1.0, 10.0) == exposed_seconds([hidden], 1.0)
    costs = predict_step((1e-3, 2e-3), 0.0, 0.0, [hidden, stop])
    assert costs.exposed == pytest.approx(10e-3 + 4e-3 - 3 * 3e-3 / 10)
    # Over the same link 10 stops wait for those in flight: no message is hidden.
    same = replace(stop, bytes=2 * 10**6, axes=[(2, link)])
    costs = predict_step((1e-3, 2e-3), 0.0, 0.0, [hidden, same])
    assert costs.exposed == pytest.approx(10e-3 + 4e-3)
    # Two stops in 20 ms each wait for a message of 1 ms with the probability that there is one.
    rare = replace(same, count=2)
    costs = predict_step((0.0, 20e-3), 0.0, 0.0, [hidden, rare])
    assert costs.exposed == pytest.approx(2e-3 + 1e-3 + 2 * 1e-3 * 4 / 20)
    assert predict_step((1.0, 0.0), 0.0, 0.0, [hidden, rare]).exposed == pytest.approx(2e-3 + 4e-3)
    # What is read from the memory of other ranks is in no queue.
    read = replace(hidden, reads=True, axes=[(2, replace(link, host_rate=1e9))])
    costs = predict_step((0.0, 20e-3), 0.0, 0.0, [read, rare])
    assert costs.exposed == pytest.approx(2e-3 + 1e-3)
    # Rings of NCCL have queues of their own.
    rings = [replace(m, axes=[(2, replace(link, ring=True))]) for m in (hidden, same)]
    assert predict_step((1e-3, 2e-3), 0.0, 0.0, rings).exposed == pytest.approx(
        10e-3 + 4e-3 - 2e-3 * 3 / 4
    )
    packed = replace(stop, launches=20)
    dearer = predict_step((1e-3, 2e-3), 0.0, 0.0, [hidden, packed], launch_s=1e-6)
    plain = predict_step((1e-3, 2e-3), 0.0, 0.0, [hidden, stop], launch_s=1e-6)
    assert dearer.exposed - plain.exposed == pytest.approx(200e-6)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_in_flight_micro_batches_match_schedule(name: str, ranks: int) -> None:
    chunks = STYLES[name].chunks
    numbers = stages_by_rank(name, ranks, chunks)
    for micro in (ranks, 2 * ranks, 4 * ranks):
        grid = Grid(Axes(pipeline=ranks), 0, micro, name, chunks)
        for rank in range(ranks):
            held = waits = most = 0
            for kind, _, _ in computations(name, rank, numbers, micro):
                change = Counter({FORWARD: 1, BACKWARD: -1, WEIGHTS: -1})
                held += change[kind]
                waits += {INPUTS: 1, WEIGHTS: -1}.get(kind, 0)
                most = max(most, held)
            told = under_way(grid, rank) * chunks
            assert waits == held == 0
            # While a schedule fills, folded ones hold less than they may.
            assert most == told if micro > ranks else most <= told, (grid, rank)
            assert put_off(grid, rank) < max(1, most)
