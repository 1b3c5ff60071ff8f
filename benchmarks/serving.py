"""Serving on this machine: tokens a second beside transformers' own ways.

    python -m benchmarks.serving --parts throughput
    python -m benchmarks.serving --parts pipeline       # shaped links: needs root, ip and tc

One Llama-shaped model of 110 M random weights answers the same requests, of mixed lengths, in every
way: in batches of transformers' `generate`, which pad prompts and wait for the longest answer; by
transformers' own continuous batching; by llama.cpp where it is installed (`_serving_llamacpp.py`);
by `gulliver.serve` with float32 and with int8 weights. Engines have been started, and have answered
a request, before the clock runs. Answers are compared token by token. `--parts pipeline` times
stages over shaped links (`_serving_pipeline.py`).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import gulliver
from benchmarks._harness import Report, Spread, alternate, at_least, finish
from benchmarks._models import llama
from benchmarks._serving_llamacpp import FORMATS, MISSING, LlamaCpp, has_llamacpp
from gulliver.serve import Engine, EngineOptions, LocalRunner, SamplingParams
from gulliver.serve.decoder import native_problem

PARTS = ("throughput", "pipeline")
CACHE = 16 * 1024  # Tokens of the cache: all requests at a time
LONGEST = 2048


@dataclass(frozen=True)
class Asked:
    """A request."""

    prompt: list[int]  # its tokens
    count: int  # tokens of the answer


FIRST = Asked([5, 6, 7], 2)  # What an engine has answered before the clock runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="no round begins that would end later"
    )
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if "pipeline" in options.parts:
        # First: its ranks are forked from a process that has computed nothing.
        from benchmarks._serving_pipeline import pipeline

        finish(pipeline(options.rounds), options.keep)
    if "throughput" in options.parts:
        columns = ("way", "seconds", "tokens/s", "times the best static batch", "same answers")
        report = Report("serving", "Serving: mixed requests", columns)
        throughput(report, options.rounds, options.requests, options.seconds)
        finish(report, options.keep)


def make_model() -> Any:
    """A Llama of 110 M random weights."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    # Logits far apart: rounding, which differs from way to way, changes no token.
    apart = {"tie_word_embeddings": True, "initializer_range": 0.05}
    return llama(32_000, 768, 2048, 12, 12, 12, LONGEST, **apart).eval().requires_grad_(False)


def make_requests(count: int) -> list[Asked]:
    """Prompts of 16 to 384 tokens and answers of 8 to 192, evenly on a logarithmic scale."""
    random = torch.Generator().manual_seed(1)

    def spread(low: int, high: int) -> int:
        return int(low * (high / low) ** float(torch.rand((), generator=random)))

    made = []
    for _ in range(count):
        size = spread(16, 384)
        prompt = torch.randint(3, 32_000, (size,), generator=random).tolist()
        made.append(Asked(prompt, spread(8, 192)))
    return made


Way = Callable[[Sequence[Asked]], tuple[list[list[int]], float]]
"""Answers requests that come at once; returns answers and seconds."""


def static(model: Any, size: int) -> Way:
    """Transformers' generate in batches, in the order of the requests."""

    def run(requests: Sequence[Asked]) -> tuple[list[list[int]], float]:
        answers, begun = [], time.perf_counter()
        for begin in range(0, len(requests), size):
            some = requests[begin : begin + size]
            width = max(len(one.prompt) for one in some)
            ids = torch.tensor([[0] * (width - len(one.prompt)) + one.prompt for one in some])
            mask = torch.tensor(
                [[0] * (width - len(one.prompt)) + [1] * len(one.prompt) for one in some]
            )
            made = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(one.count for one in some),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            answers += [
                row[width : width + one.count].tolist() for row, one in zip(made, some, strict=True)
            ]
        return answers, time.perf_counter() - begun

    return run


def continuous(model: Any, most: int) -> Way:
    """Transformers' own continuous batching, each request with its own length."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    def run(requests: Sequence[Asked]) -> tuple[list[list[int]], float]:
        generation = GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=192
        )
        sizes = ContinuousBatchingConfig(
            page_size=16, num_blocks=CACHE // 16, max_batch_tokens=512, max_requests_per_batch=most
        )
        answers: dict[str, list[int]] = {}

        def hear(manager: Any, count: int) -> None:
            while len(answers) < count:
                found = manager.get_result(timeout=1)
                if found is not None and found.is_finished():
                    answers[found.request_id] = list(found.generated_tokens)

        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=sizes, block=True, timeout=60
        ) as manager:
            manager.add_request(FIRST.prompt, request_id="first", max_new_tokens=FIRST.count)
            hear(manager, 1)
            begun = time.perf_counter()
            for number, one in enumerate(requests):
                manager.add_request(one.prompt, request_id=str(number), max_new_tokens=one.count)
            hear(manager, 1 + len(requests))
            seconds = time.perf_counter() - begun
        return [answers[str(number)] for number in range(len(requests))], seconds

    return run


def ours(model: Any, most: int) -> Way:
    """`gulliver.serve`; the cache is new each time, so that no prompt is found in it."""

    def run(requests: Sequence[Asked]) -> tuple[list[list[int]], float]:
        runner = LocalRunner(model, cache_tokens=CACHE)
        engine = Engine(runner, options=EngineOptions(512, most))
        _answered(engine, [FIRST])
        begun = time.perf_counter()
        answers = _answered(engine, requests)
        seconds = time.perf_counter() - begun
        runner.close()
        return answers, seconds

    return run


def _answered(engine: Engine, requests: Sequence[Asked]) -> list[list[int]]:
    made: dict[int, list[int]] = {}
    for one in requests:
        asked = SamplingParams(max_tokens=one.count, temperature=0)
        made[engine.add(one.prompt, asked)] = []
    while engine.busy:
        for event in engine.step():
            made[event.request] += [token.id for token in event.tokens]
    return list(made.values())


def throughput(report: Report, rounds: int, count: int, seconds: float = math.inf) -> None:
    """Seconds of all requests together, in each way in turns."""
    import copy

    begun = time.perf_counter()
    model, requests = make_model(), make_requests(count)
    quantised = gulliver.replace_module(copy.deepcopy(model))
    ways: dict[str, Way] = {
        "static batches of 8": static(model, 8),
        "static batches of 16": static(model, 16),
        "transformers' continuous batching": continuous(model, count),
        "gulliver, float32": ours(model, count),
        "gulliver, int8": ours(quantised, count),
    }
    others = [LlamaCpp(model, kind, count, 640, 512) for kind in FORMATS if has_llamacpp()]
    ways |= {f"llama.cpp, {kind}": one.run for kind, one in zip(FORMATS, others, strict=False)}
    answers, found = _timed(ways, requests, rounds, begun + seconds)
    for other in others:
        other.close()
    tokens = sum(one.count for one in requests)
    right = answers["static batches of 8"]
    same = {name: sum(a == b for a, b in zip(answers[name], right, strict=True)) for name in ways}
    best = min(spread.median for name, spread in found.items() if name.startswith("static"))
    for name, spread in found.items():
        kept = f"{same[name]} of {count}, {_share_before(answers[name], right):.0%}"
        report.rows.append(_row(name, spread, tokens, best, kept))
        report.figures[name] = {"seconds": spread.values, "tokens/s": tokens / spread.median}
    mine = found["gulliver, float32"].median
    theirs = found["transformers' continuous batching"].median
    report.bars += [
        at_least("times the tokens/s of the best static batches", best / mine, 3.0),
        at_least("times the tokens/s of transformers' continuous batching", theirs / mine, 1.0),
        at_least("answers equal to transformers'", same["gulliver, float32"] / count, 1.0),
    ]
    _notes(report, requests)
    if others:
        mates = (found[f"llama.cpp, {kind}"].median for kind in FORMATS)
        mine_too = (mine, found["gulliver, int8"].median)
        told = " and ".join(f"{a / b:.2f}" for a, b in zip(mates, mine_too, strict=True))
        report.notes.append(
            f"tokens/s here over those of llama.cpp: {told} times (float32, 8 bit); "
            f"{others[0].info}"
        )
    else:
        report.notes.append(MISSING)


def _timed(
    ways: dict[str, Way], requests: Sequence[Asked], rounds: int, end: float
) -> tuple[dict[str, list[list[int]]], dict[str, Spread]]:
    """Runs the ways in turns; of the static ones only the best after the first round."""
    answers: dict[str, list[list[int]]] = {}
    values: dict[str, list[float]] = {name: [] for name in ways}

    def timed(name: str) -> Callable[[], float]:
        # Kernels are chosen, and memory is touched, before the clock runs.
        ways[name](requests[:2])

        def run() -> float:
            answers[name], seconds = ways[name](requests)
            print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
            return seconds

        return run

    turns = {name: timed(name) for name in ways}
    for _ in range(rounds):
        for name, spread in alternate(turns, 1, warm_up=0).items():
            values[name] += spread.values
        static_ones = [name for name in turns if name.startswith("static")]
        best = min(static_ones, key=lambda name: values[name][0])
        turns = {n: turns[n] for n in reversed(turns) if n == best or n not in static_ones}
        if time.perf_counter() + sum(values[name][-1] for name in turns) > end:
            break
    return answers, {name: Spread(tuple(found)) for name, found in values.items()}


def _share_before(made: list[list[int]], right: list[list[int]]) -> float:
    """Part of the tokens that come before the first other one of their answer."""
    same = 0
    for a, b in zip(made, right, strict=True):
        same += next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
    return same / sum(map(len, right))


def _row(name: str, spread: Spread, tokens: int, best: float, same: str) -> Sequence[str]:
    return (
        name,
        spread.shown(),
        f"{tokens / spread.median:.0f}",
        f"{best / spread.median:.2f}",
        same,
    )


def _notes(report: Report, requests: Sequence[Asked]) -> None:
    prompts, answers = [len(r.prompt) for r in requests], [r.count for r in requests]
    report.notes += [
        f"{len(requests)} requests at once, prompts of {min(prompts)} to {max(prompts)} tokens "
        f"(mean {sum(prompts) / len(prompts):.0f}), answers of {min(answers)} to {max(answers)} "
        f"(mean {sum(answers) / len(answers):.0f}), greedy; {torch.get_num_threads()} threads",
        f"native decoder: {_said(native_problem())}",
        "same answers: whole ones, and the part of all tokens before the first other one; static "
        "batches that are not the best are timed once, the others in turns, every second round "
        "backwards; one static batch of all was slower by half when it was timed (24 requests)",
    ]


def _said(problem: str | None) -> str:
    return "yes" if problem is None else f"none, {problem}"


if __name__ == "__main__":
    main()
