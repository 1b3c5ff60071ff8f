"""New words of a text encoder: rows of their own next to its table of embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gulliver.dreambooth._base import TokenHandle
from gulliver.dreambooth._words import add_word, is_known
from gulliver.errors import GulliverError


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
