"""`report`: what drafts of a model are worth here, measured, and predicted from costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from time import perf_counter
from typing import Any

from gulliver.errors import GulliverError
from gulliver.finetune.texts import read_text
from gulliver.serve.engine import Engine, EngineOptions
from gulliver.serve.local import LocalRunner
from gulliver.serve.sampling import SamplingParameters
from gulliver.serve.speculative.cost import step
from gulliver.serve.speculative.proposers import Proposer
from gulliver.serve.speculative.speculator import SpeculationOptions, Speculator, make_speculator
from gulliver.serve.speculative.train_config import ReportConfig
from gulliver.serve.weights import load

LOADS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of sequences that are looked at."""


# [Note: what is predicted] With acceptance a_1 ... a_n by depth, a round of n guesses gives E = 1 +
# a_1 + a_1 a_2 + ... tokens of each of s sequences, and takes t(s (n + 1)) + d(s) seconds instead
# of t(s): speed is E t(s) / (t(s (n + 1)) + d(s)). Seconds t are measured here, by forwards over an
# empty cache, and so are those of a draft model; look-ups take d in proportion to s.
@dataclass(frozen=True)
class Load:
    """Speculation with a number of sequences at a time.

    Attributes:
        sequences: number of sequences.
        depth: guesses of a round that give most tokens per second; 0 where none do.
        plain: seconds of a step without drafts.
        verify: seconds of a step that verifies `depth` guesses each; that of `plain` for none.
        drafting: seconds of making them.
        tokens: expected tokens of a round, for each sequence.
        speed: predicted tokens per second over those without drafts.
    """

    sequences: int
    depth: int
    plain: float
    verify: float
    drafting: float
    tokens: float
    speed: float


@dataclass(frozen=True)
class SpeculationReport:
    """What drafts are worth."""

    draft: str
    # Share of guesses that were right, by depth, where those before them were.
    acceptance: tuple[float, ...]
    # Predictions by number of sequences.
    loads: tuple[Load, ...]
    # Most sequences at which drafting pays; 0 where it never does.
    break_even: int
    # Sequences of the measured run.
    texts: int
    # Measured tokens per second of one sequence after another, without drafts.
    plain_rate: float
    # The same with `depth` guesses in each round.
    drafted_rate: float
    # The same with as many guesses as pay.
    guarded_rate: float
    # Predicted `drafted_rate` over `plain_rate`.
    predicted: float
    # Whether the tokens were the same.
    same: bool
    # Guesses in each round of the measured run.
    depth: int

    def to_plain(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        depths = "  ".join(f"{n}: {a:.0%}" for n, a in enumerate(self.acceptance, 1))
        lines = [
            f"draft: {self.draft}",
            f"right by depth, where all before were: {depths}",
            "sequences  plain step  guesses  drafting    verifying   tokens  predicted speed",
        ]
        lines += [
            f"{one.sequences:>9}  {_ms(one.plain)}  {one.depth:>7}  {_ms(one.drafting)}  "
            f"{_ms(one.verify)}  {one.tokens:>6.2f}  {one.speed:>14.2f}x"
            for one in self.loads
        ]
        measured = self.drafted_rate / self.plain_rate
        error = self.predicted / measured - 1
        lines += [
            (
                f"pays up to {self.break_even} sequences at a time"
                if self.break_even
                else "does not pay with any number of sequences"
            ),
            f"{self.texts} texts, one at a time, {self.depth} guesses in each round: "
            f"{self.plain_rate:.1f} tokens/s plain, {self.drafted_rate:.1f} with drafts = "
            f"{measured:.2f}x, predicted {self.predicted:.2f}x ({error:+.0%})",
            f"with as many guesses as pay: {self.guarded_rate / self.plain_rate:.2f}x",
            f"tokens are {'the same' if self.same else 'NOT the same (ties within rounding)'}",
        ]
        return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:>7.2f} ms"


def report(config: ReportConfig) -> SpeculationReport:
    """Measures drafts on texts."""
    if config.target is None:
        raise GulliverError("no target is named: give --target FOLDER")
    model, tokenizer = load(config.target, config.dtype)
    data = read_text(config, tokenizer, lambda _: None)
    texts = [one.ids.tolist() for one in data.held_out or data.train]
    texts = [text[: config.prompt] for text in texts if len(text) >= min(8, config.prompt)]
    if not texts:
        raise GulliverError("no text is left to continue: give longer ones")
    asked = SamplingParameters(config.tokens, config.temperature, seed=0, ignore_eos=True)
    return measure_draft(model, tokenizer, config.draft, texts[: config.texts], asked, config.depth)


def measure_draft(
    model: Any,
    tokenizer: Any,
    draft: str | Callable[[], Proposer],
    texts: Sequence[Sequence[int]],
    asked: SamplingParameters,
    depth: int,
    rounds: int = 3,
) -> SpeculationReport:
    """Measures a draft of a model.

    Args:
        model: causal language model of transformers.
        tokenizer: tokenizer of the model.
        draft: name or folder, as `make_speculator` takes it, or what makes a proposer.
        texts: beginnings.
        asked: how they are continued.
        depth: guesses of a round.
        rounds: runs of each way, alternating; medians are reported.
    """
    fixed = SpeculationOptions(depth=depth, fixed=True)

    def made_of(options: SpeculationOptions) -> Speculator:
        if isinstance(draft, str):
            return make_speculator(draft, options, tokenizer)
        return Speculator(draft(), options)

    always, guarded = made_of(fixed), made_of(SpeculationOptions(depth=depth))
    ways: dict[str, Speculator | None] = {"plain": None, "always": always, "guarded": guarded}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    made: dict[str, list[list[int]]] = {}
    room = (max(len(text) for text in texts) + (asked.max_tokens or 0)) * 2 + 64
    runner = LocalRunner(model, cache_tokens=max(room, 1024))
    for round_ in range(rounds + 1):
        for name, drafter in ways.items():
            options = EngineOptions(512, 1, share_prefixes=False)
            engine = Engine(runner, None, options, drafter=drafter)
            spent, made[name] = _continued(engine, texts, asked)
            if round_:  # kernels are chosen, and chances learnt, before the clock runs
                seconds[name].append(spent)
    tokens = sum(map(len, made["plain"])) - len(texts)
    rates = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    acceptance = tuple(always.stats.acceptance())
    drafting = always.drafting(1, depth)
    loads = tuple(_load(runner, always, acceptance, sequences) for sequences in LOADS)
    pay = [one.sequences for one in loads if one.speed > 1.0]
    cost = {n: statistics.median(step(runner, n) for _ in range(7)) for n in (1, depth + 1)}
    per_round = always.stats.guesses / max(1, always.stats.drafted)
    expected = 1 + always.stats.accepted / max(1, always.stats.drafted)
    share = always.stats.drafted / max(1, always.stats.rounds)
    verify = cost[1] + (cost[depth + 1] - cost[1]) * per_round / depth
    # Rounds in which nothing could be drafted take a plain step.
    whole = share * (verify + drafting) + (1 - share) * cost[1]
    predicted = (share * expected + 1 - share) * cost[1] / whole
    runner.close()
    for drafter in (always, guarded):
        drafter.close()
    return SpeculationReport(
        *(always.proposer.name, acceptance, loads, max(pay, default=0), len(texts)),
        *(rates["plain"], rates["always"], rates["guarded"], predicted),
        *(made["always"] == made["plain"] == made["guarded"], depth),
    )


def _continued(
    engine: Engine, texts: Sequence[Sequence[int]], asked: SamplingParameters
) -> tuple[float, list[list[int]]]:
    """Seconds of all tokens but the first of each text, and the tokens."""
    spent, made = 0.0, []
    for text in texts:
        engine.add(text, asked)
        answer: list[int] = []
        begun = None
        while engine.busy:
            for event in engine.step():
                answer += [token.id for token in event.tokens]
            if begun is None and answer:
                begun = perf_counter()
        spent += perf_counter() - (begun or 0.0)
        made.append(answer)
    return spent, made


def _load(
    runner: LocalRunner,
    drafter: Speculator,
    acceptance: Sequence[float],
    sequences: int,
) -> Load:
    """Predicts speculation with a number of sequences."""

    def seconds(tokens: int, wide: int) -> float:
        step(runner, tokens, wide)
        return statistics.median(step(runner, tokens, wide) for _ in range(5))

    plain = seconds(sequences, 1)
    found = Load(sequences, 0, plain, plain, 0.0, 1.0, 1.0)
    reach = list(accumulate(acceptance, mul))
    for depth in {1, 2, len(acceptance) // 2, len(acceptance)} - {0}:
        verify = seconds(sequences * (depth + 1), depth + 1)
        own = drafter.drafting(sequences, depth)
        expected = 1 + sum(reach[:depth])
        speed = expected * plain / (verify + own)
        if speed > found.speed:
            found = Load(sequences, depth, plain, verify, own, expected, speed)
    return found
