"""Bucket configurations of the public trainers, against their rule written out clip by clip."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gulliver.data import Bucket, BucketConfig, BucketSampler
from gulliver.data.buckets import ClipSizes, chances, resolution
from gulliver.errors import GulliverError

CONFIG = {
    "144p": {1: (1.0, 475), 51: (1.0, 51), 102: ((1.0, 0.33), 27), 204: ((1.0, 0.1), 13)},
    "256": {1: (0.4, 297), 51: (0.5, 20), 102: ((0.5, 0.33), 10), 408: (0.0, None)},
    "480p": {1: (0.5, 90), 51: (0.5, 4), 204: (0.0, None)},
    "720p": {1: (0.3, 36), 51: (0.2, 2), 102: ((0.1, 0.5), 1)},
    "1024": {1: (0.3, 50)},
}


def _clips(count: int) -> ClipSizes:
    draw = np.random.default_rng(0)
    scale = draw.uniform(0.1, 1.2, count)
    frames = draw.choice([1, 40, 51, 52, 110, 205, 300, 500], count)
    heights = (scale * draw.choice([1080, 720, 1440], count)).astype(int)
    return ClipSizes(frames, heights, (scale * draw.choice([1920, 1080], count)).astype(int))


def test_possible_buckets_equal_those_of_many_epochs() -> None:
    clips, config = _clips(400), BucketConfig(CONFIG)
    found: list[set[Bucket]] = [set() for _ in clips.frames]
    for epoch in range(300):
        for index, bucket in enumerate(config.buckets(clips, 1, 0, epoch)):
            if bucket is not None:
                found[index].add(bucket)
    sizes = zip(*(side.tolist() for side in clips), strict=True)
    for size, buckets in zip(sizes, found, strict=True):
        assert set(config.possible(*size)) == buckets
        assert (config.refusal(*size, 1) is None) == bool(buckets)


def _one_by_one(clips: ClipSizes, interval: int, seed: int, epoch: int) -> list[tuple | None]:
    """The published rule, one clip after the other, with the chances that ours draws."""
    names = sorted(CONFIG, key=lambda name: -resolution(name).pixels)
    rules = [(name, frames) for name in names for frames in sorted(CONFIG[name], reverse=True)]
    drawn = {
        rule: chances(seed, epoch, number, len(clips.frames)) for number, rule in enumerate(rules)
    }

    def one(index: int, frames: int, pixels: int) -> tuple | None:
        for name in names:
            if pixels < 0.8 * resolution(name).pixels:
                continue
            if frames == 1:
                if 1 in CONFIG[name] and drawn[name, 1][0, index] < CONFIG[name][1][0]:
                    return name, 1
                continue
            for length in sorted(CONFIG[name], reverse=True):
                chance = CONFIG[name][length][0]
                first, second = drawn[name, length][:, index]
                if isinstance(chance, tuple):
                    keep, look = chance
                    if first > look:
                        continue
                    first = second
                else:
                    keep = chance
                if frames > length * interval and length != 1:
                    if keep >= 1 or first < keep:
                        return name, length
                    break
        return None

    return [
        one(n, int(frames), int(height) * int(width))
        for n, (frames, height, width) in enumerate(zip(*clips, strict=True))
    ]


def test_clips_are_assigned_by_the_published_rule() -> None:
    clips, config = _clips(4000), BucketConfig(CONFIG)
    for interval, epoch in ((1, 0), (2, 3)):
        dealt = config.assign(clips, interval, seed=5, epoch=epoch)
        found = [
            (config.rules[n].resolution.name, config.rules[n].frames) if n >= 0 else None
            for n in dealt.tolist()
        ]
        assert found == _one_by_one(clips, interval, seed=5, epoch=epoch)
        assert len(set(found)) > 8
    assert (config.assign(clips, 1, 5, 0) != config.assign(clips, 1, 5, 1)).mean() > 0.1
    assert (config.assign(clips, 1, 5, 0) != config.assign(clips, 1, 6, 0)).mean() > 0.1


def test_resolutions_have_the_published_sizes() -> None:
    # The tables of 17 ratios: sides near the ratio, areas near the name's.
    for name in ("144p", "240p", "360p", "480p", "720p", "1080p", "2k", "4k"):
        found = resolution(name)
        assert len(found.sizes) == 17
        for ratio, (height, width) in found.sizes.items():
            assert height / width == pytest.approx(ratio, abs=0.02)
            assert height * width == pytest.approx(found.pixels, rel=0.03)
    for name in ("256", "512", "1024", "2048", "2880"):
        found = resolution(name)
        assert len(found.sizes) == 40
        assert found.pixels == int(name) ** 2
        for ratio, (height, width) in found.sizes.items():
            assert height / width == pytest.approx(ratio, rel=0.06)
    assert resolution("720p").nearest(1080, 1920) == (720, 1280)
    assert resolution("480p").sizes[0.48] == (444, 925)
    assert resolution("144p").sizes[1.89] == (263, 139)
    assert resolution("1024").sizes[0.4] == (640, 1600)
    assert resolution("2880").sizes[0.34] == (1600, 4672)
    # 2.0 computes its sizes.
    square = resolution("256px")
    assert square.pixels == 65536
    assert square.nearest(9, 16) == (192, 336)
    assert square.nearest(16, 9) == (336, 192)
    assert square.nearest(1, 1) == (256, 256)
    assert resolution("768px").nearest(9, 16) == (576, 1024)
    assert list(resolution("768px_ar16:9").sizes.values()) == [(576, 1024)]
    for height, width in resolution("768px").sizes.values():
        assert height % 16 == width % 16 == 0
        assert height * width == pytest.approx(768**2, rel=0.03)


PYTHON = """
# a public configuration, as it is written
dataset = dict(type="VariableVideoTextDataset", transform_name="resize_crop")
bucket_config = {  # 12 s/it
    "_delete_": True,
    "240p": {1: (1.0, 120), 51: ((0.5, 0.4), 12)},
    "720p": {1: (0.5, 20), 51: (0.0, None)},
}
ckpt = compute_something()
"""


def test_public_files_load_without_being_run(tmp_path: Path) -> None:
    plain = {
        "240p": {"1": [1.0, 120], "51": [[0.5, 0.4], 12]},
        "720p": {"1": [0.5, 20], "51": [0.0, None]},
    }
    yaml = "240p:\n  1: [1.0, 120]\n  51: [[0.5, 0.4], 12]\n720p:\n  1: [0.5, 20]\n  51: [0.0, 0]\n"
    for name, text in (
        ("a.py", PYTHON),
        ("b.json", json.dumps({"bucket_config": plain})),
        ("c.yaml", yaml),
        ("d.txt", repr(plain)),
    ):
        (tmp_path / name).write_text(text)
        config = BucketConfig.load(tmp_path / name, (4, 8, 8))
        told = [(r.resolution.name, r.frames, r.keep, r.look) for r in config.rules]
        assert told == [
            ("720p", 51, 0.0, None),
            ("720p", 1, 0.5, None),
            ("240p", 51, 0.5, 0.4),
            ("240p", 1, 1.0, None),
        ]
        sizes = config.batch_sizes(scale=3)
        assert sizes[Bucket(1, 720, 1280)] == 60
        # 240p of 51 frames is 240 x 426: cut to what 4 k + 1 frames and multiples of 8 allow.
        assert sizes[Bucket(49, 240, 424)] == 36
        assert not any(b.frames == 49 and b.height == 720 for b in sizes)


def test_videos_are_not_cut_to_stills() -> None:
    unit, both = (4, 8, 8), {1: (1.0, 2), 5: (1.0, 2)}
    for frames in (2, 3, 4):
        videos = {"240p": {frames: (0.5, 2)}, "144p": both}
        message = rf"{frames} frames at 240p .*\b5\b"
        with pytest.raises(GulliverError, match=message):
            BucketConfig(videos, unit=unit)
        assert Bucket(frames, 240, 426) in BucketConfig(videos).batch_sizes()
    kept_away = BucketConfig({"240p": {4: (0.0, None)}, "144p": both}, unit=unit)
    assert {bucket.frames for bucket in kept_away.batch_sizes()} == {1, 5}


def test_reassigning_epochs_use_each_clip_once_and_resume() -> None:
    clips, config = _clips(300), BucketConfig(CONFIG)

    def assign(epoch: int) -> list[Bucket | None]:
        return config.buckets(clips, seed=3, epoch=epoch)

    def sampler(rank: int = 0, ranks: int = 1) -> BucketSampler:
        return BucketSampler(assign, config.batch_sizes(), rank, ranks, seed=1)

    whole = sampler()
    steps = [list(whole) for _ in range(3)]
    for epoch, batches in enumerate(steps):
        expected = assign(epoch)
        seen = [index for step in batches for index in step.indices]
        assert sorted(seen) == [n for n, bucket in enumerate(expected) if bucket is not None]
        assert all(expected[n] == step.bucket for step in batches for n in step.indices)
        assert all(step.epoch == epoch for step in batches)
    assert steps[0] != steps[1]
    # Stopped in the second epoch, resumed on three ranks.
    stopped = sampler()
    list(stopped)
    parts = iter(stopped)
    for _ in range(4):
        next(parts)
    ranks = [sampler(rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.load_state_dict(stopped.state_dict())
    shares = [list(rank) for rank in ranks]
    for number, step in enumerate(steps[1][4:]):
        assert [i for share in shares for i in share[number].indices] == step.indices
    other = BucketSampler(
        lambda epoch: config.buckets(clips, seed=4, epoch=epoch), config.batch_sizes(), seed=1
    )
    with pytest.raises(GulliverError, match="other data"):
        other.load_state_dict(stopped.state_dict())
    with pytest.raises(GulliverError, match="batch 10000"):
        whole.load_state_dict({**stopped.state_dict(), "done": 10_000})
