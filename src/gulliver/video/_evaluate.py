"""Does a trained model show what the sentence says?

Two judges, trained or defined on real clips only, look at generated ones. Their own success on real
held-out clips, the ceiling, comes first: a model cannot be seen to do better.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from gulliver.data import DIGITS, DIRECTIONS, Bucket, MovingDigits, sentence
from gulliver.errors import GulliverError
from gulliver.video._config import parse_shapes
from gulliver.video._generate import Request, SamplingConfig, VideoModel
from gulliver.video._judges import Judges, Scores, ceiling, train_judges
from gulliver.video._sources import parse_held_out


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        samples: prompts judged for the main figures, at the most trained shape.
        seconds: time for generating and judging them.
        ceiling: the judges on real held-out clips.
        main: all sentences, evenly.
        never_trained: the sentences that were kept from training among them, or None.
        shapes: each other trained shape by name.
        image_to_video: real held-out first frames, moved by sentences; None for a model of stills.
        clips: the generated clips of `main` with their sentences, for showing.
    """

    samples: int
    seconds: float
    ceiling: Scores
    main: Scores
    never_trained: Scores | None
    shapes: dict[str, Scores]
    image_to_video: Scores | None
    clips: list[tuple[str, Tensor]]

    def figures(self) -> dict[str, Any]:
        """Plain values for a report."""
        plain = {key: value for key, value in asdict(self).items() if key != "clips"}
        return {**plain, "shapes": {name: asdict(s) for name, s in self.shapes.items()}}


def evaluate(
    model: VideoModel,
    samples: int = 200,
    sampling: SamplingConfig | None = None,
    seed: int = 1_000_000,
    show: bool = True,
) -> Evaluation:
    """Generates clips from sentences and judges them.

    Args:
        model: trained on the moving digits.
        samples: prompts of the main figures; a fifth as many for each other shape.
        sampling: steps and guidance.
        seed: of the noise, far from those used elsewhere.
        show: progress display.

    Raises:
        GulliverError: the model was not trained on the moving digits.
    """
    config = model.config
    if config.data.table is not None:
        raise GulliverError(
            "the judges know the moving digits only: this run was trained on a table"
        )
    judges = train_judges()
    shapes = parse_shapes(config.data.shapes)
    main_bucket = max(shapes, key=lambda bucket: shapes[bucket])
    started = time.monotonic()
    wanted = sentences(samples)
    clips = _generate(model, wanted, main_bucket, sampling, seed, show)
    main = _score(judges, clips, wanted)
    seconds = time.monotonic() - started
    hidden = set(parse_held_out(config.data.held_out))
    rare = [place for place, pair in enumerate(wanted) if pair in hidden]
    never = _score(judges, [clips[p] for p in rare], [wanted[p] for p in rare]) if rare else None
    few = sentences(max(1, samples // 5))
    others = {
        str(bucket): _score(
            judges, _generate(model, few, bucket, sampling, seed, False), few, bucket.frames > 1
        )
        for bucket in shapes
        if bucket != main_bucket
    }
    moving = main_bucket.frames > 1
    return Evaluation(
        samples=samples,
        seconds=seconds,
        ceiling=ceiling(judges, main_bucket),
        main=main,
        never_trained=never,
        shapes=others,
        image_to_video=_image_to_video(model, judges, few, main_bucket, sampling)
        if moving
        else None,
        clips=[(sentence(*pair), clip) for pair, clip in zip(wanted, clips, strict=True)],
    )


def sentences(count: int) -> list[tuple[int, int]]:
    """Digit and direction of `count` sentences, all forty evenly."""
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
    """First frames of real held-out clips, and the sentence of the clip that each begins."""
    real = MovingDigits("heldout", len(wanted), seed=2, shapes={bucket: 1})
    labels = [real.labels(index) for index in range(len(real))]
    requests = [
        Request(sentence(*labels[index]), bucket, index, given=real[index].video[:, :1])
        for index in range(len(real))
    ]
    return _score(judges, model.generate(requests, sampling), labels)
