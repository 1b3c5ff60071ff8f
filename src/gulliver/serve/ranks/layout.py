"""`Layout`: which rank has which layers, and which part of each.

Ranks are counted stage by stage: rank = stage x tensor + number among the stage's tensor ranks. The
blocks are dealt by the exact partition of a chain (`gulliver.solve`), so that the slowest stage is
as fast as can be, for stages of equal or of given speeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gulliver.errors import GulliverError
from gulliver.parallel.pipeline.stack import cut, stack_of
from gulliver.parallel.tensor.plan import plan_tensor
from gulliver.serve.weights import (
    Source,
    build_on_meta,
    check_quantised,
    check_served,
    is_quantised,
    kept_dtype,
)


@dataclass(frozen=True)
class RankPlace:
    """A rank's place."""

    stage: int
    # Number of the rank among the tensor ranks of its stage.
    tensor: int


@dataclass(frozen=True)
class Layout:
    """The ranks of a model."""

    # Ranks that each layer is cut over.
    tensor: int
    # Stage k has the blocks from ``bounds[k]`` up to, without, ``bounds[k + 1]``.
    bounds: tuple[int, ...]
    # How the blocks were dealt, in words.
    why: str = ""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.stages

    def place(self, rank: int) -> RankPlace:
        """Stage and tensor number of a rank."""
        return RankPlace(rank // self.tensor, rank % self.tensor)

    def members(self, stage: int) -> tuple[int, ...]:
        """Ranks of a stage."""
        return tuple(range(stage * self.tensor, (stage + 1) * self.tensor))

    def named(self, rank: int) -> str:
        """Names a rank for messages."""
        place = self.place(rank)
        return f"rank {rank} (stage {place.stage}, tensor rank {place.tensor})"


def plan_ranks(
    folder: Path, dtype: str | None, tensor: int, pipeline: int, speeds: Sequence[float] | None
) -> Layout:
    """Deals a folder's model to ranks; no weight is loaded."""
    if speeds is not None and (len(speeds) != pipeline or min(speeds) <= 0):
        raise GulliverError(f"speeds={list(speeds)}: give {pipeline} numbers above 0, one a stage")
    if is_quantised(folder):
        check_quantised(tensor)
    model = build_on_meta(folder, kept_dtype(folder, dtype))
    check_served(model)
    if not is_quantised(folder):
        # A rank would find it out only after all of them have started.
        with Source(folder, model) as source:
            source.check(model)
    try:
        if tensor > 1:
            plan_tensor(model, tensor)
        found = cut(model, stack_of(model), pipeline, speeds=speeds)
    except GulliverError as error:
        raise GulliverError(_in_our_words(str(error))) from None
    return Layout(tensor, found.bounds, str(found))


def _in_our_words(text: str) -> str:
    for theirs, ours in (("tp_size", "tensor"), ("pp_size", "pipeline")):
        text = text.replace(theirs, ours)
    return text
