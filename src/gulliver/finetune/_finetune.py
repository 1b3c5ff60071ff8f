"""Fine-tuning of a language model, from a folder and files of texts to a better model.

Read `finetune`, then `Finetuner.run_to_end`. What is decided before stands in `_prepare.py`. What
it does not know: how texts become batches (`_batches.py`), how parameters lie in memory and on
ranks (`gulliver.booster`), what a micro-batch costs and teaches (`_step.py`), and what becomes of
the weights at the end (`_result.py`).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver.booster import Booster
from gulliver.comm import World, all_reduce, barrier, broadcast_object, guard, init_world
from gulliver.errors import GulliverError
from gulliver.finetune._adapters import adapt
from gulliver.finetune._base import DTYPES
from gulliver.finetune._job_config import FinetuneConfig, check_finetune
from gulliver.finetune._prepare import Job, make_optimizer, prepare
from gulliver.finetune._recipe import as_values, factor
from gulliver.finetune._result import write_result
from gulliver.finetune._step import Learner
from gulliver.jobs import Display, StopRequest, console, derive, memory_in_use, tensorboard
from gulliver.options import resolved, size_text


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call of `finetune`.

    Attributes:
        step: last step.
        finished: whether the run is over; False where a signal has stopped it.
        seconds: wall time of training, over all resumptions.
        best: lowest loss on the held-out texts, that of the result unless ``--result last``; nan
            where there is none.
        result: folder of the model or the adapter; None where there is none yet.
    """

    step: int
    finished: bool
    seconds: float = 0.0
    best: float = math.nan
    result: Path | None = None


def finetune(config: FinetuneConfig) -> Outcome:
    """Fine-tunes a language model as `config` says, on every rank of the present world.

    Raises:
        GulliverError: the options, the model, the data or the machine do not allow it; nothing is
            written then. Or the loss is no longer a number, or another rank is gone.
    """
    check_finetune(config)
    world = init_world()
    with guard(), warnings.catch_warnings():
        # Of names that transformers has newer ones for: nothing that a user could mend.
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        job = prepare(config, world)
        if config.dry_run:
            return Outcome(0, True)
        finetuner = Finetuner(job, world)
        with StopRequest().listening() as stop:
            return finetuner.run_to_end(stop)


class Finetuner:
    """A model, its optimizer and its data, and the loop over them."""

    def __init__(self, job: Job, world: World) -> None:
        self.job, self.config, self.run, self.world = job, job.config, job.run, world
        self.recipe, plan = job.recipe, job.planned.plan
        self.step_number, self.saved_step, self.seconds = 0, 0, 0.0
        self.best, self.best_step, self.worse = math.inf, -1, 0
        self.model = self._load().train()
        if job.planned.recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        optimizer = make_optimizer(self.model, self.config, self.recipe.learning_rate)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: factor(self.config, self.recipe, step)
        )
        with suppress(ImportError):  # after boost it would count against a memory limit
            import_module("torch.utils.tensorboard")
        self.booster = Booster(plan=plan, verbose=False)
        self.place = self.booster.plugin.data_place()
        boosted = self.booster.boost(self.model, optimizer, lr_scheduler=scheduler)
        model, self.optimizer, _, _, self.scheduler = boosted
        self.learner = Learner(self.booster, model, self.optimizer, world, self.place[1])
        self.loader = job.batches(self.place[0])
        self.position = self.loader.state_dict()
        if job.checkpoint is not None:
            self._restore(job.checkpoint)
        if world.is_main:
            self._begin()
        barrier()

    def _load(self) -> nn.Module:
        """The model with its weights and adapters."""
        config, plan = self.config, self.job.planned.plan
        scratch = (self.job.planned.disk or self.run.folder) if plan.limited else None
        dtype = DTYPES[self.recipe.precision]
        model = self.job.base.load(dtype, self.world.device, scratch, self.world.size == 1)
        return adapt(model, config) if config.method == "lora" else model

    def _begin(self) -> None:
        """Writes what the run is, and cuts the logs to where it goes on."""
        job = self.job
        chosen = {"places": job.planned.places, "accumulate": job.planned.accumulate}
        self.run.write(
            options=resolved(self.config),
            chosen={**as_values(self.recipe), **chosen, "packing": job.packing},
            fingerprints={"base": job.base.fingerprint, "data": job.data.fingerprint},
            data=job.data.facts,
        )
        self.run.cut(self.step_number if job.checkpoint is not None else -1)
        self.booster.plan.save(self.run.folder / "plan.yaml")

    @property
    def is_over(self) -> bool:
        """Whether there is no further step."""
        patience = self.config.patience
        return self.step_number >= self.recipe.steps or bool(patience and self.worse >= patience)

    def run_to_end(self, stop: StopRequest) -> Outcome:
        """Steps until the last, or until a signal; the last state is always saved."""
        main, stopped = self.world.is_main, False
        title, steps = f"fine-tuning ({self.config.method})", self.recipe.steps
        with (
            tensorboard(self.run.folder / "tensorboard", self.step_number, main) as scalars,
            Display(title, steps, self.step_number, main) as display,
        ):
            if self.step_number == 0:
                self._evaluate(display, scalars)
            for batches in self._steps():
                stopped = self._step(batches, stop.wanted, display, scalars)
                due = self.step_number % self.recipe.eval_every == 0
                if due or self.step_number == steps:
                    self._evaluate(display, scalars)
                if self.is_over or stopped or self.step_number % self.recipe.save_every == 0:
                    self._save()
                if self.is_over or stopped:
                    break
        self.booster.close()
        result = None
        if self.is_over:
            result = write_result(self.job, self.run, self.model, self.world, self.best_step)
        elif main:
            console().print(
                f"stopped at step {self.step_number} of {steps}; continue with --resume"
            )
        best = self.best if math.isfinite(self.best) else math.nan
        return Outcome(self.step_number, self.is_over, self.seconds, best, result)

    def _steps(self) -> Iterator[list[Any]]:
        """Micro-batches of one step after the other, over as many epochs as it takes."""
        while not self.is_over:
            batches = list[Any]()
            for batch in self.loader:
                batches.append(batch)
                if len(batches) == self.job.planned.accumulate:
                    self.position = self.loader.state_dict()
                    yield batches
                    batches = []
                if self.is_over:
                    return

    def _step(self, batches: list[Any], stop_wanted: bool, display: Display, scalars: Any) -> bool:
        """Runs one optimizer step and tells of it; returns whether a rank wishes to stop."""
        started = time.monotonic()
        # Seeded anew at each step, so that a resumed run needs no saved generator.
        torch.manual_seed(derive(self.config.seed, 3, self.step_number, self.place[0]))
        share = self.learner.learn(batches)
        tokens = sum(int(batch["input_ids"].numel()) for batch in batches)
        totals = torch.tensor(
            [float(share), float(stop_wanted), float(tokens)],
            dtype=torch.float64,
            device=self.world.device,
        )
        all_reduce(totals, op="sum")
        loss, stopping, tokens = (float(total) for total in totals)
        loss, tokens = (n / self.config.ranks_of_a_model for n in (loss, tokens))
        norm = float(self.optimizer.clip_grad_by_norm(self.config.clip or math.inf))
        if not math.isfinite(loss) or not math.isfinite(norm):
            self._refuse_divergence(loss, norm)
        learning_rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        took = time.monotonic() - started
        self.seconds += took
        self._tell(
            {
                "step": self.step_number,
                "loss": loss,
                "grad_norm": norm,
                "learning_rate": learning_rate,
                "tokens": int(tokens),
                "items": batches[0]["num_items"],
                "seconds": round(self.seconds, 3),
            },
            tokens / took,
            display,
            scalars,
        )
        return stopping > 0

    def _tell(self, line: dict[str, Any], rate: float, display: Display, scalars: Any) -> None:
        if not self.world.is_main:
            return
        display.advance(
            loss=f"{line['loss']:.4f}",
            tokens_per_s=f"{rate:,.0f}",
            memory=size_text(memory_in_use()),
            **self._tiers(),
        )
        if self.step_number % self.config.log_every == 0 or self.is_over:
            self.run.log.append(line)
            for name in ("loss", "grad_norm", "learning_rate"):
                scalars(f"train/{name}", line[name], self.step_number)

    def _tiers(self) -> dict[str, Any]:
        """What the last step moved, where memory has a limit."""
        moved = self.booster.moved
        return {} if moved is None else {"read": size_text(moved[0]), "wrote": size_text(moved[1])}

    def _evaluate(self, display: Display, scalars: Any) -> None:
        """Held-out loss and samples; keeps the weights if they are the best so far."""
        told = self.job.tokenizer, self.config.sample_tokens
        samples = [
            {"step": self.step_number, **prompt.told(self.learner, *told)}
            for prompt in self.job.prompts
        ]
        if self.world.is_main:
            for sample in samples:
                self.run.samples.append(sample)
        if not self.job.data.held_out:
            return
        loss = self.learner.judge(iter(self.job.batches(self.place[0], held_out=True)))
        if self.world.is_main:
            display.console.print(f"step {self.step_number}: held-out loss {loss:.4f}")
            self.run.log.append({"step": self.step_number, "held_out_loss": loss})
            scalars("held_out/loss", loss, self.step_number)
        if not loss < self.best:
            self.worse += 1
            return
        self.best, self.best_step, self.worse = loss, self.step_number, 0
        # Of the start there are the model's own files, but none of new adapters.
        if self.step_number or self.config.method == "lora":
            self.booster.save(
                self.run.best.root, self.step_number, self.learner.model, frozen=False, keep=1
            )

    def _save(self) -> None:
        """Begins a checkpoint of this step; every rank calls it."""
        if self.step_number == self.saved_step:
            return
        self.saved_step = self.step_number
        self.booster.save(
            self.run.checkpoints.root,
            self.step_number,
            self.learner.model,
            self.optimizer,
            self.scheduler,
            state={"run": self._state()},
            frozen=False,
            keep=self.config.keep,
        )

    def _state(self) -> dict[str, Any]:
        best = self.best if math.isfinite(self.best) else None
        return {
            "step": self.step_number,
            "loader": self.position,
            "best": best,
            "best_step": self.best_step,
            "worse": self.worse,
        }

    def _restore(self, folder: Path) -> None:
        """Takes up the state of a checkpoint; every rank calls it."""
        loaded = self.booster.load(
            folder,
            self.learner.model,
            self.optimizer,
            self.scheduler,
            state={"run": None},
            random=False,  # every step draws from a seed of its own
            frozen=False,
        )
        state = loaded.values["run"]
        self.loader.load_state_dict(state["loader"])
        self.position = state["loader"]
        self.step_number = self.saved_step = state["step"]
        self.best = math.inf if state["best"] is None else state["best"]
        self.best_step, self.worse = state["best_step"], state["worse"]
        timed = [line for line in self.run.log.read() if "seconds" in line]
        past = [line["seconds"] for line in timed if line["step"] <= self.step_number]
        self.seconds = broadcast_object(past[-1] if past else 0.0)
        if self.world.is_main:
            console().print(f"resumed at step {self.step_number} from {folder}")

    def _refuse_divergence(self, loss: float, norm: float) -> None:
        self.booster.wait()  # one may be under way
        newest = self.run.checkpoints.latest()
        kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
        raise GulliverError(
            f"loss {loss} with gradient norm {norm} at step {self.step_number}: training stopped "
            f"before the weights changed, {kept}; try a lower --learning-rate"
        )
