"""Pictures that a video base sets in motion, to learn a subject that moves from stills."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gulliver.comm.collectives import barrier
from gulliver.comm.world import World, init_world
from gulliver.dreambooth.config import DreamboothConfig, alternatives
from gulliver.dreambooth.pictures import prior_folder, read_pictures, write_pixels
from gulliver.dreambooth.video_base import VideoBase, load_adapter
from gulliver.errors import GulliverError
from gulliver.io.files import named_errors, write_text
from gulliver.jobs.display import Display
from gulliver.jobs.log import derive
from gulliver.jobs.loop import Outcome

Teach = Callable[[DreamboothConfig, Any], Outcome]


# [Note: why stills are not enough] A still shows how the subject looks in one frame, and of a clip
# that is the first one of the latent alone: the others hold several frames each, and look
# otherwise. A base that was taught stills only shows the subject at first, and something that it
# knew before as the clip goes on. So it also learns clips, from motion that it knows
# itself: it continues a picture as the first frame, with the prompt of a motion. What it makes
# drifts towards what it knew before, too, and no later frame is better than those it is taught.
# Where a subject stands on a plain ground the picture itself is moved instead, as the subject of
# the base's own clip of that prompt moves (`along`): every frame is the subject. Only the
# prompts describe motion.
#
# Each of the two halves is a run of its own in the run folder, so that any of them resumes.
#
# run/
#   stills/  the run on the pictures alone
#   motion/  pictures and the clips that were made of them, with captions
#   clips/   the run on those, which continues the adapters of the first
#   result/  what was learnt
def in_motion(config: DreamboothConfig, teach: Teach, plugin: Any = None) -> Outcome:
    """Teaches pictures, then the clips that the base makes of them."""
    assert config.model is not None, "it is checked"
    if not (config.model / "checkpoints").is_dir():
        raise GulliverError(
            f"--motion is for a run of `gulliver train`, and --model {config.model} is none: leave "
            "it out"
        )
    world = init_world()
    half = replace(
        config,
        motion="",
        motion_after=None,
        motion_clips=DreamboothConfig.motion_clips,
        motion_placed=False,
        prior_folder=prior_folder(config) if config.priors else None,
    )
    steps = config.still_steps
    first = teach(replace(half, out=config.out / "stills", steps=steps), plugin)
    if first.result is None:
        return first
    folder = _moved(config, first.result, world)
    second = replace(
        half,
        out=config.out / "clips",
        subject=folder,
        adapter=first.result,
        steps=config.steps - steps,
        # Set by the adapters that are continued.
        lora_rank=DreamboothConfig.lora_rank,
        lora_alpha=None,
        lora_targets=(),
    )
    found = teach(second, plugin)
    if found.result is None:
        return Outcome(steps + found.step, False, first.seconds + found.seconds)
    result = config.out / "result"
    if world.is_main and not result.is_dir():
        partial = config.out / ".result.partial"
        with named_errors(result):
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(found.result, partial)
            os.replace(partial, result)
    barrier()
    return Outcome(config.steps, True, first.seconds + found.seconds, result=result)


def _moved(config: DreamboothConfig, adapter: Path, world: World) -> Path:
    """Makes what is missing of the folder of pictures and clips; every rank calls it."""
    folder, usual = config.out / "motion", config.filled(config.prompt)
    pictures = read_pictures(config, lambda _: None)
    texts = alternatives(config.filled(config.motion))
    stems = [folder / f"clip-{number:05d}" for number in range(config.motion_clips)]
    # The caption is written after the clip: with it the clip is there.
    missing = [n for n, stem in enumerate(stems) if not stem.with_suffix(".txt").is_file()]
    if world.is_main:
        with named_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(pictures):
            stem = folder / f"picture-{number:05d}"
            write_pixels(stem, picture.pixels)
            write_text(stem.with_suffix(".txt"), picture.text or usual)
    barrier()
    mine = missing[world.rank :: world.size]
    if mine:
        assert config.model is not None, "it is checked"
        base = open_video(config, world.device, torch.float32)
        load_adapter(base.maker, adapter)
        placed = config.motion_placed
        with Display("setting pictures in motion", len(mine), 0, world.is_main) as display:
            for number in mine:
                text = texts[number // len(pictures) % len(texts)]
                still = pictures[number % len(pictures)].pixels
                seed = derive(config.seed, 9, number) % 2**32
                write_pixels(stems[number], base.moved(still, text, seed, placed))
                write_text(stems[number].with_suffix(".txt"), text)
                display.advance()
    barrier()
    return folder


def open_video(
    config: DreamboothConfig, device: torch.device, dtype: torch.dtype, on_meta: bool = False
) -> VideoBase:
    """Opens the video base of a run."""
    assert config.model is not None, "it is checked"
    return VideoBase(
        config.model,
        config.resolution,
        device,
        dtype,
        config.sampling_steps,
        config.guidance,
        on_meta,
    )
