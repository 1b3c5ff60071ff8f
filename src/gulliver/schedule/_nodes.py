"""Chooses the slots of jobs on nodes, once a policy has chosen their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gulliver.schedule._jobs import JobCluster
from gulliver.schedule._placement import Parts, place
from gulliver.schedule._state import Decision, JobState

LESS = 0.5
"""Largest loss after a move, as a share of the loss before it."""
Chosen = Mapping[str, tuple[tuple[int, ...], int]]


class _Wish(NamedTuple):
    """Number of slots that a job is to have, and its batch size."""

    state: JobState
    slots: int
    batch: int


def on_nodes(
    states: Sequence[JobState],
    decision: Decision,
    chosen: Chosen,
    cluster: JobCluster,
    now: float,
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Finds slots and batch of the jobs that start, resize or move."""
    wishes = {}
    for state in states:
        given = decision.allotments.get(state.job.name)
        if given is not None and isinstance(given.slots, int) and given.slots:
            wishes[state.job.name] = _Wish(state, given.slots, given.batch)
    # Jobs whose number of slots changes start or resize anyway, so they may move for free. The
    # others stay until their placement has cost them what a move costs, as in ski rental (Karlin
    # et al. 1988): that needs no job lengths, and never costs more than twice what knowing them
    # would.
    moving = {name: wish for name, wish in wishes.items() if wish.slots != wish.state.count}
    moved = {
        name: wish
        for name, wish in wishes.items()
        if name not in moving and _has_lost_a_move(wish.state, cluster, now)
    }
    while True:
        found = _slots({**moving, **moved}, chosen, cluster)
        better = {
            name: wish
            for name, wish in moved.items()
            if _loss(wish.state, found[name], cluster)
            < LESS * _loss(wish.state, wish.state.slots, cluster)
        }
        if len(better) == len(moved):
            return {name: (slots, chosen[name][1]) for name, slots in found.items()}
        moved = better


def _loss(state: JobState, slots: Sequence[int], cluster: JobCluster) -> float:
    return cluster.loss(state.job, state.batch, cluster.parts(slots))


def _has_lost_a_move(state: JobState, cluster: JobCluster, now: float) -> bool:
    lost = _loss(state, state.slots, cluster) * (now - state.changed)
    return lost > state.job.resize_seconds


def _slots(
    wishes: dict[str, _Wish], chosen: Chosen, cluster: JobCluster
) -> dict[str, tuple[int, ...]]:
    """Finds slots for some jobs; the others stay where they are."""
    taken = {slot for name, (slots, _) in chosen.items() if name not in wishes for slot in slots}
    free = [slot for slot in range(cluster.slots) if slot not in taken]
    entries = list(wishes.values())

    def loss(number: int, parts: Parts) -> float:
        return cluster.loss(entries[number].state.job, entries[number].batch, parts)

    size = cluster.slots // cluster.nodes
    found: dict[str, tuple[int, ...]] = {}
    split = place([wish.slots for wish in entries], cluster.parts(free), loss)
    for (name, wish), parts in zip(wishes.items(), split, strict=True):
        own: list[int] = []
        for node, part in enumerate(parts):
            here = [slot for slot in free if slot // size == node]
            # Its own slots first, so that a drawing shows what has moved.
            own += sorted(here, key=lambda slot: slot not in wish.state.slots)[:part]
        same = set(own) == set(wish.state.slots)
        found[name] = wish.state.slots if same else tuple(own)
        free = [slot for slot in free if slot not in own]
    return found
