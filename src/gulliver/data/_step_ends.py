"""What a step takes besides its micro-batches: messages of ZeRO at both of its ends.

Parameters that the last step has changed are on their way when the next one begins, and gradients
leave with the last backward. Both hide behind what a rank computes alone. Groups of several ranks
have messages of their own, for which the links are then busy. So a step of both kinds runs best
with single ranks first and last and the wide groups between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from gulliver.data._steps import RankGroup
from gulliver.errors import GulliverError
from gulliver.solve import BalancedStep


@dataclass(frozen=True)
class StepEnds:
    """Measured seconds at the ends of a step, in addition to those of its micro-batches.

    Attributes:
        first_alone: seconds by which the first micro-batch is longer, where every group of the
            step's first phase has one rank.
        first_shared: the same where some group has several.
        last_alone: seconds from the end of the last micro-batch until the optimizer has stepped,
            where every group of the last phase has one rank.
        last_shared: the same where some group has several.
    """

    first_alone: float = 0.0
    first_shared: float = 0.0
    last_alone: float = 0.0
    last_shared: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= seconds < float("inf") for seconds in astuple(self)):
            raise GulliverError(f"{self}: seconds at the ends of a step cannot be below 0")

    def first(self, groups: Sequence[RankGroup]) -> float:
        """Seconds at the beginning, by the groups of the first phase."""
        return self.first_shared if _shared(groups) else self.first_alone

    def last(self, groups: Sequence[RankGroup]) -> float:
        """Seconds at the end, by the groups of the last phase."""
        return self.last_shared if _shared(groups) else self.last_alone

    def around(self, parts: Sequence[BalancedStep]) -> float:
        """Seconds at both ends, by the parts of a step in their order."""
        first, last = (any(work.degree > 1 for work in parts[n].groups) for n in (0, -1))
        begin = self.first_shared if first else self.first_alone
        return begin + (self.last_shared if last else self.last_alone)


def _shared(groups: Sequence[RankGroup]) -> bool:
    return any(group.degree > 1 and group.micro_batches for group in groups)
