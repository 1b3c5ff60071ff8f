"""Blocks and batches of the serving engine under random schedules, with a model made of numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.errors import GulliverError
from gulliver.serve import Draft, Drafter, Engine, EngineOptions, SamplingParams
from gulliver.serve.batch import Wanted, walk
from gulliver.serve.scheduler import BlockPool, extend_digests
from tests.serve.serving_models import Slots, check_pool, next_token


def expected(prompt: Sequence[int], count: int, vocabulary: int) -> list[int]:
    """What the stand-in answers to a prompt alone."""
    made = list(prompt)
    for _ in range(count):
        made.append(next_token(made, vocabulary))
    return made[len(prompt) :]


class Guesses(Drafter):
    """Drafts that are often right: chains and trees of the stand-in's own tokens and of others."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.random, self.vocabulary = random.Random(seed), vocabulary
        self.accepted = 0

    def draft(self, wanted: Sequence[Wanted], budget: int) -> Mapping[int, Draft]:
        return {one.sequence: self._of(one) for one in wanted if self.random.random() < 0.8}

    def _of(self, one: Wanted) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        for number in range(self.random.randint(1, 5)):
            parent = self.random.choice([-1, number - 1, number - 1, *range(number)])
            tokens.append(self._token(one, tokens, parents, parent))
            parents.append(parent)
        chain = parents == list(range(-1, len(tokens) - 1))
        return Draft(tokens, None if chain and self.random.random() < 0.5 else parents)

    def _token(self, one: Wanted, tokens: list[int], parents: list[int], parent: int) -> int:
        if self.random.random() < 0.3:
            return self.random.randrange(self.vocabulary)
        path = []
        while parent >= 0:
            path.append(tokens[parent])
            parent = parents[parent]
        return next_token([*one.tokens, *reversed(path)], self.vocabulary)

    def verified(self, sequence: int, draft: Draft, path: Sequence[int], tokens: int) -> None:
        self.accepted += tokens - 1

    def dropped(self, sequence: int) -> None:
        pass


REQUEST = st.tuples(
    st.integers(1, 14),  # tokens of the prompt
    st.integers(1, 9),  # tokens of the answer
    st.integers(1, 3),  # answers
    st.booleans(),  # whether it begins as the others
)


@settings(max_examples=120, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=8),
    blocks=st.integers(6, 30),
    size=st.integers(1, 5),
    depth=st.integers(1, 3),
    sequences=st.integers(3, 6),
    extra=st.integers(0, 12),
    share=st.booleans(),
    drafts=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_schedule_answers_as_one_request_alone_and_loses_no_block(
    requests: list[tuple[int, int, int, bool]],
    blocks: int,
    size: int,
    depth: int,
    sequences: int,
    extra: int,
    share: bool,
    drafts: bool,
    seed: int,
) -> None:
    runner = Slots(blocks, size, depth)
    drafter = Guesses(seed, runner.vocabulary) if drafts else None
    options = EngineOptions(sequences + extra, sequences, share)
    engine = Engine(runner, options=options, drafter=drafter)
    chance = random.Random(seed)
    waiting, want, got = list(requests), {}, {}
    cancelled: set[int] = set()
    ends: dict[tuple[int, int], str] = {}
    for _ in range(3000):
        if waiting and (chance.random() < 0.4 or not engine.busy):
            length, count, n, alike = waiting.pop()
            count = min(count, runner.facts.longest - length)
            if count > 0:
                same = random.Random(0 if alike else len(waiting))
                prompt = [same.randrange(runner.vocabulary) for _ in range(length)]
                asked = SamplingParams(max_tokens=count, temperature=0, n=n)
                number = engine.add(prompt, asked)
                want[number] = (n, expected(prompt, count, runner.vocabulary))
        if want and chance.random() < 0.03:
            number = chance.choice(list(want))
            if engine.cancel(number):
                cancelled.add(number)
        for event in engine.step():
            at = event.request, event.sample
            got.setdefault(at, []).extend(token.id for token in event.tokens)
            if event.finish:
                assert at not in ends, "an answer has ended twice"
                ends[at] = event.finish
        scheduler = engine._scheduler
        check_pool(engine._pool, [s.blocks for s in [*scheduler.running, *scheduler.waiting]])
        if not engine.busy and not waiting:
            break
    assert not engine.busy
    assert engine.counts()["free_blocks"] == blocks
    assert runner.most <= options.step_tokens
    for number, (n, answer) in want.items():
        for sample in range(n):
            made = got.get((number, sample), [])
            if number in cancelled:
                assert made == answer[: len(made)]
            else:
                assert (made, ends[number, sample]) == (answer, "length")
    assert len(ends) == sum(n for n, _ in want.values())


def test_little_room_preempts_the_youngest_and_changes_no_answer() -> None:
    runner = Slots(blocks=6, size=2)
    engine = Engine(runner, options=EngineOptions(8, 4, share_prefixes=False))
    asked = SamplingParams(max_tokens=8, temperature=0)
    first, second = engine.add([1, 2, 3], asked), engine.add([4, 1], asked)
    got: dict[int, list[int]] = {first: [], second: []}
    ended = []
    while engine.busy:
        for event in engine.step():
            got[event.request] += [token.id for token in event.tokens]
            ended += [event.request] if event.finish else []
    assert engine.counts()["preemptions"] > 0
    assert ended == [first, second]
    assert got == {first: expected([1, 2, 3], 8, 5), second: expected([4, 1], 8, 5)}


def test_equal_beginnings_share_blocks_even_within_one_batch() -> None:
    runner = Slots(blocks=40, size=4)
    engine = Engine(runner, options=EngineOptions(64, 8))
    front = [1, 2, 3, 4, 0, 1, 2, 3]
    asked = SamplingParams(max_tokens=3, temperature=0)
    made: dict[int, list[int]] = {engine.add([*front, tail], asked): [] for tail in (0, 1, 2)}
    found = {}
    while engine.busy:
        for event in engine.step():
            made[event.request] += [token.id for token in event.tokens]
            found[event.request] = event.prefix_cached
    assert list(found.values()) == [0, 8, 8]
    assert list(made.values()) == [expected([*front, tail], 3, 5) for tail in (0, 1, 2)]
    # 27 tokens of prompts, 16 of them found; the last token of an answer is never run.
    assert engine.counts()["prefix_cached_tokens"] == 16


def test_answers_fork_from_a_prompt_whose_last_token_is_a_chunk_of_its_own() -> None:
    runner = Slots(blocks=40, size=4)
    engine = Engine(runner, options=EngineOptions(8, 4), drafter=Guesses(0, 5))
    prompt = [1, 2, 3, 4, 0, 1, 2, 3, 4]
    engine.add(prompt, SamplingParams(max_tokens=9, temperature=0, n=3))
    made: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while engine.busy:
        for event in engine.step():
            made[event.sample] += [token.id for token in event.tokens]
    assert list(made.values()) == [expected(prompt, 9, 5)] * 3


def test_after_a_failure_requests_go_on_with_another_runner() -> None:
    class Failing(Slots):
        def collect(self):  # type: ignore[no-untyped-def]
            if len(self.flights[0].spans) and self.flights[0].ticket >= 3:
                raise GulliverError("stage 1 has gone")
            return super().collect()

    engine = Engine(Failing(blocks=40, size=4, max_in_flight=2), options=EngineOptions(8, 4))
    asked = SamplingParams(max_tokens=9, temperature=0)
    made: dict[int, list[int]] = {engine.add([3, number], asked): [] for number in (1, 2, 4)}
    with pytest.raises(GulliverError, match="stage 1 has gone"):  # noqa: PT012
        while engine.busy:
            for event in engine.step():
                made[event.request] += [token.id for token in event.tokens]
    with pytest.raises(GulliverError, match="may have up to 11 tokens, and this runner takes 8"):
        engine.replay(Slots(blocks=2, size=4))
    engine.replay(Slots(blocks=40, size=4))
    while engine.busy:
        for event in engine.step():
            made[event.request] += [token.id for token in event.tokens]
    assert list(made.values()) == [expected([3, number], 9, 5) for number in (1, 2, 4)]


def test_freed_blocks_stay_cached_until_reused() -> None:
    pool = BlockPool(4, 2)
    digests: list[bytes] = []
    extend_digests(digests, [1, 2, 3, 4, 5], 2)
    assert len(digests) == 2
    mine = pool.take(3)
    assert mine is not None
    for block, digest in zip(mine, digests, strict=False):
        pool.publish(block, digest)
    pool.release(mine)
    assert (pool.free, pool.kept) == (4, 2)
    other: list[bytes] = []
    extend_digests(other, [1, 2, 4, 4], 2)
    assert pool.find(other) == mine[:1]
    assert pool.find(digests) == mine[:2]
    assert pool.take(5) is None
    assert pool.take(3) is not None
    assert pool.find(digests) == mine[:1]  # the end of the beginning went first


def test_tree_verification_follows_sampled_tokens() -> None:
    draft = Draft([7, 8, 9, 5, 6], [-1, -1, 1, 2, 1])
    after = {0: 8, 2: 9, 3: 4, 1: 0, 4: 0, 5: 0}
    assert walk(draft, lambda row, depth: after[row]) == ([8, 9, 4], [1, 2])
    assert walk(Draft([3, 3]), lambda row, depth: 3) == ([3, 3, 3], [0, 1])
    assert walk(None, lambda row, depth: 3) == ([3], [])
