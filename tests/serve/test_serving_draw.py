"""Drawing of tokens: by enumeration, by chi-square, and beside transformers' own processors."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from gulliver.serve import Engine, EngineOptions, SamplingParams
from gulliver.serve.sampling import DrawRow, draw, draw_key
from tests.serve.serving_models import Slots, probabilities

LOGITS = torch.tensor([[1.0, -0.5, 2.0, 0.3, 1.4, -2.0]])


def by_hand(sampling: SamplingParams, history: tuple[int, ...], prompt: int) -> list[float]:
    """The distribution of `LOGITS` by the definitions, one token at a time."""
    logits = LOGITS[0].tolist()
    answer = history[prompt:]
    for token in range(6):
        if token in history:
            factor = sampling.repetition_penalty
            logits[token] = logits[token] * factor if logits[token] < 0 else logits[token] / factor
        if token in answer:
            logits[token] -= sampling.presence_penalty
            logits[token] -= sampling.frequency_penalty * answer.count(token)
    if sampling.temperature == 0:
        return [float(token == max(range(6), key=logits.__getitem__)) for token in range(6)]
    logits = [logit / sampling.temperature for logit in logits]
    order = sorted(range(6), key=lambda token: -logits[token])
    kept = order[: sampling.top_k or 6]
    total = sum(math.exp(logits[token]) for token in kept)
    before, nucleus = 0.0, []
    for token in kept:
        if before < sampling.top_p:
            nucleus.append(token)
        before += math.exp(logits[token]) / total
    least = math.exp(logits[order[0]]) * sampling.min_p
    weights = [
        math.exp(logits[t]) if t in nucleus and math.exp(logits[t]) >= least else 0.0
        for t in range(6)
    ]
    return [weight / sum(weights) for weight in weights]


CHOICES = list(
    itertools.product(
        (0.0, 0.7, 1.0, 1.8),
        (0, 1, 2, 4),
        (0.2, 0.75, 1.0),
        (0.0, 0.3),
        ((1.0, 0, 0), (1.6, 0.4, 0.9)),
    )
)


def test_distributions_are_those_of_the_definitions() -> None:
    history = (5, 2, 0, 0, 4)
    for temperature, top_k, top_p, min_p, (repeat, presence, frequency) in CHOICES:
        sampling = SamplingParams(
            *(None, temperature, top_k, top_p, min_p, repeat, presence, frequency)
        )
        want = torch.tensor(by_hand(sampling, history, 2))
        got = probabilities(LOGITS, sampling, [DrawRow(sampling, 0, 0, 3, history, 2)])[0]
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0, msg=str(sampling))


def test_sampling_filters_equal_transformers() -> None:
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    torch.manual_seed(0)
    logits, history = torch.randn(8, 97) * 3, tuple(range(20))
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(30),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ]
    )(torch.tensor([history] * 8), logits.clone()).softmax(-1)
    sampling = SamplingParams(None, 0.8, 30, 0.9, 0.05, 1.3)
    got = probabilities(logits, sampling, [DrawRow(sampling, 0, 0, 0, history, 20)] * 8)
    torch.testing.assert_close(got, theirs, atol=1e-6, rtol=0)
    assert 1 < int((got > 0).sum(-1).max()) < 30


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=1.5, top_k=4),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(min_p=0.1),
    ],
    ids=("plain", "top_k", "top_p", "min_p"),
)
def test_100000_draws_have_their_distribution(sampling: SamplingParams) -> None:
    from scipy.stats import chisquare

    count, history = 100_000, (1, 4)
    rows = [DrawRow(sampling, seed, 0, 1, history, 1) for seed in range(count)]
    counted = Counter(t.id for t in draw(LOGITS.expand(count, 6), rows) if t is not None)
    want = by_hand(sampling, history, 1)
    assert {token for token, chance in enumerate(want) if chance} == set(counted)
    known = [token for token in range(6) if want[token]]
    found = chisquare([counted[t] for t in known], [want[t] * count for t in known])
    assert found.pvalue > 1e-4  # the seeds are fixed: this does not vary from run to run


def test_a_draw_is_a_function_of_seed_sample_and_place_alone() -> None:
    places = [
        draw_key(seed, sample, place)
        for seed, sample, place in itertools.product(range(3), repeat=3)
    ]
    assert len(set(places)) == 27
    assert draw_key(1, 2, 3) == draw_key(1, 2, 3)
    sampling = SamplingParams(temperature=1.3)
    rows = [DrawRow(sampling, 7, sample, 5) for sample in range(40)]
    together = [t.id for t in draw(LOGITS.expand(40, 6), rows) if t]
    alone = [t.id for row in rows for t in draw(LOGITS, [row]) if t]
    assert together == alone
    assert len(set(together)) > 2


def test_log_probabilities_are_those_of_the_model_before_any_change() -> None:
    sampling = SamplingParams(temperature=0.3, top_k=2, logprobs=3, seed=1)
    (token,) = draw(LOGITS, [DrawRow(sampling, 1, 0, 0)])
    want = LOGITS[0].log_softmax(-1)
    assert token is not None
    assert token.logprob == pytest.approx(float(want[token.id]))
    assert [one.token for one in token.likely] == [2, 4, 0]
    assert [one.logprob for one in token.likely] == pytest.approx(want[[2, 4, 0]].tolist())


@pytest.mark.parametrize("bad", [math.nan, math.inf, "nothing finite"])
def test_logits_that_are_not_finite_draw_nothing_and_leave_others_alone(bad: float | str) -> None:
    logits = LOGITS.repeat(2, 1)
    if isinstance(bad, str):
        logits[0] = -math.inf
    else:
        logits[0, 3] = bad
    rows = [DrawRow(SamplingParams(temperature=t), 0, 0, 0) for t in (1, 0)]
    first, second = draw(logits, rows)
    assert first is None
    assert second is not None
    assert second.id == 2


def test_samples_of_a_request_and_requests_of_a_seed_are_what_they_should_be() -> None:
    def answers(sequences: int, **more: int) -> list[tuple[int, int, tuple[int, ...]]]:
        runner = Loose(blocks=40, size=4, vocabulary=6)
        engine = Engine(runner, options=EngineOptions(64, sequences))
        asked = SamplingParams(max_tokens=12, temperature=2.0, seed=5, **more)
        got: dict[tuple[int, int], tuple[int, ...]] = {}
        for prompt in ([1, 2], [1, 2], [3]):
            engine.add(prompt, asked)
        while engine.busy:
            for event in engine.step():
                at = event.request, event.sample
                got[at] = (*got.get(at, ()), *(token.id for token in event.tokens))
        return [(*at, tokens) for at, tokens in sorted(got.items())]

    several = answers(8, n=2)
    assert len(several) == 6
    assert several[0][2] == several[2][2] != several[4][2]
    assert several[0][2] != several[1][2]
    assert answers(2, n=2) == several  # whatever runs beside
    assert [tokens for _, sample, tokens in several if not sample] == [t for _, _, t in answers(8)]


class Loose(Slots):
    """The stand-in with logits that leave something to chance."""

    def collect(self) -> torch.Tensor:
        return super().collect() / 9
