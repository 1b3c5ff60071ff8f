"""The demonstration: trains, generates, judges, and leaves a folder to look at.

out/demo/
  run/           the training run
  sheet.gif      what it made from which sentence (sheet.png: one moment of it)
  loss.png       the loss curve
  report.md      what was measured, for people; report.json for programs
"""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gulliver.checkpoint import read_json, write_json
from gulliver.comm import launch
from gulliver.data import Bucket
from gulliver.errors import GulliverError
from gulliver.io import write_text
from gulliver.jobs import console
from gulliver.video._autoencoder_training import autoencoder_figures
from gulliver.video._config import (
    SENTENCES_NEVER_TRAINED,
    DemoConfig,
    SamplingConfig,
    TrainConfig,
    parse_shapes,
)
from gulliver.video._digits import sentence
from gulliver.video._evaluate import Evaluation, evaluate
from gulliver.video._generate import Request, VideoModel
from gulliver.video._judges import Scores
from gulliver.video._run import Run
from gulliver.video._sheet import SheetRow, contact_sheet, loss_curve
from gulliver.video._tasks import TASKS, real_clips, requests_of

BARS = {"digit": 0.90, "direction": 0.98, "both": 0.88}
"""Shares of right clips that the demonstration is expected to reach from text alone."""
GIVEN_BAR = 0.90
"""Share of clips with given frames that are right in digit and direction."""
MASKS = (
    *("image_head:0.11", "extend:0.03", "image_tail:0.07"),
    *("image_head_tail:0.03", "interpolate:0.03", "random:0.03"),
)
"""Mask strategies of the demonstration: three clips of ten, weighted by what is judged."""
COLUMNS = 6
SHEET_FPS = 8.0


def demonstrate(config: DemoConfig) -> dict[str, Any]:
    """Runs the demonstration and returns the figures of its report."""
    started = time.monotonic()
    folder = config.out / "run"
    _train(config, folder)
    run = Run(folder)
    model = VideoModel.load(folder)
    sampling = SamplingConfig()
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
    """Trains on fresh ranks, or goes on where an earlier call was stopped."""
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
        raise GulliverError(f"training ended with exit code {code}: see above")
    times = folder / "times.json"
    if not times.is_file():
        seconds = time.monotonic() - started
        write_json(times, {"with_autoencoder": seconds, "resumed": resumed})


def _rows(model: VideoModel, evaluation: Evaluation, sampling: SamplingConfig) -> list[SheetRow]:
    """Returns the rows of the sheet, always the first of each kind: nothing is picked."""
    titles = ["text to video: the first judged clips of sentences that were never trained"]
    titles += ["text to video: the first judged clips of sentences that were trained"]
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
    """Returns a row for each task: clips with given frames of held-out handwriting."""
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
    """The report in Markdown."""
    evaluation = figures["evaluation"]
    machine = figures["machine"]
    rows = [("real held-out clips (the judges' ceiling)", evaluation["ceiling"])]
    rows.append(("generated from sentences that were never trained", evaluation["main"]))
    rows.append(("generated from sentences that were trained", evaluation["trained"]))
    rows += [(f"generated at {name}", scores) for name, scores in evaluation["shapes"].items()]
    rows += [
        (f"with given frames: {name.replace('_', ' ')}", scores)
        for name, scores in evaluation["conditioned"].items()
    ]
    lines = ["# Demonstration", "", "![what the model made](sheet.gif)", ""]
    lines += ["| clips | number | right digit | right direction | both |", "|---|---|---|---|---|"]
    lines += [_row(name, Scores(**scores)) for name, scores in rows]
    lines += [
        "",
        "For one frame any direction counts as right. Given frames are of handwriting that",
    ]
    lines += ["the model never saw; the judges look at the frames that it made.", ""]
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
        f"{figures['train_seconds_with_autoencoder']:.0f} s with the autoencoder and the start"
        + (" in the last call, an earlier one was stopped" if figures["resumed"] else ""),
        f"- all in: {figures['total_seconds']:.0f} s, installation left out",
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
