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
from gulliver.video._digits import DIGITS, DIRECTIONS, MovingDigits, sentence
from gulliver.video._generate import Request, VideoModel
from gulliver.video._judges import Judges, Scores, ceiling, train_judges
from gulliver.video._sources import parse_held_out


@dataclass(frozen=True)
class Evaluation:
    """Figures of an evaluation.

    Attributes:
        samples: number of prompts of the main figures, at the most trained shape.
        seconds: time for generating and judging those, in seconds.
        ceiling: scores of real held-out clips.
        main: scores of sentences that were kept from training, or of all where none were.
        held_out: whether sentences were kept from training.
        trained: scores of as many trained sentences; None where none were kept from training.
        shapes: scores at each other trained shape, by name, for sentences of all kinds.
        image_to_video: scores of real held-out first frames, moved by sentences; None for a model
            of stills.
        clips: clips of `main` and of `trained` with their sentences, for showing.
    """

    samples: int
    seconds: float
    ceiling: Scores
    main: Scores
    held_out: bool
    trained: Scores | None
    shapes: dict[str, Scores]
    image_to_video: Scores | None
    clips: list[list[tuple[str, Tensor]]]

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
    """Generates clips from sentences and judges them.

    Args:
        model: model trained on the moving digits.
        samples: number of prompts of the main figures; a fifth as many for each other shape.
        sampling: steps and guidance.
        seed: seed of the first clip's noise, far from those used elsewhere.
        show: whether to display progress.

    Raises:
        GulliverError: the model was not trained on the moving digits.
    """
    config = model.config
    if config.data.table is not None:
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
    moving = bucket.frames > 1
    return Evaluation(
        samples=samples,
        seconds=seconds,
        ceiling=ceiling(judges, bucket),
        main=scores[0],
        held_out=bool(hidden),
        trained=scores[1] if hidden else None,
        shapes=others,
        image_to_video=_image_to_video(model, judges, few, bucket, sampling) if moving else None,
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


def _image_to_video(
    model: VideoModel,
    judges: Judges,
    wanted: list[tuple[int, int]],
    bucket: Bucket,
    sampling: SamplingConfig | None,
) -> Scores:
    """Scores clips that begin with first frames of real held-out clips, with their sentences."""
    real = MovingDigits("heldout", len(wanted), seed=2, shapes={bucket: 1})
    labels = [real.labels(index) for index in range(len(real))]
    requests = [
        Request(sentence(*labels[index]), bucket, index, given=real[index].video[:, :1])
        for index in range(len(real))
    ]
    return _score(judges, model.generate(requests, sampling), labels)
