"""Runs batches through the stages of a pipeline.

`Pipeline.run` is one step: compare the batch over ranks and split it into micro-batches
(`batches.py`), run them through this rank's stages with torch's schedule (`runner.py`), broadcast
the loss. Gradients accumulate in the parameters as in a single backward; the caller then calls
`Stage.sum_tied` for tied parameters.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.comm.collectives import broadcast
from gulliver.comm.groups import RankGroup
from gulliver.comm.world import guard, together
from gulliver.errors import GulliverError
from gulliver.families.loss import asks_routers, hugging_face_of, own_loss
from gulliver.parallel.pipeline.batches import (
    UNEVEN,
    Batch,
    Criterion,
    Losses,
    MicroBatch,
    Weights,
    compare_batches,
    leaves,
    merge,
    split,
    weigh,
)
from gulliver.parallel.pipeline.runner import PipelineRun, StageRunner
from gulliver.parallel.pipeline.schedules import check_counts, fits, make_schedule, style_of
from gulliver.parallel.pipeline.stage import Stage

LOSSES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OF_ALL = ("output_hidden_states", "output_attentions")
ANY_COUNT = ("1f1b", "gpipe")
"""Schedules that support any number of micro-batches; each number needs its own schedule object."""
UNCOUNTED = 0
"""Number of samples passed for a micro-batch that is not split from a batch."""


class Pipeline:
    """Runs batches through the stages of a model.

    Args:
        stage: this rank's part of the model, with stages from `stages_by_rank(style, ...)`.
        style: name of the schedule, ``gpipe``, ``1f1b``, ``interleaved``, ``zero_bubble``, ``zbv``
            or ``dualpipev``.
        micro_batches: number of micro-batches per batch; None for two per stage.
        readers: function that returns the rank groups that must read the same batch; the first has
            all ranks of the pipeline. None for the pipeline's group.
        check_batch: compare the batches of these ranks in every run.
        look: function called with each batch after the comparison; it may raise.
        before: function called before each forward with the index of its first sample and the
            number of samples.

    Raises:
        GulliverError: the style is unknown, or does not support the number of micro-batches.
    """

    def __init__(
        self,
        stage: Stage,
        style: str = "1f1b",
        micro_batches: int | None = None,
        *,
        readers: Callable[[], Sequence[RankGroup]] | None = None,
        check_batch: bool = True,
        look: Callable[[Any], None] | None = None,
        before: Callable[[int, int], None] | None = None,
    ) -> None:
        style_of(style, len(stage.own))
        self.stage, self.style = stage, style
        self.micro_batches = micro_batches or 2 * stage.cut.stages
        self.look, self.before = look, before
        self.readers = readers or (lambda: [stage.rank_group])
        self.check_batch = check_batch
        check_counts(style, stage.cut.stages, stage.rank_group.size, self.micro_batches)
        self._runners: list[StageRunner] = []
        self._schedules = dict[int, Any]()
        self._failed = False
        self._loss: Losses | None = None

    @property
    def model(self) -> nn.Module:
        return self.stage.model

    def run(
        self,
        batch: Batch,
        criterion: Criterion | None = None,
        *,
        forward_only: bool = False,
        return_loss: bool = True,
        return_outputs: bool = False,
        weight: str | Callable[[Any], float] | None = None,
        scale: float = 1.0,
    ) -> dict[str, Any]:
        """Runs one batch, forward and (unless `forward_only`) backward.

        Args:
            batch: the model's arguments, the same on all ranks: a mapping of keyword arguments, a
                sequence of positional ones, or a tensor. Tensors are split along dim 0.
            criterion: loss function of the model's outputs and the micro-batch, a mean over its
                samples; None for the model's own loss.
            forward_only: evaluate without gradients; the loss is None if neither criterion nor
                model computes one.
            return_loss: broadcast the loss to all ranks.
            return_outputs: return the outputs, on the rank of the last stage.
            weight: unit that the loss averages over, if not samples: ``labels``,
                ``shifted_labels``, or a function that counts it in a micro-batch. None detects it
                for the model's own loss.
            scale: factor of the losses before backward, as in a gradient scaler; not included in
                the result.

        Returns:
            ``loss``, a detached tensor on every rank, and ``outputs``, None except on the rank of
            the last stage.

        Raises:
            GulliverError: ranks have different batches, the batch has too few samples, or a rank is
                lost.
        """
        # A message from a failed rank never arrives, so a failure is final.
        self._check_alive()
        with guard():
            states = self._compare_batches(batch, forward_only)
            if self.look is not None:
                self.look(batch)
            micros = split(self._complete(batch), self.micro_batches)
            plain = forward_only and not any("label" in path for path, _ in leaves(batch))
            other = criterion is not None or plain
            weights = weigh(micros, weight, own_loss(self.model), other)
            losses = Losses(micros, weights, criterion, scale, forward_only)
            run = self._new_run(micros, states, return_outputs, self._added(batch))
            run.before = self._drawing(micros)
            loss = self._through(run, losses, forward_only, return_loss)
        found = [run.outputs[n] for n in range(len(micros))] if run.outputs else None
        return {"loss": loss, "outputs": merge(found, weights.own) if found else None}

    def run_each(
        self,
        batches: Sequence[Batch],
        factors: Sequence[float],
        criterion: Criterion | None = None,
        *,
        scale: float = 1.0,
        before: Callable[[int], None] | None = None,
        state: str = "",
    ) -> Tensor | None:
        """Runs forward and backward of batches of any shapes, each as one micro-batch.

        With too few batches for the schedule, all forwards run before all backwards.

        Args:
            batches: micro-batches, the same on all ranks.
            factors: factor of each batch's loss; losses are not normalized.
            criterion: loss function, as in `run`.
            scale: factor of the losses before backward, as in `run`.
            before: function called before each forward with the index of its micro-batch.
            state: text that identifies other settings on which shapes between stages depend.

        Returns:
            The sum of all losses times their factors, detached, on every rank.

        Raises:
            GulliverError: ranks have different batches, a rank is lost, or the schedule needs a
                fixed number of micro-batches.
        """
        self._check_alive()
        if self.style not in ANY_COUNT:
            raise GulliverError(
                f"pp_style={self.style!r} needs a fixed number of micro-batches: use "
                f"{' or '.join(map(repr, ANY_COUNT))} if it varies"
            )
        with guard():
            states = self._compare_batches(list(batches), False)
            if self.look is not None:
                for batch in batches:
                    self.look(batch)
            micros = [MicroBatch(self._complete(batch), UNCOUNTED) for batch in batches]
            weights = Weights(list(factors), list(factors))
            losses = Losses(micros, weights, criterion, scale, False)
            # Rejects requested caches in any of the batches.
            (added, *_) = [self._added(batch) for batch in batches]
            run = self._new_run(micros, f"{states}|{state}", False, added)
            run.before = before
            return self._through(run, losses, False, True)

    def _check_alive(self) -> None:
        if self._failed:
            raise GulliverError(
                "the previous run failed, and messages may still be in flight: restart from a "
                "checkpoint"
            )

    def _new_run(
        self, micros: Sequence[MicroBatch], states: str, keep: bool, added: dict[str, Any]
    ) -> PipelineRun:
        kinds = [_short(f"{states}|{micro.shapes()}") for micro in micros]
        run = PipelineRun(micros, kinds, self.model, keep, added)
        run.weights = [p for p in self.model.parameters() if p.requires_grad]
        return run

    def _drawing(self, micros: Sequence[MicroBatch]) -> Callable[[int], None] | None:
        before = self.before
        if before is None:
            return None
        starts = [0, *itertools.accumulate(micro.samples for micro in micros)]
        return lambda number: before(starts[number], micros[number].samples)

    def _through(
        self, run: PipelineRun, losses: Losses, forward_only: bool, return_loss: bool
    ) -> Tensor | None:
        self._failed = True
        with together():
            self._execute(run, losses, forward_only)
            if losses.given is None:
                self._refuse_uncounted(losses)
            loss = self._share(losses) if return_loss else None
        self._failed = False
        return loss

    def _execute(self, run: PipelineRun, losses: Losses, forward_only: bool) -> None:
        if self.stage.rank_group.size == 1 and self.stage.cut.stages == 1:
            self._alone(run, losses, forward_only)
            return
        self._loss = losses
        schedule = self._schedule(len(run.micros))
        for runner in self._runners:
            runner.run, runner.messages.micro_batches = run, len(run.micros)
        # The schedule's target is the index of the micro-batch.
        numbers = torch.arange(len(run.micros))
        step = schedule.eval if forward_only else schedule.step
        try:
            with torch.set_grad_enabled(not forward_only):
                step(target=numbers, losses=[], return_outputs=False)
            for runner in self._runners:
                runner.messages.finish()
        finally:
            self._loss = None
            for runner in self._runners:
                runner.run = None
                runner.clear_runtime_states()

    def _alone(self, run: PipelineRun, losses: Losses, forward_only: bool) -> None:
        with torch.set_grad_enabled(not forward_only):
            for number in range(len(run.micros)):
                args, kwargs = run.arguments(number)
                output = run.call(*args, **kwargs)
                if run.keep:
                    run.outputs[number] = output
                loss = losses(output, torch.tensor([number]))
                if not forward_only:
                    loss.backward()

    def _schedule(self, count: int) -> Any:
        if count not in self._schedules:
            if not self._runners:
                self._make_runners()
            stages, ranks = self.stage.cut.stages, self.stage.rank_group.size
            style = self.style if fits(self.style, stages, ranks, count) else "gpipe"
            self._schedules[count] = make_schedule(
                style, self._runners, count, lambda o, n: self._losses(o, n)
            )
        return self._schedules[count]

    def _make_runners(self) -> None:
        places = {n: place for place, held in enumerate(self.stage.numbers) for n in held}
        ordered = [places[n] for n in range(self.stage.cut.stages)]
        device = self._device()
        self._runners = [
            StageRunner(self.stage, number, ordered, self.micro_batches, device)
            for number in self.stage.own
        ]

    def _losses(self, output: Any, number: Tensor) -> Tensor:
        assert self._loss is not None, "losses are computed in a run"
        loss = self._loss(output, number)
        (last,) = (runner for runner in self._runners if runner.is_last)
        # The schedule keeps this until its end. The loss itself would keep the last stage's graph
        # of every micro-batch, which a backward in two parts frees only with the loss.
        last.losses[int(number)] = loss
        return loss.detach()

    def _refuse_uncounted(self, losses: Losses) -> None:
        # Only the last stage detects this, in the middle of the schedule, where others would wait
        # for it; so the schedule finishes first.
        found = torch.tensor([float(losses.uncounted)], device=self._device())
        self._broadcast(found)
        if bool(found):
            self._failed = False
            raise GulliverError(
                "the loss cannot be averaged over micro-batches with different numbers of labels; "
                f"{UNEVEN}"
            )

    def _share(self, losses: Losses) -> Tensor | None:
        mine = self.stage.rank_group.rank == self.stage.last_stage_rank
        # Only the last stage knows whether there is a loss, and its dtype.
        found = torch.zeros(2, dtype=torch.float64, device=self._device())
        total = losses.total()
        if mine and total is not None:
            found[0], found[1] = 1 + LOSSES.index(total.dtype), total
        self._broadcast(found)
        return found[1].to(LOSSES[int(found[0]) - 1]) if found[0] else None

    def _broadcast(self, found: Tensor) -> None:
        rank_group = self.stage.rank_group
        if rank_group.size > 1:
            source = sorted(rank_group.ranks).index(rank_group.ranks[self.stage.last_stage_rank])
            broadcast(found, source, rank_group.process_group)

    def _compare_batches(self, batch: Batch, forward_only: bool) -> str:
        frozen = "".join("01"[p.requires_grad] for p in self.model.parameters())
        device = self._device()
        cast = torch.is_autocast_enabled(device.type)
        kind = torch.get_autocast_dtype(device.type) if cast else None
        state = f"{self.model.training} {forward_only} {kind} {frozen}"
        return _short(compare_batches(batch, state, self.readers(), device, self.check_batch))

    def _added(self, batch: Batch) -> dict[str, Any]:
        """Returns arguments that disable KV caches, which only generation uses."""
        given = batch if isinstance(batch, Mapping) else {}
        config = getattr(self.model, "config", None)
        asked = [name for name in OF_ALL if given.get(name, getattr(config, name, False))]
        asked += ["use_cache"] if given.get("use_cache") else []
        asked += ["output_router_logits"] if asks_routers(self.model, given) else []
        if asked:
            raise GulliverError(
                f"{asked[0]}=True needs the outputs of all blocks: remove it, or run the model "
                "without a pipeline"
            )
        known = inspect.signature(hugging_face_of(self.model).forward).parameters
        caches = getattr(getattr(self.model, "config", None), "use_cache", False)
        return {"use_cache": False} if caches and "use_cache" in known else {}

    def _complete(self, batch: Batch) -> Batch:
        """Returns the batch with random caption drops that are equal on all stages."""
        drop = getattr(getattr(self.model, "y_embedder", None), "drop", 0.0)
        if self.stage.stack.family != "STDiT3" or not self.model.training or not drop:
            return batch
        if not isinstance(batch, Mapping):
            raise GulliverError(
                "STDiT3 has to drop the same captions on all stages: pass its batch as a dict"
            )
        if batch.get("drop_caption") is not None:
            return batch
        dropped = (torch.rand(len(batch["y"]), device=self._device()) < drop).to(torch.uint8)
        for rank_group in self.readers():
            if rank_group.size > 1:
                source = sorted(rank_group.ranks).index(rank_group.ranks[0])
                broadcast(dropped, source, rank_group.process_group)
        return {**batch, "drop_caption": dropped.bool()}

    def _device(self) -> torch.device:
        found = next(self.model.parameters(), None)
        return torch.device("cpu") if found is None else found.device


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
