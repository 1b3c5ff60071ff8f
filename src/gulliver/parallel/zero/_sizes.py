"""How tensors are cut into chunks, on plain numbers: for the optimizer and for who plans one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gulliver.memory import ChunkLayout, plan_chunks

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TensorSize:
    """A parameter as one rank holds it before it is sharded.

    Attributes:
        name: name in the whole model.
        numel: number of elements.
        dtype: dtype of the parameter.
        device: device that it is on.
        trained: whether the optimizer steps it.
        states: elements of each tensor that the optimizer keeps for it, before it is sharded.
        whole: whether the optimizer has to have it whole.
        sleeping: whether it is frozen, and the optimizer steps it once it is unfrozen.
        beside: whether the optimizer has its first state beside what is placed.
        places: places among all names of parameters of the model; a tied one has several.
    """

    name: str
    numel: int
    dtype: torch.dtype
    device: torch.device
    trained: bool = True
    states: tuple[int, ...] = ()
    whole: bool = False
    sleeping: bool = False
    beside: bool = False
    places: tuple[int, ...] = ()


def shard_dtype(dtype: torch.dtype, trained: bool) -> torch.dtype:
    """Dtype of the shards of parameters: 16 bits are trained through float32 copies."""
    return torch.float32 if trained and dtype in HALVES else dtype


def chunk_layouts(
    tensors: Sequence[TensorSize], chunk_bytes: int, stage: int, ranks: int
) -> Iterator[tuple[ChunkLayout, torch.dtype]]:
    """Cuts tensors in their order into chunks of one dtype and device each.

    Args:
        tensors: all trained, or all frozen.
        chunk_bytes: size of a chunk, in bytes.
        stage: stage of ZeRO.
        ranks: number of ranks that they are shared by.
    """
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
    """Layout, dtype and whether it is trained of all chunks, in the order of use of the tensors.

    Args:
        tensors: parameters of a rank; frozen ones are in chunks where the stage is 3.
        order: names in the order of use; those that it leaves out come last; without any it is
            that of the tensors.
        chunk_bytes: size of a chunk, in bytes.
        stage: stage of ZeRO.
        ranks: number of ranks that they are shared by.
    """
    place = {name: number for number, name in enumerate(order or [t.name for t in tensors])}
    found = []
    kinds = ((True, False), (False, True), (False, False))  # as of `ShardedState.kinds`
    for trained, sleeping in kinds if stage == 3 else kinds[:1]:
        kind = [t for t in tensors if (t.trained, t.sleeping) == (trained, sleeping)]
        kind.sort(key=lambda t: place.get(t.name, len(place)))
        layouts = chunk_layouts(kind, chunk_bytes, stage, ranks)
        found += [(layout, dtype, trained) for layout, dtype in layouts]
    found.sort(key=lambda one: min(place.get(s.name, len(place)) for s in one[0].slots))
    return found
