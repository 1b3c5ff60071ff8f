"""Tiny models and stand-ins for the tests of the serving engine."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.serve import Batch
from gulliver.serve.batch import Facts
from gulliver.serve.sampling import DrawRow, SamplingParams, _cut, penalised
from gulliver.serve.scheduler import BlockPool
from gulliver.serve.weights import Filling, Source, build_on_meta, is_quantised
from tests.models.family_models import config_of

VOCABULARY = 67


@cache
def tiny(kind: str) -> Any:
    """A model of a type, its logits far enough apart that rounding changes no token."""
    import transformers

    sizes = {"head_dim": 16} if kind in ("llama", "mistral", "qwen3", "mixtral") else {}
    if kind in ("gpt2", "bloom", "opt"):
        # Heads of 16, which the native kernel takes.
        name = {"gpt2": "n_head", "bloom": "n_head", "opt": "num_attention_heads"}[kind]
        sizes = {name: 2}
    config = config_of("causal", kind, **sizes)
    config.initializer_range = 0.2
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompts(sizes: Sequence[int], shared: int = 0, seed: int = 1) -> list[list[int]]:
    """Random prompts; the first `shared` tokens are the same in all."""
    random = torch.Generator().manual_seed(seed)

    def some(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=random).tolist()

    front = some(shared)
    return [front + some(size) for size in sizes]


def one_by_one(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], Tensor]:
    """Greedy tokens and their logits [count, V], as transformers makes them of one prompt."""
    made = model.generate(
        torch.tensor([list(prompt)]),
        max_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return made.sequences[0, len(prompt) :].tolist(), torch.cat(made.logits)


class Recording:
    """A runner that keeps the logits of each sequence by their place."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.seen: dict[tuple[int, int], Tensor] = {}
        self._batches: deque[Batch] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def submit(self, batch: Batch) -> None:
        self._batches.append(batch)
        self.runner.submit(batch)

    def collect(self) -> Tensor:
        logits, row = self.runner.collect(), 0
        for span in self._batches.popleft().spans:
            for number in range(span.outputs):
                if span.parents is None:
                    place = span.start + len(span.tokens) - span.outputs + number
                    self.seen[span.sequence, place] = logits[row]
                row += 1
        return logits


def next_token(history: Sequence[int], vocabulary: int) -> int:
    """What the stand-in for a model says after some tokens."""
    digest = hashlib.blake2b(bytes(history), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocabulary


@dataclass
class Slots:
    """A runner whose cache holds tokens, and whose next token depends on all that it reads there.

    So any slot that is lost, shared by mistake, not copied or not moved changes an answer. Batches
    are run when they are collected: up to `max_in_flight` are in flight.
    """

    blocks: int
    size: int
    max_in_flight: int = 1
    vocabulary: int = 5
    context: int | None = None

    def __post_init__(self) -> None:
        self.kept = [-1] * (self.blocks * self.size)
        self.flights: deque[Batch] = deque()
        self.most = 0

    @property
    def facts(self) -> Facts:
        return Facts(self.vocabulary, self.context, self.blocks, self.size)

    def submit(self, batch: Batch) -> None:
        self.flights.append(batch)
        self.most = max(self.most, batch.tokens)

    def collect(self) -> Tensor:
        batch = self.flights.popleft()
        for source, target in batch.copies:
            for place in range(self.size):
                self.kept[target * self.size + place] = self.kept[source * self.size + place]
        moved = [self.kept[source] for source, _ in batch.moves]
        for value, (_, target) in zip(moved, batch.moves, strict=True):
            self.kept[target] = value
        for span in batch.spans:
            for place, token in enumerate(span.tokens):
                self.kept[self.slot(span, span.start + place)] = token
        rows = []
        for span in batch.spans:
            for token in range(len(span.tokens) - span.outputs, len(span.tokens)):
                said = next_token(self.history(span, token), self.vocabulary)
                rows.append(torch.nn.functional.one_hot(torch.tensor(said), self.vocabulary))
        return torch.stack(rows).float() * 9 if rows else torch.zeros(0, self.vocabulary)

    def slot(self, span: Any, place: int) -> int:
        return span.blocks[place // self.size] * self.size + place % self.size

    def history(self, span: Any, token: int) -> list[int]:
        """Tokens that a token of a span sees: the cache, and its own path."""
        path = []
        while token >= 0:
            path.append(span.start + token)
            token = token - 1 if span.parents is None else span.parents[token]
        places = [*range(span.start), *reversed(path)]
        return [self.kept[self.slot(span, place)] for place in places]

    def close(self) -> None:
        self.kept.clear()


def filled(folder: Path, quantize: str | None = None) -> Any:
    """The float32 model of a folder that may lack a tokenizer."""
    model = build_on_meta(folder, torch.float32)
    with Source(folder, model) as source:
        Filling(model, source, quantize, is_quantised(folder)).fill_all()
    return model


def probabilities(logits: Tensor, sampling: SamplingParams, rows: Sequence[DrawRow]) -> Tensor:
    """The distributions [R, V] that tokens are drawn from."""
    changed = penalised(logits, sampling, rows)
    if sampling.greedy:
        return torch.nn.functional.one_hot(changed.argmax(-1), logits.shape[-1]).to(logits.dtype)
    chances, order = _cut(changed, sampling)
    if order is not None:
        chances = torch.zeros_like(logits).scatter(-1, order, chances)
    return chances / chances.sum(-1, keepdim=True)


def check_pool(pool: BlockPool, tables: Iterable[Sequence[int]]) -> None:
    """Asserts that the counts are those of the tables, and that no block is lost."""
    counted = [0] * pool.blocks
    for table in tables:
        assert len(set(table)) == len(table), "a sequence has a block twice"
        for block in table:
            counted[block] += 1
    assert counted == pool._holders, "a block has another number of holders than it counts"
    idle = [*pool._blank, *pool._kept]
    assert len(set(idle)) == len(idle), "a block is free twice"
    assert set(idle) == {b for b, count in enumerate(counted) if not count}, "a block is lost"
    assert {d: b for b, d in pool._digest.items()} == pool._block
