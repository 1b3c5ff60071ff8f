"""Prior pictures: what the base makes of the class, kept so that it is not forgotten.

They are made once, by the base as it is, and lie in a folder with the fingerprint of all that they
depend on. Each has a seed of its own: a run that was killed here makes those that are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from gulliver.checkpoint import read_json, write_json
from gulliver.comm import World, barrier
from gulliver.dreambooth._base import Base, Picture
from gulliver.dreambooth._config import DreamboothConfig, alternatives
from gulliver.dreambooth._pictures import CLIP, SUFFIXES, read_picture
from gulliver.errors import GulliverError
from gulliver.io import atomic_file, named_errors
from gulliver.jobs import Display, derive

FACTS = "prior.json"


def prior_folder(config: DreamboothConfig) -> Path:
    """The folder that keeps prior pictures."""
    return config.prior_folder or config.out / "prior"


def prior_texts(config: DreamboothConfig) -> list[str]:
    """The prompt of each prior picture: alternatives take turns."""
    texts = alternatives(config.filled(config.prior_prompt))
    return [texts[number % len(texts)] for number in range(config.priors)]


def facts_of(base: Base, config: DreamboothConfig) -> dict[str, Any]:
    """All that prior pictures depend on."""
    return {
        "base": base.fingerprint,
        "prompt": config.filled(config.prior_prompt),
        "sampling_steps": config.sampling_steps,
        "guidance": config.guidance,
        "resolution": config.resolution,
        "precision": config.precision,
        "seed": config.seed,
    }


def prior_pictures(
    base: Base, config: DreamboothConfig, world: World, say: Callable[[str], Any]
) -> list[Picture]:
    """Reads the prior pictures of a run, after making those that are missing; every rank calls it.

    Raises:
        GulliverError: the folder's are of another base, prompt or way of sampling.
    """
    if not config.priors:
        return []
    folder, texts = prior_folder(config), prior_texts(config)
    own = _check(folder, base, config)
    barrier()  # nobody writes before everybody has looked
    if not own:
        found = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES)[: config.priors]
        say(f"{len(found)} prior pictures of {folder}, which are not of this base's making")
        return [Picture(path, _read(path), text) for path, text in zip(found, texts, strict=False)]
    if world.is_main:
        with named_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FACTS, facts_of(base, config))
    numbers = range(config.priors)
    missing = [n for n in numbers if _path(folder, n) is None]
    barrier()  # all have counted the same
    if missing:
        _make(base, config, world, missing[world.rank :: world.size], len(missing))
    barrier()
    say(f"{config.priors} prior pictures in {folder}, {len(missing)} made now")
    paths = [_path(folder, n) for n in numbers]
    return [
        Picture(path, _read(path), text)
        for path, text in zip(paths, texts, strict=True)
        if path is not None
    ]


def _check(folder: Path, base: Base, config: DreamboothConfig) -> bool:
    """Whether the folder's pictures are, or will be, of this base's making."""
    if not (folder / FACTS).is_file():
        given = list(folder.glob("*")) if folder.is_dir() else []
        pictures = [p for p in given if p.suffix.lower() in SUFFIXES]
        if pictures and len(pictures) < config.priors:
            raise GulliverError(
                f"--prior-folder {folder} has {len(pictures)} pictures of your own: give "
                f"--prior-pictures {len(pictures)}, or an empty folder"
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
            f"the prior pictures in {folder} were made otherwise ({'; '.join(changed)}): give "
            "another --prior-folder, or remove that one"
        )
    return True


def _path(folder: Path, number: int) -> Path | None:
    """The file of a prior picture; None if there is none yet."""
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
        raise GulliverError(f"{path} {error}: remove it, and it will be made again") from None


def _make(
    base: Base, config: DreamboothConfig, world: World, numbers: list[int], count: int
) -> None:
    texts, folder = prior_texts(config), prior_folder(config)
    base.settle([*dict.fromkeys(texts), ""], False)
    with Display("prior pictures", len(numbers), 0, world.is_main and count > 1) as display:
        for number in numbers:
            (pixels,) = base.sample([texts[number]], [derive(config.seed, 7, number) % 2**32])
            write_pixels(folder / f"prior-{number:05d}", pixels)
            display.advance()


def write_pixels(stem: Path, pixels: np.ndarray) -> None:
    """Writes a picture as PNG, or a clip of several frames as an array; whole or not at all."""
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
