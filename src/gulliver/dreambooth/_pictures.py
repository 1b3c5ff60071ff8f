"""The subject's folder: pictures, upright and without transparency, and their captions."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gulliver.data import read_utf8
from gulliver.dreambooth._base import Picture
from gulliver.dreambooth._config import DreamboothConfig, check_filled
from gulliver.dreambooth._words import place_of
from gulliver.errors import GulliverError, missing_extra

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
CLIP = ".npy"
"""Clips ``[T, H, W, 3]``, uint8, which video bases learn from."""
COLOURS = {"white": 255, "black": 0, "grey": 128}
BROKEN = (OSError, ValueError, SyntaxError, EOFError)


def read_pictures(config: DreamboothConfig, say: Callable[[str], Any]) -> list[Picture]:
    """Reads the pictures of a subject."""
    folder = config.subject
    assert folder is not None, "it is checked"
    kinds = SUFFIXES | {CLIP}
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in kinds and p.is_file())
    found, broken = list[Picture](), list[str]()
    for path in files:
        try:
            text = _caption(config, path, say)
            clip = path.suffix.lower() == CLIP
            pixels = _read_clip(path) if clip else read_picture(path, COLOURS[config.background])
            found.append(Picture(path, pixels, text))
        except GulliverError as error:
            broken.append(f"{path.name} {error}")
    if broken and config.on_broken == "refuse":
        raise GulliverError(
            f"--subject {folder}: {'; '.join(broken)}: mend or remove "
            f"{'it' if len(broken) == 1 else 'them'}, or add --on-broken skip"
        )
    if not found:
        more = f" that can be read ({'; '.join(broken)})" if broken else ""
        raise GulliverError(
            f"--subject {folder} has no picture{more}: put some in ({', '.join(sorted(SUFFIXES))})"
        )
    for one in broken:
        say(f"skipped: {one}")
    _tell_others(folder, files, say)
    return found


def _tell_others(folder: Path, files: Sequence[Path], say: Callable[[str], Any]) -> None:
    """Reports files that are not used, and captions that several pictures share."""
    captions = [path.with_suffix(".txt") for path in files]
    known = {*files, *captions}
    others = [p for p in sorted(folder.iterdir()) if p not in known and p.name[0] != "."]
    if others:
        names = ", ".join(p.name + "/" * p.is_dir() for p in others)
        say(f"left out: {names} (no picture that is read here, nor the caption of one)")
    for caption in dict.fromkeys(captions):
        sharing = [path.name for path in files if path.with_suffix(".txt") == caption]
        if len(sharing) > 1 and caption.is_file():
            say(f"{caption.name} is the caption of {' and '.join(sharing)}")


def read_picture(path: Path, behind: int = 255) -> np.ndarray:
    """Reads a picture upright, as EXIF says, with a colour behind what is transparent."""
    Image, ImageOps = _pillow()
    try:
        with warnings.catch_warnings(), Image.open(path) as opened:
            warnings.simplefilter("ignore")
            opened.load()
            upright = ImageOps.exif_transpose(opened)
            if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
                over = upright.convert("RGBA")
                under = Image.new("RGBA", over.size, (behind, behind, behind, 255))
                upright = Image.alpha_composite(under, over)
            elif upright.mode.startswith(("I", "F")):
                upright = _eight_bits(upright, Image)
            return np.asarray(upright.convert("RGB")).copy()
    except Image.DecompressionBombError as error:
        raise GulliverError(f"is too large: {error}") from None
    except BROKEN as error:
        line = " ".join(str(error).split())[:120]
        raise GulliverError(f"cannot be read ({line or type(error).__name__})") from None


def _read_clip(path: Path) -> np.ndarray:
    try:
        pixels = np.load(path, allow_pickle=False)
    except BROKEN as error:
        raise GulliverError(f"cannot be read ({' '.join(str(error).split())[:120]})") from None
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3 or not pixels.size:
        raise GulliverError(f"is {pixels.dtype} {pixels.shape}: a clip is uint8 (T, H, W, 3)")
    return pixels


def _eight_bits(picture: Any, Image: Any) -> Any:
    """Pictures of 16 bits and more, or of floats: Pillow would cut them off at 255."""
    values = np.asarray(picture).astype(np.float64)
    low, high = values.min(), values.max()
    shares = picture.mode.startswith("F") and low >= 0 and high <= 1
    if picture.mode.startswith("F") and not shares and not (low >= 0 and (values % 1 == 0).all()):
        raise GulliverError(
            f"has floats from {low:g} to {high:g}: save it with 8 or 16 bits, or from 0 to 1"
        )
    most = 1 if shares else 65535 if high > 255 else 255
    return Image.fromarray((values * (255 / most)).clip(0, 255).round().astype(np.uint8))


def cropped(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resizes a picture ``[H, W, 3]`` until it covers a size, and cuts out its middle."""
    Image, ImageOps = _pillow()
    picture = Image.fromarray(pixels)
    cut = ImageOps.fit(picture, (width, height), method=Image.Resampling.BICUBIC)
    return np.asarray(cut).copy()


def grid(pictures: Sequence[np.ndarray], columns: int) -> np.ndarray:
    """Arranges pictures in rows; of clips the middle frames."""
    stills = [one[len(one) // 2] if one.ndim == 4 else one for one in pictures]
    height, width = (max(one.shape[axis] for one in stills) for axis in (0, 1))
    rows = -(-len(stills) // columns)
    sheet = np.zeros((rows * height, columns * width, 3), np.uint8)
    for number, one in enumerate(stills):
        top, left = number // columns * height, number % columns * width
        sheet[top : top + one.shape[0], left : left + one.shape[1]] = one
    return sheet


def fingerprint(pictures: Sequence[Picture]) -> str:
    """Digest of pixels and captions."""
    digest = hashlib.blake2b(digest_size=16)
    for one in pictures:
        digest.update(f"{one.pixels.shape} {one.text}".encode())
        digest.update(np.ascontiguousarray(one.pixels).tobytes())
    return digest.hexdigest()


def _caption(config: DreamboothConfig, path: Path, say: Callable[[str], Any]) -> str | None:
    """The caption of a picture; None if it has none."""
    caption = path.with_suffix(".txt")
    if not caption.is_file():
        return None
    text = check_filled(config, read_utf8(caption), caption.name)
    if text and not place_of(config.token, text):
        say(f"{caption.name} does not name {config.token}: what it says is learnt without it")
    return text or None


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise missing_extra("reading pictures needs Pillow", "dreambooth") from None
    return Image, ImageOps
