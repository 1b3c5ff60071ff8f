"""int8 inference: kernels, generation, perplexity, and what large models take on each card.

    python -m benchmarks.int8 --parts kernels generation perplexity bloom unet

Kernels and generation are timed in turns with what they are held against: float32, torch's dynamic
quantisation, and torchao where it is installed. The parts on meta count bytes.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gulliver
from benchmarks._harness import Report, Spread, alternate, at_least, at_most, finish
from benchmarks._int8_bytes import bloom_bytes, unet_bytes
from benchmarks._int8_text import divergence, trained
from benchmarks._models import llama
from gulliver.precision import int8
from gulliver.quantize import replace_calibrated
from gulliver.quantize.job import generation_seconds, perplexity

PARTS = ("kernels", "generation", "perplexity", "bloom", "unet")
SHAPES = ((1024, 1024), (2816, 1024), (1024, 2816), (4096, 4096))
"""Outputs and inputs of layers; the last is a 7-B model's."""
ROWS = (1, 8, 64)
OUT_OF_CACHE = 64 << 20  # Bytes of float32 weights that are gone through before one is met again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="training steps for perplexity")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    # What is timed and what is counted are kept apart: the first needs the machine alone.
    claim = "int8" if {"kernels", "generation"} & set(options.parts) else "int8-models"
    report = Report(claim, "int8 inference", ("what", "float32", "int8", "ratio", "peers"))
    native = int8.native_table()
    report.notes.append(
        f"{torch.get_num_threads()} threads; native products: "
        + (native[0] if native else f"none, {int8.kernels_problem()}")
    )
    if not importlib.util.find_spec("torchao"):
        report.notes.append("torchao is not installed, so not compared")
    made: dict[str, Callable[[], None]] = {
        "kernels": lambda: kernels(report, options.rounds),
        "generation": lambda: generation(report, options.rounds),
        "perplexity": lambda: perplexities(report, options.steps),
        "bloom": lambda: bloom_bytes(report),
        "unet": lambda: unet_bytes(report),
    }
    for part in options.parts:
        made[part]()
    finish(report, options.keep)


@torch.no_grad()
def kernels(report: Report, rounds: int) -> None:
    """One linear layer after the other, so many that their weights leave the cache."""
    single = {}
    for outputs, inputs in SHAPES:
        count = max(2, OUT_OF_CACHE // (4 * outputs * inputs))
        whole = [nn.Linear(inputs, outputs, bias=False) for _ in range(count)]
        own = [nn.Sequential(copy.deepcopy(layer)) for layer in whole]
        ours: list[Any] = [gulliver.replace_module(layer)[0] for layer in own]
        dynamic = [_dynamic(layer) for layer in whole]
        for rows in ROWS:
            x = torch.randn(rows, inputs)
            contestants: dict[str, Callable[[], float]] = {
                "float32": _through(whole, x),
                "int8": _through(ours, x),
            }
            if all(dynamic):
                contestants["dynamic"] = _through(dynamic, x)
            found = alternate(contestants, rounds)
            ratio = found["float32"].median / found["int8"].median
            if rows == 1:
                single[outputs * inputs] = ratio
            kernel = int8.chosen_kernel(ours[0].stored, rows, x.device)
            peer = _beside(found, "dynamic", "torch dynamic")
            cells = (_us(found["float32"]), f"{_us(found['int8'])} ({kernel})", f"{ratio:.2f}")
            report.rows.append((f"linear {outputs}x{inputs}, {rows} rows", *cells, peer))
            report.figures[f"linear {outputs}x{inputs}x{rows}"] = ratio
    # A call takes some 20 us besides reading the weights, a fifth of the time at the smallest size.
    report.bars += [
        at_least("one row, smallest weights: gain over float32", single[min(single)], 2.5),
        at_least("one row, largest weights: gain over float32", single[max(single)], 4.0),
    ]


def _through(layers: Any, x: torch.Tensor) -> Callable[[], float]:
    def run() -> float:
        begun = time.perf_counter()
        for layer in layers:
            layer(x)
        return (time.perf_counter() - begun) / len(layers)

    return run


def _dynamic(layer: nn.Module) -> Any:
    try:
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), {nn.Linear})[0]
    except (AttributeError, RuntimeError):
        return None


def _us(spread: Spread) -> str:
    return f"{spread.median * 1e6:.0f} us"


def _beside(found: dict[str, Spread], key: str, name: str) -> str:
    if key not in found:
        return ""
    return f"{name} {found['float32'].median / found[key].median:.2f}"


def generation(report: Report, rounds: int) -> None:
    """A Llama of half a billion parameters continues prompts, at batch 1 and 8."""
    torch.manual_seed(0)
    whole = llama(32000, 2048, 5632, 8, 16).eval()
    count = sum(p.numel() for p in whole.parameters())
    ours = gulliver.replace_module(copy.deepcopy(whole))
    layers = int8.report_of(ours).replaced
    share = sum(layer.after for layer in layers) / sum(layer.before for layer in layers)
    report.bars.append(at_most("bytes of quantised linears, of float32's", share, 0.27))
    models = {"float32": whole, "int8": ours, "dynamic": _whole_dynamic(whole)}
    if importlib.util.find_spec("torchao"):
        models["torchao"] = _torchao(copy.deepcopy(whole))
    for batch in (1, 8):
        contestants: dict[str, Callable[[], float]] = {
            name: lambda model=model, batch=batch: generation_seconds(model, batch, turns=1)
            for name, model in models.items()
            if model is not None
        }
        found = alternate(contestants, max(3, rounds // 2), warm_up=0)
        ratio = found["float32"].median / found["int8"].median
        rates = [f"{16 * batch / found[name].median:.1f} tok/s" for name in ("float32", "int8")]
        peers = [_beside(found, n, n) for n in ("dynamic", "torchao")]
        what = f"generation, {count / 1e6:.0f} M, batch {batch}"
        report.rows.append((what, *rates, f"{ratio:.2f}", ", ".join(filter(None, peers))))
        report.figures[f"generation at batch {batch}"] = ratio
        report.bars.append(at_least(f"generation at batch {batch}, over float32", ratio, 2.5))


def _whole_dynamic(model: nn.Module) -> Any:
    try:
        return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    except (AttributeError, RuntimeError):
        return None


def _torchao(model: nn.Module) -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_  # pyright: ignore[reportMissingImports]

    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def perplexities(report: Report, steps: int) -> None:
    """A byte-level model that is trained here on Python's sources, judged on others of them."""
    model, learned, tokens = trained(steps)
    before = perplexity(model, tokens)
    report.notes.append(
        "perplexity: beside it stands the divergence from float32's predictions, in millinats a "
        "token, which luck does not make less; GPTQ rounds for 16,384 tokens of the training text"
    )
    batches = list(learned[:16384].view(-1, 1, 256))
    apart = dict[str, float]()
    for name in (*int8.MODES, "int4 by GPTQ"):
        copied = copy.deepcopy(model)
        mode, _, calibrated = name.partition(" by ")
        if calibrated:
            quantised = replace_calibrated(copied, batches, mode)
        else:
            quantised = gulliver.replace_module(copied, mode=mode)
        after, apart[name] = perplexity(quantised, tokens), divergence(model, quantised, tokens)
        told = f"{1e3 * apart[name]:.3f} millinats"
        cells = f"{before:.4f}", f"{after:.4f}", f"{after / before:.4f}", told
        report.rows.append((f"perplexity, {name}", *cells))
        report.figures[f"perplexity, {name}"] = after / before
        report.figures[f"divergence, {name}"] = apart[name]
        if mode != "int4":
            report.bars.append(at_most(f"perplexity over float32's, {name}", after / before, 1.01))
    share = apart["int4 by GPTQ"] / apart["int4"]
    report.bars.append(at_most("divergence of int4 by GPTQ, of the nearest's", share, 0.75))


if __name__ == "__main__":
    main()
