"""Plans the steps of data-centric training as data arrives.

    planner = DataCentricPlanner(costs, shapes, ranks=8, budget=Samples(256))
    for plan in planner:                    # the rest of the current epoch
        for group, batch in plan: ...

Samples are drawn into a window in order of arrival. In a window, samples of one shape are collected
into efficient micro-batches, which are spread evenly so that steps are similar (`windows.py`). A
step takes the next samples up to its budget, and `gulliver.solve.steps.StepSolver` assigns them
to groups of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np

from gulliver.data.sampler import check_position
from gulliver.data_centric.costs import (
    Budget,
    Costs,
    Samples,
    Seconds,
    Tokens,
    check_key,
    check_sample,
    checked_degrees,
    checked_window,
    efficient_batch,
    total,
    weight,
)
from gulliver.data_centric.steps import Facts, Phases, Shape, StepPlan, facts_of, place
from gulliver.data_centric.windows import (
    Queue,
    SampleStream,
    SampleWindow,
    check_state,
    digest_of,
    longer_lots,
    order_by_shape,
)
from gulliver.errors import GulliverError
from gulliver.options import (
    AT_LEAST_1,
    POSITIVE,
    SEED,
    Options,
    from_keywords,
    size_text,
)
from gulliver.solve.steps import StepSolver

MOST_LOT = 0.25
"""Maximum share of a step for one micro-batch of equal shapes. If micro-batches were as long as
steps, all samples of a step would have the same shape, for many steps in a row, which harms
convergence (docs/lab-notes.md).
"""
Position = tuple[int, int, Queue]
"""Epoch, step, and samples that have been drawn but are not yet in a step."""


@dataclass(frozen=True)
class DataCentricOptions(Options):
    """Options of `DataCentricPlanner`, passed by keyword.

    Attributes:
        window: number of samples to draw together; by default enough for 16 steps. With budgets in
            tokens or seconds, a step may draw several windows.
        memory: bytes per rank; by default the memory of `costs`.
        intra: whether groups may have different degrees; otherwise all have degree `degree`.
        inter: whether groups may run several micro-batches; otherwise each runs one, and remaining
            samples are deferred to the next step.
        pac: whether to keep activations in spare memory; otherwise all blocks are recomputed.
        degree: degree of all groups if `intra` is False.
        unfit: how to treat samples that fit at no degree: reject them, or skip and count them in
            `skipped`.
        shuffle: whether to draw the samples in random order instead of the table's.
        seed: random seed.
        stages: number of pipeline stages. `costs` are those of the full model on one rank; each
            stage takes an equal share of the seconds and the same bytes (1F1B keeps as many
            micro-batches as there are stages). Samples are split into the number of micro-batches
            with the shortest time. The samples of a step do not depend on it.
    """

    window: Annotated[int | None, AT_LEAST_1] = None
    memory: Annotated[int | None, POSITIVE] = None
    intra: bool = True
    inter: bool = True
    pac: bool = True
    degree: int | None = None
    unfit: Literal["refuse", "skip"] = "refuse"
    shuffle: bool = True
    seed: Annotated[int, SEED] = 0
    stages: Annotated[int, AT_LEAST_1] = 1

    def check_combinations(self) -> None:
        """Rejects options that exclude each other."""
        if self.stages > 1 and not self.inter:
            raise GulliverError(
                f"stages={self.stages} needs several micro-batches per group; set inter=True"
            )


# [Note: once each] Every drawn sample is either in a returned step or in the queue, in order. The
# state is the position in the stream and the queue, so it resumes exactly, on any number of ranks:
# the samples of a step depend on seed, epoch and window; of the budgets, only seconds depend on the
# ranks. A state saved after a plan was returned counts the plan as done.
class DataCentricPlanner:
    """Plans steps of samples of many shapes; each sample occurs once per epoch.

    Args:
        costs: seconds and bytes of micro-batches.
        shapes: shape of every sample; or, for a stream of unknown length, a function that returns
            the shapes of an epoch in order of arrival.
        ranks: number of data-parallel ranks.
        budget: samples, tokens or seconds per step.
        options: fields of `DataCentricOptions`, by name.

    Attributes:
        skipped: number of samples skipped so far, by shape.
        left_out: number of samples of a table that every epoch skips, by shape.

    Raises:
        GulliverError: a sample fits at no degree or exceeds the budget, a step has more samples
            than the dataset, a window is shorter than a step, or settings exclude each other.
    """

    def __init__(
        self,
        costs: Costs,
        shapes: Sequence[Shape] | Callable[[int], Iterable[Shape]],
        ranks: int,
        budget: Budget,
        **options: Any,
    ) -> None:
        chosen = from_keywords(DataCentricOptions, options, DataCentricPlanner)
        if not isinstance(budget, Budget):
            raise GulliverError(
                f"budget={budget!r} is invalid; use Samples(n), Tokens(n) or Seconds(s)"
            )
        if not isinstance(ranks, int) or ranks < 1:
            raise GulliverError(f"ranks={ranks!r} must be an integer of at least 1")
        if chosen.memory is not None:
            costs = replace(costs, memory=chosen.memory)  # type: ignore[type-var]
        self.costs, self.ranks, self.budget = costs, ranks, budget
        self.intra, self.inter, self.pac = chosen.intra, chosen.inter, chosen.pac
        self.unfit, self.seed, self.stages = chosen.unfit, chosen.seed, chosen.stages
        self.skipped: Counter[Shape] = Counter()
        self.left_out: Counter[Shape] = Counter()
        self.epoch, self.step = 0, 0
        self._degrees = checked_degrees(costs, ranks, chosen.intra, chosen.degree)
        self._stream = SampleStream(shapes, chosen.seed, chosen.shuffle)
        self._solver = StepSolver({}, ranks, chosen.inter)
        self._facts: dict[tuple[Shape, int], list[Facts]] = {}
        self._lots: dict[Shape, int] = {}
        self._most_lots: dict[Shape, float] = {}
        self._fits: dict[Shape, bool] = {}
        self._least: dict[Shape, int] = {}
        several = self.intra and self.inter
        self._phases = Phases(self._solver, self._least, several, self.stages)
        self._queue = Queue()
        if self._stream.counts is not None:
            self._check_table(self._stream.counts)
        self.window = checked_window(budget, chosen.window)

    def _check_table(self, counts: Mapping[Shape, tuple[int, int]]) -> None:
        """Checks every shape of a table; `counts` has the first sample and the count of each."""
        for shape, (first, count) in counts.items():
            self._meet(shape, first, count, inside=False)
        # The sample with the largest need determines the smallest possible budget.
        if known := [shape for shape in counts if self._fits[shape]]:
            longest = max(known, key=lambda s: check_key(self.budget, *self._needs(s)))
            check_sample(
                self.budget, counts[longest][0], longest, *self._needs(longest), self.ranks
            )
        usable = sum(count for shape, (_, count) in counts.items() if self._fits[shape])
        self.left_out.update({s: n for s, (_, n) in counts.items() if not self._fits[s]})
        if isinstance(self.budget, Samples) and self.budget.count > usable:
            raise GulliverError(
                f"a step of {self.budget.count} samples is longer than the dataset, which has "
                f"{usable} usable samples; use at most {usable}"
            )

    def _needs(self, shape: Shape) -> tuple[int, float]:
        """Tokens of a sample, and its minimum seconds."""
        seconds = self.stages * self._solver.one_sample_seconds(shape)
        return self.costs.tokens(shape), seconds

    def _meet(
        self, shape: Shape, index: int, count: int | None = None, inside: bool = True
    ) -> None:
        """Adds the costs of a new shape, and checks that the budget allows it."""
        rows = {d: self.costs.batches(shape, d, self.pac) for d in self._degrees}
        rows = {d: row for d, row in rows.items() if len(row)}
        tokens = self.costs.tokens(shape)
        self._fits[shape] = bool(rows)
        self._least[shape] = min(rows, default=0)
        if not rows:
            if self.unfit == "refuse":
                which = "" if count in (None, 1) else f", one of {count:,} of this shape,"
                raise GulliverError(
                    f"sample {index} ({shape}, {tokens:,} tokens){which} does not fit into "
                    f"{self._room} per rank at any degree up to {self.ranks}; use more ranks or "
                    "memory, or unfit='skip'"
                )
            return
        # Each stage takes an equal share.
        factor = 1 / self.stages
        self._phases.forget()
        self._solver.add(shape, {d: factor * row.seconds for d, row in rows.items()})
        if inside:
            check_sample(self.budget, index, shape, *self._needs(shape), self.ranks)
        for degree, row in rows.items():
            self._facts[shape, degree] = facts_of(row, factor)
        most = MOST_LOT * total(self.budget, self.ranks) / self._weights(shape)
        self._lots[shape] = max(1, min(efficient_batch(self.costs, shape, self.pac), int(most)))
        self._most_lots[shape] = most

    @property
    def _room(self) -> str:
        return getattr(self.costs, "room", None) or size_text(self.costs.memory)

    def __iter__(self) -> Iterator[StepPlan]:
        epoch = self.epoch
        window = SampleWindow(self._stream, epoch, self._queue.drawn)
        while True:
            self._fill(window)
            if not len(self._queue):
                if window.is_over and self.epoch == epoch:
                    self.epoch, self._queue = epoch + 1, Queue()
                return
            # Planned from the queue alone, so that a loaded state plans the same step again.
            plan = self._planned(epoch)
            # Counted before the plan is returned, so that a state saved with it includes it.
            self.step += 1
            if not len(self._queue) and window.is_over:
                self.epoch, self._queue = epoch + 1, Queue()
            yield plan
            if self.epoch != epoch:
                return

    def _fill(self, window: SampleWindow) -> None:
        """Draws windows until the queue contains a complete step."""
        while not window.is_over and self._queue.weight < total(self.budget, self.ranks):
            indices, shapes = window.draw(self.window)
            self._queue.drawn += len(indices)
            for index, shape in zip(indices.tolist(), shapes, strict=True):
                if shape not in self._fits:
                    self._meet(shape, index)
            indices, shapes = self._usable(indices, shapes)
            if not len(indices):
                continue
            key = [abs(self.seed), window.epoch]
            draw = np.random.Generator(np.random.Philox(key=key, counter=self._queue.drawn))
            counts = Counter(shapes)
            weights = {shape: self._weights(shape) for shape in counts}
            steps = sum(n * weights[s] for s, n in counts.items()) / total(self.budget, self.ranks)
            order = order_by_shape(
                shapes, longer_lots(counts, self._lots, self._most_lots, steps), draw
            )
            names = [shapes[place] for place in order.tolist()]
            self._queue.extend(indices[order], names, np.array([weights[name] for name in names]))

    def _time_of(self, shape: Shape) -> float:
        return self._solver.rank_seconds(shape) if isinstance(self.budget, Seconds) else 0.0

    def _usable(self, indices: np.ndarray, shapes: list[Shape]) -> tuple[np.ndarray, list[Shape]]:
        """Drops and counts samples that fit at no degree."""
        fits = [self._fits[shape] for shape in shapes]
        if all(fits):
            return indices, shapes
        self.skipped.update(s for s, fit in zip(shapes, fits, strict=True) if not fit)
        kept = [shape for shape, fit in zip(shapes, fits, strict=True) if fit]
        return indices[np.array(fits, dtype=bool)], kept

    def _planned(self, epoch: int) -> StepPlan:
        count = self._count()
        solved = self._phases.solved(Counter(self._queue.shapes[:count]))
        while isinstance(self.budget, Seconds) and solved.seconds > self.budget.seconds:
            if count == 1:
                break
            share = self.budget.seconds / solved.seconds
            count = max(1, min(count - 1, int(0.995 * share * count)))
            solved = self._phases.solved(Counter(self._queue.shapes[:count]))
        indices, shapes = self._queue.take(count)
        members: dict[Shape, list[int]] = {}
        for index, shape in zip(indices, shapes, strict=True):
            members.setdefault(shape, []).append(index)
        phases = [place(part, members, self._facts, self.ranks) for part in solved.parts]
        aside = [(index, shape) for shape in members for index in members[shape]]
        if aside:
            self._queue.put_back(aside, self._weights)
        return StepPlan(
            self.step,
            epoch,
            phases[0],
            solved.seconds,
            solved.bound,
            tuple(index for index, _ in aside),
            tuple(phases[1:]),
        )

    def _count(self) -> int:
        """Number of samples for the next step, from the front of the queue."""
        nearest = isinstance(self.budget, Tokens)
        return self._queue.up_to(total(self.budget, self.ranks), nearest)

    def _weights(self, shape: Shape) -> float:
        return weight(self.budget, self.costs.tokens(shape), self._time_of(shape))

    def check_sample(self, index: int, planned: Shape, found: Shape) -> None:
        """Rejects a sample whose shape differs from the table.

        Raises:
            GulliverError: the shapes differ; names the sample and both shapes.
        """
        if found != planned:
            raise GulliverError(
                f"sample {index} has shape {found}, but the table has {planned}: rebuild the table"
            )

    @property
    def degrees(self) -> tuple[int, ...]:
        return self._degrees

    @property
    def signature(self) -> str:
        """Digest of all inputs of planning; ranks with equal digests plan the same steps."""
        digest = hashlib.blake2b(digest_size=8)
        settings = (self.ranks, self.budget, self.window, self.intra, self.inter, self.pac)
        more = self._degrees, self.unfit, self.costs.memory
        inputs = (*settings, *more, self.stages, self._solver.packer)
        digest.update(repr((inputs, self._stream.digest, self.costs.identity)).encode())
        for (shape, degree), facts in sorted(self._facts.items(), key=repr):
            digest.update(repr((shape, degree, facts[0], facts[-1])).encode())
        digest.update(json.dumps(self.state_dict(), sort_keys=True).encode())
        return digest.hexdigest()

    def position(self) -> Position:
        """The current position, for `rewind` or `state_dict`."""
        return self.epoch, self.step, self._queue.copy()

    def upcoming(self) -> StepPlan | None:
        """Plans the next step without advancing, for example to prefetch it; None at the end."""
        before, skipped = self.position(), self.skipped.copy()
        plan = next(iter(self), None)
        # Planning is deterministic: the same plan is returned when it is requested again.
        self.rewind(before)
        self.skipped = skipped
        return plan

    def rewind(self, position: Position) -> None:
        """Returns to a position; earlier iterators become invalid."""
        self.epoch, self.step, queue = position
        self._queue = queue.copy()

    def state_dict(self, position: Position | None = None) -> dict[str, Any]:
        """Returns a position as plain values; default: that of the last returned plan."""
        epoch, step, queue = position or (self.epoch, self.step, self._queue)
        position_now = {
            "epoch": epoch,
            "step": step,
            "drawn": queue.drawn,
            "queue": list(queue.indices),
        }
        return {
            **position_now,
            "digest": digest_of(position_now),
            "data": self._stream.digest,
            "model": self.costs.identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state, on any number of ranks.

        Raises:
            GulliverError: the state was saved with different data, seed or model, or is
                invalid.
        """
        check_state(state, self.costs.identity, self._stream.digest)
        check_position(state["epoch"], state["step"], None)
        queue = self._stream.restored(state["epoch"], state["drawn"], state["queue"])
        self.epoch, self.step = state["epoch"], state["step"]
        for index, shape in queue:
            if shape not in self._fits:
                self._meet(shape, index)
        self._queue = Queue(state["drawn"])
        indices = np.array([index for index, _ in queue], dtype=np.int64)
        shapes = [shape for _, shape in queue]
        # With fewer ranks, or less memory, samples drawn by the saved run may not fit.
        indices, shapes = self._usable(indices, shapes)
        weights = np.array([self._weights(shape) for shape in shapes])
        self._queue.extend(indices, shapes, weights)

    def describe(self) -> str:
        """Describes the planner in one line."""
        on = [name for name in ("intra", "inter", "pac") if getattr(self, name)]
        degrees = ", ".join(map(str, self._degrees))
        ahead = f"window of {self.window:,} samples"
        ranks = f"{self.ranks} ranks"
        if self.stages > 1:
            ranks += f" of {self.stages} stages each"
        return (
            f"{ranks}, {self.budget}, degrees {degrees}, {' + '.join(on) or 'none'} on, "
            f"{ahead}, costs of {self.costs.identity}"
        )
