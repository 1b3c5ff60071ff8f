"""Predicts the time of pipeline schedules and of a ZeRO step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Simulates pipeline schedules: the time of a step, and the bubble.
#
# Each rank performs the next action of its order as soon as its inputs are available. A forward
# needs the forward of the previous stage. A backward (or its part for the inputs) needs its own
# forward and the backward of the next stage. The part for the weights needs the part for the
# inputs. Messages between ranks take `link` seconds and no rank's time.


FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
"""Kinds of work: forward, backward, and the two halves of a split backward."""
Work = tuple[str, int, int]  # kind, stage and micro-batch of an action


@dataclass(frozen=True)
class Prediction:
    """Predicted time of a pipelined step."""

    # Time until the last rank is done.
    seconds: float
    # Compute seconds of each rank.
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Fraction of the ranks' time spent waiting."""
        return 1 - sum(self.busy) / (self.seconds * len(self.busy))


def schedule_seconds(
    orders: Sequence[Sequence[Work]],
    times: Mapping[str, Sequence[float]],
    rank_of: Mapping[int, int],
    link: float = 0.0,
) -> Prediction:
    clocks, busy = [0.0] * len(orders), [0.0] * len(orders)
    done: dict[Work, float] = {}
    following = [0] * len(orders)
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while following[rank] < len(order):
                work = order[following[rank]]
                ready = _ready(work, done, rank_of, link)
                if ready is None:
                    break
                spent = times[work[0]][work[1]]
                clocks[rank] = done[work] = max(clocks[rank], ready) + spent
                busy[rank] += spent
                following[rank] += 1
                left -= 1
        assert left < before, "the schedule can be executed"
    return Prediction(max(clocks), tuple(busy))


def _ready(
    work: Work, done: Mapping[Work, float], rank_of: Mapping[int, int], link: float
) -> float | None:
    """Returns when the inputs of an action are available; None if not known yet."""
    kind, stage, micro = work
    needs: list[tuple[tuple[str, ...], int]] = []
    if kind == FORWARD and stage > 0:
        needs = [((FORWARD,), stage - 1)]
    elif kind in (BACKWARD, INPUTS):
        needs = [((FORWARD,), stage)]
        if stage < len(rank_of) - 1:
            needs.append(((BACKWARD, INPUTS), stage + 1))
    elif kind == WEIGHTS:
        needs = [((INPUTS,), stage)]
    latest = 0.0
    for kinds, other in needs:
        known = [done[k, other, micro] for k in kinds if (k, other, micro) in done]
        if not known:
            return None
        latest = max(latest, known[0] + (link if rank_of[other] != rank_of[stage] else 0.0))
    return latest
