"""Speculative decoding with a target and drafts that are trained here, on Python's own sources.

    python -m benchmarks.speculation [--models FOLDER] [--keep]

The target is a Llama of 3.9 M parameters, the drafts have as many parameters as one another.
Acceptance: continuations of texts that nobody learnt, greedy, in chains of five guesses; intervals
are bootstrapped over texts. Expansion: accepted guesses of a round at an equal number of verified
ones. Speed: measured on the trained models, beside what the measured costs predict. Costs of a
target of 110 M random weights are measured apart: they say which acceptance would be needed there.
``--models`` keeps the trained models, and takes those that are there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks._harness import Report, alternate, at_least, at_most, finish
from benchmarks._speculation_models import DRAFTS, make_models
from gulliver.serve import Engine, EngineOptions, LocalRunner, SamplingParameters, load
from gulliver.serve.speculative import (
    CAPE,
    GlideDraft,
    LookUp,
    Proposer,
    SpeculationOptions,
    Speculator,
    load_draft,
    measure_draft,
)

DEPTH = 5
PROMPT, TOKENS = 48, 64
LOADS = (1, 4, 16, 64)


class Noted(Speculator):
    """A speculator that notes how many guesses each round verified and how many were right."""

    def __init__(self, proposer: Proposer, options: SpeculationOptions) -> None:
        super().__init__(proposer, options)
        self.rounds: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def verified(self, sequence: int, draft: Any, path: Sequence[int], tokens: int) -> None:
        """Notes a round."""
        super().verified(sequence, draft, path, tokens)
        self.rounds[sequence].append((len(draft.tokens), len(path)))


def main() -> None:
    """Trains what is lacking, measures, and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path)
    parser.add_argument("--target-steps", type=int, default=170)
    parser.add_argument("--draft-steps", type=int, default=90)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", choices=("all", "guesses", "speed"), default="all")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    columns = ("what", "value", "low", "high", "beside")
    claim = "speculation" if options.parts == "all" else f"speculation-{options.parts}"
    report = Report(claim, "Speculative decoding: acceptance, expansion, speed", columns)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.models or Path(scratch)
        make_models(folder, options.target_steps, options.draft_steps)
        model, tokenizer = load(folder / "target")
        texts = held_out(folder, tokenizer, options.texts)
        if options.parts != "speed":
            acceptance(report, model, folder, texts)
            expansion(report, model, folder, texts)
        if options.parts != "guesses":
            speed(report, model, tokenizer, folder, texts, options.rounds)
            guard(report, model, folder, texts, options.rounds)
            larger(report)
    report.notes += [
        f"{len(texts)} texts kept apart, beginnings of {PROMPT} tokens, continued by {TOKENS}, "
        f"greedy; drafts of depth {DEPTH} in acceptance; {torch.get_num_threads()} threads",
        f"target trained for {options.target_steps} steps of 3,072 tokens, drafts for "
        f"{options.draft_steps}; texts and seeds of all drafts are the same",
    ]
    finish(report, options.keep)


def held_out(folder: Path, tokenizer: Any, count: int) -> list[list[int]]:
    """Beginnings of texts that nobody learnt: several of a file, from different places."""
    import json

    rows = [json.loads(line)["text"] for line in (folder / "apart.jsonl").open()]
    ids = [tokenizer(row)["input_ids"] for row in rows]
    made = []
    for number in range(count):
        row = ids[number % len(ids)]
        begin = (number // len(ids) * 977 + 300) % max(1, len(row) - PROMPT)
        made.append(row[begin : begin + PROMPT])
    return made


def continued(
    model: Any, texts: Sequence[Sequence[int]], drafter: Any, count: int, tokens: int = TOKENS
) -> tuple[float, list[list[int]]]:
    """Seconds of continuing texts, `count` at a time, after their prompts, and the tokens."""
    runner = LocalRunner(model, cache_tokens=count * (PROMPT + tokens + 32) + 512)
    engine = Engine(runner, None, EngineOptions(1024, count, False), drafter=drafter)
    asked = SamplingParameters(tokens, 0.0, ignore_eos=True)
    made: dict[int, list[int]] = {engine.add(text, asked): [] for text in texts}
    begun = None
    while engine.busy:
        for event in engine.step():
            made[event.request] += [token.id for token in event.tokens]
        if begun is None and len(made[len(texts) - 1]):
            begun = perf_counter()
    seconds = perf_counter() - (begun or 0.0)
    runner.close()
    return seconds, list(made.values())


def rounds_of(
    model: Any, draft: GlideDraft, texts: Sequence[Sequence[int]], options: SpeculationOptions
) -> list[list[tuple[int, int]]]:
    """Rounds of each text: guesses, and how many were right."""
    drafter = Noted(draft, options)
    continued(model, texts, drafter, len(texts))
    return [drafter.rounds[number] for number in range(len(texts))]


def by_depth(rounds: Sequence[Sequence[tuple[int, int]]], depth: int) -> float:
    """Share of guesses at a depth that were right, where all before them were."""
    seen = [right for text in rounds for made, right in text if made >= depth <= right + 1]
    return sum(right >= depth for right in seen) / max(1, len(seen))


def accepted(rounds: Sequence[Sequence[tuple[int, int]]]) -> float:
    """Guesses of a round that were right."""
    return statistics.fmean(right for text in rounds for _, right in text)


def interval(
    figure: Callable[[Sequence[int]], float], texts: int, draws: int = 1000
) -> tuple[float, float]:
    """Middle 95 % of a figure over texts that are drawn again and again."""
    random = torch.Generator().manual_seed(0)
    found = sorted(
        figure(torch.randint(texts, (texts,), generator=random).tolist()) for _ in range(draws)
    )
    return found[int(0.025 * draws)], found[int(0.975 * draws)]


def acceptance(report: Report, model: Any, folder: Path, texts: list[list[int]]) -> None:
    """Drafts of equal parameters beside one another, by depth."""
    options = SpeculationOptions(depth=DEPTH, nodes=DEPTH, fixed=True)
    found = {}
    for name in DRAFTS:
        draft = load_draft(folder / name.replace(" ", "-"))
        size = sum(p.numel() for p in draft.parameters())
        found[name] = rounds_of(model, GlideDraft(draft, beside=0), texts, options)
        depths = [by_depth(found[name], depth) for depth in range(1, DEPTH + 1)]
        low, high = interval(
            lambda some, of=found[name]: accepted([of[n] for n in some]), len(texts)
        )
        report.rows.append(
            (
                f"accepted of {DEPTH}: {name}, {size:,} parameters",
                *(f"{value:.2f}" for value in (accepted(found[name]), low, high)),
                "by depth " + " ".join(f"{depth:.0%}" for depth in depths),
            )
        )
        report.figures[name] = {"accepted": accepted(found[name]), "by depth": depths}
    for other in ("plain", "glide without block mask"):
        mine, theirs = found["glide"], found[other]

        def apart(some: Sequence[int], mine: Any = mine, theirs: Any = theirs) -> float:
            return accepted([mine[n] for n in some]) - accepted([theirs[n] for n in some])

        value, (low, high) = apart(range(len(texts))), interval(apart, len(texts))
        shown = tuple(f"{one:+.2f}" for one in (value, low, high))
        report.rows.append((f"accepted: glide less {other}", *shown, "95 % over texts"))
        report.figures[f"glide less {other}"] = [value, low, high]
        if other == "plain":
            report.bars.append(at_least("glide less plain, low end", low, 0.0))


def expansion(report: Report, model: Any, folder: Path, texts: list[list[int]]) -> None:
    """Chains, CaPE and calibrated trees with as many verified guesses a round."""
    draft = load_draft(folder / "glide")
    wide = SpeculationOptions(depth=4, nodes=64, fixed=True)
    found = {"CaPE, depth 4": rounds_of(model, GlideDraft(draft, CAPE), texts, wide)}
    nodes = round(statistics.fmean(n for t in found["CaPE, depth 4"] for n, _ in t))
    for count in (8, nodes):
        chain = SpeculationOptions(min(count, 16), count, True)
        found[f"chain of {min(count, 16)}"] = rounds_of(model, GlideDraft(draft, 0), texts, chain)
        tree = SpeculationOptions(8, count, True)
        found[f"calibrated tree of {count}"] = rounds_of(model, GlideDraft(draft, 7), texts, tree)
    for name, rounds in found.items():
        mean = statistics.fmean(n for text in rounds for n, _ in text)
        low, high = interval(lambda some, of=rounds: accepted([of[n] for n in some]), len(texts))
        shown = tuple(f"{one:.2f}" for one in (accepted(rounds), low, high))
        report.rows.append((f"accepted a round: {name}", *shown, f"{mean:.1f} verified"))
        report.figures[f"expansion, {name}"] = {"accepted": accepted(rounds), "verified": mean}
    tree, chain = (accepted(found[n]) for n in ("calibrated tree of 8", "chain of 8"))
    report.bars.append(at_least("accepted: tree of 8 less chain of 8", tree - chain, 0.0))


def speed(
    report: Report,
    model: Any,
    tokenizer: Any,
    folder: Path,
    texts: list[list[int]],
    rounds: int,
) -> None:
    """Measured beside predicted, one text at a time."""
    asked = SamplingParameters(TOKENS, 0.0, ignore_eos=True)
    for name in (str(folder / "glide"), "ngram"):
        found = measure_draft(model, tokenizer, name, texts[:6], asked, 3, rounds)
        measured = found.drafted_rate / found.plain_rate
        kind = "glide" if name != "ngram" else name
        report.rows += [
            (
                f"speed at 1 sequence, 3 guesses: {kind}",
                *(f"{measured:.2f}x", "", "", f"predicted {found.predicted:.2f}x"),
            ),
            (
                f"speed at 1 sequence, as many as pay: {kind}",
                *(f"{found.guarded_rate / found.plain_rate:.2f}x", "", ""),
                f"same tokens: {found.same}",
            ),
        ]
        report.figures[f"speed, {kind}"] = found.to_plain()
        error = abs(found.predicted / measured - 1)
        report.bars.append(at_most(f"error of the predicted speed: {kind}", error, 0.15))


def guard(report: Report, model: Any, folder: Path, texts: list[list[int]], rounds: int) -> None:
    """As many guesses as pay beside none, by the number of sequences at a time."""
    draft = load_draft(folder / "glide")
    worst = 9.9
    for count in LOADS:
        some = [texts[number % len(texts)] for number in range(count)]
        drafters: dict[str, Any] = {
            "none": None,
            "glide": Speculator(GlideDraft(draft)),
            "ngram": Speculator(LookUp()),
        }

        def run(name: str, some: Any = some, drafters: Any = drafters) -> Callable[[], float]:
            return lambda: continued(model, some, drafters[name], len(some))[0]

        found = alternate({name: run(name) for name in drafters}, rounds)
        for name in ("glide", "ngram"):
            drafter = drafters[name]
            ratio = found["none"].median / found[name].median
            worst = min(worst, ratio)
            low = found["none"].low / found[name].high
            high = found["none"].high / found[name].low
            shown = tuple(f"{one:.2f}x" for one in (ratio, low, high))
            said = f"drafted in {drafter.told.drafted / max(1, drafter.told.rounds):.0%} of rounds"
            report.rows.append((f"guarded speed at {count} sequences: {name}", *shown, said))
            report.figures[f"guard, {name}, {count}"] = {"speed": ratio, "why": drafter.why}
    report.bars.append(at_least("guarded speed at any load", worst, 0.97))


def larger(report: Report) -> None:
    """Costs of a target of 110 M, and the acceptance that 2.17 and 2.61 times would need."""
    from benchmarks.serving import make_model
    from gulliver.serve.speculative._measure import step

    runner = LocalRunner(make_model(), cache_tokens=4096)
    for count in (1, 8):
        plain = _median(lambda c=count: step(runner, c, 1))
        verify = {
            n: _median(lambda c=count, n=n: step(runner, c * (n + 1), n + 1)) for n in (1, 3, 5)
        }
        ratios = {n: seconds / plain for n, seconds in verify.items()}
        need = []
        for aim in (1.0, 2.17, 2.61):
            least = min(_needed(aim, n, 0.05, ratio) for n, ratio in ratios.items())
            need.append(f"{aim}x: {least:.2f}" if least <= 1 else f"{aim}x: never")
        shown = " ".join(f"{n}: {ratio:.2f}" for n, ratio in ratios.items())
        report.rows.append(
            (
                f"110 M, random weights, {count} sequences: verifying n over a plain step",
                *(shown, "", "", "acceptance needed (modelled) " + ", ".join(need)),
            )
        )
        report.figures[f"110 M, {count}"] = {"verify": ratios, "needed": need}
    runner.close()


def _median(run: Callable[[], float], times: int = 5) -> float:
    run()
    return statistics.median(run() for _ in range(times))


def _needed(aim: float, guesses: int, share: float, verify: float) -> float:
    """Least acceptance with which chains of n guesses are `aim` times as fast; 2 where none is.

    Each guess takes `share` of a plain step: (1 + a + ... + a^n) / (n share + verify) = aim.
    """
    wanted = aim * (guesses * share + verify)
    low, high = 0.0, 1.0
    if wanted > guesses + 1:
        return 2.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**power for power in range(guesses + 1)) < wanted:
            low = middle
        else:
            high = middle
    return high


if __name__ == "__main__":
    main()
