"""Splits the arguments of a forward: this rank's tokens for the model, the rest for the call.

All ranks of a sequence are called with the whole batch, as one process would be. Arguments along
the tokens are cut; those that describe masks become part of the `SequenceCall`; those of the loss
are kept until the logits are there; plain values pass. Any other tensor is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster.hybrid._cache import ShardedCache
from gulliver.booster.hybrid._call import SequenceCall
from gulliver.booster.hybrid._loss import Counting
from gulliver.errors import GulliverError
from gulliver.families import OwnLoss, Sequences
from gulliver.parallel.sequence import Mask, SequenceGroups, Tail, position_ids, shard

ALONG_TOKENS = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")
MASKS = ("attention_mask", "document_ids", "cu_seq_lens_q", "cu_seq_lens_k")
MASK_SIZES = ("max_length_q", "max_length_k")
TARGETS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")
# Arguments that modules outside the sharded part read.
WHOLE = ("pixel_values", "bool_masked_pos")


@dataclass
class Targets:
    """Labels of a forward and how their mean is made."""

    # Labels of this rank's tokens, aligned with its logits.
    labels: Tensor
    # How the mean is made.
    counting: Counting


@dataclass
class OpenedForward:
    """A forward in flight."""

    # What its attention is given.
    call: SequenceCall
    # What the loss needs; None where the model computes its loss itself, or none is asked for.
    targets: Targets | None = None
    # Last tokens whose logits are asked for, where not all are.
    tail: Tail | None = None
    # Whether the logits stay where they are.
    hold: bool = False
    # Whether the user asked for a tuple.
    as_tuple: bool = False
    # Whether the sequence is cut at all.
    shared: bool = True
    # Whether the routers' loss of all tokens is added.
    balances: bool = False


@dataclass
class CallArguments:
    """Arguments by name, from which the reader takes what it understands."""

    # What is left.
    kwargs: dict[str, Any]
    # Name of the model's class, for messages.
    model: str

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        """The arguments of a forward, those without a name under the name that they have."""
        names = [p.name for p in _parameters(module.forward) if p.kind != p.VAR_KEYWORD]
        if len(args) > len(names):
            raise GulliverError(f"{type(module).__name__} takes {len(names)} arguments, not more")
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        return cls({k: v for k, v in named.items() if v is not None}, type(module).__name__)

    def take(self, name: str, default: Any = None) -> Any:
        """An argument, taken out."""
        return self.kwargs.pop(name, default)

    def shape(self) -> tuple[int, int, torch.device]:
        """Batch size, length and device of the tokens."""
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

    def refuse_rest(self, known: tuple[str, ...]) -> None:
        """Refuses what no part of the library understands."""
        for name, value in self.kwargs.items():
            plain = value is None or isinstance(value, bool | int | float | str)
            if name not in known and not plain:
                raise GulliverError(
                    f"{name} is not supported where a sequence is shared by several ranks: "
                    "leave it out"
                )
        if self.kwargs.get("output_attentions"):
            raise GulliverError(
                "output_attentions=True needs all scores in one place, and no rank has them: "
                "leave it out"
            )


def take_targets(batch: CallArguments, groups: SequenceGroups, own: OwnLoss) -> Targets | None:
    """The labels of this rank's tokens, shifted before they are cut."""
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
    """Leaves this rank's tokens in the batch, and returns what attention must know."""
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
            # Nobody reduces the gradient of what a user gives: each rank gets it as one process.
            batch.kwargs[name] = shard(batch.kwargs[name], groups, gradient="mean")
    return call


def next_tokens(batch: CallArguments, groups: SequenceGroups, cache: ShardedCache) -> SequenceCall:
    """A call of new tokens, which all ranks have, after those in the cache."""
    count, length, _ = batch.shape()
    cache.begin(length)
    mask = _padding(batch, count, cache.length)
    keys = None if mask is None or bool(mask.all()) else mask
    return SequenceCall(groups, cache.length, keys, None, cache, decoding=True)


def _padding(batch: CallArguments, count: int, length: int) -> Tensor | None:
    mask = batch.take("attention_mask")
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != (count, length):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise GulliverError(
            f"attention_mask {shape}: expected 0 and 1 of shape [{count}, {length}]; other masks "
            "are described by position_ids that begin anew, or document_ids"
        )
    return mask.detach().cpu() != 0


def _documents(batch: CallArguments, padded: bool, length: int, known: Sequences) -> Tensor | None:
    """The document that each token belongs to; None for one."""
    ids = batch.kwargs.get("document_ids")
    ends, key_ends = batch.take("cu_seq_lens_q"), batch.take("cu_seq_lens_k")
    for name in MASK_SIZES:
        batch.take(name)
    if ids is not None:
        ids = ids.detach().cpu()
        return ids if ids.dim() == 2 else ids.unsqueeze(0)
    if ends is not None:
        if key_ends is not None and not torch.equal(ends, key_ends):
            raise GulliverError("cu_seq_lens_q and cu_seq_lens_k differ: give the same")
        documents = Mask.packed(ends).documents
        assert documents is not None
        if len(documents) != length:
            raise GulliverError(
                f"cu_seq_lens_q ends at {len(documents)}, the sequence has {length} tokens"
            )
        return documents.unsqueeze(0)
    positions = batch.kwargs.get("position_ids")
    if positions is None or padded or not known.by_positions:
        return None
    found = positions.detach().cpu().view(-1, length)
    begins = found.diff(prepend=found[:, :1] - 1, dim=-1) != 1
    return begins.cumsum(-1) if bool(begins.any()) else None


def check_length(groups: SequenceGroups, length: int) -> None:
    """Refuses sequences that are too short to give each rank a token."""
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
