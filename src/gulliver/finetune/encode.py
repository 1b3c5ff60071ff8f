"""Tokenizes conversations, and locates the assistant's tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gulliver.errors import GulliverError
from gulliver.finetune.rows import BadRow, TextSample

Array = np.ndarray[Any, Any]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
SHOWN = 8  # number of tokens around a mismatch to show in an error message

MARK_THEM = "mark the answers in the template with {% generation %}, or use --answers-only no"


# [Note: masks of conversations] A chat template is a program: what it writes for one message may
# depend on later ones. So answer tokens are never guessed from the text. If the template marks
# answers (``{% generation %}``), the marks are used. Otherwise the prefix property must hold: the
# conversation up to an answer, including the generation prompt, must be a token-level prefix of the
# whole conversation, and so must the conversation including that answer. The tokens in between are
# the answer. Both are checked for every answer of every conversation. A template that breaks the
# property (for example by dropping earlier reasoning) has no such mask: training would differ from
# inference.
class BadChat(Exception):
    """A conversation that the template rejects."""


def marks_answers(tokenizer: Any) -> bool:
    """Whether the chat template itself marks the assistant's tokens."""
    return tokenizer.is_fast and _MARK.search(tokenizer.get_chat_template()) is not None


def check_template(tokenizer: Any) -> None:
    try:
        tokenizer.get_chat_template()
    except ValueError:
        raise GulliverError(
            "the rows are conversations, but the tokenizer has no chat template; set "
            "--chat-template FILE (for example to that of the instruct model), or use rows with "
            "prompt and completion"
        ) from None


def marked_tokens(tokenizer: Any, sample: TextSample) -> tuple[list[int], list[int]]:
    """Returns the tokens of a conversation and the template's mask of replies, both [T]."""
    found = _applied(
        tokenizer,
        sample,
        len(sample.messages),
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},
    )
    return found["input_ids"], found["assistant_masks"]


def chat_texts(tokenizer: Any, sample: TextSample, answers_only: bool) -> list[str]:
    """Renders a conversation in full and, for each reply, up to its start and up to its end."""
    count = len(sample.messages)
    texts = [_applied(tokenizer, sample, count, tokenize=False)]
    answers = _answers(sample)
    if answers_only and not answers:
        raise BadChat("it begins with an answer, without a message before it")
    for number in answers if answers_only else ():
        asked = _applied(tokenizer, sample, number, tokenize=False, add_generation_prompt=True)
        is_last = number + 1 == count
        answered = texts[0] if is_last else _applied(tokenizer, sample, number + 1, tokenize=False)
        texts += [asked, answered]
    return texts


def answer_mask(tokenizer: Any, sample: TextSample, tokens: Sequence[list[int]]) -> Array:
    """Locates the replies in a conversation, and checks that prefixes render consistently."""
    whole, parts = tokens[0], tokens[1:]
    learnt = np.zeros(len(whole), dtype=bool)
    for number, asked, answered in zip(_answers(sample), parts[::2], parts[1::2], strict=True):
        for part in (asked, answered):
            if whole[: len(part)] != part:
                _refuse_template(tokenizer, sample, number, part, whole)
        learnt[len(asked) : len(answered)] = True
    return learnt


def _answers(sample: TextSample) -> list[int]:
    # A greeting does not answer anything: it is context and not trained.
    return [n for n, one in enumerate(sample.messages) if n and one["role"] == "assistant"]


def _applied(tokenizer: Any, sample: TextSample, messages: int, **options: Any) -> Any:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            list(sample.messages[:messages]), tools=sample.tools, **options
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise BadChat(f"the chat template rejects it: {error}") from error


def _refuse_template(
    tokenizer: Any, sample: TextSample, number: int, part: list[int], whole: list[int]
) -> None:
    pairs = zip(part, whole, strict=False)
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(part), len(whole)))
    around = slice(max(0, place - SHOWN), place + SHOWN)
    here, there = tokenizer.decode(part[around]), tokenizer.decode(whole[around])
    if tokenizer.decode(whole).startswith(tokenizer.decode(part)):
        raise GulliverError(
            f"{sample.source}: before and in message {number + 1}, one token spans the end of "
            f"...{here!r} and the text after it (...{there!r}), so the answer mask would not be "
            f"exact; end the prompt with a special token or a line break, or {MARK_THEM}"
        )
    raise GulliverError(
        f"{sample.source}: the chat template renders the conversation up to message {number + 1} "
        f"as ...{here!r}, but as ...{there!r} if more follows, so the answer mask would not be "
        f"exact; {MARK_THEM}"
    )


# Converts samples to tokens and labels, and splits long texts.


AT_ONCE = 256  # number of samples per tokenizer call, which its threads share


# [Note: each token once] The first token of a sequence is never trained, because nothing precedes
# it. Windows of a long text therefore overlap by one token: the last of a window is the first of
# the next, where it is context only. So every token of a text except its first is trained exactly
# once.
@dataclass(frozen=True, eq=False)
class Example:
    """A training sequence.

    Attributes:
        ids: tokens, ``[T]``.
        answer: whether each token is trained on, ``[T]``; always False for the first.
        source: file and line of its origin.
    """

    ids: Array
    answer: Array
    source: str

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def learnt(self) -> int:
        """Number of tokens to train on."""
        return int(self.answer.sum())


def load_tokenizer(folder: Path, chat_template: Path | None = None) -> Any:
    """Loads the tokenizer of a model folder.

    Args:
        folder: folder of the model.
        chat_template: file with a Jinja template that replaces the tokenizer's own.

    Raises:
        GulliverError: the folder has no tokenizer, or the template cannot be read.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise GulliverError(
            f"{folder} has no tokenizer; copy the model's tokenizer.json and "
            "tokenizer_config.json into it"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # transformers raises arbitrary exceptions for broken files.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise GulliverError(f"the tokenizer of {folder} cannot be read: {reason[0]}") from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise GulliverError(f"--chat-template {chat_template}: {error}") from error
    return tokenizer


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)


@dataclass
class Encoder:
    """Converts samples to examples."""

    # Tokenizer of transformers.
    tokenizer: Any
    # Maximum sequence length in tokens.
    length: int
    # Whether prompts are context and not trained.
    answers_only: bool
    # Whether long conversations are truncated; otherwise they are bad rows.
    cut: bool = True
    # Counts of truncated texts, split texts, and so on.
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.begin, self.end = edges(self.tokenizer)

    def encode(self, samples: Sequence[TextSample]) -> Iterator[list[Example] | BadRow]:
        """Yields the examples of each sample (one, or several windows), or why there are none."""
        chats = bool(samples and samples[0].messages)
        if chats:
            check_template(self.tokenizer)
        marked = chats and self.answers_only and marks_answers(self.tokenizer)
        way = self._marked if marked else self._chats if chats else self._answers
        for start in range(0, len(samples), AT_ONCE):
            yield from way(samples[start : start + AT_ONCE])

    @property
    def masks(self) -> str:
        return "template marks" if marks_answers(self.tokenizer) else "checked prefixes"

    def _marked(self, samples: Sequence[TextSample]) -> Iterator[list[Example] | BadRow]:
        for sample in samples:
            try:
                ids, marks = marked_tokens(self.tokenizer, sample)
            except BadChat as error:
                yield BadRow(sample.source, str(error))
            else:
                yield self._cut(sample, ids, np.array(marks, dtype=bool))

    def _chats(self, samples: Sequence[TextSample]) -> Iterator[list[Example] | BadRow]:
        written: list[list[str] | BadRow] = []
        for sample in samples:
            try:
                written.append(chat_texts(self.tokenizer, sample, self.answers_only))
            except BadChat as error:
                written.append(BadRow(sample.source, str(error)))
        texts = [text for one in written if isinstance(one, list) for text in one]
        tokens = iter(self._tokens(texts))
        for sample, one in zip(samples, written, strict=True):
            if isinstance(one, BadRow):
                yield one
                continue
            found = list(islice(tokens, len(one)))
            learnt = np.ones(len(found[0]), dtype=bool)
            if self.answers_only:
                learnt = answer_mask(self.tokenizer, sample, found)
            yield self._cut(sample, found[0], learnt)

    def _cut(self, sample: TextSample, ids: list[int], learnt: Array) -> list[Example] | BadRow:
        if len(ids) > self.length and not self.cut:
            return BadRow(sample.source, f"conversation too long: {len(ids)} tokens")
        found = _example(ids[: self.length], learnt[: self.length], sample.source)
        if found.learnt:
            self.counts["cut"] += len(ids) > self.length
            return [found]
        within = f"{len(ids)} tokens" if len(ids) > self.length else "empty answers"
        return BadRow(sample.source, f"no answer within the length: {within}")

    def _answers(self, samples: Sequence[TextSample]) -> Iterator[list[Example] | BadRow]:
        prompts = self._tokens([sample.prompt for sample in samples])
        wholes = self._tokens([sample.prompt + sample.answer for sample in samples])
        for sample, prompt, whole in zip(samples, prompts, wholes, strict=True):
            if whole[: len(prompt)] != prompt:
                # A token would span prompt and answer, and the model would never see the prompt as
                # it is at inference.
                self.counts["apart"] += 1
                whole = prompt + self._tokens([sample.answer])[0]
            yield self._windows(sample, len(prompt), whole)

    def _windows(self, sample: TextSample, prompt: int, whole: list[int]) -> list[Example] | BadRow:
        ids = [*self.begin, *whole, *self.end]
        learnt = np.ones(len(ids), dtype=bool)
        if self.answers_only and sample.prompt:
            learnt[: len(self.begin) + prompt] = False
        pieces = split(ids, learnt, self.length, sample.source)
        kept = [piece for piece in pieces if piece.learnt]
        self.counts["split"] += bool(kept) and len(pieces) > 1
        self.counts["without answer"] += len(pieces) - len(kept) if kept else 0
        return kept or BadRow(sample.source, "only one token, nothing to train")

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def split(ids: Sequence[int], learnt: Array, length: int, source: str) -> list[Example]:
    """Splits a text into windows of at most `length` tokens that overlap by one token.

    Args:
        ids: tokens, ``[T]``.
        learnt: whether each token is trained on, ``[T]``.
        length: maximum window length, 2 or more.
        source: file and line.
    """
    starts = range(0, max(1, len(ids) - 1), length - 1)
    return [_example(ids[at : at + length], learnt[at : at + length], source) for at in starts]


def _example(ids: Sequence[int], learnt: Array, source: str) -> Example:
    answer = np.array(learnt, dtype=bool)
    answer[:1] = False
    return Example(np.array(ids, dtype=np.int32), answer, source)


def edges(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens that begin and end a text: those added by the tokenizer, or its EOS token."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole, last = tokenizer("a")["input_ids"], tokenizer.eos_token_id
    size = len(plain)
    places = range(len(whole) - size + 1) if size else ()
    at = next((n for n in places if whole[n : n + size] == plain), None)
    if at is None:
        begin, end = [token for token in whole if token != last], []
        begin = begin if not size else []
    else:
        begin, end = whole[:at], whole[at + size :]
    return begin, end or ([] if last is None else [last])
