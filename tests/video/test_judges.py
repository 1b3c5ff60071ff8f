"""The judges are right on real clips that they never saw, and not when the labels are wrong."""

from __future__ import annotations

import pytest
import torch

from gulliver.data import Bucket
from gulliver.video.digits import DigitReaders, MovingDigits, ceiling, load_judges


@pytest.fixture(scope="module")
def judges() -> DigitReaders:
    return load_judges()


@pytest.mark.parametrize("bucket", [Bucket(13, 32, 32), Bucket(9, 24, 40)], ids=str)
def test_real_held_out_clips_are_judged_right(judges: DigitReaders, bucket: Bucket) -> None:
    scores = ceiling(judges, bucket)
    assert scores.digit >= 0.95
    assert scores.direction == 1.0
    assert scores.both == scores.digit
    assert scores.clips == 297


def test_wrong_labels_score_at_chance(judges: DigitReaders) -> None:
    real = MovingDigits("heldout", 200)
    clips = list(real.batch(list(range(200))).unbind())
    wrong = [(real.labels(i)[0] + 1 + i % 9) % 10 for i in range(200)]
    scores = judges.score(clips, wrong, [(real.labels(i)[1] + 1) % 4 for i in range(200)])
    assert scores.digit < 0.05
    assert scores.direction == 0.0
    assert scores.both == 0.0


def test_judges_of_made_frames_do_not_look_at_given_ones(judges: DigitReaders) -> None:
    real, other = (MovingDigits("heldout", 100, seed=seed) for seed in (3, 4))
    clips, strange = (one.batch(list(range(100))) for one in (real, other))
    made = [1, 2, 3, 10, 11, 12]
    mixed = strange.clone()
    mixed[:, :, made] = clips[:, :, made]
    labels = [real.labels(i) for i in range(100)]
    asked = [d for d, _ in labels], [way for _, way in labels]
    scores = judges.score(list(mixed.unbind()), *asked, made)
    assert scores.digit >= 0.95
    assert scores.direction == 1.0  # over the gap between the made frames, too
    assert judges.score(list(mixed.unbind()), *asked).both < 0.8


def test_static_clip_has_no_direction(judges: DigitReaders) -> None:
    still = MovingDigits("heldout", 3, shapes={Bucket(1, 32, 32): 1.0}).batch([0, 1, 2])
    assert judges.verdict(still).direction.tolist() == [-1, -1, -1]
    held = still.expand(-1, -1, 9, -1, -1) + 0.02 * torch.randn(3, 3, 9, 32, 32)
    assert judges.verdict(held).direction.tolist() == [-1, -1, -1]
    empty = torch.full((1, 3, 5, 32, 32), -1.0)
    assert judges.verdict(empty).direction.tolist() == [-1]
