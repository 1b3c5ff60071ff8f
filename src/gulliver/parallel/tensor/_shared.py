"""The sequence that the blocks of a stack share, sharded over the tensor ranks.

Between blocks each rank has a piece of the hidden states along dim 1, so that norms, dropout and
residuals are neither computed nor kept on every rank; inside, columns gather the sequence and rows
reduce-scatter it (Korthikanti et al., 2022, arXiv 2205.05198).

A piece does not show the length of the whole, as pieces are uneven, so the first block notes it
(`SharedSequence.lengths`) for as long as a block runs. Where a block is computed again for its
gradient by a checkpoint inside of it, nothing was noted, and the ranks ask each other.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gulliver.comm import RankGroup
from gulliver.errors import GulliverError
from gulliver.layout import deal
from gulliver.parallel.tensor._entry import SequenceCut
from gulliver.parallel.tensor._pieces import gather_sizes

UNCUT: tuple[int, ...] = ()
"""Lengths of a pass whose sequence is not cut: it has fewer tokens than there are ranks."""


class SharedSequence:
    """The sharding of the sequence that the blocks of a stack are in."""

    def __init__(self, rank_group: RankGroup, ring: bool) -> None:
        self.rank_group, self.ring = rank_group, ring
        # Length of each rank's piece while a block runs; None where it is not known.
        self.lengths: tuple[int, ...] | None = None
        # Number of running modules that entered their input.
        self.inside = 0
        self._rows: tuple[int, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedSequence:
        # A process group cannot be copied; nothing lasts here from call to call.
        return memo.setdefault(id(self), SharedSequence(self.rank_group, self.ring))

    def deal(self, length: int, training: bool) -> tuple[int, ...]:
        """Returns the lengths of the pieces of a sequence; `UNCUT` for one that is too short."""
        if length >= self.rank_group.size:
            return deal(length, self.rank_group.size)
        if training:
            size = self.rank_group.size
            raise GulliverError(
                f"a sequence of {length} tokens cannot be cut over {size} tensor ranks: "
                f"train on at least {size} tokens, or without sequence_parallelism_mode"
            )
        return UNCUT

    def ask(self, piece: Tensor) -> tuple[int, ...]:
        """Returns the lengths of all ranks' pieces; one small all-gather."""
        return gather_sizes(piece.shape[1], self.rank_group, piece.device)

    def cut_of(self, piece: Tensor) -> SequenceCut | None:
        """Returns the sharding of a tensor of which this rank has a piece."""
        lengths = self.lengths
        if lengths == UNCUT:
            return None
        dim = 1 if piece.dim() > 2 else 0
        own = piece.shape[dim]
        if lengths is None:
            lengths = gather_sizes(own, self.rank_group, piece.device)
        elif dim == 0:
            # Rows of a batch: tokens stand in another order than elsewhere, until they are cut.
            lengths = tuple(n * (own // lengths[self.rank_group.rank]) for n in lengths)
        self._rows = lengths
        return SequenceCut(dim, lengths, self.ring)

    def cut_for(self, whole: Tensor) -> SequenceCut | None:
        """Returns the sharding that a whole tensor is to get."""
        if self.lengths == UNCUT:
            return None
        if whole.dim() > 2:
            return SequenceCut(1, deal(whole.shape[1], self.rank_group.size), self.ring)
        assert sum(self._rows) == len(whole), "rows leave a block as they entered"
        return SequenceCut(0, self._rows, self.ring)
