"""Caches of sampling: speed-up against error on the digits model, and what the judges say.

`python -m benchmarks.caches --run out/demo/run` makes the same clips without a cache, with each
strategy, and, as the peer of any cache, with fewer steps and no cache, in turns. Of all clips it
then tells the PSNR to those without cache, and the share that shows what its sentence says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from benchmarks._harness import Report, Spread, alternate, at_least, finish
from gulliver.data import Bucket
from gulliver.options import size_text
from gulliver.video import Counts, Request, SamplingConfig, VideoModel
from gulliver.video.caches import psnr
from gulliver.video.digits import sentence, train_judges

GOOD_DB = 35.0
FASTER = 1.3
STRATEGIES = (
    *("broadcast:2,4,6", "broadcast:2,4,6@100-950", "broadcast:2,2,2,2@100-950"),
    *("broadcast:2,2,2,2@0-1000", "broadcast:3,3,3,3@100-950", "broadcast:4,4,4,4@100-950"),
    *(f"first-block:{change:g}" for change in (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8)),
)
PLAIN = "none"


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    run: Path = Path("out/demo/run")
    """Folder of a run that was trained on the moving digits."""
    clips: int = 40
    """Number of clips."""
    steps: int = 24
    """Euler steps."""
    fewer: tuple[int, ...] = (18, 14, 10)
    """Numbers of steps of the runs with fewer, without cache."""
    strategies: tuple[str, ...] = STRATEGIES
    """Strategies, as `--cache` has them."""
    rounds: int = 3
    """Turns of each contestant."""
    frames: int = 13
    """Length of the clips; they are 32x32."""
    keep: bool = False
    """Write the result file."""


@dataclass
class Made:
    """Clips of a contestant.

    Attributes:
        clips: clips, in the order of the sentences.
        counts: calls of the model's parts, computed and saved.
    """

    clips: list[Tensor]
    counts: Counts


def contestant(
    model: VideoModel, requests: list[Request], sampling: SamplingConfig, made: dict[str, Made]
) -> Callable[[], float]:
    """Makes all clips and returns the seconds; keeps what was made under the sampling's name."""

    def run() -> float:
        started = time.perf_counter()
        clips = model.generate(requests, sampling)
        seconds = time.perf_counter() - started
        made[name_of(sampling)] = Made(clips, model.counts)
        return seconds

    return run


def name_of(sampling: SamplingConfig) -> str:
    """The contestant's name."""
    return sampling.cache if sampling.cache != PLAIN else f"{sampling.steps} steps"


def figures_of(
    made: Made, plain: Made, speed: float, wanted: list[tuple[int, int]], judges: Any
) -> dict[str, float]:
    """Speed-up, errors and scores of a contestant."""
    pairs = list(zip(made.clips, plain.clips, strict=True))
    digits, ways = ([pair[n] for pair in wanted] for n in (0, 1))
    return {
        "speed_up": speed,
        "saved": made.counts.saved,
        # Of the mean square error of all clips: what is far off in one is not averaged away.
        "psnr": psnr(*(torch.stack(each) for each in zip(*pairs, strict=True))),
        "least_psnr": min(psnr(*pair) for pair in pairs),
        "right": judges.score(made.clips, digits, ways).both,
        "kept": made.counts.nbytes,
    }


def row_of(name: str, figures: dict[str, float], seconds: Spread) -> tuple[str, ...]:
    """A contestant as a line of the table."""
    shown = (
        "same" if math.isinf(figures[k]) else f"{figures[k]:.1f}" for k in ("psnr", "least_psnr")
    )
    return (
        name,
        f"{seconds.median:.2f}",
        f"{figures['speed_up']:.2f} x",
        f"{figures['saved']:.0%}",
        *shown,
        f"{figures['right']:.1%}",
        size_text(figures["kept"]),
    )


def main(options: Options) -> None:
    """Measures every strategy."""
    model, judges = VideoModel.load(options.run), train_judges()
    wanted = [(n % 10, (n + n // 10) % 4) for n in range(options.clips)]
    bucket = Bucket(options.frames, 32, 32)
    requests = [
        Request(sentence(*pair), bucket, 500_000 + number) for number, pair in enumerate(wanted)
    ]
    plain = SamplingConfig(steps=options.steps)
    samplings = [plain, *(replace(plain, cache=text) for text in options.strategies)]
    samplings += [replace(plain, steps=steps) for steps in options.fewer]
    made: dict[str, Made] = {}
    times = alternate(
        {name_of(s): contestant(model, requests, s, made) for s in samplings}, options.rounds
    )
    report = Report(
        "caches",
        f"caches of sampling on the moving digits, {options.steps} steps, guidance "
        f"{plain.guidance:g}",
        ("", "s", "speed-up", "calls saved", "PSNR, dB", "least, dB", "judged right", "kept"),
    )
    base = name_of(plain)
    for sampling in samplings:
        name = name_of(sampling)
        speed = times[base].median / times[name].median
        found = figures_of(made[name], made[base], speed, wanted, judges)
        report.rows.append(row_of(name, found, times[name]))
        report.figures[name] = {k: v for k, v in found.items() if math.isfinite(v)}
    caches = {text: report.figures[text] for text in options.strategies}
    good = {
        name: one["speed_up"]
        for name, one in caches.items()
        if one.get("psnr", math.inf) >= GOOD_DB
    }
    best = max(good, key=lambda name: good[name], default="none")
    report.bars = [at_least(f"speed-up at {GOOD_DB:g} dB ({best})", good.get(best, 0.0), FASTER)]
    report.notes = [
        f"{options.clips} clips of {bucket.frames}x32x32 in batches of {plain.batch_size}, "
        f"{torch.get_num_threads()} threads; medians of {options.rounds} turns, of whole clips: "
        "transformer and autoencoder. PSNR to the clip without cache; the least of any clip beside."
    ]
    finish(report, options.keep)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
