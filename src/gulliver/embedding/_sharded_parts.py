"""What a rank saves of tables that it shares, in addition to the rows that it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gulliver.comm import RankGroup, gather_objects
from gulliver.embedding._bag import CachedEmbeddingBag
from gulliver.memory import Part, Region

STEPS = "optimizer.step"
"""Name of the number of steps that the optimizer has taken, which corrects biases and decays."""


def with_empty_parts(parts: Mapping[str, Part], group: RankGroup) -> dict[str, Part]:
    """Adds empty parts of tensors that other ranks alone have parts of; every rank calls it."""
    # Without them a rank would neither know what a checkpoint holds, nor read it.
    mine = {name: (part.shape, part.value.dtype) for name, part in parts.items()}
    everyone = gather_objects(mine, group.process_group)
    known = {name: of for rank in everyone for name, of in rank.items()}
    others = {name: of for name, of in known.items() if name not in parts}
    empty = {
        name: Part(torch.zeros(0, *shape[1:], dtype=kind), shape)
        for name, (shape, kind) in others.items()
    }
    return {**parts, **empty}


def steps_taken(bags: Sequence[CachedEmbeddingBag], group: RankGroup) -> Tensor | None:
    """The optimizer's steps, (1,) in float64; None where it counts none. Every rank calls it."""
    mine = [steps for bag in bags if (steps := bag.optimizer_steps) is not None]
    everyone = gather_objects(max(mine, default=None), group.process_group)
    known = [steps for steps in everyone if steps is not None]
    return torch.tensor([max(known)], dtype=torch.float64) if known else None


def steps_part(steps: Tensor, group: RankGroup) -> Part:
    """The part of every rank, which all hold alike."""
    return Part(steps, (1,), region=Region((1,), 0, ((0, 1),), group.size))
