"""Fine-tunes a language model.

Start with `finetune`, then `Finetuner`. Planning is in `prepare.py`, resuming and saving in
`gulliver.jobs`, batches in `batches.py`, sharding and memory limits in `gulliver.booster`, the
computation of a micro-batch in `step.py`, and the result in `result.py`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver.booster.booster import Booster
from gulliver.comm.world import World, guard, init_world
from gulliver.finetune.adapters import adapt
from gulliver.finetune.base import DTYPES
from gulliver.finetune.config import FinetuneConfig, check_finetune
from gulliver.finetune.planning import as_values
from gulliver.finetune.prepare import FinetuneJob, make_optimizer, prepare
from gulliver.finetune.result import write_result
from gulliver.finetune.step import FinetuneStep
from gulliver.io.hub import push
from gulliver.jobs.display import console, print_json
from gulliver.jobs.loop import LoopOptions, Outcome, TrainingLoop, rate_factor
from gulliver.jobs.stop import StopRequest
from gulliver.options import resolved


def finetune(config: FinetuneConfig) -> Outcome:
    """Fine-tunes a language model; called on every rank.

    Raises:
        GulliverError: options, model, data and machine are not compatible (nothing is written); the
            loss is not finite; or another rank has failed.
    """
    config = check_finetune(config)
    world = init_world()
    with guard(), warnings.catch_warnings():
        # Deprecation warnings inside transformers, which users cannot fix.
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        job = prepare(config, world)
        if config.dry_run:
            if config.json and world.is_main:
                planned = job.planned
                found = {"memory": planned.needed, "step_seconds": planned.seconds}
                print_json({**as_values(job.recipe), **found, "plan": planned.plan.to_values()})
            return Outcome(0, True)
        finetuner = Finetuner(job, world)
        with StopRequest().listening() as stop:
            outcome = finetuner.run_to_end(stop)
    if world.is_main and config.push_to_hub is not None and outcome.result is not None:
        console().print(f"pushed: {push(outcome.result, config.push_to_hub)}")
    return outcome


class Finetuner(TrainingLoop):
    """Trains a language model, and evaluates it with held-out losses and samples."""

    def __init__(self, job: FinetuneJob, world: World) -> None:
        config, recipe, plan = job.config, job.recipe, job.planned.plan
        self.job, self.config = job, config
        self.best, self.best_step, self.worse = math.inf, -1, 0
        self.plain_model = self._load(world).train()
        if job.planned.recompute:
            self.plain_model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        optimizer = make_optimizer(self.plain_model, config, recipe.learning_rate)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: rate_factor(
                step, recipe.steps, recipe.warmup, config.schedule, config.final_fraction
            ),
        )
        with suppress(ImportError):  # allocated after boost it would count against a memory limit
            import_module("torch.utils.tensorboard")
        booster = Booster(plan=plan, verbose=False)
        place = booster.plugin.data_place()
        model, boosted, _, _, scheduler = booster.boost(
            self.plain_model, optimizer, lr_scheduler=scheduler
        )
        options = LoopOptions(
            title=f"fine-tuning ({config.method})",
            steps=recipe.steps,
            save_every=recipe.save_every,
            seed=config.seed,
            log_every=config.log_every,
            clip=config.clip,
            frozen=False,
            report_to=config.report_to,
        )
        made = model, boosted, scheduler
        super().__init__(job.run, world, options, booster, made, place, config.ranks_of_a_model)
        self.learner = FinetuneStep(booster, model, boosted, world, place[1])
        self.loader = job.batches(place[0])
        self.position = self.loader.state_dict()
        chosen = {"places": job.planned.places, "accumulate": job.planned.accumulate}
        self.start(
            job.checkpoint,
            options=resolved(config),
            chosen={**as_values(recipe), **chosen, "packing": job.packing},
            fingerprints={"base": job.base.fingerprint, "data": job.data.fingerprint},
            data=job.data.facts,
        )

    def _load(self, world: World) -> nn.Module:
        config, plan = self.config, self.job.planned.plan
        scratch = (self.job.planned.disk or self.job.run.folder) if plan.limited else None
        dtype = DTYPES[self.job.recipe.precision]
        model = self.job.base.load(dtype, world.device, scratch, world.size == 1)
        return adapt(model, config) if config.method == "lora" else model

    @property
    def is_over(self) -> bool:
        patience = self.config.patience
        return super().is_over or bool(patience and self.worse >= patience)

    def run_to_end(self, stop: StopRequest) -> Outcome:
        """Trains until the last step or a signal; always saves the final state."""
        result = None
        if self.train(stop):
            job, model = self.job, self.plain_model
            result = write_result(job, job.run, model, self.world, self.best_step)
        best = self.best if math.isfinite(self.best) else math.nan
        return Outcome(self.step_number, self.is_over, self.seconds, best, result)

    def batches(self) -> Iterator[tuple[list[Any], Any]]:
        """Yields the micro-batches of consecutive steps over all epochs."""
        while True:
            # The rest of an epoch is too small for a step and is dropped.
            batches = list[Any]()
            for batch in self.loader:
                batches.append(batch)
                if len(batches) == self.job.planned.accumulate:
                    yield batches, self.loader.state_dict()
                    batches = []

    def forward_backward(self, batch: list[Any]) -> dict[str, torch.Tensor | float]:
        tokens = sum(int(one["input_ids"].numel()) for one in batch)
        return {"loss": self.learner.learn(batch), "tokens": float(tokens)}

    def describe(self, line: dict[str, Any], batch: list[Any], seconds: float) -> dict[str, str]:
        line |= {"tokens": int(line["tokens"]), "items": batch[0]["num_items"]}
        return {"tokens_per_s": f"{line['tokens'] / seconds:,.0f}"}

    def begin(self) -> bool:
        if self.step_number == 0:
            self._judge()
        return False

    def evaluate(self) -> None:
        last = self.step_number == self.options.steps
        if last or self.step_number % self.job.recipe.eval_every == 0:
            self._judge()

    def _judge(self) -> None:
        """Computes held-out loss and samples; saves the weights if they are the best so far."""
        step = self.step_number
        for prompt in self.job.prompts:
            made = prompt.continued(self.learner, self.job.tokenizer, self.config.sample_tokens)
            if self.world.is_main:
                self.run.samples.append({"step": step, **made})
        if not self.job.data.held_out:
            return
        loss = self.learner.judge(iter(self.job.batches(self.place[0], held_out=True)))
        if self.world.is_main:
            self.display.console.print(f"step {step}: held-out loss {loss:.4f}")
            self.run.log.append({"step": step, "held_out_loss": loss})
            self.scalars("held_out/loss", loss, step)
        if not loss < self.best:
            self.worse += 1
            return
        self.best, self.best_step, self.worse = loss, step, 0
        # Initial weights are in the model's own files, except for new adapters.
        if step or self.config.method == "lora":
            self.booster.save(self.job.run.best.root, step, self.model, frozen=False, keep=1)

    def state(self) -> dict[str, Any]:
        best = self.best if math.isfinite(self.best) else None
        return {"run": {"best": best, "best_step": self.best_step, "worse": self.worse}}

    def load_state(self, run: dict[str, Any], folder: Path) -> None:
        self.loader.load_state_dict(run["position"])
        self.best = math.inf if run["best"] is None else run["best"]
        self.best_step, self.worse = run["best_step"], run["worse"]
