"""Loads and runs a planner's steps."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from gulliver._compat import is_batch_norm
from gulliver.booster.hybrid.mesh import degree_of
from gulliver.booster.hybrid.optimizer import HybridOptimizer
from gulliver.comm.collectives import gather_objects
from gulliver.comm.world import current_world
from gulliver.data.documents import pack_documents
from gulliver.data.transfer import move_tensors
from gulliver.data_centric.planner import DataCentricPlanner
from gulliver.data_centric.recompute import RecomputeSwitch, StageSwitch
from gulliver.data_centric.steps import MicroBatch, StepPlan
from gulliver.data_centric.training_step import LoadedBatch, StepContext, TrainingStep
from gulliver.errors import GulliverError
from gulliver.parallel.optimizer import BoostedOptimizer, persistent_buffers
from gulliver.parallel.zero.optimizer import ZeroOptimizer
from gulliver.parallel.zero.step import LEFT, check_uneven
from gulliver.planner.model import unwrapped

NAMED = 3
# Optimizers of models whose buffers were compared.
_COMPARED = WeakSet[ZeroOptimizer]()


def warn_of_own_buffers(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    """Warns once about saved buffers that differ between ranks (collective, after a step)."""
    # Once per run, not per epoch: a gather between two steps cannot overlap.
    if optimizer.size == 1 or optimizer in _COMPARED:
        return
    _COMPARED.add(optimizer)
    # Contents are compared, because not every write increments a tensor's version.
    mine = {name: _digest(buffer) for name, buffer in persistent_buffers(model).items()}
    found = gather_objects(mine, optimizer.group)
    names = sorted({name for other in found for name in other})
    apart = [n for n in names if len({other.get(n) for other in found}) > 1]
    if apart and current_world().is_main:
        more = f" and {len(apart) - NAMED} more" if len(apart) > NAMED else ""
        warnings.warn(
            f"forwards have changed {', '.join(apart[:NAMED])}{more} differently on each rank, "
            "and rank 0's are saved: keep such buffers outside the model, or reduce them after "
            "each step",
            stacklevel=3,
        )


def _digest(buffer: Tensor) -> bytes:
    found = hashlib.blake2b(f"{tuple(buffer.shape)} {buffer.dtype}".encode(), digest_size=16)
    found.update(buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()


# Runs planned steps: each rank's micro-batches, and gradients of the mean over the whole step.
#
#     loader = DataCentricLoader(planner, dataset, model, optimizer)
#     for step in loader:                          # the rest of the current epoch
#         for batch in step:                       # this rank's micro-batches; may be none
#             step.backward(loss_of(model, batch.data))
#         optimizer.step()
#         optimizer.zero_grad()
#
# `step.run(criterion)` replaces the inner loop, and also works if blocks are on several stages.


# Weights of the mean over a step: a number for each sample of the dataset.
Weight = Callable[[int], float] | Sequence[float]


class DataCentricLoader:
    """Loads and runs the steps of a planner; create one on every rank.

    Args:
        planner: planner, equal on all ranks, for the number of ranks that share the optimizer.
        dataset: dataset, indexed like the planner's table.
        model: boosted model.
        optimizer: boosted optimizer.
        collate: creates a batch from a list of samples; None for torch's default.
        weight: returns the weight of a sample, such as its number of labels, equal on all ranks;
            losses are then weighted means. None for equal weights.
        shape_of: returns the shape of a loaded sample, to compare with the table.
        begin: called on all ranks with each plan before its samples are weighted, for example to
            read them, so that `weight` can return 0 for unreadable samples.

    Attributes:
        degree: degree of the model; None without sequence parallelism.
        passed_over: number of samples in steps that were skipped because all weights are 0.

    Raises:
        GulliverError: ranks plan different steps, or the model cannot run the plan.
    """

    def __init__(
        self,
        planner: DataCentricPlanner,
        dataset: Any,
        model: nn.Module,
        optimizer: BoostedOptimizer,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        weight: Weight | None = None,
        shape_of: Callable[[Any], Any] | None = None,
        begin: Callable[[StepPlan], None] | None = None,
    ) -> None:
        if not isinstance(optimizer, ZeroOptimizer):
            raise GulliverError(
                "steps with unequal work per rank need an optimizer boosted by DataCentricPlugin, "
                f"not a {type(optimizer).__name__}"
            )
        self.planner, self.dataset, self.model = planner, dataset, unwrapped(model)
        self.optimizer, self.degree = optimizer, degree_of(self.model)
        self._collate, self._weight = collate or default_collate, weight
        self._shape_of, self._begin = shape_of, begin
        _check(self)
        kinds = getattr(planner.costs, "kinds", ())
        named = [(kind.name, kind.count) for kind in kinds]
        stage = optimizer.pipeline_stage if isinstance(optimizer, HybridOptimizer) else None
        switch: RecomputeSwitch | StageSwitch | None = None
        if named and stage is not None:
            switch = StageSwitch(stage, named)
        elif named:
            switch = RecomputeSwitch(self.model, named)
        self._context = StepContext(model, optimizer, self.degree, switch)
        self._reading = Lock()
        self._given: tuple[TrainingStep, Any] | None = None
        self._first: tuple[int, Any] | None = None
        self.passed_over = 0
        if isinstance(weight, Sequence) and not any(weight):
            raise GulliverError("weight= is 0 for every sample, so there is nothing to train on")

    def __iter__(self) -> Iterator[TrainingStep]:
        if self._given is not None and not self._given[0].ended:
            # The loop ended before the step did, so its samples are in no step yet.
            self.planner.rewind(self._given[1])
        self._given, plans = None, iter(self.planner)
        while True:
            before = self.planner.position()
            plan = next(plans, None)
            if plan is None:
                return
            if self._begin is not None:
                self._begin(plan)
            weight = sum(self.weigh(index) for _, batch in plan for index in batch.samples)
            if weight == 0:  # nothing to learn, such as texts without labels
                self.passed_over += plan.samples
                continue
            if not weight > 0:
                raise GulliverError(
                    f"the samples of step {plan.step} have a total weight of {weight}: weight= "
                    "must return numbers of at least 0"
                )
            step = TrainingStep(plan, weight, self._context, self._load(plan))
            self._first = self._first_untaken(before)
            self._given = step, before
            yield step
            if not step.begun:
                raise GulliverError(
                    "a step was not looped over, so its samples would be skipped; loop over each "
                    "step"
                )
            if not step.ended:
                raise GulliverError(LEFT)
            warn_of_own_buffers(self.model, self.optimizer)

    def weigh(self, index: int) -> float:
        """Weight of a sample in the mean over its step."""
        if self._weight is None:
            return 1.0
        return float(self._weight(index) if callable(self._weight) else self._weight[index])

    def _load(self, plan: StepPlan) -> Generator[LoadedBatch]:
        """Loads this rank's micro-batches of a step, each during the previous one."""
        own = plan.groups_of(self.optimizer.rank)
        batches = [(micro, group.degree) for group in own for micro in group.micro_batches]
        if not batches:
            return
        pool = ThreadPoolExecutor(1, "gulliver-samples")
        try:
            coming: Future[Any] = pool.submit(self._samples, *batches[0])
            for number, (batch, degree) in enumerate(batches):
                data = coming.result()
                if number + 1 < len(batches):
                    coming = pool.submit(self._samples, *batches[number + 1])
                weight = sum(map(self.weigh, batch.samples))
                seeds = tuple(self._seed(plan.epoch, index) for index in batch.samples)
                data = move_tensors(data, current_world().device)
                yield LoadedBatch(data, batch.samples, batch.shape, weight, degree, seeds)
        finally:
            # Without waiting: the garbage collector may run this for an abandoned step, on any
            # thread; a thread of the pool would wait for itself.
            pool.shutdown(wait=False, cancel_futures=True)

    def _samples(self, batch: MicroBatch, degree: int) -> Any:
        with self._reading:  # an abandoned step may still be reading
            samples = [self.dataset[index] for index in batch.samples]
        if self._shape_of is not None:
            for index, sample in zip(batch.samples, samples, strict=True):
                self.planner.check_sample(index, batch.shape, self._shape_of(sample))
        if self._collate is pack_documents and degree > 1:
            # Zigzag layouts give each rank two pieces: a row needs a token for each of them.
            return pack_documents(samples, least=2 * degree)
        return self._collate(samples)

    def _seed(self, epoch: int, index: int) -> int:
        told = f"{self.planner.seed} {epoch} {index}".encode()
        return int.from_bytes(hashlib.blake2b(told, digest_size=7).digest())

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last applied step, as plain values.

        A step whose gradients are not applied yet, or several accumulated ones, will run again; so
        samples are used exactly once even if the job ends before the optimizer steps.
        """
        if self._first is not None and self._first[0] == self.optimizer.taken.steps:
            return self.planner.state_dict(self._first[1])
        if self._given is not None and not self._given[0].is_applied:
            return self.planner.state_dict(self._given[1])
        return self.planner.state_dict()

    def _first_untaken(self, before: Any) -> tuple[int, Any]:
        """Number of optimizer steps, and the position before the first unapplied step."""
        # Gradients of several steps may be accumulated for one optimizer step, which may come after
        # the next step has been returned.
        taken = self.optimizer.taken.steps
        if self._first is not None and self._first[0] == taken:
            return self._first
        if self._given is not None and self._given[0].ended and not self._given[0].is_applied:
            return taken, self._given[1]
        return taken, before

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the step of a saved state, on any number of ranks.

        Raises:
            GulliverError: the state was saved with different data, seed or model.
        """
        self.planner.load_state_dict(state)
        self._given = self._first = None


def _check(loader: DataCentricLoader) -> None:
    """Rejects, on all ranks, settings that would fail in some step."""
    planner, optimizer = loader.planner, loader.optimizer
    if planner.ranks != optimizer.size:
        raise GulliverError(
            f"the planner plans for {planner.ranks} ranks, but {optimizer.size} share the "
            f"optimizer; plan for {optimizer.size} ranks"
        )
    check_uneven(optimizer)
    held = optimizer.pipeline_stage if isinstance(optimizer, HybridOptimizer) else None
    stages = 1 if held is None else held.cut.stages
    if getattr(planner, "stages", stages) != stages:
        raise GulliverError(
            f"the planner plans for {planner.stages} stages, but the model has {stages}: use "
            f"stages={stages}, DataCentricPlugin's pp_size"
        )
    mixing = [n for n, m in loader.model.named_modules() if is_batch_norm(m) and m.training]
    if mixing:
        raise GulliverError(
            f"{mixing[0]} mixes the samples of a batch, so that gradients would depend on how they "
            "are grouped: call its eval(), or use a per-sample norm such as GroupNorm"
        )
    wide = [degree for degree in planner.degrees if degree > 1]
    if wide and optimizer.size > 1:
        if loader.degree is None:
            raise GulliverError(
                f"groups of up to {wide[-1]} ranks are planned, but {type(loader.model).__name__} "
                "does not shard sequences: boost a model of a known family with "
                "DataCentricPlugin, or plan with intra=False, degree=1"
            )
        loader.degree.of_rows([range(optimizer.size)])
    signatures = gather_objects(planner.signature)
    others = [rank for rank, found in enumerate(signatures) if found != signatures[0]]
    if others:
        raise GulliverError(
            f"rank {others[0]} has a different table, costs, seed or position from rank 0: all "
            "ranks must plan the same steps"
        )
