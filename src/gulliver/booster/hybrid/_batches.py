"""Ranks that share one model must read one batch: whether they do is looked at, not hoped for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.comm import Line, all_gather
from gulliver.errors import GulliverError

SAMPLED = 2**20
"""Bytes looked at of a large tensor, spread over it evenly."""


def watch_batches(model: nn.Module, line: Line) -> None:
    """Compares what a model is called with over the ranks that share it, at every call."""
    if line.size > 1:
        model.register_forward_pre_hook(
            lambda _, args, kwargs: agree_on_batch((args, kwargs), line), with_kwargs=True
        )


def agree_on_batch(batch: Any, line: Line) -> None:
    """Refuses batches that differ between the ranks of a line; every rank of it calls it.

    One number is exchanged. Large tensors are compared by a sample of their bytes.

    Raises:
        GulliverError: naming a rank that has another batch than the first.
    """
    if line.size == 1:
        return
    tensors = list(_leaves(batch))
    device = next((t.device for _, t in tensors if isinstance(t, Tensor)), torch.device("cpu"))
    own = torch.tensor([_digest(tensors)], dtype=torch.int64, device=device)
    found = torch.empty(line.size, dtype=torch.int64, device=device)
    all_gather(found, own, line.group)
    # A group numbers its ranks in ascending order, a line need not.
    by_rank = dict(zip(sorted(line.ranks), found.tolist(), strict=True))
    first = line.ranks[0]
    for rank in line.ranks:
        if by_rank[rank] != by_rank[first]:
            raise GulliverError(
                f"rank {rank} has another batch than rank {first}, and they share one model: give "
                "all ranks of a model the same samples, as booster.plugin.prepare_dataloader does"
            )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{path}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for number, entry in enumerate(value):
            yield from _leaves(entry, f"{path}.{number}")
    elif isinstance(value, Tensor | int | float | str | bool):
        yield path, value


def _digest(leaves: list[tuple[str, Any]]) -> int:
    seen = hashlib.blake2b(digest_size=7)
    for path, value in leaves:
        seen.update(path.encode())
        if isinstance(value, Tensor):
            seen.update(f"{value.dtype}{tuple(value.shape)}".encode())
            seen.update(_sample(value))
        else:
            seen.update(repr(value).encode())
    return int.from_bytes(seen.digest(), "big")


def _sample(tensor: Tensor) -> bytes:
    """Bytes of a tensor, of a large one every so many elements."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() * flat.element_size() // SAMPLED)
    return flat[::step].contiguous().view(torch.uint8).cpu().numpy().tobytes()
