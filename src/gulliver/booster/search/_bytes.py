"""Bytes that a rank holds on a grid: model state, what it keeps for backward, what it works with.

State is that of ZeRO (Rajbhandari et al. 2020), what is kept that of the micro-batches whose
backward has not run, under the schedule of the pipeline. A plan that is made of a grid has its own
bytes, chunk by chunk; these are for comparing thousands of grids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gulliver.booster.search._facts import Facts, Part, Shared
from gulliver.booster.search._grids import Grid
from gulliver.plan import SHARED_BY_TENSOR, MemoryPlan

MIB = 1 << 20
WINDOW = 4
"""Chunks that are whole at once at stage 3: in use, ahead of use, and being reduced."""


@dataclass(frozen=True)
class Stage:
    """The blocks of a rank, summed up for one sample.

    Attributes:
        count: number of blocks.
        parameters: elements of their parameters.
        saved: bytes that they keep for the backward.
        output: bytes of what they hand on, all together.
        largest: most bytes that one of them keeps.
        working: most bytes that one of them works with.
        first: whether what runs before all blocks, such as embeddings, is there too.
        last: whether head and loss are.
    """

    count: int
    parameters: int
    saved: int
    output: int
    largest: int
    working: int
    first: bool
    last: bool


def summed(parts: Sequence[Part], first: bool, last: bool) -> Stage:
    """Sums up blocks; arguments as of `Stage`."""
    return Stage(
        len(parts),
        sum(part.parameters for part in parts),
        sum(part.saved for part in parts),
        sum(part.output for part in parts),
        max((part.saved + part.working for part in parts), default=0),
        max((part.working for part in parts), default=0),
        first,
        last,
    )


def held_bytes(
    facts: Facts, grid: Grid, shared: Shared, stage: Stage, flying: float, batch: int
) -> tuple[MemoryPlan, int]:
    """Bytes that a rank holds by kind, and those that a block works with besides.

    Args:
        facts: model and batch in numbers.
        grid: the grid.
        shared: what tensor ranks share.
        stage: blocks of the rank.
        flying: micro-batches whose backward has not run.
        batch: samples of a step.
    """
    axes = grid.axes
    before, after = facts.ends
    # What both ends use, such as a tied embedding, a rank with both has once.
    outside = min(stage.first * before + stage.last * after, facts.outside.parameters)
    own = stage.parameters + outside
    own = int(own * (1 - shared.parameters * (1 - 1 / axes.tensor)))
    state = state_bytes_of(facts, grid, own, axes.data * axes.sequence, axes.tensor)
    samples = batch // axes.data // grid.micro_batches
    divided, whole = (1 - shared.saved * (1 - 1 / axes.tensor)) / axes.sequence, 1 / axes.sequence
    if axes.mode in SHARED_BY_TENSOR:
        divided = whole = 1 / axes.tensor
    again = grid.recomputed / max(1, len(facts.blocks))
    kept = samples * (stage.saved * (1 - again) * divided + stage.output * again * whole)
    working = samples * (stage.largest if again else stage.working) * divided
    if stage.last:
        # Of head and loss only one micro-batch is under way.
        kept += samples * facts.outside.saved * divided / flying
        most = min(facts.outside.working, facts.outside.saved)
        working = max(working, samples * most * divided)
    return replace(state, activations=int(kept * flying)), int(working)


def stages_of(rank: int, ranks: int, chunks: int, folded: bool) -> list[int]:
    """Numbers of the stages on a rank of a pipeline."""
    if folded:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + n * ranks for n in range(chunks)]


def under_way(grid: Grid, rank: int) -> float:
    """Micro-batches whose forward has run on a rank and whose backward has not, at most.

    In parts of all the rank's stages, by the definition of the schedules (Narayanan et al. 2021;
    Qi et al. 2024).
    """
    ranks, chunks, micro = grid.axes.pipeline, grid.chunks, grid.micro_batches
    if ranks == 1:
        return 1
    if grid.schedule == "gpipe":
        return micro
    if grid.schedule in ("zbv", "dualpipev"):
        return min(micro, ranks + (grid.schedule == "dualpipev") / 2)
    if chunks > 1:
        return min(micro, ((chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1) / chunks)
    return min(micro, ranks - rank)


def state_bytes_of(facts: Facts, grid: Grid, own: int, replicas: int, tensor: int) -> MemoryPlan:
    """Bytes of parameters, gradients and optimizer state (ZeRO, Rajbhandari et al. 2020).

    Args:
        facts: the model.
        grid: grid, whose stage of ZeRO and size of a chunk count.
        own: elements of the rank's parameters, before they are sharded.
        replicas: number of ranks that share them.
        tensor: number of ranks that share each.
    """
    learns = facts.trained / max(1, facts.parameters)
    chunk = max(grid.chunk_mb * MIB, facts.item * facts.largest_in_blocks // tensor)
    # An embedding is a chunk of its own, of which one is whole at a time.
    widest = max(chunk, facts.item * facts.largest // tensor)
    window = min(widest + (WINDOW - 1) * chunk, facts.item * own)
    parts = replicas if grid.stage else 1
    parameters = facts.item * own
    if grid.stage == 3:
        # Of 16 bits, the shards are the float32 copies.
        parameters = window + (0 if facts.copied else facts.item * own // replicas)
    gradients = facts.item * own * learns
    if grid.stage >= 2:
        gradients = min(gradients, window) + 4 * own * learns / replicas
    elif facts.copied:
        gradients += 4 * own * learns / parts
    copies = 4 if facts.copied else 0
    state = own * learns * (4 * facts.states + copies) / parts
    return MemoryPlan(int(parameters), int(gradients), int(state))
