"""The scorers in the box: numbers of a clip's `Samples`, none of which needs a download.

Each is a function of the samples, and its name is its column. Pictures are those of `take_samples`:
eight moments, at most 512 pixels wide.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from gulliver.errors import missing_extra
from gulliver.video.preparation._samples import MOMENTS, Samples, averaged

HASH_SIDE = 32
"""Side of the picture that is hashed."""
BITS = 8
"""Rows and columns of its frequencies that are in the hash."""
PLAIN = 2.0
"""Standard deviation, in grey levels, of a picture that shows nothing: its hash is 0."""
STRONG = 48
"""Least gradient of the edge of a letter, in grey levels."""
LINE = (6, 0.2)
"""Height of a line of text: least, in pixels, and most, as a share of the picture."""


def sharpness(samples: Samples) -> float:
    """Variance of the Laplacian of the brightness; below 50 or so a clip is blurred or plain."""
    grey = samples.grey
    if min(grey.shape[1:]) < 3:
        return 0.0
    around = grey[:, :-2, 1:-1] + grey[:, 2:, 1:-1] + grey[:, 1:-1, :-2] + grey[:, 1:-1, 2:]
    return float((around - 4 * grey[:, 1:-1, 1:-1]).var(axis=(1, 2)).mean())


def brightness(samples: Samples) -> float:
    """Mean brightness, 0 (black) to 255 (white)."""
    return float(samples.grey.mean())


def motion(samples: Samples) -> float:
    """Mean difference of a frame and the next, in grey levels; 0 stands still, 10 is a lot."""
    return float(np.abs(samples.grey_neighbours - samples.grey).mean())


def text_share(samples: Samples) -> float:
    """Share of the picture that boxes around lines of text take, 0 to 1, mean of three moments."""
    # A line of text is a row of strong edges that are close together (morphological gradient,
    # closed along the row), flat, mostly filled, and crossed by as many strokes as it has letters.
    cv2 = _cv2()
    shares = []
    for picture in samples.pictures[:: max(1, len(samples.pictures) // 3)]:
        grey = cv2.cvtColor(np.ascontiguousarray(picture), cv2.COLOR_RGB2GRAY)
        covered = np.zeros(grey.shape, bool)
        for left, top, width, height in text_boxes(grey):
            covered[top : top + height, left : left + width] = True
        shares.append(covered.mean())
    return float(np.mean(shares))


def text_boxes(grey: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Finds lines of text in a picture uint8 [H, W]: left, top, width and height of each."""
    cv2 = _cv2()
    ring = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (3, 3))
    gradient = cv2.morphologyEx(grey, cv2.MORPH_GRADIENT, ring)
    otsu, _ = cv2.threshold(gradient, 0, 255, cv2.THRESH_BINARY | cv2.THRESH_OTSU)
    edges = (gradient > max(otsu, STRONG)).astype(np.uint8)
    rows = cv2.morphologyEx(edges, cv2.MORPH_CLOSE, np.ones((1, 9), np.uint8))
    _, _, found, _ = cv2.connectedComponentsWithStats(rows)
    return [
        (left, top, width, height)
        for left, top, width, height, area in found[1:].tolist()
        if _is_line(grey, edges[top : top + height, left : left + width], area)
    ]


def _is_line(grey: np.ndarray, edges: np.ndarray, area: int) -> bool:
    """Whether strong edges that are close together look like a line of text."""
    height, width = edges.shape
    if not LINE[0] <= height <= LINE[1] * grey.shape[0] or width < 2 * height:
        return False
    middle = edges[height // 4 : height - height // 4].astype(np.int8)
    strokes = (np.diff(middle, axis=1) > 0).sum(1).mean()
    return area > 0.5 * width * height and strokes > 0.5 * width / height


def phash(samples: Samples) -> str:
    """Perceptual hash of each moment: 64 bits as 16 hexadecimal digits, one after another."""
    # A bit says whether one of the 8 x 8 lowest frequencies (cosine transform of 32 x 32 averages)
    # is above their median: coding and scaling change few of them.
    small = averaged(samples.grey, HASH_SIDE)
    basis = _cosines(HASH_SIDE)[:BITS]
    low = (basis @ small @ basis.T).reshape(len(small), -1)
    bits = low > np.median(low, axis=1, keepdims=True)
    bits[small.std(axis=(1, 2)) < PLAIN] = False
    return np.packbits(bits, axis=1).tobytes().hex()


@cache
def _cosines(side: int) -> np.ndarray:
    """The orthonormal cosine transform (DCT-II) as a matrix."""
    place = np.arange(side)
    waves = np.cos(np.pi / side * (place + 0.5) * place[:, None]) * np.sqrt(2 / side)
    waves[0] /= np.sqrt(2)
    return waves.astype(np.float32)


def hash_bits(hashes: list[str]) -> np.ndarray:
    """Turns hashes of clips into bits, bool [clips, MOMENTS * 64]."""
    if not hashes:
        return np.zeros((0, MOMENTS * BITS * BITS), bool)
    content = np.frombuffer(bytes.fromhex("".join(hashes)), np.uint8)
    return np.unpackbits(content.reshape(len(hashes), MOMENTS * BITS), axis=1).astype(bool)


def _cv2() -> Any:
    try:
        import cv2
    except ImportError:
        raise missing_extra("text_share needs OpenCV", "data") from None
    return cv2


IN_THE_BOX: dict[str, Callable[[Samples], Any]] = {
    "sharpness": sharpness,
    "brightness": brightness,
    "motion": motion,
    "text_share": text_share,
    "phash": phash,
}
"""Scorers by the name of their column."""
