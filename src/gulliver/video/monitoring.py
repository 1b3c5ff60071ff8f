"""Validation: the loss of held-out clips at fixed noise levels, for each bucket.

A training loss jumps with the levels and the shapes that a step drew. Here clips, noise and levels
are the same every time, so that a difference between two validations is the model's. The published
trainers found this the one cheap figure that follows quality.

What it does not know: how the ranks share the model (`training.py`).
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
"""Epoch that the noise of held-out clips is drawn for, which no training reaches."""
WINDOW = 0
"""Seed of the frames that are taken of a longer clip: always the first."""


@dataclass(frozen=True)
class Validation:
    """Held-out clips, and the way to their losses."""

    dataset: Any
    maker: BatchMaker
    config: ValidationConfig
    place: tuple[int, int]
    batch_size: int

    def losses(
        self, loss_sum: Callable[[VideoBatch], Tensor], ranks_of_a_model: int
    ) -> dict[str, list[float]]:
        """Computes the mean loss of each bucket's clips at each level; every rank calls it."""
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
        # A bucket of which no clip could be read has no loss.
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
        """Writes losses to the run's log and to TensorBoard, and prints their means."""
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
        """Yields this rank's share of each batch; all ranks have as many."""
        rank, ranks = self.place
        for start in range(0, len(members), self.batch_size):
            part = members[start : start + self.batch_size]
            first, end = (len(part) * n // ranks for n in (rank, rank + 1))
            step = Step(bucket, part[first:end], first, len(part), EPOCH, start)
            clips = collate(self.dataset, step.indices, [WINDOW] * (end - first), bucket)
            yield self.maker.make(step, clips, {})

    def _at(self, batch: VideoBatch, number: int) -> VideoBatch:
        """Puts all samples of a batch at a level, with their captions and no given frames."""
        level = (number + 1) / (self.config.levels + 1) * self.maker.flow.num_timesteps
        return replace(
            batch,
            timesteps=torch.full_like(batch.timesteps, level),
            drop_caption=torch.zeros_like(batch.drop_caption),
            generate=None,
        )


# Samples during training: a few prompts, shown now and then by the averaged weights.


State = Literal["going", "made", "stopped"]
"""What rank 0 tells the others while it samples."""
LOOKED_AT = 10_000
"""Most clips whose captions are looked at, where no prompts are named."""
STILLS = 6
"""Most frames of a clip on a contact sheet."""
SIDE = 128
"""Least height in pixels that a clip is shown at, where repeating its pixels makes it so."""


# [Note: samples are those of the checkpoint] When samples are due, the step's checkpoint is made
# and waited for, and rank 0 opens it as `gulliver generate` does: the clips are those that this
# command makes of the same step, however the ranks share the model, and what is learnt does not
# change. The other ranks hear of every step of the sampler, so that they never wait longer than one
# takes, and end when rank 0 does. A run that is killed in between makes the samples when it is
# resumed.
#
# What it does not know: how a checkpoint is written (`training.py`), how clips are sampled
# (`generation.py`, `pipeline.py`).
class _StoppedError(Exception):
    """A signal has ended sampling."""


@dataclass(frozen=True)
class RunSamples:
    """Clips that a run makes of its averaged weights, step after step."""

    config: SamplesConfig
    run: Run
    world: World
    requests: list[Request]

    def due(self, step: int, last: bool) -> bool:
        """Whether samples of a step are to be made and are not there; every rank calls it."""
        if not last and step % self.config.every:
            return False
        made = self.world.is_main and any(line["step"] == step for line in self.run.samples.read())
        return not broadcast_object(made)

    def make(self, step: int, stop: Callable[[], bool], display: Display, scalars: Any) -> bool:
        """Makes the samples of a step whose checkpoint is the newest; every rank calls it."""
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
            display.console.print(f"step {step}: its samples are made when the run is resumed")
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
    """Lays frames of a clip, evenly spread over its time, in a row."""
    length = clip.shape[1]
    shown = np.linspace(0, length - 1, min(length, STILLS)).round().astype(int).tolist()
    frames = [f"frame {n}" for n in shown] if length > 1 else [""]
    return SheetRow(prompt, [clip[:, n : n + 1] for n in shown], frames)


def make_samples(
    config: TrainConfig, run: Run, world: World, dataset: Any, held_out: Any
) -> RunSamples | None:
    """Decides what a run shows of itself; None where that is nothing."""
    samples = config.samples
    if not samples.every:
        return None
    shape = _shape(config, dataset)
    if samples.prompt_file is not None:
        prompts = read_prompts(samples.prompt_file)
        for prompt in prompts:
            if read_prompt(prompt).text != prompt:
                raise GulliverError(
                    f"--samples.prompt-file {samples.prompt_file}: {prompt[:60]!r} names "
                    "references, which samples do not have: leave the JSON out"
                )
    else:
        found = [_captions(of, shape, samples.clips) for of in (held_out, dataset) if of]
        prompts = list(dict.fromkeys(text for some in found for text in some))[: samples.clips]
    if not config.model.public:  # Now, and not when the first samples are due.
        WordEncoder(config.model.text_channels, config.model.text_length).encode(prompts)
    requests = [Request(text, shape, samples.seed + n) for n, text in enumerate(prompts)]
    return RunSamples(samples, run, world, requests)


def _shape(config: TrainConfig, dataset: Any) -> Bucket:
    """Chooses the shape of the samples: the one that is named, else the first, or a usual one."""
    if config.data.buckets is None:
        shapes = list(parse_shapes(config.data.shapes))
    else:
        found = [dataset.bucket_of(index) for index in range(len(dataset))]
        shapes = sorted({b for b in found if b is not None}, key=lambda b: (-found.count(b), b))
    names = {str(shape): shape for shape in shapes}
    asked = config.samples.shape
    if asked is not None and asked not in names:
        raise GulliverError(
            f"--samples.shape {asked} is not one that is trained: {nearest(asked, names)}"
        )
    return shapes[0] if asked is None else names[asked]


def _captions(dataset: Any, shape: Bucket, count: int) -> list[str]:
    """Takes captions of clips of a shape, or else of any, evenly out of all there are."""

    def distinct(only: Bucket | None) -> list[str]:
        some = range(min(len(dataset), LOOKED_AT))
        of_shape = (n for n in some if only is None or dataset.bucket_of(n) == only)
        return list(dict.fromkeys(dataset.caption(n) for n in islice(of_shape, LOOKED_AT)))

    texts = distinct(shape) or distinct(None)
    chosen = np.linspace(0, len(texts) - 1, min(count, len(texts))).round().astype(int)
    return [texts[n] for n in chosen]
