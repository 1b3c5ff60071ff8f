"""The subject's images and captions, and generated prior images."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from gulliver.checkpoint.files import read_json, write_json
from gulliver.comm.collectives import barrier
from gulliver.comm.world import World
from gulliver.data.records import read_utf8
from gulliver.dreambooth.base import Base, Picture
from gulliver.dreambooth.config import DreamboothConfig, alternatives, check_filled
from gulliver.dreambooth.words import place_of
from gulliver.errors import GulliverError, missing_extra
from gulliver.io.files import atomic_file, named_errors
from gulliver.jobs.display import Display
from gulliver.jobs.log import derive

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
CLIP = ".npy"
"""Suffix of files with clips ``[T, H, W, 3]``, uint8, for video base models."""
COLOURS = {"white": 255, "black": 0, "grey": 128}
BROKEN = (OSError, ValueError, SyntaxError, EOFError)


def read_pictures(config: DreamboothConfig, say: Callable[[str], Any]) -> list[Picture]:
    folder = config.subject
    assert folder is not None, "options are validated"
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
            f"--subject {folder}: {'; '.join(broken)}; repair or remove "
            f"{'it' if len(broken) == 1 else 'them'}, or add --on-broken skip"
        )
    if not found:
        more = f" that can be read ({'; '.join(broken)})" if broken else ""
        raise GulliverError(
            f"--subject {folder} has no pictures{more}; add some ({', '.join(sorted(SUFFIXES))})"
        )
    for one in broken:
        say(f"skipped: {one}")
    _report_others(folder, files, say)
    return found


def _report_others(folder: Path, files: Sequence[Path], say: Callable[[str], Any]) -> None:
    captions = [path.with_suffix(".txt") for path in files]
    known = {*files, *captions}
    others = [p for p in sorted(folder.iterdir()) if p not in known and p.name[0] != "."]
    if others:
        names = ", ".join(p.name + "/" * p.is_dir() for p in others)
        say(f"ignored: {names} (neither a supported picture nor a caption of one)")
    for caption in dict.fromkeys(captions):
        sharing = [path.name for path in files if path.with_suffix(".txt") == caption]
        if len(sharing) > 1 and caption.is_file():
            say(f"{caption.name} is the caption of {' and '.join(sharing)}")


def read_picture(path: Path, behind: int = 255) -> np.ndarray:
    """Reads an image, applies its EXIF rotation and fills transparent areas with a color."""
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
        raise GulliverError(f"is too large ({error})") from None
    except BROKEN as error:
        line = " ".join(str(error).split())[:120]
        raise GulliverError(f"cannot be read ({line or type(error).__name__})") from None


def _read_clip(path: Path) -> np.ndarray:
    try:
        pixels = np.load(path, allow_pickle=False)
    except BROKEN as error:
        raise GulliverError(f"cannot be read ({' '.join(str(error).split())[:120]})") from None
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3 or not pixels.size:
        raise GulliverError(f"is {pixels.dtype} {pixels.shape}; save clips as uint8 (T, H, W, 3)")
    return pixels


def _eight_bits(picture: Any, Image: Any) -> Any:
    """Converts images of 16 bits or more, or of floats, which Pillow would clip at 255."""
    values = np.asarray(picture).astype(np.float64)
    low, high = values.min(), values.max()
    shares = picture.mode.startswith("F") and low >= 0 and high <= 1
    if picture.mode.startswith("F") and not shares and not (low >= 0 and (values % 1 == 0).all()):
        raise GulliverError(
            f"has float values from {low:g} to {high:g}; save it with 8 or 16 bits, or with "
            "values from 0 to 1"
        )
    most = 1 if shares else 65535 if high > 255 else 255
    return Image.fromarray((values * (255 / most)).clip(0, 255).round().astype(np.uint8))


def cropped(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    Image, ImageOps = _pillow()
    picture = Image.fromarray(pixels)
    cut = ImageOps.fit(picture, (width, height), method=Image.Resampling.BICUBIC)
    return np.asarray(cut).copy()


def grid(pictures: Sequence[np.ndarray], columns: int) -> np.ndarray:
    """Arranges images, and the middle frames of clips, in a grid."""
    stills = [one[len(one) // 2] if one.ndim == 4 else one for one in pictures]
    height, width = (max(one.shape[axis] for one in stills) for axis in (0, 1))
    rows = -(-len(stills) // columns)
    sheet = np.zeros((rows * height, columns * width, 3), np.uint8)
    for number, one in enumerate(stills):
        top, left = number // columns * height, number % columns * width
        sheet[top : top + one.shape[0], left : left + one.shape[1]] = one
    return sheet


def fingerprint(pictures: Sequence[Picture]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for one in pictures:
        digest.update(f"{one.pixels.shape} {one.text}".encode())
        digest.update(np.ascontiguousarray(one.pixels).tobytes())
    return digest.hexdigest()


def _caption(config: DreamboothConfig, path: Path, say: Callable[[str], Any]) -> str | None:
    caption = path.with_suffix(".txt")
    if not caption.is_file():
        return None
    text = check_filled(config, read_utf8(caption), caption.name)
    if text and not place_of(config.token, text):
        say(f"{caption.name} does not name {config.token}; the picture is trained without it")
    return text or None


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise missing_extra("reading pictures needs Pillow", "dreambooth") from None
    return Image, ImageOps


# Prior pictures: samples of the class from the unmodified base, used for prior preservation.
#
# They are generated once and stored in a folder with the fingerprint of everything they depend on.
# Each has its own seed: an interrupted run generates only those that are missing.


FACTS = "prior.json"


def prior_folder(config: DreamboothConfig) -> Path:
    return config.prior_folder or config.out / "prior"


def prior_texts(config: DreamboothConfig) -> list[str]:
    texts = alternatives(config.filled(config.prior_prompt))
    return [texts[number % len(texts)] for number in range(config.priors)]


def facts_of(base: Base, config: DreamboothConfig) -> dict[str, Any]:
    """Returns all settings that prior images depend on."""
    return {
        "base": base.fingerprint,
        "prompt": config.filled(config.prior_prompt),
        "sampling_steps": config.sampling_steps,
        "guidance": config.guidance,
        "resolution": config.resolution,
        "precision": config.dtype,
        "seed": config.seed,
    }


def prior_pictures(
    base: Base, config: DreamboothConfig, world: World, say: Callable[[str], Any]
) -> list[Picture]:
    """Reads the prior images of a run and generates missing ones (collective)."""
    if not config.priors:
        return []
    folder, texts = prior_folder(config), prior_texts(config)
    own = _check(folder, base, config)
    barrier()  # all ranks read before any rank writes
    if not own:
        found = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES)[: config.priors]
        say(f"{len(found)} prior pictures from {folder}, not generated by this base model")
        return [Picture(path, _read(path), text) for path, text in zip(found, texts, strict=False)]
    if world.is_main:
        with named_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FACTS, facts_of(base, config))
    numbers = range(config.priors)
    missing = [n for n in numbers if _path(folder, n) is None]
    barrier()  # all ranks counted before any rank writes
    if missing:
        _make(base, config, world, missing[world.rank :: world.size], len(missing))
    barrier()
    say(f"{config.priors} prior pictures in {folder}, {len(missing)} to generate")
    paths = [_path(folder, n) for n in numbers]
    return [
        Picture(path, _read(path), text)
        for path, text in zip(paths, texts, strict=True)
        if path is not None
    ]


def _check(folder: Path, base: Base, config: DreamboothConfig) -> bool:
    """Whether the folder's images were, or will be, generated by this base model."""
    if not (folder / FACTS).is_file():
        given = list(folder.glob("*")) if folder.is_dir() else []
        pictures = [p for p in given if p.suffix.lower() in SUFFIXES]
        if pictures and len(pictures) < config.priors:
            raise GulliverError(
                f"--prior-folder {folder} has {len(pictures)} pictures of your own; set "
                f"--prior-pictures {len(pictures)}, or pass an empty folder"
            )
        return not pictures
    known, wanted = read_json(folder / FACTS), facts_of(base, config)
    changed = [
        f"{key} was {known.get(key)!r}, is {wanted[key]!r}"
        for key in wanted
        if known.get(key) != wanted[key]
    ]
    if changed:
        raise GulliverError(
            f"the prior pictures in {folder} were made with other settings ({'; '.join(changed)}); "
            "choose another --prior-folder, or remove this one"
        )
    return True


def _path(folder: Path, number: int) -> Path | None:
    """Returns the file of a prior image; None if it does not exist."""
    for suffix in (".png", CLIP):
        path = folder / f"prior-{number:05d}{suffix}"
        if path.is_file():
            return path
    return None


def _read(path: Path) -> np.ndarray:
    if path.suffix == CLIP:
        with named_errors(path, "read"):
            return np.load(path, allow_pickle=False)
    try:
        return read_picture(path)
    except GulliverError as error:
        raise GulliverError(f"{path} {error}; remove it to generate it again") from None


def _make(
    base: Base, config: DreamboothConfig, world: World, numbers: list[int], count: int
) -> None:
    texts, folder = prior_texts(config), prior_folder(config)
    base.encode_prompts([*dict.fromkeys(texts), ""], False)
    with Display("prior pictures", len(numbers), 0, world.is_main and count > 1) as display:
        for number in numbers:
            (pixels,) = base.sample([texts[number]], [derive(config.seed, 7, number) % 2**32])
            write_pixels(folder / f"prior-{number:05d}", pixels)
            display.advance()


def write_pixels(stem: Path, pixels: np.ndarray) -> None:
    """Writes an image as PNG, or a clip of several frames as an array, atomically."""
    if pixels.ndim == 4 and len(pixels) == 1:
        pixels = pixels[0]
    content = BytesIO()
    if pixels.ndim == 4:
        np.save(content, pixels)
    else:
        from PIL import Image

        Image.fromarray(pixels).save(content, format="PNG")
    with atomic_file(stem.with_name(stem.name + (CLIP if pixels.ndim == 4 else ".png"))) as partial:
        partial.write_bytes(content.getvalue())
