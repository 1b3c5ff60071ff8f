"""How tensors are cut into chunks, on plain numbers: for the optimizer and for who plans one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gulliver.memory import ChunkLayout, plan_chunks

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TensorSize:
    """A parameter as one rank holds it before it is sharded."""

    name: str
    numel: int
    dtype: torch.dtype
    device: torch.device
    trained: bool = True
    # Elements of each tensor that the optimizer keeps for it, before it is sharded.
    states: tuple[int, ...] = ()
    # Whether the optimizer has to have it whole.
    whole: bool = False
    # Whether it is frozen, and the optimizer steps it once it is unfrozen.
    frozen_trainable: bool = False
    # Whether the optimizer makes its first state in addition to what is placed.
    beside: bool = False
    # Places among all names of parameters of the model; a tied one has several.
    places: tuple[int, ...] = ()


def shard_dtype(dtype: torch.dtype, trained: bool) -> torch.dtype:
    """Dtype of the shards of parameters: 16 bits are trained through float32 copies."""
    return torch.float32 if trained and dtype in HALVES else dtype


def chunk_layouts(
    tensors: Sequence[TensorSize], chunk_bytes: int, stage: int, ranks: int
) -> Iterator[tuple[ChunkLayout, torch.dtype]]:
    """Cuts tensors in their order into chunks of one dtype and device each."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, int]]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append((tensor.name, tensor.numel))
    parts = ranks if stage else 1
    # An all-reduce goes in parts, too: a chunk that has them needs no padding on the way.
    align = 16 if parts > 1 else 16 * ranks
    whole = any(tensor.whole for tensor in tensors)
    for (dtype, _), sizes in kinds.items():
        capacity = max(1, chunk_bytes // dtype.itemsize)
        for layout in plan_chunks(sizes, capacity, parts, align, whole):
            yield layout, dtype


def ordered_layouts(
    tensors: Sequence[TensorSize], order: Sequence[str], chunk_bytes: int, stage: int, ranks: int
) -> list[tuple[ChunkLayout, torch.dtype, bool]]:
    """Layout, dtype and whether it is trained of all chunks, in the order of use of the tensors."""
    place = {name: number for number, name in enumerate(order or [t.name for t in tensors])}
    found = []
    kinds = ((True, False), (False, True), (False, False))  # as of `ShardedState.kinds`
    for trained, sleeping in kinds if stage == 3 else kinds[:1]:
        kind = [t for t in tensors if (t.trained, t.frozen_trainable) == (trained, sleeping)]
        kind.sort(key=lambda t: place.get(t.name, len(place)))
        layouts = chunk_layouts(kind, chunk_bytes, stage, ranks)
        found += [(layout, dtype, trained) for layout, dtype in layouts]
    found.sort(key=lambda one: min(place.get(s.name, len(place)) for s in one[0].slots))
    return found
