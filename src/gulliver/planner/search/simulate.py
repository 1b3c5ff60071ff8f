"""Simulates a step of a grid event by event, and the weak scaling of a grid.

The search prices messages in closed form. Here each rank runs its computations in order and starts
and waits for messages as a run does: chunk by chunk, with the prefetcher's rules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gulliver.comm.collectives import MARGIN, fastest_torus
from gulliver.hardware.costs import (
    Axes,
    collective_seconds,
    torus_links,
    zero_collectives,
)
from gulliver.hardware.step import exposed_seconds
from gulliver.memory.prefetch import Presence
from gulliver.parallel.pipeline.schedules import STYLES, computations
from gulliver.parallel.zero.memory import ChunkBytes, ImaginedChunk, StepReplay
from gulliver.parallel.zero.reduce import IN_FLIGHT
from gulliver.planner.predict import hop_message
from gulliver.planner.search.facts import Grid
from gulliver.planner.search.rank_bytes import AHEAD, MIB, stages_of
from gulliver.planner.search.score import Scorer
from gulliver.solve.timeline import (
    BACKWARD,
    FORWARD,
    INPUTS,
    WEIGHTS,
    Act,
    Action,
    RankProgram,
    Work,
    inputs_of,
    output_of,
    simulate,
)

CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_CHUNKS = 1000
"""Chunk sizes in MiB that weak scaling tries; small ones only if they do not make more chunks."""
STEPS = 3  # simulated steps; the first one begins without gathers in flight


# [Note: one rank of each kind] Ranks that differ only in their data, sequence and tensor
# coordinates run the same program and start their messages at the same times, so they never wait
# for each other: one rank for each pipeline coordinate stands for all. Tests compare this with
# all ranks of small worlds.
def simulate_step(scorer: Scorer, grid: Grid, torus: Sequence[int] = ()) -> float:
    """Seconds of a step; with several replicas, ZeRO needs `chunk_mb`, and may use a torus."""
    ranks = list[RankProgram]()
    for stage, row in enumerate(step_actions(scorer, grid, torus)):
        names = {action.axis for action in row}
        groups = {name: (-1 if name == "pipeline" else stage, 1) for name in names}
        ranks.append(RankProgram(row, groups))
    return step_seconds(ranks)


def step_seconds(ranks: Sequence[RankProgram]) -> float:
    marks = simulate(ranks).marks
    return (marks[-1] - marks[0]) / (STEPS - 1)


def step_actions(scorer: Scorer, grid: Grid, torus: Sequence[int] = ()) -> list[list[Action]]:
    """Lists the actions of a rank at each pipeline coordinate, in `STEPS` steps."""
    return [_StepProgram(scorer, grid, n, torus).actions() for n in range(grid.axes.pipeline)]


class _Part(NamedTuple):
    """A share of a block's computation, and the chunk with its parameters."""

    block: int
    chunk: int | None
    share: float


class _StepProgram(StepReplay):
    """Lists the actions of a rank, with the rules of `StepReplay` for chunks."""

    def __init__(self, scorer: Scorer, grid: Grid, rank: int, torus: Sequence[int]) -> None:
        self._scorer, self._grid, axes = scorer, grid, grid.axes
        facts, links = scorer.facts, scorer.links(axes)
        folded = axes.pipeline > 1 and STYLES[grid.schedule].folded
        self._numbers = [
            stages_of(n, axes.pipeline, grid.chunks, folded) for n in range(axes.pipeline)
        ]
        self._rank, self._stages = rank, axes.pipeline * grid.chunks
        self._blocks = self._blocks_of()
        self._parts = {stage: list[_Part]() for stage in self._blocks}
        super().__init__(self._packed(), grid.stage, AHEAD, IN_FLIGHT)
        several = axes.data * axes.sequence > 1
        self._replicas: Axes = links["replicas"] if several else ()
        if several and torus:
            self._replicas = torus_links(scorer.cluster, torus)
        self._actions, self._serial, self._steps = list[Action](), 0, 0
        # Axis and key of the last message of each chunk.
        self._last = dict[tuple[str, int], tuple[str, Hashable]]()
        forward, backward = scorer.passes(grid)
        costs = [part.forward_s + part.backward_s for part in facts.parts] or [1.0]
        costs[-1] += facts.outside.forward_s + facts.outside.backward_s
        share = 1 / sum(costs) / grid.micro_batches
        self._passes = {
            FORWARD: [forward * cost * share for cost in costs],
            BACKWARD: [backward * cost * share for cost in costs],
        }
        self._inside = _inside(scorer, grid)
        self._hop = 0.0
        if axes.pipeline > 1:
            sent = facts.hidden * (scorer.batch // axes.data) // grid.micro_batches
            self._hop = hop_message(links, sent).seconds
        whole = sum(chunk.size.whole for chunk in self.chunks)
        own = sum(sum(self._passes[FORWARD][b] for b in s) for s in self._blocks.values())
        own /= sum(self._passes[FORWARD])
        update = scorer.update(grid, own)
        self._updates = [update * chunk.size.whole / max(1, whole) for chunk in self.chunks]

    def actions(self) -> list[Action]:
        for step in range(STEPS):
            self._steps = step
            self._step()
            self._actions.append(Action(Act.MARK))
        return self._actions

    # Blocks, stages and chunks of a rank.

    def _blocks_of(self) -> dict[int, list[int]]:
        if self._stages == 1:
            return {0: list(range(max(1, len(self._scorer.facts.parts))))}
        sizes, _ = self._scorer.dealt(self._stages)
        starts = [0, *itertools.accumulate(sizes)]
        return {n: list(range(starts[n], starts[n + 1])) for n in self._numbers[self._rank]}

    def _packed(self) -> list[ChunkBytes]:
        """Packs trained parameters into chunks, and splits each stage into parts by chunk."""
        facts, shared = self._scorer.facts, self._scorer.shared(self._grid.axes)
        assert shared is not None, "only grids with divisible tensors are simulated"
        before, after, _ = shared.ends
        item = facts.item * facts.trained / max(1, facts.parameters)
        last = max(1, len(facts.parts)) - 1
        capacity, found = max(1, self._grid.chunk_mb) * MIB, list[int]()
        for stage, blocks in self._blocks.items():
            for block in blocks:
                inside = [*shared.sizes[block]] if block < len(shared.sizes) else []
                inside += after if block == last else ()
                # An embedding only looks up rows, which takes almost no time.
                embedded = [(size, 0.0) for size in before if block == 0]
                computed = sum(inside)
                if not computed:
                    self._parts[stage].append(_Part(block, None, 1.0))
                for size, share in (*embedded, *((n, n / computed) for n in inside)):
                    count = int(item * size)
                    if found and found[-1] + count <= capacity:
                        found[-1] += count
                    else:
                        found.append(count)
                    self._parts[stage].append(_Part(block, len(found) - 1, share))
        return [ChunkBytes((str(n),), size, 0) for n, size in enumerate(found)]

    # A step.

    def _step(self) -> None:
        grid = self._grid
        works = list(self._order())
        final = max(n for n, work in enumerate(works) if work[0] != FORWARD)
        line = grid.axes.pipeline > 1
        for number, work in enumerate(works):
            for need in inputs_of(work, self._stages) if line else ():
                near = need[1] in self._numbers[self._rank]
                self._add(Act.WAIT, 0.0 if near else self._hop, (self._steps, need), "pipeline")
            each = self.stage >= 2 and work[0] != FORWARD
            reduces = not line and (number == final or each)
            self._run(work, reduces)
            if line:
                self._add(Act.START, 0.0, (self._steps, output_of(work)), "pipeline")
        if line:
            # A pipeline reduces its gradients once, when the schedule has ended.
            for chunk in reversed(self.chunks):
                self._reduce(chunk)
        self._end()

    def _order(self) -> Iterator[Work]:
        grid = self._grid
        if grid.axes.pipeline > 1:
            micro = grid.micro_batches
            yield from computations(grid.schedule, self._rank, self._numbers, micro)
            return
        for micro in range(grid.micro_batches):
            yield FORWARD, 0, micro
            yield BACKWARD, 0, micro

    def _run(self, work: Work, reduces: bool) -> None:
        kind, stage, _ = work
        forward = kind == FORWARD
        share = 0.5 if kind in (INPUTS, WEIGHTS) else 1.0
        if self._grid.recomputed:  # then no backward is split
            share = float(kind != WEIGHTS)
        if kind != WEIGHTS:
            self._pass("FORWARD" if forward else "BACKWARD")
        parts = self._parts[stage] if forward else self._parts[stage][::-1]
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            if part.chunk is not None and kind != WEIGHTS:
                self._use(self.chunks[part.chunk])
            seconds = self._passes[FORWARD if forward else BACKWARD][part.block]
            self._add(Act.COMPUTE, share * part.share * seconds)
            if kind != WEIGHTS and (following is None or following.block != part.block):
                for axis, each in self._inside.get(forward, {}).items():
                    self._exchange(axis, each)
            ends = following is None or following.chunk not in (part.chunk, None)
            if reduces and part.chunk is not None and ends:
                self._collect(self.chunks[part.chunk])  # may wait for the last micro-batch's
                self._reduce(self.chunks[part.chunk])
        if kind != WEIGHTS:
            self._pass("forward ended" if forward else "backward ended")

    def _pass(self, what: str) -> None:
        if self.stage == 3:
            self.passes(what, -1)

    def _use(self, chunk: ImaginedChunk) -> None:
        if self.stage == 3:
            self.engine.use(chunk)
        else:
            self.finish(chunk)

    def _end(self) -> None:
        for chunk in self.chunks:
            self.wait_reduction(chunk)
            self._add(Act.COMPUTE, self._updates[chunk.number])
            if self._replicas and self.stage in (1, 2):
                chunk.enter(Presence.ARRIVING)
                self.gathers(chunk, False)
        self._pass("released")
        self._pass("prefetched")

    # Messages for the chunks, called by `StepReplay`.

    def finish(self, chunk: ImaginedChunk) -> None:
        if chunk.presence is Presence.ARRIVING:
            self._wait(chunk, "gather")
        super().finish(chunk)

    def gathers(self, chunk: ImaginedChunk, fresh: bool) -> None:
        self._start(chunk, "gather", "all_gather")

    def sends(self, chunk: ImaginedChunk) -> None:
        self._start(chunk, "reduce", "reduce_scatter" if self.stage else "all_reduce")

    def lands(self, chunk: ImaginedChunk) -> None:
        self._wait(chunk, "reduce")

    def collects(self, chunk: ImaginedChunk) -> None: ...

    def gives_back(self, chunk: ImaginedChunk) -> None: ...

    def _start(self, chunk: ImaginedChunk, name: str, collective: str) -> None:
        if not self._replicas:
            return
        self._serial += 1
        self._add(Act.COMPUTE, self._scorer.cluster.device.launch_s)
        legs = _legs(collective, self._replicas, chunk.size.whole)
        lane = _lane("replicas", self._replicas)
        for place, seconds in legs:
            self._last[name, chunk.number] = f"replicas {place}", (self._serial, place)
            self._add(Act.START, seconds, (self._serial, place), f"replicas {place}", lane)
        # Compute time lost on a rank whose core also sends the messages.
        taken = (1 - self._scorer.free) * sum(seconds for _, seconds in legs)
        self._add(Act.COMPUTE, taken)

    def _wait(self, chunk: ImaginedChunk, name: str) -> None:
        if self._replicas:
            axis, key = self._last[name, chunk.number]
            self._add(Act.WAIT, 0.0, key, axis)

    def _exchange(self, axis: str, seconds: float) -> None:
        """Sends and waits for the messages between the ranks of one replica in a block."""
        self._serial += 1
        lane = _lane(axis, self._scorer.links(self._grid.axes)[axis])
        self._add(Act.START, seconds, self._serial, axis, lane)
        self._add(Act.WAIT, 0.0, self._serial, axis)

    def _add(
        self,
        act: Act,
        seconds: float = 0.0,
        key: Hashable = None,
        axis: str = "",
        lane: str | None = None,
    ) -> None:
        self._actions.append(Action(act, seconds, key, axis, lane))


def _lane(axis: str, links: Axes) -> str:
    """Returns the queue of an axis: all axes over sockets share one, each ring has its own."""
    return axis if all(link.ring for _, link in links) else "sockets"


def _legs(collective: str, axes: Axes, count: int) -> list[tuple[int, float]]:
    """Splits a collective over a torus into one per axis; returns axis indices and seconds."""
    inwards = list(range(1, len(axes)))
    left = [count / math.prod(size for size, _ in axes[n + 1 :]) for n in range(len(axes))]

    def legs(name: str, places: Iterable[int]) -> list[tuple[int, float]]:
        return [(n, collective_seconds([axes[n]], name, int(left[n]))) for n in places]

    if collective == "all_reduce":
        outwards = reversed(inwards)
        scatters = legs("reduce_scatter", outwards)
        return scatters + legs("all_reduce", [0]) + legs("all_gather", inwards)
    places = range(len(axes))
    return legs(collective, places if collective == "all_gather" else reversed(places))


def _inside(scorer: Scorer, grid: Grid) -> dict[bool, dict[str, float]]:
    """Returns seconds per block of messages inside a replica, by pass (True: forward) and axis."""
    links, found = scorer.links(grid.axes), dict[bool, dict[str, float]]()
    times = grid.micro_batches * max(1, len(scorer.facts.blocks))
    for message in scorer.messages(grid):
        axis = next((n for n in ("tensor", "sequence") if message.axes is links.get(n)), None)
        axis = "sequence" if axis is None and message.kind == "all_to_all" else axis
        if axis is None:
            continue  # between stages
        seconds = message.seconds / times
        shares = {True: 0.5, False: 0.5}
        if message.hidden:
            seconds = exposed_seconds([message], 0.0) / times
            shares = {message.beside == "forward": 1.0}
        for forward, share in shares.items():
            mine = found.setdefault(forward, {})
            mine[axis] = mine.get(axis, 0.0) + share * seconds
    return found


# Weak scaling: the same work for each replica on more and more of them.


@dataclass(frozen=True)
class ScalingPoint:
    """A grid on a number of ranks, with the chunk size and the torus that are fastest."""

    grid: Grid
    # Sizes of the axes of ZeRO's collectives, outer to inner; empty if they are flat.
    torus: tuple[int, ...]
    # Seconds of a step.
    seconds: float
    # Samples per second and rank, relative to the smallest number of ranks.
    efficiency: float = 1.0


def weak_scaling(scorer: Scorer, grid: Grid) -> list[ScalingPoint]:
    """Simulates a grid with 1, 2, 4, ... replicas and a fixed number of samples per replica."""
    most, each = grid.axes.data, scorer.batch // grid.axes.data
    sizes = sorted({*(1 << n for n in range(most.bit_length())), most})
    found = list[ScalingPoint]()
    for size in sizes:
        own = replace(grid, axes=replace(grid.axes, data=size), chunk_mb=0)
        found.append(fastest(scorer.resized(own.axes.size, each * size), own))
    first = found[0].seconds
    return [replace(point, efficiency=first / point.seconds) for point in found]


def fastest(scorer: Scorer, grid: Grid) -> ScalingPoint:
    own = scorer.facts.item * scorer.facts.trained // (grid.axes.tensor * grid.axes.pipeline)
    chunks = [size for size in CHUNKS if own < MOST_CHUNKS * size * MIB] or CHUNKS[-1:]
    if grid.axes.data * grid.axes.sequence == 1:
        return ScalingPoint(grid, (), simulate_step(scorer, grid))
    found = list[ScalingPoint]()
    for chunk in chunks:
        sized = replace(grid, chunk_mb=chunk)
        torus = best_torus(scorer, sized)
        found.append(ScalingPoint(sized, torus, simulate_step(scorer, sized, torus)))
    return min(found, key=lambda point: point.seconds)


def best_torus(scorer: Scorer, grid: Grid) -> tuple[int, ...]:
    """Returns the torus that `axes="auto"` would choose for a chunk; empty if none is faster."""
    if grid.axes.cuts_model:
        return ()
    collectives = zero_collectives(min(grid.stage, 2), [grid.chunk_mb * MIB])
    sizes, seconds, flat_s = fastest_torus(scorer.cluster, collectives)
    return sizes if seconds < (1 - MARGIN) * flat_s else ()
