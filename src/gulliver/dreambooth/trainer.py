"""Trains a model with DreamBooth, and writes the result from the last checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.booster.booster import Booster
from gulliver.booster.plugins import Plugin
from gulliver.checkpoint.files import read_json, write_json
from gulliver.checkpoint.loading import step_folder
from gulliver.checkpoint.weights import open_weights
from gulliver.checkpoint.writing import write_single
from gulliver.comm.collectives import barrier
from gulliver.comm.launcher import default_ranks
from gulliver.comm.world import World, guard, init_world
from gulliver.dreambooth.base import FACTS, Base, Picture, TokenHandle, TrainedParts, check_adapter
from gulliver.dreambooth.config import MAY_CHANGE, DreamboothConfig, check_dreambooth
from gulliver.dreambooth.diffusers_base import EMBEDDINGS, INDEX, DiffusersBase
from gulliver.dreambooth.pictures import (
    fingerprint,
    grid,
    prior_pictures,
    prior_texts,
    read_pictures,
    write_pixels,
)
from gulliver.dreambooth.planning import (
    PRECISIONS,
    lines_of,
    make_plugin,
    per_step,
    plan_run,
    precision_of,
    recompute_blocks,
)
from gulliver.dreambooth.student import (
    SampleOrder,
    StepSample,
    adapters_of,
    make_optimizer,
    make_student,
    shares,
)
from gulliver.dreambooth.video_base import VideoBase, in_motion, open_video
from gulliver.dreambooth.words import check_texts
from gulliver.errors import GulliverError
from gulliver.finetune.planning import PlannedRun
from gulliver.io.files import named_errors
from gulliver.jobs.display import console
from gulliver.jobs.log import derive
from gulliver.jobs.loop import LoopOptions, Outcome, TrainingLoop, rate_factor
from gulliver.jobs.run_folder import RunFolder
from gulliver.jobs.stop import StopRequest
from gulliver.memory.parts import Part
from gulliver.options import resolved


class SavedTensors(Mapping[str, Tensor]):
    """Tensors of a checkpoint, read on access."""

    def __init__(self, step: Path) -> None:
        self.weights = open_weights(step)

    def __getitem__(self, name: str) -> Tensor:
        info = self.weights.infos[name]
        made = torch.empty(info.shape, dtype=info.dtype)
        self.weights.read({name: Part(made.view(-1), info.shape)})
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights.infos)

    def __len__(self) -> int:
        return len(self.weights.infos)

    def write(self, path: Path, names: Mapping[str, str]) -> None:
        """Streams tensors to a safetensors file, given a mapping from new to old names."""
        write_single(self.weights, names, path)


def write_result(
    base: Base,
    config: DreamboothConfig,
    run: RunFolder,
    tokens: tuple[TokenHandle, ...],
    facts: Mapping[str, str],
) -> Path:
    """Writes the result of a finished run atomically; called on rank 0."""
    folder, partial = run.folder / "result", run.folder / ".result.partial"
    step = step_folder(run.checkpoints.root)
    if folder.is_dir():
        if read_json(folder / FACTS).get("step", step.name) == step.name:
            return folder
        shutil.rmtree(folder)  # of the run before it was extended
    tensors = SavedTensors(step)
    with tensors.weights, named_errors(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        adapters = adapters_of(base)
        base.save(partial, TrainedParts(config.method, tensors, tokens, adapters, tensors.write))
        write_json(
            partial / FACTS,
            {**facts, "token": config.token, "method": config.method, "step": step.name},
        )
        os.replace(partial, folder)
    return folder


# The DreamBooth trainer: from a few pictures to adapters, weights or a token embedding.
#
# Start with `dreambooth`, then `DreamBoothTrainer`. Models are in `base.py`, the samples of a step
# in `student.py`, and sharding and memory limits in `gulliver.booster`.
#
# run/
#   config.json          options, and fingerprints of base and data
#   plan.yaml            plan of the run
#   log.jsonl            a line per step
#   prior/               prior pictures and their settings
#   samples/step-*.png   a grid of pictures and their settings (.json)
#   checkpoints/step-*/  trained weights, optimizer, schedule
#   result/              loaded by diffusers or `gulliver generate`


GUIDANCE = 7.5
"""Default guidance scale for diffusers pipelines."""
FINGERPRINTS = {
    "base": "--model is not the one that the run was started with",
    "data": "--subject or the prior pictures are not those that the run was started with",
}


def dreambooth(config: DreamboothConfig, plugin: Plugin | None = None) -> Outcome:
    """Trains a base model on a subject; called on every rank."""
    config = check_dreambooth(config)
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
        trainer = DreamBoothTrainer(config, planned, world, precision)
        with StopRequest().listening() as stop:
            return trainer.run_to_end(stop)


def open_base(
    config: DreamboothConfig, world: World, precision: str, on_meta: bool = False
) -> DiffusersBase | VideoBase:
    assert config.model is not None, "--model was validated"
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
            scratch if config.memory_limit is not None and not on_meta else None,
            world.size == 1,
        )
    if (config.model / "config.json").is_file() and (config.model / "checkpoints").is_dir():
        if config.snr_gamma is not None:
            raise GulliverError("--snr-gamma needs a diffusers pipeline; omit it")
        return open_video(config, world.device, PRECISIONS[precision], on_meta)
    raise GulliverError(
        f"--model {config.model} is neither a diffusers pipeline ({INDEX}) nor a run of `gulliver "
        "train`; pass a folder written by pipe.save_pretrained or by that command"
    )


def _plan(
    config: DreamboothConfig,
    plugin: Plugin,
    world: World,
    precision: str,
    ranks: int,
    say: Any,
) -> PlannedRun:
    outline = open_base(config, world, precision, on_meta=True)
    planned = plan_run(config, plugin, outline, ranks)
    count = -(-per_step(config) // (ranks * planned.accumulate))
    for line in lines_of(planned, count, f"of {outline.side} x {outline.side}"):
        say(line)
    return planned


class DreamBoothTrainer(TrainingLoop):
    """Trains a base model on a subject, and generates validation images during training."""

    def __init__(
        self,
        config: DreamboothConfig,
        planned: PlannedRun,
        world: World,
        precision: str,
    ) -> None:
        self.config = config
        self.say = console().print if world.is_main else lambda _: None
        may_change = MAY_CHANGE - {"steps"} if config.motion else MAY_CHANGE
        run = RunFolder(config.out, config.keep, may_change, FINGERPRINTS)
        subject = read_pictures(config, self.say)
        self.base = base = open_base(config, world, precision)
        if any(one.pixels.ndim == 4 for one in subject) and not isinstance(base, VideoBase):
            raise GulliverError(
                f"--subject {config.subject} has clips, but the base model generates images; "
                "remove them"
            )
        self._check_prompts(subject)
        facts = {"base": base.fingerprint}
        # Generating prior pictures is slow: run all other checks first.
        known = run.values().get("fingerprints", {})
        before = known.get("data", "") if config.resume else fingerprint(subject)
        run.open(config, {**facts, "data": before})
        prior = prior_pictures(base, config, world, self.say)
        self.facts = {**facts, "data": fingerprint([*subject, *prior])}
        checkpoint = run.open(config, self.facts)
        barrier()  # all ranks read before any rank writes
        self.latents = base.encode_pictures([*subject, *prior])
        usual = config.filled(config.prompt)
        self.texts = [one.text or usual for one in subject] + [one.text or usual for one in prior]
        self.order = SampleOrder(config, len(subject), len(prior))
        self.prompts = [config.filled(text) for text in config.validation_prompt] or [usual]
        shown = [*self.texts, *self.prompts, ""]
        student, self.tokens = make_student(base, config, list(dict.fromkeys(shown)))
        if config.adapter is not None:
            check_adapter(config.adapter, base.fingerprint)
            taken = config.trains_token and isinstance(base, VideoBase)
            if not taken and (config.adapter / EMBEDDINGS.format("")).is_file():
                self.say(f"--adapter {config.adapter}: its token embedding is not continued")
        booster, boosted = _boost(config, student, planned)
        options = LoopOptions(
            title=f"teaching {config.token}",
            steps=config.steps,
            save_every=config.save_every or config.every,
            seed=config.seed,
            stream=6,
            clip=config.clip,
            frozen=False,
            report_to=config.report_to,
        )
        place = booster.plugin.data_place()
        super().__init__(run, world, options, booster, boosted, place)
        each = -(-per_step(config) // (place[1] * planned.accumulate))
        self.micro = config.micro_batch or each
        self.start(checkpoint, options=resolved(config), fingerprints=self.facts)

    def _check_prompts(self, subject: Sequence[Picture]) -> None:
        config = self.config
        if not isinstance(self.base, DiffusersBase):
            return
        texts = {f"the caption of {one.path.name}": one.text for one in subject if one.text}
        texts |= {f"--validation-prompt {n!r}": config.filled(n) for n in config.validation_prompt}
        if len([one for one in subject if one.text]) < len(subject) or not texts:
            texts["--prompt"] = config.filled(config.prompt)
        texts |= {f"--prior-prompt {text!r}": text for text in prior_texts(config)}
        added = config.trains_token and config.method != "full"
        tokenizers = self.base.read_tokenizers().values()
        check_texts(tokenizers, config.token, added, texts, self.say)

    def run_to_end(self, stop: StopRequest) -> Outcome:
        """Trains until the last step or a signal; always saves the last state."""
        if not self.train(stop):
            return Outcome(self.step_number, False, self.seconds)
        result = self.run.folder / "result"
        if self.world.is_main:
            write_result(self.base, self.config, self.run, self.tokens, self.facts)
        barrier()  # no rank may report success before the result is written
        self.say(f"the result: {result}")
        return Outcome(self.step_number, True, self.seconds, result=result)

    def batches(self) -> Iterator[tuple[list[list[StepSample]], None]]:
        place, places = self.place
        while True:
            yield shares(self.order.samples(self.step_number), place, places, self.micro), None

    def forward_backward(self, batch: list[list[StepSample]]) -> dict[str, Tensor]:
        """Runs backward for micro-batches; returns this rank's part of the losses."""
        found = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for number, part in enumerate(batch):
            last = number == len(batch) - 1
            context = nullcontext() if last else self.booster.no_sync(self.model, self.optimizer)
            with context:
                weights = [one.weight for one in part]
                losses = self.model(
                    latents=self.latents[[one.number for one in part]],
                    texts=[self.texts[one.number] for one in part],
                    generators=[torch.Generator().manual_seed(one.seed) for one in part],
                    weights=weights,
                )
                # Gradients are averaged over ranks, and the weights of a step sum to 1.
                self.booster.backward(losses.loss * self.place[1], self.optimizer)
            each = losses.each.double() * torch.tensor(weights, dtype=torch.float64).to(found)
            prior = torch.tensor([one.number >= self.order.subjects for one in part])
            found += torch.stack([each.sum(), each[prior.to(each.device)].sum()])
        return {"loss": found[0], "prior_loss": found[1]}

    def describe(self, line: dict[str, Any], batch: Any, seconds: float) -> dict[str, str]:
        return {"s_per_step": f"{self.seconds / self.step_number:.2f}"}

    @torch.no_grad()
    def evaluate(self) -> None:
        """Generates the validation images, always with the same seeds (collective)."""
        config, columns = self.config, self.config.validation_pictures
        due = self.is_over or self.step_number % config.every == 0
        if not columns or not due:
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
        more = {name: getattr(config, name) for name in ("sampling_steps", "seed")}
        # Diffusers pipelines have their own default guidance.
        more["guidance"] = getattr(self.base, "guidance", config.guidance)
        write_json(stem.with_suffix(".json"), {**about, **more})


def _boost(
    config: DreamboothConfig, student: Any, planned: PlannedRun
) -> tuple[Booster, tuple[Any, Any, Any]]:
    if planned.recompute and config.memory_limit is None:
        recompute_blocks(student)
    optimizer = make_optimizer(student, config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_factor(step, config.steps, config.warmup, config.schedule)
    )
    booster = Booster(plan=planned.plan, verbose=False)
    student.train()
    model, boosted, _, _, scheduler = booster.boost(student, optimizer, lr_scheduler=scheduler)
    return booster, (model, boosted, scheduler)
