"""Tokens of a conversation, and which of them are the assistant's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from gulliver.errors import GulliverError
from gulliver.finetune._forms import TextSample

Array = np.ndarray[Any, Any]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
SHOWN = 8
"""Tokens around a difference that a message shows."""

MARK_THEM = "mark the answers in the template with {% generation %}, or give --answers-only no"


# [Note: masks of conversations] A chat template is a program: it may write anything, and what it
# writes of one message may depend on those after it. Which tokens are answers is therefore never
# guessed from their text. Where the template marks answers (``{% generation %}``), its marks say
# it. Elsewhere the prefix property must hold: the conversation up to an answer, with the prompt for
# one, must be the beginning of the whole conversation, token by token, and so must the conversation
# with that answer. What lies between is what the model would have had to write. Both are checked
# for every answer of every conversation. A template that breaks the property (one that drops
# earlier thoughts, say) has no such mask: what the model saw in training would not be what it sees
# when it is asked.
class BadChat(Exception):
    """A conversation that the template refuses."""


def marks_answers(tokenizer: Any) -> bool:
    """Whether the template says itself which tokens are answers."""
    return tokenizer.is_fast and _MARK.search(tokenizer.get_chat_template()) is not None


def check_template(tokenizer: Any) -> None:
    """Refuses a tokenizer without a chat template."""
    try:
        tokenizer.get_chat_template()
    except ValueError:
        raise GulliverError(
            "the rows are conversations, and the tokenizer has no chat template to write them: "
            "give --chat-template FILE (that of the instruct model, say), or rows with prompt and "
            "completion"
        ) from None


def marked_tokens(tokenizer: Any, sample: TextSample) -> tuple[list[int], list[int]]:
    """Returns the tokens [T] of a conversation, and 1 for those that the template marks [T]."""
    found = _applied(
        tokenizer,
        sample,
        len(sample.messages),
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},
    )
    return found["input_ids"], found["assistant_masks"]


def chat_texts(tokenizer: Any, sample: TextSample, answers_only: bool) -> list[str]:
    """Writes a conversation: the whole, and for each answer what is before it and up to its end."""
    count = len(sample.messages)
    texts = [_applied(tokenizer, sample, count, tokenize=False)]
    answers = _answers(sample)
    if answers_only and not answers:
        raise BadChat("begins with an answer: nothing was asked")
    for number in answers if answers_only else ():
        asked = _applied(tokenizer, sample, number, tokenize=False, add_generation_prompt=True)
        is_last = number + 1 == count
        answered = texts[0] if is_last else _applied(tokenizer, sample, number + 1, tokenize=False)
        texts += [asked, answered]
    return texts


def answer_mask(tokenizer: Any, sample: TextSample, tokens: Sequence[list[int]]) -> Array:
    """Finds the answers of a conversation, and checks the prefix property."""
    whole, parts = tokens[0], tokens[1:]
    learnt = np.zeros(len(whole), dtype=bool)
    for number, asked, answered in zip(_answers(sample), parts[::2], parts[1::2], strict=True):
        for part in (asked, answered):
            if whole[: len(part)] != part:
                _refuse_template(tokenizer, sample, number, part, whole)
        learnt[len(asked) : len(answered)] = True
    return learnt


def _answers(sample: TextSample) -> list[int]:
    # A greeting answers nothing: it is read, and not learnt.
    return [n for n, one in enumerate(sample.messages) if n and one["role"] == "assistant"]


def _applied(tokenizer: Any, sample: TextSample, messages: int, **options: Any) -> Any:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            list(sample.messages[:messages]), tools=sample.tools, **options
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise BadChat(f"the chat template refuses it: {error}") from error


def _refuse_template(
    tokenizer: Any, sample: TextSample, number: int, part: list[int], whole: list[int]
) -> None:
    pairs = zip(part, whole, strict=False)
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(part), len(whole)))
    around = slice(max(0, place - SHOWN), place + SHOWN)
    here, there = tokenizer.decode(part[around]), tokenizer.decode(whole[around])
    if tokenizer.decode(whole).startswith(tokenizer.decode(part)):
        raise GulliverError(
            f"{sample.source}: before and in message {number + 1}, ...{there!r} has a token that "
            f"begins in ...{here!r}, where the chat template ends, so no mask of answers is exact: "
            f"end what goes before an answer with a special token or a line break, or {MARK_THEM}"
        )
    raise GulliverError(
        f"{sample.source}: the chat template writes a conversation up to its message {number + 1} "
        f"as ...{here!r}, and as ...{there!r} when more follows, so no mask of answers is exact: "
        f"{MARK_THEM}"
    )
