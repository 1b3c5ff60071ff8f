"""Computes a rank's peak bytes on a grid in closed form.

Counts state as in ZeRO (Rajbhandari et al. 2020) and activations of the micro-batches in flight. A
plan's own prediction goes chunk by chunk; this one is fast enough to compare thousands of grids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from gulliver.errors import GulliverError
from gulliver.parallel.zero.reduce import IN_FLIGHT
from gulliver.plan.analysis.records import FORWARD
from gulliver.plan.results import MemoryPlan
from gulliver.plan.tree import SHARED_BY_TENSOR
from gulliver.planner.search.facts import CHUNKS_MB, Facts, Grid, TensorShares

MIB = 1 << 20
AHEAD = 2  # number of chunks that stage 3 prefetches by default
GATHERED = AHEAD + 2
"""Number of chunks gathered together at stage 3: prefetched, current and previous."""
PUTS_OFF = ("zero_bubble", "zbv")  # schedules that defer weight gradients
COLLECTED = IN_FLIGHT + 1
"""Number of chunks with full gradients from stage 1: being reduced or being filled."""
WIDE = 4  # bytes per float32 element


# [Note: moments] Activations peak when a backward begins, gradients when it ends, and the
# optimizer's working memory after both. So the peak is the maximum over the beginning of the
# backward of the head and of each block, the end of the last backward, and the update. Bytes by
# kind are those at the peak.
#
# [Note: gradients] Stage 0 of ZeRO accumulates gradients in full buffers, and stage 1 while it
# accumulates over micro-batches; otherwise a chunk's gradients are freed once reduced. A pipeline
# accumulates those of all its micro-batches in full buffers at any stage, and reduces them once,
# when the schedule has ended.
#
# [Note: backward in two parts] Activations of a micro-batch are freed when the gradients of its
# weights are computed; until then the output gradients of its layers are kept as well. Under
# zero_bubble the i-th rank defers i micro-batches (Qi et al. 2024: as many are in flight on each
# rank as on the first), under zbv only the current one. If any block is recomputed, no backward is
# split: each half would recompute the block again.
@dataclass(frozen=True)
class RankBlocks:
    """The blocks of a pipeline rank."""

    # Numbers of the blocks in the order in which the rank runs them.
    blocks: tuple[int, ...]
    # Whether the rank has the modules before all blocks, such as embeddings.
    first: bool
    # Whether the rank has head and loss.
    last: bool
    # Number of its stages whose output is sent to another rank.
    cuts: int = 0

    @property
    def count(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True)
class _Moment:
    """Bytes per sample at one point of a micro-batch's backward pass."""

    # Bytes kept for later operations.
    kept: float
    # Bytes of working memory.
    working: float
    # Elements of the rank's parameters whose gradients are complete.
    after: float

    @cached_property
    def all(self) -> float:
        return self.kept + self.working


@dataclass(frozen=True)
class _Gradients:
    """Bytes of gradients during the last backward pass of a step."""

    # Bytes at its start.
    begin: float
    # Bytes per trained element whose gradient is complete.
    rate: float
    # Bytes of temporary full buffers.
    window: float
    # Bytes when all gradients are complete.
    end: float
    # Bytes during the update.
    step: float


class RankBytes:
    """Predicts peak bytes of ranks for the grids of one model."""

    def __init__(self, facts: Facts, batch: int) -> None:
        self.facts, self.batch = facts, batch
        self._moments = lru_cache(None)(self._moments_of)
        self._noted = lru_cache(None)(self._noted_of)
        self._sizes = lru_cache(None)(self._sizes_of)
        self._sums = lru_cache(None)(self._sums_of)
        self._windows = lru_cache(None)(self._windows_of)
        self._learns = facts.trained / max(1, facts.parameters)

    def held(
        self, grid: Grid, stage: RankBlocks, flying: float, waiting: int = 0
    ) -> tuple[MemoryPlan, int]:
        """Peak bytes of a rank by kind, and its workspace."""
        parameters, window, state = self._state(grid, stage)
        inputs, found = self._inputs(grid, stage), []
        for gradients, others in self._backwards(grid, stage, flying):
            held = self._fullest(grid, stage, gradients, others, waiting)
            found.append((parameters + window, *held))
        gradients = self._gradients(grid, stage)
        found.append((parameters + window, gradients.end, inputs, self._embedded(grid, stage)))
        found.append((parameters, gradients.step, inputs, self._updating(grid, stage)))
        held, grads, kept, working = map(int, max(found, key=sum))
        return MemoryPlan(held, grads, int(state), kept), working

    def _inputs(self, grid: Grid, stage: RankBlocks) -> float:
        samples = self.batch // grid.axes.data
        inputs = samples * self.facts.analysis.inputs / self.facts.samples / grid.axes.sequence
        return inputs + samples * self._cached(grid, stage)

    def _fullest(
        self, grid: Grid, stage: RankBlocks, gradients: _Gradients, others: float, waiting: int
    ) -> tuple[float, float, float]:
        axes, learns = grid.axes, self._learns
        micro = self.batch // axes.data // grid.micro_batches
        by_tensor = axes.mode in SHARED_BY_TENSOR
        parts = grid.chunks if grid.schedule in PUTS_OFF and not grid.recomputed else 0
        moments, whole, noted = self._moments(
            stage, axes.tensor, axes.sequence, by_tensor, grid.recomputed, parts
        )
        # Head and loss hold only the micro-batches whose weight gradients are deferred, except
        # under gpipe, where all forwards come first.
        heads = others if grid.schedule == "gpipe" else min(others, waiting)
        kept = others * whole + heads * stage.last * self._head(grid) + waiting * noted
        kept = micro * kept + self._inputs(grid, stage)
        most, grads, fullest = -1.0, 0.0, _Moment(0.0, 0.0, 0.0)
        # Thousands of grids have dozens of moments each: this is the hot loop of a search.
        for moment in moments:
            come = learns * moment.after
            whole_buffers = self.facts.item * come
            now = gradients.begin + gradients.rate * come
            now += whole_buffers if whole_buffers < gradients.window else gradients.window
            if (held := now + micro * moment.all) > most:
                most, grads, fullest = held, now, moment
        return grads, kept + micro * fullest.kept, micro * fullest.working

    def other(self, grid: Grid, stage: RankBlocks, flying: float, waiting: int = 0) -> int:
        """Peak bytes of a rank excluding state: inputs, activations and workspace."""
        none = _Gradients(0.0, 0.0, 0.0, 0.0, 0.0)
        held = sum(self._fullest(grid, stage, none, flying - 1, waiting))
        return int(max(held, self._inputs(grid, stage) + self._embedded(grid, stage)))

    def moments(self, grid: Grid, stage: RankBlocks) -> list[tuple[float, int]]:
        """Bytes excluding state, at each point of the backward passes and the update of a step."""
        # In order, each with the elements whose gradients are complete by then.
        axes, inputs = grid.axes, self._inputs(grid, stage)
        by_tensor = axes.mode in SHARED_BY_TENSOR
        found = self._moments(stage, axes.tensor, axes.sequence, by_tensor, grid.recomputed, 0)[0]
        samples = self.batch // axes.data
        own = self._sums(stage, axes.tensor)[0]
        held = [(moment.after, int(inputs + samples * moment.all)) for moment in found]
        return [*held, (own, int(inputs + self._updating(replace(grid, stage=3), stage)))]

    def resting(self, grid: Grid, stage: RankBlocks) -> tuple[int, int]:
        """Bytes of a rank's state between steps at stage 3: total and trained."""
        own = self._sums(stage, grid.axes.tensor)[0]
        parts = grid.axes.data * grid.axes.sequence
        learned = own * self._learns
        copied = WIDE if self.facts.copied else self.facts.item
        master = (WIDE * self.facts.states + copied) * learned
        return int((master + self.facts.item * (own - learned)) / parts), int(master / parts)

    def _backwards(
        self, grid: Grid, stage: RankBlocks, flying: float
    ) -> Iterator[tuple[_Gradients, float]]:
        """Yields each backward pass of a step, with the number of other micro-batches in flight."""
        several, ranks = grid.micro_batches > 1, grid.axes.pipeline
        if grid.schedule == "dualpipev" and stage.first and grid.micro_batches == 2 * ranks:
            # The first rank runs all forwards of its first stage before its first backward of it;
            # by then the gradients of its last stage, half of all, are complete.
            first = self._gradients(grid, stage, 1)
            come = first.rate * self._learns * self._sums(stage, grid.axes.tensor)[0] / 2
            yield replace(first, begin=first.begin + come, rate=first.rate / 2), flying - 1
            yield self._gradients(grid, stage), flying - 1.5
        elif ranks > 1 and several:
            # The first backward allocates gradients; after it a forward follows, if there is one.
            yield self._gradients(grid, stage, 1), flying - 1
            runs_on = grid.schedule != "gpipe" and grid.micro_batches > flying
            yield self._gradients(grid, stage), flying - 1 if runs_on else max(0.0, flying - 2)
        else:
            yield self._gradients(grid, stage), flying - 1

    def state(self, grid: Grid, stage: RankBlocks) -> MemoryPlan:
        parameters, window, state = self._state(grid, stage)
        gradients = self._gradients(grid, stage)
        own, _ = self._sums(stage, grid.axes.tensor)
        last = gradients.begin + gradients.rate * self._learns * own
        most = max(gradients.end, gradients.begin + gradients.window, last)
        return MemoryPlan(int(parameters + window), int(most), int(state))

    # Model state.

    def _parts(self, grid: Grid) -> int:
        return grid.axes.data * grid.axes.sequence if grid.stage else 1

    def _state(self, grid: Grid, stage: RankBlocks) -> tuple[float, float, float]:
        """Bytes of resident parameters, of gathered parameters, and of optimizer state."""
        facts, parts = self.facts, self._parts(grid)
        own = self._sums(stage, grid.axes.tensor)[0]
        learned = own * self._learns
        copies = WIDE if facts.copied else 0
        state = learned * (WIDE * facts.states + copies) / parts
        if grid.stage < 3:
            return facts.item * own, 0.0, state
        # Trained 16-bit parameters have no shards besides their float32 master weights.
        shards = own - learned if facts.copied else own
        window = self._windows(stage, grid.axes.tensor, _chunk_bytes(self.facts, grid))[0]
        return facts.item * shards / parts, window, state

    def _gradients(self, grid: Grid, stage: RankBlocks, backwards: int = 0) -> _Gradients:
        facts, parts = self.facts, self._parts(grid)
        learned = self._learns * self._sums(stage, grid.axes.tensor)[0]
        master = WIDE if facts.copied else facts.item
        whole, shards = facts.item * learned, master * learned / parts
        several, line = (backwards or grid.micro_batches) > 1, grid.axes.pipeline > 1
        if parts == 1:
            copies = WIDE * learned if facts.copied else 0
            begin = whole if several else 0.0
            rate = 0.0 if several else facts.item
            rate += WIDE if facts.copied and not line else 0.0
            return _Gradients(begin, rate, 0.0, whole + copies, copies or whole)
        together = self._windows(stage, grid.axes.tensor, _chunk_bytes(self.facts, grid))[1]
        window = min(together * self._learns, whole)
        incoming = window * master / facts.item / parts
        if line:
            begin, rate = (whole, 0.0) if several else (0.0, float(facts.item))
            return _Gradients(begin, rate, 0.0, whole + incoming, shards)
        if grid.stage == 1 and several:  # which adds them up before it reduces them
            return _Gradients(whole, 0.0, 0.0, shards + window, shards)
        begin, rate = (shards + incoming, 0.0) if several else (0.0, master / parts)
        # Stage 3 peaks while chunks are still prefetched, whose gradients are not reduced yet.
        ahead = min(1.0, AHEAD / COLLECTED * window / max(whole, 1)) if grid.stage == 3 else 0.0
        return _Gradients(begin, rate, window, shards * (1 - ahead) + window, shards)

    def _embedded(self, grid: Grid, stage: RankBlocks) -> float:
        before, *_ = self._shared(grid.axes.tensor).ends
        return self.facts.item * max(before, default=0) * stage.first * self._learns

    def _updating(self, grid: Grid, stage: RankBlocks) -> float:
        facts, parts = self.facts, self._parts(grid)
        if facts.states < 2:
            return 0.0
        own, largest = self._sums(stage, grid.axes.tensor)
        if facts.device.to_device_rate is None:
            return 2 * WIDE * largest * (self._learns > 0) / parts
        # Stages 1 and 2 step chunk by chunk, the others step all chunks in one call.
        whole = WIDE * self._learns * own
        apart = parts > 1 and grid.stage < 3
        chunk = WIDE / facts.item * _chunk_bytes(facts, grid)
        return (min(whole, chunk) if apart else whole) / parts

    # Parts of the model on a rank.

    def _shared(self, tensor: int) -> TensorShares:
        shared = self.facts.shared(tensor)
        assert shared is not None, "grids are counted whose tensors can be cut"
        return shared

    def _sizes_of(self, stage: RankBlocks, tensor: int) -> tuple[int, ...]:
        shared = self._shared(tensor)
        before, after, both = shared.ends
        found = list(before) if stage.first else []
        for block in stage.blocks:
            found += shared.sizes[block]
        if stage.last:
            found += after
        # Parameters of both ends, such as a tied embedding, exist once on a rank with both.
        return (
            (*found[: len(found) - len(after)], *both) if stage.first and stage.last else (*found,)
        )

    def _sums_of(self, stage: RankBlocks, tensor: int) -> tuple[int, int]:
        sizes = self._sizes(stage, tensor)
        return sum(sizes), max(sizes, default=0)

    def _windows_of(self, stage: RankBlocks, tensor: int, capacity: int) -> tuple[int, int]:
        """Peak bytes of gathered chunks (stage 3), and of gradients in reduction (stages 2, 3)."""
        chunks = _chunks(self._sizes(stage, tensor), capacity // self.facts.item)
        gathered, collected = (_most_together(chunks, n) for n in (GATHERED, COLLECTED))
        return self.facts.item * gathered, self.facts.item * collected

    # Activations.

    def _cached(self, grid: Grid, stage: RankBlocks) -> float:
        axes, facts = grid.axes, self.facts
        ranks = min(axes.tensor, facts.cached_heads) * axes.sequence
        return facts.cached * stage.count / max(1, len(facts.blocks)) / ranks

    def _head(self, grid: Grid) -> float:
        return self.facts.outside.saved * self._divided(grid.axes.tensor, grid.axes.sequence)[1]

    def _divided(self, tensor: int, sequence: int) -> tuple[float, float]:
        shared, rest = self._shared(tensor), 1 - 1 / tensor
        return (1 - shared.saved * rest) / sequence, (1 - shared.outside * rest) / sequence

    def _moments_of(
        self,
        stage: RankBlocks,
        tensor: int,
        sequence: int,
        by_tensor: bool,
        recomputed: int,
        parts: int,
    ) -> tuple[tuple[_Moment, ...], float, float]:
        """Candidate peaks, activation bytes per micro-batch, and bytes of deferred gradients."""
        # With `parts` of 2 (input and weight gradients) the first half of backward frees nothing.
        facts, number = self.facts, len(self.facts.blocks)
        inside, outside = self._divided(tensor, sequence)
        whole = 1 / sequence
        if by_tensor:
            inside = whole = 1 / tensor
        again = {place * number // recomputed for place in range(recomputed)}
        own = [facts.parts[block] for block in stage.blocks]
        kept = [
            part.output * whole if block in again else part.saved * inside
            for block, part in zip(stage.blocks, own, strict=True)
        ]
        noted = [self._noted(block) * inside if parts else 0.0 for block in stage.blocks]
        # Outputs sent to another stage are kept as roots of their backward.
        roots = stage.cuts * facts.hidden * whole
        total = sum(kept) + roots
        sizes = [sum(self._shared(tensor).sizes[block]) for block in stage.blocks]
        left = sum(self._shared(tensor).ends[1]) if stage.last else 0
        found = []
        if stage.last or not own:
            working = facts.outside.working * outside
            found.append(_Moment(total + facts.outside.saved * outside, working, 0.0))
        head = facts.outside.saved * outside * stage.last
        sums, after, most = list(accumulate(kept)), 0.0, sum(noted) / max(1, parts)
        for place in reversed(range(len(own))):
            block, part = stage.blocks[place], own[place]
            working = part.working * inside
            if by_tensor:  # gathered where it goes into columns
                working += part.output * (1 - whole)
            if block in again:
                working += max(0.0, part.saved * inside - kept[place])
            held = sums[place] + roots
            if parts:
                after = min(most, after + noted[place])
                held = total + head + after
            found.append(_Moment(held, working, left))
            left += sizes[place]
        return tuple(_undominated(found)), total, sum(noted)

    def _noted_of(self, block: int) -> int:
        """Bytes per sample of output gradients that a block saves for its weight gradients."""
        facts = self.facts
        path = facts.analysis.followed(facts.blocks[block])
        try:
            own = [o for o in facts.analysis.graph(path, FORWARD) if not o.view]
        except GulliverError:
            return 0
        given = [o for o in own if any(v.name for v in o.inputs)]
        outputs = [value for operator in given for value in operator.outputs]
        return sum(math.prod(v.shape) * facts.item for v in outputs) // facts.samples


def _undominated(moments: Sequence[_Moment]) -> Iterator[_Moment]:
    """Yields, in order, the moments that need more bytes than all later ones."""
    most, found = -1.0, []
    for moment in reversed(moments):
        if moment.all > most:
            most = moment.all
            found.append(moment)
    yield from reversed(found)


def _chunk_bytes(facts: Facts, grid: Grid) -> int:
    return facts.chunk_bytes or (grid.chunk_mb or CHUNKS_MB[0]) * MIB


def _chunks(sizes: Sequence[int], capacity: int) -> list[int]:
    """Sizes of the chunks that parameters are packed into, as in `plan_chunks`."""
    found = list[int]()
    for size in sizes:
        if found and found[-1] + size <= capacity:
            found[-1] += size
        else:
            found.append(size)
    return found


def _most_together(chunks: Sequence[int], count: int) -> int:
    starts = range(max(1, len(chunks) - count + 1))
    return max(sum(chunks[start : start + count]) for start in starts)


def stages_of(rank: int, ranks: int, chunks: int, folded: bool) -> list[int]:
    if folded:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + n * ranks for n in range(chunks)]


def under_way(grid: Grid, rank: int) -> float:
    """Maximum number of micro-batches in flight on a rank, between forward and backward."""
    # Follows from the definition of the schedules (Narayanan et al. 2021; Qi et al. 2024).
    ranks, chunks, micro = grid.axes.pipeline, grid.chunks, grid.micro_batches
    if ranks == 1:
        return 1
    if grid.schedule == "gpipe":
        return micro
    if grid.schedule == "zero_bubble":
        return min(micro, ranks)
    if grid.schedule in ("zbv", "dualpipev"):
        return min(micro, ranks + (grid.schedule == "dualpipev") / 2)
    if chunks > 1:
        return min(micro, ((chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1) / chunks)
    return min(micro, ranks - rank)


def put_off(grid: Grid, rank: int) -> int:
    """Maximum number of micro-batches on a rank whose weight gradients are deferred."""
    defers = grid.schedule == "zero_bubble" and not grid.recomputed
    return min(grid.micro_batches - 1, rank) if defers else 0
