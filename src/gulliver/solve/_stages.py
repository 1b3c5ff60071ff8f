"""Stages of a chain on one device, and a schedule of their forwards and backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Stage:
    """A stage of a chain.

    Attributes:
        forward_s: seconds of its forward.
        backward_s: seconds of its backward.
        output: bytes of its output, and of the gradient of that.
        saved: bytes that its forward saves for its backward, input and output aside.
        forward_bytes: bytes that its forward needs besides, while it runs.
        backward_bytes: bytes that its backward needs besides, gradients of input and output aside.
        movable: bytes of `saved` that can be moved to a slower tier.
    """

    forward_s: float
    backward_s: float
    output: int
    saved: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    movable: int = 0


class Step(NamedTuple):
    """A step of a schedule.

    Attributes:
        kind: "check" runs a forward and keeps its input as a checkpoint; "forward" runs one and
            drops its input; "save" runs one and keeps what it saves; "offload" does and moves that
            away; "backward" runs a backward; "drop" frees a checkpoint, the stage's output.
        stage: number of the stage.
    """

    kind: str
    stage: int


@dataclass(frozen=True)
class Schedule:
    """What a chain does in a step.

    Attributes:
        steps: forwards and backwards in their order.
        seconds: seconds that they take.
        lower: seconds that no persistent schedule can be below; of a free one, none at all.
        peak: most bytes at once.
    """

    steps: tuple[Step, ...]
    seconds: float
    lower: float
    peak: int

    @property
    def exact(self) -> bool:
        """Whether no such schedule takes less."""
        return self.seconds <= self.lower * (1 + 1e-9)
