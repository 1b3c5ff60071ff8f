"""Attention of Hugging Face models over shared sequences, and what it must know of a forward.

A `SequenceCall` is made for each forward and passed with the keyword arguments that transformers
models pass on to their attention. So it belongs to that forward alone: micro-batches may be in
flight together, and a block that is recomputed in backward finds the call that it ran with.

transformers makes no dense mask for an attention of this name; what the model asked for is in the
arguments of `attend`, and what the user asked for in the call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from gulliver.booster.hybrid._cache import ShardedCache
from gulliver.errors import GulliverError
from gulliver.parallel.sequence import Mask, SequenceGroups, attention, decode

# The name of this attention, in transformers.
NAME = "gulliver_sequence"

# The keyword argument that carries the call.
KEY = "gulliver_call"

# Arguments that change scores in ways that a `Mask` cannot say.
BIASES = ("position_bias", "softcap", "s_aux", "sinks", "block_mask", "head_mask")


@dataclass
class SequenceCall:
    """One forward."""

    # Ranks that share the sequence.
    groups: SequenceGroups
    # Length of the whole sequence, in tokens; with a cache, of all that was seen.
    length: int = 0
    # Tokens that may be seen, ``[batch, length]`` bool on the CPU; None for all.
    keys: Tensor | None = None
    # Document of each token, ``[batch or 1, length]`` on the CPU; None for one.
    documents: Tensor | None = None
    # Keys and values of this rank, where the call is part of a generation.
    cache: ShardedCache | None = None
    # New tokens, the same on all ranks, look at what the cache holds.
    decoding: bool = False
    _masks: dict[tuple[bool, int | None], Mask] = field(default_factory=dict)

    def mask(self, causal: bool, window: int | None) -> Mask:
        """What a layer's queries see."""
        if (causal, window) not in self._masks:
            self._masks[causal, window] = Mask(
                causal=causal,
                window=None if window is None else (window - 1, None),
                documents=self.documents,
                keys=self.keys,
            )
        return self._masks[causal, window]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, over a sequence that lies on several ranks."""
    call: SequenceCall | None = others.get(KEY)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    _check(module, call, attention_mask, causal, sliding_window, others)
    assert call is not None
    mask = call.mask(causal, sliding_window)
    if call.cache is not None:
        key, value = call.cache.keep(module, key, value)
    if call.decoding:
        out = _decode(query, key, value, call, mask, scaling)
    else:
        out = attention(
            query,
            key,
            value,
            call.groups,
            mask=mask,
            scale=scaling,
            length=call.length,
            dropout=dropout,
        )
    return out.transpose(1, 2), None


def _decode(
    query: Tensor, key: Tensor, value: Tensor, call: SequenceCall, mask: Mask, scaling: float | None
) -> Tensor:
    """New tokens, which all ranks have, look at the keys of all ranks."""
    assert call.cache is not None
    positions = call.cache.asked
    everything = mask.window is None and mask.keys is None and len(positions) == 1
    return decode(
        query,
        key,
        value,
        call.groups,
        mask=None if everything else mask,
        query_positions=positions,
        key_positions=call.cache.positions,
        length=call.length,
        scale=scaling,
    )


def _check(
    module: nn.Module,
    call: SequenceCall | None,
    attention_mask: Tensor | None,
    causal: bool,
    window: int | None,
    others: dict[str, Any],
) -> None:
    name = type(module).__name__
    if call is None:
        raise GulliverError(
            f"{name} was called without what its model's forward prepares: call the wired model, "
            "not a part of it; cross-attention does not run under sequence parallelism"
        )
    if attention_mask is not None:
        raise GulliverError(
            f"{name} got a dense mask of shape {tuple(attention_mask.shape)}: give padding as "
            "attention_mask [batch, length] and documents by position_ids that begin anew"
        )
    found = [bias for bias in BIASES if others.get(bias) is not None]
    if found:
        raise GulliverError(
            f"{name} asks for {found[0]}, which no ring carries: take "
            "sequence_parallelism_mode='split_gather'"
        )
    if window is not None and not causal:
        raise GulliverError(f"{name} asks for a sliding window that is not causal: not supported")
