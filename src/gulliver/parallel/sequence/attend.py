"""The `attention` function, for sequences that are sharded over several ranks.

    groups = make_groups(SequencePlan(ulysses=2, inner=2, layout="zigzag"))
    out = attention(q, k, v, groups, mask=Mask(causal=True))

Ulysses first exchanges tokens for heads within its group, then the ring circulates keys and values
between groups, and Ulysses exchanges the output back. No state is kept between calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from gulliver._compat import uncompiled
from gulliver.comm.messages import gather_integers
from gulliver.errors import GulliverError
from gulliver.parallel.sequence.heads import Heads, Swap, ToHeads, ToSequence, deal_heads
from gulliver.parallel.sequence.kernels import (
    DTYPES,
    HALVES,
    BlockArguments,
    readable,
    requirements_of,
    select,
)
from gulliver.parallel.sequence.layout import Layout, SequenceGroups
from gulliver.parallel.sequence.mask import Mask
from gulliver.parallel.sequence.ring import RingAttention, RingCall


# [Note: Ulysses inside, ring outside] Ulysses sends less, (u - 1) / u of q, k, v and output, but
# its messages are exposed and there can be no more ranks than heads. The ring sends every block to
# all ranks, but overlaps with compute, and has no limit. So neighbors with fast links exchange
# heads, and the ring uses the slower links (Fang and Zhao, USP, 2024, arXiv 2405.07719).
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: SequenceGroups,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    length: int | None = None,
    key_length: int | None = None,
    kernel: str | None = None,
    deterministic: bool | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Computes exact softmax attention for any layout (collective over the sequence).

    Without `length`, ranks first compare shapes and masks, which costs small messages and a GPU
    synchronization. Gradients are those of the sum of all ranks' losses.

    Autocast applies to q, k and v as in torch's own attention.

    Args:
        q: this rank's queries, ``[batch, heads, local length, head dim]``.
        k: this rank's keys, ``[batch, KV heads, local key length, head dim]``; the number of KV
            heads divides the number of heads.
        v: this rank's values, ``[batch, KV heads, local key length, value dim]``.
        groups: rank groups of the plan; queries and keys have to be sharded in the plan's layout.
        mask: visible keys of each query, by positions in the full sequence; None for all. A query
            without visible keys outputs zeros and has zero gradients.
        scale: factor of the logits; None is ``1 / sqrt(head dim)``.
        length: tokens of the full sequence; None gathers it from all ranks.
        key_length: tokens of a cross-attention's keys; None for `length`, if given.
        kernel: name of a kernel, "reference", "cpu flash", "cuda flash" or "cuda efficient"; None
            for the fastest suitable one.
        deterministic: whether results must be bitwise reproducible; None follows torch's setting.
            (Blocks are always merged in the same order.)
        dropout: must be 0; dropout of attention weights is not supported.

    Returns:
        Outputs ``[batch, heads, local length, value dim]`` of q's dtype.

    Raises:
        GulliverError: shapes, dtypes or the kernel are not supported; the ranks' arguments differ.
    """
    q, k, v = _autocast(q, k, v)
    _check_arguments(q, k, v, mask, dropout)
    q, k, v = (readable(t) for t in (q, k, v))
    options = scale, length, key_length, kernel, deterministic
    return _eager(q, k, v, groups, mask or Mask(), *options)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: SequenceGroups,
    mask: Mask,
    scale: float | None,
    length: int | None,
    key_length: int | None,
    kernel: str | None,
    deterministic: bool | None,
) -> Tensor:
    heads = deal_heads(q.shape[1], k.shape[1], groups.plan.ulysses)
    queries, keys = _layouts(q, k, v, groups, mask, length, key_length)
    deterministic = (
        torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    )
    if kernel is not None:
        # Rejected here on all ranks, rather than on the rank that computes the first block.
        _ = [
            select(requirements_of(q, v, kind, deterministic), kernel)
            for kind in _kinds(mask, queries)
        ]
    how = BlockArguments(
        1 / math.sqrt(q.shape[3]) if scale is None else scale,
        mask.rules(q.shape[0], queries.length, keys.length),
        heads.runs(groups.ulysses.rank),
        kernel,
        deterministic,
    )
    call = RingCall(groups, queries, keys, how)
    if groups.plan.ulysses == 1:
        return _apply(q, k, v, call)
    swap = _swap(heads, groups, queries, keys)
    q, k, v = ToHeads.apply(swap, q, k, v)
    out = _apply(q, k, v, call)
    back = Swap(swap.rank_group, swap.heads[:1], swap.lengths[:1], swap.totals[:1])
    return ToSequence.apply(back, out)


# Communication cannot be traced; the model around it can.
_eager: Callable[..., Tensor] = uncompiled(_attention)


def _apply(q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> Tensor:
    return RingAttention.apply(q, k, v, call)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype in (torch.float32, *HALVES) else t for t in tensors)


def _check_arguments(q: Tensor, k: Tensor, v: Tensor, mask: object, dropout: float) -> None:
    if dropout:
        raise GulliverError(
            f"attention dropout {dropout} is not supported over several ranks: set it to 0 "
            "(dropout elsewhere is supported)"
        )
    if not (mask is None or isinstance(mask, Mask)):
        raise GulliverError(
            f"a mask of type {type(mask).__name__} is not supported: describe it with "
            "Mask(causal=..., window=..., documents=..., key_lengths=..., keys=...)"
        )
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise GulliverError(
            f"q, k and v of shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} must be "
            "[batch, heads, length, head dim]"
        )
    if not (q.dtype == k.dtype == v.dtype and q.dtype in DTYPES):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise GulliverError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: use the same dtype for all, one "
            f"of {names}"
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise GulliverError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not match: all need "
            "the same batch size, q and k need the same head dim, and k and v need the same heads "
            "and length"
        )


def _layouts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: SequenceGroups,
    mask: Mask,
    length: int | None,
    key_length: int | None,
) -> tuple[Layout, Layout]:
    own = {groups.rank: (q.shape[2], k.shape[2])}
    if length is None:
        held = dict(enumerate(_compare_lengths(q, k, v, groups, mask)))
        length = sum(of_q for of_q, _ in held.values())
        asked = sum(of_k for _, of_k in held.values())
        key_length = asked if key_length is None else key_length
    else:
        held = own
    key_length = length if key_length is None else key_length
    layouts = groups.plan.lay(length), groups.plan.lay(key_length)
    for number, name in enumerate(("q", "k and v")):
        wanted = layouts[number].sizes()
        for rank, lengths in held.items():
            if lengths[number] != wanted[rank]:
                raise GulliverError(
                    f"rank {rank} holds {lengths[number]} tokens of {name}, but the "
                    f"{groups.plan.layout} layout of {layouts[number].length} tokens gives the "
                    f"ranks {_short(wanted)}; shard sequences with shard()"
                )
    return layouts


def _compare_lengths(
    q: Tensor, k: Tensor, v: Tensor, groups: SequenceGroups, mask: Mask
) -> list[tuple[int, int]]:
    """Gathers all ranks' lengths, and compares settings that must be equal."""
    if groups.plan.degree == 1:
        return [(q.shape[2], k.shape[2])]
    names = ("batch", "heads", "KV heads", "head dim", "value dim", "dtype", "mask")
    same = (*q.shape[:2], k.shape[1], q.shape[3], v.shape[3], DTYPES.index(q.dtype))
    own = (q.shape[2], k.shape[2], *same, mask.digest())
    ranks = gather_integers(groups.all, own, q.device)
    for number, name in enumerate(names):
        found = [values[2 + number] for values in ranks]
        if len(set(found)) > 1:
            shown = "differ" if name in ("mask", "dtype") else f"are {_short(found)}"
            raise GulliverError(
                f"ranks of one sequence differ: {name} {shown}; pass each rank its part of the "
                "same batch"
            )
    return [(values[0], values[1]) for values in ranks]


def _short(values: list[int]) -> str:
    shown = [str(value) for value in values[:8]]
    return ", ".join(shown + ["..."] * (len(values) > 8))


def _kinds(mask: Mask, queries: Layout) -> tuple[Literal["plain", "causal", "masked"], ...]:
    contents = (mask.documents, mask.key_lengths, mask.query_lengths, mask.keys)
    if mask.window is not None or any(part is not None for part in contents):
        return ("plain", "causal", "masked") if mask.causal else ("plain", "masked")
    return ("plain", "causal") if mask.causal else ("plain",)


def _swap(heads: Heads, groups: SequenceGroups, queries: Layout, keys: Layout) -> Swap:
    first = groups.place * groups.plan.ulysses
    of_q, of_k = (
        tuple(layout.sizes()[first : first + groups.plan.ulysses]) for layout in (queries, keys)
    )
    totals = heads.queries[-1][1], heads.keys[-1][1]
    return Swap(
        groups.ulysses,
        (heads.queries, heads.keys, heads.keys),
        (of_q, of_k, of_k),
        (totals[0], totals[1], totals[1]),
    )
