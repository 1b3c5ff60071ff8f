"""Drafts with ranks, streamed weights and lost runners: the answers are those of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from gulliver.serve import Engine, EngineOptions, LocalRunner, SamplingParams
from gulliver.serve.batch import RunnerLost
from gulliver.serve.speculative import SpeculationOptions, Speculator
from gulliver.serve.speculative.glide import GlideDraft
from gulliver.serve.speculative.proposers import LookUp
from gulliver.serve.speculative.small_model import SmallModel
from tests.pool import Pool
from tests.serve.serving_models import Slots, next_token, one_by_one, prompts, tiny
from tests.serve.serving_ranks import COUNT, Case, answers, reference, save
from tests.serve.test_serving_offload import limited
from tests.serve.test_speculation_glide import glide

ALWAYS = SpeculationOptions(depth=3, fixed=True)
LONG = 24
"""Tokens of an answer: tiny models repeat themselves after a few, and look-ups find that."""


def greedy(engine: Engine, texts: list[list[int]], count: int = LONG) -> list[list[int]]:
    """Greedy answers."""
    asked = SamplingParams(max_tokens=count, temperature=0)
    made: dict[int, list[int]] = {engine.add(text, asked): [] for text in texts}
    while engine.busy:
        for event in engine.step():
            assert event.error is None, event.error
            made[event.request] += [token.id for token in event.tokens]
    return list(made.values())


@pytest.mark.deadline(300)
def test_drafts_over_ranks_give_the_tokens_of_transformers(pool: Pool, tmp_path: Path) -> None:
    save(tmp_path, ["llama"])
    cases = (
        Case("llama", 2, 1, drafts="ngram"),
        Case("llama", 1, 2, drafts="ngram"),
        Case("llama", 2, 1, drafts="llama"),
    )
    made = pool.run(answers, 3, str(tmp_path), cases)[-1]
    for case, (tokens, _, counts, _) in zip(cases, made, strict=True):
        assert tokens == [right for right, _ in reference(case.kind)], case
        assert counts["drafted_tokens"] > 0, case
    assert made[-1][2]["accepted_tokens"] > COUNT, "the draft is the model itself"


ALL = [
    Case("mixtral", 2, 2, memory=400_000, drafts="ngram"),
    *(
        pytest.param(Case(kind, 2, 2, memory=400_000, drafts="ngram"), marks=pytest.mark.full)
        for kind in ("llama", "qwen2", "gpt2", "bloom")
    ),
]


@pytest.mark.deadline(300)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.kind)
def test_everything_at_once_gives_the_tokens_of_transformers(
    pool: Pool, tmp_path: Path, case: Case
) -> None:
    """Chunked prompts, shared beginnings, drafts and streamed weights over two by two ranks."""
    save(tmp_path, [case.kind])
    ((tokens, _, counts, flights),) = pool.run(answers, 5, str(tmp_path), (case,))[-1]
    assert tokens == [right for right, _ in reference(case.kind)]
    assert counts["drafted_tokens"] > 0
    assert counts["prefix_cached_tokens"] > 0
    assert flights > 0, "stages have several batches in flight"


def test_drafts_over_streamed_weights_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    runner, streamed, limit = limited(tmp_path, None, 1.5)
    texts = prompts((3, 22), shared=16)
    engine = Engine(runner, None, EngineOptions(24, 4), (), Speculator(LookUp(), ALWAYS))
    assert greedy(engine, texts) == [one_by_one(tiny("llama"), text, LONG)[0] for text in texts]
    assert engine.counts()["drafted_tokens"] > 0
    assert 0 < streamed.peak <= limit
    runner.close()


class Mortal:
    """A local runner that is lost after some batches, and another one in its place."""

    def __init__(self, model: Any, lives: list[int]) -> None:
        self._model, self._lives = model, lives
        self._left = lives.pop(0) if lives else -1
        self._runner = LocalRunner(copy.deepcopy(model), cache_tokens=512)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def collect(self) -> Any:
        self._left -= 1
        if self._left == 0:
            raise RunnerLost("stage 0 is gone")
        return self._runner.collect()

    def restarted(self) -> Mortal:
        self._runner.close()
        return Mortal(self._model, self._lives)


def proposer(kind: str, model: Any) -> Any:
    if kind == "glide":
        return GlideDraft(glide("llama"))
    return LookUp() if kind == "ngram" else SmallModel(copy.deepcopy(model), 512, beside=0)


@pytest.mark.parametrize("kind", ["ngram", "small", "glide"])
def test_drafts_go_on_after_a_runner_was_lost(kind: str) -> None:
    model, texts = tiny("llama"), prompts((3, 9, 22), shared=5)
    begun: list[Any] = []

    class Noted(Speculator):
        def begin(self, runner: Any) -> None:
            begun.append(runner)
            super().begin(runner)

    def made(lives: list[int]) -> tuple[list[list[int]], dict[str, int]]:
        drafter = Noted(proposer(kind, model), ALWAYS)
        mortal: Any = Mortal(model, lives)
        engine = Engine(mortal, None, EngineOptions(16, 4), (), drafter)
        tokens = greedy(engine, texts)
        assert engine.runner is begun[-1], "the drafter knows who verifies"
        engine.runner.close()
        drafter.close()
        return tokens, engine.counts()

    whole, _ = made([])
    assert whole == [one_by_one(model, text, LONG)[0] for text in texts]
    begun.clear()
    tokens, counts = made([5, 4, 6])
    assert tokens == whole
    assert (counts["restarts"], len(begun)) == (3, 4)
    assert counts["accepted_tokens"] > 0
    if kind == "small":
        # The draft is the model itself: what it kept over a loss is right, or guesses were wrong.
        assert counts["accepted_tokens"] == counts["drafted_tokens"]


@pytest.mark.parametrize("depth", [1, 3])
def test_drafts_are_verified_with_several_batches_in_flight(depth: int) -> None:
    slots = Slots(96, 4, max_in_flight=depth)
    drafter = Speculator(LookUp(), ALWAYS)
    engine = Engine(slots, None, EngineOptions(24, 16, False), (), drafter)
    texts = [[token % 5 for token in text] for text in prompts((12, 9, 7, 14))]
    for text, tokens in zip(texts, greedy(engine, texts), strict=True):
        history = list(text)
        for token in tokens:
            assert token == next_token(history, 5)
            history.append(token)
    assert engine.counts()["drafted_tokens"] > 0
    assert slots.most <= 24, "a batch has no more tokens than it may"
