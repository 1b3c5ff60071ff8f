"""Predicts time and memory of a grid with the formulas for plans, without creating a plan.

Bytes refer to the fullest rank: parameters, gradients and optimizer state of its stage,
activations of the micro-batches in flight, and the workspace of one block.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from gulliver.errors import GulliverError
from gulliver.hardware.attention import AttentionBytes as Volume
from gulliver.hardware.cluster import Cluster, Link
from gulliver.hardware.costs import zero_collectives
from gulliver.hardware.step import Message, exposed_seconds, pipeline_seconds, predict_step
from gulliver.parallel.pipeline.schedules import STYLES
from gulliver.plan.plan import Plan
from gulliver.plan.results import MemoryPlan, Seconds, TierTraffic
from gulliver.plan.tree import Mesh, Model, PipelineLayout, SequenceLayout, Work, ZeroPlan
from gulliver.planner.predict import (
    attention_sends,
    axis_links,
    by_kind,
    hop_message,
    in_parts,
    model_messages,
    passes,
    zero_messages,
)
from gulliver.planner.search.facts import CHUNKS_MB, Axes, Facts, Grid, TensorShares
from gulliver.planner.search.rank_bytes import (
    MIB,
    RankBlocks,
    RankBytes,
    put_off,
    stages_of,
    under_way,
)

ADDING_UP = ("compute", "recompute", "exposed", "bubble", "update")
"""Kinds of time that add up to a step."""


# [Note: recomputation] More recomputed blocks never make a step faster or larger. So the least
# number that fits is the best, and is found by bisection.
@dataclass(frozen=True)
class Scored:
    """A grid with its predicted costs."""

    grid: Grid
    # Seconds of a step by kind.
    seconds: Seconds
    # Bytes of the fullest rank.
    memory: MemoryPlan
    # Bytes of that rank that are neither state nor saved for backward: workspace of a block.
    working: int = 0
    # Samples per step, for the throughput.
    samples: int = 0
    # Offloaded state and its traffic; then `working` is included in the activations.
    moved: TierTraffic | None = None

    @property
    def bytes(self) -> int:
        held = self.memory
        state = held.parameters + held.gradients + held.optimizer_state
        return state + held.activations + self.working

    @property
    def seconds_by_kind(self) -> dict[str, float]:
        return {kind: getattr(self.seconds, kind) for kind in ADDING_UP}

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        return {**vars(self.memory), "working": self.working}


class Scorer:
    """Prices grids of one model on one cluster."""

    def __init__(
        self, facts: Facts, cluster: Cluster, batch: int, device: str, free: float
    ) -> None:
        self.facts, self.cluster, self.batch = facts, cluster, batch
        self.device, self.free = device, free
        self.links = lru_cache(None)(self._links_of)
        self.dealt = lru_cache(None)(self._dealt_of)
        self._work = lru_cache(None)(self._work_of)
        self._summed = lru_cache(None)(self._summed_of)
        self._sharded = lru_cache(None)(self._sharded_of)
        self._chunk = lru_cache(None)(self._chunk_of)
        self._volume = lru_cache(None)(self._volume_of)
        self._ends = lru_cache(None)(self._ends_of)
        self._held = lru_cache(256)(self._held_of)
        self._bytes = RankBytes(facts, batch)

    def resized(self, ranks: int, batch: int) -> Scorer:
        return Scorer(self.facts, self.cluster.resized(ranks), batch, self.device, self.free)

    def shared(self, axes: Axes) -> TensorShares | None:
        return self.facts.shared(axes.tensor)

    def why_unsupported(self, axes: Axes) -> str:
        """Explains why a model cannot run on a mesh; empty if it can."""
        shared = self.shared(axes)
        if shared is None:
            return self.facts.refused[axes.tensor]
        if axes.tensor > 1 and not shared.seconds:
            return "tensor ranks would share nothing that the model computes"
        degree = axes.sequence if axes.mode != "split_gather" else axes.tensor
        if self.facts.tokens % degree:
            return f"{self.facts.tokens} tokens of a sample do not divide over {degree} ranks"
        try:
            self._volume(axes, self.batch // axes.data)
        except GulliverError as error:
            return str(error)
        return ""

    def bound(self, axes: Axes) -> float:
        """Lower bound on the step time of all grids on a mesh: compute and exposed messages."""
        shared = self.shared(axes)
        assert shared is not None, "grids are priced whose tensors can be cut"
        share = self.share(axes, shared)
        samples = self.batch // axes.data
        compute = share * samples * (self.facts.forward_s + self.facts.backward_s) / axes.pipeline
        plan = self._plan(Grid(axes), self._work(axes, samples, 1))
        open_s = sum(
            m.seconds
            for m in model_messages(plan, self.links(axes), 0.0, 0.0, 1.0, Volume())
            if not m.hidden and m.kind != "all_to_all"
        )
        return compute + self.free * open_s / axes.pipeline

    def work(self, grid: Grid) -> Work:
        backwards = 1 if grid.axes.pipeline > 1 else grid.micro_batches
        work = self._work(grid.axes, self.batch // grid.axes.data, backwards)
        return replace(work, peak_rank=self.other_bytes(grid)) if grid.offload else work

    def score(self, grid: Grid) -> Scored:
        """Prices a grid with its best chunk size."""
        grid = self.with_best_chunk_size(grid)
        axes = grid.axes
        shared = self.shared(axes)
        assert shared is not None, "grids are priced whose tensors can be cut"
        work, share = self.work(grid), self.share(axes, shared)
        forward, backward = passes(work, share, axes.tensor, grid.micro_batches)
        repeated, bubble, own = self._again(grid) * work.share_blocks * forward, 0.0, 1.0
        if axes.pipeline > 1:
            bubble, own = self._waits(grid, forward, backward + repeated)
        sharded = grid.axes, grid.stage, grid.micro_batches, self._part(grid), grid.chunk_mb
        messages = [*self._sharded(*sharded), *self.messages(grid, own)]
        costs = predict_step(
            (own * forward, own * backward),
            own * repeated,
            self.update(grid, own),
            messages,
            bubble,
            self.free,
            self.cluster.device.launch_s,
        )
        seconds = by_kind(costs)
        memory, working = self._held(grid)
        return Scored(grid, seconds, memory, working, self.batch)

    def least(self, grid: Grid, limit: int | None) -> Scored | None:
        """The fitting grid with the fewest recomputed blocks; None if none fits."""
        if limit is None or self.bytes_of(grid) <= limit:
            return self.score(grid)
        count = len(self.facts.recomputable)
        if not count or self.bytes_of(replace(grid, recomputed=count)) > limit:
            return None
        low, high = 1, count
        while low < high:
            middle = (low + high) // 2
            fits = self.bytes_of(replace(grid, recomputed=middle)) <= limit
            low, high = (low, middle) if fits else (middle + 1, high)
        return self.score(replace(grid, recomputed=low))

    def bytes_of(self, grid: Grid) -> int:
        memory, working = self._held(self.with_best_chunk_size(grid))
        return sum(vars(memory).values()) + working

    def other_bytes(self, grid: Grid) -> int:
        ends = self._ends(grid.axes.pipeline, grid.chunks, self._folded(grid))
        count = self._bytes.other
        return max(count(grid, stage, under_way(grid, n), put_off(grid, n)) for n, stage in ends)

    def moments(self, grid: Grid) -> list[tuple[float, int]]:
        """Bytes excluding state at each point of a step without a pipeline."""
        (stage,) = self._stages(grid)
        return self._bytes.moments(grid, stage)

    def resting(self, grid: Grid) -> tuple[int, int]:
        """Minimum bytes of state between steps at stage 3: total and trained."""
        return min(self._bytes.resting(grid, stage) for stage in self._stages(grid))

    # Seconds.

    def _waits(self, grid: Grid, forward: float, backward: float) -> tuple[float, float]:
        """Seconds that the first rank waits for other stages, and its share of the work."""
        axes, micro = grid.axes, grid.micro_batches
        if not forward:
            return 0.0, 1.0 / axes.pipeline
        sent = self.facts.hidden * (self.batch // axes.data) // micro
        link = hop_message(self.links(axes), sent).seconds
        _, shares = self.dealt(axes.pipeline * grid.chunks)
        folded = STYLES[grid.schedule].folded
        whole = forward + backward
        ranks = [
            sum(shares[n] for n in stages_of(rank, axes.pipeline, grid.chunks, folded))
            * (whole / micro)
            for rank in range(axes.pipeline)
        ]
        costs = grid.schedule, ranks, backward / whole, micro, grid.chunks, link
        seconds = pipeline_seconds(*costs, recomputes=grid.recomputed > 0)
        slowest = micro * max(ranks)
        return seconds - slowest, slowest / whole

    def update(self, grid: Grid, own: float = 1.0) -> float:
        axes = grid.axes
        parts = axes.data * axes.sequence if grid.stage else 1
        return self.facts.update_s * own / axes.tensor / parts

    def _again(self, grid: Grid) -> float:
        return grid.recomputed / max(1, len(self.facts.blocks))

    def share(self, axes: Axes, shared: TensorShares) -> float:
        return (1 - shared.seconds * (1 - 1 / axes.tensor)) / axes.sequence

    def with_best_chunk_size(self, grid: Grid) -> Grid:
        alone = grid.axes.data * grid.axes.sequence == 1
        if grid.chunk_mb or self.facts.chunk_bytes or alone:
            return grid
        chunk = self._chunk(grid.axes, grid.stage, self._part(grid))
        return replace(grid, chunk_mb=chunk)

    def _chunk_of(self, axes: Axes, stage: int, part: float) -> int:
        work, shared = self._work(axes, self.batch // axes.data, 1), self.shared(axes)
        assert shared is not None, "grids are priced whose tensors can be cut"
        share, launch_s = self.share(axes, shared) * part, self.cluster.device.launch_s

        def shown(chunk_mb: int) -> float:
            own = self._sharded(axes, stage, 1, part, chunk_mb)
            forward, backward = (
                [m for m in own if m.beside == name] for name in ("forward", "backward")
            )
            seconds = exposed_seconds(forward, share * work.forward_s)
            seconds += exposed_seconds(backward, share * work.backward_s)
            return seconds + launch_s * sum(m.count for m in own)

        return min(CHUNKS_MB, key=shown)

    def _part(self, grid: Grid) -> float:
        if grid.axes.pipeline == 1:
            return 1.0
        return min(1.0, max(self.dealt(grid.axes.pipeline * grid.chunks)[1]) * grid.chunks)

    def _sharded_of(
        self, axes: Axes, stage: int, times: int, part: float, chunk_mb: int
    ) -> list[Message]:
        facts, line = self.facts, self.links(axes)["replicas"]
        shared = self.shared(axes)
        assert shared is not None, "grids are priced whose tensors can be cut"
        own = facts.item * facts.trained * (1 - shared.parameters * (1 - 1 / axes.tensor)) * part
        number = -(-int(own) // (max(1, chunk_mb) * MIB))
        if not line or not number:
            return []
        size, found = -(-int(own) // number), []
        # The last chunk may need one message less: the difference of two chunk counts is the cost
        # of a chunk.
        one, two = (Counter(zero_collectives(stage, [size] * n)) for n in (1, 2))
        for (kind, count), once in (one if number == 1 else two).items():
            every = once + (number - 2) * (once - one[kind, count]) if number > 1 else once
            found += zero_messages(stage, kind, count, every, line, times)
        return found

    def _links_of(self, axes: Axes) -> dict[str, list[tuple[int, Link]]]:
        return axis_links(Plan(mesh=self._mesh(axes)), self.cluster)

    def messages(self, grid: Grid, own: float = 1.0) -> list[Message]:
        """Messages between the ranks of a replica, for a share of the blocks."""
        axes, work = grid.axes, self.work(grid)
        found = model_messages(
            self._plan(grid, work),
            self.links(axes),
            self._again(grid),
            max(len(self.facts.blocks), 1) * own,
            own,
            self._volume(axes, work.samples),
        )
        return [in_parts(message, grid.micro_batches) for message in found]

    def passes(self, grid: Grid) -> tuple[float, float]:
        """Seconds of a replica's forward and backward over all stages, with recomputation."""
        axes, shared = grid.axes, self.shared(grid.axes)
        assert shared is not None, "grids are priced whose tensors can be cut"
        work, share = self.work(grid), self.share(axes, shared)
        forward, backward = passes(work, share, axes.tensor, grid.micro_batches)
        return forward, backward + self._again(grid) * work.share_blocks * forward

    def _mesh(self, axes: Axes) -> Mesh:
        names = ("pipeline", "data", "sequence", "tensor")
        sizes = {name: getattr(axes, name) for name in names}
        return Mesh(self.device, {n: size for n, size in sizes.items() if size > 1 or n == "data"})

    def _plan(self, grid: Grid, work: Work) -> Plan:
        axes, facts = grid.axes, self.facts
        pipeline = PipelineLayout()
        if axes.pipeline > 1:
            stages, shares = self.dealt(axes.pipeline * grid.chunks)
            pipeline = PipelineLayout(
                grid.schedule or "1f1b", grid.micro_batches, grid.chunks, stages, shares
            )
        ulysses = axes.sequence if axes.mode == "all_to_all" else 1
        return Plan(
            mesh=self._mesh(axes),
            zero=ZeroPlan(stage=grid.stage),
            sequence=SequenceLayout(axes.mode or None, ulysses, 1, axes.sequence // ulysses),
            pipeline=pipeline,
            model=Model("", facts.parameters, facts.trained, ""),
            work=work,
        )

    def _work_of(self, axes: Axes, samples: int, backwards: int) -> Work:
        facts, shared = self.facts, self.shared(axes)
        assert shared is not None, "grids are priced whose tensors can be cut"
        return Work(
            samples=samples,
            tokens=samples * facts.tokens,
            forward_s=samples * facts.forward_s,
            backward_s=samples * facts.backward_s,
            update_s=facts.update_s,
            hidden_bytes=samples * facts.hidden,
            activations=samples * facts.saved,
            reduced_forward=tuple(samples * n for n in shared.forward),
            reduced_backward=tuple(samples * n for n in shared.backward),
            reduced_again=tuple(samples * n for n in shared.again),
            share_blocks=1 - facts.outside.forward_s / max(facts.forward_s, 1e-12),
            share_cut=shared.seconds,
            backwards=backwards,
            launch_forward_s=facts.launches[0],
            launch_backward_s=facts.launches[1],
            weights_s=facts.weights_s,
            attention_forward_s=samples * facts.attention[0],
            attention_backward_s=samples * facts.attention[1],
        )

    def _volume_of(self, axes: Axes, samples: int) -> Volume:
        plan = self._plan(Grid(axes), self._work(axes, samples, 1))
        return attention_sends(plan, self.facts.model)

    def _dealt_of(self, stages: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Blocks of each stage, and its share of the work; the last stage has head and loss."""
        parts, outside = self.facts.parts, self.facts.outside
        costs = [part.forward_s + part.backward_s for part in parts]
        costs[-1] += outside.forward_s + outside.backward_s
        bounds, whole = quick_cut(costs, stages), sum(costs)
        sizes = tuple(b - a for a, b in itertools.pairwise(bounds))
        shares = tuple(sum(costs[a:b]) / whole for a, b in itertools.pairwise(bounds))
        return sizes, shares

    def state_of(self, grid: Grid) -> MemoryPlan:
        grid = self.with_best_chunk_size(grid)
        every = [self._bytes.state(grid, stage) for stage in self._stages(grid)]
        return max(every, key=lambda found: found.total)

    def _stages(self, grid: Grid) -> list[RankBlocks]:
        return self._summed(grid.axes.pipeline, grid.chunks, self._folded(grid))

    def _folded(self, grid: Grid) -> bool:
        return grid.axes.pipeline > 1 and STYLES[grid.schedule].folded

    def _held_of(self, grid: Grid) -> tuple[MemoryPlan, int]:
        ends = self._ends(grid.axes.pipeline, grid.chunks, self._folded(grid))
        held = self._bytes.held
        every = [held(grid, stage, under_way(grid, n), put_off(grid, n)) for n, stage in ends]
        return max(every, key=lambda found: sum(vars(found[0]).values()) + found[1])

    def _ends_of(self, ranks: int, chunks: int, folded: bool) -> list[tuple[int, RankBlocks]]:
        """Pipeline ranks that may be the fullest: both ends, and the rank with the most blocks."""
        stages = self._summed(ranks, chunks, folded)
        fullest = max(range(len(stages)), key=lambda n: stages[n].count)
        return [(n, stages[n]) for n in sorted({0, len(stages) - 1, fullest})]

    def _summed_of(self, ranks: int, chunks: int, folded: bool) -> list[RankBlocks]:
        if ranks == 1:
            return [RankBlocks(tuple(range(len(self.facts.parts))), True, True)]
        sizes, _ = self.dealt(ranks * chunks)
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        found, last = [], ranks * chunks - 1
        for rank in range(ranks):
            mine = stages_of(rank, ranks, chunks, folded)
            blocks = tuple(
                block
                for stage in mine
                for block in range(starts[stage], starts[stage] + sizes[stage])
            )
            found.append(RankBlocks(blocks, 0 in mine, last in mine, len(mine) - (last in mine)))
        return found


def quick_cut(costs: Sequence[float], parts: int) -> list[int]:
    """Splits a chain into consecutive parts so that the largest cost is minimal, by bisection."""
    # `partition_chain` also finds the most even cut, in quadratic time.
    low, high = max(costs), sum(costs)
    best = _filled(costs, parts, high)
    for _ in range(40):
        middle = (low + high) / 2
        found = _filled(costs, parts, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    assert best is not None, "one part has everything"
    return best


def _filled(costs: Sequence[float], parts: int, limit: float) -> list[int] | None:
    """Fills parts greedily up to a limit; returns their bounds, or None if elements remain."""
    bounds, held = [0], 0.0
    for number, cost in enumerate(costs):
        left = len(costs) - number  # each part that is still empty needs one
        full = held + cost > limit or left <= parts - len(bounds)
        if number > bounds[-1] and full:
            bounds.append(number)
            held = 0.0
            if len(bounds) > parts or cost > limit:
                return None
        held += cost
    return [*bounds, len(costs)] if len(bounds) == parts else None
