"""One save: the status of each rank before it, what they agree on, and how it went.

`agree_on_save` is the whole agreement; it depends on nothing but the statuses of all ranks.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from gulliver.checkpoint._copy_stream import CopyStream
from gulliver.checkpoint._liveness import Heartbeat
from gulliver.checkpoint._snapshot import Snapshot
from gulliver.errors import GulliverError
from gulliver.io import Engine

log = logging.getLogger("gulliver")


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
class RankStatus:
    """Message of a rank to the others before they save together."""

    skips: bool
    failure: Exception | None
    """Failure of the save before."""
    problem: Exception | None = None
    """Reason why this save cannot be begun."""
    digest: str = ""
    begun: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON values that the others get; exceptions as their text."""
        return {
            "skips": self.skips,
            "failure": None if self.failure is None else text_of(self.failure),
            "problem": None if self.problem is None else text_of(self.problem),
            "digest": self.digest,
            "save_id": uuid.uuid4().hex,
        }


@dataclass
class Save:
    """A step that is being saved."""

    step: int
    save_id: str
    """The same on all ranks, and on no other save."""
    begun: float
    snapshot: Snapshot | None = None
    engine: Engine | None = None
    is_ring: bool = False
    copy_stream: CopyStream | None = None
    skeletons: dict[str, Any] = field(default_factory=dict)
    problem: Exception | None = None
    heartbeat: Heartbeat | None = None

    def report(self) -> Saved:
        """Returns the report, once the step is complete."""
        assert self.snapshot is not None
        return Saved(
            self.step,
            self.snapshot.nbytes,
            self.snapshot.stall_s,
            self.snapshot.copied_s or 0.0,
            time.perf_counter() - self.begun,
        )


def agree_on_save(
    step: int, own: RankStatus, every: list[dict[str, Any]], raises: bool
) -> str | None:
    """Returns the id of the save, or None where it is left out; the same on every rank."""
    failures = [(rank, status["failure"]) for rank, status in enumerate(every) if status["failure"]]
    problems = [(rank, status["problem"]) for rank, status in enumerate(every) if status["problem"]]
    skips = any(status["skips"] for status in every)
    if not failures and not problems and not skips:
        if len({status["digest"] for status in every}) == 1:
            return every[0]["save_id"]
        problems = [(0, "ranks save different states; mark what differs with PerRank")]
    if failures:
        # Raised once; the next call saves again.
        raise own.failure or GulliverError(f"rank {failures[0][0]} failed: {failures[0][1]}")
    if not problems:
        log.warning("step %d is not saved: the step before is still being written", step)
        return None
    problem = own.problem or GulliverError(f"step {step}: rank {problems[0][0]}: {problems[0][1]}")
    if raises:
        raise problem
    log.warning("step %d is not saved: %s; training goes on without it", step, problem)
    return None


def text_of(problem: Exception) -> str:
    return str(problem) or type(problem).__name__
