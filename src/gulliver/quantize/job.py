"""Quantizes folders of language models and of diffusers pipelines, and compares results.

Denoisers and text encoders of pipelines are quantized. The autoencoder is not, because it is small
and its errors are visible.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.checkpoint.huggingface import float_config, lazy_parameters, load_huggingface
from gulliver.errors import GulliverError, UsageError, missing_extra
from gulliver.io.hub import fetch
from gulliver.options import size_text
from gulliver.parallel.tensor.apply import materialize
from gulliver.precision.int8.replace import Report, replace_module, report_of
from gulliver.quantize.calibrated import replace_calibrated
from gulliver.quantize.files import (
    copy_companions,
    load_quantized,
    refuse_quantized,
    save_quantized,
    stream_quantized,
)

INDEX, NOTE = "model_index.json", "_gulliver_quantized"
NETWORKS = ("unet", "transformer", "text_encoder")
"""Name prefixes of networks to quantize."""
PROMPT = "a photo of a red house by the sea"
STEPS, SEED = 20, 0


@dataclass
class Quantized:
    """A quantized folder."""

    # Model or pipeline.
    model: Any
    # Layer reports by network; a single model has the name of its class.
    reports: dict[str, Report]
    # Lines of the quality report, if requested.
    lines: list[str] = field(default_factory=list)

    def compare(self, before: dict[str, float], after: dict[str, float]) -> None:
        """Adds lines with weight errors, memory, and metrics before and after."""
        several = len(self.reports) > 1
        errors = [
            (layer.error or 0.0, f"{name}.{layer.path}" if several else layer.path, layer.format)
            for name, report in self.reports.items()
            for layer in report.replaced
        ]
        self.lines.append(f"largest relative errors of {len(errors)} weights:")
        for error, path, layer_format in sorted(errors, key=lambda one: -one[0])[:20]:
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
    """Quantizes a pipeline folder into a new one, to be read by `load_pipeline`."""
    pipeline = _loaded(folder)
    networks = {
        name: part
        for name, part in pipeline.components.items()
        if isinstance(part, nn.Module) and name.startswith(NETWORKS)
    }
    if not networks:
        raise GulliverError(
            f"{folder} has no network to quantize among {', '.join(pipeline.components)}"
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
        done.compare(*({"seconds per picture": seconds} for _, seconds in (before, after)))
        for number, prompt in enumerate(prompts, 1):
            one, other = before[0][number - 1], after[0][number - 1]
            done.lines.append(_distance(prompt, one, other))
            path = out / f"picture-{number}.png"
            both = torch.cat([one, other], 2).permute(1, 2, 0).clamp(0, 1).numpy()
            pipeline.image_processor.numpy_to_pil(both)[0].save(path)
            done.lines.append(f"{path}: left before, right after")
    return done


def load_pipeline(folder: Path | str, **given: Any) -> Any:
    """Loads a pipeline with quantized networks.

    Args:
        folder: folder written by `quantize_pipeline`.
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
        raise GulliverError(f"{folder} is not a pipeline: it has no {INDEX}")
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    found = {name: tuple(index[name]) for name in index.get(NOTE, [])}
    if not found:
        raise GulliverError(
            f"{folder} is not quantized; run gulliver quantize {folder} --out FOLDER"
        )
    return found  # type: ignore[return-value]


def _loaded(folder: Path) -> Any:
    try:
        import diffusers
    except ImportError:
        raise missing_extra("quantizing a pipeline needs diffusers", "dreambooth") from None
    if NOTE in json.loads((folder / INDEX).read_text(encoding="utf-8")):
        raise GulliverError(f"{folder} is already quantized; use the folder that it was made from")
    try:
        pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError, AttributeError) as error:
        raise GulliverError(f"{folder}: {str(error).splitlines()[0]}") from None
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _kept(networks: dict[str, nn.Module], exclude: list[str]) -> dict[str, list[str]]:
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
                f"no module of {', '.join(networks)} matches {pattern!r}; use a path or the end of "
                "one"
            )
    return kept


def _save(folder: Path, out: Path, networks: dict[str, nn.Module]) -> None:
    """Copies all other files, and marks the quantized networks in the index."""
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
    """Generates images ``[3, H, W]`` in [0, 1] with a fixed seed; measures seconds per image."""
    found = list[Tensor]()
    begun = time.perf_counter()
    for prompt in prompts:
        draw = torch.Generator().manual_seed(SEED)
        made = pipeline(prompt=prompt, num_inference_steps=steps, generator=draw, output_type="pt")
        images = getattr(made, "images", None)
        if images is None:
            raise GulliverError(
                f"--report compares pictures, but a {type(pipeline).__name__} does not generate "
                "any; omit it"
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


# ``gulliver quantize``: quantizes the folder of a model or a pipeline, and reports quality.


WINDOW = 256


def quantize_folder(
    folder: Path,
    out: Path,
    report: bool = False,
    text: Path | None = None,
    mode: str = "int8_dynamic",
    rounding: str = "nearest",
    calibration: Path | None = None,
    calibration_tokens: int = 16384,
    prompts: tuple[str, ...] = (),
    steps: int | None = None,
    **ways: Any,
) -> Quantized:
    """Quantizes a folder into a new one, which includes the tokenizer and all other files."""
    folder = fetch(folder)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}; pass a folder with a config.json and weights")
    if out.exists():
        raise UsageError(f"{out} already exists; choose a new folder")
    _check_calibration(rounding, calibration)
    if (folder / INDEX).is_file():
        for name, value in (("--text", text), ("--calibration", calibration)):
            if value is not None:
                raise GulliverError(
                    f"{name} needs a language model, but {folder} is a pipeline; omit it"
                )
        if not report and (prompts or steps is not None):
            raise GulliverError("--prompt and --steps need --report; add it or omit them")
        return quantize_pipeline(folder, out, report, mode, prompts, steps, **ways)
    if prompts or steps is not None:
        raise GulliverError(
            f"--prompt and --steps are for pipelines, but {folder} has no {INDEX}; omit them"
        )
    if text is not None and not report:
        raise GulliverError("--text needs --report; add it or omit --text")
    refuse_quantized(folder)
    tokens = None if text is None else _tokens(folder, text, "--text")
    given = None if calibration is None else _tokens(folder, calibration, "--calibration")
    before = _judged(_whole(folder), tokens) if report else {}
    if given is None:
        model = stream_quantized(_built(folder), folder, mode, errors=report, **ways)
    else:
        whole = _whole(folder)
        windows = given[:calibration_tokens].split(_window(whole))
        model = replace_calibrated(whole, [ids[None] for ids in windows], mode, told=print, **ways)
    save_quantized(model, out)
    copy_companions(folder, out)
    done = Quantized(model, {type(model).__name__: report_of(model)})
    if report:
        done.compare(before, _judged(model, tokens))
    return done


def _check_calibration(rounding: str, calibration: Path | None) -> None:
    if rounding == "gptq" and calibration is None:
        raise GulliverError(
            "--rounding gptq needs data; set --calibration FILE to a text file, or use nearest"
        )
    if rounding == "nearest" and calibration is not None:
        raise GulliverError("--calibration needs --rounding gptq; add it or omit --calibration")


def _built(folder: Path) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise missing_extra("quantizing a folder needs transformers", "transformers") from None
    try:
        found = float_config(folder)
        with lazy_parameters():
            return transformers.AutoModelForCausalLM.from_config(found, dtype=torch.float32)
    except (ValueError, OSError, KeyError) as error:
        raise GulliverError(f"{folder}: {str(error).splitlines()[0]}") from None


def _whole(folder: Path) -> nn.Module:
    model = _built(folder)
    materialize(model, "cpu")
    load_huggingface(model, folder)
    return model.eval()


def _tokens(folder: Path, text: Path, option: str) -> Tensor:
    import transformers

    if not text.is_file():
        raise GulliverError(f"{option} {text} is not a file")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        raise GulliverError(f"{folder} has no tokenizer: {str(error).splitlines()[0]}") from None
    ids = tokenizer(text.read_text(encoding="utf-8"))["input_ids"]
    if len(ids) < 2:
        raise GulliverError(f"{option} {text} has only {len(ids)} tokens; use a longer text")
    return torch.tensor(ids)


def _window(model: Any) -> int:
    return min(WINDOW, getattr(model.config, "max_position_embeddings", WINDOW))


def _judged(model: nn.Module, tokens: Tensor | None) -> dict[str, float]:
    found: dict[str, float] = {}
    if tokens is not None:
        found["perplexity"] = perplexity(model, tokens, _window(model))
    inner: Any = model
    for batch in (1, 8):
        found[f"tokens/s at batch {batch}"] = 16 * batch / generation_seconds(inner, batch)
    return found


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor, length: int = 256, batch: int = 4) -> float:
    """Returns the perplexity of a text: exp of the mean negative log-likelihood per token."""
    length = min(length, len(tokens))
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    total = count = 0.0
    for rows in windows.split(batch):
        found: Any = model(rows)
        logits = getattr(found, "logits", found)[:, :-1].float()
        total += float(
            F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        )
        count += rows[:, 1:].numel()
    return math.exp(total / count)


@torch.no_grad()
def generation_seconds(model: Any, batch: int, tokens: int = 16, turns: int = 3) -> float:
    """Returns the median seconds of greedy generation."""
    seed = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, 16), generator=seed)
    found = []
    for _ in range(turns + 1):
        begun = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        found.append(time.perf_counter() - begun)
    return statistics.median(found[1:])
