"""Validation losses and sample clips during training.

A training loss varies with the levels and shapes of each step. Validation always uses the same
held-out clips, noise and levels, so differences are due to the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gulliver.comm.collectives import all_reduce, broadcast_object
from gulliver.comm.world import World
from gulliver.data.clips import Bucket, collate
from gulliver.data.sampler import Step
from gulliver.errors import GulliverError, nearest
from gulliver.jobs.display import Display
from gulliver.video.batches import BatchMaker, VideoBatch
from gulliver.video.config import (
    SamplesConfig,
    TrainConfig,
    ValidationConfig,
    parse_shapes,
)
from gulliver.video.media import SheetRow, still_sheet, write_clip
from gulliver.video.pipeline import open_run
from gulliver.video.requests import Request, read_prompt, read_prompts
from gulliver.video.run import Run
from gulliver.video.text_encoders import WordEncoder

EPOCH = 2**40
"""Epoch for the noise of held-out clips, which no training reaches."""
WINDOW = 0
"""Seed for selecting frames of a longer clip: always the first."""


@dataclass(frozen=True)
class Validation:
    """Held-out clips and their losses."""

    dataset: Any
    maker: BatchMaker
    config: ValidationConfig
    place: tuple[int, int]
    batch_size: int

    def losses(
        self, loss_sum: Callable[[VideoBatch], Tensor], ranks_of_a_model: int
    ) -> dict[str, list[float]]:
        """Computes the mean loss of each bucket's clips at each level; a collective call."""
        buckets = self._members()
        levels, device = self.config.levels, self.maker.device
        totals = torch.zeros(len(buckets), levels + 1, dtype=torch.float64, device=device)
        for row, (bucket, members) in enumerate(buckets.items()):
            for batch in self._batches(bucket, members):
                for number in range(levels):
                    totals[row, number] += loss_sum(self._at(batch, number)).double()
                totals[row, -1] += len(batch.latents) * batch.weight
        all_reduce(totals)
        totals /= ranks_of_a_model
        # A bucket without readable clips has no loss.
        return {
            str(bucket): (row[:-1] / row[-1]).tolist()
            for bucket, row in zip(buckets, totals, strict=True)
            if row[-1]
        }

    def report(
        self,
        found: dict[str, list[float]],
        step: int,
        run: Run,
        display: Display,
        scalars: Callable[[str, float, int], None],
    ) -> None:
        means = {bucket: sum(losses) / len(losses) for bucket, losses in found.items()}
        loss = sum(means.values()) / len(means)
        run.validation.append({"step": step, "loss": loss, "buckets": found})
        told = ", ".join(f"{bucket} {mean:.4f}" for bucket, mean in means.items())
        display.console.print(f"step {step}: held-out loss {loss:.4f} ({told})")
        for bucket, mean in means.items():
            scalars(f"validation/{bucket}", mean, step)

    def _members(self) -> dict[Bucket, list[int]]:
        members: dict[Bucket, list[int]] = {}
        for index in range(len(self.dataset)):
            bucket = self.dataset.bucket_of(index)
            if bucket is not None:
                members.setdefault(bucket, []).append(index)
        return {bucket: members[bucket][: self.config.clips] for bucket in sorted(members)}

    def _batches(self, bucket: Bucket, members: list[int]) -> Iterator[VideoBatch]:
        """Yields this rank's share of each batch; all ranks have the same number."""
        rank, ranks = self.place
        for start in range(0, len(members), self.batch_size):
            part = members[start : start + self.batch_size]
            first, end = (len(part) * n // ranks for n in (rank, rank + 1))
            step = Step(bucket, part[first:end], first, len(part), EPOCH, start)
            clips = collate(self.dataset, step.indices, [WINDOW] * (end - first), bucket)
            yield self.maker.make(step, clips, {})

    def _at(self, batch: VideoBatch, number: int) -> VideoBatch:
        """Returns the batch with one noise level, with captions and without given frames."""
        level = (number + 1) / (self.config.levels + 1) * self.maker.flow.num_timesteps
        return replace(
            batch,
            timesteps=torch.full_like(batch.timesteps, level),
            drop_caption=torch.zeros_like(batch.drop_caption),
            generate=None,
        )


# Samples during training: a few prompts, sampled periodically from the averaged weights.


State = Literal["going", "made", "stopped"]
"""Messages from rank 0 to the others while it samples."""
LOOKED_AT = 10_000
"""Maximum number of clips to take captions from, if no prompts are given."""
STILLS = 6
"""Maximum frames of a clip on a contact sheet."""
SIDE = 128
"""Minimum height in pixels of a shown clip, enlarged by pixel repetition."""


# [Note: samples are those of the checkpoint] When samples are due, the step's checkpoint is written
# and waited for, and rank 0 opens it as `gulliver generate` does. So the clips are those of that
# command for the same step, for any parallelism, and training is not affected. The other ranks get
# a message for every step of the sampler, so that they never wait longer than one takes, and stop
# when rank 0 does. If a run is interrupted meanwhile, it makes the samples on resume.
class _StoppedError(Exception):
    """Sampling was stopped by a signal."""


@dataclass(frozen=True)
class RunSamples:
    """Clips sampled from the averaged weights during a run."""

    config: SamplesConfig
    run: Run
    world: World
    requests: list[Request]

    def due(self, step: int, last: bool) -> bool:
        """Whether samples of a step are due and not yet made; a collective call."""
        if not last and step % self.config.every:
            return False
        made = self.world.is_main and any(line["step"] == step for line in self.run.samples.read())
        return not broadcast_object(made)

    def make(self, step: int, stop: Callable[[], bool], display: Display, scalars: Any) -> bool:
        """Samples clips of a step whose checkpoint is the newest; a collective call."""
        told: State = "going"
        if not self.world.is_main:
            while told == "going":
                told = broadcast_object(None)
            return told == "made"

        def going(done: int, steps: int, latents: Any) -> None:
            if stop():
                raise _StoppedError
            broadcast_object("going")

        try:
            self._make(step, going, display, scalars)
            told = "made"
        except _StoppedError:
            display.console.print(f"step {step}: its samples will be made when the run is resumed")
            told = "stopped"
        return broadcast_object(told) == "made"

    def _make(self, step: int, going: Any, display: Display, scalars: Any) -> None:
        started, shape = time.monotonic(), self.requests[0].bucket
        model = open_run(self.run.folder, self.world.device)
        told = {"steps": self.config.steps, "guidance": self.config.guidance}
        sampling = replace(model.sampling, **{n: v for n, v in told.items() if v is not None})
        clips = model.generate(self.requests, sampling, preview=going)
        scale = max(1, SIDE // shape.height)
        folder = self.run.folder / "samples" / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        suffix = ".png" if shape.frames == 1 else ".mp4"
        for number, clip in enumerate(clips):
            write_clip(folder / f"{number:03d}{suffix}", clip, model.fps_of(shape), scale)
        rows = [_row(r.prompt, clip) for r, clip in zip(self.requests, clips, strict=True)]
        sheet, pixels = still_sheet(folder / "sheet.png", rows, scale)
        scalars.picture("samples", pixels, step)
        seconds = round(time.monotonic() - started, 3)
        prompts = [request.prompt for request in self.requests]
        self.run.samples.append(
            {"step": step, "folder": folder.name, "prompts": prompts, "seconds": seconds}
        )
        count = f"{len(clips)} sample{'s' if len(clips) > 1 else ''}"
        display.console.print(f"step {step}: {count} in {seconds:.0f} s, {sheet}")


def _row(prompt: str, clip: Any) -> SheetRow:
    length = clip.shape[1]
    shown = np.linspace(0, length - 1, min(length, STILLS)).round().astype(int).tolist()
    frames = [f"frame {n}" for n in shown] if length > 1 else [""]
    return SheetRow(prompt, [clip[:, n : n + 1] for n in shown], frames)


def make_samples(
    config: TrainConfig, run: Run, world: World, dataset: Any, held_out: Any
) -> RunSamples | None:
    """Configures the samples of a run; None if it has none."""
    samples = config.samples
    if not samples.every:
        return None
    shape = _shape(config, dataset)
    if samples.prompt_file is not None:
        prompts = read_prompts(samples.prompt_file)
        for prompt in prompts:
            if read_prompt(prompt).text != prompt:
                raise GulliverError(
                    f"--samples.prompt-file {samples.prompt_file}: {prompt[:60]!r} uses "
                    "references, which are not supported; remove the JSON"
                )
    else:
        found = [_captions(of, shape, samples.clips) for of in (held_out, dataset) if of]
        prompts = list(dict.fromkeys(text for some in found for text in some))[: samples.clips]
    if not config.model.public:  # Fail now, not when the first samples are due.
        WordEncoder(config.model.text_channels, config.model.text_length).encode(prompts)
    requests = [Request(text, shape, samples.seed + n) for n, text in enumerate(prompts)]
    return RunSamples(samples, run, world, requests)


def _shape(config: TrainConfig, dataset: Any) -> Bucket:
    if config.data.buckets is None:
        shapes = list(parse_shapes(config.data.shapes))
    else:
        found = [dataset.bucket_of(index) for index in range(len(dataset))]
        shapes = sorted({b for b in found if b is not None}, key=lambda b: (-found.count(b), b))
    names = {str(shape): shape for shape in shapes}
    asked = config.samples.shape
    if asked is not None and asked not in names:
        raise GulliverError(
            f"--samples.shape {asked} is not a trained shape: {nearest(asked, names)}"
        )
    return shapes[0] if asked is None else names[asked]


def _captions(dataset: Any, shape: Bucket, count: int) -> list[str]:
    def distinct(only: Bucket | None) -> list[str]:
        some = range(min(len(dataset), LOOKED_AT))
        of_shape = (n for n in some if only is None or dataset.bucket_of(n) == only)
        return list(dict.fromkeys(dataset.caption(n) for n in islice(of_shape, LOOKED_AT)))

    texts = distinct(shape) or distinct(None)
    chosen = np.linspace(0, len(texts) - 1, min(count, len(texts))).round().astype(int)
    return [texts[n] for n in chosen]
