"""The base class of sharded modules."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn

from gulliver.comm import ALONE, RankGroup


class OnLine(nn.Module):
    """A module that holds one rank's shard of a layer."""

    def __init__(self, rank_group: RankGroup = ALONE) -> None:
        super().__init__()
        # Rank group that the layer is sharded over.
        self.rank_group = rank_group

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A process group cannot be copied: a copy of the module shares it.
        memo[id(self.rank_group)] = self.rank_group
        memo[id(self)] = copied = type(self).__new__(type(self))
        vars(copied).update(deepcopy(vars(self), memo))
        return copied
