"""Seconds and bytes of a grid: the formulas of the plan's own prediction, without making the plan.

Seconds are those that `_predict.py` computes for a plan, whose messages and schedule are asked for
here with chunks and cuts in numbers. Bytes are those of the rank that holds most: of its stage the
parameters, gradients and optimizer state, what forwards keep until their backwards have run, and
what one block works with.

[Note: what is recomputed] More recomputed blocks never make a step faster nor larger. So of each
grid the least number that fits is the best, and is found by halving.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from gulliver.booster._predict import (
    attention_sends,
    axis_links,
    by_kind,
    model_messages,
)
from gulliver.booster.search._bytes import RankBytes, Stage, stages_of, under_way
from gulliver.booster.search._facts import Facts, Shared
from gulliver.booster.search._grids import Axes, Grid
from gulliver.errors import GulliverError
from gulliver.hardware import (
    Cluster,
    Link,
    Message,
    pipeline_seconds,
    point_to_point_seconds,
    predict_step,
    zero_collectives,
)
from gulliver.parallel.pipeline import STYLES
from gulliver.parallel.sequence import Volume
from gulliver.plan import (
    MemoryPlan,
    Mesh,
    Model,
    PipelineLayout,
    Plan,
    Seconds,
    SequenceLayout,
    Work,
    ZeroPlan,
)


@dataclass(frozen=True)
class Scored:
    """A grid with what it is predicted to take.

    Attributes:
        grid: the grid.
        seconds: seconds of a step by kind.
        memory: bytes of the rank that holds most.
        working: bytes of those that are neither state nor kept: what a block works with.
        samples: samples of a step, from which the throughput follows.
    """

    grid: Grid
    seconds: Seconds
    memory: MemoryPlan
    working: int = 0
    samples: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the rank that holds most, all in all."""
        held = self.memory
        state = held.parameters + held.gradients + held.optimizer_state
        return state + held.activations + self.working


class Scorer:
    """Prices grids of one model on one cluster.

    Args:
        facts: model and batch in numbers.
        cluster: machines, as many ranks as a grid has.
        batch: number of samples of a step.
        device: kind of device, ``cpu`` or ``cuda``.
        free: share of messages that travel without a core that computes.
    """

    def __init__(
        self, facts: Facts, cluster: Cluster, batch: int, device: str, free: float
    ) -> None:
        self.facts, self.cluster, self.batch = facts, cluster, batch
        self.device, self.free = device, free
        self._links = lru_cache(None)(self._links_of)
        self._dealt = lru_cache(None)(self._dealt_of)
        self._work = lru_cache(None)(self._work_of)
        self._summed = lru_cache(None)(self._summed_of)
        self._floors = lru_cache(None)(facts.floors)
        self._volume = lru_cache(None)(self._volume_of)
        self._bytes = RankBytes(facts, batch)

    def shared(self, axes: Axes) -> Shared | None:
        """What the tensor ranks of a mesh share; None where they cannot."""
        return self.facts.shared(axes.tensor)

    def refuses(self, axes: Axes) -> str:
        """Why a model cannot be laid over a mesh; empty where it can."""
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
        """Seconds that no grid on a mesh is below: what is computed, and sent while nothing is."""
        shared = self.shared(axes)
        assert shared is not None, "grids are priced whose tensors can be cut"
        share = self._share(axes, shared)
        samples = self.batch // axes.data
        compute = share * samples * (self.facts.forward_s + self.facts.backward_s) / axes.pipeline
        plan = self._plan(Grid(axes), self._work(axes, samples))
        open_s = sum(
            m.seconds
            for m in model_messages(plan, self._links(axes), 0.0, 0.0, 1.0, Volume())
            if not m.hidden and m.kind != "all_to_all"
        )
        return compute + self.free * open_s / axes.pipeline

    def work(self, axes: Axes) -> Work:
        """What the batch of a replica costs one process."""
        return self._work(axes, self.batch // axes.data)

    def score(self, grid: Grid) -> Scored:
        """Prices a grid."""
        axes = grid.axes
        shared = self.shared(axes)
        assert shared is not None, "grids are priced whose tensors can be cut"
        samples, again = self.batch // axes.data, self._again(grid)
        if axes.pipeline == 1:
            seconds = self._in_turn(grid, shared, samples // grid.micro_batches, again)
        else:
            seconds = self._in_stages(grid, shared, samples, again)
        memory, working = self._held(grid)
        return Scored(grid, seconds, memory, working, self.batch)

    def least(self, grid: Grid, limit: int | None) -> Scored | None:
        """The grid with the fewest recomputed blocks that fits; None where none does."""
        whole = self.score(grid)
        if limit is None or whole.bytes <= limit:
            return whole
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
        """Bytes of the rank that holds most."""
        memory, working = self._held(grid)
        return sum(vars(memory).values()) + working

    # Seconds.

    def _in_turn(self, grid: Grid, shared: Shared, samples: int, again: float) -> Seconds:
        """Micro-batches one after the other."""
        facts, times = self.facts, grid.micro_batches
        plan = self._plan(grid, self._work(grid.axes, samples))
        links, share = self._links(grid.axes), self._share(grid.axes, shared)
        blocks = len(facts.blocks)
        volume = self._volume(grid.axes, samples)
        messages = [
            replace(m, count=m.count * times)
            for m in model_messages(plan, links, again, max(blocks, 1), 1.0, volume)
        ]
        for message in self._replicas(grid, links["replicas"]):
            # Stages that keep no whole gradients reduce them after every backward.
            once = grid.stage < 2 or (grid.stage == 2 and message.kind == "all_gather")
            messages.append(replace(message, count=message.count * (1 if once else times)))
        forward, backward = self._passes(plan.work, share, grid, 1)
        repeated = again * plan.work.share_blocks * forward
        costs = predict_step(
            times * (forward + backward),
            times * repeated,
            self._update(grid, 1.0),
            messages,
            0.0,
            self.free,
        )
        return by_kind(costs)

    def _in_stages(self, grid: Grid, shared: Shared, samples: int, again: float) -> Seconds:
        plan = self._plan(grid, self._work(grid.axes, samples))
        links, share = self._links(grid.axes), self._share(grid.axes, shared)
        forward, backward = self._passes(plan.work, share, grid, grid.micro_batches)
        repeated = again * plan.work.share_blocks * forward
        bubble, own = self._waits(grid, forward, backward + repeated)
        blocks = max(len(self.facts.blocks), 1) * own
        volume = self._volume(grid.axes, samples)
        messages = list(self._replicas(grid, links["replicas"]))
        for message in model_messages(plan, links, again, blocks, own, volume):
            along = message.axes == links.get("pipeline")
            # The same bytes in more messages; those between stages are counted as such.
            times = 1 if along else grid.micro_batches
            messages.append(
                replace(message, bytes=message.bytes // times, count=message.count * times)
            )
        costs = predict_step(
            own * (forward + backward),
            own * repeated,
            self._update(grid, own),
            messages,
            bubble,
            self.free,
        )
        return by_kind(costs)

    def _waits(self, grid: Grid, forward: float, backward: float) -> tuple[float, float]:
        """Seconds that the first rank waits for other stages, and its share of the work."""
        axes, micro = grid.axes, grid.micro_batches
        if not forward:
            return 0.0, 1.0 / axes.pipeline
        sent = self.facts.hidden * (self.batch // axes.data) // micro
        link = point_to_point_seconds(self._links(axes)["pipeline"][0][1], sent)
        _, shares = self._dealt(axes.pipeline * grid.chunks)
        folded = STYLES[grid.schedule].folded
        whole = forward + backward
        ranks = [
            sum(shares[n] for n in stages_of(rank, axes.pipeline, grid.chunks, folded))
            * (whole / micro)
            for rank in range(axes.pipeline)
        ]
        seconds = pipeline_seconds(grid.schedule, ranks, backward / whole, micro, grid.chunks, link)
        slowest = micro * max(ranks)
        return seconds - slowest, slowest / whole

    def _passes(self, work: Work, share: float, grid: Grid, parts: int) -> tuple[float, float]:
        """Seconds of forward and backward of a batch in parts, all stages together."""
        forward, backward = self._floors(grid.axes.tensor)
        return (
            max(work.forward_s * share, parts * forward),
            max(work.backward_s * share, parts * backward),
        )

    def _update(self, grid: Grid, own: float) -> float:
        axes = grid.axes
        parts = axes.data * axes.sequence if grid.stage else 1
        return self.facts.update_s * own / axes.tensor / parts

    def _again(self, grid: Grid) -> float:
        return grid.recomputed / max(1, len(self.facts.blocks))

    def _share(self, axes: Axes, shared: Shared) -> float:
        return (1 - shared.seconds * (1 - 1 / axes.tensor)) / axes.sequence

    def _replicas(self, grid: Grid, line: Sequence[tuple[int, Link]]) -> Iterator[Message]:
        """Messages of the replicas, of chunks of one size."""
        axes, facts = grid.axes, self.facts
        shared, shares = self.shared(axes), (1.0,)
        assert shared is not None, "grids are priced whose tensors can be cut"
        if axes.pipeline > 1:
            shares = self._dealt(axes.pipeline * grid.chunks)[1]
        own = facts.item * facts.trained * (1 - shared.parameters * (1 - 1 / axes.tensor))
        own *= min(1.0, max(shares) * grid.chunks)
        number = -(-int(own) // facts.chunk_bytes)
        if not line or not number:
            return
        size = -(-int(own) // number)
        # The last chunk may be spared a message: what one more adds is what each costs.
        one, two = (Counter(zero_collectives(grid.stage, [size] * n)) for n in (1, 2))
        for (kind, count), times in (one if number == 1 else two).items():
            every = times + (number - 2) * (times - one[kind, count]) if number > 1 else times
            yield Message(kind, count, line, every, hidden=True)  # type: ignore[arg-type]

    def _links_of(self, axes: Axes) -> dict[str, list[tuple[int, Link]]]:
        return axis_links(Plan(mesh=self._mesh(axes)), self.cluster)

    def _mesh(self, axes: Axes) -> Mesh:
        names = ("pipeline", "data", "sequence", "tensor")
        sizes = {name: getattr(axes, name) for name in names}
        return Mesh(self.device, {n: size for n, size in sizes.items() if size > 1 or n == "data"})

    def _plan(self, grid: Grid, work: Work) -> Plan:
        """A plan with what its prediction looks at."""
        axes, facts = grid.axes, self.facts
        pipeline = PipelineLayout()
        if axes.pipeline > 1:
            stages, shares = self._dealt(axes.pipeline * grid.chunks)
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

    def _work_of(self, axes: Axes, samples: int) -> Work:
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
        )

    def _volume_of(self, axes: Axes, samples: int) -> Volume:
        return attention_sends(self._plan(Grid(axes), self._work(axes, samples)), self.facts.model)

    def _dealt_of(self, stages: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Blocks and share of the work of each stage; the head and the loss are on the last."""
        parts, outside = self.facts.parts, self.facts.outside
        costs = [part.forward_s + part.backward_s for part in parts]
        costs[-1] += outside.forward_s + outside.backward_s
        bounds, whole = quick_cut(costs, stages), sum(costs)
        sizes = tuple(b - a for a, b in itertools.pairwise(bounds))
        shares = tuple(sum(costs[a:b]) / whole for a, b in itertools.pairwise(bounds))
        return sizes, shares

    def state_of(self, grid: Grid) -> MemoryPlan:
        """Bytes of the model state of the rank that has most of it, when it is most."""
        every = [self._bytes.state(grid, stage) for stage in self._stages(grid)]
        return max(every, key=lambda found: found.total)

    def _stages(self, grid: Grid) -> list[Stage]:
        folded = grid.axes.pipeline > 1 and STYLES[grid.schedule].folded
        return self._summed(grid.axes.pipeline, grid.chunks, folded)

    def _held(self, grid: Grid) -> tuple[MemoryPlan, int]:
        """Bytes of the rank that holds most, by kind, and what it works with."""
        stages = self._stages(grid)
        ranks = {0, len(stages) - 1, max(range(len(stages)), key=lambda n: stages[n].count)}
        every = [self._bytes.held(grid, stages[n], under_way(grid, n)) for n in sorted(ranks)]
        return max(every, key=lambda found: sum(vars(found[0]).values()) + found[1])

    def _summed_of(self, ranks: int, chunks: int, folded: bool) -> list[Stage]:
        """The blocks of each rank of a pipeline."""
        if ranks == 1:
            return [Stage(tuple(range(len(self.facts.parts))), True, True)]
        sizes, _ = self._dealt(ranks * chunks)
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        found, last = [], ranks * chunks - 1
        for rank in range(ranks):
            mine = stages_of(rank, ranks, chunks, folded)
            blocks = tuple(
                block
                for stage in mine
                for block in range(starts[stage], starts[stage] + sizes[stage])
            )
            found.append(Stage(blocks, 0 in mine, last in mine, len(mine) - (last in mine)))
        return found


def quick_cut(costs: Sequence[float], parts: int) -> list[int]:
    """Bounds of consecutive parts whose largest is as small as can be, by halving of the limit.

    `partition_chain` finds the most even of them too, in time that grows with the square of the
    costs.

    Args:
        costs: costs in order, at least as many as parts.
        parts: number of parts, none empty.
    """
    low, high = max(costs), sum(costs)
    best = _filled(costs, parts, high)
    for _ in range(40):
        middle = (low + high) / 2
        found = _filled(costs, parts, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    assert best is not None, "one part takes all"
    return best


def _filled(costs: Sequence[float], parts: int, limit: float) -> list[int] | None:
    """Bounds of parts that are filled up to a limit one by one; None where they do not take all."""
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
