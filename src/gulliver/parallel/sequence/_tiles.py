"""Cuts the rectangle of one rank's queries and another's keys into tiles for kernels.

Where nothing is allowed nothing is called; where everything is, the kernel without a mask; on the
diagonal of a causal mask the causal one. What is left is halved until it is small, so that the
dense mask is never larger than a leaf.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from gulliver.layout import Interval
from gulliver.parallel.sequence._mask import Rules, Verdict

Kind = Literal["plain", "causal", "masked"]
LEAF = 512
"""Queries and keys of the largest rectangle with a dense mask."""


# [Note: tiles, not masks] One call with a dense mask would compute the pairs that are masked out as
# well, half of a causal mask's, and the fastest CUDA kernels take no dense mask. A rank's tokens
# are a few runs of consecutive positions, so that most of a rectangle can be judged by its corners.
@dataclass(frozen=True)
class Tile:
    """A rectangle of local tokens of consecutive positions."""

    q: Interval
    k: Interval
    q_at: int
    k_at: int
    # Kind of mask: everything allowed (plain); causal and square, its diagonal allowed; or by the
    # dense mask (masked).
    kind: Kind

    def allowed(self, rules: Rules) -> Tensor:
        """Returns the dense mask, ``[rows, queries, keys]`` bool."""
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
    """Returns the tiles that are to be computed between two ranks' tokens."""
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
    """Yields runs of consecutive positions: local tokens, and the first one's position."""
    at = 0
    for start, stop in held:
        end = at + stop - start
        first, last = (at, end) if rows is None else (max(at, rows[0]), min(end, rows[1]))
        if first < last:
            yield (first, last), start + first - at
        at = end


def _cut(tile: Tile, rules: Rules, leaf: int) -> Iterator[Tile]:
    queries, keys = _positions(tile)
    verdict = rules.judge(queries, keys)
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
        # Perhaps all or nothing of it is allowed: the dense mask, built when it is used, will tell.
        yield tile
        return
    halves = _at_row(tile, q // 2) if q >= k else _at_column(tile, k // 2)
    for half in halves:
        yield from _cut(half, rules, leaf)


def _cut_causal(tile: Tile, rules: Rules, leaf: int) -> Iterator[Tile]:
    """Cuts a rectangle that the diagonal crosses into the square on it and what lies around."""
    q, k = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
    # Keys before the first query's position; where negative, queries before the first key's.
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
    """Joins plain rectangles that lie side by side in local order, for fewer kernel calls."""
    # Their positions need not follow each other: without a mask no kernel asks for them.
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
