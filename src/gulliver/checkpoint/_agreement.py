"""One save: what a rank offers to the others before it, what they agree on, and how it went.

`decide` is the whole agreement; it depends on nothing but what all ranks have said.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from gulliver.checkpoint._copy_stream import CopyStream
from gulliver.checkpoint._liveness import LivenessLock
from gulliver.checkpoint._snapshot import Snapshot
from gulliver.errors import GulliverError
from gulliver.io import Engine

_log = logging.getLogger("gulliver")


@dataclass(frozen=True)
class Saved:
    """Report on a save that succeeded."""

    # Number of the step that was saved.
    step: int
    # Bytes that this rank wrote.
    nbytes: int
    # Seconds for which training was held up: in `save`, and until it could change the state.
    stall_s: float
    # Seconds from the beginning until the state could change again.
    copied_s: float
    # Seconds from the beginning until the step was complete.
    total_s: float


@dataclass
class Offer:
    """Message of a rank to the others before they save together."""

    skips: bool
    failure: Exception | None
    """Failure of the save before."""
    problem: Exception | None = None
    """Reason why this save cannot be begun."""
    digest: str = ""
    begun: bool = False

    def said(self) -> dict[str, Any]:
        """Returns the JSON values that the others get; exceptions as their text."""
        return {
            "skips": self.skips,
            "failure": None if self.failure is None else text_of(self.failure),
            "problem": None if self.problem is None else text_of(self.problem),
            "digest": self.digest,
            "mark": uuid.uuid4().hex,
        }


@dataclass
class Save:
    """A step on its way."""

    step: int
    mark: str
    """The same on all ranks, and on no other save."""
    begun: float
    snapshot: Snapshot | None = None
    engine: Engine | None = None
    is_ring: bool = False
    copy_stream: CopyStream | None = None
    skeletons: dict[str, Any] = field(default_factory=dict)
    problem: Exception | None = None
    alive: LivenessLock | None = None

    def told(self) -> Saved:
        """Returns the report, once the step is complete."""
        assert self.snapshot is not None
        return Saved(
            self.step,
            self.snapshot.nbytes,
            self.snapshot.stall_s,
            self.snapshot.copied_s or 0.0,
            time.perf_counter() - self.begun,
        )


def decide(step: int, offer: Offer, every: list[dict[str, Any]], raises: bool) -> str | None:
    """Decides what all ranks do; the same on each, as all have heard the same."""
    failures = [(rank, said["failure"]) for rank, said in enumerate(every) if said["failure"]]
    problems = [(rank, said["problem"]) for rank, said in enumerate(every) if said["problem"]]
    skips = any(said["skips"] for said in every)
    if not failures and not problems and not skips:
        if len({said["digest"] for said in every}) == 1:
            return every[0]["mark"]
        problems = [(0, "ranks save different states; mark what differs with PerRank")]
    if failures:
        # Told once; the next call saves again.
        raise offer.failure or GulliverError(f"rank {failures[0][0]} failed: {failures[0][1]}")
    if not problems:
        _log.warning("step %d is not saved: the step before is still being written", step)
        return None
    problem = offer.problem or GulliverError(
        f"step {step}: rank {problems[0][0]}: {problems[0][1]}"
    )
    if raises:
        raise problem
    _log.warning("step %d is not saved: %s; training goes on without it", step, problem)
    return None


def text_of(problem: Exception) -> str:
    return str(problem) or type(problem).__name__
