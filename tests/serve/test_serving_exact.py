"""Logits and tokens of the serving engine against transformers, one request at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gulliver.serve import (
    Batch,
    Draft,
    Drafter,
    Engine,
    EngineOptions,
    LocalRunner,
    SamplingParams,
    Span,
)
from gulliver.serve.attention import LayerShape, Pages
from gulliver.serve.weights import SERVED
from tests.serve.serving_models import Recording, one_by_one, prompts, tiny

CLOSE = 1e-5
COUNT = 10
ROOMY, TIGHT = 1024, 64
"""Tokens of a cache: for all requests at a time, and for hardly two."""


def served(
    model: Any,
    texts: list[list[int]],
    cache_tokens: int,
    options: EngineOptions,
    drafter: Any = None,
) -> tuple[list[list[int]], list[dict[int, Tensor]], dict[str, int]]:
    """Answers of `COUNT` tokens, their logits by place, and the engine's counts."""
    runner = Recording(LocalRunner(model, cache_tokens=cache_tokens, block_size=4))
    engine = Engine(runner, options=options, drafter=drafter)
    asked = SamplingParams(max_tokens=COUNT, temperature=0)
    made: dict[int, list[int]] = {engine.add(text, asked): [] for text in texts}
    while engine.busy:
        for event in engine.step():
            made[event.request] += [token.id for token in event.tokens]
    logits: list[dict[int, Tensor]] = [{} for _ in texts]
    for (number, place), row in runner.seen.items():
        logits[number][place] = row
    runner.close()
    return list(made.values()), logits, engine.counts()


WAYS = {
    "batched": (ROOMY, EngineOptions(512, 8, False)),
    "chunked": (ROOMY, EngineOptions(11, 8, False)),
    "shared": (ROOMY, EngineOptions(512, 8, True)),
    "preempted": (TIGHT, EngineOptions(512, 8, False)),
    "all at once": (TIGHT, EngineOptions(11, 4, True)),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_gives_the_logits_of_one_at_a_time(way: str) -> None:
    model, texts = tiny("llama"), prompts((3, 22, 1, 9, 14), shared=16)
    want = [one_by_one(model, text, COUNT) for text in texts]
    tokens, logits, counts = served(model, texts, *WAYS[way])
    assert tokens == [made for made, _ in want]
    for text, seen, (_, right) in zip(texts, logits, want, strict=True):
        got = torch.stack([seen[len(text) - 1 + place] for place in range(COUNT)])
        torch.testing.assert_close(got, right, atol=CLOSE, rtol=0)
    # That the way was gone at all.
    assert (counts["prefix_cached_tokens"] > 0) == (way in ("shared", "all at once"))
    assert (counts["preemptions"] > 0) == (way in ("preempted", "all at once"))
    assert (counts["steps"] > 2 * COUNT) == (way != "batched" and way != "shared")


KINDS = ("qwen2", "gpt2", "bloom", "mixtral", "mistral")


OTHERS = [pytest.param(kind, marks=pytest.mark.full) for kind in SERVED if kind not in KINDS]


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_each_family_gives_the_logits_of_one_at_a_time(kind: str) -> None:
    model, texts = tiny(kind), prompts((3, 22, 1, 9), shared=16)
    want = [one_by_one(model, text, COUNT) for text in texts]
    tokens, logits, counts = served(model, texts, *WAYS["all at once"])
    assert tokens == [made for made, _ in want]
    for text, seen, (_, right) in zip(texts, logits, want, strict=True):
        got = torch.stack([seen[len(text) - 1 + place] for place in range(COUNT)])
        torch.testing.assert_close(got, right, atol=CLOSE, rtol=0)
    assert counts["preemptions"] > 0
    assert model.config._attn_implementation != "gulliver_pages"


class Oracle(Drafter):
    """Drafts a tree: the right tokens at depth, wrong ones beside them."""

    def __init__(self, texts: list[list[int]], answers: list[list[int]]) -> None:
        self.known = [a + b for a, b in zip(texts, answers, strict=True)]

    def draft(self, wanted: Any, budget: int) -> dict[int, Draft]:
        found = {}
        for one in wanted:
            whole = next(k for k in self.known if k[: len(one.tokens)] == list(one.tokens))
            right = whole[len(one.tokens) :][: min(2, one.most)]
            if len(right) == 2 and one.most >= 4:
                wrong = [(token + 1) % 60 for token in right]
                tree = [wrong[0], right[0], wrong[1], right[1]]
                found[one.sequence] = Draft(tree, [-1, -1, 0, 1])
        return found

    def verified(self, *_: Any) -> None: ...

    def dropped(self, *_: Any) -> None: ...


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_trees_of_drafts_give_the_same_tokens_in_fewer_steps(kind: str) -> None:
    model, texts = tiny(kind), prompts((3, 22, 9), shared=16)
    want = [one_by_one(model, text, COUNT) for text in texts]
    oracle = Oracle(texts, [made for made, _ in want])
    options = EngineOptions(64, 8)
    tokens, logits, counts = served(model, texts, ROOMY, options, oracle)
    assert tokens == [made for made, _ in want]
    assert counts["accepted_tokens"] == 3 * 2 * 2  # two rounds each, of two tokens
    # What follows a tree is computed from the keys that were moved.
    for text, seen, (_, right) in zip(texts, logits, want, strict=True):
        for place, row in seen.items():
            assert (row - right[place - len(text) + 1]).abs().max() < CLOSE


def test_bfloat16_is_as_near_to_float32_as_transformers_own() -> None:
    model, texts = tiny("llama"), prompts((3, 22, 9))
    want = torch.stack([one_by_one(model, text, 1)[1][0] for text in texts])
    half = type(model)(model.config).bfloat16().eval()
    half.load_state_dict(model.state_dict())
    theirs = torch.stack([one_by_one(half, text, 1)[1][0].float() for text in texts])
    _, logits, _ = served(half, texts, ROOMY, EngineOptions(64, 8))
    ours = torch.stack([seen[len(text) - 1] for text, seen in zip(texts, logits, strict=True)])
    assert (ours - want).abs().max() <= 1.5 * (theirs - want).abs().max()
    assert (ours - want).abs().max() > 1e-4


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    places: Tensor,
    scale: float,
    slopes: Tensor | None,
) -> Tensor:
    """Attention of the last tokens [T, H, D] by its definition, in float64."""
    query, key, value = (tensor.double() for tensor in (query, key, value))
    out = torch.zeros(query.shape[1], query.shape[0], query.shape[2], dtype=torch.float64)
    group, start = query.shape[0] // key.shape[0], len(places) - query.shape[1]
    for head in range(query.shape[0]):
        for token in range(query.shape[1]):
            scores = key[head // group] @ query[head, token] * scale
            if slopes is not None:
                scores = scores + slopes[head] * (places - places[start + token])
            scores[~seen[token]] = -math.inf
            out[token, head] = scores.softmax(0) @ value[head // group]
    return out


CASES = {
    "plain": (4, None, False, False),
    "grouped": (2, None, False, False),
    "window": (2, 5, False, False),
    "slopes": (4, None, True, False),
    "tree": (2, None, False, True),
    "tree with slopes and window": (4, 7, True, True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_attention_over_pages_is_attention_by_its_definition(case: str, dtype: torch.dtype) -> None:
    heads, window, sloped, tree = CASES[case]
    torch.manual_seed(0)
    pages = Pages([LayerShape(heads, 16)], 24, 4, dtype, torch.device("cpu"))
    slopes = torch.rand(4) if sloped else None
    parents = [-1, 0, 0, 1, 2] if tree else None
    # Two sequences, their blocks mixed; one long chunk, then some tokens or a tree.
    tables = ([3, 9, 1, 14, 7, 20, 11, 0], [5, 2, 8, 10, 4, 6, 12, 13])
    key, value = (torch.randn(2, heads, 30, 16).to(dtype) for _ in range(2))
    query = torch.randn(2, 4, 30, 16).to(dtype)
    begin = (19, 23)
    first = [Span(n, 0, [0] * begin[n], tables[n], 0) for n in (0, 1)]
    second = [Span(n, begin[n], [0] * 5, tables[n], 1, parents) for n in (0, 1)]
    for number, spans in enumerate((first, second)):
        pages.begin(Batch(number, spans))
        parts = [slice(s.start, s.start + len(s.tokens)) for s in spans]
        packed = [
            torch.cat([tensor[n][:, part] for n, part in enumerate(parts)], 1)
            for tensor in (query, key, value)
        ]
        out = pages.attend(0, packed[0], packed[1], packed[2], 0.3, window, slopes)
    for n in (0, 1):
        end = begin[n] + 5
        depth = torch.tensor([0, 1, 1, 2, 2] if tree else range(5))
        places = torch.cat([torch.arange(begin[n]), begin[n] + depth])
        seen = torch.ones(5, end, dtype=torch.bool).tril(begin[n])
        if tree:
            mask = [
                [1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [1, 0, 1, 0, 0],
                [1, 1, 0, 1, 0],
                [1, 0, 1, 0, 1],
            ]
            seen[:, begin[n] :] = torch.tensor(mask, dtype=torch.bool)
        if window is not None:
            seen &= places[begin[n] :, None] - places[None] < window
        at = slice(begin[n], end)
        want = naive(query[n][:, at], key[n][:, :end], value[n][:, :end], seen, places, 0.3, slopes)
        got = out[5 * n : 5 * n + 5].double()
        limit = 2e-6 if dtype == torch.float32 else 2e-2
        assert (got - want).abs().max() < limit
