"""Published resolutions by name, with their sizes per aspect ratio.

Names are ``144p`` to ``4k`` with 17 ratios of height to width, ``256`` to ``2880`` with the 40
ratios of PixArt, and ``256px``, ``768px``, ... for squares of any side, whose sizes are computed as
in Open-Sora 2.0.

Source: Open-Sora 1.2 and 2.0; the tables are exact, including rounding.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from gulliver.data.clips import Bucket
from gulliver.errors import GulliverError, nearest
from gulliver.io.files import named_errors
from gulliver.options import SHARE

Sizes = dict[float, tuple[int, int]]  # height and width in pixels for each ratio of height to width


@dataclass(frozen=True)
class Resolution:
    """A resolution: its number of pixels, and its sizes by aspect ratio."""

    name: str
    pixels: int
    sizes: Sizes

    def nearest(self, height: int, width: int) -> tuple[int, int]:
        return self.sizes[min(self.sizes, key=lambda ratio: abs(ratio - height / width))]


VIDEO_RATIOS = (
    "0.38 0.43 0.48 0.50 0.53 0.54 0.56 0.62 0.67 0.75 1.00 1.33 1.50 1.78 1.89 2.00 2.08"
)
VIDEO_SIZES = {
    "4k": (
        8294400,
        "1764x4704 1886x4400 1996x4158 2036x4072 2096x3960 2118x3918 2160x3840 2276x3642 "
        "2352x3528 2494x3326 2880x2880 3326x2494 3528x2352 3840x2160 3958x2096 4072x2036 4156x1994",
    ),
    "2k": (
        3686400,
        "1176x3136 1256x2930 1330x2770 1358x2716 1398x2640 1412x2612 1440x2560 1518x2428 "
        "1568x2352 1662x2216 1920x1920 2218x1664 2352x1568 2560x1440 2638x1396 2716x1358 2772x1330",
    ),
    "1080p": (
        2073600,
        "882x2352 942x2198 998x2080 1018x2036 1048x1980 1058x1958 1080x1920 1138x1820 "
        "1176x1764 1248x1664 1440x1440 1662x1246 1764x1176 1920x1080 1980x1048 2036x1018 2078x998",
    ),
    "720p": (
        921600,
        "588x1568 628x1466 666x1388 678x1356 698x1318 706x1306 720x1280 758x1212 "
        "784x1176 832x1110 960x960 1108x832 1176x784 1280x720 1320x698 1358x680 1386x666",
    ),
    "480p": (
        409920,
        "392x1046 420x980 444x925 452x904 466x880 470x870 480x854 506x810 "
        "522x784 554x738 640x640 740x555 784x522 854x480 880x466 906x454 924x444",
    ),
    "360p": (
        230400,
        "294x784 314x732 332x692 340x680 350x662 352x652 360x640 380x608 "
        "392x588 416x554 480x480 554x416 588x392 640x360 660x350 678x340 692x332",
    ),
    "240p": (
        102240,
        "196x522 210x490 222x462 226x452 232x438 236x436 240x426 252x404 "
        "262x393 276x368 320x320 370x278 392x262 426x240 440x232 452x226 462x222",
    ),
    "144p": (
        36864,
        "117x312 125x291 133x277 135x270 139x262 141x260 144x256 151x241 "
        "156x234 166x221 192x192 221x165 235x156 256x144 263x139 271x135 277x132",
    ),
}
SQUARE_RATIOS = (
    "0.25 0.26 0.27 0.28 0.32 0.33 0.35 0.40 0.42 0.48 0.50 0.52 0.57 0.60 0.68 0.72 0.78 0.82 "
    "0.88 0.94 1.00 1.07 1.13 1.21 1.29 1.38 1.46 1.67 1.75 2.00 2.09 2.40 2.50 2.89 3.00 3.11 "
    "3.62 3.75 3.88 4.00"
)
SQUARE_SIZES = (
    "8x32 8x31 8x30 8x29 9x28 9x27 9x26 10x25 10x24 11x23 11x22 11x21 12x21 12x20 13x19 13x18 "
    "14x18 14x17 15x17 15x16 16x16 16x15 17x15 17x14 18x14 18x13 19x13 20x12 21x12 22x11 23x11 "
    "24x10 25x10 26x9 27x9 28x9 29x8 30x8 31x8 32x8"
)
"""Sizes of ``256``, ``512``, ``1024`` and ``2048``, in units of a sixteenth of the side."""
LARGEST_RATIOS = (
    "0.25 0.26 0.27 0.28 0.32 0.33 0.34 0.40 0.42 0.47 0.49 0.51 0.55 0.59 0.68 0.72 0.78 0.83 "
    "0.89 0.93 1.00 1.07 1.12 1.21 1.28 1.39 1.47 1.70 1.82 2.03 2.13 2.39 2.50 2.92 3.00 3.12 "
    "3.68 3.82 3.95 4.00"
)
LARGEST_SIZES = (
    "22x90 22x87 22x84 22x81 25x78 25x75 25x73 28x70 28x67 30x64 30x61 30x59 33x60 33x56 36x53 "
    "36x50 39x50 39x47 42x47 42x45 45x45 45x42 47x42 47x39 50x39 50x36 53x36 56x33 60x33 61x30 "
    "64x30 67x28 70x28 73x25 75x25 78x25 81x22 84x22 87x22 90x22"
)
"""Sizes of ``2880`` in units of 64 pixels."""
SQUARES = {"256": 16, "512": 32, "1024": 64, "2048": 128}
SIDES = ("2.39:1", "2:1", "16:9", "1.85:1", "9:16", "5:8", "3:2", "4:3", "1:1")
"""Ratios of width to height for computed sizes; transposed sizes are added to them."""
GRID = 16  # computed sides are multiples of this many pixels


def _table(ratios: str, sizes: str, unit: int = 1) -> Sizes:
    pairs = [tuple(int(side) * unit for side in size.split("x")) for size in sizes.split()]
    return {
        float(ratio): (height, width)
        for ratio, (height, width) in zip(ratios.split(), pairs, strict=True)
    }


def _computed(pixels: int) -> dict[str, tuple[int, int]]:
    """Computes sizes by width:height, as close to a number of pixels as the grid allows."""
    found: dict[str, tuple[int, int]] = {}
    for side in SIDES:
        across, down = map(float, side.split(":"))
        width = int(math.sqrt(pixels * (across / down)) // GRID) * GRID
        height = int((pixels / width) // GRID) * GRID
        # On ties, the first wins: the size itself, then a step in height, then in width.
        steps = ((0, 0), (-GRID, 0), (GRID, 0), (0, -GRID), (0, GRID))
        near = [(height + dy, width + dx) for dy, dx in steps]
        size = min(near, key=lambda one: abs(one[0] * one[1] - pixels))
        if size not in found.values():
            found[side] = size
    upright = {
        ":".join(reversed(side.split(":"))): (width, height)
        for side, (height, width) in found.items()
    }
    return {**found, **upright}


def _square_of(name: str) -> Resolution | None:
    """Parses ``256px``, ``256px_ar16:9`` (one ratio), and ``256px_max`` (the largest size)."""
    match = re.fullmatch(r"([1-9]\d{0,4})px(?:_(max|ar[\d.]+:[\d.]+))?", name)
    if match is None:
        return None
    pixels, setting = int(match[1]) ** 2, match[2]
    sizes = _computed(pixels)
    if setting == "max":
        best = max(sizes, key=lambda side: math.prod(sizes[side]))
        sizes = {best: sizes[best]}
    elif setting:
        side = setting.removeprefix("ar")
        if side not in sizes:
            raise GulliverError(f"unknown resolution {name!r}: {nearest(side, sizes)}")
        sizes = {side: sizes[side]}
    ratios = {float(side.split(":")[1]) / float(side.split(":")[0]): side for side in sizes}
    return Resolution(name, pixels, {ratio: sizes[side] for ratio, side in ratios.items()})


@cache
def resolution(name: str) -> Resolution:
    if name in VIDEO_SIZES:
        pixels, sizes = VIDEO_SIZES[name]
        return Resolution(name, pixels, _table(VIDEO_RATIOS, sizes))
    if name in SQUARES:
        sizes = _table(SQUARE_RATIOS, SQUARE_SIZES, SQUARES[name])
        return Resolution(name, int(name) ** 2, sizes)
    if name == "2880":
        return Resolution(name, 2880**2, _table(LARGEST_RATIOS, LARGEST_SIZES, 64))
    found = _square_of(name)
    if found is None:
        known = [*VIDEO_SIZES, *SQUARES, "2880", "256px"]
        raise GulliverError(f"unknown resolution {name!r}: {nearest(name, known)}")
    return found


# Bucket configurations of public training code: resolutions by name, lengths, probabilities and
# batch sizes.
#
#     bucket_config = {
#         "720p": {1: (0.5, 20), 51: (0.3, 2)},          # frames: (keep, batch size)
#         "240p": {1: (1.0, 120), 51: ((0.5, 0.4), 12)},  # or ((keep, look), batch size)
#     }
#
# A clip is offered to the largest resolution that it fills first, and there to the longest length;
# it stays with probability `keep`, otherwise it is offered to the next smaller resolution, and
# finally excluded. Every epoch draws again. Read `BucketConfig.assign` first, which applies this to
# all clips at once. This module knows nothing of files, tables and batches (`sampler.py`).
#
# Source: Open-Sora 1.1 to 2.0 (`bucket_config` of their configurations).


ENOUGH_PIXELS = 0.8  # minimum pixels of a clip, as a fraction of those of its bucket
VARIABLE = "bucket_config"
EXAMPLE = '{"240p": {1: (1.0, 120), 51: (0.5, 12)}}'


@dataclass(frozen=True)
class BucketRule:
    """A clip length at one resolution, with its probabilities and batch size."""

    # Resolution of the clips.
    resolution: Resolution
    # Number of frames; 1 takes stills only.
    frames: int
    # Probability that a clip that fits stays here.
    keep: float
    # Probability that a video is offered to this rule at all; None: always.
    look: float | None
    # Samples per batch.
    batch_size: int


class ClipSizes(NamedTuple):
    """Frames, height and width of each clip, as integer arrays [N]."""

    frames: np.ndarray
    heights: np.ndarray
    widths: np.ndarray


class BucketConfig:
    """Rules that assign clips to buckets.

    Args:
        values: one or two probabilities and a batch size for each resolution and length.
        where: name of the configuration for messages.
        unit: temporal and spatial unit of a model (t, h, w): sizes are rounded down to t k + 1
            frames and to multiples of h and w pixels.

    Raises:
        GulliverError: a resolution is unknown, a length or probability is invalid, a bucket is
            never used, all probabilities are 0, or videos would be shortened to one frame.
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
        """Reads a JSON or YAML file, or the value of `bucket_config` in a Python file.

        Python files are not executed; the assigned value must be a literal.

        Raises:
            GulliverError: the file is missing or unreadable, or its content is rejected.
        """
        return cls(_read(path), str(path), unit)

    def _check_lengths(self) -> None:
        """Rejects video lengths that a model's unit would shorten to one frame."""
        step = self.unit[0]
        for rule in self.rules:
            if rule.keep and 1 < rule.frames <= step:
                raise GulliverError(
                    f"{self.where}: {rule.frames} frames at {rule.resolution.name} are too few for "
                    f"a clip; use {step} k + 1 frames, such as {step + 1}, or 1 for pictures"
                )

    def assign(self, sizes: ClipSizes, interval: int, seed: int, epoch: int) -> np.ndarray:
        """Assigns all clips to rules.

        Args:
            sizes: sizes of the clips.
            interval: distance between sampled frames.
            seed: seed of the random numbers.
            epoch: number of the epoch, which changes the random numbers.

        Returns:
            The index of each clip's rule, [N]; -1 if the clip is left out.
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
            # A clip long enough for one length is not offered to shorter ones of this resolution.
            waiting &= ~fits
        return chosen

    def buckets(
        self, sizes: ClipSizes, interval: int = 1, seed: int = 0, epoch: int = 0
    ) -> list[Bucket | None]:
        """Returns each clip's bucket in an epoch; None if it is left out."""
        chosen = self.assign(sizes, interval, seed, epoch)
        # Clips are many, but distinct sizes are few.
        found: dict[tuple[int, int, int], Bucket | None] = {}
        keys = list(
            zip(chosen.tolist(), sizes.heights.tolist(), sizes.widths.tolist(), strict=True)
        )
        for key in set(keys):
            number, *size = key
            found[key] = None if number < 0 else self.bucket(self.rules[number], *size)
        return [found[key] for key in keys]

    def bucket(self, rule: BucketRule, height: int, width: int) -> Bucket:
        """The bucket of a rule with the aspect ratio nearest to a clip's."""
        t, h, w = self.unit
        size = rule.resolution.nearest(height, width)
        down, across = (side // step * step for side, step in zip(size, (h, w), strict=True))
        return Bucket((rule.frames - 1) // t * t + 1, down, across)

    def batch_sizes(self, scale: int = 1) -> dict[Bucket, int]:
        """Lists the batch size of every bucket, the smaller one if two rules share it.

        Args:
            scale: number of ranks, if the configuration's sizes are per rank.
        """
        found: dict[Bucket, int] = {}
        for rule in (rule for rule in self.rules if rule.keep):
            for height, width in rule.resolution.sizes.values():
                bucket = self.bucket(rule, height, width)
                size = rule.batch_size * scale
                found[bucket] = min(found.get(bucket, size), size)
        return found

    def refusal(self, frames: int, height: int, width: int, interval: int) -> str | None:
        """Explains why no bucket accepts a clip; None if one does."""
        pixels = height * width
        if all(pixels < ENOUGH_PIXELS * rule.resolution.pixels for rule in self.rules):
            return f"{height}x{width} is too small for every bucket"
        if self.possible(frames, height, width, interval):
            return None
        return f"no bucket takes {frames} frames of {height}x{width}"

    def possible(self, frames: int, height: int, width: int, interval: int = 1) -> list[Bucket]:
        """Lists the buckets that a clip may be assigned to, in the order they are tried."""
        fitting = [
            rule
            for rule in self.rules
            if height * width >= ENOUGH_PIXELS * rule.resolution.pixels
            and _takes(rule, frames, interval)
        ]
        # If a rule always takes the offer, shorter lengths of the resolution never see the clip.
        last = {rule.resolution.name: rule for rule in reversed(fitting) if rule.look in (None, 1)}
        found: list[Bucket] = []
        for rule in fitting:
            if rule.keep and rule.frames >= last.get(rule.resolution.name, rule).frames:
                found.append(self.bucket(rule, height, width))
                if rule.keep >= 1 and rule.look in (None, 1):
                    break  # never offered to further rules
        return list(dict.fromkeys(found))


def _takes(rule: BucketRule, frames: int, interval: int) -> bool:
    if rule.frames == 1 or frames == 1:
        return rule.frames == frames
    return frames > rule.frames * interval


def chances(seed: int, epoch: int, rule: int, count: int) -> np.ndarray:
    """Draws two uniform numbers per clip for a rule and an epoch, [2, count]."""
    draw = np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, rule]))
    return draw.random((2, count))


def _ordered(rules: Iterator[BucketRule]) -> list[BucketRule]:
    # Stable: of 2880 and 4k, which have equally many pixels, the first in the configuration wins.
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
        raise GulliverError(f"{where} is not a bucket configuration: write one such as {EXAMPLE}")
    kept = False
    for name, lengths in values.items():
        if str(name).startswith("_"):
            continue  # such as _delete_, which is for tools that read public configurations
        size = resolution(str(name))
        if not isinstance(lengths, Mapping) or not lengths:
            raise GulliverError(f"{where}: {name} needs frame counts, such as {EXAMPLE}")
        for frames, given in lengths.items():
            rule = _rule(size, frames, given, f"{where}: {name}: {frames}")
            kept |= rule.keep > 0
            yield rule
    if not kept:
        raise GulliverError(
            f"{where}: every bucket has probability 0, so there is nothing to train on"
        )


def _rule(size: Resolution, frames: Any, given: Any, where: str) -> BucketRule:
    """Parses a rule's value, (keep, batch size) or ((keep, look), batch size)."""
    try:
        # JSON keys are always text.
        length = int(frames) if isinstance(frames, str) else frames
        chance, batch_size = given
    except (TypeError, ValueError):
        raise GulliverError(
            f"{where} is {given!r}; map numbers of frames to (keep, batch size)"
        ) from None
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise GulliverError(f"{where}: {frames!r} is not a number of frames")
    pair = chance if isinstance(chance, list | tuple) else (chance, None)
    if len(pair) != 2 or not all(_is_share(one) for one in pair if one is not None):
        raise GulliverError(
            f"{where}: the probability is {chance!r}, but must be {SHARE}, or a pair of those"
        )
    if length == 1 and pair[1] is not None:
        raise GulliverError(f"{where}: an image needs a single probability, not {chance!r}")
    keep, look = pair
    if not keep and batch_size in (None, 0):
        # Public configurations exclude videos from a resolution like this; the rule still counts.
        return BucketRule(size, length, 0.0, look, 1)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise GulliverError(f"{where}: the batch size is {batch_size!r}, but must be at least 1")
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
            f"{path} is not a bucket configuration: {' '.join(str(error).split())}"
        ) from None
    inside = isinstance(values, Mapping) and VARIABLE in values
    return values[VARIABLE] if inside else values


def _python(text: str) -> Any:
    """Parses a literal, or the literal assigned to `bucket_config`, without running code."""
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if VARIABLE in names:
                return ast.literal_eval(node.value)
    if len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr):
        return ast.literal_eval(tree.body[0].value)
    raise ValueError(f"{VARIABLE} is not assigned")


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


READERS = {".json": json.loads, ".yaml": _yaml, ".yml": _yaml}
