"""Predicts the time of a pipeline's step, and how much of it its ranks wait (the bubble).

Gives the orders of a schedule to `gulliver.solve.schedule_seconds`, which walks through them as
ranks would. Seconds in, seconds out; no clock is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from gulliver.hardware import BACKWARD_OF_LINEAR
from gulliver.parallel.pipeline._schedules import check_counts, deal, make_schedule
from gulliver.solve import BACKWARD, FORWARD, INPUTS, WEIGHTS, Prediction, schedule_seconds


def predict(
    style: str,
    ranks: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float] | None = None,
    link: float = 0.0,
) -> Prediction:
    """Predicts the seconds of a step and the share that ranks wait."""
    stages = len(forward)
    numbers = deal(style, ranks, stages // ranks)
    assert sum(map(len, numbers)) == stages, "stages lie on the ranks evenly"
    check_counts(style, stages, ranks, micro_batches)
    if backward is None:
        backward = [BACKWARD_OF_LINEAR * seconds for seconds in forward]
    half = [seconds / 2 for seconds in backward]
    times = {FORWARD: forward, BACKWARD: backward, INPUTS: half, WEIGHTS: half}
    orders = [list(computations(style, place, numbers, micro_batches)) for place in range(ranks)]
    rank_of = {stage: place for place, held in enumerate(numbers) for stage in held}
    return schedule_seconds(orders, times, rank_of, link)


def computations(
    style: str, place: int, numbers: Sequence[Sequence[int]], micro_batches: int
) -> Iterator[tuple[str, int, int]]:
    """Yields what a rank computes, in order, as (kind, stage, micro-batch)."""
    count = sum(map(len, numbers))
    if style == "1f1b":
        # What torch 2.13 says of its own order is wrong for the last rank.
        yield from _one_forward_one_backward(place, count, micro_batches)
        return
    stages = [
        SimpleNamespace(
            stage_index=number,
            num_stages=count,
            group_size=len(numbers),
            group_rank=place,
            submod=None,
            stage_index_to_group_rank={},
        )
        for number in numbers[place]
    ]
    schedule = make_schedule(style, stages, micro_batches, lambda output, _: output)
    for action in schedule.pipeline_order[place]:
        yield from _computations(action)


def _one_forward_one_backward(
    stage: int, stages: int, micro_batches: int
) -> Iterator[tuple[str, int, int]]:
    ahead = min(micro_batches, stages - stage)
    for micro in range(micro_batches + ahead):
        if micro >= ahead:
            yield BACKWARD, stage, micro - ahead
        if micro < micro_batches:
            yield FORWARD, stage, micro


def _computations(action: Any) -> Iterator[tuple[str, int, int]]:
    if action is None:
        return
    if action.sub_actions is not None:
        for inner in action.sub_actions:
            yield from _computations(inner)
        return
    kind = action.computation_type.value
    if kind in (FORWARD, BACKWARD, INPUTS, WEIGHTS):
        yield kind, action.stage_index, action.microbatch_index
