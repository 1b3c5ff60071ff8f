"""How long a step of a pipeline takes, and how much of it its ranks wait.

Walks through the order of a schedule as its ranks would: each does the next thing on its list as
soon as what it needs is there. Seconds in, seconds out; no clock is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from gulliver.errors import GulliverError
from gulliver.parallel.pipeline._schedules import check_counts, deal, make_schedule

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
"""What schedules call computing forward, backward, and the two parts of backward."""

Done = dict[tuple[str, int, int], float]


@dataclass(frozen=True)
class Prediction:
    """Of one step.

    Attributes:
        seconds: until the last rank is done.
        busy: seconds that each rank computes.
    """

    seconds: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait."""
        return 1 - sum(self.busy) / (self.seconds * len(self.busy))


def predict(
    style: str,
    ranks: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float] | None = None,
    link: float = 0.0,
) -> Prediction:
    """Predicts a step.

    Args:
        style: of the pipeline.
        ranks: of the pipeline.
        micro_batches: of a batch.
        forward: seconds of each stage for a micro-batch.
        backward: the same, backward; None: twice forward. Half of it is for the weights.
        link: seconds of a message between stages.

    Raises:
        GulliverError: an unknown style, or numbers that it cannot order.
    """
    stages = len(forward)
    numbers = deal(style, ranks, stages // ranks)
    if sum(map(len, numbers)) != stages:
        raise GulliverError(f"{stages} stages do not lie on {ranks} ranks evenly")
    check_counts(style, stages, ranks, micro_batches)
    back = list(backward) if backward is not None else [2 * seconds for seconds in forward]
    orders = [list(_order(style, place, numbers, micro_batches)) for place in range(ranks)]
    place_of = {n: place for place, held in enumerate(numbers) for n in held}
    times = {FORWARD: list(forward), BACKWARD: back}
    times[INPUTS] = times[WEIGHTS] = [seconds / 2 for seconds in back]
    clocks, busy, done = [0.0] * ranks, [0.0] * ranks, Done()
    left = sum(map(len, orders))
    while left:
        for place, order in enumerate(orders):
            while order and (ready := _ready(order[0], done, stages, place_of, link)) is not None:
                kind, stage, micro = order.pop(0)
                spent = times[kind][stage]
                clocks[place] = max(clocks[place], ready) + spent
                busy[place] += spent
                done[kind, stage, micro] = clocks[place]
        rest = sum(map(len, orders))
        assert rest < left, "a schedule can be run"
        left = rest
    return Prediction(max(clocks), tuple(busy))


def _ready(
    action: tuple[str, int, int],
    done: Done,
    stages: int,
    place_of: dict[int, int],
    link: float,
) -> float | None:
    """When what an action needs is there; None while it is not known."""
    kind, stage, micro = action
    needs: list[tuple[tuple[str, ...], int]] = []
    if kind == FORWARD and stage > 0:
        needs = [((FORWARD,), stage - 1)]
    elif kind in (BACKWARD, INPUTS):
        needs = [((FORWARD,), stage)]
        if stage < stages - 1:
            needs.append(((BACKWARD, INPUTS), stage + 1))
    elif kind == WEIGHTS:
        needs = [((INPUTS,), stage)]
    latest = 0.0
    for kinds, other in needs:
        known = [done[k, other, micro] for k in kinds if (k, other, micro) in done]
        if not known:
            return None
        latest = max(latest, known[0] + (link if place_of[other] != place_of[stage] else 0.0))
    return latest


def _order(
    style: str, place: int, numbers: Sequence[Sequence[int]], micro_batches: int
) -> Iterator[tuple[str, int, int]]:
    """What a rank computes, in order, as (kind, stage, micro-batch)."""
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
