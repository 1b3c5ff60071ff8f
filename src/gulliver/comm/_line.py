"""Ranks in a row, with the group that they alone belong to."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Line:
    """Ranks that follow each other, the last one followed by the first.

    Attributes:
        ranks: of the world.
        place: of this process among them.
        group: that they, and nobody else, belong to; None for a line of one.
    """

    ranks: tuple[int, ...] = (0,)
    place: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.ranks)


ALONE = Line()
"""Of one rank."""
