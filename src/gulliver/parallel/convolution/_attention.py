"""Attention over tokens of which this process holds a part, and without a mask of their square.

Keys and values are gathered (`Holder.whole`): the middle of an autoencoder works at the size of the
latents, a hundredth of what its outer layers hold. Queries stay where they are, and are taken some
rows at a time, so that no more than `SCORES` scores exist at once where a kernel keeps them.

`frame_causal_attention` is what HunyuanVideo's autoencoder asks for with a mask of tokens x tokens
(198 GiB for 129 frames of 720p): every frame sees itself and those before it, so it is one plain
attention for each frame over the keys up to its end.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from gulliver.layout import Interval
from gulliver.parallel.convolution._shapes import given_of
from gulliver.parallel.convolution._sharded import Sharded, handles, like, own_run, refuse

SCORES = 1 << 26
"""Most scores of a block of rows: 256 MiB of float32."""


def frame_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, tokens: int, scale: float | None = None
) -> Tensor:
    """Computes attention in which tokens see those of their own frame and of earlier ones."""
    given = q, k, v
    if has_torch_function(given):
        return handle_torch_function(frame_causal_attention, given, q, k, v, tokens, scale)
    return _causal(q, k, v, [(0, q.shape[2])], tokens, scale)


@handles("frame_causal_attention")
def _frame_causal(func: Any, args: Any, kwargs: Any) -> Sharded:
    q, k, v, tokens, scale = args
    if q.cut.dim != 2:
        refuse("frame-causal attention with cut heads or features", q)
    whole = [t.holder.whole(t, (name, 0)) for t, name in ((k, "keys"), (v, "values"))]
    return like(q, _causal(q.local, whole[0], whole[1], _runs_of(q), tokens, scale))


@handles("scaled_dot_product_attention")
def _attention(func: Any, args: Any, kwargs: Any) -> Sharded:
    q, k, v, *given = args
    mask, dropout, causal, scale = given_of(
        given, kwargs, ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False),
        ("scale", None),
    )  # fmt: skip
    if dropout:
        refuse("attention dropout", q)
    at = q.cut.dim - q.dim()
    if at < -2:
        return _of_rows(q, k, v, mask, causal, scale)
    if at == -1:
        refuse("attention with cut features", q)
    if not causal and not hasattr(q.holder, "relay"):
        refuse("attention over frames that are still to come", q, "it must be causal")
    keys, values = q.holder.whole(k, ("keys", 0)), q.holder.whole(v, ("values", 0))
    if causal:
        return like(q, _causal(q.local, keys, values, _runs_of(q), 1, scale))
    if mask is not None:
        mask = mask[..., _positions(q), :] if mask.shape[-2] > 1 else mask
    return like(q, _rows(q.local, keys, values, mask, scale))


def _of_rows(
    q: Sharded, k: Sharded, v: Sharded, mask: Tensor | None, causal: bool, scale: float | None
) -> Sharded:
    """Samples or heads are cut: attention within each is local."""
    if mask is not None and mask.dim() + q.cut.dim - q.dim() >= 0:
        refuse("attention with a mask of its own for each cut sample", q)
    if not q.local.numel():
        return like(q, q.local + 0 * (k.local + v.local))
    options = {"attn_mask": mask, "is_causal": causal, "scale": scale}
    return like(q, F.scaled_dot_product_attention(q.local, k.local, v.local, **options))


def _rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attends for some rows of queries at a time."""
    if not q.shape[-2]:
        return q[..., :0] @ k[..., :0].mT @ v
    step = max(1, SCORES // max(1, q[..., 0, 0].numel() * k.shape[-2]))
    parts = []
    for start in range(0, q.shape[-2], step):
        rows = None if mask is None else mask
        if rows is not None and rows.shape[-2] > 1:
            rows = rows[..., start : start + step, :]
        part = q[..., start : start + step, :]
        parts.append(F.scaled_dot_product_attention(part, k, v, attn_mask=rows, scale=scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def _causal(
    q: Tensor, k: Tensor, v: Tensor, runs: list[Interval], tokens: int, scale: float | None
) -> Tensor:
    """Attends to the keys up to the end of each query's frame."""
    parts, at = [], 0
    for start, stop in runs:
        held = q[..., at : at + stop - start, :]
        at += stop - start
        parts += _causal_run(held, k, v, start, tokens, scale)
    if not parts:
        return q[..., :0] @ k[..., :0].mT @ v
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def _causal_run(
    q: Tensor, k: Tensor, v: Tensor, start: int, tokens: int, scale: float | None
) -> list[Tensor]:
    parts, done, length = [], 0, q.shape[-2]
    heads = max(1, q[..., 0, 0].numel()) if length else 1
    while done < length:
        first = start + done
        if tokens > 1:
            # All rows of a frame see the same keys: no mask at all.
            end = (first // tokens + 1) * tokens
            count, mask = min(length - done, end - first), None
        else:
            count = min(length - done, max(1, SCORES // (heads * (start + length))))
            end = first + count
            rows = torch.arange(first, end, device=q.device)
            mask = torch.arange(end, device=q.device) <= rows.unsqueeze(1)
        part = q[..., done : done + count, :]
        parts.append(_rows(part, k[..., :end, :], v[..., :end, :], mask, scale))
        done += count
    return parts


def _runs_of(x: Sharded) -> list[Interval]:
    """Returns the runs of tokens held here, among all tokens."""
    start, stop = own_run(x)
    cut = x.cut
    period = cut.extent * cut.inner
    if start == stop:
        return []
    return [
        (frame * period + start * cut.inner, frame * period + stop * cut.inner)
        for frame in range(cut.outer)
    ]


def _positions(x: Sharded) -> Tensor:
    empty = torch.arange(0, device=x.local.device)
    return torch.cat([empty] + [torch.arange(*run, device=empty.device) for run in _runs_of(x)])
