"""Bucket configurations of the public trainers: resolutions by name, lengths, chances, batch sizes.

    bucket_config = {
        "720p": {1: (0.5, 20), 51: (0.3, 2)},          # frames: (keep, batch size)
        "240p": {1: (1.0, 120), 51: ((0.5, 0.4), 12)},  # or ((keep, look), batch size)
    }

A clip is offered to the largest resolution that it fills first, and there to the longest length;
with the chance `keep` it stays, else it goes to the next smaller resolution, and at last it is left
out. Every epoch deals again. Read `BucketConfig.deal` first: it is the whole rule, for all clips at
once. What this does not know: files, tables, and how batches are made (`_sampler.py`).

Source: Open-Sora 1.1 to 2.0 (`bucket_config` of their configurations).
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from gulliver.data._clips import Bucket
from gulliver.data._resolutions import Resolution, resolution
from gulliver.errors import GulliverError
from gulliver.io import named_errors
from gulliver.options import SHARE

ENOUGH_PIXELS = 0.8
"""A clip may have a fifth fewer pixels than its bucket."""
VARIABLE = "bucket_config"
EXAMPLE = '{"240p": {1: (1.0, 120), 51: (0.5, 12)}}'


@dataclass(frozen=True)
class BucketRule:
    """One length of one resolution."""

    # Resolution of the clips.
    resolution: Resolution
    # Number of frames; 1 takes stills only.
    frames: int
    # Chance that a clip which fits stays here.
    keep: float
    # Chance that a video is looked at here at all; None: always.
    look: float | None
    # Samples of a batch.
    batch_size: int


class ClipSizes(NamedTuple):
    """Frames, height and width of every clip: int arrays [N]."""

    frames: np.ndarray
    heights: np.ndarray
    widths: np.ndarray


class BucketConfig:
    """Rules that deal clips to buckets.

    Args:
        values: lengths by resolution, and for each a chance or two and a batch size.
        where: name of the configuration, for messages.
        unit: frames and pixels that a model needs its sizes to be multiples of, (t, h, w): sizes
            are cut to t k + 1 frames and multiples of h and w.

    Raises:
        GulliverError: an unknown resolution, a length or a chance that is none, a bucket that is
            never used; all chances 0; videos that are cut to stills.
    """

    def __init__(
        self,
        values: Any,
        where: str = VARIABLE,
        unit: tuple[int, int, int] = (1, 1, 1),
    ) -> None:
        self.where, self.unit = where, unit
        self.rules = tuple(_ordered(_rules(values, where)))
        self._check_lengths()

    @classmethod
    def load(cls, path: Path, unit: tuple[int, int, int] = (1, 1, 1)) -> Self:
        """Reads a JSON or YAML file, or the assignment to `bucket_config` in a Python file.

        A Python file is not run: what it assigns must be written out.

        Raises:
            GulliverError: the file is missing or unreadable, or its content is refused.
        """
        return cls(_read(path), str(path), unit)

    def _check_lengths(self) -> None:
        """Refuses lengths of videos of which a model's unit leaves one frame."""
        step = self.unit[0]
        for rule in self.rules:
            if rule.keep and 1 < rule.frames <= step:
                raise GulliverError(
                    f"{self.where}: {rule.resolution.name}: {rule.frames} frames are cut to a "
                    f"still, the autoencoder takes {step} k + 1: the next that fits is {step + 1}; "
                    "1 is for pictures"
                )

    def deal(self, sizes: ClipSizes, interval: int, seed: int, epoch: int) -> np.ndarray:
        """Deals all clips.

        Args:
            sizes: sizes of the clips.
            interval: distance in frames between those taken.
            seed: seed of the chances.
            epoch: number of the epoch, which has chances of its own.

        Returns:
            The number of each clip's rule [N], -1 for those that are left out.
        """
        pixels, count = sizes.heights * sizes.widths, len(sizes.frames)
        chosen, tried = np.full(count, -1), ""
        waiting = np.zeros(count, dtype=bool)
        for number, rule in enumerate(self.rules):
            if rule.resolution.name != tried:
                tried = rule.resolution.name
                waiting = (chosen < 0) & (pixels >= ENOUGH_PIXELS * rule.resolution.pixels)
            chance = chances(seed, epoch, number, count)
            if rule.frames == 1:
                chosen[waiting & (sizes.frames == 1) & (chance[0] < rule.keep)] = number
                continue
            fits = waiting & (sizes.frames > rule.frames * interval)
            if rule.look is not None:
                fits &= chance[0] <= rule.look
            kept = chance[0 if rule.look is None else 1] < rule.keep
            chosen[fits & (kept | (rule.keep >= 1))] = number
            # What is long enough for one length is offered to no shorter one of this resolution.
            waiting &= ~fits
        return chosen

    def buckets(
        self, sizes: ClipSizes, interval: int = 1, seed: int = 0, epoch: int = 0
    ) -> list[Bucket | None]:
        """Returns the bucket of each clip in an epoch; None where it is left out."""
        chosen = self.deal(sizes, interval, seed, epoch)
        # Many clips have few sizes.
        found: dict[tuple[int, int, int], Bucket | None] = {}
        keys = list(
            zip(chosen.tolist(), sizes.heights.tolist(), sizes.widths.tolist(), strict=True)
        )
        for key in set(keys):
            number, *size = key
            found[key] = None if number < 0 else self.bucket(self.rules[number], *size)
        return [found[key] for key in keys]

    def bucket(self, rule: BucketRule, height: int, width: int) -> Bucket:
        """The bucket of a rule with the aspect ratio nearest to that of a clip."""
        t, h, w = self.unit
        size = rule.resolution.nearest(height, width)
        down, across = (side // step * step for side, step in zip(size, (h, w), strict=True))
        return Bucket((rule.frames - 1) // t * t + 1, down, across)

    def batch_sizes(self, scale: int = 1) -> dict[Bucket, int]:
        """Lists the batch size of every bucket there can be; where two meet, the smaller one.

        Args:
            scale: number of ranks that the configuration's sizes are for, each.
        """
        found: dict[Bucket, int] = {}
        for rule in (rule for rule in self.rules if rule.keep):
            for height, width in rule.resolution.sizes.values():
                bucket = self.bucket(rule, height, width)
                size = rule.batch_size * scale
                found[bucket] = min(found.get(bucket, size), size)
        return found

    def refusal(self, frames: int, height: int, width: int, interval: int) -> str | None:
        """Says why a clip would be left out whatever the chances; None where it would not."""
        pixels = height * width
        if all(pixels < ENOUGH_PIXELS * rule.resolution.pixels for rule in self.rules):
            return f"{height}x{width} is too small for every bucket"
        if self.possible(frames, height, width, interval):
            return None
        return f"no bucket takes {frames} frames of {height}x{width}"

    def possible(self, frames: int, height: int, width: int, interval: int = 1) -> list[Bucket]:
        """Lists the buckets that a clip may be dealt to, the first tried first."""
        fitting = [
            rule
            for rule in self.rules
            if height * width >= ENOUGH_PIXELS * rule.resolution.pixels
            and _takes(rule, frames, interval)
        ]
        # Where a clip is always looked at, no shorter length of the resolution sees it.
        last = {rule.resolution.name: rule for rule in reversed(fitting) if rule.look in (None, 1)}
        found: list[Bucket] = []
        for rule in fitting:
            if rule.keep and rule.frames >= last.get(rule.resolution.name, rule).frames:
                found.append(self.bucket(rule, height, width))
                if rule.keep >= 1 and rule.look in (None, 1):
                    break  # it is never offered on
        return list(dict.fromkeys(found))


def _takes(rule: BucketRule, frames: int, interval: int) -> bool:
    """Whether a clip is long enough for a rule; stills are only for rules of stills."""
    if rule.frames == 1 or frames == 1:
        return rule.frames == frames
    return frames > rule.frames * interval


def chances(seed: int, epoch: int, rule: int, count: int) -> np.ndarray:
    """Draws two numbers in [0, 1) for each clip, of a rule in an epoch: [2, count]."""
    draw = np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, rule]))
    return draw.random((2, count))


def _ordered(rules: Iterator[BucketRule]) -> list[BucketRule]:
    """Sorts rules by pixels, then length, the most first."""
    # Stable: of 2880 and 4k, which have as many pixels, the first named is tried first.
    found = list(rules)
    names = list(dict.fromkeys(rule.resolution.name for rule in found))
    return sorted(
        found,
        key=lambda rule: (
            -rule.resolution.pixels,
            names.index(rule.resolution.name),
            -rule.frames,
        ),
    )


def _rules(values: Any, where: str) -> Iterator[BucketRule]:
    if not isinstance(values, Mapping) or not values:
        raise GulliverError(f"{where} is no bucket configuration: write one such as {EXAMPLE}")
    kept = False
    for name, lengths in values.items():
        if str(name).startswith("_"):
            continue  # such as _delete_, which speaks to the reader of a public configuration
        size = resolution(str(name))
        if not isinstance(lengths, Mapping) or not lengths:
            raise GulliverError(f"{where}: {name} needs lengths, such as {EXAMPLE}")
        for frames, given in lengths.items():
            rule = _rule(size, frames, given, f"{where}: {name}: {frames}")
            kept |= rule.keep > 0
            yield rule
    if not kept:
        raise GulliverError(f"{where}: every bucket has the chance 0: nothing to train on")


def _rule(size: Resolution, frames: Any, given: Any, where: str) -> BucketRule:
    """Reads (keep, batch size) or ((keep, look), batch size)."""
    try:
        # JSON has no other keys than text.
        length = int(frames) if isinstance(frames, str) else frames
        chance, batch_size = given
    except (TypeError, ValueError):
        raise GulliverError(f"{where} is {given!r}: write frames: (keep, batch size)") from None
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise GulliverError(f"{where}: {frames!r} is no number of frames")
    pair = chance if isinstance(chance, list | tuple) else (chance, None)
    if len(pair) != 2 or not all(_is_share(one) for one in pair if one is not None):
        raise GulliverError(
            f"{where}: the chance is {chance!r}: it must be {SHARE}, or two of them"
        )
    if length == 1 and pair[1] is not None:
        raise GulliverError(f"{where}: stills have one chance, not {chance!r}")
    keep, look = pair
    if not keep and batch_size in (None, 0):
        # Published configurations keep videos from a resolution so: the rule still counts.
        return BucketRule(size, length, 0.0, look, 1)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise GulliverError(f"{where}: the batch size is {batch_size!r}: it must be at least 1")
    return BucketRule(size, length, keep, look, batch_size)


def _is_share(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and not math.isnan(value) and value in SHARE


def _read(path: Path) -> Any:
    if not path.is_file():
        raise GulliverError(f"bucket configuration {path} does not exist")
    with named_errors(path, "read"):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        values = READERS.get(path.suffix, _python)(text)
    except (SyntaxError, ValueError) as error:
        raise GulliverError(
            f"{path} is no bucket configuration: {' '.join(str(error).split())}"
        ) from None
    inside = isinstance(values, Mapping) and VARIABLE in values
    return values[VARIABLE] if inside else values


def _python(text: str) -> Any:
    """Reads a literal, or the one that is assigned to `bucket_config`, without running anything."""
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if VARIABLE in names:
                return ast.literal_eval(node.value)
    if len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr):
        return ast.literal_eval(tree.body[0].value)
    raise ValueError(f"nothing is assigned to {VARIABLE}")


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


READERS = {".json": json.loads, ".yaml": _yaml, ".yml": _yaml}
