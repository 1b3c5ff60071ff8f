"""Evaluation: whether a trained model shows what the sentence says.

Two judges, trained or defined on real clips only, look at generated ones. Their own success on real
held-out clips, the ceiling, comes first: a model cannot be seen to do better.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from gulliver.data import Bucket
from gulliver.errors import GulliverError
from gulliver.video._config import SamplingConfig, parse_shapes
from gulliver.video._digits import DIGITS, DIRECTIONS, sentence
from gulliver.video._generate import Request, VideoModel
from gulliver.video._judges import Judges, Scores, ceiling, train_judges
from gulliver.video._sources import parse_held_out
from gulliver.video._tasks import TASKS, latent_frames, real_clips, requests_of


@dataclass(frozen=True)
class Evaluation:
    """Figures of an evaluation."""

    samples: int
    # Time for generating and judging those, in seconds.
    seconds: float
    ceiling: Scores
    # Scores of sentences that were kept from training, or of all where none were.
    main: Scores
    held_out: bool
    # Scores of as many trained sentences; None where none were kept from training.
    trained: Scores | None
    # Scores at each other trained shape, by name, for sentences of all kinds.
    shapes: dict[str, Scores]
    # Scores of the made frames of clips that had frames of real held-out clips, with their
    # sentences, by the name of the task; none for a model of stills.
    conditioned: dict[str, Scores]
    clips: list[list[tuple[str, Tensor]]]

    @property
    def image_to_video(self) -> Scores | None:
        """Scores of clips that begin with an unseen picture; None for a model of stills."""
        return self.conditioned.get("image_to_video")

    def figures(self) -> dict[str, Any]:
        """Returns plain values for a report, without the clips."""
        return asdict(replace(self, clips=[]))


def evaluate(
    model: VideoModel,
    samples: int = 200,
    sampling: SamplingConfig | None = None,
    seed: int = 1_000_000,
    show: bool = True,
) -> Evaluation:
    """Generates clips from sentences and judges them."""
    config = model.config
    if not config.data.made:
        raise GulliverError(
            "the judges know the moving digits only: this run was trained on a table"
        )
    if samples < 1:
        raise GulliverError(f"--samples is {samples}: judge at least one")
    judges = train_judges()
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
        conditioned=_score_conditioned(model, judges, max(1, samples // 2), bucket, sampling),
        clips=clips,
    )


def sentences(count: int) -> list[tuple[int, int]]:
    """Lists digit and direction of `count` sentences, all forty evenly."""
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
    judges: Judges, clips: list[Tensor], wanted: list[tuple[int, int]], moving: bool = True
) -> Scores:
    return judges.score(clips, [d for d, _ in wanted], [w if moving else None for _, w in wanted])


def _score_conditioned(
    model: VideoModel,
    judges: Judges,
    samples: int,
    bucket: Bucket,
    sampling: SamplingConfig | None,
) -> dict[str, Scores]:
    """Scores what is made beside given frames of real held-out clips, for each task."""
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
