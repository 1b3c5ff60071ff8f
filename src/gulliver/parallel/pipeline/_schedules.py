"""Schedules by the names that users know, the placement of their stages, and their demands.

| name | source |
|---|---|
| gpipe | Huang et al., 2019 (arXiv 1811.06965): all forwards, then all backwards |
| 1f1b | Narayanan et al., 2021 (arXiv 2006.09503): activations of few micro-batches are kept |
| interleaved | Narayanan et al., 2021 (arXiv 2104.04473): several stages on each rank |
| zero_bubble, zbv | Qi et al., 2024 (arXiv 2401.10241): gradients of weights fill the bubble |
| dualpipev | DeepSeek-V3, 2024 (arXiv 2412.19437), folded into a V |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import schedules

from gulliver.errors import GulliverError, nearest


@dataclass(frozen=True)
class Style:
    """A way to order the forwards and backwards of micro-batches."""

    schedule: str  # Name of torch's class
    chunks: int = 1  # Stages on each rank, unless the user says otherwise
    fixed: bool = True  # Whether the schedule can have no other number of them
    folded: bool = False  # Whether the second half of the stages lies in reverse order
    splits: bool = False  # Whether backward comes in two parts


STYLES = {
    "gpipe": Style("ScheduleGPipe"),
    "1f1b": Style("Schedule1F1B"),
    "interleaved": Style("ScheduleInterleaved1F1B", 2, fixed=False),
    "zero_bubble": Style("ScheduleInterleavedZeroBubble", 1, fixed=False, splits=True),
    "zbv": Style("ScheduleZBVZeroBubble", 2, folded=True, splits=True),
    "dualpipev": Style("ScheduleDualPipeV", 2, folded=True, splits=True),
}


def style_of(name: str, chunks: int | None = None) -> Style:
    """Returns the style of a name."""
    if name not in STYLES:
        raise GulliverError(f"pp_style={name!r} is not known: {nearest(name, STYLES)}")
    style = STYLES[name]
    if not hasattr(schedules, style.schedule):
        raise GulliverError(
            f"pp_style={name!r} needs torch's {style.schedule}, which this torch does not have"
        )
    if chunks is not None and chunks != style.chunks and style.fixed:
        raise GulliverError(
            f"pp_style={name!r} has {style.chunks} stages on each rank, not {chunks}: take "
            "'interleaved' or 'zero_bubble' for other numbers"
        )
    return style


def deal(name: str, ranks: int, chunks: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Returns the numbers of the stages that each of `ranks` ranks holds.

    A folded schedule's rank has one stage of either half, so that the last rank hands the middle
    over to itself, and the first rank has the loss as well.
    """
    style = style_of(name, chunks)
    count = chunks or style.chunks
    if style.folded:
        return tuple((place, 2 * ranks - 1 - place) for place in range(ranks))
    return tuple(tuple(range(place, count * ranks, ranks)) for place in range(ranks))


def check_counts(name: str, stages: int, ranks: int, micro_batches: int) -> None:
    """Refuses a number of micro-batches that a schedule cannot order."""
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
            f"pp_style={name!r} over {ranks} ranks cannot order {micro_batches} micro-batches: "
            f"take {fits} or {fits + ranks}"
        )


def fits(name: str, stages: int, ranks: int, micro_batches: int) -> bool:
    """Whether a schedule can order so many micro-batches."""
    try:
        check_counts(name, stages, ranks, micro_batches)
    except GulliverError:
        return False
    return True


def make_schedule(
    name: str, runners: Sequence[Any], micro_batches: int, loss: Callable[[Any, Tensor], Tensor]
) -> Any:
    """Makes torch's schedule over the stages of this rank."""
    style = style_of(name, None if STYLES[name].fixed else len(runners))
    made = getattr(schedules, style.schedule)
    single = issubclass(made, schedules.PipelineScheduleSingle)
    stages = runners[0] if single else list(runners)
    return made(stages, n_microbatches=micro_batches, loss_fn=loss, scale_grads=False)
