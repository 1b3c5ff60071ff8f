"""The training loop of the text-to-video model.

Read `Trainer.step` first: one optimizer step is there from the batch to the average of the weights.
Who makes a trainer is in `_train.py`. What it does not know: how parameters lie in memory, which
ranks hold what, how gradients travel (`gulliver.booster`), and how a batch came (`_batches.py`).
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster import Booster, Plugin
from gulliver.booster.hybrid import HybridOptimizer
from gulliver.checkpoint import Mismatch, load
from gulliver.comm import (
    ALONE,
    RankGroup,
    World,
    all_reduce,
    gather_objects,
)
from gulliver.data import ClipTable
from gulliver.errors import GulliverError
from gulliver.jobs import (
    Display,
    StopRequest,
    console,
    derive,
    memory_in_use,
    tensorboard,
)
from gulliver.models import Autoencoder
from gulliver.options import resolved
from gulliver.video._batches import Batch, BatchMaker
from gulliver.video._build import build_model, flow_of, ready_texts
from gulliver.video._config import TrainConfig
from gulliver.video._ema import ExponentialAverage
from gulliver.video._optimizing import make_optimizer
from gulliver.video._plugins import make_plugin
from gulliver.video._rectified_flow import RectifiedFlow
from gulliver.video._run import Run
from gulliver.video._samples import Samples
from gulliver.video._shared import ranks_alike, share_coding
from gulliver.video._skipped import SkippedClips, common_samples, listing
from gulliver.video._sources import (
    make_flow,
    make_sampler,
)
from gulliver.video._stages import hide_targets, run_stages
from gulliver.video._validation import Validation


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call of `train`."""

    step: int
    finished: bool
    seconds: float
    """Wall time of the model's training, over all resumptions."""


class Trainer:
    """A model, its optimizer and its data, and the loop over them."""

    def __init__(
        self,
        config: TrainConfig,
        run: Run,
        dataset: Any,
        autoencoder: Autoencoder,
        world: World,
        held_out: Any = None,
        samples: Samples | None = None,
    ) -> None:
        self.config, self.run, self.world, self.samples = config, run, world, samples
        self.step_number, self.saved_step, self.seconds = 0, 0, 0.0
        begin = run.checkpoints.latest() is None
        model = build_model(config, autoencoder, run, begin).to(world.device).train()
        self.flow = flow_of(model, make_flow(config.flow, autoencoder))
        plugin = make_plugin(config)
        self.place = self._place(plugin)
        self.sampler = self._sampler(dataset, model, autoencoder)
        self.sampler_state = self.sampler.state_dict()
        self.skipped = SkippedClips(
            self.sampler.samples, len(self.sampler), config.data.unreadable_limit
        )
        self.maker = BatchMaker(
            dataset,
            self.sampler,
            autoencoder if dataset.encoded else autoencoder.to(world.device).eval(),
            ready_texts(config, run, model, (dataset, held_out), world),
            self.flow,
            config.flow,
            config.seed,
            world.device,
            self._agree if config.ranks_of_a_model > 1 or config.data_centric else None,
            frozenset(inspect.signature(model.forward).parameters) & {"num_frames", "ar"},
        )
        shares = config.ranks_of_a_model > 1 and not config.data_centric
        if shares and not self.maker.encoded:
            share_coding(
                autoencoder, ranks_alike(self.place), config.autoencoder.share, console().print
            )
        self.validation: Validation | None = None
        if held_out is not None and config.validation.every:
            told = config.validation, self.place, config.data.batch_size
            self.validation = Validation(held_out, self.maker, *told)
        precision = None if config.mixed_precision == "none" else config.mixed_precision
        self.booster = Booster(plugin=plugin, mixed_precision=precision)
        optimizer, scheduler = make_optimizer(config, model)
        self.plain_model = model
        self.model, self.optimizer, _, _, self.scheduler = self.booster.boost(
            model, optimizer, lr_scheduler=scheduler
        )
        if config.pp_size > 1:
            hide_targets(model)
        self._prepare()
        # After boost, which may have cut the model between ranks.
        self.average = ExponentialAverage(model, config.optimizer.ema)
        if world.is_main:
            self.booster.plan.save(run.folder / "plan.yaml")

    @property
    def alike(self) -> int:
        """Ranks that compute each sample of a validation together."""
        return self.config.ranks_of_a_model

    def _place(self, plugin: Plugin) -> tuple[int, int]:
        """This rank among those that read different samples, and their number."""
        return plugin.data_place()

    def _sampler(self, dataset: Any, model: nn.Module, autoencoder: Autoencoder) -> Any:
        """Makes the order of the samples, before the model is boosted."""
        return make_sampler(self.config, dataset, self.place)

    def _prepare(self) -> None:
        """What is left to do when the model is boosted."""

    def _batches(self) -> Iterator[Any]:
        """Yields what `step` takes, without end."""
        return self.maker.batches()

    def run_to_end(self, stop: StopRequest) -> Outcome:
        """Steps until the last, or until a signal; the last state is always saved."""
        stopping, last = False, self.step_number >= self.config.steps
        if last and self.samples is None:
            return Outcome(self.step_number, True, self.seconds)
        title = f"training {self.config.model.size}"
        main = self.world.is_main
        with (
            tensorboard(self.run.folder / "tensorboard", self.step_number, main) as scalars,
            Display(title, self.config.steps, self.step_number, main) as display,
        ):
            if self.step_number:  # A run that was killed has not shown its last checkpoint yet.
                stopping = not self._show_samples(stop, display, scalars)
            for batch in () if stopping or last else self._batches():
                started = time.monotonic()
                figures = self.step(batch, stop.wanted)
                self.seconds += time.monotonic() - started
                if figures["samples"]:
                    self._report(figures, display, scalars)
                stopping = figures["stop"] > 0
                last = self.step_number >= self.config.steps
                if figures["samples"]:
                    self._validate(last, display, scalars)
                due = figures["samples"] and self.step_number % self.config.save_every == 0
                if stopping or last or due:
                    self.save()
                if figures["samples"] and not stopping:
                    stopping = not self._show_samples(stop, display, scalars)
                if stopping or last:
                    break
                if self.skipped.problem is not None:
                    self._refuse_lost_data(self.skipped.problem)
        self._finish_saving()
        self._list_unreadable()
        if stopping and not last and main:
            console().print(
                f"stopped at step {self.step_number} of {self.config.steps}; "
                f"continue with --resume --out {self.run.folder}"
            )
        return Outcome(self.step_number, last, self.seconds)

    def _agree(self, kept: list[int]) -> list[int]:
        """Returns the samples that all ranks with this share could read; every rank calls it."""
        if not isinstance(self.maker.dataset, ClipTable):
            return kept
        return common_samples(self.place, kept)

    def _finish_saving(self) -> None:
        """Waits for the last checkpoint, and says what checkpoints have cost."""
        stall, saves = self.booster.stall_s, self.booster.saves
        self.booster.close()
        if self.world.is_main and saves:
            console().print(
                f"{saves} checkpoints held training up for {stall:.2f} s in all, the newest is "
                f"{self.run.checkpoints.latest()}"
            )

    def _list_unreadable(self) -> None:
        """Says which clips of a table broke or are misstated in it; every rank calls it."""
        dataset = self.maker.dataset
        if not isinstance(dataset, ClipTable):
            return
        found = gather_objects((dataset.broken, dataset.misstated))
        broken, misstated = (
            {one for part in parts for one in part} for parts in zip(*found, strict=True)
        )
        if broken and self.world.is_main:
            console().print(listing(broken))
        if misstated and self.world.is_main:
            console().print(listing(misstated, "otherwise than the table says, and used"))

    def _refuse_lost_data(self, problem: str) -> None:
        """Ends a run whose clips are gone; what it has learnt is saved. Every rank calls it."""
        self.save()
        self._finish_saving()
        self._list_unreadable()
        raise GulliverError(
            f"{problem}: training stopped at step {self.step_number}, {self._kept()}; put the "
            "clips back and continue with --resume, or allow more with --data.unreadable-limit"
        )

    def _kept(self) -> str:
        newest = self.run.checkpoints.latest()
        return f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"

    def step(self, batch: Batch, stop_wanted: bool = False) -> dict[str, float]:
        """Runs one optimizer step on this rank's share of a batch."""
        # Ranks that hold one model together have one share, and draw alike. A batch of which no
        # rank could read a sample is no step: nothing changes, and the position in the data stays
        # before it until there is a step after it.
        # Seeded anew at each step, so that a resumed run needs no saved generator.
        torch.manual_seed(derive(self.config.seed, 3, self.step_number, self.place[0]))
        count = self._count(batch)
        loss_sum = self._forward_backward(batch, count) if count else 0.0
        totals = torch.tensor(
            [float(loss_sum), float(stop_wanted)], dtype=torch.float64, device=self.world.device
        )
        all_reduce(totals, op="sum")
        if not count:
            return {"loss": math.nan, "norm": math.nan, "samples": 0, "stop": float(totals[1])}
        loss = float(totals[0]) / (count * self.config.ranks_of_a_model)
        norm = self._update(loss)
        self.sampler_state = batch.sampler_state
        return {"loss": loss, "norm": norm, "samples": count, "stop": float(totals[1])}

    def _update(self, loss: float) -> float:
        """Steps with the gradients of a whole step, whose loss is given; returns their norm."""
        limit = self.config.optimizer.clip or math.inf
        norm = float(self.optimizer.clip_grad_by_norm(limit))
        if not math.isfinite(loss) or not math.isfinite(norm):
            self._refuse_divergence(loss, norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.average.update(self.plain_model)
        self.step_number += 1
        return norm

    def _count(self, batch: Batch) -> int:
        """Counts the samples of the batch in all shares, without those that could not be read."""
        if not isinstance(self.maker.dataset, ClipTable):
            return batch.total
        read = int(len(batch.latents) * batch.weight)
        counts = torch.tensor([read, batch.skipped], device=self.world.device)
        all_reduce(counts)
        read, skipped = (int(count) // self.config.ranks_of_a_model for count in counts)
        self.skipped.count(batch.epoch, read, skipped)
        return read

    def _forward_backward(self, batch: Batch, count: int) -> Tensor:
        """Runs backward for this rank's share; returns the sum of its samples' losses."""
        if self.config.pp_size > 1:
            assert isinstance(self.flow, RectifiedFlow), "checked"
            run, scale = self.config.micro_batches, self.place[1] / count
            return run_stages(
                self.booster, self.model, self.optimizer, self.flow, batch, run, scale
            )
        held = len(batch.latents)
        size = math.ceil(held / self.config.accumulate)
        parts = [slice(start, start + size) for start in range(0, held, size)]
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            context = nullcontext() if last else self.booster.no_sync(self.model, self.optimizer)
            with context:
                share = self._losses(batch, part).sum() * batch.weight
                # Gradients are averaged over shares, losses over samples: the factor makes up for
                # it.
                self.booster.backward(share * (self.place[1] / count), self.optimizer)
            loss_sum += share.detach()
        return loss_sum

    def _losses(self, batch: Batch, part: slice) -> Tensor:
        """Computes the losses of some of a share's samples."""
        return self.flow.loss(
            self.model,
            batch.latents[part],
            batch.model_inputs(part),
            noise=batch.noise[part],
            timesteps=batch.timesteps[part],
            mask=None if batch.generate is None else batch.generate[part],
        )

    @torch.no_grad()
    def _loss_sum(self, batch: Batch) -> Tensor:
        """Computes the sum of a share's losses, forward only."""
        if self.config.pp_size > 1:
            assert isinstance(self.flow, RectifiedFlow), "checked"
            told = self.flow, batch, self.config.micro_batches, 1.0
            return run_stages(self.booster, self.model, None, *told)
        return self._losses(batch, slice(None)).sum() * batch.weight

    def _validate(self, last: bool, display: Display, scalars: Any) -> None:
        """Tells the losses of held-out clips where they are due; every rank calls it."""
        validation, step = self.validation, self.step_number
        if validation is not None and (last or step % self.config.validation.every == 0):
            found = validation.losses(self._loss_sum, self.alike)
            if self.world.is_main and found:
                validation.tell(found, step, self.run, display, scalars)

    def _show_samples(self, stop: StopRequest, display: Display, scalars: Any) -> bool:
        """Makes samples where they are due; False where a signal ended it. Every rank calls it."""
        samples, step = self.samples, self.step_number
        if samples is None or not samples.due(step, step >= self.config.steps):
            return True
        self.save()
        self.booster.wait()
        return samples.make(step, lambda: stop.wanted, display, scalars)

    def _refuse_divergence(self, loss: float, norm: float) -> None:
        self.booster.wait()  # one may be under way
        raise GulliverError(
            f"loss {loss} with gradient norm {norm} at step {self.step_number}: training stopped "
            f"before the weights changed, {self._kept()}; try a lower --optimizer.learning-rate"
        )

    def _report(self, figures: dict[str, float], display: Display, scalars: Any) -> None:
        if not self.world.is_main:
            return
        batch = self.sampler.samples / len(self.sampler)
        rate = self.step_number / max(self.seconds, 1e-9) * batch
        display.advance(
            loss=f"{figures['loss']:.4f}",
            grad_norm=f"{figures['norm']:.3f}",
            samples_per_s=f"{rate:.0f}",
            memory=f"{memory_in_use() / 2**30:.2f} GiB",
        )
        learning_rate = self.scheduler.get_last_lr()[0]
        if self.step_number % self.config.log_every and self.step_number != self.config.steps:
            return
        line = {
            "step": self.step_number,
            "loss": figures["loss"],
            "grad_norm": figures["norm"],
            "learning_rate": learning_rate,
            "seconds": round(self.seconds, 3),
        }
        self.run.append_log(line)
        for name in ("loss", "grad_norm", "learning_rate"):
            scalars(f"train/{name}", line[name], self.step_number)

    def save(self) -> None:
        """Begins a checkpoint of this step, or makes it whole; every rank calls it."""
        # A step that is saved already, or nothing learnt yet, needs none.
        if self.step_number == self.saved_step:
            return
        self.saved_step = self.step_number
        if self.world.is_main:  # tuning may have cut the chunks anew since
            self.booster.plan.save(self.run.folder / "plan.yaml")
        rows = self.maker.dataset
        run = {
            "step": self.step_number,
            "ema_updates": self.average.updates,
            "sampler": self.sampler_state,
            "rows": rows.fingerprint if isinstance(rows, ClipTable) else None,
            "config": resolved(self.config),
        }
        self.booster.save(
            self.run.checkpoints.root,
            self.step_number,
            self.model,
            self.optimizer,
            self.scheduler,
            state={"ema": self.average.leaves(*self._shares), "run": run},
            use_async=self.config.async_save,
            keep=self.config.keep,
        )

    @property
    def _shares(self) -> tuple[RankGroup, Callable[[str, Tensor], bool] | None]:
        """Rank group that holds the same parts of the model, and which of these it saves."""
        boosted = self.optimizer
        if not isinstance(boosted, HybridOptimizer):
            return ALONE, None
        return boosted.mesh.replicas, boosted.writes if self.config.pp_size > 1 else None

    def restore(self, folder: Path) -> None:
        """Takes up the state of a checkpoint; every rank calls it."""
        loaded = self.booster.load(
            folder,
            self.model,
            self.optimizer,
            self.scheduler,
            state={"run": None},
            random=False,  # every step draws from seeds of its own
        )
        # A stage has some of the names only, and there must be all of those.
        ema = load(folder, {"ema": self.average.leaves()}, strict=self.config.pp_size == 1)
        if ema.mismatches.get("ema", Mismatch()).missing:
            raise GulliverError(f"{folder} holds the average of another model: {ema}")
        state = loaded.values["run"]
        rows = self.maker.dataset
        if isinstance(rows, ClipTable) and "rows" in state:  # older checkpoints have none
            rows.check_rows(state["rows"])
        self.average.updates = state["ema_updates"]
        self.sampler.load_state_dict(state["sampler"])
        self.sampler_state = state["sampler"]
        self.step_number = self.saved_step = state["step"]
        if self.world.is_main:
            self.run.cut_log(self.step_number)
            past = self.run.read_log()
            self.seconds = past[-1]["seconds"] if past else 0.0
            console().print(f"resumed at step {self.step_number} from {folder}")
