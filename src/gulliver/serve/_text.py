"""`AnswerText`: tokens to text, as they come.

A token may be part of a character, and a stop text may begin in one token and end in another. So
text is given out only when later tokens cannot change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"
"""What tokenizers write for bytes that are not a whole character yet."""


class AnswerText:
    """Text of one answer."""

    # [Note: text of a token] Tokenizers write a token differently after others (a space in front,
    # one character of several tokens), so that texts of single tokens do not add up. What the last
    # tokens add is the text of a few tokens before them and of them, without the text of those
    # before alone.

    def __init__(self, tokenizer: Any | None, stop: Sequence[str], prompt: Sequence[int]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens = list(prompt[-6:])
        self._before, self._read = 0, len(self._tokens)
        self._held = ""
        self.count = 0
        """Characters so far, those that are held back as well."""

    def forked(self) -> AnswerText:
        """Another answer to the same prompt, as this one was before its first token."""
        return AnswerText(self._tokenizer, self._stop, self._tokens[: self._read])

    def add(self, token: int) -> tuple[str, bool]:
        """Adds a token."""
        if self._tokenizer is None:
            return "", False
        self._tokens.append(token)
        before = self._decode(self._tokens[self._before : self._read])
        whole = self._decode(self._tokens[self._before :])
        if len(whole) <= len(before) or whole.endswith(UNFINISHED):
            return "", False
        self._before, self._read = self._read, len(self._tokens)
        return self._released(whole[len(before) :])

    def end(self) -> str:
        """Ends the answer without a stop text: what was held back is text after all."""
        if self._tokenizer is None:
            return ""
        before = self._decode(self._tokens[self._before : self._read])
        rest = self._decode(self._tokens[self._before :])[len(before) :]
        text, _ = self._released(rest) if rest else ("", False)
        held, self._held = self._held, ""
        return text + held

    def _decode(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _released(self, text: str) -> tuple[str, bool]:
        """Adds text; what could be the beginning of a stop text is held back."""
        self.count += len(text)
        if not self._stop:
            return text, False
        self._held += text
        found = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            text, self._held = self._held[: min(found)], ""
            return text, True
        keep = max(_overlap(self._held, stop) for stop in self._stop)
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(text) :]
        return text, False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
