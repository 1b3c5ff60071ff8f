"""Finds duplicate clips by perceptual hash, and verifies them by pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gulliver.errors import GulliverError
from gulliver.video.preparation.packets import MOMENTS, averaged, take_samples
from gulliver.video.preparation.scoring import BITS, find_scorers, hash_bits, score_file
from gulliver.video.preparation.table import Table, check_other, write_broken, write_list
from gulliver.video.preparation.work import fill_columns, work_on

FEW_BITS = 0.25
"""Maximum fraction of differing hash bits; unrelated pictures differ in half of the bits."""
ALIKE = 0.95
"""Minimum correlation of duplicates over all moments."""
WORST = 0.8
"""Minimum correlation of duplicates at the least similar moment."""
THUMB = 32
"""Side length of compared pictures."""
TILE = 4096
"""Tile size, in clips, of the pairwise comparison of hashes."""


# [Note: two stages] Perceptual hashes of eight moments are compared for all pairs of clips, as
# products of +1/-1 matrices: `512 - 2 x (bits that differ)`. This leaves few candidates, some of
# them wrong: clips of one scene, or blank ones. Their pictures are compared, reduced to 32 x 32 and
# normalized for brightness and contrast, which may differ between duplicates: the correlation over
# all moments, and at the worst moment, decides. Duplicates of duplicates form one group, of which
# the best stays: most pixels, then most frames, then most bytes, then the first.
@dataclass(frozen=True)
class Pair:
    """Two duplicates: the one to keep and the one to remove."""

    # `bits` of the 512 hash bits differ; `correlation` is that of their pictures.

    kept: str
    dropped: str
    bits: int
    correlation: float


@dataclass(frozen=True)
class Deduplicated:
    """A table without duplicates."""

    # The table, including unreadable clips.
    table: Table
    # Each removed duplicate, with the clip that stays.
    pairs: list[Pair]
    listed: Path
    # Name and reason of each unreadable clip.
    broken: list[tuple[str, str]]


def deduplicate(table: Table, out: Path, alike: float = ALIKE, workers: int = 0) -> Deduplicated:
    """Writes a table without duplicate clips, and a list of the pairs."""
    out = Path(out)
    check_other(out, table.path)
    hashes = _known_hashes(table)
    unknown, columns = [row for row, known in enumerate(hashes) if not known], {"phash": hashes}
    work = partial(score_file, scorers=find_scorers(("phash",)))
    with fill_columns(table, unknown, work, out, "hash", columns, workers=workers) as broken:
        kept, pairs = _without_copies(table.with_columns(columns), out, alike, workers)
        listed = _write_pairs(out, pairs)
        write_broken(out, "dedup", broken)
    return Deduplicated(kept, pairs, listed, broken)


def _known_hashes(table: Table) -> list[str | None]:
    if "phash" not in table.names:
        return [None] * len(table)
    column = table.column("phash")
    if not all(value is None or _is_hash(value) for value in column):
        raise GulliverError(
            f"column phash of {table.path.name} does not hold hashes of {MOMENTS} moments; "
            "compute it again (gulliver data score --scorers phash --again)"
        )
    return column


def _is_hash(value: Any) -> bool:
    length = MOMENTS * BITS * BITS // 4
    return isinstance(value, str) and len(value) == length and not value.strip("0123456789abcdef")


def _without_copies(
    table: Table, out: Path, alike: float, workers: int
) -> tuple[Table, list[Pair]]:
    names, clips, column = table.column("path"), table.clips(), table.column("phash")
    rows = [row for row, value in enumerate(column) if value]
    bits = dict(zip(rows, hash_bits([column[row] for row in rows]), strict=True))
    near = [(rows[one], rows[other]) for one, other in near_pairs(np.array([*bits.values()]))]
    seen = sorted({row for pair in near for row in pair})
    with work_on(
        [clips[row] for row in seen], _thumbs, out, "dedup", "", workers, None, True
    ) as outcomes:
        thumbs = {
            row: _unpacked(outcome.values["thumbs"])
            for row, outcome in zip(seen, outcomes, strict=True)
            if outcome.problem is None
        }
        there = [pair for pair in near if thumbs.keys() >= set(pair)]
        copies = [(a, b) for a, b in there if correlation(thumbs[a], thumbs[b]) >= alike]
        best = _best_of_groups(table, copies)
        pairs = [
            Pair(
                names[better],
                names[row],
                int((bits[row] != bits[better]).sum()),
                correlation(thumbs[row], thumbs[better]),
            )
            for row, better in sorted(best.items())
            if row != better
        ]
        stays = [best.get(row, row) == row for row in range(len(table))]
        return table.rows(stays).write(out), pairs


def near_pairs(bits: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields pairs of hashes, bool [clips, bits], that differ in few bits."""
    if not len(bits):
        return
    signs = np.where(bits, 1, -1).astype(np.float32)
    length = signs.shape[1]
    least = length - 2 * FEW_BITS * length
    for top in range(0, len(signs), TILE):
        for left in range(top, len(signs), TILE):
            product = signs[top : top + TILE] @ signs[left : left + TILE].T
            for one, other in np.argwhere(product >= least).tolist():
                if top + one < left + other:
                    yield top + one, left + other


def _thumbs(path: Path) -> dict[str, Any]:
    samples = take_samples(path, side=4 * THUMB)
    small = averaged(samples.pictures.transpose(0, 3, 1, 2), THUMB)
    return {"thumbs": small.round().astype(np.uint8).tobytes().hex()}


def _unpacked(thumbs: str) -> np.ndarray:
    pictures = np.frombuffer(bytes.fromhex(thumbs), np.uint8)
    return pictures.reshape(MOMENTS, -1).astype(np.float32)


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Correlates two clips' pictures [N, pixels] over all moments; 0 if a moment differs.

    A blank clip matches other blank clips of the same color.
    """
    spread = min(one.std(), other.std())
    if spread < 2:
        return float(np.abs(one - other).max() < 8 and max(one.std(), other.std()) < 4)
    worst = min(_correlation(a, b) for a, b in zip(one, other, strict=True))
    return _correlation(one, other) if worst >= WORST else 0.0


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    one, other = one - one.mean(), other - other.mean()
    size = float(np.linalg.norm(one) * np.linalg.norm(other))
    # Two blank pictures match.
    return float((one * other).sum() / size) if size > one.size else 1.0


def _best_of_groups(table: Table, pairs: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Maps each row with a duplicate to the best row of its group."""
    group: dict[int, int] = {}

    def root(row: int) -> int:
        while group.setdefault(row, row) != row:
            group[row] = row = group[group[row]]
        return row

    for one, other in pairs:
        group[root(one)] = root(other)
    members: dict[int, list[int]] = {}
    for row in sorted(group):
        members.setdefault(root(row), []).append(row)
    worth = _worth(table)
    return {
        row: max(rows, key=lambda one: (*worth[one], -one))
        for rows in members.values()
        for row in rows
    }


def _worth(table: Table) -> list[tuple[float, ...]]:
    sizes = [
        table.column(name) if name in table.names else [0] * len(table)
        for name in ("height", "width", "num_frames")
    ]
    return [
        ((h or 0) * (w or 0), n or 0, path.stat().st_size if path.is_file() else 0)
        for h, w, n, (_, path) in zip(*sizes, table.clips(), strict=True)
    ]


def _write_pairs(out: Path, pairs: Sequence[Pair]) -> Path:
    path = out.with_name(f"{out.stem}.duplicates.csv")
    lines = [(p.kept, p.dropped, p.bits, f"{p.correlation:.4f}") for p in pairs]
    return write_list(path, ("kept", "dropped", "bits", "correlation"), lines)
