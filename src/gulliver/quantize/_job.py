"""``gulliver quantize``: makes a quantised folder of a causal language model's, and judges it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster import lazy_parameters
from gulliver.checkpoint import load_huggingface
from gulliver.errors import GulliverError
from gulliver.parallel.tensor import materialize
from gulliver.precision.int8 import Report, report_of
from gulliver.quantize._files import save_quantized
from gulliver.quantize._judged import generation_seconds, perplexity
from gulliver.quantize._streaming import stream_quantized


def quantize_folder(
    folder: Path,
    out: Path,
    report: bool = False,
    text: Path | None = None,
    mode: str = "int8_dynamic",
    **ways: Any,
) -> tuple[nn.Module, Report, list[str]]:
    """Quantises a folder into another.

    Args:
        folder: Hugging Face folder of a causal language model.
        out: folder that is made.
        report: whether errors, perplexity and speed are measured.
        text: file to measure perplexity on, with the folder's tokenizer.
        mode: mode, as for `replace_module`.
        ways: further arguments of `stream_quantized`.

    Returns:
        The model, what became of its layers, and the lines of a report, where it is asked for.

    Raises:
        GulliverError: the folder is no causal language model's, or `out` exists.
    """
    if out.exists():
        raise GulliverError(f"{out} exists: name a folder that does not")
    if text is not None and not report:
        raise GulliverError("--text is for --report: give that, too")
    tokens = None if text is None else _tokens(folder, text)
    before = _judged(_whole(folder), tokens) if report else {}
    model = stream_quantized(_built(folder), folder, mode, errors=report, **ways)
    found = report_of(model)
    save_quantized(model, out)
    if not report:
        return model, found, []
    return model, found, [*_errors(found), *_compared(before, _judged(model, tokens))]


def _built(folder: Path) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise GulliverError(
            "quantising a folder needs transformers: install gulliver[transformers]"
        ) from None
    try:
        found = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with lazy_parameters():
            return transformers.AutoModelForCausalLM.from_config(found, dtype=torch.float32)
    except (ValueError, OSError, KeyError) as error:
        raise GulliverError(f"{folder}: {str(error).splitlines()[0]}") from None


def _whole(folder: Path) -> nn.Module:
    model = _built(folder)
    materialize(model, "cpu")
    load_huggingface(model, folder)
    return model.eval()


def _tokens(folder: Path, text: Path) -> Tensor:
    import transformers

    if not text.is_file():
        raise GulliverError(f"--text {text} is no file")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        raise GulliverError(f"{folder} has no tokenizer: {str(error).splitlines()[0]}") from None
    ids = tokenizer(text.read_text(encoding="utf-8"))["input_ids"]
    if len(ids) < 2:
        raise GulliverError(f"--text {text} has {len(ids)} tokens: give a longer one")
    return torch.tensor(ids)


def _judged(model: nn.Module, tokens: Tensor | None) -> dict[str, float]:
    found: dict[str, float] = {}
    if tokens is not None:
        found["perplexity"] = perplexity(model, tokens)
    inner: Any = model
    for batch in (1, 8):
        found[f"tokens/s at batch {batch}"] = 16 * batch / generation_seconds(inner, batch)
    return found


def _errors(report: Report) -> list[str]:
    layers = sorted(report.replaced, key=lambda layer: -(layer.error or 0))
    return ["relative error of each weight, largest first:"] + [
        f"  {layer.path}  {layer.format}  {layer.error or 0:.3%}" for layer in layers
    ]


def _compared(before: dict[str, float], after: dict[str, float]) -> list[str]:
    return [
        f"{name}: {value:.5g} before, {after[name]:.5g} after ({after[name] / value:.3f} x)"
        for name, value in before.items()
    ]
