"""Speculative decoding: the same answers as without, and no more drafts than pay."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.errors import GulliverError
from gulliver.serve import Batch, Engine, EngineOptions, LocalRunner, SamplingParams, Span
from gulliver.serve.batch import Wanted, walk
from gulliver.serve.sampling import DrawRow, draw
from gulliver.serve.speculative import (
    AcceptanceRate,
    Proposer,
    SpeculationOptions,
    Speculator,
    make_speculator,
)
from gulliver.serve.speculative.proposers import Followers, LookUp, Proposal
from gulliver.serve.speculative.small_model import DraftCache, ModelDraft, SmallModel
from gulliver.serve.speculative.speculator import StepCost, best
from tests.serve.serving_models import Slots, one_by_one, probabilities, prompts, tiny

COUNT = 16
ALWAYS = SpeculationOptions(depth=4, fixed=True)


def answers(
    runner: Any,
    texts: Sequence[Sequence[int]],
    asked: Sequence[SamplingParams],
    options: EngineOptions,
    drafter: Any = None,
) -> tuple[list[list[int]], dict[str, int]]:
    """Tokens of each request, and the engine's counts."""
    engine = Engine(runner, options=options, drafter=drafter)
    made: dict[int, list[int]] = {
        engine.add(text, one): [] for text, one in zip(texts, asked, strict=True)
    }
    while engine.busy:
        for event in engine.step():
            made[event.request] += [token.id for token in event.tokens]
    return list(made.values()), engine.counts()


WAYS = {"roomy": (1024, EngineOptions(512, 8)), "all at once": (60, EngineOptions(24, 4))}
DRAFTS = ("ngram", "suffix", "small model")


def drafter(kind: str, model: Any) -> Speculator:
    """One that always drafts. The small model is the model itself: it is nearly always right."""
    if kind != "small model":
        return Speculator(LookUp(kind == "suffix"), ALWAYS)
    import copy

    return Speculator(SmallModel(copy.deepcopy(model), 1024, 8, beside=2), ALWAYS)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, "all at once") for kind in ("llama", "gpt2", "bloom", "mixtral")),
        *(pytest.param(kind, "roomy", marks=pytest.mark.full) for kind in ("llama", "bloom")),
    ],
)
def test_greedy_answers_are_those_of_transformers_one_by_one(kind: str, way: str) -> None:
    model, texts = tiny(kind), prompts((3, 22, 1, 9), shared=16)
    want = [one_by_one(model, text, COUNT)[0] for text in texts]
    asked = [SamplingParams(max_tokens=COUNT, temperature=0)] * len(texts)
    tokens, options = WAYS[way]
    for draft in DRAFTS:
        spec = drafter(draft, model)
        runner = LocalRunner(model, cache_tokens=tokens, block_size=4)
        got, counts = answers(runner, texts, asked, options, spec)
        runner.close()
        assert got == want, draft
        assert counts["drafted_tokens"] > 0
        if draft == "small model":
            assert counts["accepted_tokens"] > COUNT
        # That the way was gone at all: prompts in chunks, beginnings shared, little room.
        assert (counts["preemptions"] > 0) == (way == "all at once")
        assert counts["prefix_cached_tokens"] > 0


@pytest.mark.parametrize("draft", DRAFTS)
def test_sampled_answers_are_those_without_drafts_draw_for_draw(draft: str) -> None:
    model, texts = tiny("llama"), prompts((3, 22, 1, 9, 5), shared=8)
    asked = [
        SamplingParams(max_tokens=COUNT, temperature=0.7, seed=1),
        SamplingParams(max_tokens=COUNT, temperature=1.3, top_p=0.8, seed=2),
        SamplingParams(max_tokens=COUNT, temperature=0.5, repetition_penalty=1.3, seed=3),
        SamplingParams(max_tokens=COUNT, temperature=1.0, top_k=5, seed=4, speculate=False),
        SamplingParams(max_tokens=COUNT, temperature=0),
    ]
    runs = []
    for one in (None, drafter(draft, model)):
        runner = LocalRunner(model, cache_tokens=1024, block_size=4)
        runs.append(answers(runner, texts, asked, EngineOptions(64, 8), one))
        runner.close()
    assert runs[0][0] == runs[1][0]
    assert runs[1][1]["drafted_tokens"] > 0


def test_a_request_may_go_without_drafts() -> None:
    seen: list[int] = []

    class Watched(LookUp):
        def propose(self, wanted: Sequence[Wanted], depth: int) -> Mapping[int, Proposal]:
            seen.extend(one.sequence for one in wanted)
            return super().propose(wanted, depth)

    asked = [SamplingParams(max_tokens=9, temperature=0, speculate=on) for on in (True, False)]
    spec = Speculator(Watched(), ALWAYS)
    answers(Slots(40, 4), [[1, 2, 3], [4, 3, 2]], asked, EngineOptions(64, 8), spec)
    assert set(seen) == {0}


# Logits of a token after each beginning, over a vocabulary of 6.
LOGITS = {
    front: torch.randn(6, generator=torch.Generator().manual_seed(number)) * 1.5
    for number, front in enumerate(
        front for size in range(3) for front in itertools.product(range(6), repeat=size)
    )
}
SAMPLING = SamplingParams(max_tokens=5, temperature=0.8, top_p=0.9)


def chances(front: tuple[int, ...], shift: float = 0.0) -> torch.Tensor:
    """Distribution of the next token; with a shift that of a draft which is not quite right."""
    logits = LOGITS[front] + shift * torch.linspace(-1, 1, 6)
    return probabilities(logits[None], SAMPLING, [DrawRow(SAMPLING, 0, 0, 0)])[0]


def check_enumerated(counted: Counter[tuple[int, ...]]) -> None:
    """Compares counts of answers of three tokens with their probabilities, by chi-square."""
    from scipy.stats import chisquare

    count, want = sum(counted.values()), {}
    for whole in itertools.product(range(6), repeat=3):
        fronts = [whole[:size] for size in range(3)]
        want[whole] = math.prod(float(chances(f)[t]) for f, t in zip(fronts, whole, strict=True))
    assert {whole for whole in want if want[whole]} >= set(counted)
    # Cells of fewer than ten answers are counted together.
    known = [whole for whole in want if want[whole] * count >= 10]
    got = [counted[whole] for whole in known]
    right = [want[whole] * count for whole in known]
    if (rest := count - sum(right)) >= 10:
        got, right = [*got, count - sum(got)], [*right, rest]
    right = [value * sum(got) / sum(right) for value in right]
    assert len(known) > 15
    assert chisquare(got, right).pvalue > 1e-4  # the seeds are fixed: this does not vary


class Known(Slots):
    """A runner whose logits after a prompt of one token are `LOGITS`."""

    def collect(self) -> torch.Tensor:
        spans = self.flights[0].spans
        super().collect()
        rows = [
            LOGITS[tuple(self.history(span, token)[1:])[:2]]
            for span in spans
            for token in range(len(span.tokens) - span.outputs, len(span.tokens))
        ]
        return torch.stack(rows) if rows else torch.zeros(0, 6)


class Guess(Proposer):
    """Chains and trees that are always the same, or drawn as the model's tokens will be."""

    name, free = "guess", True

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def propose(self, wanted: Sequence[Wanted], depth: int) -> Mapping[int, Proposal]:
        made = {}
        for one in wanted:
            if one.most < 2:
                continue
            if self.kind == "chain":
                made[one.sequence] = Proposal([2, 4], [-1, 0], [0.5] * 2)
            elif self.kind == "tree":
                made[one.sequence] = Proposal([2, 4, 1, 0, 5], [-1, 0, -1, 0, 2], [0.5] * 5)
            else:
                made[one.sequence] = self._drawn(one)
        return made

    def _drawn(self, one: Wanted) -> Proposal:
        tokens = list(one.tokens[1:])
        while len(tokens) < min(len(one.tokens) + 1, len(one.tokens) - 1 + one.most):
            logits = LOGITS[tuple(tokens[:2])] + 0.5 * torch.linspace(-1, 1, 6)
            row = DrawRow(one.sampling, one.seed, one.sample, len(tokens))
            tokens += [token.id for token in draw(logits[None], [row]) if token is not None]
        drawn = tokens[len(one.tokens) - 1 :]
        return Proposal(drawn, list(range(-1, len(drawn) - 1)), [0.5] * len(drawn))


@pytest.mark.parametrize("kind", ["chain", "tree", "drawn alike"])
@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=pytest.mark.full)])
def test_sampled_answers_have_the_distribution_of_enumeration(kind: str, count: int) -> None:
    spec = Speculator(Guess(kind), SpeculationOptions(depth=2, nodes=5, fixed=True))
    engine = Engine(Known(800, 4, vocabulary=6), options=EngineOptions(800, 100), drafter=spec)
    made: dict[tuple[int, int], list[int]] = {}
    for seed in range(count // 100):
        engine.add([0], dataclasses.replace(SAMPLING, seed=seed, n=100))
    while engine.busy:
        for event in engine.step():
            answer = made.setdefault((event.request, event.sample), [])
            answer += [token.id for token in event.tokens]
    assert len(made) == count
    # The first token is that of the prompt; the two behind it are drafted.
    check_enumerated(Counter(tuple(answer[:3]) for answer in made.values()))
    assert spec.stats.accepted > count / 20


def test_many_tokens_are_drawn_as_few_are() -> None:
    """More than have noise of their own: the rest are drawn together, then one of them."""
    from scipy.stats import chisquare

    count = 20_000
    logits = torch.linspace(0, 2, 150)[torch.randperm(150, generator=torch.Generator())]
    for sampling in (SamplingParams(), SamplingParams(top_p=0.97)):
        rows = [DrawRow(sampling, seed, 0, 0) for seed in range(count)]
        parts = [
            draw(logits.expand(5000, 150), rows[at : at + 5000]) for at in range(0, count, 5000)
        ]
        counted = Counter(token.id for part in parts for token in part if token is not None)
        want = probabilities(logits[None], sampling, rows[:1])[0].double()
        known = [token for token in range(150) if want[token] > 0]
        assert set(counted) <= set(known)
        found = chisquare(
            [counted[t] for t in known], [float(want[t] / want.sum()) * count for t in known]
        )
        assert found.pvalue > 1e-4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 4))
def test_ngram_lookup_equals_search(tokens: list[int], cut: int) -> None:
    table, read = Followers(longest=4, shortest=1), 0
    for end in range(0, len(tokens) + 1, cut):
        table.read(tokens[:end], read)
        read = end
    tokens = tokens[:read]
    for size in range(1, 5):
        context = tuple(tokens[-size:])
        found = table.next(context)
        follow = []
        for longest in range(len(context), 0, -1):
            end = context[-longest:]
            follow = [
                tokens[at]
                for at in range(longest, len(tokens))
                if tuple(tokens[at - longest : at]) == end
            ]
            if follow:
                break
        if not follow:
            assert found is None
            continue
        most = max(Counter(follow).values())
        newest = next(t for t in reversed(follow) if Counter(follow)[t] == most)
        assert found is not None
        assert found[0] == newest
        assert 0 < found[1] < 1


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.floats(0, 1), max_size=12),
    st.integers(1, 6),
    st.floats(0, 0.5),
    st.floats(0, 1),
)
def test_as_many_guesses_are_taken_as_give_most_tokens_per_second(
    chances: list[float], sequences: int, slope: float, drafting: float
) -> None:
    cost = StepCost()
    for tokens in (1, 2, 4, 8, 16, 32):
        cost.note(tokens, 1 + slope * tokens)
    chances = sorted(chances, reverse=True)
    rates = [
        (sequences + sum(chances[:taken])) / (cost.seconds(sequences + taken) + drafting)
        for taken in range(1, len(chances) + 1)
    ]
    choice = best(chances, sequences, cost, drafting)
    plain = sequences / cost.seconds(sequences)
    if rates:
        assert choice.gain == pytest.approx(max(rates) / plain)
        assert rates[choice.taken - 1] == pytest.approx(max(rates))
    else:
        assert (choice.taken, choice.gain) == (0, 1.0)


def test_only_sizes_near_measured_ones_are_tried() -> None:
    cost = StepCost()
    cost.note(222, 0.36)
    assert not cost.measured(64), "a step without drafts comes first"
    for _ in range(3):
        cost.note(64, 0.1)
    assert cost.measured(64)
    few = StepCost()
    few.note(4, 1.0)
    assert best([1.0] * 40, 4, few, 0.0).taken == 4, "8 tokens at most"
    few.note(8, 2.0)  # compute-bound
    assert best([0.9] * 40, 4, few, 0.0).gain < 1.1
    # A tile of rows more: 17 tokens cost more than 16, although they are almost as many.
    tiles = StepCost()
    for tokens, seconds in ((16, 1.0), (17, 1.9), (32, 2.0)) * 4:
        tiles.note(tokens, seconds)
    assert float(tiles.seconds(17)) > 1.5 * float(tiles.seconds(16))


def test_a_first_forward_that_was_disturbed_is_forgotten() -> None:
    cost = StepCost()
    for seconds in (1.0, 0.1, 0.1, 0.1):
        cost.note(16, seconds)
    assert cost.seconds(16) == pytest.approx(0.1, rel=0.2)


def test_seconds_are_learnt_and_never_fall_with_tokens() -> None:
    cost, chance = StepCost(), random.Random(0)

    def true(tokens: int) -> float:
        return 0.01 * max(1.0, tokens / 6)

    for _ in range(300):
        tokens = chance.choice([1, 2, 3, 5, 8, 13, 30, 60])
        cost.note(tokens, true(tokens) * chance.uniform(0.8, 1.25))
    values = [cost.seconds(tokens) for tokens in range(1, 61)]
    assert values == sorted(values)
    for tokens in (1, 4, 8, 16, 30, 60):
        assert cost.seconds(tokens) == pytest.approx(true(tokens), rel=0.25)
    for _ in range(60):  # all becomes twice as slow, of which only one size is seen
        cost.note(1, 2 * true(1))
    assert cost.seconds(60) == pytest.approx(2 * true(60), rel=0.3)


def test_confidences_converge_to_acceptance_rates() -> None:
    rate, chance = AcceptanceRate(), random.Random(0)
    assert rate.chance("greedy", 0.9) == pytest.approx(0.9)
    for _ in range(2000):
        sure = chance.random()
        rate.learn("greedy", sure, chance.random() < sure / 2)
    for sure in (0.25, 0.55, 0.85):
        assert rate.chance("greedy", sure) == pytest.approx(sure / 2, abs=0.1)
    assert rate.chance(4, 0.85) == pytest.approx(0.85)  # another kind begins with what is said
    for number in range(100):  # a confidence not seen yet is corrected by those that were
        rate.learn(4, 0.85, number % 10 == 0)
    assert rate.chance(4, 0.45) < 0.1


class Coin(Proposer):
    """Guesses that are right with a chance, of which the speculator is told another."""

    name = "coin"

    def __init__(
        self, right: float, sure: float, free: bool, seconds: float = 0.0, reading: float = 0.0
    ) -> None:
        self.right, self.sure, self.free, self.seconds = right, sure, free, seconds
        self.random, self.asked, self.clock = random.Random(0), 0, 0.0
        # Seconds of reading a text of 100 tokens, and the texts that were read.
        self.reading, self.read = reading, set[int]()

    def unread(self, one: Wanted) -> int:
        return 100 if self.reading and one.sequence not in self.read else 0

    def propose(self, wanted: Sequence[Wanted], depth: int) -> Mapping[int, Proposal]:
        self.asked += len(wanted)
        self.apart = self.reading * len({one.sequence for one in wanted} - self.read)
        self.read |= {one.sequence for one in wanted}
        self.clock += self.seconds * depth + self.apart
        made = {}
        for one in wanted:
            # The stand-in says the sum of all before, so that what is right can be known.
            tokens, history = [], list(one.tokens)
            for _ in range(min(depth, one.most)):
                token = said(history)
                tokens.append(token if self.random.random() < self.right else (token + 1) % 7)
                history.append(token)
            made[one.sequence] = Proposal(
                tokens, list(range(-1, len(tokens) - 1)), [self.sure] * len(tokens)
            )
        return made


def said(history: Sequence[int]) -> int:
    return (history[-1] * 3 + len(history)) % 7


def simulated(
    patch: pytest.MonkeyPatch,
    coin: Coin,
    sequences: int,
    slope: float,
    rounds: int = 600,
    slower: float = 1.0,
    life: int = 10**6,
) -> tuple[float, Any]:
    """Tokens per second over those without drafts, where a step of n tokens takes 1 + slope x n.

    The first steps without drafts were `slower` than that. After `life` tokens, another request
    takes a sequence's place.

    Returns:
        The gain in the second half of the rounds, and the speculator.
    """
    spec = Speculator(coin, SpeculationOptions(depth=6))
    patch.setattr("gulliver.serve.speculative.speculator.perf_counter", lambda: coin.clock)
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for _ in range(10 if slower > 1 else 1):
            spec.cost.note(tokens, (1 + slope * tokens) * (slower if tokens <= sequences else 1))
    texts = {number: [number % 7, 1] for number in range(sequences)}
    asked, gains = SamplingParams(temperature=0), [0.0, 0.0]
    for number in range(rounds):
        begun = coin.clock
        for old in [n for n, text in texts.items() if len(text) >= life]:
            spec.dropped(old)
            texts[old + sequences] = texts.pop(old)[:2]
        wanted = [
            Wanted(n, t, len(t) - 1, (), max(1, min(99, life - len(t))), asked)
            for n, t in texts.items()
        ]
        drafts, made, tokens = spec.draft(wanted, 10_000), 0, 0
        for one in wanted:
            text = texts[one.sequence]
            draft = drafts.get(one.sequence)
            tokens += 1 + (len(draft.tokens) if draft else 0)
            right = [said(text)]
            for _ in range(7):
                right.append(said([*text, *right]))
            _, path = walk(draft, lambda row, depth: right[depth])  # noqa: B023
            text += right[: len(path) + 1]
            made += len(path) + 1
        seconds = 1 + slope * tokens
        spec.ran(Batch(0, [Span(0, 0, [0] * tokens, [], tokens)]), seconds)
        if number >= rounds // 2:
            gains[0] += made
            gains[1] += seconds + coin.clock - begun
    return gains[0] / gains[1] * (1 + slope * sequences) / sequences, spec


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize(
    ("right", "slope", "sequences"), [(0.1, 0.05, 4), (0.5, 1.0, 8), (0.9, 2.0, 32), (0.0, 0.01, 2)]
)
def test_unprofitable_drafts_are_disabled_with_reason(
    right: float, slope: float, sequences: int, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However sure the proposer is. A step of one token takes 1 + slope seconds.
    coin = Coin(right, 0.95, free, 0.0 if free else 0.05)
    gain, spec = simulated(monkeypatch, coin, sequences, slope)
    assert 0.97 < gain < 1.06
    assert "times the plain tokens per second" in str(spec) or "nothing to propose" in str(spec)


def test_drafts_that_only_seemed_to_pay_are_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    # 16 guesses a step, of which a third is right, make it take 1.9 times as long.
    gain, spec = simulated(monkeypatch, Coin(0.35, 0.5, True), 16, 0.5, 400, slower=2.0)
    assert spec.stats.drafted > 3, "else nothing was tested"
    assert 0.97 < gain < 1.05


def test_trials_take_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    coin = Coin(1.0, 0.9, False, 5.0)  # guessing one token takes longer than five steps
    spec = Speculator(coin, SpeculationOptions(depth=4))
    monkeypatch.setattr("gulliver.serve.speculative.speculator.perf_counter", lambda: coin.clock)
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        spec.cost.note(tokens, 1 + 1e-4 * tokens)
    asked = SamplingParams(temperature=0)
    wanted = [Wanted(n, [n, 1], 1, (), 99, asked) for n in range(16)]
    for _ in range(5000):
        if not spec.rests(len(wanted)):
            assert spec.draft(wanted, 1000) == {}
        for one in wanted:
            one.tokens.append(said(one.tokens))  # type: ignore[attr-defined]
        spec.ran(Batch(0, [Span(n, 0, [1], [], 1) for n in range(16)]), 1.0)
    assert 0 < coin.clock < 0.015 * 5000
    assert spec.stats.rounds == 5000
    assert not spec.pays(16)


@pytest.mark.parametrize("seconds", [0.0, 2.0])
def test_choosing_guesses_is_a_cost(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    coin, ranked = Coin(0.6, 0.6, True), Speculator._ranked

    def slow(*given: Any) -> Any:
        coin.clock += seconds
        return ranked(*given)

    monkeypatch.setattr(Speculator, "_ranked", slow)
    gain, _ = simulated(monkeypatch, coin, 1, 0.05)
    assert 0.97 < gain < 1.03 if seconds else gain > 1.5


@pytest.mark.parametrize(("life", "pays"), [(12, False), (1000, True)])
def test_reading_a_text_is_a_cost(life: int, pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Drafts are twice as fast, but reading a text takes as long as ten steps.
    gain, _ = simulated(monkeypatch, Coin(0.7, 0.7, False, 0.01, 20.0), 4, 0.02, 1200, life=life)
    assert gain > 1.5 if pays else 0.97 < gain < 1.03


def test_texts_beyond_the_context_of_a_draft_are_never_read() -> None:
    class Short(ModelDraft):
        def _run(self, news: Any, rows: bool) -> torch.Tensor:
            raise AssertionError("nothing fits")

    draft = Short(DraftCache(16, 4), 40)
    fits, long = (Wanted(n, [1] * n, 0, (), 99, SamplingParams()) for n in (30, 60))
    assert draft.propose([long], 4) == {}
    assert [draft.unread(fits), draft.unread(long)] == [30, 0]


def test_a_slow_first_draft_does_not_disable_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    coin, proposed = Coin(0.9, 0.9, True), Coin.propose

    def slow(self: Coin, *given: Any) -> Any:
        self.clock += 0.0 if self.asked else 50.0
        return proposed(self, *given)

    monkeypatch.setattr(Coin, "propose", slow)
    gain, _ = simulated(monkeypatch, coin, 1, 0.01, rounds=100)
    assert gain > 1.5


@pytest.mark.parametrize("free", [True, False])
def test_profitable_drafts_are_enabled_despite_low_prior(
    free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gain, spec = simulated(monkeypatch, Coin(0.9, 0.3, free, 0.02), 4, 0.01)
    assert gain > 2.0
    assert not spec.why
    assert spec.stats.acceptance()[0] == pytest.approx(0.9, abs=0.06)


def test_drafts_of_another_vocabulary_are_refused(tmp_path: Any) -> None:
    import transformers

    small = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=64,
        )
    )
    runner = LocalRunner(tiny("llama"), cache_tokens=256)
    with pytest.raises(GulliverError, match=r"vocabulary of 50 tokens.* 67"):
        Engine(runner, drafter=Speculator(SmallModel(small, 256)))
    runner.close()
    with pytest.raises(GulliverError, match=r"speculation=.*draft.*lookup"):
        make_speculator("n-gram")
    with pytest.raises(GulliverError, match="depth is 0"):
        SpeculationOptions(depth=0)
