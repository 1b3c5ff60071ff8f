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
from gulliver.options import size_text
from gulliver.precision import replace_module
from gulliver.precision.int8 import Report, report_of
from gulliver.quantize._files import load_quantized, save_quantized

INDEX, NOTE = "model_index.json", "_gulliver_quantized"
NETWORKS = ("unet", "transformer", "text_encoder")
"""Beginnings of the names of networks that are quantised."""
PROMPT = "a photo of a red house by the sea"
STEPS, SEED = 20, 0


@dataclass
class Quantized:
    """A folder that was quantised."""

    # Model, or pipeline.
    model: Any
    # What became of the layers, by network; a model alone has the name of its class.
    reports: dict[str, Report]
    # Lines of what was measured, if it was asked for.
    lines: list[str] = field(default_factory=list)

    def compare(self, before: dict[str, float], after: dict[str, float]) -> None:
        """Adds lines with the errors of the weights, memory, and figures before and after."""
        several = len(self.reports) > 1
        errors = [
            (layer.error or 0.0, f"{name}.{layer.path}" if several else layer.path, layer.format)
            for name, report in self.reports.items()
            for layer in report.replaced
        ]
        self.lines.append("relative error of each weight, largest first:")
        for error, path, layer_format in sorted(errors, key=lambda one: -one[0]):
            self.lines.append(f"  {path}  {layer_format}  {error:.3%}")
        old, new = (sum(getattr(r, n) for r in self.reports.values()) for n in ("before", "after"))
        ratio = f"({new / old:.3f} x)"
        self.lines.append(f"memory: {size_text(old)} before, {size_text(new)} after {ratio}")
        self.lines += [
            f"{name}: {value:.5g} before, {after[name]:.5g} after ({after[name] / value:.3f} x)"
            for name, value in before.items()
        ]


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
) -> Quantized:
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
    done = Quantized(pipeline, reports)
    if before is not None:
        after = _made(pipeline, prompts, steps)
        done.compare(*({"seconds a picture": seconds} for _, seconds in (before, after)))
        for number, prompt in enumerate(prompts, 1):
            one, other = before[0][number - 1], after[0][number - 1]
            done.lines.append(_distance(prompt, one, other))
            path = out / f"picture-{number}.png"
            both = torch.cat([one, other], 2).permute(1, 2, 0).clamp(0, 1).numpy()
            pipeline.image_processor.numpy_to_pil(both)[0].save(path)
            done.lines.append(f"{path}: before on the left, after on the right")
    return done


def load_pipeline(folder: Path | str, **given: Any) -> Any:
    """Loads a pipeline whose networks are quantised.

    Args:
        folder: folder that `quantize_pipeline` wrote.
        given: further arguments of diffusers' ``from_pretrained``.
    """
    import diffusers
    import transformers

    folder = Path(folder)
    libraries = {"diffusers": diffusers, "transformers": transformers}
    networks = dict[str, nn.Module]()
    for name, (library, kind) in _quantised(folder).items():
        made: Any = getattr(libraries[library], kind)
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


@torch.no_grad()
def _made(pipeline: Any, prompts: tuple[str, ...], steps: int) -> tuple[list[Tensor], float]:
    """Returns the pictures ``[3, H, W]`` of one seed, from 0 to 1, and the seconds of one."""
    found = list[Tensor]()
    begun = time.perf_counter()
    for prompt in prompts:
        draw = torch.Generator().manual_seed(SEED)
        made = pipeline(prompt=prompt, num_inference_steps=steps, generator=draw, output_type="pt")
        images = getattr(made, "images", None)
        if images is None:
            raise GulliverError(
                f"--report compares pictures, and a {type(pipeline).__name__} makes none"
            )
        found.append(images[0].float())
    return found, (time.perf_counter() - begun) / len(prompts)


def _distance(prompt: str, before: Tensor, after: Tensor) -> str:
    apart = after.double() - before.double()
    square = float(apart.square().mean())
    psnr = f"{-10 * math.log10(square):.1f} dB" if square else "no difference"
    return (
        f"picture {prompt!r}: PSNR {psnr}, largest difference {float(apart.abs().max()):.3g} of 1"
    )
