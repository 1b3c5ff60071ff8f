"""Schedules by name, with the assignment of stages to ranks and supported micro-batch counts.

| name | source |
|---|---|
| gpipe | Huang et al., 2019 (arXiv 1811.06965): all forwards, then all backwards |
| 1f1b | Narayanan et al., 2021 (arXiv 2006.09503): activations of a few micro-batches in memory |
| interleaved | Narayanan et al., 2021 (arXiv 2104.04473): several stages on each rank |
| zero_bubble, zbv | Qi et al., 2024 (arXiv 2401.10241): gradients of weights fill the bubble |
| dualpipev | DeepSeek-V3, 2024 (arXiv 2412.19437), folded into a V |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from gulliver.errors import GulliverError, nearest
from gulliver.hardware.costs import BACKWARD_OF_LINEAR
from gulliver.solve.timeline import BACKWARD, FORWARD, INPUTS, WEIGHTS, Prediction, schedule_seconds


@dataclass(frozen=True)
class Style:
    """A pipeline schedule."""

    schedule: str  # Name of torch's class
    chunks: int = 1  # Stages on each rank, by default
    fixed: bool = True  # Whether the schedule requires this number
    folded: bool = False  # Whether the second half of the stages is assigned in reverse order
    splits: bool = False  # Whether backward is split into two parts


STYLES = {
    "gpipe": Style("ScheduleGPipe"),
    "1f1b": Style("Schedule1F1B"),
    "interleaved": Style("ScheduleInterleaved1F1B", 2, fixed=False),
    "zero_bubble": Style("ScheduleInterleavedZeroBubble", 1, fixed=False, splits=True),
    "zbv": Style("ScheduleZBVZeroBubble", 2, folded=True, splits=True),
    "dualpipev": Style("ScheduleDualPipeV", 2, folded=True, splits=True),
}


def torch_schedules() -> Any:
    """Imports torch's schedules, which takes seconds, when the first pipeline is planned."""
    from torch.distributed.pipelining import schedules

    return schedules


def style_of(name: str, chunks: int | None = None) -> Style:
    if name not in STYLES:
        raise GulliverError(f"pp_style={name!r} is not known: {nearest(name, STYLES)}")
    style = STYLES[name]
    if not hasattr(torch_schedules(), style.schedule):
        raise GulliverError(
            f"pp_style={name!r} needs torch's {style.schedule}, which this torch does not have"
        )
    if chunks is not None and chunks != style.chunks and style.fixed:
        raise GulliverError(
            f"pp_style={name!r} has {style.chunks} stages on each rank, not {chunks}: use "
            "'interleaved' or 'zero_bubble' for other numbers"
        )
    return style


def stages_by_rank(name: str, ranks: int, chunks: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Returns the indices of the stages on each rank.

    In a folded schedule each rank has one stage of each half, so the two middle stages are on the
    last rank, and the first rank computes the loss.
    """
    style = style_of(name, chunks)
    count = chunks or style.chunks
    if style.folded:
        return tuple((place, 2 * ranks - 1 - place) for place in range(ranks))
    return tuple(tuple(range(place, count * ranks, ranks)) for place in range(ranks))


def check_counts(name: str, stages: int, ranks: int, micro_batches: int) -> None:
    least = 1
    if name == "1f1b":
        least = ranks
    elif name == "dualpipev":
        least = stages
    if micro_batches < least:
        raise GulliverError(
            f"pp_style={name!r} over {ranks} ranks needs at least {least} micro-batches, not "
            f"{micro_batches}"
        )
    rounds = max(1, micro_batches // ranks)
    if name in ("interleaved", "zero_bubble") and micro_batches % rounds:
        fits = micro_batches - micro_batches % ranks
        raise GulliverError(
            f"pp_style={name!r} over {ranks} ranks does not support {micro_batches} micro-batches: "
            f"use {fits} or {fits + ranks}"
        )


def fits(name: str, stages: int, ranks: int, micro_batches: int) -> bool:
    try:
        check_counts(name, stages, ranks, micro_batches)
    except GulliverError:
        return False
    return True


def make_schedule(
    name: str, runners: Sequence[Any], micro_batches: int, loss: Callable[[Any, Tensor], Tensor]
) -> Any:
    style = style_of(name, None if STYLES[name].fixed else len(runners))
    made = getattr(torch_schedules(), style.schedule)
    single = issubclass(made, torch_schedules().PipelineScheduleSingle)
    stages = runners[0] if single else list(runners)
    return made(stages, n_microbatches=micro_batches, loss_fn=loss, scale_grads=False)


# Predicts the time of a pipeline's step, and the share that its ranks wait (the bubble).
#
# `gulliver.solve.timeline.schedule_seconds` simulates the ranks' orders of computations from given
# seconds, without measuring.


def predict(
    style: str,
    ranks: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float] | None = None,
    link: float = 0.0,
    recomputes: bool = False,
) -> Prediction:
    """Predicts the seconds per step and the idle share; with recomputation no backward is split."""
    stages = len(forward)
    numbers = stages_by_rank(style, ranks, stages // ranks)
    assert sum(map(len, numbers)) == stages, "stages are evenly on the ranks"
    check_counts(style, stages, ranks, micro_batches)
    if backward is None:
        backward = [BACKWARD_OF_LINEAR * seconds for seconds in forward]
    half = [seconds / 2 for seconds in backward]
    inputs, weights = (backward, [0.0] * stages) if recomputes else (half, half)
    times = {FORWARD: forward, BACKWARD: backward, INPUTS: inputs, WEIGHTS: weights}
    orders = [list(computations(style, place, numbers, micro_batches)) for place in range(ranks)]
    rank_of = {stage: place for place, held in enumerate(numbers) for stage in held}
    return schedule_seconds(orders, times, rank_of, link)


def computations(
    style: str, place: int, numbers: Sequence[Sequence[int]], micro_batches: int
) -> Iterator[tuple[str, int, int]]:
    """Yields a rank's computations in order, as (kind, stage, micro-batch)."""
    count = sum(map(len, numbers))
    if style == "1f1b":
        # The order that torch 2.13 reports is wrong for the last rank.
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
