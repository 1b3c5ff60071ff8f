"""The ranks of a hybrid run as a grid: pipeline x data x sequence x tensor.

The tensor axis is innermost, because it sends most and often: number the ranks so that neighbours
have the fastest links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gulliver.comm import ALONE, IDENTITY, Axes, RankGroup, WireFormat, make_axes
from gulliver.errors import GulliverError
from gulliver.parallel.sequence import SequenceGroups, SequencePlan, make_groups

AXES = ("pp", "dp", "sp", "tp")


@dataclass(frozen=True, eq=False)
class HybridMesh:
    """Rank groups along each axis."""

    # Number of ranks along each axis, outer to inner.
    sizes: Mapping[str, int]
    # Ranks that hold the stages of one model, first stage first.
    pipeline: RankGroup
    # Ranks that hold the same parameters and read different samples.
    data: RankGroup
    # Ranks that share the sequences of one batch.
    sequence: SequenceGroups
    # Ranks that share the tensors of a stage.
    tensor: RankGroup
    # Data x sequence: all that hold the same parameters; gradients are averaged there.
    replicas: RankGroup
    # Pipeline x tensor: all that together hold the model once.
    shards: RankGroup
    # Pipeline x sequence x tensor: all that read the same batch.
    model: RankGroup

    @property
    def place(self) -> dict[str, int]:
        """This rank's number on each axis."""
        rank_groups = (self.pipeline, self.data, self.sequence.all, self.tensor)
        return {name: rank_group.rank for name, rank_group in zip(AXES, rank_groups, strict=True)}


def size_axes(world: int, pp_size: int, sp_size: int, tp_size: int) -> dict[str, int]:
    """Sizes of all axes; what the model does not take goes to the data."""
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
    """Refuses what is no number of ranks or parts."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise GulliverError(f"{name} must be a whole number of at least 1, not {size!r}")


def make_mesh(
    sizes: Mapping[str, int],
    sequence: SequencePlan,
    device_type: str,
    tensor_wire: WireFormat = IDENTITY,
    pipeline_wire: WireFormat = IDENTITY,
) -> HybridMesh:
    """Makes all groups of a grid, once; every rank of the world calls it."""
    assert sequence.degree == sizes["sp"], "the sequence plan is of the sequence axis"
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
        # Ranks of one sequence, too: each counts the loss that it shows as one of its own, which
        # [Note: gradients] of parallel/sequence/_shard.py explains.
        replicas=axes.flat(("dp", "sp")),
        shards=flat("pp", "tp"),
        model=flat("pp", "sp", "tp"),
    )


def _sequences(axes: Axes) -> list[list[int]] | None:
    """The ranks that share a sequence, for every sequence of the world."""
    if axes.ranks is None:
        return None
    rows = axes.ranks.movedim(AXES.index("sp"), -1)
    return rows.reshape(-1, axes.sizes["sp"]).tolist()


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
