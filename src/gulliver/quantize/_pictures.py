"""Quantises the networks of a diffusers pipeline, and compares the pictures of both.

Denoisers and text encoders are quantised. The autoencoder is not: it is small, and its errors are
seen at once.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster import lazy_parameters
from gulliver.errors import GulliverError, missing_extra
from gulliver.precision import replace_module
from gulliver.precision.int8 import Report, report_of
from gulliver.quantize._files import load_quantized, save_quantized

INDEX, NOTE = "model_index.json", "_gulliver_quantized"
NETWORKS = ("unet", "transformer", "text_encoder")
"""Beginnings of the names of networks that are quantised."""
PROMPT = "a photo of a red house by the sea"
STEPS, SEED = 20, 0


@dataclass
class Told:
    """A pipeline that was quantised, and what was seen of it."""

    # Pipeline with quantised networks.
    pipeline: Any
    # What became of their layers, by the name of the network.
    reports: dict[str, Report]
    # Figures of the pipeline as it was, by name.
    before: dict[str, float] = field(default_factory=dict)
    # The same afterwards.
    after: dict[str, float] = field(default_factory=dict)
    # Pictures of both, by prompt.
    pictures: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    # Distances of the pictures.
    lines: list[str] = field(default_factory=list)


def quantize_pipeline(
    folder: Path,
    out: Path,
    report: bool = False,
    mode: str = "int8_dynamic",
    prompts: tuple[str, ...] = (),
    steps: int | None = None,
    exclude: Iterable[str] = (),
    outlier_threshold: float | None = 6.0,
    embeddings: bool = False,
) -> Told:
    """Quantises a pipeline's folder into another, which `load_pipeline` reads."""
    pipeline = _loaded(folder)
    networks = {
        name: part
        for name, part in pipeline.components.items()
        if isinstance(part, nn.Module) and name.startswith(NETWORKS)
    }
    if not networks:
        raise GulliverError(
            f"{folder} has no network to quantise: {', '.join(pipeline.components)}"
        )
    kept = _kept(networks, list(exclude))
    prompts, steps = prompts or (PROMPT,), steps or STEPS
    before = _made(pipeline, prompts, steps) if report else None
    reports = dict[str, Report]()
    for name, network in networks.items():
        given = mode, kept[name], outlier_threshold, embeddings
        replace_module(network.eval(), *given, errors=report)
        reports[name] = report_of(network)
    _save(folder, out, networks)
    told = Told(pipeline, reports)
    if before is not None:
        after = _made(pipeline, prompts, steps)
        told.before, told.after = ({"seconds a picture": made[1]} for made in (before, after))
        for prompt, one, other in zip(prompts, before[0], after[0], strict=True):
            told.pictures[prompt] = one[1], other[1]
            told.lines.append(_distance(prompt, one[0], other[0]))
    return told


def load_pipeline(folder: Path | str, **given: Any) -> Any:
    """Loads a pipeline whose networks are quantised.

    Args:
        folder: folder that `quantize_pipeline` wrote.
        given: further arguments of diffusers' ``from_pretrained``.
    """
    import diffusers
    import transformers

    folder = Path(folder)
    rooms = {"diffusers": diffusers, "transformers": transformers}
    networks = dict[str, nn.Module]()
    for name, (library, kind) in _quantised(folder).items():
        made: Any = getattr(rooms[library], kind)
        with lazy_parameters():
            if library == "diffusers":
                network = made.from_config(made.load_config(folder / name))
            else:
                network = made(transformers.AutoConfig.from_pretrained(folder / name))
        networks[name] = load_quantized(network, folder / name)
    return diffusers.DiffusionPipeline.from_pretrained(
        folder, local_files_only=True, **networks, **given
    )


def _quantised(folder: Path) -> dict[str, tuple[str, str]]:
    if not (folder / INDEX).is_file():
        raise GulliverError(f"{folder} is no pipeline: it has no {INDEX}")
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    found = {name: tuple(index[name]) for name in index.get(NOTE, [])}
    if not found:
        raise GulliverError(
            f"{folder} is not quantised: gulliver quantize {folder} --out FOLDER makes such a one"
        )
    return found  # type: ignore[return-value]


def _loaded(folder: Path) -> Any:
    try:
        import diffusers
    except ImportError:
        raise missing_extra("quantising a pipeline needs diffusers", "dreambooth") from None
    if NOTE in json.loads((folder / INDEX).read_text(encoding="utf-8")):
        raise GulliverError(f"{folder} is quantised already: take the folder that it was made of")
    try:
        pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError, AttributeError) as error:
        raise GulliverError(f"{folder}: {str(error).splitlines()[0]}") from None
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _kept(networks: dict[str, nn.Module], exclude: list[str]) -> dict[str, list[str]]:
    """Returns the paths of each network that patterns keep."""
    kept: dict[str, list[str]] = {name: [] for name in networks}
    for pattern in exclude:
        before = sum(map(len, kept.values()))
        for name, network in networks.items():
            for path, _ in network.named_modules():
                whole = f"{name}.{path}"
                if path and (fnmatchcase(whole, pattern) or whole.endswith(f".{pattern}")):
                    kept[name].append(path)
        if sum(map(len, kept.values())) == before:
            raise GulliverError(
                f"no module of {', '.join(networks)} matches {pattern!r}: name a path or its end"
            )
    return kept


def _save(folder: Path, out: Path, networks: dict[str, nn.Module]) -> None:
    """Copies what is not quantised, and notes in the index what is."""
    out.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_dir() and path.name not in networks:
            shutil.copytree(path, out / path.name)
        elif path.is_file():
            shutil.copy2(path, out / path.name)
    for name, network in networks.items():
        save_quantized(network, out / name)
    index = json.loads((out / INDEX).read_text(encoding="utf-8"))
    (out / INDEX).write_text(json.dumps({**index, NOTE: [*networks]}, indent=2), encoding="utf-8")


Made = list[tuple[Tensor, Any]]


@torch.no_grad()
def _made(pipeline: Any, prompts: tuple[str, ...], steps: int) -> tuple[Made, float]:
    """Returns the pictures of one seed as numbers and for the eye, and the seconds of one."""
    found: Made = []
    begun = time.perf_counter()
    for prompt in prompts:
        draw = torch.Generator().manual_seed(SEED)
        told = pipeline(prompt=prompt, num_inference_steps=steps, generator=draw, output_type="pt")
        images = getattr(told, "images", None)
        if images is None:
            raise GulliverError(
                f"--report compares pictures, and a {type(pipeline).__name__} makes none"
            )
        found.append((images[0].float(), pipeline.image_processor.postprocess(images, "pil")[0]))
    return found, (time.perf_counter() - begun) / len(prompts)


def _distance(prompt: str, before: Tensor, after: Tensor) -> str:
    apart = after.double() - before.double()
    square = float(apart.square().mean())
    psnr = f"{-10 * math.log10(square):.1f} dB" if square else "no difference"
    return (
        f"picture {prompt!r}: PSNR {psnr}, largest difference {float(apart.abs().max()):.3g} of 1"
    )
