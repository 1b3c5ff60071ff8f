"""Computes the elements that parts of a tensor share, and copies them.

A part is a range of elements of a region, and a region consists of slices of a full tensor along
one dim. In the row-major order of the full tensor, a part is therefore an ascending list of
contiguous runs: one run if it is not sliced or sliced along the first dim; otherwise one per index
of the preceding dims. The runs of two parts are intersected as sorted intervals (`overlap`),
whatever their dims; the overlaps repeat with fixed strides, and are copied as a few boxes
(`Copies.boxes`), not row by row.

Read `stretches`, `overlap`, then `copy_bytes`. `missing` describes how a set of parts is
incomplete. Nothing here accesses files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gulliver.memory.parts import Part, Region

UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Integer dtypes by size, for copying bytes at the widest alignment."""


# [Note: complete tensors] Parts without regions contain every element once. With regions, the runs
# of a region must cover it, and the regions must cover the full tensor along one dim. They may
# overlap, such as key and value heads that several ranks hold; such elements are assumed to be
# equal, and any copy of them is read.
@dataclass(frozen=True)
class PartOffset:
    """Position of a part's elements in the full tensor."""

    shape: tuple[int, ...]
    start: int
    stop: int
    region: Region | None = None

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def sliced(self) -> Region | None:
        """The region, or None if it covers the full tensor."""
        region = self.region
        if region is None or region.numel == math.prod(self.shape):
            return None
        return region


def place_of(leaf: Tensor | Part) -> PartOffset:
    if isinstance(leaf, Part):
        return PartOffset(tuple(leaf.shape), leaf.start, leaf.stop, leaf.region)
    return PartOffset(tuple(leaf.shape), 0, leaf.numel())


@dataclass(frozen=True)
class ContiguousRuns:
    """Contiguous runs of elements in the full tensor, ascending; arrays of equal length."""

    # First element of each run, counted in the full tensor.
    begin: np.ndarray
    # The same element, counted in the part.
    local: np.ndarray
    # Number of elements.
    count: np.ndarray
    # Number of the region's run that contains it.
    run: np.ndarray


def stretches(place: PartOffset) -> ContiguousRuns:
    region = place.sliced
    if region is None:
        row = [place.start] if place.numel else []
        zeros = np.zeros(len(row), np.int64)
        return ContiguousRuns(_int(row), zeros, _int([place.numel] * len(row)), zeros)
    inner = math.prod(place.shape[region.dim + 1 :])
    runs = _int(region.runs).reshape(-1, 2) * inner
    runs = runs[runs[:, 1] > runs[:, 0]]
    widths = runs[:, 1] - runs[:, 0]
    width = int(widths.sum())
    if not width or not place.numel:
        return ContiguousRuns(*(np.zeros(0, np.int64) for _ in range(4)))
    rows = np.arange(place.start // width, -(-place.stop // width))[:, None]
    begin = (rows * (place.shape[region.dim] * inner) + runs[:, 0]).ravel()
    local = (rows * width + np.cumsum(widths) - widths).ravel()
    count = np.tile(widths, len(rows))
    run = np.tile(np.arange(len(runs)), len(rows))
    # The part may begin and end inside a run.
    low, high = np.maximum(local, place.start), np.minimum(local + count, place.stop)
    kept = high > low
    begin += low - local
    return ContiguousRuns(begin[kept], (low - place.start)[kept], (high - low)[kept], run[kept])


@dataclass(frozen=True)
class Copies:
    """Copies between two flat buffers, ascending in both; arrays of equal length."""

    # First element, or byte, of each copy.
    source: np.ndarray
    # Element, or byte, that the first one is copied to.
    target: np.ndarray
    # Number of elements, or bytes.
    count: np.ndarray
    # Number shared by copies that are likely to follow each other at equal distances.
    kind: np.ndarray

    def __len__(self) -> int:
        return len(self.count)

    @property
    def total(self) -> int:
        return int(self.count.sum())

    def scaled(self, size: int, source: int = 0) -> Copies:
        """Converts to units of 1/`size` element, and shifts the sources by `source`."""
        return Copies(self.source * size + source, self.target * size, self.count * size, self.kind)

    def packed(self) -> tuple[Copies, Copies]:
        """Splits copies in two: to a contiguous buffer, and from there to the targets."""
        row = np.cumsum(self.count) - self.count
        return replace(self, target=row), replace(self, source=row)

    def within(self, low: int, high: int) -> Copies:
        """Keeps copies whose sources are between `low` and `high`, with `low` as the new origin."""
        first = int(np.searchsorted(self.source + self.count, low, "right"))
        last = int(np.searchsorted(self.source, high, "left"))
        source, count = self.source[first:last], self.count[first:last]
        begin, stop = np.maximum(source, low), np.minimum(source + count, high)
        target = self.target[first:last] + begin - source
        return Copies(begin - low, target, stop - begin, self.kind[first:last])

    def pages(self, size: int) -> set[int]:
        first, last = self.source // size, (self.source + self.count - 1) // size
        if len(self) == 1:
            return set(range(int(first[0]), int(last[0]) + 1))
        found: set[int] = set()
        for a, b in np.unique(np.stack([first, last], 1), axis=0).tolist():
            found.update(range(a, b + 1))
        return found

    def boxes(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Yields strided boxes: source, target, rows, source step, target step, columns."""
        for kind in np.unique(self.kind):
            chosen = np.flatnonzero(self.kind == kind)
            source, target, count = self.source[chosen], self.target[chosen], self.count[chosen]
            steps = np.stack([np.diff(source), np.diff(target), np.diff(count)], 1)
            # Positions at which the distance changes.
            breaks = np.flatnonzero((steps[1:] != steps[:-1]).any(1)) + 1
            at = 0
            while at < len(chosen):
                stop = at + 1
                if at < len(steps) and steps[at, 2] == 0:
                    after = int(np.searchsorted(breaks, at, "right"))
                    stop = (int(breaks[after]) if after < len(breaks) else len(steps)) + 1
                    by = int(steps[at, 0]), int(steps[at, 1])
                else:
                    by = int(count[at]), int(count[at])
                yield int(source[at]), int(target[at]), stop - at, *by, int(count[at])
                at = stop


def overlap(source: PartOffset, target: PartOffset) -> Copies:
    """Returns the elements that two parts share, as copies between them."""
    if source.sliced is None and target.sliced is None:
        low, high = max(source.start, target.start), min(source.stop, target.stop)
        row = [] if high <= low else [[low - source.start], [low - target.start], [high - low], [0]]
        return Copies(*_int(row or [[]] * 4))
    ours, theirs = stretches(source), stretches(target)
    first = np.searchsorted(ours.begin + ours.count, theirs.begin, "right")
    last = np.searchsorted(ours.begin, theirs.begin + theirs.count, "left")
    found = np.maximum(last - first, 0)
    # Pairs of overlapping runs: their numbers in the source, and in the target.
    their = np.repeat(np.arange(len(found)), found)
    our = np.arange(len(their)) + np.repeat(first - (np.cumsum(found) - found), found)
    begin = np.maximum(ours.begin[our], theirs.begin[their])
    stop = np.minimum((ours.begin + ours.count)[our], (theirs.begin + theirs.count)[their])
    kinds = int(theirs.run.max()) + 1 if len(theirs.run) else 1
    return Copies(
        ours.local[our] + begin - ours.begin[our],
        theirs.local[their] + begin - theirs.begin[their],
        stop - begin,
        ours.run[our] * kinds + theirs.run[their],
    )


def copy_bytes(
    target: Tensor, source: Tensor, copies: Copies, dtype: torch.dtype | None = None
) -> None:
    """Copies elements between two byte buffers, merged into strided boxes."""
    if dtype is None and len(copies) == 1:
        begin, at, count = int(copies.source[0]), int(copies.target[0]), int(copies.count[0])
        target[at : at + count].copy_(source[begin : begin + count])
        return
    if not len(copies):
        return
    if dtype is None:
        unit = _unit(target, source, copies)
        theirs, ours = target.view(UNITS[unit]), source.view(UNITS[unit])
    else:
        # Files have the largest elements first, so pages do not split them.
        unit, theirs, ours = dtype.itemsize, target, source.view(dtype)
    # A box is one strided copy of possibly many short rows.
    for box in copies.boxes():
        number = box[2]
        begin, at, _, source_step, target_step, count = (value // unit for value in box)
        to = theirs.as_strided((number, count), (target_step, 1), theirs.storage_offset() + at)
        of = ours.as_strided((number, count), (source_step, 1), ours.storage_offset() + begin)
        to.copy_(of)


def clusters(copies: Copies, gap: int, limit: int) -> list[tuple[int, int]]:
    """Groups copies into source ranges that are read together."""
    stops = copies.source + copies.count
    apart = np.flatnonzero(copies.source[1:] - stops[:-1] > gap) + 1
    edges = [0, *apart.tolist(), len(copies)]
    found: list[tuple[int, int]] = []
    for first, last in itertools.pairwise(edges):
        low, high = int(copies.source[first]), int(stops[last - 1])
        found += [(at, min(at + limit, high)) for at in range(low, high, limit)]
    return found


def _unit(target: Tensor, source: Tensor, copies: Copies) -> int:
    """Returns the largest of `UNITS`, in bytes, that divides all offsets and counts."""
    common = math.gcd(8, target.numel(), source.numel())
    for value in (target.storage_offset(), source.storage_offset()):
        common = math.gcd(common, value)
    for values in (copies.source, copies.target, copies.count):
        common = math.gcd(common, int(np.gcd.reduce(values)))
    return common


def missing(shape: tuple[int, ...], parts: Sequence[PartOffset]) -> str | None:
    """Describes why parts do not cover a tensor exactly once; None if they do."""
    whole = math.prod(shape)
    if not any(part.region for part in parts):
        return _not_once(sorted((part.start, part.stop) for part in parts), whole)
    if any(part.region is None and part.numel for part in parts):
        return "is complete on some ranks and split into regions on others"
    by_region: dict[Region, list[tuple[int, int]]] = {}
    for part in parts:
        if part.region is not None and part.region.numel:
            by_region.setdefault(part.region, []).append((part.start, part.stop))
    for region, found in by_region.items():
        position = _reached(found)
        if position != region.numel:
            return f"lacks element {position} of its region {_said(region)}"
    dims = {region.dim for region in by_region}
    if len(dims) > 1:
        return f"is sliced along dims {sorted(dims)}: one is supported"
    for dim in dims:
        position = _reached(run for region in by_region for run in region.runs)
        if position != shape[dim]:
            return f"lacks index {position} along dim {dim}"
    return None if dims or not whole else "lacks all elements"


def _not_once(runs: list[tuple[int, int]], numel: int) -> str | None:
    position = 0
    for start, stop in runs:
        if start != position:
            return f"has element {min(position, start)} not once"
        position = stop
    return None if position == numel else f"ends at element {position}"


def _reached(runs: Iterable[tuple[int, int]]) -> int:
    """Returns the end of the range that the runs cover from 0 without gaps."""
    position = 0
    for start, stop in sorted(runs):
        if start > position:
            break
        position = max(position, stop)
    return position


def _said(region: Region) -> str:
    return f"{', '.join(f'{a}:{b}' for a, b in region.runs)} along dim {region.dim}"


def region_to_json(region: Region) -> list[Any]:
    return [region.dim, [list(run) for run in region.runs]]


def region_from_json(shape: tuple[int, ...], value: Any) -> Region:
    dim, runs = int(value[0]), tuple((int(a), int(b)) for a, b in value[1])
    edges = [0, *(edge for run in runs for edge in run)]
    if not 0 <= dim < len(shape) or edges != sorted(edges) or edges[-1] > shape[dim]:
        raise ValueError(f"{value} is not a region of a tensor {shape}")
    return Region(shape, dim, runs)


def _int(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int64)
