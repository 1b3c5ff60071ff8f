"""Checks prompts and captions, and adds new tokens to tokenizers and text encoders."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.dreambooth.base import TokenHandle
from gulliver.errors import GulliverError


# [Note: a new word must mean the same later] Here a new token matches only whole words.
# `load_textual_inversion` of diffusers matches it inside other words, too: "ho" would split
# "photo". A token is accepted only if both give the same ids for all prompts of a run, so that
# results load as trained.
def place_of(token: str, text: str) -> re.Match[str] | None:
    return re.search(rf"(?<!\w){re.escape(token)}(?!\w)", text, re.IGNORECASE)


def add_word(tokenizer: Any, token: str) -> None:
    """Adds to a tokenizer a token that matches only whole words."""
    from transformers import AddedToken

    # Text of added tokens is matched after normalization.
    tokenizer.add_tokens(AddedToken(token, single_word=True, normalized=True))


def is_known(tokenizer: Any, token: str) -> bool:
    """Whether a tokenizer encodes a word as a single token, or has it in its vocabulary."""
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
                    f"{where}: {token} is beyond the {most} tokens that the text encoder reads; "
                    "shorten the text before it"
                )
            if where not in reported:
                say(f"{where} has {count} tokens; those beyond {most} are truncated")
            reported.add(where)


def _length(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, truncation=False, verbose=False)["input_ids"])


def _check_inside(whole: Any, plain: Any, token: str, where: str, text: str) -> None:
    """Raises an error for a token that diffusers would find inside another word."""
    if whole(text, verbose=False)["input_ids"] == plain(text, verbose=False)["input_ids"]:
        return
    words = [w for w in text.split() if token.lower() in w.lower() and not place_of(token, w)]
    raise GulliverError(
        f"--token {token} is inside {words[0] if words else text!r} ({where}), which diffusers "
        f"would split; choose another token, such as <{token}>"
    )


# Trainable embeddings of new tokens, next to a frozen embedding table.


# [Note: only the new rows learn] Textual inversion is often done by training the whole table and
# restoring all rows except the new ones after each step. Here the new rows are a separate
# parameter: nothing needs restoring, the table has no gradient or optimizer state, and the rows can
# be sharded, offloaded and saved like any parameter.
class TokenEmbedding(nn.Module):
    """An embedding table with additional trainable rows."""

    def __init__(self, table: nn.Embedding, rows: Tensor) -> None:
        super().__init__()
        self.table, self.rows = table, nn.Parameter(rows)

    @property
    def weight(self) -> Tensor:
        return torch.cat([self.table.weight, self.rows.to(self.table.weight.dtype)])

    def forward(self, ids: Tensor) -> Tensor:
        """Embeds ids ``[..., L]``; ids beyond the table select the additional rows."""
        known = self.table.num_embeddings
        old = self.table(ids.clamp(max=known - 1))
        new = self.rows[(ids - known).clamp(min=0)].to(old.dtype)
        return torch.where((ids >= known)[..., None], new, old)


def add_token(tokenizer: Any, encoder: Any, token: str, initial: str | None) -> TokenHandle:
    if is_known(tokenizer, token):
        raise GulliverError(
            f"--token {token} is already a word of the base model; choose one such as <{token}>"
        )
    table = encoder.get_input_embeddings()
    known = table.num_embeddings
    if len(tokenizer) != known:
        raise GulliverError(
            f"the base model's tokenizer has {len(tokenizer):,} tokens, but its text encoder has "
            f"{known:,} embeddings, so a new token would replace an existing one; use another model"
        )
    with torch.no_grad():
        row = table.weight.mean(0, keepdim=True)
        if initial:
            ids = tokenizer(initial, add_special_tokens=False)["input_ids"]
            unknown = tokenizer.unk_token_id
            if not ids or (unknown is not None and all(one == unknown for one in ids)):
                raise GulliverError(
                    f"--initial {initial!r} is not a word of the base model; use an existing word"
                )
            row = table.weight[torch.tensor(ids, device=table.weight.device)].mean(0, keepdim=True)
        wrapped = TokenEmbedding(table, row.clone())
    add_word(tokenizer, token)
    encoder.set_input_embeddings(wrapped)
    return TokenHandle(token, (known,), wrapped.rows)
