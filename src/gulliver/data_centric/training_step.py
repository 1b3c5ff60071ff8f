"""Runs a planned step on this rank: its micro-batches, with gradients of the mean over the step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster.hybrid.mesh import Degree, sequence_rows
from gulliver.booster.hybrid.optimizer import HybridOptimizer
from gulliver.booster.running import Criterion, call, own_loss
from gulliver.comm.collectives import all_reduce
from gulliver.comm.world import current_world
from gulliver.data_centric.recompute import RecomputeSwitch, StageSwitch
from gulliver.data_centric.steps import MicroBatch, RankGroup, StepPlan
from gulliver.errors import GulliverError
from gulliver.parallel.zero.optimizer import ZeroOptimizer
from gulliver.parallel.zero.step import UnevenStep, uneven_step

# For each phase of a step: the ranks of all groups, and this rank's group.
Phases = Sequence[tuple[Sequence[Sequence[int]], RankGroup]]


# [Note: exact weights] A loss is the mean over its micro-batch, and all d ranks of a group return
# it. The optimizer divides the sum over its R ranks by R. So a micro-batch with weight w of the
# step's W is multiplied by (w / W) (R / d): the sum over ranks, divided by R, is then the mean over
# the step, for any groups. Clipping, loss scale, schedules and averages of weights are not
# affected.
#
# Gradients of a step are not reduced before its last backward; see `gulliver.parallel.zero.step`.
#
# [Note: who waits for whom] The last backward of a rank waits for the gradients of all others,
# while ranks of one group need each other's messages during it. So it must not wait if another rank
# of the group has work in a later phase, which would wait for this rank: then gradients are reduced
# after the loop.
@dataclass(frozen=True)
class LoadedBatch:
    """Samples that a group of ranks runs together; equal on all its ranks.

    Attributes:
        data: the collated samples, on this rank's device.
        samples: indices of the samples in the dataset.
        shape: shape of all samples.
        weight: total weight of the samples in the mean over the step.
        degree: number of ranks that share the samples.
        seeds: a seed for each sample, derived from seed, epoch and index.
    """

    data: Any
    samples: tuple[int, ...]
    shape: Any
    weight: float
    degree: int
    seeds: tuple[int, ...]

    @property
    def generators(self) -> list[torch.Generator]:
        """CPU generators for each sample, independent of ranks and groups."""
        return [torch.Generator().manual_seed(seed) for seed in self.seeds]


@dataclass(frozen=True)
class StepContext:
    """Settings shared by the steps of a run."""

    # The boosted model.
    model: nn.Module
    optimizer: ZeroOptimizer
    # Degree of the model; None if sequences are not shared.
    degree: Degree | None
    # Selects the blocks that the next forward keeps or recomputes; None if all are kept.
    switch: RecomputeSwitch | StageSwitch | None


@dataclass
class TrainingStep:
    """One optimizer step on this rank. Loop over it once, and call `backward` for each batch.

    Attributes:
        plan: the plan that all ranks run.
        weight: total weight of all samples of the step.
        begun: whether the loop over its micro-batches has started.
        ended: whether the loop has finished.
        measured: shape, predicted and measured seconds of each micro-batch so far.
    """

    plan: StepPlan
    weight: float
    context: StepContext
    # This rank's micro-batches of all phases, as they are loaded.
    coming: Generator[LoadedBatch]
    measured: list[tuple[Any, float, float]] = field(default_factory=list)
    begun: bool = False
    ended: bool = False
    _steps: int = 0
    _open: LoadedBatch | None = None
    _uneven: UnevenStep | None = None
    _left: int = 0
    _ends_alike: bool = True
    _sum: Tensor | None = None

    def __iter__(self) -> Iterator[LoadedBatch]:
        if self.context.optimizer.pipeline is not None:
            raise GulliverError(
                "blocks are on several pipeline stages, which run all micro-batches together; "
                "call step.run(criterion) instead of looping"
            )
        with self._opened() as phases:
            for rows, group in phases:
                with self._sharing(rows):
                    for micro in group.micro_batches:
                        yield from self._run(micro, next(self.coming))
        self.ended = True

    def run(
        self,
        criterion: Criterion | None = None,
        prepare: Callable[[LoadedBatch], Any] | None = None,
    ) -> None:
        """Runs forward and backward of all micro-batches of this rank, with or without stages.

        Replaces the loop over a step; required with several stages, whose schedule needs all
        micro-batches.

        Args:
            criterion: computes the loss (a scalar, the mean over the micro-batch) from the model's
                outputs and inputs. None uses the outputs' own ``loss``.
            prepare: converts a loaded batch into the model's keyword or positional arguments, equal
                on all ranks of a group. None uses its ``data``.

        Raises:
            GulliverError: the step was run before, or ranks of a group have different batches.
        """

        def made(batch: LoadedBatch) -> Any:
            given = batch.data if prepare is None else prepare(batch)
            if not isinstance(given, Mapping | tuple | list | Tensor):
                what = "collate" if prepare is None else "prepare"
                raise GulliverError(
                    f"{what} returned a {type(given).__name__} for a micro-batch: return a mapping "
                    "of keyword arguments, a tuple, a list or one tensor"
                )
            return given

        if self.context.optimizer.pipeline is None:
            for batch in self:
                given = made(batch)
                self.backward((criterion or own_loss)(call(self.context.model, given), given))
            return
        with self._opened() as phases:
            for rows, group in phases:
                batches = list(itertools.islice(self.coming, len(group.micro_batches)))
                with self._sharing(rows):
                    self._run_stages(rows, group, batches, [made(b) for b in batches], criterion)
        self.ended = True

    @contextmanager
    def _opened(self) -> Iterator[Phases]:
        """Opens the step; yields this rank's group in each phase, with the ranks of all groups."""
        if self.begun:
            raise GulliverError("the step was already looped over; loop over each step once")
        self.begun = True
        optimizer, degree, plan = self.context.optimizer, self.context.degree, self.plan
        self._steps = optimizer.taken.steps
        own = plan.groups_of(optimizer.rank)
        self._left = sum(len(group.micro_batches) for group in own)
        self._ends_alike = _ends_alike(plan, optimizer.rank)
        rows = [[group.ranks for group in phase] for phase in plan.phases]
        if degree is not None:
            for phase in rows:
                # Created now, because later the ranks are at different points of the step.
                degree.of_rows(phase)
        with ExitStack() as stack:
            self._uneven = stack.enter_context(uneven_step(optimizer))
            stack.callback(self.coming.close)
            yield list(zip(rows, own, strict=True))

    def _sharing(self, rows: Sequence[Sequence[int]]) -> AbstractContextManager[Any]:
        """Returns a context in which the ranks of each row share sequences."""
        degree = self.context.degree
        return nullcontext() if degree is None else sequence_rows(degree, rows)

    def _recompute(self, micro: MicroBatch) -> None:
        if self.context.switch is not None:
            self.context.switch.set(micro.kinds)

    def _run_stages(
        self,
        rows: Sequence[Sequence[int]],
        group: RankGroup,
        batches: Sequence[LoadedBatch],
        given: Sequence[Any],
        criterion: Criterion | None,
    ) -> None:
        if not batches:
            return
        begun, micros = time.perf_counter(), group.micro_batches
        optimizer, uneven = self.context.optimizer, self._uneven
        assert isinstance(optimizer, HybridOptimizer), "it has a pipeline"
        assert uneven is not None, "the step is open"
        factors = [batch.weight / self.weight / batch.degree for batch in batches]
        loss = optimizer.run_planned(
            uneven,
            given,
            factors,
            criterion,
            lambda number: self._recompute(micros[number]),
            str(rows),
        )
        assert loss is not None, "there are micro-batches"
        self._left -= len(batches)
        self._sum = loss.double() if self._sum is None else self._sum + loss.double()
        # Micro-batches overlap: each gets its predicted share of the total seconds.
        seconds, predicted = time.perf_counter() - begun, group.seconds
        for micro in micros:
            share = micro.seconds / predicted if predicted else 1 / len(micros)
            self.measured.append((micro.shape, micro.seconds, share * seconds))

    def _run(self, micro: MicroBatch, batch: LoadedBatch) -> Iterator[LoadedBatch]:
        """Yields a micro-batch, and checks that its backward was run."""
        begun = time.perf_counter()
        self._recompute(micro)
        self._open = batch
        yield batch
        if self._open is not None:
            raise GulliverError(
                "step.backward was not called for a micro-batch; call step.backward(loss) once "
                "for each"
            )
        seconds = time.perf_counter() - begun
        self.measured.append((micro.shape, micro.seconds, seconds))

    def backward(self, loss: Tensor) -> None:
        """Runs backward for the current micro-batch; `loss` is its weighted mean.

        Raises:
            GulliverError: there is no micro-batch, its backward has run already, or the loss is not
                a scalar.
        """
        if loss.dim():
            raise GulliverError(
                f"a loss of shape {tuple(loss.shape)} is not a scalar: pass the mean over the "
                "micro-batch"
            )
        batch, uneven = self._open, self._uneven
        if batch is None or uneven is None:
            raise GulliverError(
                "step.backward(loss) belongs in the loop over the step, once for each micro-batch"
            )
        share = batch.weight / self.weight / batch.degree
        self._left, self._open = self._left - 1, None
        if share == 0:  # such as a text of one token, whose mean loss is nan
            if not self._left:
                uneven.finish()
            return
        scaled = share * loss.detach().double()
        self._sum = scaled if self._sum is None else self._sum + scaled
        last = not self._left and self._ends_alike
        uneven.backward(loss * (share * self.context.optimizer.size), last=last)

    @property
    def is_applied(self) -> bool:
        """Whether the optimizer has stepped with these gradients."""
        return self.ended and self.context.optimizer.taken.steps > self._steps

    def loss(self) -> float:
        """Returns the mean loss over the step (collective, after the loop).

        Raises:
            GulliverError: the step is not complete.
        """
        if not self.ended:
            raise GulliverError("step.loss() needs a complete step: call it after the loop")
        device = current_world().device
        total = torch.zeros((), dtype=torch.float64, device=device)
        total += 0.0 if self._sum is None else self._sum.to(device)
        if self.context.optimizer.size > 1:
            all_reduce(total, "sum", self.context.optimizer.group)
        return float(total)


def _ends_alike(plan: StepPlan, rank: int) -> bool:
    """Whether `rank`'s last group with work is the last one with work for all its ranks."""
    working = [[group for group in phase if group.micro_batches] for phase in plan.phases]
    for number in reversed(range(len(working))):
        mine = next((group for group in working[number] if rank in group.ranks), None)
        if mine is not None:
            later = {r for phase in working[number + 1 :] for group in phase for r in group.ranks}
            return not later & {*mine.ranks}
    return True
