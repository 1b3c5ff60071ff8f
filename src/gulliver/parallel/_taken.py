"""What the last steps of an optimizer took: seconds, and bytes that were sent."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

from gulliver.comm import sent_bytes

TIMED_STEPS = 64
COUNTED_STEPS = 3
"""First steps, in which bytes are counted."""


class StepsTaken:
    """Record of the last steps."""

    def __init__(self) -> None:
        self.steps = 0
        # Moments at which they ended.
        self.stepped_at: deque[float] = deque(maxlen=TIMED_STEPS)
        # Seconds of them between their call and their end.
        self.updated_in: deque[float] = deque(maxlen=TIMED_STEPS)
        # Bytes that this process had sent at these moments.
        self.sent_at: deque[int] = deque(maxlen=TIMED_STEPS)
        # Whether the step after each of them sends more than training needs.
        self.extra_after: deque[bool] = deque(maxlen=TIMED_STEPS)
        # Bytes of gradients when the first steps ended, at most.
        self.most_gradients = 0
        # Say whether the step that comes sends more than training needs: to tune chunks, or to
        # compare packed gradients.
        self.more: list[Callable[[], bool]] = []

    def note(self, begun: float, gradient_bytes: Callable[[], int]) -> None:
        """Takes a step that has just ended."""
        if len(self.stepped_at) < COUNTED_STEPS:
            # Only now are all of them where they were reduced to.
            self.most_gradients = max(self.most_gradients, gradient_bytes())
        self.steps += 1
        self.stepped_at.append(time.perf_counter())
        self.updated_in.append(self.stepped_at[-1] - begun)
        self.sent_at.append(sent_bytes())
        self.extra_after.append(any(more() for more in self.more))

    def sent(self) -> tuple[list[int], bool]:
        """Returns the bytes between steps, and whether they are those of training alone."""
        # Steps that sent more are left out, unless there are no others.
        every = [b - a for a, b in itertools.pairwise(self.sent_at)]
        plain = [sent for sent, more in zip(every, self.extra_after, strict=False) if not more]
        return plain or every, bool(plain)
