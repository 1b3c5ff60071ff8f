"""Chooses which activations to keep, recompute or offload.

A dynamic program over a chain may drop a state if another state of the same kind is at least as
good in every measure that later costs depend on (`undominated`). If too many remain, `boxed` prunes
heuristically: it divides each kind into bins by peak, and keeps the best states of each bin at
several prices. A single weighted sum would lose states with a worse sum but a lower peak.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gulliver.errors import GulliverError

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
DIGITS = 1e12  # relative tolerance for sums of the same numbers in another order
PAIRS, AT_ONCE = 128, 16


def rounded(values: Floats) -> Floats:
    """Rounds values so that sums of the same numbers in any order are equal."""
    largest = float(np.abs(values).max(initial=0.0))
    return np.round(values * (DIGITS / largest)) if largest > 0 else values


def kinds_of(keys: NDArray[Any]) -> Ints:
    """Labels rows so that rows with equal keys have equal labels."""
    found = np.zeros(len(keys), dtype=np.int64)
    for column in keys.T:
        least = column.min(initial=0)
        size = int(column.max(initial=0)) - int(least) + 1
        if int(found.max(initial=0)) >= np.iinfo(np.int64).max // size - 1:
            found = np.unique(found, return_inverse=True)[1].astype(np.int64)
        found = found * size + (column - least)
    return found


def groups_of(kinds: Ints) -> list[Ints]:
    if not len(kinds):
        return []
    order = np.argsort(kinds, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1)


def undominated(values: Floats) -> Ints:
    """Returns the indices of rows that no other row dominates; equal rows count once."""
    # Small sets are compared pairwise. Large ones are visited in order of the sum of their
    # normalized columns: a row can only be dominated by one before it. O(rows x rows that are
    # left).
    least = values.min(axis=0)
    scale = values.max(axis=0) - least
    varied = np.flatnonzero(scale)
    if not len(varied):
        return np.zeros(1, dtype=np.intp)
    values = (values[:, varied] - least[varied]) / scale[varied]
    left = np.argsort(values.sum(axis=1), kind="stable")
    values = values[left]
    if len(left) <= PAIRS:
        beats = np.logical_and.reduce(values[:, None] <= values[None], axis=2)
        return left[np.flatnonzero(np.triu(beats, 1).any(axis=0) == 0)]
    kept: list[Ints] = []
    while len(left):
        # In small batches: each row is kept only if no earlier one dominates it.
        few = values[:AT_ONCE]
        beats = np.logical_and.reduce(few[:, None] <= values[None], axis=2)
        first = np.flatnonzero(np.triu(beats[:, : len(few)], 1).any(axis=0) == 0)
        kept.append(left[: len(few)][first])
        better = np.flatnonzero(beats[first].any(axis=0) == 0)
        left, values = left[better], values[better]
    return np.concatenate(kept)


def boxed(kinds: Ints, peak: Floats, priced: Floats, bins: int) -> Ints:
    """Indices of the rows that are best in their kind and peak bin, at one of several prices."""
    if not len(kinds):
        return np.zeros(0, dtype=np.intp)
    order, starts, sizes = _sorted(kinds)
    least = np.repeat(np.minimum.reduceat(peak[order], starts), sizes)
    most = np.repeat(np.maximum.reduceat(peak[order], starts), sizes)
    place = (peak[order] - least) / np.maximum(most - least, 1e-300) * bins
    place = np.minimum(place.astype(np.int64), bins - 1)
    inner, starts, sizes = _sorted(np.repeat(np.arange(len(starts)), sizes) * bins + place)
    order, box = order[inner], np.repeat(np.arange(len(starts)), sizes)
    stays = np.zeros(len(order), dtype=bool)
    for one in priced[:, order]:
        best = np.flatnonzero(one <= np.repeat(np.minimum.reduceat(one, starts), sizes))
        stays[best[np.unique(box[best], return_index=True)[1]]] = True
    return order[stays]


def _sorted(kinds: Ints) -> tuple[Ints, Ints, Ints]:
    order = np.argsort(kinds, kind="stable")
    starts = np.concatenate([[0], np.flatnonzero(np.diff(kinds[order])) + 1])
    return order, starts, np.diff(np.append(starts, len(order)))


# Chooses for each block's activations: keep, recompute in backward, or offload.
#
# Blocks run 1 to n in forward and n to 1 in backward. Block i leaves `output` bytes (the next one's
# input, always kept) and `saved` bytes for its backward, of which `movable` can be offloaded to a
# slower tier. Its own pass needs all it saved plus `working` bytes. A tier is read during the
# backward of the block above, so incoming data already occupies memory:
#
#     sum over j < i of output_j + left_j  +  coming_(i-1)  +  saved_i + working_i  <=  room
#
# for each i, with left = saved if kept, 0 if recomputed, saved - movable if offloaded, and coming =
# movable if offloaded, else 0. Transfers overlap with compute; each pass takes the longer of the
# two times:
#
#     seconds = max(forward, writes) + max(backward + recomputed, reads)
#
# `choose_activations` minimizes this by dynamic programming over blocks. States are (bytes left,
# bytes moved, seconds recomputed); dominated states are dropped. The result is exact as long as at
# most `STATES` remain, which equal blocks rarely exceed. A quick search with few states comes first
# and gives an upper bound for pruning.


Choice = Literal["keep", "recompute", "offload"]
QUICK, STATES = 64, 1024


@dataclass(frozen=True)
class BlockActivations:
    """Activations of one block: bytes, and seconds to recompute them."""

    # Bytes that its forward saves for its backward, without its output.
    saved: int
    # Bytes of its output.
    output: int
    # Extra bytes while its backward (or forward, if larger) runs.
    working: int = 0
    # Bytes of `saved` that can be offloaded.
    movable: int = 0
    # Seconds of its forward.
    recompute_s: float = 0.0


@dataclass(frozen=True)
class PassCosts:
    """Time of a step without recomputation and offloading of activations."""

    # Compute seconds of the forward.
    forward: float = 0.0
    # Compute seconds of the backward.
    backward: float = 0.0
    # Seconds for which the slower tier is already busy in forward.
    writes: float = 0.0
    # Seconds for which it is already busy in backward.
    reads: float = 0.0
    # Seconds per byte written to it.
    write_s: float = 0.0
    # Seconds per byte read from it.
    read_s: float = 0.0

    def seconds(self, moved: int, recomputed: float) -> float:
        """Seconds of both passes with `moved` bytes offloaded and `recomputed` extra seconds."""
        out = max(self.forward, self.writes + moved * self.write_s)
        return out + max(self.backward + recomputed, self.reads + moved * self.read_s)


@dataclass(frozen=True)
class ActivationChoice:
    """Choices for the activations of all blocks, with their predicted time and peak."""

    # Choice of each block.
    choices: tuple[Choice, ...]
    # Predicted seconds of forward and backward.
    seconds: float
    # Peak bytes of activations.
    peak: int
    # Whether the choice is optimal; else it is the best one found.
    exact: bool


class _State(NamedTuple):
    left: int
    moved: int
    recomputed: float
    peak: int
    coming: int
    choice: Choice | None
    before: _State | None

    def choices(self) -> tuple[Choice, ...]:
        found, state = list[Choice](), self
        while state.choice is not None and state.before is not None:
            found.append(state.choice)
            state = state.before
        return tuple(reversed(found))


_START = _State(0, 0, 0.0, 0, 0, None, None)


def choose_activations(
    blocks: Sequence[BlockActivations],
    room: int,
    costs: PassCosts,
    allowed: Sequence[Choice] = ("keep", "recompute", "offload"),
) -> ActivationChoice:
    """Chooses which activations to keep, recompute or offload, minimizing the predicted time.

    Raises:
        GulliverError: no choice fits into `room`; the error names the minimum and the block.
    """
    least = costs.seconds(0, 0.0)
    best, exact = _search(blocks, room, costs, allowed, QUICK, math.inf)
    if _seconds(costs, best) > least and not exact:
        best, exact = _search(blocks, room, costs, allowed, STATES, _seconds(costs, best))
    seconds = _seconds(costs, best)
    return ActivationChoice(best.choices(), seconds, best.peak, exact or seconds <= least)


def _search(
    blocks: Sequence[BlockActivations],
    room: int,
    costs: PassCosts,
    allowed: Sequence[Choice],
    most: int,
    bound: float,
) -> tuple[_State, bool]:
    states, exact = [_START], True
    for number, block in enumerate(blocks):
        fitting = [state for state in states if _need(state, block) <= room]
        if not fitting:
            raise GulliverError(
                f"activations need {least_room(blocks, allowed)} bytes in total, but only {room} "
                f"are available; block {number} does not fit next to the earlier ones"
            )
        grown = [_leave(state, block, choice) for state in fitting for choice in allowed]
        states = _undominated([s for s in grown if _seconds(costs, s) <= bound])
        if len(states) > most:
            states, exact = _thinned(states, most), False
    key = lambda s: (_seconds(costs, s), s.recomputed, s.moved, s.peak)  # noqa: E731
    return min(states, key=key), exact


def _seconds(costs: PassCosts, state: _State) -> float:
    return costs.seconds(state.moved, state.recomputed)


def activations_peak(blocks: Sequence[BlockActivations], choices: Sequence[Choice]) -> int:
    state = _START
    for block, choice in zip(blocks, choices, strict=True):
        state = _leave(state, block, choice)
    return state.peak


def least_room(
    blocks: Sequence[BlockActivations],
    allowed: Sequence[Choice] = ("keep", "recompute", "offload"),
) -> int:
    leanest: tuple[Choice, ...] = ("recompute",) if "recompute" in allowed else tuple(allowed)
    return min(activations_peak(blocks, (choice,) * len(blocks)) for choice in leanest)


def _need(state: _State, block: BlockActivations) -> int:
    return state.left + state.coming + block.saved + block.working


def _leave(state: _State, block: BlockActivations, choice: Choice) -> _State:
    away = block.movable if choice == "offload" else 0
    rest = 0 if choice == "recompute" else block.saved - away
    return _State(
        left=state.left + block.output + rest,
        moved=state.moved + away,
        recomputed=state.recomputed + (block.recompute_s if choice == "recompute" else 0.0),
        peak=max(state.peak, _need(state, block)),
        coming=away,
        choice=choice,
        before=state,
    )


def _undominated(states: list[_State]) -> list[_State]:
    """Drops states that others dominate in current and later bytes, bytes moved, and seconds."""
    # Bytes later are `left`, bytes for the next block are `left + coming`: the order covers both.
    kept: list[_State] = []
    # By coming: 0, and each size in flight.
    for coming in sorted({state.coming for state in states}):
        group = [state for state in states if state.coming == coming]
        group.sort(key=lambda s: (s.moved, s.recomputed, s.left, s.peak))
        stairs: list[tuple[float, int]] = []  # recomputed rises, left falls
        for state in group:
            place = bisect_right(stairs, (state.recomputed, state.left))
            if place and stairs[place - 1][1] <= state.left:
                continue
            while place < len(stairs) and stairs[place][1] >= state.left:
                del stairs[place]
            stairs.insert(place, (state.recomputed, state.left))
            kept.append(state)
    return kept


def _thinned(states: list[_State], most: int) -> list[_State]:
    """Keeps a limited number of states, spread over resident bytes, including the smallest."""
    states.sort(key=lambda s: (s.left + s.coming, s.recomputed, s.moved))
    step = len(states) / most
    return [states[int(number * step)] for number in range(most)]
