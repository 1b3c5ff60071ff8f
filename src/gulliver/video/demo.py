"""The demo: trains, generates and evaluates; also evaluates clips with given real frames.

Only the generated frames are evaluated, never the given ones.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.checkpoint.files import read_json, write_json
from gulliver.comm.launcher import launch
from gulliver.data.clips import Bucket
from gulliver.errors import GulliverError
from gulliver.io.files import write_text
from gulliver.jobs.display import console
from gulliver.video.config import (
    SENTENCES_NEVER_TRAINED,
    DemoConfig,
    SamplingConfig,
    TrainConfig,
    parse_shapes,
)
from gulliver.video.digits import (
    DIGITS,
    DIRECTIONS,
    DigitReaders,
    MovingDigits,
    Scores,
    ceiling,
    load_judges,
    sentence,
)
from gulliver.video.media import SheetRow, contact_sheet, loss_curve
from gulliver.video.pipeline import VideoModel
from gulliver.video.public_models import autoencoder_figures
from gulliver.video.requests import Request
from gulliver.video.run import Run
from gulliver.video.sources import parse_held_out


@dataclass(frozen=True)
class Task:
    """Evaluation task with given frames of a real clip."""

    name: str
    title: str
    given: Callable[[int], tuple[int, ...]]
    """Maps a number of latent frames to the indices of the given ones."""

    def fits(self, latent_frames: int) -> bool:
        given = set(self.given(latent_frames))
        return 0 < len(given) < latent_frames and max(given) < latent_frames

    def request(
        self, clip: Tensor, prompt: str, bucket: Bucket, seed: int, compression: int
    ) -> Request:
        given = self.given(latent_frames(bucket, compression))
        needed = clip[:, : max(given) * compression + 1]
        strategy = ";".join(f"0,0,{place},{place},1,0" for place in given)
        return Request(prompt, bucket, seed, references=(needed,), mask_strategy=strategy)

    def frames_made(self, bucket: Bucket, compression: int) -> list[int]:
        given = self.given(latent_frames(bucket, compression))
        # The first latent frame corresponds to one frame, all others to `compression` frames.
        return [n for n in range(bucket.frames) if -(-n // compression) not in given]


def latent_frames(bucket: Bucket, compression: int) -> int:
    return (bucket.frames - 1) // compression + 1


TASKS = (
    Task(
        "image_to_video",
        "image to video: the first frame is a scan not seen in training",
        lambda frames: (0,),
    ),
    Task(
        "extension",
        "extension: the first frames are real",
        lambda frames: (0, 1),
    ),
    Task(
        "tail",
        "ending: the last frames are real, the beginning is generated",
        lambda frames: (frames - 1,),
    ),
    Task(
        "first_and_last",
        "connecting: the first and the last frames are real",
        lambda frames: (0, frames - 1),
    ),
    Task(
        "every_second",
        "interpolation: every second latent frame is real",
        lambda frames: tuple(range(0, frames, 2)),
    ),
)


def real_clips(count: int, bucket: Bucket, seed: int) -> MovingDigits:
    return MovingDigits("heldout", count, seed=seed, shapes={bucket: 1})


def requests_of(task: Task, real: MovingDigits, compression: int) -> list[Request]:
    return [
        task.request(
            real[index].video, real.caption(index), real.bucket_of(index), index, compression
        )
        for index in range(len(real))
    ]


# Evaluation: whether the clips of a trained model match their sentences.
#
# Two judges, trained or defined on real clips only, evaluate generated ones. Their accuracy on real
# held-out clips, measured first, is the upper limit of any score.


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation."""

    samples: int
    # Seconds for generating and evaluating them.
    seconds: float
    ceiling: Scores
    # Scores of held-out sentences, or of all sentences if none were held out.
    main: Scores
    held_out: bool
    # Scores of as many trained sentences; None if none were held out.
    trained: Scores | None
    # Scores of each other trained shape, by name, for all sentences.
    shapes: dict[str, Scores]
    # Scores, by task, of the frames generated for clips with given frames of real held-out clips;
    # empty for a model of stills.
    conditioned: dict[str, Scores]
    clips: list[list[tuple[str, Tensor]]]

    @property
    def image_to_video(self) -> Scores | None:
        """Scores of clips that start with an unseen picture; None if the model generates stills."""
        return self.conditioned.get("image_to_video")

    def figures(self) -> dict[str, Any]:
        return asdict(replace(self, clips=[]))


def evaluate(
    model: VideoModel,
    samples: int = 200,
    sampling: SamplingConfig | None = None,
    seed: int = 1_000_000,
    show: bool = True,
) -> Evaluation:
    config = model.config
    if not config.data.made:
        raise GulliverError(
            "this run was trained on a table, but only runs on the moving digits can be evaluated"
        )
    judges = load_judges()
    shapes = parse_shapes(config.data.shapes)
    bucket = max(shapes, key=lambda one: shapes[one])
    hidden = sorted(parse_held_out(config.data.held_out))
    shown = [pair for pair in sentences(40) if pair not in hidden]
    clips: list[list[tuple[str, Tensor]]] = []
    scores: list[Scores] = []
    started = time.monotonic()
    seconds = 0.0
    for pairs in [hidden, shown] if hidden else [shown]:
        wanted = [pairs[n % len(pairs)] for n in range(samples)]
        made = _generate(model, wanted, bucket, sampling, seed, show)
        scores.append(_score(judges, made, wanted))
        clips.append([(sentence(*pair), clip) for pair, clip in zip(wanted, made, strict=True)])
        seconds = seconds or time.monotonic() - started
    few = sentences(max(1, samples // 5))
    others = {
        str(one): _score(
            judges, _generate(model, few, one, sampling, seed, False), few, one.frames > 1
        )
        for one in shapes
        if one != bucket
    }
    return Evaluation(
        samples=samples,
        seconds=seconds,
        ceiling=ceiling(judges, bucket),
        main=scores[0],
        held_out=bool(hidden),
        trained=scores[1] if hidden else None,
        shapes=others,
        conditioned=_score_conditioned(model, judges, max(1, samples // 4), bucket, sampling),
        clips=clips,
    )


def sentences(count: int) -> list[tuple[int, int]]:
    """Lists `count` pairs of digit and direction, spread evenly over all forty."""
    ways = len(DIRECTIONS)
    return [(n % len(DIGITS), (n + n // len(DIGITS)) % ways) for n in range(count)]


def _generate(
    model: VideoModel,
    wanted: list[tuple[int, int]],
    bucket: Bucket,
    sampling: SamplingConfig | None,
    seed: int,
    show: bool,
) -> list[Tensor]:
    still = bucket.frames == 1
    requests = [
        Request(sentence(digit, None if still else way), bucket, seed + number)
        for number, (digit, way) in enumerate(wanted)
    ]
    return model.generate(requests, sampling, show)


def _score(
    judges: DigitReaders, clips: list[Tensor], wanted: list[tuple[int, int]], moving: bool = True
) -> Scores:
    return judges.score(clips, [d for d, _ in wanted], [w if moving else None for _, w in wanted])


def _score_conditioned(
    model: VideoModel,
    judges: DigitReaders,
    samples: int,
    bucket: Bucket,
    sampling: SamplingConfig | None,
) -> dict[str, Scores]:
    compression = model.autoencoder.compression[0]
    real = real_clips(samples, bucket, seed=2)
    labels = [real.labels(index) for index in range(samples)]
    digits, directions = [digit for digit, _ in labels], [way for _, way in labels]
    scores = {}
    for task in TASKS:
        if task.fits(latent_frames(bucket, compression)):
            clips = model.generate(requests_of(task, real, compression), sampling)
            made = task.frames_made(bucket, compression)
            scores[task.name] = judges.score(clips, digits, directions, made)
    return scores


# The demo: trains, generates and evaluates, and leaves a folder of results.
#
# out/demo/
#   run/           the training run
#   sheet.gif      generated clips with their sentences (sheet.png: one moment of it)
#   loss.png       the loss curve
#   report.md      human-readable results; report.json for programs


BARS = {"digit": 0.90, "direction": 0.98, "both": 0.88}
"""Expected accuracies of clips from text alone."""
GIVEN_BAR = 0.90
"""Expected accuracy of clips with given frames, in digit and direction."""
MASKS = (
    *("image_head:0.11", "extend:0.03", "image_tail:0.07"),
    *("image_head_tail:0.03", "interpolate:0.03", "random:0.03"),
)
"""Mask strategies of the demo: three in ten clips get a mask, weighted by evaluation task."""
STEPS = 12
"""Sampling steps of the demo: its small model draws as many right digits with 12 as with 24."""
COLUMNS = 6
SHEET_FPS = 8.0


def demonstrate(config: DemoConfig) -> dict[str, Any]:
    started = time.monotonic()
    folder = config.out / "run"
    _train(config, folder)
    run = Run(folder)
    model = VideoModel.load(folder)
    sampling = SamplingConfig(STEPS)
    evaluation = evaluate(model, config.samples, sampling)
    contact_sheet(config.out / "sheet.gif", _rows(model, evaluation, sampling), SHEET_FPS)
    log = run.log.read()
    losses, norms = [line["loss"] for line in log], [line["grad_norm"] for line in log]
    loss_curve(config.out / "loss.png", [line["step"] for line in log], losses, norms)
    figures = _figures(config, run, evaluation, time.monotonic() - started)
    write_json(config.out / "report.json", figures)
    write_text(config.out / "report.md", _report(figures))
    return figures


def _train(config: DemoConfig, folder: Path) -> None:
    """Trains on new ranks, or continues an interrupted training."""
    ranks = config.ranks or torch.cuda.device_count() or 2
    settings = TrainConfig()
    arguments = ["train", "--out", str(folder), "--resume", "--steps", str(config.steps)]
    arguments += ["--autoencoder.steps", str(config.autoencoder_steps), "--log-every", "1"]
    arguments += ["--ranks", str(ranks), "--stage", str(settings.stage)]
    arguments += ["--data.held-out", *SENTENCES_NEVER_TRAINED, "--flow.masks", *MASKS]
    console().print(f"training on {ranks} ranks in {folder}")
    started, resumed = time.monotonic(), Run(folder).config_path.is_file()
    code = launch("gulliver.cli", arguments, ranks)
    if code:
        raise GulliverError(f"training failed with exit code {code}; see above")
    times = folder / "times.json"
    if not times.is_file():
        seconds = time.monotonic() - started
        write_json(times, {"with_autoencoder": seconds, "resumed": resumed})


def _rows(model: VideoModel, evaluation: Evaluation, sampling: SamplingConfig) -> list[SheetRow]:
    titles = ["text to video: the first evaluated clips of held-out sentences"]
    titles += ["text to video: the first evaluated clips of trained sentences"]
    rows = [
        SheetRow(title, [clip for _, clip in part[:COLUMNS]], [text for text, _ in part[:COLUMNS]])
        for title, part in zip(titles, evaluation.clips, strict=True)
    ]
    for bucket, title in (
        (Bucket(9, 24, 40), "another aspect ratio"),
        (Bucket(1, 32, 32), "text to image"),
    ):
        if bucket in parse_shapes(model.config.data.shapes):
            rows.append(_made(model, bucket, title, sampling))
    return [*rows, *_conditioned(model, sampling)]


def _made(model: VideoModel, bucket: Bucket, title: str, sampling: SamplingConfig) -> SheetRow:
    texts = [sentence(n, None if bucket.frames == 1 else n % 4) for n in range(COLUMNS)]
    requests = [Request(text, bucket, seed=n) for n, text in enumerate(texts)]
    return SheetRow(
        f"{title} ({bucket.width}x{bucket.height})", model.generate(requests, sampling), texts
    )


def _conditioned(model: VideoModel, sampling: SamplingConfig) -> list[SheetRow]:
    compression = model.autoencoder.compression[0]
    real = real_clips(COLUMNS, Bucket(13, 32, 32), seed=5)
    texts = [real.caption(n) for n in range(COLUMNS)]
    return [
        SheetRow(task.title, model.generate(requests_of(task, real, compression), sampling), texts)
        for task in TASKS
    ]


def _figures(
    config: DemoConfig, run: Run, evaluation: Evaluation, seconds: float
) -> dict[str, Any]:
    main = asdict(evaluation.main)
    log = run.log.read()
    plan = (run.folder / "plan.yaml").read_text(encoding="utf-8")
    times = read_json(run.folder / "times.json")
    return {
        "digit": main["digit"],
        "direction": main["direction"],
        "both": main["both"],
        "samples": evaluation.samples,
        "train_seconds": log[-1]["seconds"],
        "train_seconds_with_autoencoder": times["with_autoencoder"],
        "resumed": times.get("resumed", False),
        "total_seconds": seconds,
        "steps": config.steps,
        "autoencoder": autoencoder_figures(run.autoencoder_path),
        "bars": [_bar(name, main[name], bar) for name, bar in BARS.items()]
        + [_bar(name, both.both, GIVEN_BAR) for name, both in evaluation.conditioned.items()],
        "evaluation": evaluation.figures(),
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.processor() or platform.machine(),
            "gpus": torch.cuda.device_count(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": sys.platform,
        },
        "plan": plan,
    }


def _bar(name: str, value: float, bar: float) -> dict[str, Any]:
    return {"name": name, "value": value, "bar": bar, "holds": value >= bar}


def _report(figures: dict[str, Any]) -> str:
    evaluation = figures["evaluation"]
    machine = figures["machine"]
    rows = [("real held-out clips (upper limit)", evaluation["ceiling"])]
    rows.append(("generated from held-out sentences", evaluation["main"]))
    rows.append(("generated from trained sentences", evaluation["trained"]))
    rows += [(f"generated at {name}", scores) for name, scores in evaluation["shapes"].items()]
    rows += [
        (f"with given frames: {name.replace('_', ' ')}", scores)
        for name, scores in evaluation["conditioned"].items()
    ]
    lines = ["# Demonstration", "", "![generated clips](sheet.gif)", ""]
    lines += ["| clips | number | right digit | right direction | both |", "|---|---|---|---|---|"]
    lines += [_row(name, Scores(**scores)) for name, scores in rows]
    lines += [
        "",
        "For one frame any direction counts as right. Given frames are of handwriting that was",
    ]
    lines += ["not used in training; only generated frames are evaluated.", ""]
    lines += [
        f"- {bar['name'].replace('_', ' ')}: {bar['value']:.1%}, expected at least "
        f"{bar['bar']:.0%}: {'reached' if bar['holds'] else 'MISSED'}"
        for bar in figures["bars"]
    ]
    lines += [
        "",
        f"- autoencoder: {figures['autoencoder'].get('psnr', float('nan')):.1f} dB on "
        f"{figures['autoencoder'].get('clips', 'unknown clips')}",
        f"- training: {figures['train_seconds']:.0f} s for {figures['steps']} steps, "
        f"{figures['train_seconds_with_autoencoder']:.0f} s including the autoencoder and start-up"
        + (" in the last call; an earlier one was interrupted" if figures["resumed"] else ""),
        f"- total: {figures['total_seconds']:.0f} s, without installation",
        f"- machine: {machine['cores']} cores, {machine['gpus']} GPUs, torch {machine['torch']}, "
        f"Python {machine['python']}",
        "",
        "![loss](loss.png)",
        "",
        "## Plan",
        "",
        "```yaml",
        figures["plan"].rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _row(name: str, scores: Scores) -> str:
    return (
        f"| {name} | {scores.clips} | {scores.digit:.1%} | {scores.direction:.1%} | "
        f"{scores.both:.1%} |"
    )
