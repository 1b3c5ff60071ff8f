"""Simulates ranks that compute, start messages and wait for them, event by event.

`simulate` runs the programs of all ranks; `schedule_seconds` makes those of a pipeline schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
"""Kinds of work: forward, backward, and the two halves of a split backward."""
Work = tuple[str, int, int]  # kind, stage and micro-batch of an action


class Act(Enum):
    """Kind of an action."""

    COMPUTE = auto()
    START = auto()
    WAIT = auto()
    """Waits for the end of a message, and for `seconds` more."""
    MARK = auto()


class Action(NamedTuple):
    """An action of a rank, which takes seconds."""

    act: Act
    seconds: float = 0.0
    # Names the message among those of its axis.
    key: Hashable = None
    # Axis whose ranks take part in the message; they all start it.
    axis: str = ""
    # Whether the message waits for earlier ones that the rank has started on the same lane.
    lane: str | None = None


@dataclass
class RankProgram:
    """The actions of a rank, in order."""

    actions: Iterable[Action]
    # Identity and number of the ranks along each axis that this rank belongs to.
    groups: Mapping[str, tuple[Hashable, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Prediction:
    """Predicted time of a step on several ranks."""

    # Time until the last rank is done.
    seconds: float
    # Compute seconds of each rank.
    busy: tuple[float, ...]
    # Times at which the last rank reached each mark.
    marks: tuple[float, ...] = ()

    @property
    def bubble(self) -> float:
        """Fraction of the ranks' time spent waiting."""
        return 1 - sum(self.busy) / (self.seconds * len(self.busy))


# [Note: lanes] A rank sends the messages of a lane in the order in which it starts them. A message
# begins when it is the next one on the lanes of all its ranks, and occupies them until it ends. So
# the work is proportional to the number of actions: each message is looked at once when it becomes
# the next one of a rank, and each blocked rank when what it waits for has ended.
class _Simulation:
    def __init__(self, ranks: Sequence[RankProgram]) -> None:
        self.clocks, self.busy = [0.0] * len(ranks), [0.0] * len(ranks)
        self.marks: list[list[float]] = [[] for _ in ranks]
        self._groups = [rank.groups for rank in ranks]
        self._actions = [iter(rank.actions) for rank in ranks]
        self._ended: dict[Hashable, float] = {}
        self._blocked: dict[Hashable, list[tuple[int, float]]] = {}
        self._lanes: dict[tuple[int, str], deque[tuple[Hashable, float, Action]]] = {}
        self._free: dict[tuple[int, str], float] = {}
        self._joined: dict[Hashable, tuple[float, list[tuple[int, str]]]] = {}
        self._ready = deque(range(len(ranks)))

    def run(self) -> None:
        while self._ready:
            self._advance(self._ready.popleft())
        assert not self._blocked, "a rank waits for a message that is never sent"

    def _advance(self, rank: int) -> None:
        """Runs a rank until it waits for a message that has not ended."""
        groups = self._groups[rank]
        for action in self._actions[rank]:
            act, seconds, key, axis, lane = action
            if act is Act.COMPUTE:
                self.clocks[rank] += seconds
                self.busy[rank] += seconds
                continue
            if act is Act.MARK:
                self.marks[rank].append(self.clocks[rank])
                continue
            key = (axis, groups[axis][0], key) if axis else key
            if act is Act.WAIT:
                if key not in self._ended:
                    self._blocked.setdefault(key, []).append((rank, seconds))
                    return
                self.clocks[rank] = max(self.clocks[rank], self._ended[key] + seconds)
            elif lane is None:
                self._end(key, self.clocks[rank] + seconds)
            else:
                queue = self._lanes.setdefault((rank, lane), deque())
                queue.append((key, self.clocks[rank], action))
                if len(queue) == 1:
                    self._join((rank, lane))

    def _join(self, first: tuple[int, str]) -> None:
        """Starts a lane's next message if it is the next one on all of its ranks."""
        following = deque([first])
        while following:
            lane = following.popleft()
            if not self._lanes[lane]:
                continue
            key, started, action = self._lanes[lane][0]
            begin, lanes = self._joined.get(key, (0.0, []))
            begin = max(begin, started, self._free.get(lane, 0.0))
            lanes.append(lane)
            self._joined[key] = begin, lanes
            if len(lanes) < self._groups[lane[0]][action.axis][1]:
                continue
            del self._joined[key]
            end = begin + action.seconds
            for one in lanes:
                self._free[one] = end
                self._lanes[one].popleft()
            following.extend(lanes)
            self._end(key, end)

    def _end(self, key: Hashable, end: float) -> None:
        self._ended[key] = end
        for rank, more in self._blocked.pop(key, ()):
            self.clocks[rank] = max(self.clocks[rank], end + more)
            self._ready.append(rank)


def simulate(ranks: Sequence[RankProgram]) -> Prediction:
    found = _Simulation(ranks)
    found.run()
    marks = tuple(max(times) for times in zip(*found.marks, strict=True))
    return Prediction(max(found.clocks), tuple(found.busy), marks)


def schedule_seconds(
    orders: Sequence[Sequence[Work]],
    times: Mapping[str, Sequence[float]],
    rank_of: Mapping[int, int],
    link: float = 0.0,
) -> Prediction:
    """Simulates a pipeline schedule, whose messages take `link` seconds but occupy no rank."""
    return simulate([RankProgram(_scheduled(order, times, rank_of, link)) for order in orders])


def _scheduled(
    order: Sequence[Work],
    times: Mapping[str, Sequence[float]],
    rank_of: Mapping[int, int],
    link: float,
) -> Iterator[Action]:
    for work in order:
        for need in inputs_of(work, len(rank_of)):
            far = rank_of[need[1]] != rank_of[work[1]]
            yield Action(Act.WAIT, link if far else 0.0, need)
        yield Action(Act.COMPUTE, times[work[0]][work[1]])
        yield Action(Act.START, 0.0, output_of(work))


def output_of(work: Work) -> Work:
    """Returns what others wait for: a backward's input gradients are ready after its first half."""
    kind, stage, micro = work
    return (BACKWARD if kind == INPUTS else kind), stage, micro


def inputs_of(work: Work, stages: int) -> list[Work]:
    """Outputs that an action needs.

    A forward needs the forward of the previous stage. A backward (or its half for the inputs) needs
    its own forward and the next stage's backward. The half for the weights needs the other half.
    """
    kind, stage, micro = work
    if kind == FORWARD:
        return [(FORWARD, stage - 1, micro)] if stage else []
    if kind == WEIGHTS:
        return [(BACKWARD, stage, micro)]
    later = [(BACKWARD, stage + 1, micro)] if stage < stages - 1 else []
    return [(FORWARD, stage, micro), *later]
