"""Cuts a model into stages: by the predicted cost of its blocks, or as the user says.

The cost of a block is the work of its matrix multiplications for one token, 2 FLOPs forward for
each element of its weights; modules around the blocks are added to the blocks that they lie with,
embeddings at nothing, the output head like any other weight. That leaves out the products inside
attention, which are the same in every block of a list, and that the two lists of an
encoder-decoder may read different lengths: pass `costs` where it matters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from gulliver.errors import GulliverError
from gulliver.hardware import linear_flops
from gulliver.parallel.pipeline._stack import Stack, units_of
from gulliver.solve import chain_times, partition_chain


@dataclass(frozen=True)
class Cut:
    """An assignment of a model's blocks to stages."""

    # Stage k has the blocks from ``bounds[k]`` up to, without, ``bounds[k + 1]``.
    bounds: tuple[int, ...]
    costs: tuple[float, ...]  # Cost of each block, with what lies around it, in any unit
    times: tuple[float, ...]  # Cost of each stage, in that unit
    lower: float  # No cut has a slowest stage below this

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Blocks of each stage."""
        return tuple(b - a for a, b in itertools.pairwise(self.bounds))

    def __str__(self) -> str:
        slowest, mean = max(self.times), sum(self.times) / len(self.times)
        imbalance = slowest / mean - 1 if mean else 0.0
        return (
            f"{' + '.join(map(str, self.sizes))} blocks, slowest stage {imbalance:.1%} over the "
            "mean"
        )


def block_costs(model: nn.Module, stack: Stack) -> list[float]:
    """Forward FLOPs of each block for one token, with those of the modules that go with it."""
    paths = dict(model.named_modules())
    costs = [_work(paths[path]) for path in stack.blocks]
    for unit in units_of(model, stack):
        if unit.home is not None:
            costs[unit.home] += _work(paths[unit.path])
    return costs


def _work(module: nn.Module) -> float:
    weights = 0
    for inner in module.modules():
        if isinstance(inner, nn.Embedding):
            continue
        weights += sum(p.numel() for p in inner.parameters(recurse=False) if p.ndim > 1)
    return linear_flops(weights)


def cut(
    model: nn.Module,
    stack: Stack,
    stages: int,
    *,
    at: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
    crossing: Sequence[float] | None = None,
    memory: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
) -> Cut:
    """Assigns the blocks of a model to stages so that the slowest stage is as fast as possible.

    Args:
        model: whole; its parameters may be on meta.
        stack: blocks of the model.
        stages: how many to make: ranks of the pipeline times stages of each rank.
        at: blocks of each stage, first to last, instead of the best cut; or the number of the
            first block of each stage but the first.
        costs: cost of each block, in any unit; None predicts them.
        speeds: relative speed of each stage's device; None: all equal.
        crossing: what a cut before each block costs, in the unit of `costs`.
        memory: bytes that each block takes.
        limits: bytes that each stage may take.

    Returns:
        The cut.

    Raises:
        GulliverError: fewer blocks than stages, or an `at` that does not deal all blocks.
    """
    count = len(stack.blocks)
    if count < stages:
        raise GulliverError(
            f"the model has {count} blocks ({', '.join(stack.lists) or 'its own'}), too few for "
            f"{stages} stages: at most {count} stages"
        )
    known = list(costs) if costs is not None else block_costs(model, stack)
    if len(known) != count:
        raise GulliverError(f"costs has {len(known)} entries for {count} blocks")
    if at is None:
        limited = {"memory": memory, "limits": limits}
        found = partition_chain(known, stages, speeds=speeds, crossing=crossing, **limited)
        return Cut(found.bounds, tuple(known), found.times, found.lower)
    bounds = _bounds(list(at), stages, count)
    times = chain_times(known, bounds, speeds, crossing)
    return Cut(bounds, tuple(known), times, partition_chain(known, stages, speeds=speeds).lower)


def _bounds(at: list[int], stages: int, count: int) -> tuple[int, ...]:
    sizes = [0, *itertools.accumulate(at)]
    given = sizes if len(at) == stages else [0, *at, count]
    steps = [b - a for a, b in itertools.pairwise(given)]
    if len(given) != stages + 1 or given[-1] != count or min(steps) < 1:
        raise GulliverError(
            f"cut={at} does not deal {count} blocks to {stages} stages: give the blocks of each "
            f"stage ({stages} numbers of at least 1 that add up to {count}), or the first block "
            "of each stage but the first"
        )
    return tuple(given)
