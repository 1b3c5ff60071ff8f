"""Texts that the model continues while it trains: held-out ones, and prompts of the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gulliver.finetune._encode import Example
from gulliver.finetune._step import Learner

SHOWN = 32
"""Most tokens of a plain text that are given as its beginning."""


@dataclass(frozen=True)
class Prompt:
    """A beginning of a text."""

    # Tokens of the prompt.
    ids: list[int]
    # Tokens that follow in the data; none for a prompt of the user's.
    expected: list[int]
    # File and line that it comes from.
    source: str

    def continued(self, learner: Learner, tokenizer: Any, tokens: int) -> dict[str, str]:
        """The model's continuation, and the one in the data; every rank calls it."""
        made = learner.continuation(self.ids, tokens, tokenizer.eos_token_id)

        def text(ids: Sequence[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=True)

        return {
            "source": self.source,
            "prompt": text(self.ids),
            "made": text(made),
            "expected": text(self.expected[:tokens]),
        }


def prompts_of(
    examples: Sequence[Example], count: int, texts: Sequence[str], tokenizer: Any
) -> list[Prompt]:
    """Beginnings of some examples, evenly chosen, and of texts of the user."""
    chosen = sorted({len(examples) * n // count for n in range(count)}) if count else []
    found = [_begun(examples[number]) for number in chosen if number < len(examples)]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found.append(Prompt(list(ids), [], "--prompt"))
    return [prompt for prompt in found if prompt.ids]


def _begun(example: Example) -> Prompt:
    """A text up to its first answer; a plain text up to some tokens."""
    first = int(np.argmax(example.answer)) if example.answer.any() else len(example)
    if first <= 1:
        first = min(SHOWN, max(1, len(example) // 2))
    ids = [int(one) for one in example.ids]
    return Prompt(ids[:first], ids[first:], example.source)
