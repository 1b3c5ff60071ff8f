"""`report`: the speedup from drafts on this machine, measured and predicted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from gulliver.errors import GulliverError
from gulliver.finetune.texts import read_text
from gulliver.serve.batch import Batch, Span
from gulliver.serve.engine import Engine
from gulliver.serve.local import LocalRunner
from gulliver.serve.options import EngineOptions
from gulliver.serve.sampling import SamplingParams
from gulliver.serve.speculative.proposers import Proposer
from gulliver.serve.speculative.speculator import SpeculationOptions, Speculator, make_speculator
from gulliver.serve.speculative.train import load_with_tokenizer
from gulliver.serve.speculative.train_config import ReportConfig


# [Note: what is predicted] A round of n guesses yields E tokens, including one of the model's own,
# and takes t(n + 1) + d seconds instead of t(1): the speedup is E t(1) / (t(n + 1) + d). Seconds t
# are measured by forwards over an empty cache, d and E are taken from the run.
@dataclass(frozen=True)
class SpeculationReport:
    """Speedup and costs of drafts."""

    draft: str
    # Fraction of guesses that were right, by depth, given right ones before them.
    acceptance: tuple[float, ...]
    # Number of texts that were continued, and how many of them ran concurrently.
    texts: int
    sequences: int
    # Measured tokens per second without drafts.
    plain_rate: float
    # The same with `depth` guesses in each round.
    drafted_rate: float
    # The same with as many guesses as pay off.
    guarded_rate: float
    # Predicted `drafted_rate` over `plain_rate`.
    predicted: float
    # Whether the tokens were the same.
    same: bool
    # Guesses in each round of the measured run.
    depth: int

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        depths = "  ".join(f"{n}: {a:.0%}" for n, a in enumerate(self.acceptance, 1))
        measured = self.drafted_rate / self.plain_rate
        return "\n".join(
            (
                f"draft: {self.draft}",
                f"acceptance by depth, given accepted parents: {depths}",
                f"{self.texts} texts, {self.sequences} at a time, {self.depth} guesses in each "
                f"round: {self.plain_rate:.1f} tokens/s plain, {self.drafted_rate:.1f} with drafts "
                f"= {measured:.2f}x, predicted {self.predicted:.2f}x "
                f"({self.predicted / measured - 1:+.0%})",
                f"with as many guesses as pay: {self.guarded_rate / self.plain_rate:.2f}x",
                f"tokens are {'the same' if self.same else 'NOT the same (ties within rounding)'}",
            )
        )


def report(config: ReportConfig) -> SpeculationReport:
    if config.target is None:
        raise GulliverError("no target: pass --target FOLDER")
    model, tokenizer = load_with_tokenizer(config.target, config)
    data = read_text(config, tokenizer, lambda _: None)
    texts = [one.ids.tolist() for one in data.held_out or data.train]
    texts = [
        text[: config.prompt_length] for text in texts if len(text) >= min(8, config.prompt_length)
    ]
    if not texts:
        raise GulliverError("no text is long enough: use longer texts")
    asked = SamplingParams(config.tokens, config.temperature, seed=0, ignore_eos=True)
    return measure_draft(
        *(model, tokenizer, config.draft, texts[: config.texts], asked, config.depth),
        sequences=config.sequences,
    )


def measure_draft(
    model: Any,
    tokenizer: Any,
    draft: str | Callable[[], Proposer],
    texts: Sequence[Sequence[int]],
    asked: SamplingParams,
    depth: int,
    rounds: int = 3,
    sequences: int = 1,
) -> SpeculationReport:
    """Measures the acceptance rate, cost and speedup of a model's draft.

    Args:
        model: causal language model of transformers.
        tokenizer: tokenizer of the model.
        draft: name or folder, as in `make_speculator`, or a function that creates a proposer.
        texts: prompts.
        asked: sampling parameters.
        depth: draft tokens per round.
        rounds: number of runs with and without drafts, in turn; medians are reported.
        sequences: concurrent sequences.
    """

    def made_of(options: SpeculationOptions) -> Speculator:
        if isinstance(draft, str):
            return make_speculator(draft, options, tokenizer)
        return Speculator(draft(), options)

    always = made_of(SpeculationOptions(depth=depth, fixed=True))
    guarded = made_of(SpeculationOptions(depth=depth))
    ways: dict[str, Speculator | None] = {"plain": None, "always": always, "guarded": guarded}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    made: dict[str, list[list[int]]] = {}
    sequences = min(sequences, len(texts))
    room = sequences * (max(map(len, texts)) + (asked.max_tokens or 0) + 16 * depth) + 512
    runner = LocalRunner(model, cache_tokens=room)
    options = EngineOptions(512, sequences, share_prefixes=False)
    for round_ in range(rounds + 1):
        for name, drafter in ways.items():
            engine = Engine(runner, None, options, drafter=drafter)
            spent, made[name] = _continued(engine, texts, asked)
            if round_:  # kernels are chosen, and chances learnt, before the clock runs
                seconds[name].append(spent)
    tokens = sum(map(len, made["plain"])) - len(texts)
    rates = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    stats = always.stats
    drafting = always.drafting(sequences, depth)

    def forward(wide: int) -> float:
        return statistics.median(step(runner, sequences * wide, wide) for _ in range(7))

    plain, whole = forward(1), forward(depth + 1)
    per_round = stats.guesses / max(1, stats.drafted) / sequences
    expected = 1 + stats.accepted / max(1, stats.drafted) / sequences
    share = stats.drafted / max(1, stats.rounds)
    verify = plain + (whole - plain) * per_round / depth
    # Rounds in which nothing could be drafted take a plain step.
    seconds_of_a_round = share * (verify + drafting) + (1 - share) * plain
    predicted = (share * expected + 1 - share) * plain / seconds_of_a_round
    runner.close()
    for drafter in (always, guarded):
        drafter.close()
    return SpeculationReport(
        *(always.proposer.name, tuple(stats.acceptance()), len(texts), sequences),
        *(rates["plain"], rates["always"], rates["guarded"], predicted),
        *(made["always"] == made["plain"] == made["guarded"], depth),
    )


def _continued(
    engine: Engine, texts: Sequence[Sequence[int]], asked: SamplingParams
) -> tuple[float, list[list[int]]]:
    """Returns the seconds of decoding after each group's first tokens, and the generated tokens."""
    spent, made = 0.0, dict[int, list[int]]()
    group = engine.options.sequences
    for at in range(0, len(texts), group):
        numbers = [engine.add(text, asked) for text in texts[at : at + group]]
        made |= {number: [] for number in numbers}
        begun = None
        while engine.busy:
            for event in engine.step():
                made[event.request] += [token.id for token in event.tokens]
            if begun is None and all(made[number] for number in numbers):
                begun = perf_counter()
        spent += perf_counter() - (begun or 0.0)
    return spent, list(made.values())


def step(runner: LocalRunner, tokens: int, wide: int, before: int = 64) -> float:
    """Seconds of a forward of `tokens` tokens, `wide` per sequence, after `before` cached ones."""
    facts = runner.facts
    wide = min(wide, tokens, facts.longest)
    start = max(0, min(before, facts.longest - wide))
    blocks = list(range(-(-(start + wide) // facts.block_size)))
    sizes = [wide] * (tokens // wide) + ([tokens % wide] if tokens % wide else [])
    spans = [Span(n, start, [0] * size, blocks, size) for n, size in enumerate(sizes)]
    begun = perf_counter()
    runner.submit(Batch(0, spans))
    # Like the engine, which waits for the device here.
    runner.collect().argmax(-1).tolist()
    return perf_counter() - begun
