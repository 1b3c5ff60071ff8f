"""The video commands; their options are in `options.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from gulliver.checkpoint.files import write_json
from gulliver.cli.apps import ended
from gulliver.cli.data import after_train, hint
from gulliver.cli.options import EvaluateConfig, GenerateConfig
from gulliver.comm.launcher import default_ranks, launch, under_launcher
from gulliver.comm.world import guard, init_world
from gulliver.data.clips import Bucket
from gulliver.errors import UsageError, usage_errors
from gulliver.jobs.display import console
from gulliver.jobs.loop import Outcome
from gulliver.video.autoencoder_config import TrainAutoencoderConfig
from gulliver.video.autoencoders.job import run_autoencoder
from gulliver.video.caches import Counts, psnr, read_strategy
from gulliver.video.config import DemoConfig, SamplingConfig, TrainConfig, check_clip, check_config
from gulliver.video.demo import demonstrate, evaluate
from gulliver.video.generation import extend, split_ranks
from gulliver.video.media import check_output, read_frames, write_clip
from gulliver.video.pipeline import VideoModel, VideoPipeline, open_run
from gulliver.video.planned_training import train
from gulliver.video.requests import (
    Request,
    check_request,
    loop_prompts,
    loop_seed,
    read_prompt,
    read_prompts,
)
from gulliver.video.sources import check_start, with_encoded
from gulliver.video.training import check_ranks

CONDITION_FRAMES = 5
"""Default number of conditioning frames at the end of a clip."""


def check_train(config: TrainConfig) -> None:
    config = with_encoded(config)
    check_config(config)
    check_start(config)
    if not under_launcher():
        check_ranks(config, config.ranks or max(default_ranks(), config.ranks_of_a_model))


def train_command(config: TrainConfig, arguments: list[str]) -> int:
    """Trains, starting ranks on this machine if no launcher has done so."""
    ranks = config.ranks or max(default_ranks(), config.ranks_of_a_model)
    if not under_launcher() and ranks > 1:
        code = launch("gulliver.cli", arguments, ranks)
    else:
        code = ended(replace(train(config), result=config.out))
    if code == 0 and not under_launcher():
        after_train(with_encoded(config))
    return code


def train_autoencoder_command(config: TrainAutoencoderConfig, arguments: list[str]) -> int:
    """Trains a video autoencoder, starting ranks on this machine if no launcher has done so."""
    ranks = config.ranks or max(default_ranks(), config.share_ranks)
    if not under_launcher() and ranks % config.share_ranks:
        raise UsageError(
            f"--ranks is {ranks}, but must be a multiple of --share-ranks {config.share_ranks}"
        )
    if not under_launcher() and ranks > 1:
        code = launch("gulliver.cli", arguments, ranks)
    else:
        made = run_autoencoder(config)
        code = ended(Outcome(made.step, made.finished, result=made.path))
    if code == 0 and not under_launcher() and config.data.table is not None:
        shapes = ("--shapes", *config.data.shapes) if config.data.buckets is None else ()
        made = config.out / "autoencoder.safetensors"
        hint(
            "data", "encode", config.data.table, "--autoencoder", made, "--out", "latents", *shapes
        )
    return code


def _read(
    config: GenerateConfig, arguments: list[str]
) -> tuple[list[str], list[Request], Any, int]:
    """Reads and checks prompts, requests, the clip to extend, and ranks."""
    if config.model is not None and _asked(config, arguments, "run"):
        raise UsageError(
            f"--run {config.run} and --model {config.model} cannot be combined: omit one of them"
        )
    prompts = _prompts(config)
    # The autoencoder and patch sizes of all public models divide 16.
    step = 8 if config.model is None else 16
    bucket = Bucket(config.frames, *_sides(config.aspect_ratio, config.resolution, step))
    check_clip(bucket.frames, bucket.height, bucket.width, config.scale)
    check_output(config.out, config.frames, config.fps)
    if read_strategy(config.step_cache) is None and config.cache_check:
        raise UsageError("--cache-check needs --step-cache, such as first-block")
    guided, image_guided = config.guidance != 1, config.guidance_image != 1
    ranks = 1
    if not under_launcher():
        ranks = config.ranks or max(1, config.sp_size) * max(1, config.guidance_ranks)
        split_ranks(ranks, config.sp_size, config.guidance_ranks, guided, image_guided)
    clip = None if config.extend is None else read_frames(config.extend)
    return prompts, _requests(config, prompts, bucket, clip), clip, ranks


def generate_command(config: GenerateConfig, arguments: list[str]) -> int:
    with usage_errors():
        prompts, requests, clip, ranks = _read(config, arguments)
    guided, image_guided = config.guidance != 1, config.guidance_image != 1
    if ranks > 1:
        return launch("gulliver.cli", arguments, ranks)
    world = init_world()
    with guard():
        config, model = _loaded(config, arguments, world.device)
        sharing = config.sp_size, config.guidance_ranks, guided, console().print, image_guided
        model.share(*sharing, autoencoder=config.share_autoencoder)
        clips, counts = _made(config, model, requests, clip, world.is_main)
        for line in _cached(config, model, requests, clip, clips, counts):
            if world.is_main:
                console().print(line)
    if world.is_main:
        paths = _numbered(config.out, len(prompts))
        for path, made, prompt in zip(paths, clips, prompts, strict=True):
            print(f"{write_clip(path, made, config.fps, config.scale)}  {prompt}")
    return 0


def _loaded(
    config: GenerateConfig, arguments: list[str], device: Any
) -> tuple[GenerateConfig, VideoPipeline]:
    """Loads a run or the parts of a public model, with its own settings as defaults."""
    if config.model is None:
        config.refuse_parts("texts")
        model = open_run(config.run, device)
        if config.adapter is not None:
            from gulliver.dreambooth.video_base import load_adapter

            load_adapter(model, config.adapter)
        return _with_own(config, arguments, model), model
    if config.adapter is not None:
        raise UsageError(f"--adapter {config.adapter} needs a --run: omit --model")
    if config.autoencoder is None or config.text_encoder is None:
        parts = {"--autoencoder": config.autoencoder, "--text-encoder": config.text_encoder}
        missing = " and ".join(name for name, path in parts.items() if path is None)
        raise UsageError(
            f"--model {config.model} needs {missing}: pass the models it was trained with"
        )
    paths = config.model, config.autoencoder, config.text_encoder, config.clip
    fps = config.fps if _asked(config, arguments, "fps") else None
    pipeline = VideoPipeline.load(*paths, device=device, fps=fps, texts=config.texts)
    console().print(pipeline.described())
    return _with_own(config, arguments, pipeline), pipeline


def _with_own(
    config: GenerateConfig, arguments: list[str], pipeline: VideoPipeline
) -> GenerateConfig:
    """Uses the settings of the run or the public model as defaults."""
    own = {"fps": pipeline.fps}
    own |= {name: getattr(pipeline.sampling, name) for name in ("steps", "guidance", "batch_size")}
    asked = {name: value for name, value in own.items() if not _asked(config, arguments, name)}
    config = replace(config, **asked)
    check_output(config.out, config.frames, config.fps)
    return config


def _asked(config: GenerateConfig, arguments: list[str], name: str) -> bool:
    """Whether the user has set an option, possibly to its default or in a file."""
    option = f"--{name.replace('_', '-')}"
    said = any(a == option or a.startswith(f"{option}=") for a in arguments)
    return said or getattr(config, name) != getattr(GenerateConfig(), name)


def _requests(
    config: GenerateConfig, prompts: list[str], bucket: Bucket, clip: Any
) -> list[Request]:
    if config.condition_frames is not None and config.extend is None and config.loops == 1:
        raise UsageError("--condition-frames needs --extend or --loops")
    if clip is not None and config.image is not None:
        raise UsageError(
            "--image and --extend cannot be combined: the first sets a first frame, the second "
            "continues a clip"
        )
    condition, given = config.condition_frames, None
    if clip is not None:
        condition = condition or CONDITION_FRAMES
        given = clip[:, -condition:]
    elif config.image is not None:
        given = read_frames(config.image, 2)
        if given.shape[1] > 1:
            raise UsageError(
                f"--image {config.image} is a clip: pass an image, continue the clip with "
                "--extend, or place its frames with --reference and --mask-strategy"
            )
    request = Request(
        prompt="",
        bucket=bucket,
        given=given,
        negative_prompt=config.negative_prompt,
        align=config.align,
        loops=config.loops,
        condition_frames=condition if config.loops > 1 else None,
        condition_edit=config.condition_edit,
    )
    read = cache(read_frames)
    return [
        _request(config, replace(request, prompt=prompt, seed=config.seed + number), read)
        for number, prompt in enumerate(prompts)
    ]


def _request(config: GenerateConfig, request: Request, read: Callable[..., Any]) -> Request:
    """Adds references and the prompt's JSON settings to a request, and validates it."""
    prompt = read_prompt(request.prompt)
    paths = prompt.references or config.reference
    strategy = prompt.mask_strategy or config.mask_strategy
    if config.extend is not None and (paths or strategy or config.condition_edit):
        raise UsageError("omit --reference, --mask-strategy and --condition-edit with --extend")
    references = tuple(map(read, paths))
    request = replace(request, prompt=prompt.text, references=references, mask_strategy=strategy)
    check_request(request, config)
    return request


def _made(
    config: GenerateConfig,
    model: VideoPipeline,
    requests: list[Request],
    clip: Any,
    show: bool,
) -> tuple[list[Any], Counts]:
    """Generates the clips in order; counts the model calls that a cache saves."""
    for request in requests:
        model.check(request, config)
        for remark in model.remarks(request) if show else ():
            console().print(f"note: {remark}")
    if clip is None:
        return model.generate(requests, config, show=show), model.counts
    counts = Counts()
    return [_extended(config, model, clip, request, counts) for request in requests], counts


def _cached(
    config: GenerateConfig,
    model: VideoPipeline,
    requests: list[Request],
    clip: Any,
    clips: list[Any],
    counts: Counts,
) -> list[str]:
    """Describes the calls that a cache saved and, if requested, its error."""
    if read_strategy(config.step_cache) is None:
        return []
    lines = [f"cache {config.step_cache}: {counts}"]
    if config.cache_check:
        plain, _ = _made(replace(config, step_cache="none"), model, requests, clip, False)
        lines += [
            f"PSNR to the clip without cache: {psnr(made, other):.1f} dB  {request.prompt}"
            for made, other, request in zip(clips, plain, requests, strict=True)
        ]
    return lines


def _extended(
    config: GenerateConfig,
    model: VideoPipeline,
    clip: Any,
    request: Request,
    counts: Counts,
) -> Any:
    """Extends a clip once per loop of a request; adds the model calls to `counts`."""
    overlap = config.condition_frames or CONDITION_FRAMES
    for loop, sentence in enumerate(loop_prompts(request.prompt, request.loops)):
        seed, negative = loop_seed(request.seed, loop), request.negative_prompt
        clip = extend(model, clip, sentence, request.bucket, overlap, seed, config, negative)
        counts.add(model.counts)
    return clip


def _prompts(config: GenerateConfig) -> list[str]:
    prompts = list(config.prompt)
    if config.prompt_file is not None:
        prompts += read_prompts(config.prompt_file)
    if not prompts:
        raise UsageError(
            "nothing to generate: pass --prompt 'the digit 3 moving left', or --prompt-file FILE"
        )
    return prompts


def _sides(aspect_ratio: str, resolution: int, step: int = 8) -> tuple[int, int]:
    """Returns height and width, multiples of `step`, for about resolution**2 pixels at a ratio."""
    try:
        width, height = (int(part) for part in aspect_ratio.split(":"))
        if not 1 <= min(width, height) <= max(width, height) <= 1000:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--aspect-ratio {aspect_ratio!r} is not width:height, such as 1:1, 5:3 or 3:5"
        ) from None
    side = math.sqrt(resolution * resolution / (width * height))
    rows, columns = (max(step, round(side * n / step) * step) for n in (height, width))
    return rows, columns


def _numbered(path: Path, count: int) -> list[Path]:
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{number:03d}{path.suffix}") for number in range(count)]


def evaluate_command(config: EvaluateConfig) -> int:
    model = VideoModel.load(config.run)
    sampling = SamplingConfig(config.steps, config.guidance)
    figures = evaluate(model, config.samples, sampling).figures()
    ceiling = figures["ceiling"]
    console().print(
        f"judges on real held-out clips: digit {ceiling['digit']:.1%}, "
        f"direction {ceiling['direction']:.1%}, both {ceiling['both']:.1%}"
    )
    if config.out is not None:
        write_json(config.out, figures)
    print(json.dumps(figures, indent=1))
    return 0


def demo_command(config: DemoConfig) -> int:
    """Runs the demo; a missed target is reported but is not a failure."""
    figures = demonstrate(config)
    for bar in figures["bars"]:
        sign = "reached" if bar["holds"] else "MISSED"
        print(f"{bar['name']:>14}: {bar['value']:.1%}  (expected {bar['bar']:.0%}: {sign})")
    print(f"look at {config.out}/sheet.gif and {config.out}/report.md")
    return 0
