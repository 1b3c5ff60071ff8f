"""Teaching a base one subject: from a few pictures to adapters, weights or a word.

Read `dreambooth`, then `Teacher.run_to_end`. What it does not know: what kind of model it is
(`_base.py`), which samples a step has (`_order.py`), how parameters lie in memory and on ranks
(`gulliver.booster`), and what becomes of them at the end (`_result.py`).

run/
  config.json          options, and fingerprints of base and data
  plan.yaml            how it ran
  log.jsonl            a line per step
  prior/               prior pictures, and what they depend on
  samples/step-*.png   a grid of pictures, and beside it how they were made (.json)
  checkpoints/step-*/  what learns, optimizer, schedule
  result/              what diffusers, or `gulliver generate`, loads
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.booster import Booster, Plugin
from gulliver.checkpoint import write_json
from gulliver.comm import World, all_reduce, barrier, default_ranks, guard, init_world
from gulliver.dreambooth._base import Base, Picture
from gulliver.dreambooth._config import MAY_CHANGE, DreamboothConfig, check_dreambooth
from gulliver.dreambooth._diffusers import INDEX, DiffusersBase
from gulliver.dreambooth._diffusers_files import EMBEDDINGS
from gulliver.dreambooth._motion import Outcome, in_motion, open_video
from gulliver.dreambooth._order import Order, Sample, shares
from gulliver.dreambooth._pictures import fingerprint, grid, read_pictures
from gulliver.dreambooth._planning import (
    PRECISIONS,
    lines_of,
    make_plugin,
    per_step,
    plan_run,
    precision_of,
    recompute_blocks,
    refuse_cut,
)
from gulliver.dreambooth._prior import prior_pictures, prior_texts, write_pixels
from gulliver.dreambooth._result import check_adapter, write_result
from gulliver.dreambooth._student import make_optimizer, make_student
from gulliver.dreambooth._video import VideoBase
from gulliver.dreambooth._words import check_texts
from gulliver.errors import GulliverError
from gulliver.finetune import Planned, Run
from gulliver.jobs import Display, StopRequest, console, derive, memory_in_use, tensorboard
from gulliver.options import resolved, size_text

GUIDANCE = 7.5
"""Weight of the prompt in sampling with pipelines of diffusers, where none is asked for."""
FINGERPRINTS = {
    "base": "--model is not the one that the run was begun with",
    "data": "--subject, or the prior pictures, are not those that the run was begun with",
}


def dreambooth(config: DreamboothConfig, plugin: Plugin | None = None) -> Outcome:
    """Teaches a base a subject as `config` says, on every rank of the present world.

    Args:
        config: options of the run.
        plugin: how ranks share the work; None makes the one that the options say.

    Raises:
        GulliverError: the options, the base, the pictures or the machine do not allow it; nothing
            is written then. Or the loss is no longer a number, or another rank is gone.
    """
    check_dreambooth(config)
    if config.motion and not config.plan:
        return in_motion(config, dreambooth, plugin)
    world = init_world()
    with guard():
        say = console().print if world.is_main else lambda _: None
        precision = precision_of(config, world.device.type)
        ranks = world.size if world.size > 1 else (config.ranks or default_ranks())
        ranks = ranks if config.plan else world.size
        chosen = plugin or make_plugin(config, precision, ranks)
        planned = _plan(config, chosen, world, precision, ranks, say)
        if config.plan:
            return Outcome(0, True)
        teacher = Teacher(config, chosen, planned, world, precision)
        with StopRequest().listening() as stop:
            return teacher.run_to_end(stop)


def open_base(
    config: DreamboothConfig, world: World, precision: str, on_meta: bool = False
) -> Base | None:
    """Opens the base of a run; None where it is to be on meta and cannot be.

    Raises:
        GulliverError: the folder holds no base that is known.
    """
    assert config.model is not None, "it is checked"
    if (config.model / INDEX).is_file():
        scratch = Path(config.disk.partition(":")[0]) if config.disk else config.out
        return DiffusersBase(
            config.model,
            config.resolution,
            world.device,
            PRECISIONS[precision],
            config.sampling_steps,
            GUIDANCE if config.guidance is None else config.guidance,
            config.snr_gamma,
            on_meta,
            scratch if config.memory is not None and not on_meta else None,
            world.size == 1,
        )
    if (config.model / "config.json").is_file() and (config.model / "checkpoints").is_dir():
        if config.snr_gamma is not None:
            raise GulliverError("--snr-gamma is for pipelines of diffusers: leave it out")
        return open_video(config, world.device, PRECISIONS[precision], on_meta)
    raise GulliverError(
        f"--model {config.model} is no pipeline of diffusers ({INDEX}) and no run of `gulliver "
        "train`: name the folder that pipe.save_pretrained, or that command, has written"
    )


def _plan(
    config: DreamboothConfig,
    plugin: Plugin,
    world: World,
    precision: str,
    ranks: int,
    say: Any,
) -> Planned | None:
    """Plans with a base on meta, and tells the plan; None for bases that cannot be on meta."""
    outline = open_base(config, world, precision, on_meta=True)
    if outline is None:
        return None
    refuse_cut(config, plugin, outline)
    planned = plan_run(config, plugin, outline, ranks)
    count = -(-per_step(config) // (ranks * planned.accumulate))
    for line in lines_of(planned, count, f"of {outline.side} x {outline.side}"):  # type: ignore[attr-defined]
        say(line)
    return planned


class Teacher:
    """A base that learns, its optimizer and its pictures, and the loop over them."""

    def __init__(
        self,
        config: DreamboothConfig,
        plugin: Plugin,
        planned: Planned | None,
        world: World,
        precision: str,
    ) -> None:
        self.config, self.world = config, world
        self.say = console().print if world.is_main else lambda _: None
        self.run = Run(config.out, config.keep, MAY_CHANGE, FINGERPRINTS)
        self.step_number, self.saved_step, self.seconds = 0, -1, 0.0
        subject = read_pictures(config, self.say)
        base = open_base(config, world, precision)
        assert base is not None, "it is not on meta"
        self.base = base
        if any(one.pixels.ndim == 4 for one in subject) and not isinstance(base, VideoBase):
            raise GulliverError(f"--subject {config.subject} has clips: this base makes pictures")
        if self.planned_late(planned):
            refuse_cut(config, plugin, base)
        self._check_prompts(subject)
        facts = {"base": base.fingerprint}
        self.run.open(config, {**facts, "data": self._data_known(subject)})
        prior = prior_pictures(base, config, world, self.say)
        self.facts = {**facts, "data": fingerprint([*subject, *prior])}
        checkpoint = self.run.open(config, self.facts)
        barrier()  # nobody writes before everybody has looked
        self.latents = base.encode_pictures([*subject, *prior])
        usual = config.filled(config.prompt)
        self.texts = [one.text or usual for one in subject] + [one.text or usual for one in prior]
        self.order = Order(config, len(subject), len(prior))
        self.prompts = [config.filled(text) for text in config.validation_prompt] or [usual]
        shown = [*self.texts, *self.prompts, ""]
        student, self.tokens = make_student(base, config, list(dict.fromkeys(shown)))
        if config.adapter is not None:
            check_adapter(config.adapter, base.fingerprint)
            taken = config.learns_token and isinstance(base, VideoBase)
            if not taken and (config.adapter / EMBEDDINGS.format("")).is_file():
                self.say(f"--adapter {config.adapter}: the embedding of its word is not taken up")
        self._boost(student, plugin, planned)
        if checkpoint is not None:
            self._restore(checkpoint)
        if world.is_main:
            self._begin()
        barrier()

    def _check_prompts(self, subject: Sequence[Picture]) -> None:
        """Refuses prompts that are not read as they were written, before anything is made."""
        config = self.config
        if not isinstance(self.base, DiffusersBase):
            return
        texts = {f"the caption of {one.path.name}": one.text for one in subject if one.text}
        texts |= {f"--validation-prompt {n!r}": config.filled(n) for n in config.validation_prompt}
        if len([one for one in subject if one.text]) < len(subject) or not texts:
            texts["--prompt"] = config.filled(config.prompt)
        texts |= {f"--prior-prompt {text!r}": text for text in prior_texts(config)}
        added = config.learns_token and config.method != "full"
        tokenizers = self.base.read_tokenizers().values()
        check_texts(tokenizers, config.token, added, texts, self.say)

    @staticmethod
    def planned_late(planned: Planned | None) -> bool:
        """Whether nothing was planned before weights were read."""
        return planned is None

    def _data_known(self, subject: Sequence[Picture]) -> str:
        """The fingerprint of a run that there is: prior pictures are not made to be refused."""
        known = self.run.values().get("fingerprints", {})
        return known.get("data", "") if self.config.resume else fingerprint(subject)

    def _boost(self, student: Any, plugin: Plugin, planned: Planned | None) -> None:
        config = self.config
        recompute = planned.recompute if planned else config.activations == "recompute"
        if recompute and config.memory is None:
            recompute_blocks(student)
        optimizer = make_optimizer(student, config)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(config, step))
        if planned is not None:
            self.booster = Booster(plan=planned.plan, verbose=False)
        else:
            self.booster = Booster(plugin=plugin)
        self.place = self.booster.plugin.data_place()
        each = -(-per_step(config) // self.place[1])
        self.micro = config.micro_batch
        if self.micro is None and planned is not None:
            self.micro = -(-each // planned.accumulate)
        student.train()
        boosted = self.booster.boost(student, optimizer, lr_scheduler=scheduler)
        self.model, self.optimizer, _, _, self.scheduler = boosted

    def _begin(self) -> None:
        """Writes what the run is, and cuts the logs to where it goes on."""
        self.run.folder.mkdir(parents=True, exist_ok=True)
        self.run.write(options=resolved(self.config), fingerprints=self.facts)
        self.run.cut(self.step_number if self.saved_step >= 0 else -1)
        self.booster.plan.save(self.run.folder / "plan.yaml")

    def run_to_end(self, stop: StopRequest) -> Outcome:
        """Steps until the last, or until a signal; the last state is always saved."""
        config, main, stopped = self.config, self.world.is_main, False
        with (
            tensorboard(self.run.folder / "tensorboard", self.step_number, main) as scalars,
            Display(f"teaching {config.token}", config.steps, self.step_number, main) as display,
        ):
            while self.step_number < config.steps and not stopped:
                stopped = self._step(stop.wanted, display, scalars)
                over = self.step_number == config.steps
                if over or self.step_number % config.every == 0:
                    self._validate()
                if over or stopped or self.step_number % (config.save_every or config.every) == 0:
                    self._save()
        self.booster.close()
        over, result = self.step_number >= config.steps, None
        if over:
            result = self.run.folder / "result"
            if main:
                write_result(self.base, config, self.run, self.tokens, self.facts)
            barrier()  # no rank says that it is done before there is a result
            self.say(f"the result: {result}")
        else:
            self.say(f"stopped at step {self.step_number} of {config.steps}; go on with --resume")
        return Outcome(self.step_number, over, result)

    def _step(self, stop_wanted: bool, display: Display, scalars: Any) -> bool:
        """Runs one optimizer step and tells of it; returns whether a rank wishes to stop."""
        started = time.monotonic()
        # Seeded anew at each step, so that a resumed run needs no saved generator.
        torch.manual_seed(derive(self.config.seed, 6, self.step_number, self.place[0]))
        samples = self.order.samples(self.step_number)
        totals = self._learn(shares(samples, self.place[0], self.place[1], self.micro))
        wish = torch.tensor([float(stop_wanted)], dtype=torch.float64, device=totals.device)
        totals = torch.cat([totals, wish])
        all_reduce(totals, op="sum")
        loss, prior, wishes = (float(total) for total in totals)
        norm = float(self.optimizer.clip_grad_by_norm(self.config.clip or math.inf))
        if not math.isfinite(loss) or not math.isfinite(norm):
            self._refuse_divergence(loss, norm)
        rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        self.seconds += time.monotonic() - started
        line = {"step": self.step_number, "loss": loss, "prior_loss": prior, "grad_norm": norm}
        self._tell({**line, "learning_rate": rate}, display, scalars)
        return wishes > 0

    def _learn(self, batches: Sequence[Sequence[Sample]]) -> Tensor:
        """Runs backward for micro-batches; returns this rank's share of the losses.

        The first number is the step's loss, the second the part of it that is prior pictures'.
        """
        found = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            context = nullcontext() if last else self.booster.no_sync(self.model, self.optimizer)
            with context:
                weights = [one.weight for one in batch]
                losses = self.model(
                    latents=self.latents[[one.number for one in batch]],
                    texts=[self.texts[one.number] for one in batch],
                    generators=[torch.Generator().manual_seed(one.seed) for one in batch],
                    weights=weights,
                )
                # Gradients are averaged over ranks, weights add up to those of the step.
                self.booster.backward(losses.loss * self.place[1], self.optimizer)
            each = losses.each.double() * torch.tensor(weights, dtype=torch.float64).to(found)
            prior = torch.tensor([one.number >= self.order.subjects for one in batch])
            found += torch.stack([each.sum(), each[prior.to(each.device)].sum()])
        return found

    def _tell(self, line: dict[str, Any], display: Display, scalars: Any) -> None:
        if not self.world.is_main:
            return
        moved = self.booster.moved
        told: dict[str, Any] = (
            {} if moved is None else {"read": size_text(moved[0]), "wrote": size_text(moved[1])}
        )
        rate = f"{self.seconds / max(1, self.step_number):.2f}"
        memory = size_text(memory_in_use())
        display.advance(loss=f"{line['loss']:.4f}", s_per_step=rate, memory=memory, **told)
        self.run.log.append({**line, "seconds": round(self.seconds, 3)})
        for name in ("loss", "prior_loss", "grad_norm", "learning_rate"):
            scalars(f"train/{name}", line[name], self.step_number)

    @torch.no_grad()
    def _validate(self) -> None:
        """Makes pictures of the prompts, the same seeds at every step; every rank calls it."""
        config, columns = self.config, self.config.validation_pictures
        if not columns:
            return
        texts = [text for text in self.prompts for _ in range(columns)]
        seeds = [derive(config.seed, 8, n) % 2**32 for n in range(columns)] * len(self.prompts)
        self.model.eval()
        pictures = self.model(job=lambda: self.base.sample(texts, seeds))
        self.model.train()
        if not self.world.is_main:
            return
        stem = self.run.folder / "samples" / f"step-{self.step_number:06d}"
        write_pixels(stem, grid(pictures, columns))
        about = {"step": self.step_number, "prompts": self.prompts, "seeds": seeds[:columns]}
        more = {name: getattr(config, name) for name in ("sampling_steps", "guidance", "seed")}
        more["guidance"] = getattr(
            self.base, "guidance", config.guidance
        )  # where none is asked for
        write_json(stem.with_suffix(".json"), {**about, **more})

    def _save(self) -> None:
        """Begins a checkpoint of this step; every rank calls it."""
        if self.step_number == self.saved_step:
            return
        self.saved_step = self.step_number
        self.booster.save(
            self.run.checkpoints.root,
            self.step_number,
            self.model,
            self.optimizer,
            self.scheduler,
            state={"run": {"step": self.step_number, "seconds": self.seconds}},
            frozen=False,
            keep=self.config.keep,
        )

    def _restore(self, folder: Path) -> None:
        """Takes up the state of a checkpoint; every rank calls it."""
        loaded = self.booster.load(
            folder,
            self.model,
            self.optimizer,
            self.scheduler,
            state={"run": None},
            random=False,  # every step draws from seeds of its own
            frozen=False,
        )
        state = loaded.values["run"]
        self.step_number = self.saved_step = state["step"]
        self.seconds = state["seconds"]
        self.say(f"resumed at step {self.step_number} from {folder}")

    def _refuse_divergence(self, loss: float, norm: float) -> None:
        self.booster.wait()  # one may be under way
        newest = self.run.checkpoints.latest()
        kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
        raise GulliverError(
            f"loss {loss} with gradient norm {norm} at step {self.step_number}: training stopped "
            f"before the weights changed, {kept}; try a lower --learning-rate"
        )


def factor(config: DreamboothConfig, step: int) -> float:
    """The learning rate of a step over its peak: linear warm-up, then the schedule."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
    return 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
