"""The agreement before a run: whether ranks of a model read the same batch, and their states.

One gather of two numbers from each rank. The batches are compared by shapes, dtypes and a sample
of their bytes: every stage reads the whole batch, and two stages with different data would train
on nonsense without an error. The other number tells apart states in which a stage would send other
tensors (training or not, which parameters are frozen, autocast), so that both ends of a cut know
together when shapes have to be announced again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gulliver.comm import RankGroup, all_gather
from gulliver.errors import GulliverError
from gulliver.parallel.pipeline._batch import leaves

PLAIN = (bool, int, float, str)
SAMPLED = 2**20
"""Bytes looked at of a large tensor, spread over it evenly."""


def agree(
    batch: Any,
    state: str,
    rank_groups: Sequence[RankGroup],
    device: torch.device,
    check: bool,
) -> str:
    """Compares the batches of ranks that share a model; every one of them calls this."""
    seen, agreed, wrong = digest(batch) if check else 0, "", None
    shared = [rank_group for rank_group in rank_groups if rank_group.size > 1]
    for rank_group in shared:
        by_rank = _gathered(seen, _number(state.encode()), rank_group, device)
        first = rank_group.ranks[0]
        differing = (rank for rank in rank_group.ranks if by_rank[rank][0] != by_rank[first][0])
        # Where an earlier axis found it, the number of a rank here is that of all its partners.
        wrong = wrong or next(((rank, first) for rank in differing), None)
        agreed = agreed or ",".join(str(by_rank[rank][1]) for rank in rank_group.ranks)
        seen = _number(str([by_rank[rank][0] for rank in rank_group.ranks]).encode())
    if wrong is not None:
        or_else = ", or a partner of it," if len(shared) > 1 else ""
        raise GulliverError(
            f"rank {wrong[0]}{or_else} has another batch than rank {wrong[1]}, and they share one "
            "model: give all ranks of a model the same samples"
        )
    return agreed or state


def _gathered(
    seen: int, state: int, rank_group: RankGroup, device: torch.device
) -> dict[int, list[int]]:
    """Gathers two numbers of each rank of a group."""
    own = torch.tensor([seen, state], dtype=torch.int64, device=device)
    found = torch.empty(2 * rank_group.size, dtype=torch.int64, device=device)
    all_gather(found, own, rank_group.process_group)
    # A group numbers its ranks in ascending order, a rank group need not.
    return dict(zip(sorted(rank_group.ranks), found.view(-1, 2).tolist(), strict=True))


def digest(batch: Any) -> int:
    """Returns a number that is equal for equal batches."""
    seen = hashlib.blake2b(digest_size=7)
    for path, value in leaves(batch):
        seen.update(path.encode())
        if isinstance(value, Tensor):
            seen.update(f"{value.dtype}{tuple(value.shape)}".encode())
            seen.update(_sample(value))
        elif value is None or isinstance(value, PLAIN):
            seen.update(repr(value).encode())
        else:
            # What else there is, such as a cache, is shown by its address: each rank has its own.
            seen.update(type(value).__name__.encode())
    return int.from_bytes(seen.digest(), "big")


def _number(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def _sample(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() * flat.element_size() // SAMPLED)
    return flat[::step].contiguous().view(torch.uint8).cpu().numpy().tobytes()
