"""Computes losses from logits sharded over vocabulary, sequence or both; gathers outputs.

The loss and gathered tensors leave the sharded part of a model with ``gradient="alike"``: all ranks
of a sequence return and count the same values. [Note: gradients] of sequence parallelism explains
why this is correct when the optimizer averages over these ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.comm.collectives import all_reduce
from gulliver.comm.groups import RankGroup
from gulliver.errors import GulliverError
from gulliver.families.loss import ModelLoss
from gulliver.families.record import Sequences
from gulliver.parallel.sequence.attend import attention
from gulliver.parallel.sequence.layout import SequenceGroups, Tail
from gulliver.parallel.sequence.mask import Mask
from gulliver.parallel.sequence.sharding import position_ids, shard, show, unshard, unshard_tail

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Counting:
    """Rule for averaging token losses."""

    # Label of tokens that are not counted.
    ignore_index: int = -100
    # Divisor of the sum; None for the number of counted tokens on all ranks.
    items: Tensor | int | None = None


def token_losses(
    logits: Tensor,
    labels: Tensor,
    tensor: RankGroup,
    columns: tuple[int, int] | None,
    ignore_index: int = -100,
) -> Tensor:
    if columns is not None:
        from gulliver.parallel.tensor.loss import cross_entropy

        return cross_entropy(logits, labels, tensor, columns, ignore_index)
    wide = logits.float() if logits.dtype in HALVES else logits
    flat = F.cross_entropy(
        wide.flatten(0, 1), labels.flatten(), ignore_index=ignore_index, reduction="none"
    )
    return flat.view(labels.shape)


def mean_over_ranks(
    losses: Tensor, labels: Tensor, groups: SequenceGroups, counting: Counting
) -> Tensor:
    """Averages losses over all counted tokens, which are sharded over ranks."""
    total = losses.sum()
    count = (labels != counting.ignore_index).sum()
    if counting.items is not None:
        count = torch.as_tensor(counting.items, device=losses.device)
    # In float64, so that the reported loss equals that of one process in all digits of its dtype.
    sums = torch.stack([total.detach().double(), count.double()])
    if groups.plan.degree > 1:
        own = sums[1].clone()
        all_reduce(sums, group=groups.all.process_group)
        if counting.items is not None:
            sums[1] = own
    whole = (sums[0] / sums[1]).to(losses.dtype)
    # A batch without counted tokens has a loss of nan, as in torch; its gradients must not be nan,
    # or a step would spread them to all parameters.
    share = total / sums[1].clamp(min=1).to(losses.dtype)
    return show(share, whole, alike=groups.plan.degree)


def leave(x: Tensor, groups: SequenceGroups, length: int) -> Tensor:
    """Gathers a tensor ``[batch, tokens, ...]`` that is sharded by tokens."""
    if groups.plan.degree == 1:
        return x
    return unshard(x, groups, 1, length, gradient="alike")


def leave_tail(x: Tensor, groups: SequenceGroups, tail: Tail) -> Tensor:
    """Gathers only the last tokens of a tensor that is sharded by tokens."""
    if groups.plan.degree == 1:
        return x
    return unshard_tail(x, groups, tail, gradient="alike")


# Attention of Hugging Face models over shared sequences, and the arguments it needs in a forward.
#
# A `SequenceCall` is created for each forward and passed in the keyword arguments that transformers
# models forward to their attention. So micro-batches may be in flight together, and a block that is
# recomputed in backward finds the call of its own forward.
#
# transformers creates no dense mask for an attention with this name: the model's mask settings are
# in the arguments of `attend`, and the user's in the call.


# Name under which transformers finds this attention.
NAME = "gulliver_sequence"

# Keyword argument with the call.
KEY = "gulliver_call"

# Arguments that change scores in ways that a `Mask` cannot express.
BIASES = ("position_bias", "softcap", "s_aux", "sinks", "block_mask", "head_mask")


@dataclass
class SequenceCall:
    """Arguments that attention needs in one forward."""

    # Ranks that share the sequence.
    groups: SequenceGroups
    # Length of the full sequence, in tokens.
    length: int = 0
    # Unmasked tokens, ``[batch, length]`` bool on the CPU; None for all.
    keys: Tensor | None = None
    # Document of each token, ``[batch or 1, length]`` on the CPU; None for a single one.
    documents: Tensor | None = None
    _masks: dict[tuple[bool, int | None], Mask] = field(default_factory=dict)

    def mask(self, causal: bool, window: int | None) -> Mask:
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
    """Attention function for transformers, over a sequence sharded over ranks."""
    call: SequenceCall | None = others.get(KEY)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    _check(module, call, attention_mask, causal, sliding_window, others)
    assert call is not None
    mask = call.mask(causal, sliding_window)
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
            f"{name} was called outside the model's forward: call the full model, not a part of "
            "it; cross-attention is not supported with sequence parallelism"
        )
    if attention_mask is not None:
        raise GulliverError(
            f"{name} got a dense mask of shape {tuple(attention_mask.shape)}; pass padding as "
            "attention_mask [batch, length], and document boundaries as position_ids that restart "
            "at 0"
        )
    found = [bias for bias in BIASES if others.get(bias) is not None]
    if found:
        raise GulliverError(
            f"{name} needs {found[0]}, which ring attention does not support: use "
            "sequence_parallelism_mode='split_gather'"
        )
    if window is not None and not causal:
        raise GulliverError(
            f"{name} needs a sliding window that is not causal, which is not supported"
        )


# Splits the arguments of a forward: this rank's tokens for the model, the rest for the call.
#
# All ranks of a sequence get the full batch, as a single process would. Arguments along the tokens
# are sharded; those that describe masks become part of the `SequenceCall`; those of the loss are
# kept until there are logits; plain values are passed on. Other tensors are rejected.


ALONG_TOKENS = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")
MASKS = ("attention_mask", "document_ids", "cu_seq_lens_q", "cu_seq_lens_k")
MASK_SIZES = ("max_length_q", "max_length_k")
TARGETS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")
# Arguments read by modules outside the sharded part.
WHOLE = ("pixel_values", "bool_masked_pos")


@dataclass
class Targets:
    """Labels of a forward, and how their loss is averaged."""

    # Labels of this rank's tokens, aligned with its logits.
    labels: Tensor
    # How losses are averaged.
    counting: Counting


@dataclass
class OpenedForward:
    """State of a forward in flight."""

    # Arguments for attention.
    call: SequenceCall
    # Labels for the loss; None if the model computes its loss itself, or no loss is needed.
    targets: Targets | None = None
    # Last tokens whose logits are requested, if not all.
    tail: Tail | None = None
    # Whether logits stay sharded.
    hold: bool = False
    # Whether the user requested a tuple.
    as_tuple: bool = False
    # Whether the sequence is sharded at all.
    shared: bool = True
    # Whether the router loss of all tokens is added.
    balances: bool = False


@dataclass
class CallArguments:
    """Arguments of a forward by name; readers pop the arguments they handle."""

    # Arguments not handled yet.
    kwargs: dict[str, Any]
    # Class name of the model, for messages.
    model: str

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        """Collects the arguments of a forward; positional ones get their parameters' names."""
        names = [p.name for p in _parameters(module.forward) if p.kind != p.VAR_KEYWORD]
        if len(args) > len(names):
            raise GulliverError(f"{type(module).__name__} takes at most {len(names)} arguments")
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        return cls({k: v for k, v in named.items() if v is not None}, type(module).__name__)

    def take(self, name: str, default: Any = None) -> Any:
        return self.kwargs.pop(name, default)

    def shape(self) -> tuple[int, int, torch.device]:
        """Returns batch size, sequence length and device of the tokens."""
        for name in ("input_ids", "inputs_embeds"):
            tensor = self.kwargs.get(name)
            if isinstance(tensor, Tensor):
                if tensor.dim() != (2 if name == "input_ids" else 3):
                    raise GulliverError(
                        f"{name} of shape {tuple(tensor.shape)}: expected [batch, length"
                        f"{', hidden' if name == 'inputs_embeds' else ''}]"
                    )
                return tensor.shape[0], tensor.shape[1], tensor.device
        raise GulliverError(f"{self.model} needs input_ids or inputs_embeds")

    def check_all_known(self, known: tuple[str, ...]) -> None:
        for name, value in self.kwargs.items():
            plain = value is None or isinstance(value, bool | int | float | str)
            if name not in known and not plain:
                raise GulliverError(f"{name} is not supported with sequence parallelism: omit it")
        if self.kwargs.get("output_attentions"):
            raise GulliverError(
                "output_attentions=True needs all scores on one rank, which sequence parallelism "
                "does not provide; omit it"
            )


def sharded_labels(batch: CallArguments, groups: SequenceGroups, own: ModelLoss) -> Targets | None:
    """Returns this rank's labels, shifted by one token before sharding."""
    labels, aligned = batch.take("labels"), batch.take("shift_labels")
    ignore = batch.take("ignore_index", -100)
    items = batch.take("num_items_in_batch")
    if labels is None:
        return None
    if own.shifted:
        shift = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignore)
        labels = shift if aligned is None else aligned
    if groups.plan.degree > 1:
        labels = shard(labels, groups)
    return Targets(labels, Counting(ignore, items if own.items else None))


def cut_tokens(batch: CallArguments, groups: SequenceGroups, known: Sequences) -> SequenceCall:
    """Keeps this rank's tokens of a batch; returns the arguments that attention needs."""
    count, length, device = batch.shape()
    check_length(groups, length)
    call = SequenceCall(groups, length)
    mask = _padding(batch, count, length)
    call.keys = None if mask is None or bool(mask.all()) else mask
    call.documents = _documents(batch, mask is not None, length, known)
    explicit = batch.take("document_ids") is not None
    positions = batch.take("position_ids")
    if positions is None and known.positions is not None and mask is not None:
        positions = known.positions(mask).to(device)
    if positions is None:
        documents = call.documents if explicit else None
        own = position_ids(groups, length, documents)
        positions = own if own.dim() == 2 else own.unsqueeze(0)
    else:
        positions = shard(positions.view(-1, length), groups)
    batch.kwargs["position_ids"] = positions.to(device)
    for name in ("input_ids", "inputs_embeds", "token_type_ids"):
        if name in batch.kwargs:
            # Gradients of inputs are not reduced later: each rank gets those of one process.
            batch.kwargs[name] = shard(batch.kwargs[name], groups, gradient="mean")
    return call


def _padding(batch: CallArguments, count: int, length: int) -> Tensor | None:
    mask = batch.take("attention_mask")
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != (count, length):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise GulliverError(
            f"attention_mask {shape}: expected 0s and 1s of shape [{count}, {length}]; describe "
            "other masks by position_ids that restart, or document_ids"
        )
    return mask.detach().cpu() != 0


def _documents(batch: CallArguments, padded: bool, length: int, known: Sequences) -> Tensor | None:
    """Returns the document id of each token; None for a single document."""
    ids = batch.kwargs.get("document_ids")
    ends, key_ends = batch.take("cu_seq_lens_q"), batch.take("cu_seq_lens_k")
    for name in MASK_SIZES:
        batch.take(name)
    if ids is not None:
        ids = ids.detach().cpu()
        return ids if ids.dim() == 2 else ids.unsqueeze(0)
    if ends is not None:
        if key_ends is not None and not torch.equal(ends, key_ends):
            raise GulliverError("cu_seq_lens_q and cu_seq_lens_k differ: pass the same for both")
        documents = Mask.packed(ends).documents
        assert documents is not None
        if len(documents) != length:
            raise GulliverError(
                f"cu_seq_lens_q ends at {len(documents)}, but the sequence has {length} tokens"
            )
        return documents.unsqueeze(0)
    positions = batch.kwargs.get("position_ids")
    if positions is None or padded or not known.by_positions:
        return None
    found = positions.detach().cpu().view(-1, length)
    begins = found.diff(prepend=found[:, :1] - 1, dim=-1) != 1
    return begins.cumsum(-1) if bool(begins.any()) else None


def check_length(groups: SequenceGroups, length: int) -> None:
    if min(groups.plan.lay(length).sizes()) == 0:
        least = next(
            n for n in range(length, 4 * groups.plan.degree + 1) if min(groups.plan.lay(n).sizes())
        )
        raise GulliverError(
            f"a sequence of {length} tokens is too short for {groups.plan}: pad it to {least} or "
            "use fewer ranks"
        )


def _parameters(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(forward).parameters.values())
