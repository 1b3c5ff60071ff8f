"""Mask strategies against the law of the published ones, counted by hand."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product

import pytest
import torch

from gulliver.data import Bucket
from gulliver.video.batches import STRATEGIES, MaskStrategies
from gulliver.video.config import FlowConfig
from gulliver.video.demo import TASKS, latent_frames

Law = dict[tuple[int, ...], float]
"""Chance of each set of given frames."""


def _law(name: str, frames: int) -> Law:
    """Counts the published cases: each length, and each start of it, is equally likely."""
    law: Law = defaultdict(float)
    everything = range(frames)
    if name == "interpolate":
        return {tuple(everything[start::2]): 0.5 for start in (0, 1)}
    if name == "random":
        # Each frame is given with a chance p that is uniform on 0.1 to 0.9: a fine sum over p.
        steps = 400
        for i in range(steps):
            p = 0.1 + 0.8 * (i + 0.5) / steps
            for given in product((False, True), repeat=frames):
                places = tuple(n for n in everything if given[n])
                kept = places if len(places) < frames else places[:-1]
                law[kept] += p ** len(places) * (1 - p) ** (frames - len(places)) / steps
        return dict(law)
    size, side = name.split("_", 1)
    lengths = [1] if size == "image" else list(range(1, max(1, frames // 4) + 1))
    for length in lengths:
        starts = {
            "head": [[0]],
            "tail": [[frames - length]],
            "head_tail": [[0, frames - length]],
            "random": [[start] for start in range(frames - length + 1)],
        }[side]
        for ends in starts:
            places = sorted({start + n for start in ends for n in range(length)})
            law[tuple(places)] += 1 / len(lengths) / len(starts)
    return dict(law)


@pytest.mark.parametrize("frames", [4, 9])
def test_each_strategy_has_the_published_law(frames: int) -> None:
    draw = torch.Generator().manual_seed(frames)
    count = 1500
    for name in sorted(STRATEGIES.keys() - {"identity", "extend"}):
        if (name, frames) == ("random", 9):
            continue
        whole = MaskStrategies({name: 1.0})
        masks = whole.draw(count, frames, draw)
        assert masks is not None
        assert masks.shape == (count, frames)
        found = Counter(tuple((~mask).nonzero().flatten().tolist()) for mask in masks)
        law = _law(name, frames)
        assert found.keys() <= law.keys(), name
        for places, chance in law.items():
            sigma = (chance * (1 - chance) / count) ** 0.5
            assert abs(found[places] / count - chance) < 5 * sigma + 1e-3, (name, places)


def test_every_mask_leaves_a_frame_to_make() -> None:
    draw = torch.Generator().manual_seed(0)
    for name, frames in product(STRATEGIES.keys() - {"identity"}, (2, 3, 5)):
        masks = MaskStrategies({name: 1.0}).draw(50, frames, draw)
        assert masks is not None
        assert bool(masks.any(dim=1).all()), (name, frames)


def test_clips_have_the_shares_that_are_named_and_steps_come_whole() -> None:
    masks = MaskStrategies.of(
        FlowConfig(masks=("identity:0.6", "image_head:0.1", "intepolate:0.05", "image_tail:0.25"))
    )
    draw = torch.Generator().manual_seed(1)
    steps = [masks.draw(32, 4, draw) for _ in range(600)]
    found = [step for step in steps if step is not None]
    assert len(found) / len(steps) == pytest.approx(0.4, abs=0.06)
    given = Counter(tuple((~mask).nonzero().flatten().tolist()) for mask in torch.cat(found))
    clips = sum(given.values())
    assert given[0,] / clips == pytest.approx(0.25, abs=0.02)
    assert given[3,] / clips == pytest.approx(0.625, abs=0.02)
    assert (given[0, 2] + given[1, 3]) / clips == pytest.approx(0.125, abs=0.02)
    assert masks.draw(32, 1, draw) is None  # stills have nothing to give


def test_a_step_draws_its_masks_as_they_are_written_here() -> None:
    masks = MaskStrategies.of(FlowConfig(masks=("image_head:0.2", "extend:0.3")))
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        expected = None
        if float(torch.rand((), generator=draw)) < 0.5:
            heads = torch.rand(8, generator=draw) * 0.5 >= 0.2
            expected = torch.arange(5)[None] >= torch.where(heads, 2, 1)[:, None]
        found = masks.draw(8, 5, torch.Generator().manual_seed(seed))
        if found is None or expected is None:
            assert found is expected
        else:
            assert torch.equal(found, expected)


def test_tasks_make_the_frames_that_are_not_given() -> None:
    bucket = Bucket(13, 32, 32)
    made = {task.name: task.frames_made(bucket, 4) for task in TASKS}
    assert made == {
        "image_to_video": list(range(1, 13)),
        "extension": list(range(5, 13)),
        "tail": list(range(9)),
        "first_and_last": list(range(1, 9)),
        "every_second": [1, 2, 3, 4, 9, 10, 11, 12],
    }
    assert [t.name for t in TASKS if t.fits(latent_frames(Bucket(5, 32, 32), 4))] == [
        *("image_to_video", "tail", "every_second")
    ]
    assert not any(task.fits(1) for task in TASKS)
