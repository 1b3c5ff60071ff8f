"""Attention masks as rules on positions instead of dense tensors, so that any layout is exact.

    Mask(causal=True, window=(1023, None))       # the last 1024 tokens
    Mask.packed(cu_seqlens, causal=True)         # packed documents
    Mask(key_lengths=lengths)                    # padding at the end of the keys

A pair is visible if all conditions allow it. A query without visible keys outputs zeros and has
zero gradients.

`Mask` describes conditions on positions in the full sequence. `Rules` is a mask prepared for one
call: `classify` returns whether all, some or none of the pairs in a block are visible, without
checking every pair; `dense` checks every pair.

A dense mask would be quadratic in the length, and a rank whose tokens are not consecutive (see
`layout.py`) could not use a kernel's own causal mask, which uses local indices.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Literal, Self

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.layout.even import Interval

FAR = 1 << 60
"""A distance beyond any sequence's length."""


class Verdict(enum.Enum):
    """Whether all, some or none of a block's query-key pairs are visible."""

    NOTHING = 0
    SOMETHING = 1
    ALL = 2


@dataclass(frozen=True, eq=False)
class Mask:
    """A rule for which keys each query sees.

    All ranks of a sequence pass the same mask. Its tensors are read on the CPU; CPU tensors avoid a
    synchronization.

    Attributes:
        causal: hide keys after the query.
        window: maximum distance of visible keys before and after the query; None for no limit. The
            last w tokens: ``causal=True, window=(w - 1, None)``.
        documents: document id of each token, ``[length]`` or ``[batch, length]``; queries see only
            keys of their own document. Tokens with a negative id are masked, as queries and as
            keys.
        key_documents: document ids of the keys, for cross-attention; None for `documents`.
        key_lengths: number of keys of each batch row without padding, ``[batch]``.
        query_lengths: number of queries of each row without padding, ``[batch]``; padding outputs
            zeros.
        keys: whether a key is visible, ``[batch, key length]`` bool, for padding anywhere.
        offset: distance between a query's index and its position among the keys, for `causal` and
            `window`: query i is at position i + offset.
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    documents: Tensor | None = None
    key_documents: Tensor | None = None
    key_lengths: Tensor | None = None
    query_lengths: Tensor | None = None
    keys: Tensor | None = None
    offset: int = 0

    @classmethod
    def packed(
        cls,
        cu_seqlens: Tensor,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
    ) -> Self:
        """Creates the mask of consecutive documents.

        Args:
            cu_seqlens: start of each document, and the end of the last, ``[documents + 1]``: 0, 3,
                7.
            causal: hide keys after the query.
            window: maximum distances of visible keys, as in `Mask`.

        Raises:
            GulliverError: `cu_seqlens` does not begin with 0, or decreases.
        """
        ends = cu_seqlens.detach().cpu().long()
        counts = ends.diff()
        if ends.dim() != 1 or len(ends) < 2 or int(ends[0]) != 0 or int(counts.min()) < 0:
            raise GulliverError("cu_seqlens must begin with 0 and never decrease, as in [0, 3, 7]")
        ids = torch.repeat_interleave(torch.arange(len(counts)), counts)
        return cls(causal=causal, window=window, documents=ids)

    def rules(self, batch: int, length: int, key_length: int) -> Rules:
        """Prepares the mask for tensors of one shape.

        Args:
            batch: rows of the batch.
            length: queries of the full sequence.
            key_length: keys of the full sequence.

        Raises:
            GulliverError: a tensor of the mask has the wrong shape.
        """
        before, after = self._band()
        key_documents = self.documents if self.key_documents is None else self.key_documents
        if (self.documents is None) != (key_documents is None):
            raise GulliverError("key_documents needs documents")
        parts = [_lengths("key_lengths", self.key_lengths, batch, key_length)]
        if self.keys is not None:
            parts.append(_rows("keys", self.keys, batch, key_length).bool())
        return Rules(
            before,
            after,
            self.offset,
            _rows("documents", self.documents, batch, length),
            _rows("key_documents", key_documents, batch, key_length),
            _lengths("query_lengths", self.query_lengths, batch, length),
            _both(*parts),
        )

    def digest(self) -> int:
        """Returns a checksum of the mask, to compare it between ranks."""
        total = 0
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                value = (tuple(value.shape), value.detach().cpu().long().numpy().tobytes())
            total = zlib.crc32(repr((item.name, value)).encode(), total)
        return total

    def _band(self) -> tuple[int, int]:
        before, after = self.window if self.window is not None else (None, None)
        for size in (before, after):
            if size is not None and size < 0:
                raise GulliverError(
                    f"window {self.window} must not be negative; (0, 0) lets each position "
                    "attend only to itself"
                )
        reach = FAR if after is None else after
        return FAR if before is None else before, 0 if self.causal else reach


@dataclass(frozen=True)
class Rules:
    """A mask prepared for one call; fields that are None allow all pairs."""

    before: int = FAR  # Number of keys that a query sees before its position
    after: int = FAR  # Number of keys that a query sees after its position; 0 is causal
    offset: int = 0  # Distance between a query's index and its position among the keys
    documents: Tensor | None = None  # Document ids of the queries, ``[rows, length]``
    key_documents: Tensor | None = None  # Document ids of the keys, ``[rows, key length]``
    queries: Tensor | None = None  # Queries with visible keys, ``[rows, length]`` bool
    keys: Tensor | None = None  # Keys that may be visible, ``[rows, key length]`` bool
    _spans: dict[tuple[int, Interval], tuple[int, int]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def classify(self, queries: Interval, keys: Interval) -> Verdict:
        """Classifies a block; inexact: may return `SOMETHING` instead of `ALL` or `NOTHING`."""
        # An inexact answer costs a dense mask for a tile, but is never wrong.
        verdicts = {self.judge_band(queries, keys), self.judge_contents(queries, keys)}
        for verdict in (Verdict.NOTHING, Verdict.SOMETHING):
            if verdict in verdicts:
                return verdict
        return Verdict.ALL

    def judge_band(self, queries: Interval, keys: Interval) -> Verdict:
        """Classifies a block of the attention mask by relative position; exact."""
        least = keys[0] - (queries[1] - 1 + self.offset)
        most = keys[1] - 1 - (queries[0] + self.offset)
        if most < -self.before or least > self.after:
            return Verdict.NOTHING
        return Verdict.ALL if least >= -self.before and most <= self.after else Verdict.SOMETHING

    def judge_contents(self, queries: Interval, keys: Interval) -> Verdict:
        """Classifies a block of the attention mask by documents and padding; may be inexact."""
        found = [self._kept(0, self.queries, queries), self._kept(1, self.keys, keys)]
        if self.documents is not None and self.key_documents is not None:
            low, high = self._span(2, self.documents, queries)
            key_low, key_high = self._span(3, self.key_documents, keys)
            if high < key_low or key_high < low or high < 0 or key_high < 0:
                return Verdict.NOTHING
            alike = low == high == key_low == key_high
            found.append(Verdict.ALL if alike else Verdict.SOMETHING)
        if Verdict.NOTHING in found:
            return Verdict.NOTHING
        return Verdict.SOMETHING if Verdict.SOMETHING in found else Verdict.ALL

    def is_causal(self) -> bool:
        return self.after == 0 and self.before >= FAR

    def dense(self, q: Tensor, k: Tensor) -> Tensor:
        """Returns the visibility of each query-key pair, ``[rows, queries, keys]`` bool."""
        distance = k - (q.unsqueeze(1) + self.offset)
        allowed = ((distance >= -self.before) & (distance <= self.after)).unsqueeze(0)
        if self.documents is not None and self.key_documents is not None:
            of_q = self.documents[:, q].unsqueeze(2)
            allowed = allowed & (of_q == self.key_documents[:, k].unsqueeze(1)) & (of_q >= 0)
        if self.queries is not None:
            allowed = allowed & self.queries[:, q].unsqueeze(2)
        if self.keys is not None:
            allowed = allowed & self.keys[:, k].unsqueeze(1)
        return allowed

    def _kept(self, which: int, kept: Tensor | None, interval: Interval) -> Verdict:
        if kept is None:
            return Verdict.ALL
        low, high = self._span(which, kept, interval)
        return Verdict.NOTHING if not high else Verdict.ALL if low else Verdict.SOMETHING

    def _span(self, which: int, values: Tensor, interval: Interval) -> tuple[int, int]:
        key = (which, interval)
        if key not in self._spans:
            part = values[:, interval[0] : interval[1]]
            self._spans[key] = (int(part.min()), int(part.max()))
        return self._spans[key]


def _rows(name: str, values: Tensor | None, batch: int, length: int) -> Tensor:
    if values is None:
        return None  # pyright: ignore[reportReturnType]
    rows = values.detach().cpu()
    rows = rows.unsqueeze(0) if rows.dim() == 1 else rows
    if rows.dim() != 2 or rows.shape[1] != length or rows.shape[0] not in (1, batch):
        raise GulliverError(
            f"{name} has shape {tuple(values.shape)}, but must cover the full sequence: "
            f"[{length}] or [{batch}, {length}]"
        )
    return rows


def _lengths(name: str, lengths: Tensor | None, batch: int, length: int) -> Tensor | None:
    if lengths is None:
        return None
    found = torch.as_tensor(lengths).detach().cpu().long()
    if found.shape != (batch,) or int(found.min()) < 0 or int(found.max()) > length:
        raise GulliverError(f"{name} must be {batch} numbers from 0 to {length}: one for each row")
    return torch.arange(length) < found.unsqueeze(1)


def _both(first: Tensor | None, second: Tensor | None = None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


# Splits the block of one rank's queries and another's keys into tiles for kernels.
#
# Tiles without visible pairs are skipped, fully visible ones use the kernel without a mask, and
# those on the diagonal of a causal mask use the causal one. Others are halved until they are small,
# so a dense mask is never larger than a leaf.


Kind = Literal["plain", "causal", "masked"]
LEAF = 512
"""Maximum number of queries and of keys in a block with a dense mask."""


# [Note: tiles, not masks] A single call with a dense mask would also compute masked pairs, which
# are half of a causal mask, and the fastest CUDA kernels do not support dense masks. A rank's
# tokens are a few runs of consecutive positions, so most of a block can be classified by its
# corners.
@dataclass(frozen=True)
class Tile:
    """A block of the attention mask: local queries and keys with consecutive positions."""

    q: Interval
    k: Interval
    q_at: int
    k_at: int
    # Kind of mask: all pairs visible (plain), causal on a square including the diagonal (causal),
    # or a dense mask (masked).
    kind: Kind

    def allowed(self, rules: Rules) -> Tensor:
        return rules.dense(
            torch.arange(self.q_at, self.q_at + self.q[1] - self.q[0]),
            torch.arange(self.k_at, self.k_at + self.k[1] - self.k[0]),
        )


def tiles(
    q_held: tuple[Interval, ...],
    k_held: tuple[Interval, ...],
    rules: Rules,
    rows: Interval | None = None,
    leaf: int | None = None,
) -> tuple[Tile, ...]:
    leaf = LEAF if leaf is None else leaf
    found = [
        tile
        for q in _pieces(q_held, rows)
        for k in _pieces(k_held)
        for tile in _cut(Tile(q[0], k[0], q[1], k[1], "masked"), rules, leaf)
    ]
    return tuple(_merged(found))


def _pieces(
    held: tuple[Interval, ...], rows: Interval | None = None
) -> Iterator[tuple[Interval, int]]:
    at = 0
    for start, stop in held:
        end = at + stop - start
        first, last = (at, end) if rows is None else (max(at, rows[0]), min(end, rows[1]))
        if first < last:
            yield (first, last), start + first - at
        at = end


def _cut(tile: Tile, rules: Rules, leaf: int) -> Iterator[Tile]:
    queries, keys = _positions(tile)
    verdict = rules.classify(queries, keys)
    if verdict is Verdict.NOTHING:
        return
    if verdict is Verdict.ALL:
        yield replace(tile, kind="plain")
        return
    if rules.is_causal() and rules.judge_contents(queries, keys) is Verdict.ALL:
        yield from _cut_causal(tile, rules, leaf)
        return
    q, k = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
    if q <= leaf and k <= leaf:
        # All or none of its pairs may be visible; the dense mask, which is built when used, shows
        # it.
        yield tile
        return
    halves = _at_row(tile, q // 2) if q >= k else _at_column(tile, k // 2)
    for half in halves:
        yield from _cut(half, rules, leaf)


def _cut_causal(tile: Tile, rules: Rules, leaf: int) -> Iterator[Tile]:
    """Splits a block on the diagonal into the square around the diagonal and the rest."""
    q, k = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
    # Number of keys before the first query's position; if negative, of queries before the first
    # key's.
    ahead = tile.q_at + rules.offset - tile.k_at
    if ahead == 0 and q == k:
        yield replace(tile, kind="causal")
        return
    if ahead > 0:
        parts = _at_column(tile, ahead)
    elif ahead < 0:
        parts = _at_row(tile, -ahead)
    else:
        parts = _at_row(tile, k) if q > k else _at_column(tile, q)
    for part in parts:
        yield from _cut(part, rules, leaf)


def _positions(tile: Tile) -> tuple[Interval, Interval]:
    q, k = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
    return (tile.q_at, tile.q_at + q), (tile.k_at, tile.k_at + k)


def _at_row(tile: Tile, row: int) -> tuple[Tile, Tile]:
    cut = tile.q[0] + row
    return replace(tile, q=(tile.q[0], cut)), replace(
        tile, q=(cut, tile.q[1]), q_at=tile.q_at + row
    )


def _at_column(tile: Tile, column: int) -> tuple[Tile, Tile]:
    cut = tile.k[0] + column
    return replace(tile, k=(tile.k[0], cut)), replace(
        tile, k=(cut, tile.k[1]), k_at=tile.k_at + column
    )


def _merged(found: list[Tile]) -> list[Tile]:
    """Joins fully visible blocks that are adjacent locally, to reduce kernel calls."""
    # Their positions need not be consecutive, because kernels without a mask do not use them.
    rest = [tile for tile in found if tile.kind != "plain"]
    plain = sorted((t for t in found if t.kind == "plain"), key=lambda t: (t.q, t.k))
    wide = [t for _, same in groupby(plain, key=lambda t: t.q) for t in _joined(list(same), "k")]
    wide.sort(key=lambda t: (t.k, t.q))
    tall = [t for _, same in groupby(wide, key=lambda t: t.k) for t in _joined(list(same), "q")]
    return sorted(tall + rest, key=lambda t: (t.q, t.k))


def _joined(row: list[Tile], side: Literal["q", "k"]) -> list[Tile]:
    joined = row[:1]
    for tile in row[1:]:
        last, this = getattr(joined[-1], side), getattr(tile, side)
        if last[1] == this[0]:
            joined[-1] = replace(joined[-1], **{side: (last[0], this[1])})
        else:
            joined.append(tile)
    return joined
