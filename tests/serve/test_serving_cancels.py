"""Storms of cancels: those that are left get their tokens, and all blocks come back."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gulliver.serve import Engine, EngineOptions, LocalRunner
from gulliver.serve.sampling import SamplingParams
from gulliver.serve.speculative.proposers import LookUp
from gulliver.serve.speculative.speculator import SpeculationOptions, Speculator
from tests.serve.serving_models import Slots, prompts, tiny


def asked() -> list[tuple[list[int], SamplingParams]]:
    texts = prompts((2, 5, 9, 17, 1, 12), shared=9) + prompts((3, 21, 7, 14), seed=2)
    return [
        (text, SamplingParams(4 + number, temperature=number % 2, seed=number, n=1 + number % 3))
        for number, text in enumerate(texts)
    ]


def engine_of(kind: str) -> Engine:
    if kind == "pipeline":
        runner: Any = Slots(blocks=40, size=4, max_in_flight=3)
        return Engine(runner, options=EngineOptions(48, 8))
    drafter = Speculator(LookUp(shared=True), SpeculationOptions(depth=3, fixed=True))
    runner = LocalRunner(tiny("llama"), cache_tokens=160, block_size=4)
    options = EngineOptions(48, 8)
    return Engine(runner, options=options, drafter=drafter if kind == "drafts" else None)


def tokens_of(kind: str, prompt: list[int]) -> list[int]:
    return [token % 5 for token in prompt] if kind == "pipeline" else prompt


def alone(kind: str) -> list[dict[int, list[int]]]:
    engine, found = engine_of(kind), []
    for prompt, sampling in asked():
        engine.add(tokens_of(kind, prompt), sampling)
        answers: dict[int, list[int]] = {}
        while engine.busy:
            for event in engine.step():
                answers.setdefault(event.sample, []).extend(token.id for token in event.tokens)
        found.append(answers)
    engine.runner.close()
    return found


@pytest.mark.deadline(600)
@pytest.mark.parametrize("kind", ["plain", "drafts", "pipeline"])
@pytest.mark.parametrize("cancels", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_cancels_change_no_tokens_of_others_and_free_all_blocks(kind: str, cancels: int) -> None:
    chance, want, known = random.Random(5), alone(kind), asked()
    engine = engine_of(kind)
    running: dict[int, int] = {}
    answers: dict[int, dict[int, list[int]]] = {}
    done = right = 0
    while done < cancels or running:
        while done < cancels and len(running) < 14:
            which = chance.randrange(len(known))
            number = engine.add(tokens_of(kind, known[which][0]), known[which][1])
            running[number], answers[number] = which, {}
        for number in [n for n in running if done < cancels and chance.random() < 0.12]:
            assert engine.cancel(number)
            engine.cancel(number)  # as clients do that try again
            del running[number], answers[number]
            done += 1
        for event in engine.step():
            if event.request not in running:
                assert event.finish == "cancelled"
                assert not event.tokens
                continue
            answers[event.request].setdefault(event.sample, []).extend(t.id for t in event.tokens)
        for number in [number for number in running if not engine.knows(number)]:
            assert answers.pop(number) == want[running.pop(number)]
            right += 1
    while engine.busy:
        engine.step()
    counts = engine.counts()
    assert right > cancels / 20
    assert counts["free_blocks"] == counts["blocks"]
    assert not counts["running"]
    engine.runner.close()
