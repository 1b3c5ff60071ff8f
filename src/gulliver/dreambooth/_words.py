"""What prompts and captions say, checked before anything is made of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gulliver.errors import GulliverError


# [Note: a new word must mean the same later] Here a new word is added to the tokenizer as a whole
# word. `load_textual_inversion` of diffusers adds it as plain text, which is found inside of other
# words, too: "ho" would cut "photo". Where both give the same ids for all prompts of a run, what
# was learnt is what is loaded; where they do not, the word is refused.
def place_of(token: str, text: str) -> re.Match[str] | None:
    """Where a text has a word as a whole word; None where it has not."""
    return re.search(rf"(?<!\w){re.escape(token)}(?!\w)", text, re.IGNORECASE)


def add_word(tokenizer: Any, token: str) -> None:
    """Adds a word to a tokenizer that is found as a whole word only."""
    from transformers import AddedToken

    # As of plain text that is added, its letters are those after normalization.
    tokenizer.add_tokens(AddedToken(token, single_word=True, normalized=True))


def is_known(tokenizer: Any, token: str) -> bool:
    """Whether a tokenizer has a word, or an id of its own for it where it ends a word."""
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    whole = len(ids) == 1 and ids[0] != tokenizer.unk_token_id
    return whole or token in tokenizer.get_vocab()


def check_texts(
    tokenizers: Iterable[Any],
    token: str,
    added: bool,
    texts: Mapping[str, str],
    say: Callable[[str], Any],
) -> None:
    """Refuses prompts that the text encoders would not read as they were written."""
    reported = set[str]()
    for tokenizer in tokenizers:
        most = tokenizer.model_max_length
        whole, plain = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
        if added:
            add_word(whole, token)
            plain.add_tokens(token)
        for where, text in texts.items():
            if added:
                _check_inside(whole, plain, token, where, text)
            count, found = _length(whole, text), place_of(token, text)
            if count <= most:
                continue
            if found is not None and _length(whole, text[: found.end()]) > most:
                raise GulliverError(
                    f"{where}: {token} stands beyond the {most} tokens that the text encoder "
                    "reads: shorten what precedes it"
                )
            if where not in reported:
                say(f"{where} has {count} tokens: what stands beyond {most} is not read")
            reported.add(where)


def _length(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, truncation=False, verbose=False)["input_ids"])


def _check_inside(whole: Any, plain: Any, token: str, where: str, text: str) -> None:
    """Refuses a new word that diffusers would find inside of another one."""
    if whole(text, verbose=False)["input_ids"] == plain(text, verbose=False)["input_ids"]:
        return
    words = [w for w in text.split() if token.lower() in w.lower() and not place_of(token, w)]
    raise GulliverError(
        f"--token {token} is inside of {words[0] if words else text!r} ({where}), which diffusers "
        f"would cut there: choose another one, such as <{token}>"
    )
