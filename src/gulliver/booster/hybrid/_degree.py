"""The degree of sequence parallelism may differ from forward to forward.

    for clip in clips:
        with sequence_degree(model, 4 if clip.long else 1) as (place, places):
            loss = model(**batch_of(clip, place, places)).loss

A forward takes the rank groups that are asked for when it begins and hands them down to whatever
runs in it, so forwards of several degrees may be in flight, and their backwards come in any order.

[Note: why gradients stay right] At degree d the R ranks that hold the same parameters work on
R / d sequences, and each rank counts the loss of its sequence. The sum over ranks counts every
sequence d times, and the optimizer divides by R: the mean over sequences, whatever d is. It need
not know the degree of any of the forwards that it steps for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from gulliver.comm import RankGroup
from gulliver.errors import GulliverError
from gulliver.families import hugging_face_of
from gulliver.parallel.sequence import SequenceGroups, SequencePlan, make_groups

ATTRIBUTE = "gulliver_degree"
"""Attribute of a wired model; not of a module's own kind, so nothing of it is saved."""


class Degree:
    """The rank groups that the next forward of a model shares its sequences over.

    Args:
        planned: groups of the model's plan.

    Attributes:
        now: groups that a forward takes.
        varied: whether they were ever others than the plan's.
        fixed: why they cannot be others; empty where they can.
    """

    def __init__(self, planned: SequenceGroups) -> None:
        self.planned = self.now = planned
        self.varied, self.fixed = False, ""
        # Kept, because a group without users is given back at the next boost.
        self._made = {planned.plan.degree: planned}

    def __deepcopy__(self, memo: Any) -> Degree:
        return self

    def of(self, degree: int) -> SequenceGroups:
        """Groups of `degree` ranks each, neighbours on the sequence axis.

        Every rank of the world calls it: the first time they are made.
        """
        whole = self.planned.plan
        if degree < 1 or whole.degree % degree:
            fits = [n for n in range(1, whole.degree + 1) if whole.degree % n == 0]
            raise GulliverError(f"degree {degree} does not divide the {whole}: one of {fits}")
        if degree != whole.degree and self.fixed:
            raise GulliverError(
                f"degree {degree} instead of {whole.degree}: not where {self.fixed}"
            )
        if degree not in self._made:
            ulysses = math.gcd(whole.ulysses, degree)
            inner = math.gcd(whole.inner, degree // ulysses)
            outer = degree // (ulysses * inner)
            plan = SequencePlan(ulysses, outer, inner, whole.layout, whole.wire)
            rows = [
                ranks[first : first + degree]
                for ranks in self.planned.sequences
                for first in range(0, whole.degree, degree)
            ]
            self._made[degree] = make_groups(plan, rows)
        return self._made[degree]


def put_degree(model: nn.Module, degree: Degree) -> None:
    """Gives a model that is wired for a sequence its `Degree`."""
    object.__setattr__(model, ATTRIBUTE, degree)


def degree_of(model: nn.Module) -> Degree | None:
    """The `Degree` of a model that shares sequences; None where they are whole."""
    return vars(hugging_face_of(model)).get(ATTRIBUTE)


def readers(model: nn.Module, planned: RankGroup, tensor: RankGroup) -> list[RankGroup]:
    """Rank groups whose ranks read the same batch, and along which batches are compared."""
    degree = degree_of(model)
    if degree is None or degree.now is degree.planned:
        return [planned]
    return [degree.now.all, tensor]


@contextmanager
def sequence_degree(model: nn.Module, degree: int) -> Iterator[tuple[int, int]]:
    """Lets forwards inside share each sequence between `degree` ranks, instead of the plan's.

    Every rank of the world calls it with the same degree. Neighbours on the sequence axis share a
    sequence and read one batch; others may read others. Gradients are the mean over all of them.

    Args:
        model: boosted model that shares sequences over ranks of their own.
        degree: ranks that share a sequence, a divisor of the plan's.

    Returns:
        The number of this rank's sequence among those that ranks of one sequence axis work on, and
        how many there are.

    Raises:
        GulliverError: the model does not share sequences, or not so.
    """
    state = degree_of(model)
    if state is None or state.planned.plan.degree == 1:
        raise GulliverError(
            f"{type(model).__name__} shares no sequences, so that there is no degree to change: "
            "boost it with sp_size and sequence_parallelism_mode 'all_to_all' or 'ring_attn'"
        )
    before, state.now = state.now, state.of(degree)
    state.varied = state.varied or state.now is not state.planned
    try:
        yield state.planned.rank // degree, state.planned.plan.degree // degree
    finally:
        state.now = before
