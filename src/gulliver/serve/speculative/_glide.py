"""`Glide`: a draft of one or a few layers that looks at the target's cached keys and values.

GliDe with a CaPE (Du and others, ICML 2024, arXiv 2402.02082): each layer has attention over its
own tokens, attention over keys and values that a layer of the target has cached, as they are, and a
feed-forward part. Unlike there, the second attention has a normalization before and
after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.options import Options

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Number of the layer, query [B, H, S, D], key, value; returns [B, S, H, D]."""
Glimpse = Callable[[int, Tensor], Tensor]
"""Number of the layer, query [B, H', S, D'] of the target's heads; returns [B, S, H', D']."""


# [Note: sizes] The target's values are of the target's size (a root mean square of 2 to 3 was
# seen), and embeddings that begin at 0.02 are a hundred times smaller: an optimizer that moves all
# weights alike then moves what was seen far more than what was read, and the draft learns worse
# than one that sees nothing. So each head of what was seen is normalized, with a gain that is
# learnt, and embeddings are multiplied by the root of the width.
#
# [Note: block mask] While guesses are made the target's cache ends at the last verified token: the
# first guess sees all before it, the d-th all but d - 1. In training positions are cut into blocks
# of `block`, beginning anywhere, and a token sees the target's keys of blocks before its own: so
# each depth up to `block` is learnt as it is used. ``block=1`` is training without the mask.
#
# [Note: what is learnt] A guess is right where the target's token is met, not the text's: a draft
# learns the target's distribution of each next token, which also says more of it than one token
# does.
#
# The layers know no cache: what attends is handed to them.
@dataclass(frozen=True)
class GlideConfig(Options):
    """Sizes of a draft, and what it must know of its target.

    Attributes:
        vocabulary: tokens, those of the target.
        hidden: width.
        heads: heads of its own attention.
        feed_forward: width of the feed-forward part.
        layers: number of layers.
        glimpses: layers of the target, one for each of the draft, whose keys and values it sees;
            empty for a draft that sees none.
        target_type: ``model_type`` of the target.
        target_heads: heads of the target's queries.
        target_dim: size of a head of the target.
        target_hidden: width of the target, compared when the draft is loaded.
        block: tokens of a block of the mask it was trained with.
        target_sign: what the target is known by (`sign_of`); empty where it is not.
    """

    vocabulary: int
    hidden: int
    heads: int
    feed_forward: int
    layers: int
    glimpses: tuple[int, ...]
    target_type: str
    target_heads: int
    target_dim: int
    target_hidden: int
    block: int = 5
    target_sign: tuple[float, ...] = ()

    @property
    def dim(self) -> int:
        """Size of a head of its own attention."""
        return self.hidden // self.heads


class GlideLayer(nn.Module):
    """Attention over its own tokens, over the target's, and a feed-forward part."""

    def __init__(self, config: GlideConfig, number: int) -> None:
        """Makes a layer."""
        super().__init__()
        self.config, self.number = config, number
        width, wide = config.hidden, config.feed_forward
        self.own_norm, self.wide_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.own_out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * wide, bias=False)
        self.down = nn.Linear(wide, width, bias=False)
        if config.glimpses:
            theirs = config.target_heads * config.target_dim
            self.glimpse_norm = nn.RMSNorm(width, eps=1e-6)
            self.glimpse_query = nn.Linear(width, theirs, bias=False)
            self.glimpse_gain = nn.RMSNorm(config.target_dim, eps=1e-6)
            self.glimpse_out = nn.Linear(theirs, width, bias=False)

    def attend(self, x: Tensor, positions: Tensor, own: Tensor, attend: Attend) -> Tensor:
        """Adds the attention over its own tokens to x [B, S, C]."""
        config = self.config
        shape = (*x.shape[:2], 3, config.heads, config.dim)
        query, key, value = self.qkv(self.own_norm(x)).view(shape).permute(2, 0, 3, 1, 4)
        query, key = rotate(query, positions, own), rotate(key, positions, own)
        return x + self.own_out(attend(self.number, query, key, value).flatten(2))

    def look(self, x: Tensor, positions: Tensor, theirs: Tensor | None, glimpse: Glimpse) -> Tensor:
        """Adds the attention over the target's tokens, and the feed-forward part."""
        if self.config.glimpses:
            shape = (*x.shape[:2], self.config.target_heads, self.config.target_dim)
            query = self.glimpse_query(self.glimpse_norm(x)).view(shape).transpose(1, 2)
            if theirs is not None:
                query = rotate(query, positions, theirs)
            seen = self.glimpse_gain(glimpse(self.number, query))
            x = x + self.glimpse_out(seen.flatten(2))
        gate, up = self.gate(self.wide_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Glide(nn.Module):
    """A draft: embedding, layers and a head that shares the embedding's weights."""

    frequencies: Tensor
    target_frequencies: Tensor

    def __init__(self, config: GlideConfig, target_frequencies: Sequence[float] = ()) -> None:
        """Makes a draft with random weights."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(GlideLayer(config, n) for n in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6)
        steps = torch.arange(0, config.dim, 2) / config.dim
        self.register_buffer("frequencies", 10_000.0**-steps)
        self.register_buffer("target_frequencies", torch.tensor(list(target_frequencies)))
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
            if name.endswith("glimpse_out.weight"):
                nn.init.zeros_(weight)  # begins as a draft that sees nothing

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        glimpse: Glimpse,
        last: Tensor | None = None,
    ) -> Tensor:
        """Runs the layers."""
        theirs = self.target_frequencies if len(self.target_frequencies) else None
        # The head has the same weights, and wants them small: Vaswani and others, 2017, 3.4.
        x = self.embedding(tokens) * self.config.hidden**0.5
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, GlideLayer)
            x = layer.attend(x, positions, self.frequencies, attend)
            if last is not None and number == len(self.layers) - 1:
                # Keys and values of the last layer are there; nobody reads what follows of others.
                x, positions = x[:, last], positions[:, last]
            x = layer.look(x, positions, theirs, glimpse)
        return self.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., C]."""
        return F.linear(x, self.embedding.weight)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        seen: Tensor,
        keys: Sequence[Tensor] = (),
        values: Sequence[Tensor] = (),
        teacher: Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy of the next tokens, or with the target's distributions of them."""

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            del number
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return out.transpose(1, 2)

        mask = torch.arange(tokens.shape[1], device=tokens.device)[None] < seen[:, None]
        # A row without any key would be NaN: it sees the first, and its result is dropped.
        some = (seen > 0)[:, None, None]
        mask[:, 0] |= seen == 0

        def glimpse(number: int, query: Tensor) -> Tensor:
            key, value = keys[number].to(query.dtype), values[number].to(query.dtype)
            grouped = query.shape[1] != key.shape[1]
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, enable_gqa=grouped
            )
            return out.transpose(1, 2) * some

        positions = torch.arange(tokens.shape[1], device=tokens.device)[None].expand_as(tokens)
        x = self.hidden(tokens, positions, attend, glimpse)
        if teacher is None:
            found = self.logits(x[:, :-1]).float()
            return F.cross_entropy(found.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        learnt = labels[:, 1:] != -100
        found = self.logits(x[:, :-1][learnt]).float()
        wanted = teacher[:, :-1][learnt].to(found.dtype).softmax(-1)
        # Summed, since a rank without any has no mean.
        return F.cross_entropy(found, wanted, reduction="sum") / learnt.sum().clamp(min=1)


def seen_keys(length: int, block: int, offset: int) -> Tensor:
    """How many of the target's keys each position sees: those of blocks before its own."""
    places = torch.arange(length)
    return ((places + offset) // block * block - offset).clamp(min=0)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Turns pairs of halves of x [B, H, S, D] by positions [B, S] (RoPE, as Llama has it)."""
    angles = positions[:, None, :, None] * frequencies.to(x.device, torch.float32)
    cos, sin = (part.to(x.dtype) for part in (angles.cos(), angles.sin()))
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
