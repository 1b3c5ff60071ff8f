"""Embeddings sharded by rows (vocabulary-parallel) or by columns."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.comm import ALONE, RankGroup
from gulliver.errors import GulliverError
from gulliver.layout import Interval, deal
from gulliver.parallel.tensor._base import OnLine
from gulliver.parallel.tensor._collectives import gather, reduce


class UnknownTokenError(GulliverError, IndexError):
    """Raised for a token id outside of the vocabulary."""


class _Embedding(OnLine):
    """A sharded embedding; the options that are refused stand at their defaults for adapters."""

    weight: nn.Parameter
    max_norm: None = None
    norm_type = 2.0
    scale_grad_by_freq = False
    sparse = False

    def __init__(self, weight: nn.Parameter, rank_group: RankGroup) -> None:
        super().__init__(rank_group)
        self.weight = weight

    @property
    def num_embeddings(self) -> int:
        """Number of rows on this rank."""
        return self.weight.shape[0]

    @property
    def embedding_dim(self) -> int:
        """Number of columns on this rank."""
        return self.weight.shape[1]


class VocabularyEmbedding(_Embedding):
    """An embedding of which this rank holds some rows; all ranks get whole vectors."""

    # Each id is in one rank's rows; the others contribute zeros to a sum, which is therefore exact.

    def __init__(
        self,
        weight: nn.Parameter,
        rank_group: RankGroup = ALONE,
        rows: Interval | None = None,
        total: int = 0,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__(weight, rank_group)
        self.rows = rows or (0, weight.shape[0])
        self.total, self.padding_idx = total or weight.shape[0], padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up the vectors of ids, ``[...]`` to ``[..., width]``."""
        (start, stop), padding = self.rows, self.padding_idx
        if padding is not None:
            padding = padding - start if start <= padding < stop else None
        here = (ids >= start) & (ids < stop)
        nowhere = (ids < 0) | (ids >= self.total)
        if ids.device.type == "cpu" and bool(nowhere.any()):
            raise UnknownTokenError(
                f"token {int(ids[nowhere][0])} is not in the vocabulary, which has {self.total} "
                f"(0 to {self.total - 1})"
            )
        # On a GPU a check would have to wait for it: an id that no rank has stays out of range, so
        # that the kernel's own assertion finds it.
        own = (ids - start).masked_fill(~here, 0).masked_fill(nowhere, self.total)
        vectors = F.embedding(own, self.weight, padding)
        return reduce(vectors.masked_fill(~here.unsqueeze(-1), 0), self.rank_group)


class ColumnEmbedding(_Embedding):
    """An embedding of which this rank holds some columns of every row."""

    def __init__(
        self,
        weight: nn.Parameter,
        rank_group: RankGroup = ALONE,
        columns: Interval | None = None,
        total: int = 0,
        padding_idx: int | None = None,
        gather_output: bool = False,
    ) -> None:
        super().__init__(weight, rank_group)
        self.columns = columns or (0, weight.shape[1])
        self.total, self.padding_idx = total or weight.shape[1], padding_idx
        self.gather_output = gather_output

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up the vectors of ids, ``[...]`` to ``[..., columns]``, gathered if so asked."""
        vectors = F.embedding(ids, self.weight, self.padding_idx)
        if not self.gather_output:
            return vectors
        lengths = deal(self.total, self.rank_group.size)
        return gather(vectors, vectors.dim() - 1, lengths, self.rank_group)
