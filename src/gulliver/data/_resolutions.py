"""Resolutions by name, with the sizes that each has for different aspect ratios, as published.

Names are ``144p`` to ``4k`` with 17 ratios of height to width, ``256`` to ``2880`` with 40 (those
of PixArt), and ``256px``, ``768px``, ... of squares of any side, whose sizes are computed (2.0).

Source: Open-Sora 1.2 and 2.0; the tables are exact, rounding and all.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache

from gulliver.errors import GulliverError, nearest

Sizes = dict[float, tuple[int, int]]
"""Height and width in pixels for each ratio of height to width."""


@dataclass(frozen=True)
class Resolution:
    """A name's number of pixels, and the sizes that come near it."""

    name: str
    pixels: int
    sizes: Sizes

    def nearest(self, height: int, width: int) -> tuple[int, int]:
        """The size whose aspect ratio is nearest to that of a picture."""
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
"""Sizes of ``256``, ``512``, ``1024`` and ``2048`` in sixteenths of their side."""
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
"""Width to height of the sizes that 2.0 computes, which it turns upright as well."""
GRID = 16
"""Pixels that 2.0's sides are multiples of."""


def _table(ratios: str, sizes: str, unit: int = 1) -> Sizes:
    pairs = [tuple(int(side) * unit for side in size.split("x")) for size in sizes.split()]
    return {
        float(ratio): (height, width)
        for ratio, (height, width) in zip(ratios.split(), pairs, strict=True)
    }


def _computed(pixels: int) -> dict[str, tuple[int, int]]:
    """Computes 2.0's sizes by width:height, as near to a number of pixels as the grid allows."""
    found: dict[str, tuple[int, int]] = {}
    for side in SIDES:
        across, down = map(float, side.split(":"))
        width = int(math.sqrt(pixels * (across / down)) // GRID) * GRID
        height = int((pixels / width) // GRID) * GRID
        # The first of the nearest wins: the size itself, then a step of height, then of width.
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
    """Reads ``256px``, ``256px_ar16:9`` (one ratio), and ``256px_max`` (the most pixels)."""
    match = re.fullmatch(r"([1-9]\d{0,4})px(?:_(max|ar[\d.]+:[\d.]+))?", name)
    if match is None:
        return None
    pixels, setting = int(match[1]) ** 2, match[2]
    if pixels < (2 * GRID) ** 2:
        raise GulliverError(f"resolution {name!r}: the smallest is {2 * GRID}px")
    sizes = _computed(pixels)
    if setting == "max":
        best = max(sizes, key=lambda side: math.prod(sizes[side]))
        sizes = {best: sizes[best]}
    elif setting:
        side = setting.removeprefix("ar")
        if side not in sizes:
            raise GulliverError(f"resolution {name!r}: {nearest(side, sizes)}")
        sizes = {side: sizes[side]}
    ratios = {float(side.split(":")[1]) / float(side.split(":")[0]): side for side in sizes}
    return Resolution(name, pixels, {ratio: sizes[side] for ratio, side in ratios.items()})


@cache
def resolution(name: str) -> Resolution:
    """Returns what a name stands for."""
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
