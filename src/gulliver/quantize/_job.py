"""``gulliver quantize``: makes a quantised folder of a model's or a pipeline's, and judges it."""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.booster import lazy_parameters
from gulliver.checkpoint import float_config, load_huggingface
from gulliver.errors import GulliverError, missing_extra
from gulliver.parallel.tensor import materialize
from gulliver.precision.int8 import report_of
from gulliver.quantize._calibrated import replace_calibrated
from gulliver.quantize._files import copy_companions, refuse_quantized, save_quantized
from gulliver.quantize._pictures import INDEX, Quantized, quantize_pipeline
from gulliver.quantize._streaming import stream_quantized

WINDOW = 256
"""Most tokens of a window of text."""


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
        if not report and (prompts or steps is not None):
            raise GulliverError("--prompts and --steps are for --report: give that, too")
        return quantize_pipeline(folder, out, report, mode, prompts, steps, **ways)
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
        done.compare(before, _judged(model, tokens))
    return done


def _check_calibration(rounding: str, calibration: Path | None) -> None:
    if rounding == "gptq" and calibration is None:
        raise GulliverError(
            "--rounding gptq rounds for data: name a text with --calibration FILE, or take nearest"
        )
    if rounding == "nearest" and calibration is not None:
        raise GulliverError("--calibration is for --rounding gptq: give that, too")


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


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor, length: int = 256, batch: int = 4) -> float:
    """Returns the perplexity of a text: e to the mean negative log-likelihood of a token."""
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
def generation_seconds(
    model: Any, batch: int, prompt: int = 16, tokens: int = 16, turns: int = 3
) -> float:
    """Returns the median seconds in which a model continues prompts greedily."""
    seed = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, prompt), generator=seed)
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
