"""``gulliver quantize``: makes a quantised folder of a model's or a pipeline's, and judges it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster import lazy_parameters
from gulliver.checkpoint import float_config, load_huggingface
from gulliver.errors import GulliverError, missing_extra
from gulliver.options import size_text
from gulliver.parallel.tensor import materialize
from gulliver.precision.int8 import Report, report_of
from gulliver.quantize._calibrated import replace_calibrated
from gulliver.quantize._files import copy_companions, refuse_quantized, save_quantized
from gulliver.quantize._judged import generation_seconds, perplexity
from gulliver.quantize._page import write_page
from gulliver.quantize._pictures import INDEX, quantize_pipeline
from gulliver.quantize._streaming import stream_quantized

PAGE = "report.html"
WINDOW = 256
"""Most tokens of a window of text."""


@dataclass
class Quantized:
    """A folder that was quantised."""

    # Model, or pipeline.
    model: Any
    # What became of the layers, by network; a model alone has the name of its class.
    reports: dict[str, Report]
    # Lines of what was measured, where it was asked for.
    lines: list[str] = field(default_factory=list)


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
    """Quantises a folder into another, which has the tokenizer and all else that is no weights."""
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise GulliverError(f"{folder} {what}: name a folder with a config.json and weights")
    if out.exists():
        raise GulliverError(f"{out} exists: name a folder that does not")
    _check_calibration(rounding, calibration)
    if (folder / INDEX).is_file():
        for name, value in (("--text", text), ("--calibration", calibration)):
            if value is not None:
                raise GulliverError(f"{name} is for language models, and {folder} is a pipeline")
        return _pipeline(folder, out, report, mode, prompts, steps, **ways)
    if prompts or steps is not None:
        raise GulliverError(f"--prompts and --steps are for pipelines: {folder} has no {INDEX}")
    if text is not None and not report:
        raise GulliverError("--text is for --report: give that, too")
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
        _told(done, out, before, _judged(model, tokens), {})
    return done


def _check_calibration(rounding: str, calibration: Path | None) -> None:
    if rounding == "gptq" and calibration is None:
        raise GulliverError(
            "--rounding gptq rounds for data: name a text with --calibration FILE, or take nearest"
        )
    if rounding == "nearest" and calibration is not None:
        raise GulliverError("--calibration is for --rounding gptq: give that, too")


def _pipeline(
    folder: Path,
    out: Path,
    report: bool,
    mode: str,
    prompts: tuple[str, ...],
    steps: int | None,
    **ways: Any,
) -> Quantized:
    if not report and (prompts or steps is not None):
        raise GulliverError("--prompts and --steps are for --report: give that, too")
    told = quantize_pipeline(folder, out, report, mode, prompts, steps, **ways)
    done = Quantized(told.pipeline, told.reports)
    if report:
        _told(done, out, told.before, told.after, told.pictures)
        done.lines[-1:-1] = told.lines
    return done


def _told(
    done: Quantized,
    out: Path,
    before: dict[str, float],
    after: dict[str, float],
    pictures: dict[str, tuple[Any, Any]],
) -> None:
    """Fills the lines of a report, and writes its page."""
    several = len(done.reports) > 1
    errors = {
        (f"{name}.{layer.path}" if several else layer.path): (layer.format, layer.error or 0.0)
        for name, report in done.reports.items()
        for layer in report.replaced
    }
    errors = dict(sorted(errors.items(), key=lambda item: -item[1][1]))
    sizes = [sum(getattr(r, n) for r in done.reports.values()) for n in ("before", "after")]
    memory = f"memory: {size_text(sizes[0])} before, {size_text(sizes[1])} after"
    compared = [f"{memory} ({sizes[1] / sizes[0]:.3f} x)", *_compared(before, after)]
    done.lines += ["relative error of each weight, largest first:"]
    done.lines += [f"  {path}  {format}  {error:.3%}" for path, (format, error) in errors.items()]
    write_page(out / PAGE, f"{out.name}: before and after", compared, errors, pictures)
    done.lines += [*compared, f"{out / PAGE}: the same for a browser"]


def _built(folder: Path) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise missing_extra("quantising a folder needs transformers", "transformers") from None
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
        raise GulliverError(f"{option} {text} is no file")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        raise GulliverError(f"{folder} has no tokenizer: {str(error).splitlines()[0]}") from None
    ids = tokenizer(text.read_text(encoding="utf-8"))["input_ids"]
    if len(ids) < 2:
        raise GulliverError(f"{option} {text} has {len(ids)} tokens: give a longer one")
    return torch.tensor(ids)


def _window(model: Any) -> int:
    """Tokens of a text that a model sees at once."""
    return min(WINDOW, getattr(model.config, "max_position_embeddings", WINDOW))


def _judged(model: nn.Module, tokens: Tensor | None) -> dict[str, float]:
    found: dict[str, float] = {}
    if tokens is not None:
        found["perplexity"] = perplexity(model, tokens, _window(model))
    inner: Any = model
    for batch in (1, 8):
        found[f"tokens/s at batch {batch}"] = 16 * batch / generation_seconds(inner, batch)
    return found


def _compared(before: dict[str, float], after: dict[str, float]) -> list[str]:
    return [
        f"{name}: {value:.5g} before, {after[name]:.5g} after ({after[name] / value:.3f} x)"
        for name, value in before.items()
    ]
