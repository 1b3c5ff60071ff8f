"""What prompts and captions say, checked before anything is made of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.dreambooth.base import TokenHandle
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


# New words of a text encoder: rows of their own next to its table of embeddings.


# [Note: only the new rows learn] Textual inversion is often done by training the whole table and
# putting all rows but the new ones back after each step. Here the new rows are a parameter of their
# own: there is nothing to put back, no gradient or optimizer state of the table, and it may be
# sharded, off-loaded and saved like any parameter.
class TokenEmbedding(nn.Module):
    """A table of embeddings with further rows."""

    def __init__(self, table: nn.Embedding, rows: Tensor) -> None:
        super().__init__()
        self.table, self.rows = table, nn.Parameter(rows)

    @property
    def weight(self) -> Tensor:
        """All rows, as one table has them."""
        return torch.cat([self.table.weight, self.rows.to(self.table.weight.dtype)])

    def forward(self, ids: Tensor) -> Tensor:
        """Embeds ids ``[..., L]``: those beyond the table are the further rows."""
        known = self.table.num_embeddings
        old = self.table(ids.clamp(max=known - 1))
        new = self.rows[(ids - known).clamp(min=0)].to(old.dtype)
        return torch.where((ids >= known)[..., None], new, old)


def add_token(tokenizer: Any, encoder: Any, token: str, initial: str | None) -> TokenHandle:
    """Adds a word to a tokenizer of transformers and to the encoder that reads it."""
    if is_known(tokenizer, token):
        raise GulliverError(
            f"--token {token} is a word of the base already: choose another one, such as <{token}>"
        )
    table = encoder.get_input_embeddings()
    known = table.num_embeddings
    if len(tokenizer) != known:
        raise GulliverError(
            f"the base's tokenizer has {len(tokenizer):,} tokens and its text encoder {known:,} "
            "embeddings: a new word would take another's place"
        )
    with torch.no_grad():
        row = table.weight.mean(0, keepdim=True)
        if initial:
            ids = tokenizer(initial, add_special_tokens=False)["input_ids"]
            unknown = tokenizer.unk_token_id
            if not ids or (unknown is not None and all(one == unknown for one in ids)):
                raise GulliverError(
                    f"--initial {initial!r} is no word of the base: name a known one"
                )
            row = table.weight[torch.tensor(ids, device=table.weight.device)].mean(0, keepdim=True)
        wrapped = TokenEmbedding(table, row.clone())
    add_word(tokenizer, token)
    encoder.set_input_embeddings(wrapped)
    return TokenHandle(token, (known,), wrapped.rows)
