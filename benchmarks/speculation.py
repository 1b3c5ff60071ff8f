"""Speculative decoding with a target and drafts that are trained here, on Python's own sources.

    python -m benchmarks.speculation [--models FOLDER] [--keep]
    python -m benchmarks.speculation --parts 1b [--keep]
    python -m benchmarks.speculation --parts real --gguf SmolLM2.gguf [--drafts ngram FOLDER]

The target is a Llama of 2 M parameters, the drafts have as many parameters as one another.
Acceptance: continuations of texts that nobody learnt, greedy and drawn, in chains of five guesses;
intervals are bootstrapped over texts. Expansion: accepted guesses of a round at an equal number of
verified ones. Speed: measured beside what the measured costs predict, for the trained target and
for those of 110 M and 1.2 B random weights. `real`: tasks, temperatures, loads and lengths on a
model that exists, beside none, in turns of a step. ``--models`` keeps the trained models, takes
those that are there and goes on with drafts that are not whole.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks._harness import Report, at_most, finish
from benchmarks._models import llama
from benchmarks._speculation_guesses import (
    DEPTH,
    PROMPT,
    TOKENS,
    Foretold,
    Guided,
    acceptance,
    continued,
    expansion,
    held_out,
)
from benchmarks._speculation_models import CONTEXT, DRAFT_ROWS, ROWS, draft_folder, make_models
from benchmarks._speculation_real import DRAFTS, real
from gulliver.precision.int8.replace import replace_module
from gulliver.serve import LocalRunner, SamplingParams, load
from gulliver.serve.speculative import Proposer, measure_draft
from gulliver.serve.speculative.glide import Glide
from gulliver.serve.speculative.train import glide_config
from gulliver.serve.speculative.train_config import TrainDraftConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path)
    parser.add_argument("--target-steps", type=int, default=1428)
    parser.add_argument("--draft-steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--texts", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", choices=("all", "guesses", "speed", "real", "1b"), default="all")
    parser.add_argument("--gguf", type=Path, help="model of --parts real")
    parser.add_argument("--drafts", nargs="+", default=DRAFTS, help="of --parts real")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.parts == "real":
        finish(real(options.gguf, options.drafts), options.keep)
        return
    import transformers

    transformers.logging.set_verbosity_error()
    columns = ("what", "value", "low", "high", "beside")
    if options.parts == "1b":
        report = Report("speculation-1b", "Drafts for a target of 1.2 B", columns)
        billion(report)
        finish(report, options.keep)
        return
    claim = "speculation" if options.parts == "all" else f"speculation-{options.parts}"
    report = Report(claim, "Speculative decoding: acceptance, expansion, speed", columns)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.models or Path(scratch)
        make_models(folder, options.target_steps, options.draft_steps, options.seeds)
        model, tokenizer = load(folder / "target")
        texts = held_out(folder, tokenizer, options.texts)
        if options.parts != "speed":
            acceptance(report, model, folder, texts, options.seeds)
            expansion(report, model, folder, texts)
        if options.parts != "guesses":
            speed(report, model, tokenizer, folder, texts, options.rounds)
            larger(report)
    report.notes += [
        f"{len(texts)} texts kept apart, beginnings of {PROMPT} tokens, continued by {TOKENS}, "
        f"greedy where nothing else is said; drafts of depth {DEPTH} in acceptance; "
        f"{torch.get_num_threads()} threads",
        f"target trained for {options.target_steps} steps of {ROWS * CONTEXT:,} tokens, drafts for "
        f"{options.draft_steps} of {DRAFT_ROWS * CONTEXT:,}; texts and seeds of all drafts are the "
        "same",
    ]
    finish(report, options.keep)


def speed(
    report: Report, model: Any, tokenizer: Any, folder: Path, texts: list[list[int]], rounds: int
) -> None:
    """Compares measured with predicted speed, one text at a time."""
    for name in (str(draft_folder(folder, "glide", 0)), "ngram"):
        kind = "glide" if name != "ngram" else name
        _measured(report, f"{kind}, target of 2 M", model, tokenizer, name, texts[:6], rounds)


def _measured(
    report: Report,
    what: str,
    model: Any,
    tokenizer: Any,
    name: str | Callable[[], Proposer],
    texts: list[list[int]],
    rounds: int,
    depth: int = 3,
) -> None:
    asked = SamplingParams(TOKENS, 0.0, ignore_eos=True)
    found = measure_draft(model, tokenizer, name, texts, asked, depth, rounds)
    measured = found.drafted_rate / found.plain_rate
    report.rows += [
        (
            f"speed at 1 sequence, {depth} guesses: {what}",
            *(f"{measured:.2f}x", "", "", f"predicted {found.predicted:.2f}x"),
        ),
        (
            f"speed at 1 sequence, as many as pay: {what}",
            *(f"{found.guarded_rate / found.plain_rate:.2f}x", "", ""),
            f"same tokens: {found.same}; right by depth "
            + " ".join(f"{one:.0%}" for one in found.acceptance),
        ),
    ]
    report.figures[f"speed, {what}"] = found.to_plain()
    error = abs(found.predicted / measured - 1)
    report.bars.append(at_most(f"error of the predicted speed: {what}", error, 0.15))


def larger(report: Report) -> None:
    """Compares measured with predicted speed for a target of 110 M, and the cost of verifying.

    Its weights are random, so that no draft can learn it: guesses are of a chosen quality.
    """
    from gulliver.serve.speculative.report import step

    model, texts, known = _random_target(768, 2048, 12, 12, 12)
    for right in (0.6, 0.9):
        what = f"{right:.0%} right and free, target of 110 M"
        _measured(report, what, model, None, lambda p=right: Foretold(known, p), texts, 2)
    runner = LocalRunner(model, cache_tokens=4096)
    costs = {}
    for count in (1, 8):
        plain = _median(lambda c=count: step(runner, c, 1))
        costs[f"110 M, {count} sequences"] = {
            n: _median(lambda c=count, n=n: step(runner, c * (n + 1), n + 1)) / plain
            for n in (1, 2, 3, 5, 7)
        }
    runner.close()
    for name, ratios in costs.items():
        shown = " ".join(f"{n}: {ratio:.2f}" for n, ratio in ratios.items())
        report.rows.append((f"verifying n guesses over a plain step: {name}", shown, "", "", ""))
        report.figures[f"verifying, {name}"] = ratios


def billion(report: Report) -> None:
    """Compares measured with predicted speed for a target of 1.2 B, with what a draft costs."""
    model, texts, known = _random_target(2048, 8192, 16, 32, 8)
    config = TrainDraftConfig(drafted=8192)
    draft = Glide(glide_config(config, model), torch.ones(32).tolist()).eval()
    draft = replace_module(draft, "int8", embeddings=True)
    for right in (0.25, 0.55, 0.75):
        guided = partial(Guided, draft, known, right)
        _measured(report, f"{right:.0%} right, target of 1.2 B", model, None, guided, texts, 2, 5)


def _random_target(*sizes: int) -> tuple[Any, list[list[int]], dict[tuple[int, ...], list[int]]]:
    """A Llama of random weights, prompts, and its answers to them."""
    torch.manual_seed(0)
    # Logits far apart: rounding changes no token.
    apart = {"tie_word_embeddings": True, "initializer_range": 0.05}
    model = llama(32_000, *sizes, **apart).eval().requires_grad_(False)
    random = torch.Generator().manual_seed(2)
    texts = [torch.randint(32_000, (PROMPT,), generator=random).tolist() for _ in range(2)]
    answers = continued(model, texts, None, 1)
    return model, texts, {tuple(text): answer for text, answer in zip(texts, answers, strict=True)}


def _median(run: Callable[[], float], times: int = 7) -> float:
    run()
    return statistics.median(run() for _ in range(times))


if __name__ == "__main__":
    main()
