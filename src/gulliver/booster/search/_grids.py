"""The grids of a search: every combination of axes and choices that a plugin can run.

No grid is left out by a rule of thumb: `grids_of` yields all that divide, and the search skips what
a bound proves to be no better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from gulliver.errors import GulliverError
from gulliver.parallel.pipeline import STYLES, check_counts
from gulliver.plan import SHARED_BY_SEQUENCE

STAGES = (0, 1, 2, 3)
CHUNKS_MB = (4, 8, 16, 32)
"""Sizes of a chunk of ZeRO: the first is what a plugin takes unasked."""


@dataclass(frozen=True, order=True)
class Axes:
    """Sizes of the axes of a mesh, and its sequence mode."""

    # Number of replicas that read different samples.
    data: int = 1
    # Number of ranks that share the sequences of a replica.
    sequence: int = 1
    # Number of ranks that share its matrices.
    tensor: int = 1
    # Number of stages' ranks.
    pipeline: int = 1
    # Sequence mode, as `HybridParallelPlugin` names it; empty for none.
    mode: str = ""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.sequence * self.tensor * self.pipeline

    @property
    def cuts_model(self) -> bool:
        """Whether a model is sharded over several ranks."""
        return self.size > self.data


@dataclass(frozen=True, order=True)
class Grid:
    """Axes and choices of a parallel run."""

    axes: Axes
    # Stage of ZeRO over data and sequence ranks.
    stage: int = 0
    # Parts of a replica's batch, one after the other: those of a pipeline, or backwards that
    # accumulate.
    micro_batches: int = 1
    # Order of a pipeline's forwards and backwards; empty without one.
    schedule: str = ""
    # Stages on each rank of a pipeline.
    chunks: int = 1
    # Number of blocks that backward computes again.
    recomputed: int = 0
    # Size of a chunk of ZeRO in MiB; 0 chooses the best.
    chunk_mb: int = 0
    # Tier that state is offloaded to, such as ``host``; empty keeps all on the device.
    offload: str = ""

    def __str__(self) -> str:
        names = (("data", "dp"), ("sequence", "sp"), ("tensor", "tp"), ("pipeline", "pp"))
        sizes = [f"{short} {getattr(self.axes, name)}" for name, short in names]
        found = [text for text in sizes if not text.endswith(" 1")] or ["1 rank"]
        found += [self.axes.mode] if self.axes.mode else []
        found += [f"ZeRO {self.stage}"] if self.axes.data * self.axes.sequence > 1 else []
        if self.micro_batches > 1:
            found.append(f"{self.micro_batches} micro-batches")
        found += [self.schedule] if self.schedule else []
        blocks = "1 block" if self.recomputed == 1 else f"{self.recomputed} blocks"
        found += [f"{blocks} recomputed"] if self.recomputed else []
        found += [f"off-load to {self.offload}"] if self.offload else []
        return ", ".join(found)


def divisors(number: int) -> list[int]:
    """Divisors of a number, in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def axes_of(ranks: int, batch: int, blocks: int, modes: Sequence[str]) -> Iterator[Axes]:
    """Every mesh that divides the batch and the blocks."""
    apart = [mode for mode in modes if mode in SHARED_BY_SEQUENCE]
    for pipeline in divisors(ranks):
        if pipeline > max(1, blocks):
            continue
        for tensor in divisors(ranks // pipeline):
            for sequence in divisors(ranks // pipeline // tensor):
                data = ranks // pipeline // tensor // sequence
                if batch % data:
                    continue
                if sequence > 1:
                    for mode in apart:
                        yield Axes(data, sequence, tensor, pipeline, mode)
                    continue
                yield Axes(data, sequence, tensor, pipeline)
                if tensor > 1 and "split_gather" in modes:
                    yield Axes(data, sequence, tensor, pipeline, "split_gather")


FORWARD_ONLY = ("gpipe", "interleaved")
"""Schedules that differ where there is no backward."""


def grids_of(axes: Axes, batch: int, blocks: int, trains: bool = True) -> Iterator[Grid]:
    """Every grid on a mesh, nothing recomputed."""
    stages = STAGES if axes.data * axes.sequence > 1 else (0,)
    for micro in divisors(batch // axes.data):
        if axes.pipeline == 1:
            yield from (Grid(axes, stage, micro) for stage in stages)
            continue
        for name, style in STYLES.items():
            cuts = style.chunks * axes.pipeline
            if not trains and name not in FORWARD_ONLY:
                continue
            if cuts > blocks or not _ordered(name, cuts, axes.pipeline, micro):
                continue
            yield from (Grid(axes, stage, micro, name, style.chunks) for stage in stages)


@cache
def _ordered(schedule: str, stages: int, ranks: int, micro_batches: int) -> bool:
    """Whether a schedule supports this number of micro-batches."""
    try:
        check_counts(schedule, stages, ranks, micro_batches)
    except GulliverError:
        return False
    return True
