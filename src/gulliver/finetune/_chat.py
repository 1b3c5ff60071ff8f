"""Tokens of a conversation, and which of them are the assistant's.

[Note: masks of conversations]
A chat template is a program: it may write anything, and what it writes of one message may depend on
those after it. Which tokens are answers is therefore never guessed from their text. Where the
template marks answers (``{% generation %}``), its marks say it. Elsewhere the prefix property must
hold: the conversation up to an answer, with the prompt for one, must be the beginning of the whole
conversation, token by token, and so must the conversation with that answer. What lies between is
what the model would have had to write. Both are checked for every answer of every conversation. A
template that breaks the property (one that drops earlier thoughts, say) has no such mask: what the
model saw in training would not be what it sees when it is asked.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from gulliver.errors import GulliverError
from gulliver.finetune._forms import Sample

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
SHOWN = 8
"""Tokens around a difference that a message shows."""


class BadChat(Exception):
    """A conversation that the template refuses."""


def marks_answers(tokenizer: Any) -> bool:
    """Whether the template says itself which tokens are answers."""
    return tokenizer.is_fast and _MARK.search(tokenizer.get_chat_template()) is not None


def check_template(tokenizer: Any) -> None:
    """Refuses a tokenizer without a chat template.

    Raises:
        GulliverError: it has none; it says where one could come from.
    """
    try:
        tokenizer.get_chat_template()
    except ValueError:
        raise GulliverError(
            "the rows are conversations, and the tokenizer has no chat template to write them: "
            "give --chat-template FILE (that of the instruct model, say), or rows with prompt and "
            "completion"
        ) from None


def chat_tokens(
    tokenizer: Any, sample: Sample, answers_only: bool
) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Returns the tokens [T] of a conversation, and a mask [T] of those that are learnt.

    Raises:
        BadChat: the template does not take the conversation.
        GulliverError: the template breaks the prefix property.
    """
    if not answers_only:
        ids = _tokens(tokenizer, sample, len(sample.messages))
        return ids, np.ones(len(ids), dtype=bool)
    if marks_answers(tokenizer):
        found = _applied(tokenizer, sample, len(sample.messages), return_assistant_tokens_mask=True)
        return found["input_ids"], np.array(found["assistant_masks"], dtype=bool)
    return _by_prefixes(tokenizer, sample)


def _by_prefixes(tokenizer: Any, sample: Sample) -> tuple[list[int], np.ndarray[Any, Any]]:
    whole = _tokens(tokenizer, sample, len(sample.messages))
    learnt = np.zeros(len(whole), dtype=bool)
    for number, message in enumerate(sample.messages):
        if message["role"] != "assistant":
            continue
        if not number:
            raise BadChat("begins with an answer: nothing was asked")
        asked = _tokens(tokenizer, sample, number, add_generation_prompt=True)
        answered = _tokens(tokenizer, sample, number + 1)
        for part in (asked, answered):
            if whole[: len(part)] != part:
                _refuse_template(tokenizer, sample, number, part, whole)
        learnt[len(asked) : len(answered)] = True
    return whole, learnt


def _tokens(tokenizer: Any, sample: Sample, messages: int, **options: Any) -> list[int]:
    return _applied(tokenizer, sample, messages, **options)["input_ids"]


def _applied(tokenizer: Any, sample: Sample, messages: int, **options: Any) -> Any:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            list(sample.messages[:messages]),
            tools=sample.tools,
            return_dict=True,
            tokenizer_kwargs={"verbose": False},
            **options,
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise BadChat(f"the chat template refuses it: {error}") from error


def _refuse_template(
    tokenizer: Any, sample: Sample, number: int, part: list[int], whole: list[int]
) -> None:
    pairs = zip(part, whole, strict=False)
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(part), len(whole)))
    around = slice(max(0, place - SHOWN), place + SHOWN)
    raise GulliverError(
        f"{sample.source}: the chat template writes a conversation up to its message {number + 1} "
        f"as ...{tokenizer.decode(part[around])!r}, and as ...{tokenizer.decode(whole[around])!r} "
        "when more follows, so no mask of answers is exact: mark the answers in the template with "
        "{% generation %}, or give --answers-only no"
    )
