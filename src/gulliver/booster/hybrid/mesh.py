"""The rank grid of a hybrid run: pipeline x data x sequence x tensor.

The tensor axis is innermost because it communicates most: number the ranks so that neighbors have
the fastest links.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from gulliver.comm.groups import ALONE, RankGroup
from gulliver.comm.torus import Axes, make_axes
from gulliver.errors import GulliverError
from gulliver.families.loss import hugging_face_of
from gulliver.parallel.sequence.layout import (
    SequenceGroups,
    SequencePlan,
    make_groups,
    make_mixed_groups,
)
from gulliver.precision.wire.formats import IDENTITY, WireFormat

AXES = ("pp", "dp", "sp", "tp")


@dataclass(frozen=True, eq=False)
class HybridMesh:
    """Rank groups along each axis of the grid."""

    # Number of ranks along each axis, outer to inner.
    sizes: Mapping[str, int]
    # Ranks with the stages of one model, first stage first.
    pipeline: RankGroup
    # Ranks with the same parameters that read different samples.
    data: RankGroup
    # Ranks that share the sequences of one batch.
    sequence: SequenceGroups
    # Ranks that share the tensors of a stage.
    tensor: RankGroup
    # Data x sequence: all ranks with the same parameters; gradients are averaged over them.
    replicas: RankGroup
    # Pipeline x tensor: ranks that together hold the model once.
    shards: RankGroup
    # Pipeline x sequence x tensor: all ranks that read the same batch.
    model: RankGroup

    @property
    def place(self) -> dict[str, int]:
        rank_groups = (self.pipeline, self.data, self.sequence.all, self.tensor)
        return {name: rank_group.rank for name, rank_group in zip(AXES, rank_groups, strict=True)}


def size_axes(world: int, pp_size: int, sp_size: int, tp_size: int) -> dict[str, int]:
    """Returns the sizes of all axes; ranks that the model does not use go to the data axis."""
    for name, size in (("pp_size", pp_size), ("sp_size", sp_size), ("tp_size", tp_size)):
        check_size(name, size)
    model = pp_size * sp_size * tp_size
    if world % model:
        above = math.ceil(world / model) * model
        fits = f"{world - world % model} or {above}" if world > model else f"{above}"
        raise GulliverError(
            f"pp_size {pp_size} x sp_size {sp_size} x tp_size {tp_size} = {model} ranks for one "
            f"model, which does not divide the world of {world}: start {fits} ranks, or choose "
            f"sizes whose product is one of {_divisors(world)}"
        )
    return dict(zip(AXES, (pp_size, world // model, sp_size, tp_size), strict=True))


def check_size(name: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise GulliverError(f"{name} must be a whole number of at least 1, not {size!r}")


def make_mesh(
    sizes: Mapping[str, int],
    sequence: SequencePlan,
    device_type: str,
    tensor_wire: WireFormat = IDENTITY,
    pipeline_wire: WireFormat = IDENTITY,
) -> HybridMesh:
    """Creates all rank groups of a grid (collective over the world)."""
    assert sequence.degree == sizes["sp"], "the sequence plan covers the sequence axis"
    axes = make_axes(sizes, device_type=device_type)

    def flat(*names: str) -> RankGroup:
        return axes.flat(names) if math.prod(sizes[n] for n in names) > 1 else ALONE

    def rank_group(name: str) -> RankGroup:
        return axes.rank_group(name) if sizes[name] > 1 else ALONE

    return HybridMesh(
        sizes=dict(sizes),
        pipeline=rank_group("pp").packed(pipeline_wire),
        data=rank_group("dp"),
        sequence=make_groups(sequence, _sequences(axes)),
        tensor=rank_group("tp").packed(tensor_wire),
        # Includes the ranks of one sequence, each of which counts the loss that it returns; see
        # [Note: gradients] of parallel/sequence/sharding.py.
        replicas=axes.flat(("dp", "sp")),
        shards=flat("pp", "tp"),
        model=flat("pp", "sp", "tp"),
    )


def _sequences(axes: Axes) -> list[list[int]] | None:
    if axes.ranks is None:
        return None
    rows = axes.ranks.movedim(AXES.index("sp"), -1)
    return rows.reshape(-1, axes.sizes["sp"]).tolist()


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


# The degree of sequence parallelism may change from forward to forward.
#
#     for clip in clips:
#         with sequence_degree(model, 4 if clip.long else 1) as (place, places):
#             loss = model(**batch_of(clip, place, places)).loss
#
# A forward reads the current rank groups when it begins and passes them on, so forwards of several
# degrees may be in flight, and their backward passes may come in any order.


# Attribute of a sequence-parallel model; set outside of the module's tables, so it is not saved.
ATTRIBUTE = "gulliver_degree"
# Maximum number of cached groupings of the ranks.
REMEMBERED = 256


# [Note: why gradients stay right] At degree d, the R ranks with the same parameters process R / d
# sequences, and each rank counts the loss of its sequence. The sum over ranks counts every sequence
# d times, and the optimizer divides by R: the result is the mean over sequences for any d. The
# optimizer need not know the degree of the forwards.
class Degree:
    """Rank groups over which the next forward shards its sequences."""

    def __init__(self, planned: SequenceGroups) -> None:
        self.planned = self.now = planned
        self.varied, self.fixed, self.lasting, self.staged = False, "", False, False
        # Kept, because the next boost destroys groups without users.
        self._made = {planned.plan.degree: planned}
        self._mixed = dict[tuple[tuple[int, ...], ...], SequenceGroups]()

    def __deepcopy__(self, memo: Any) -> Degree:
        return self

    def of(self, degree: int) -> SequenceGroups:
        """Returns groups of `degree` adjacent ranks on the sequence axis."""
        # Collective over the world when a degree is first used, because its groups are created.
        whole = self.planned.plan
        if degree < 1 or whole.degree % degree:
            fits = [n for n in range(1, whole.degree + 1) if whole.degree % n == 0]
            raise GulliverError(f"degree {degree} does not divide the {whole}; use one of {fits}")
        fixed = "blocks are split into stages" if self.staged else self.fixed
        if degree != whole.degree and fixed:
            raise GulliverError(
                f"degree {degree} is not possible, because {fixed}; use {whole.degree}"
            )
        if degree not in self._made:
            plan = self._plan(degree)
            rows = [
                ranks[first : first + degree]
                for ranks in self.planned.sequences
                for first in range(0, whole.degree, degree)
            ]
            self._made[degree] = make_groups(plan, rows)
        return self._made[degree]

    def of_rows(self, rows: Sequence[Sequence[int]]) -> SequenceGroups:
        """Returns adjacent groups of different sizes; one sequence axis must span all ranks."""
        # Collective over the world with equal rows, because new groups are created. If a sequence
        # is also on tensor ranks, there is a group of the first ranks, one of the second ranks, and
        # so on.
        if self.fixed:
            raise GulliverError(f"groups cannot change between steps, because {self.fixed}")
        key = tuple(tuple(row) for row in rows)
        named = sorted(rank for row in key for rank in row)
        if named != list(range(self.planned.plan.degree)):
            raise GulliverError(
                f"arbitrary groups need one sequence axis over all {len(named)} ranks that share "
                f"the optimizer, but the axis is {self.planned.plan}; use DataCentricPlugin"
            )
        if key not in self._mixed:
            if len(self._mixed) >= REMEMBERED:  # its process groups are kept elsewhere
                del self._mixed[next(iter(self._mixed))]
            whole = self.planned.sequences or [[0]]
            found = [[ranks[place] for place in row] for ranks in whole for row in key]
            self._mixed[key] = make_mixed_groups([self._plan(len(row)) for row in found], found)
        return self._mixed[key]

    def _plan(self, degree: int) -> SequencePlan:
        """Returns the plan for fewer ranks per sequence, with the same mode if possible."""
        whole = self.planned.plan
        if degree == whole.degree:
            return whole
        ulysses = degree if whole.ring == 1 else math.gcd(whole.ulysses, degree)
        inner = math.gcd(whole.inner, degree // ulysses)
        outer = degree // (ulysses * inner)
        return SequencePlan(ulysses, outer, inner, whole.layout, whole.wire)


def put_degree(model: nn.Module, degree: Degree) -> None:
    object.__setattr__(model, ATTRIBUTE, degree)


def degree_of(model: nn.Module) -> Degree | None:
    """Returns the `Degree` of a model that shards sequences; None for other models."""
    return vars(hugging_face_of(model)).get(ATTRIBUTE)


def readers(
    model: nn.Module, planned: RankGroup, tensor: RankGroup, stages: RankGroup = ALONE
) -> list[RankGroup]:
    """Returns the groups of ranks that must read the same batch."""
    # The first one has all ranks of a pipeline, which exchange the state that they are in.
    degree = degree_of(model)
    if degree is None or degree.now is degree.planned:
        return [planned]
    return [stages, degree.now.all, tensor]


@contextmanager
def sequence_rows(degree: Degree, rows: Sequence[Sequence[int]]) -> Iterator[SequenceGroups]:
    """Context in which sequences are sharded over groups of different sizes."""
    # Collective over the world with equal rows. All that a rank runs in the block uses one group,
    # so recomputed blocks need not remember theirs.
    before, lasting = degree.now, degree.lasting
    degree.now, degree.lasting = degree.of_rows(rows), True
    degree.varied = degree.varied or degree.now is not degree.planned
    try:
        yield degree.now
    finally:
        degree.now, degree.lasting = before, lasting


@contextmanager
def sequence_degree(model: nn.Module, degree: int) -> Iterator[tuple[int, int]]:
    """Context in which each sequence is sharded over `degree` ranks instead of the plan's number.

    Every rank of the world calls it with the same degree. Adjacent ranks on the sequence axis share
    a sequence and read the same batch; groups may read different batches. Gradients are averaged
    over all groups.

    Args:
        model: boosted model with a separate sequence axis.
        degree: number of ranks that share a sequence; must divide the plan's number.

    Returns:
        The index of this rank's sequence among the sequences on its axis, and their number.

    Raises:
        GulliverError: the model does not shard sequences, or not over that many ranks.
    """
    state = degree_of(model)
    if state is None or state.planned.plan.degree == 1:
        raise GulliverError(
            f"{type(model).__name__} does not shard sequences, so it has no degree to change: "
            "boost it with sp_size and sequence_parallelism_mode 'all_to_all' or 'ring_attn'"
        )
    before, state.now = state.now, state.of(degree)
    state.varied = state.varied or state.now is not state.planned
    try:
        yield state.planned.rank // degree, state.planned.plan.degree // degree
    finally:
        state.now = before
