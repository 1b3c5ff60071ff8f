"""Serving on this machine: tokens a second beside transformers' own ways.

    python -m benchmarks.serving --parts throughput
    python -m benchmarks.serving --parts pipeline       # shaped links: needs root, ip and tc

One Llama-shaped model of 110 M random weights answers the same requests, of mixed lengths, in every
way: in batches of transformers' `generate`, which pad prompts and wait for the longest answer; by
transformers' own continuous batching; by `gulliver.serve` with float32 and with int8 weights.
Answers are compared token by token. `--parts faults` puts the server under clients that behave
badly (`_serving_soak.py`). `--parts pipeline` times stages over shaped links
(`_serving_pipeline.py`).
"""

from __future__ import annotations

import argparse
import importlib.util
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
from benchmarks._serving_soak import soak
from gulliver.serve import (
    Engine,
    EngineOptions,
    LocalRunner,
    SamplingParameters,
    kernel_problem,
)

PARTS = ("throughput", "faults", "pipeline")
CACHE = 32 * 1024
"""Tokens of the cache: all requests at a time."""
LONGEST = 2048


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        prompt: its tokens.
        count: tokens of the answer.
    """

    prompt: list[int]
    count: int


def main() -> None:
    """Measures the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--soak-seconds", type=float, default=75)
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
    if "faults" in options.parts:
        soak(options.soak_seconds, options.keep)
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
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        # Logits far apart: rounding, which differs from way to way, changes no token.
        initializer_range=0.05,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


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


Way = Callable[[Sequence[Asked]], list[list[int]]]


def static(model: Any, size: int) -> Way:
    """Transformers' generate in batches, in the order of the requests."""

    def run(requests: Sequence[Asked]) -> list[list[int]]:
        answers = []
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
        return answers

    return run


def continuous(model: Any, most: int) -> Way:
    """Transformers' own continuous batching, each request with its own length."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    def run(requests: Sequence[Asked]) -> list[list[int]]:
        generation = GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=192
        )
        sizes = ContinuousBatchingConfig(
            page_size=16, num_blocks=CACHE // 16, max_batch_tokens=512, max_requests_per_batch=most
        )
        answers: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=sizes, block=True, timeout=60
        ) as manager:
            for number, one in enumerate(requests):
                manager.add_request(one.prompt, request_id=str(number), max_new_tokens=one.count)
            while len(answers) < len(requests):
                found = manager.get_result(timeout=1)
                if found is not None and found.is_finished():
                    answers[found.request_id] = list(found.generated_tokens)
        return [answers[str(number)] for number in range(len(requests))]

    return run


def ours(model: Any, most: int) -> Way:
    """`gulliver.serve`; the cache is new each time, so that no prompt is found in it."""

    def run(requests: Sequence[Asked]) -> list[list[int]]:
        runner = LocalRunner(model, cache_tokens=CACHE)
        engine = Engine(runner, options=EngineOptions(512, most))
        made: dict[int, list[int]] = {}
        for one in requests:
            asked = SamplingParameters(max_tokens=one.count, temperature=0)
            made[engine.add(one.prompt, asked)] = []
        while engine.busy:
            for event in engine.step():
                made[event.request] += [token.id for token in event.tokens]
        runner.close()
        return list(made.values())

    return run


def throughput(report: Report, rounds: int, count: int, seconds: float = math.inf) -> None:
    """Seconds of all requests together, in each way in turns."""
    import copy

    begun = time.perf_counter()
    model, requests = make_model(), make_requests(count)
    quantised = gulliver.replace_module(copy.deepcopy(model))
    tokens = sum(one.count for one in requests)
    ways: dict[str, Way] = {
        "static batches of 8": static(model, 8),
        "static batches of 16": static(model, 16),
        "static batches of all": static(model, count),
        "transformers' continuous batching": continuous(model, count),
        "gulliver, float32": ours(model, count),
        "gulliver, int8": ours(quantised, count),
    }
    answers: dict[str, list[list[int]]] = {}

    def timed(name: str) -> Callable[[], float]:
        # Kernels are chosen, and memory is touched, before the clock runs.
        ways[name](requests[:2])

        def run() -> float:
            begin = time.perf_counter()
            answers[name] = ways[name](requests)
            seconds = time.perf_counter() - begin
            print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
            return seconds

        return run

    turns, spreads = {name: timed(name) for name in ways}, list[dict[str, Spread]]()
    while len(spreads) < rounds:
        begin = time.perf_counter()
        spreads.append(alternate(turns, 1, warm_up=0))
        turns = dict(reversed(turns.items()))
        now = time.perf_counter()
        if now - begun + (now - begin) > seconds:
            break
    found = {
        name: Spread(tuple(value for one in spreads for value in one[name].values)) for name in ways
    }
    right = answers["static batches of 8"]
    same = {name: sum(a == b for a, b in zip(answers[name], right, strict=True)) for name in ways}
    best = min(spread.median for name, spread in found.items() if name.startswith("static"))
    for name, spread in found.items():
        report.rows.append(_row(name, spread, tokens, best, f"{same[name]} of {count}"))
        report.figures[name] = {"seconds": spread.median, "tokens/s": tokens / spread.median}
    mine = found["gulliver, float32"].median
    theirs = found["transformers' continuous batching"].median
    report.bars += [
        at_least("times the tokens/s of the best static batches", best / mine, 3.0),
        at_least("times the tokens/s of transformers' continuous batching", theirs / mine, 1.0),
        at_least("answers equal to transformers'", same["gulliver, float32"] / count, 1.0),
    ]
    _notes(report, requests)
    report.notes.append(f"rounds: {len(spreads)}, every second one backwards")


def _row(name: str, spread: Spread, tokens: int, best: float, same: str) -> Sequence[str]:
    said = f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"
    return name, said, f"{tokens / spread.median:.0f}", f"{best / spread.median:.2f}", same


def _notes(report: Report, requests: Sequence[Asked]) -> None:
    prompts, answers = [len(r.prompt) for r in requests], [r.count for r in requests]
    problem = kernel_problem()
    report.notes += [
        f"{len(requests)} requests at once, prompts of {min(prompts)} to {max(prompts)} tokens "
        f"(mean {sum(prompts) / len(prompts):.0f}), answers of {min(answers)} to {max(answers)} "
        f"(mean {sum(answers) / len(answers):.0f}), greedy; {torch.get_num_threads()} threads",
        f"native attention over pages: {'none, ' + problem if problem else 'yes'}",
    ]
    if importlib.util.find_spec("llama_cpp") is None:
        report.notes.append("not beside it: llama-cpp-python, which is not installed here")


if __name__ == "__main__":
    main()
