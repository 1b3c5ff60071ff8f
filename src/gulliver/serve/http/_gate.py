"""`Gate`: how many answers a server has taken on, and how many more it takes."""

from __future__ import annotations

import time

from gulliver.serve.http._errors import ApiError, overloaded

LONGEST_S = 60.0
"""Most seconds that a client is asked to wait."""
WEIGHT = 0.1
"""Weight of the newest in the mean time between answers."""


class Gate:
    """Counts answers from their request to their end, and bytes of bodies while they are held."""

    def __init__(self, most: int, body_bytes: int) -> None:
        self.most, self._body_bytes = most, body_bytes
        self.inside = self.bodies = 0
        self.draining = False
        self._left: float | None = None
        self._between = 1.0

    def check(self) -> None:
        """Refuses new work while the server drains."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after=5)

    def enter(self, answers: int) -> None:
        """Admits answers."""
        self.check()
        over = self.inside + answers - self.most
        if over > 0:
            raise overloaded(
                f"{self.inside} answers run and wait, of at most {self.most}: ask again later",
                min(over * self._between, LONGEST_S),
            )
        self.inside += answers

    def leave(self, answers: int) -> None:
        """Counts answers out; refused clients wait for a multiple of the mean time between them."""
        self.inside -= answers
        now = time.monotonic()
        if self._left is not None:
            each = (now - self._left) / answers
            self._between += WEIGHT * (each - self._between)
        self._left = now

    def hold(self, count: int) -> None:
        """Counts bytes of a body."""
        if self.bodies + count > self._body_bytes:
            raise overloaded("the bodies of requests take too much memory: ask again later", 1)
        self.bodies += count

    def release(self, count: int) -> None:
        """Releases bytes of a body."""
        self.bodies -= count
