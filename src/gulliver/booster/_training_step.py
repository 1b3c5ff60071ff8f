"""One planned step on this rank: its micro-batches, and gradients of the mean over the whole step.

[Note: exact weights] A loss is the mean over its micro-batch, and all d ranks of a group show it.
The optimizer divides the sum over its R ranks by R. So a micro-batch that counts w of the step's W
is multiplied with (w / W) (R / d): the sum over ranks, divided by R, is the mean over the step,
whatever the groups were. Clipping, loss scale, schedules and averages of weights see nothing else.

Gradients of a step are not reduced before its last backward; see `gulliver.parallel.zero._uneven`.

[Note: who waits for whom] The last backward of a rank waits for the gradients of all others. Ranks
of one group need each other's messages in the middle of it. So it must not wait where another rank
of the group has work in a later phase, which would wait for this one: there gradients leave after
the loop.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gulliver.booster._pipelined import Criterion, call, own_loss
from gulliver.booster.hybrid import Degree, HybridOptimizer
from gulliver.comm import all_reduce, current_world
from gulliver.data import MicroBatch, RankGroup, StepPlan
from gulliver.errors import GulliverError
from gulliver.parallel import ZeroOptimizer
from gulliver.parallel.zero import UnevenStep, uneven_step

Phases = Sequence[tuple[Sequence[Sequence[int]], RankGroup]]
"""Ranks of all groups, and the group of this rank, of each phase of a step."""


@dataclass(frozen=True)
class LoadedBatch:
    """Samples that a group of ranks runs at once; all its ranks have the same.

    Attributes:
        data: what `collate` made of the samples, on this rank's device.
        samples: indices of them in the data set.
        shape: shape of all of them.
        weight: what they count together in the mean over the step.
        degree: ranks that share them.
        seeds: a seed for each sample, of seed, epoch and index.
    """

    data: Any
    samples: tuple[int, ...]
    shape: Any
    weight: float
    degree: int
    seeds: tuple[int, ...]

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators for each sample, on the CPU: what they draw hangs on no rank and no group."""
        return [torch.Generator().manual_seed(seed) for seed in self.seeds]


class StepLoader(Protocol):
    """Interface of the loader that made a step; see `DataCentricLoader`."""

    called: nn.Module
    degree: Degree | None

    @property
    def optimizer(self) -> ZeroOptimizer: ...

    def sharing(self, rows: Sequence[Sequence[int]]) -> AbstractContextManager[Any]:
        """Lets the ranks of each row share sequences."""
        ...

    def load(
        self, plan: StepPlan, batches: Sequence[tuple[MicroBatch, int]]
    ) -> Generator[LoadedBatch]:
        """Loads micro-batches, whose degrees are given."""
        ...

    def recompute(self, batch: MicroBatch) -> None:
        """Lets the next forward keep, move or compute again what its plan says."""
        ...

    def settle(self) -> None:
        """Leaves nothing on the device that was to move to the host."""
        ...

    def wait(self) -> None:
        """Waits for the device, where times are asked for."""
        ...

    def observe(self, measured: Sequence[tuple[Any, float, float]]) -> None:
        """Tells the planner what all ranks have measured."""
        ...


@dataclass
class TrainingStep:
    """One optimizer step on this rank; loop over it once, with a `backward` for each batch.

    Attributes:
        plan: what all ranks run.
        weight: what all samples of the step count together.
        measured: shape, predicted and measured seconds of this rank's micro-batches so far.
    """

    loader: StepLoader
    plan: StepPlan
    weight: float
    measured: list[tuple[Any, float, float]] = field(default_factory=list)
    _begun: bool = False
    _ended: bool = False
    _steps: int = 0
    _open: LoadedBatch | None = None
    _uneven: UnevenStep | None = None
    _left: int = 0
    _ends_alike: bool = True
    _sum: Tensor | None = None

    def __iter__(self) -> Iterator[LoadedBatch]:
        if self.loader.optimizer.pipeline is not None:
            raise GulliverError(
                "blocks lie on several stages, which run all micro-batches of a step together: "
                "call step.run(criterion) in place of a loop over them"
            )
        with self._opened() as (coming, phases):
            for rows, group in phases:
                with self.loader.sharing(rows):
                    for micro in group.micro_batches:
                        yield from self._run(micro, next(coming))
        self._close()

    def run(
        self,
        criterion: Criterion | None = None,
        prepare: Callable[[LoadedBatch], Any] | None = None,
    ) -> None:
        """Runs all micro-batches of this rank, forward and backward, through stages or without.

        One call in place of the loop over a step, and the only way where blocks lie on several
        stages: their schedule needs all micro-batches at once.

        Args:
            criterion: the loss of a model's outputs and what it was called with: a scalar, the mean
                over the micro-batch. None takes the outputs' own ``loss``.
            prepare: makes of a loaded batch what the model is called with, keyword arguments or
                positional ones; the same on all ranks of a group. None takes its ``data``.

        Raises:
            GulliverError: the step was run before; ranks of a group have different batches.
        """

        def made(batch: LoadedBatch) -> Any:
            given = batch.data if prepare is None else prepare(batch)
            if not isinstance(given, Mapping | tuple | list | Tensor):
                what = "collate" if prepare is None else "prepare"
                raise GulliverError(
                    f"{what} made a {type(given).__name__} of a micro-batch: the model is called "
                    "with a mapping of keyword arguments, a tuple, a list or one tensor"
                )
            return given

        if self.loader.optimizer.pipeline is None:
            for batch in self:
                given = made(batch)
                self.backward((criterion or own_loss)(call(self.loader.called, given), given))
            return
        with self._opened() as (coming, phases):
            for rows, group in phases:
                batches = list(itertools.islice(coming, len(group.micro_batches)))
                with self.loader.sharing(rows):
                    self._run_stages(rows, group, batches, [made(b) for b in batches], criterion)
        self._close()

    @contextmanager
    def _opened(self) -> Iterator[tuple[Iterator[LoadedBatch], Phases]]:
        """Wraps the whole step: micro-batches as they load, and this rank's group of each phase."""
        if self._begun:
            raise GulliverError("the micro-batches of a step were looped over: each step once")
        self._begun = True
        loader, plan = self.loader, self.plan
        self._steps = loader.optimizer.taken.steps
        own = plan.groups_of(loader.optimizer.rank)
        self._left = sum(len(group.micro_batches) for group in own)
        self._ends_alike = _ends_alike(plan, loader.optimizer.rank)
        rows = [[group.ranks for group in phase] for phase in plan.phases]
        if loader.degree is not None:
            for phase in rows:
                # Made by all ranks together: later in the step they are at different places.
                loader.degree.of_rows(phase)
        with ExitStack() as stack:
            stack.callback(loader.settle)
            self._uneven = stack.enter_context(uneven_step(loader.optimizer))
            coming = loader.load(plan, [(m, g.degree) for g in own for m in g.micro_batches])
            stack.callback(coming.close)
            yield coming, list(zip(rows, own, strict=True))

    def _close(self) -> None:
        self._ended = True
        # The last one of several ranks ends with the gradients' way to all of them.
        loader = self.loader
        loader.observe(self.measured[:-1] if loader.optimizer.size > 1 else self.measured)

    def _run_stages(
        self,
        rows: Sequence[Sequence[int]],
        group: RankGroup,
        batches: Sequence[LoadedBatch],
        given: Sequence[Any],
        criterion: Criterion | None,
    ) -> None:
        """Runs the micro-batches of one phase through the stages."""
        if not batches:
            return
        begun, loader, micros = time.perf_counter(), self.loader, group.micro_batches
        optimizer, uneven = loader.optimizer, self._uneven
        assert isinstance(optimizer, HybridOptimizer), "it has a pipeline"
        assert uneven is not None, "the step is open"
        factors = [batch.weight / self.weight / batch.degree for batch in batches]
        loss = optimizer.run_planned(
            uneven,
            given,
            factors,
            criterion,
            lambda number: loader.recompute(micros[number]),
            str(rows),
        )
        assert loss is not None, "there are micro-batches"
        self._left -= len(batches)
        self._sum = loss.double() if self._sum is None else self._sum + loss.double()
        # They overlap: of the seconds of all, each is told its predicted share.
        seconds, predicted = time.perf_counter() - begun, group.seconds
        for micro in micros:
            share = micro.seconds / predicted if predicted else 1 / len(micros)
            self.measured.append((micro.shape, micro.seconds, share * seconds))

    def _run(self, micro: MicroBatch, batch: LoadedBatch) -> Iterator[LoadedBatch]:
        """Gives a micro-batch out, and sees that it had its backward."""
        begun = time.perf_counter()
        self.loader.recompute(micro)
        self._open = batch
        yield batch
        if self._open is not None:
            raise GulliverError(
                "a micro-batch had no backward: call step.backward(loss) once for each"
            )
        self.loader.wait()
        seconds = time.perf_counter() - begun
        self.measured.append((micro.shape, micro.seconds, seconds))

    def backward(self, loss: Tensor) -> None:
        """Backward of the loss of the present micro-batch: the mean over what it counts.

        Raises:
            GulliverError: there is no micro-batch, or it had its backward; the loss has dims.
        """
        if not isinstance(loss, Tensor):
            raise GulliverError(
                f"a loss that is a {type(loss).__name__}: give the mean over the micro-batch, a "
                "scalar tensor with its graph"
            )
        if loss.dim():
            raise GulliverError(
                f"a loss of shape {tuple(loss.shape)}: give the mean over the micro-batch, a scalar"
            )
        batch, uneven = self._open, self._uneven
        if batch is None or uneven is None:
            raise GulliverError(
                "step.backward(loss) belongs into the loop over the step, once for each micro-batch"
            )
        share = batch.weight / self.weight / batch.degree
        self._left, self._open = self._left - 1, None
        if share == 0:  # such as a text of one token: the mean over nothing is not a number
            if not self._left:
                uneven.finish()
            return
        scaled = share * loss.detach().double()
        self._sum = scaled if self._sum is None else self._sum + scaled
        last = not self._left and self._ends_alike
        uneven.backward(loss * (share * self.loader.optimizer.size), last=last)

    @property
    def is_taken(self) -> bool:
        """Whether the optimizer has stepped with what the micro-batches gave."""
        return self._ended and self.loader.optimizer.taken.steps > self._steps

    def loss(self) -> float:
        """The mean loss over the whole step; every rank calls it, after the loop.

        Raises:
            GulliverError: the step has not run, or not to its end.
        """
        if not self._ended:
            raise GulliverError("step.loss() is that of a step which has run: call it afterwards")
        device = current_world().device
        total = torch.zeros((), dtype=torch.float64, device=device)
        total += 0.0 if self._sum is None else self._sum.to(device)
        if self.loader.optimizer.size > 1:
            all_reduce(total, "sum", self.loader.optimizer.group)
        return float(total)


def _ends_alike(plan: StepPlan, rank: int) -> bool:
    """Whether no rank has work after the last group that it is in together with `rank`."""
    working = [[group for group in phase if group.micro_batches] for phase in plan.phases]
    for number in reversed(range(len(working))):
        mine = next((group for group in working[number] if rank in group.ranks), None)
        if mine is not None:
            later = {r for phase in working[number + 1 :] for group in phase for r in group.ranks}
            return not later & {*mine.ranks}
    return True
