"""Counts clips that could not be read when their turn came, and says when they are too many.

All ranks count the clips of all ranks, so that they stop together. What it does not know: how a
clip is read, and what is saved before the run stops.
"""

from __future__ import annotations

from dataclasses import dataclass

from gulliver.comm import gather_objects

EMPTY_BATCHES = 10
"""Empty batches in a row, or those of a whole epoch if fewer, at which the data is gone."""
SHOWN = 20
"""Most names of skipped clips that are printed."""


@dataclass
class SkippedClips:
    """Counts read and skipped clips of the present epoch."""

    samples: int
    batches: int
    limit: float
    epoch: int = -1
    skipped: int = 0
    empty: int = 0
    """Batches in a row without a single clip."""

    def count(self, epoch: int, read: int, skipped: int) -> None:
        """Adds a batch: the clips of all ranks that could be read, and those that could not."""
        if epoch != self.epoch:
            self.epoch, self.skipped = epoch, 0
        self.skipped += skipped
        self.empty = 0 if read else self.empty + 1

    @property
    def problem(self) -> str | None:
        """Says why a run cannot go on; None where it can."""
        if self.skipped > self.limit * self.samples:
            return (
                f"{self.skipped} of the {self.samples} clips of epoch {self.epoch} could not be "
                f"read, where --data.unreadable-limit allows a share of {self.limit:g}"
            )
        if self.empty >= min(EMPTY_BATCHES, self.batches):
            return f"{self.empty} batches in a row had no clip that could be read"
        return None


def common_samples(place: tuple[int, int], kept: list[int]) -> list[int]:
    """Returns the samples that all ranks with one share of a batch could read; all ranks call it.

    Args:
        place: number of the share, and number of shares.
        kept: samples that this rank could read.
    """
    found = [theirs for other, theirs in gather_objects((place, kept)) if other == place]
    return sorted(set(kept).intersection(*found))


def listing(
    clips: set[tuple[str, str]], problem: str = "could not be read when their turn came"
) -> str:
    """Lists clips with their reasons, the first of them where they are many."""
    lines = [f"{len(clips)} clip{'s' * (len(clips) != 1)} {problem}:"]
    lines += [f"  {name}: {reason}" for name, reason in sorted(clips)[:SHOWN]]
    if len(clips) > SHOWN:
        lines.append(f"  and {len(clips) - SHOWN} more")
    return "\n".join(lines)
